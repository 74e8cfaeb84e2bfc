"""The pages of pytest's options, of the keys of ``[tool.gpumem]``, and of models by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_gpumem.plugin.config import keys
from pytest_gpumem.plugin.config.keys import BUDGET_KEYS, MODEL_KEYS, OTHER_KEYS, Key
from pytest_gpumem.plugin.config.kinds import DURATION, SECONDS
from pytest_gpumem.plugin.config.options import OPTIONS, Option
from pytest_gpumem.plugin.config.settings import Settings
from reference.markdown import page, paragraphs, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.plugin.config.kinds import Kind

_ADDOPTS = (
    "The command line and `PYTEST_ADDOPTS` win over `addopts`, which wins over `[tool.gpumem]`. A flag can be switched off, "
    "for example with `--no-gpumem-strict` in a project with `strict = true`."
)
_FLAG = re.compile(r"--(?:no-)?gpumem-[a-z-]+[a-z]")


def options_page() -> str:
    """Return the page of the options ``--gpumem-*``."""
    return page(
        "Options of pytest",
        f"The options of this plugin, each with its key in [`[tool.gpumem]`](settings.md).\n\n{_ADDOPTS}",
        *(_option(option) for option in OPTIONS),
    )


def _option(option: Option) -> str:
    if option.is_flag:
        typed = f"`{option.flag}` or `{option.negated}`"
    else:
        typed = f"`{option.flag}={option.metavar or '|'.join(option.kind.choices or ())}`"
    key = f"``{option.name}`` ({_type(option.kind)})" if option.is_key else "none"
    facts = f"- Typed: {typed}\n- Key: {key}\n- Default: {_default(option.name, option.kind)}"
    parts = [f"## `{option.flag}`", paragraphs(_FLAG.sub(r"`\g<0>`", option.help)), facts, option.details.strip()]
    return "\n\n".join(part for part in parts if part)


def settings_page() -> str:
    """Return the page of the keys of ``[tool.gpumem]``."""
    rows = [(f"``{option.name}``", _type(option.kind), f"`{option.flag}`") for option in OPTIONS if option.is_key]
    tests = _key("budget.tests", BUDGET_KEYS["tests"], "###")
    return page(
        "Settings",
        paragraphs(str(keys.__doc__)),
        "## Keys of options",
        table(["Key", "Type", "Option"], rows),
        *(f"{_key(name, key)}{f'{chr(10)}{chr(10)}{tests}' if name == 'budget' else ''}" for name, key in _others()),
    )


def _others() -> list[tuple[str, Key]]:
    """Return the keys that are no options. Those with details on a page of their own have a link."""
    pages = {
        "gpus": "[Cards](cards.md#cards-of-your-own) has the keys of a card.",
        "models": "[Models by name](models-by-name.md) has the keys of a model.",
    }
    return [(name, key._replace(details=pages.get(name, key.details))) for name, key in OTHER_KEYS.items()]


def models_page() -> str:
    """Return the page of ``[[tool.gpumem.models]]``."""
    key = OTHER_KEYS["models"]
    return page("Models by name", key.help, key.details.strip(), *entries(MODEL_KEYS, "models"))


def entries(table_keys: Mapping[str, Key], name: str) -> list[str]:
    """Return an entry for each key of a table within ``[tool.gpumem]``, called ``name``."""
    return [_key(f"{name}.{key}", row, "###") for key, row in table_keys.items()]


def _key(name: str, key: Key, level: str = "##") -> str:
    default = key.default or ("none" if "." in name else _default(name, key.kind))
    parts = [f"{level} `{name}`", key.help, f"- Type: {_type(key.kind)}\n- Default: {default}", key.details.strip()]
    return "\n\n".join(part for part in parts if part)


def _type(kind: Kind) -> str:
    if kind.choices is None:
        return kind.expected
    *others, last = (f'``"{choice}"``' for choice in kind.choices)
    return f"{', '.join(others)} or {last}"


def _default(name: str, kind: Kind) -> str:
    """Return the default of a field of `Settings`, as it is written in TOML."""
    value = getattr(Settings(), name, None)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if kind in (DURATION, SECONDS):
        return f'`"{value:g} s"`'
    return f'``"{value}"``' if value else "none"
