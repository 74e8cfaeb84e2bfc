"""The modules, parameters and buffers of a model and their paths, read without running the model's code.

As ``named_modules``, ``named_parameters`` and ``named_buffers`` give them. These are methods that a model may override, and
they hash modules, which a model may forbid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.torch_support.private_api import MODULE_PARTS
from pytest_gpumem.torch_support.static_access import attribute, is_a

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    Kind = Literal["modules", "parameters", "buffers"]


def named_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Return the modules of a model, each once and before those within it; the model itself has the path ``""``."""
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            children = list(_own_parts(module, "modules"))
            stack.extend((_join(path, name), child) for name, child in reversed(children))


def named_tensors(
    root: torch.nn.Module, kind: Literal["parameters", "buffers"]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Return the parameters or buffers of a model, each once: the path of its module, its name there, and the tensor."""
    seen: set[int] = set()
    for path, module in named_modules(root):
        for name, tensor in _own_parts(module, kind):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, name, tensor


def _own_parts(module: torch.nn.Module, kind: Kind) -> Iterator[tuple[str, Any]]:
    """Return the parameters, buffers or modules of ``module`` itself, by name."""
    import torch

    parts = attribute(module, MODULE_PARTS[kind])
    # Scripted modules keep theirs in C++, and their class is torch's own.
    named = dict.items(parts) if is_a(parts, dict) else parts.items() if is_a(module, torch.jit.ScriptModule) else ()
    for name, part in list(named):
        if is_a(part, torch.nn.Module if kind == "modules" else torch.Tensor):
            yield name, part


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
