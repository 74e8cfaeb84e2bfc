"""The pages of pytest's options and of the keys of ``[tool.gpumem]``."""

from __future__ import annotations

from pytest_gpumem.config.options import OPTIONS, Option
from pytest_gpumem.config.settings import KEYS
from reference.markdown import page, paragraphs


def options_page() -> str:
    """Return the page of the options ``--gpumem-*``."""
    return page(
        "Options of pytest",
        "An option that is typed wins over its key in `[tool.gpumem]`.",
        *(_option(option) for option in OPTIONS),
    )


def _option(option: Option) -> str:
    typed = option.flag if option.is_flag else f"{option.flag}={option.metavar or '|'.join(option.kind.choices or ())}"
    return f"## `{option.flag}`\n\n`{typed}`\n\n{paragraphs(option.help)}"


def settings_page() -> str:
    """Return the page of the keys of ``[tool.gpumem]``."""
    entries = [f"## `{name}`\n\n{kind.expected}" for name, kind in KEYS.items()]
    return page("Settings", "The table `[tool.gpumem]` in the `pyproject.toml` of pytest's root directory.", *entries)
