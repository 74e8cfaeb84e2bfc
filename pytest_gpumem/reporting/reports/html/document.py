"""Render HTML documents with all styles, scripts and data in a single file."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

from pytest_gpumem.reporting.reports.escaping import visible

_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""The page's Content-Security-Policy, which forbids all requests and allows only scripts with known hashes. Plotly needs inline
styles."""


def document(template: str, **values: Any) -> str:
    """Render a template from this folder.

    Args:
        template: The template's file name.
        values: The template's variables.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("pytest_gpumem.reporting.reports.html", "."),
        autoescape=True,
        # A text is printed on a single line, unless the filter ``lines`` keeps its line breaks.
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["lines"] = lambda text: escape(in_lines(text))
    scripts = tuple(map(_source, ("charts.js", "page.js")))
    plotly = _safe_in_script(_source("plotly/plotly-basic.min.js"))
    text = environment.get_template(template).render(
        **values,
        policy=_POLICY.format(scripts=" ".join(map(_hash, (*scripts, plotly)))),
        style=_source("page.css"),
        scripts=scripts,
        plotly=plotly,
    )
    return text + "\n"


def in_lines(text: str) -> str:
    """Return ``text`` with its line breaks and tabs. Other invisible characters are escaped."""
    return visible(text.replace("\r\n", "\n"), keep="\n\t")


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _safe_in_script(source: str) -> str:
    """Return JavaScript that cannot close the ``<script>`` element around it.

    The added backslashes do not change the meaning of strings and patterns in JavaScript.
    """
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
