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
    """The files of ``--gpumem-report``: a session removes earlier ones when it begins to measure, and writes them at its end.

    Each file is replaced whole, and its folder is made. A session that is killed leaves no report, so an earlier one is not
    taken for its own. A session that measures nothing leaves the files alone, unless its command line asked for them. A
    report that cannot be written makes the session red; the others are written and say so. If pytest ends before any test
    runs (a usage error), the reports say that.

    A report never says ``passed`` if pytest's tests did not pass: failures of tests that are not measured are counted, and a
    session that another plugin made red is reported as red. `gpumem merge` makes one JSON report from those of several
    shards.
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
