"""The table of formats of ``--gpumem-report``. Every pytest run loads it, so it imports renderers only when they are used."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reports.session_report import SessionReport


class Format(NamedTuple):
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
