"""A session's report as one HTML file: markup, styles, scripts and data, and nothing that is fetched."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING

from pytest_gpumem.reports.html.prepare import page_of

if TYPE_CHECKING:
    from pytest_gpumem.reports.session_report import SessionReport

_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""Nothing is fetched, and no script runs but those of this package, known by their hashes. Plotly needs styles inline."""


def html(report: SessionReport) -> str:
    """The page. Raises ``ImportError`` where plotly or jinja2 is not installed (extra ``report``)."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("pytest_gpumem.reports.html", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = tuple(map(_source, ("charts.js", "page.js")))
    plotly = _within_a_script(get_plotlyjs())
    text = environment.get_template("page.html.jinja").render(
        page=page_of(report),
        policy=_POLICY.format(scripts=" ".join(map(_hash, (*scripts, plotly)))),
        style=_source("page.css"),
        scripts=scripts,
        plotly=plotly,
    )
    return text + "\n"


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _within_a_script(source: str) -> str:
    """JavaScript that cannot end the element that it stands in: a backslash changes nothing in its strings and patterns."""
    return source.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
