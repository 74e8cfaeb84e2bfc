"""The formats for ``--gpumem-report``.

Every pytest run imports this module, so a format's renderer is imported only when the format is written.
"""

from __future__ import annotations

import importlib
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reporting.reports.session_report import SessionReport


class Format(NamedTuple):
    """A report format, chosen by the file's suffix."""

    suffix: str
    title: str
    """The format's purpose, for the help text of ``--gpumem-report``."""
    renderer: str
    """The function that turns a `SessionReport` into the file's text, as ``"module:function"``."""

    def render(self, report: SessionReport) -> str:
        module, _, function = self.renderer.partition(":")
        text: str = getattr(importlib.import_module(module), function)(report)
        return text


FORMATS = (
    Format(".html", "to look at", "pytest_gpumem.reporting.reports.html.page:html"),
    Format(".md", "for a comment", "pytest_gpumem.reporting.reports.markdown:markdown"),
    Format(".json", "for programs and `gpumem merge`", "pytest_gpumem.reporting.reports.json_report:to_json"),
    Format(".sarif", "for code scanning", "pytest_gpumem.reporting.reports.sarif:sarif"),
)
"""All formats, in the help text's order."""


def format_of(file: str | PurePath) -> Format | None:
    """Return the format with the suffix of ``file``; ``None`` for an unknown suffix."""
    return next((format_ for format_ in FORMATS if format_.suffix == PurePath(file).suffix), None)


def suffixes(formats: Sequence[Format]) -> str:
    """Return the suffixes as a text: ``".html, .md or .json"``."""
    *first, last = [format_.suffix for format_ in formats]
    return f"{', '.join(first)} or {last}"


ENDINGS = suffixes(FORMATS[::-1])
"""The suffixes as a text for error messages."""
