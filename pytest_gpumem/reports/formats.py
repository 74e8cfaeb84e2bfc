"""Reports as files: a row for each format of ``--gpumem-report``, and writing them. Renderers are imported when used."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.reports.session_report import SessionReport


@dataclass(frozen=True, slots=True)
class Format:
    """A format of reports, by the suffix of a file."""

    suffix: str
    title: str
    """Its purpose, in the help of the option."""
    renderer: str
    """``"module:function"``: from a `SessionReport` to the text of the file."""
    needs: tuple[str, ...] = ()
    """Packages that are not always installed: those of the extra ``report``."""

    def render(self, report: SessionReport) -> str:
        module, _, function = self.renderer.partition(":")
        text: str = getattr(importlib.import_module(module), function)(report)
        return text

    def lacking(self) -> str | None:
        """Return why it cannot be written here, as a sentence that says how to mend it; ``None`` where it can."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if not missing:
            return None
        name = self.suffix[1:].upper()
        return f"the {name} report needs {' and '.join(missing)}: pip install 'pytest-gpumem[report]'"


FORMATS = (
    Format(".html", "to look at", "pytest_gpumem.reports.html.page:html", needs=("jinja2", "plotly")),
    Format(".md", "for a comment", "pytest_gpumem.reports.markdown:markdown"),
    Format(".json", "for programs and `gpumem merge`", "pytest_gpumem.reports.json_report:to_json"),
    Format(".sarif", "for code scanning", "pytest_gpumem.reports.sarif:sarif"),
)
"""All formats, in the order in which help lists them."""


def format_of(file: str | PurePath) -> Format | None:
    """Return the format that the suffix of ``file`` names."""
    return next((one for one in FORMATS if one.suffix == PurePath(file).suffix), None)


def suffixes(formats: Sequence[Format]) -> str:
    """Return the suffixes as a text: ``".html, .md or .json"``."""
    *others, last = [one.suffix for one in formats]
    return f"{', '.join(others)} or {last}"


ENDINGS = suffixes(FORMATS[::-1])
"""The suffixes, as errors list them."""


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
