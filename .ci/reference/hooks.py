"""The page of the hooks for plugins and conftest files."""

from __future__ import annotations

import inspect

from pytest_gpumem.plugin import hookspecs
from reference.markdown import docstring, page, paragraphs


def hooks_page() -> str:
    """Return the page of the hooks."""
    hooks = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("pytest_gpumem_")}
    return page("Hooks", paragraphs(str(hookspecs.__doc__)), *(_hook(name, hook) for name, hook in hooks.items()))


def _hook(name: str, hook: object) -> str:
    assert inspect.isfunction(hook)
    signature = f"{name}({', '.join(inspect.signature(hook).parameters)})"
    return f"## `{name}`\n\n```text\n{signature}\n```\n\n{docstring(str(hook.__doc__))}"
