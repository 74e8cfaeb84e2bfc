"""The page of the environment variables."""

from __future__ import annotations

from pytest_gpumem.base import variables
from reference.markdown import attribute_docstrings, page, paragraphs


def environment_page() -> str:
    """Return the page of the environment variables that this package reads."""
    texts = attribute_docstrings(variables)
    return page(
        "Environment variables",
        "This plugin and its commands read these environment variables. Those that begin with `GPUMEM_` are its own.",
        *(f"## `{getattr(variables, name)}`\n\n{paragraphs(text)}" for name, text in texts.items()),
    )
