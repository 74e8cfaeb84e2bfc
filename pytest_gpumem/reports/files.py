"""Reports as files: which function renders which suffix, and how a file is written."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from pytest_gpumem.reports.json_report import to_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpumem.session_report import SessionReport

RENDERERS: dict[str, Callable[[SessionReport], str]] = {".json": to_json}
"""By the suffixes of `options.REPORT_SUFFIXES`."""


def write_report(path: Path, report: SessionReport) -> None:
    """Write ``report`` in the format of the file's suffix; its folder is made. Raises ``OSError``."""
    text = RENDERERS[PurePath(path).suffix](report)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
