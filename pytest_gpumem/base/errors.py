"""All exceptions that one module raises and another module catches, in the order of the package's top-level folders.

An exception that only a single file uses is in this file. There are two other exceptions to the rule: `InputError` is in
`tools/console/streams.py`, because it derives from an exception in click, which `base` does not import. The signals between a
loop and the measuring code are in `measuring/measure/loop.py`.
"""

from __future__ import annotations

import errno
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


# Tools for files, processes and packages


class SymbolicLinkError(OSError):
    """Raised if a path is a symbolic link instead of a file or folder. ``str()`` and ``strerror`` are the same sentence.

    Args:
        path: The link.
        mend: The remedy as a clause, for example ``"remove it"``.
    """

    def __init__(self, path: Path, mend: str = "remove it") -> None:
        super().__init__(errno.ELOOP, f"{path} is a symbolic link, which is not followed; {mend}")

    def __str__(self) -> str:
        return str(self.strerror)


class GitError(Exception):
    """Raised if a git command failed. The message contains the reason."""


class StopSignal(Exception):
    """Raised after a signal (such as SIGINT) that asks the program to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_status = 128 + signum
        """A shell's exit status for this signal: 130 for SIGINT."""


class CacheError(Exception):
    """Raised for a cache folder that may contain files from other users. The message is a sentence with the remedy."""


class RequirementError(ValueError):
    """A requirement cannot be read. The message shows a valid requirement."""


class InstallationError(Exception):
    """A virtual environment could not be made. The message quotes the reason from pip, uv or the system."""


class PathNotFound(ValueError):
    """Raised if a requirement is a path that does not exist. The message is the path."""


# Values


class MissingMetric(AttributeError):
    """Raised if a test reads a metric that the measurement does not have.

    The message lists all metrics of the measurement.
    """


class MeasuringError(RuntimeError):
    """Raised if the figures of a step would not be valid, for example because the step used no memory on the device."""


class JobError(MeasuringError):
    """Raised if a command run by `Gpumem.launch` cannot be started, fails, or takes too long."""


class MissingComposition(AttributeError):
    """Raised if a test reads a composition and none was recorded. The message says how to record the composition."""


class CompositionError(ValueError):
    """Raised if a text in the store is not a row. The message shows the expected form."""


# Emulated GPUs


class EmulationError(Exception):
    """Raised if a GPU cannot be emulated on this machine or in this process. The message has the reason and a remedy."""


class NotElf(ValueError):
    """Raised if a file is not a 64-bit little-endian ELF file, or is truncated."""


# Models, steps, devices and ranks


class ModelError(ValueError):
    """Error if a model or its batch cannot be built from a name. The message is a sentence with a remedy."""


class ConfigError(ValueError):
    """Raised for a step config that cannot be read or has nothing to act on. The message suggests a correction."""


class NotAStep(ValueError):
    """Raised if model, batch, loss and optimizer do not form a step. The message suggests a correction."""


class DeviceUnavailable(Exception):
    """Raised if a device cannot be used on this machine. The message is the reason, for example ``no CUDA device: ...``."""


class CannotRun(Exception):
    """Raised if a device cannot run a step under its step config. The message is the reason, without a final period."""


class LaunchError(ValueError):
    """Raised if an environment variable from the launcher is missing or invalid. The message shows the remedy."""


class BoardError(RuntimeError):
    """Raised if a rank cannot reach the key/value store through which ranks share values."""


class RankLost(BaseException):
    """Raised if this rank waits for another rank, which has ended. The message names the other rank.

    The class does not derive from `Exception`, so a test's ``except Exception`` cannot swallow the error.
    """


# The store


class BackendError(Exception):
    """The storage backend cannot be read or written. The message names the file and the reason."""


class IncompleteChangeError(BackendError):
    """A change of the store stopped after its first writes, for example because the disk is full.

    Args:
        error: The error that stopped the change.
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


# Reports


class ReportError(ValueError):
    """Raised if a file does not contain a valid report. The message names the file, the mistake and the expected content."""


class MergeError(ValueError):
    """Raised if reports cannot be merged because their commits, versions or options differ.

    The message names the reports and the difference, and says what to do.
    """


class ExportError(Exception):
    """Error if figures cannot be exported. The message gives the reason."""


class GitHubError(Exception):
    """Error if GitHub refused a request. The message names the request."""


class NotAllowedError(GitHubError):
    """Error if the token lacks a permission (status 403). For example, a pull request from a fork has a read-only token."""


class UnavailableError(GitHubError):
    """Error if GitHub is down, cannot be reached, or limits the request rate. The same request may succeed later."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after
        """Seconds to wait before the request is sent again, from GitHub's answer; ``None`` if the answer does not name them."""


# Settings, markers and hooks


class SettingsError(ValueError):
    """Raised for a mistake in ``[tool.gpumem]`` or in an option.

    The message names the file or option, the key, and an example of a valid value.
    """


class BudgetError(ValueError):
    """Raised for a wrong argument of the marker or of a budget entry.

    The message names the argument and an example of a valid value.
    """


class HookError(ValueError):
    """Raised if a hook returned a wrong result.

    The message names the hook, the plugins that implement the hook, and the expected result.
    """


# Commands


class RunFailed(Exception):
    """A run has no results to compare. The message says why, and what to do."""


class NothingToSearch(Exception):
    """A bisection has nothing to search for. The message says why, and often what to do."""


class UnfitReport(Exception):
    """Raised if no test in a report can be accepted. The message gives the reason, and says which report is expected."""


class UnknownTest(Exception):
    """Raised if a report lacks a named test. The message names tests with a similar spelling."""


class UnknownCause(Exception):
    """Raised if a report has no cause with a given number. The message lists the existing causes."""


class TrialFailed(Exception):
    """Error if the model's own code raised an error in or before the first trial. The message is a sentence."""


class SubjectError(ValueError):
    """Error if a project's function returns no model and batch, or if no blocks in the model match the pattern."""


class ProposalError(Exception):
    """Error if lines cannot be added to a file. The message names the file and says what to do."""


class ScriptFailed(Exception):
    """Raised if a script ends with an exit status other than 0. The message is a sentence."""
