"""Reports as files: removed when a session begins to measure, and written when it ends."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.reports.formats import format_of
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.reports.session_report import SessionReport


class ReportFiles:
    """Files that are removed when the session begins to measure, and written when it ends.

    A session that is killed has then no report, and not its predecessor's. One that measures nothing, and was not asked for
    these files on its command line, leaves them alone: settings hold for every run of a project.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._begun = False

    def begin(self) -> None:
        """Remove earlier files, since the session has something to report. A second call does nothing."""
        if self._begun:
            return
        self._begun = True
        for path in self._paths:
            # Errors are ignored here; `write` returns them.
            with suppress(OSError):
                path.unlink()

    @property
    def wanted(self) -> bool:
        """True if there are files to write."""
        return self._begun and bool(self._paths)

    def write(self, report: SessionReport) -> list[str]:
        """Write all files and return errors as sentences, which reports that are written later have, too."""
        errors: list[str] = []
        for path in self._paths if self._begun else ():
            try:
                write_report(path, replace(report, errors=(*report.errors, *errors)))
            except OSError as error:
                errors.append(f"{path}: the report cannot be written: {error}")
        return errors


def write_report(path: Path, report: SessionReport) -> None:
    """Write ``report`` in the format of the file's suffix; its folder is made. Raises ``OSError``."""
    form = format_of(path)
    assert form is not None, "options are checked"
    text = form.render(report)
    try:
        write_whole(path, text)
    except ValueError as error:
        # A name with a NUL in it, which TOML can hold.
        raise OSError(str(error)) from error
