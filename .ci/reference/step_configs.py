"""The page of step configs: an entry for each axis, made from `StepConfig` and the tables of words."""

from __future__ import annotations

from dataclasses import fields

from pytest_gpumem.measuring.step_config.config import FORMS, NOT_IN, StepConfig
from reference.markdown import attribute_docstrings, docstring, page, paragraphs, table


def step_configs_page() -> str:
    """Return the page of the axes of a step config and their words."""
    helps = attribute_docstrings(StepConfig)
    defaults = {field.name: field.default for field in fields(StepConfig)}
    return page(
        "Step configs",
        docstring(StepConfig.__doc__ or ""),
        *(_axis(name, defaults[name], helps[name]) for name in defaults),
    )


def _axis(name: str, default: object, text: str) -> str:
    steps = [f"`{kind}`" for kind, idle in NOT_IN.items() if name not in idle]
    usual = "" if default is None else f" Default: `{default}`."
    words = [(f"`{word}`", meaning) for word, meaning in FORMS.get(name, {}).items()]
    return "\n\n".join(
        [
            f"## `{name}`",
            f"In {' and '.join(steps)}.{usual}",
            paragraphs(text),
            *([table(("word", "meaning"), words)] if words else []),
        ]
    )
