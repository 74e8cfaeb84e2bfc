"""Exceptions of the store and its files."""

from __future__ import annotations


class BackendError(Exception):
    """The backend cannot be read or written; the message has the file and the reason."""


class DistributedLockError(Exception):
    """Others hold the lock, or may have written meanwhile; the message is a clause."""


class FormatError(ValueError):
    """A text that is not a file of the store; the message names the line or key, and what would be right."""


class StoreError(Exception):
    """A file of the store is not what it should be; the message names file and key. The file is left as it was."""
