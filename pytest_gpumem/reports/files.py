"""Reports as files: which function renders which suffix, and how a file is written."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from pytest_gpumem.reports.json_report import to_json
from pytest_gpumem.reports.markdown import markdown
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpumem.reports.session_report import SessionReport


def _html(report: SessionReport) -> str:
    # plotly and jinja2 are loaded, and need be there, where such a report is written only.
    from pytest_gpumem.reports.html.page import html

    return html(report)


RENDERERS: dict[str, Callable[[SessionReport], str]] = {".json": to_json, ".md": markdown, ".html": _html}
"""By the suffixes of `options.REPORT_SUFFIXES`."""


def write_report(path: Path, report: SessionReport) -> None:
    """Write ``report`` in the format of the file's suffix; its folder is made. Raises ``OSError``."""
    text = RENDERERS[PurePath(path).suffix](report)
    try:
        write_whole(path, text)
    except ValueError as error:
        # A name with a NUL in it, which TOML can hold.
        raise OSError(str(error)) from error
