"""Exceptions from the store and its files."""

from __future__ import annotations


class BackendError(Exception):
    """The storage backend cannot be read or written. The message names the file and the reason."""


class IncompleteChangeError(BackendError):
    """The storage backend failed while a change of the store was written, for example because the disk is full.

    Args:
        error: The error from the backend.
        written: The number of entries that were written before the failure.
        unwritten_tests: The tests, as (file, test), whose entries should have been written or removed, but were not.
    """

    def __init__(self, error: BackendError, written: int, unwritten_tests: frozenset[tuple[str, str]]) -> None:
        super().__init__(str(error))
        self.written = written
        self.unwritten_tests = unwritten_tests


class DistributedLockError(Exception):
    """Another process holds the store's lock, or may have taken it from this process. The message is a clause."""


class FormatError(ValueError):
    """The text of a store file is not valid. The message names the line or key, and the expected value."""


class StoreError(Exception):
    """A store file is not valid. The message names the file and the key. An invalid file is never overwritten."""
