"""Exceptions of the store and its files."""

from __future__ import annotations


class BackendError(Exception):
    """The backend cannot be read or written; the message has the file and the reason."""


class IncompleteChangeError(BackendError):
    """The backend failed while a change was written, for example because the disk is full.

    Args:
        error: The backend's error.
        written: The number of entries that were written before.
        left: The tests, as (file, test), whose entries were neither written nor removed.
    """

    def __init__(self, error: BackendError, written: int, left: frozenset[tuple[str, str]]) -> None:
        super().__init__(str(error))
        self.written = written
        self.left = left


class DistributedLockError(Exception):
    """Others hold the lock, or may have written meanwhile; the message is a clause."""


class FormatError(ValueError):
    """A text that is not a file of the store; the message names the line or key, and what would be right."""


class StoreError(Exception):
    """A file of the store is not what it should be; the message names file and key. The file is left as it was."""
