"""Exceptions from the store and its files."""

from __future__ import annotations


class BackendError(Exception):
    """The backend cannot be read or written. The message names the file and the reason."""


class IncompleteChangeError(BackendError):
    """The backend failed while a change was written, for example because the disk is full.

    Args:
        error: The backend's error.
        written: The number of entries that were written before the failure.
        unwritten_tests: The tests, as (file, test), whose entries were neither written nor removed.
    """

    def __init__(self, error: BackendError, written: int, unwritten_tests: frozenset[tuple[str, str]]) -> None:
        super().__init__(str(error))
        self.written = written
        self.unwritten_tests = unwritten_tests


class DistributedLockError(Exception):
    """Another process holds the lock, or may have taken it. The message is a clause."""


class FormatError(ValueError):
    """A text is not a valid store file. The message names the line or key, and the expected value."""


class StoreError(Exception):
    """A store file is not valid. The message names the file and the key. The file is never overwritten."""
