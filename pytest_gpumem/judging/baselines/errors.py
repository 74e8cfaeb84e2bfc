"""Exceptions from the store and its files."""

from __future__ import annotations


class BackendError(Exception):
    """The storage backend cannot be read or written. The message names the file and the reason."""


class IncompleteChangeError(BackendError):
    """A change of the store stopped after its first writes, for example because the disk is full.

    Args:
        error: The error from the backend or from a file.
        written: The number of entries that were written before the failure.
        unwritten_tests: The tests, as (file, test), whose entries should have been written or removed, but were not.
    """

    def __init__(
        self, error: BackendError | StoreError, written: int, unwritten_tests: frozenset[tuple[str, str]]
    ) -> None:
        super().__init__(str(error))
        self.written = written
        self.unwritten_tests = unwritten_tests


class WriteConflictError(BackendError):
    """Another process changed a file after this process read it, so the file was not written."""


class FormatError(ValueError):
    """The text of a store file is not valid. The message names the line or key, and the expected value."""


class StoreError(Exception):
    """A store file is not valid. The message names the file and the key. An invalid file is never overwritten."""
