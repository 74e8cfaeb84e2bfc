"""Report files, which a session removes when it begins to measure and writes when it ends."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.reporting.reports.formats import format_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.reporting.reports.session_report import SessionReport


class ReportFiles:
    """The files from ``--gpumem-report``.

    A session removes earlier files when it begins to measure, and writes the new files at its end.

    - Each file is replaced atomically, and its folder is created.
    - A killed session leaves no report, so nobody mistakes an earlier session's report for the killed session's.
    - A session that measures nothing keeps earlier files, unless it runs with ``--gpumem-baseline``, or ``--gpumem-report`` is
      on its command line.
    - A report that cannot be written makes the session red. The reports that are written after it contain the error.
    - If pytest ends before any test runs, for example after a usage error, the reports say so.
    - A report never says ``passed`` if pytest's tests did not pass. A report also counts failures in tests that are not
      measured, and failures that another plugin added to the session.

    `gpumem merge` combines the JSON reports of several shards.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._begun = False

    def begin(self) -> None:
        """Remove earlier files, because the session will write new files. A second call does nothing."""
        if self._begun:
            return
        self._begun = True
        for path in self._paths:
            # An error here is ignored, because `write` then fails for the same reason and returns its error.
            with suppress(OSError):
                path.unlink()

    @property
    def has_files(self) -> bool:
        """True if there are files to write."""
        return self._begun and bool(self._paths)

    def write(self, report: SessionReport) -> list[str]:
        """Write all files, and return the errors as sentences. Each file contains the errors from earlier files."""
        errors: list[str] = []
        for path in self._paths if self._begun else ():
            try:
                write_report(path, replace(report, errors=(*report.errors, *errors)))
            except OSError as error:
                errors.append(f"{path}: the report cannot be written: {error}")
        return errors


def write_report(path: Path, report: SessionReport) -> None:
    """Write ``report`` in the format for the file's suffix, and create the file's folder. Raises ``OSError``."""
    form = format_of(path)
    assert form is not None, "options are checked"
    text = form.render(report)
    try:
        write_atomically(path, text)
    except ValueError as error:
        # A file name from `pyproject.toml` can contain a NUL character, which Python refuses with `ValueError`.
        raise OSError(str(error)) from error
