"""Find the attention implementation that transformers chose for a model, without running the model's code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.torch_support.static_access import class_name, instance_dict, is_a, named_modules

if TYPE_CHECKING:
    import torch

_NAMES = ("_attn_implementation_internal", "_attn_implementation")
"""Attribute names for the implementation in a transformers configuration. In newer releases, the second attribute is a property
that returns the first."""


def attention_of(model: torch.nn.Module) -> str:
    """Return the attention implementations in a model: ``"sdpa"``, or ``"eager and sdpa"`` if a model uses both.

    Only modules with ``attention`` in their class name are examined, because even ResNet's configuration names an
    implementation, although a ResNet has no attention. The text is empty for models without attention modules, and for models
    from other libraries.
    """
    names = {
        name
        for _, module in named_modules(model)
        if "attention" in class_name(type(module)).lower() and (name := _implementation(module)) is not None
    }
    return " and ".join(sorted(names))


def _implementation(module: torch.nn.Module) -> str | None:
    config = (instance_dict(module) or {}).get("config")
    values = instance_dict(config) or {}
    named = (values[name] for name in _NAMES if name in values)
    return next((name for name in named if is_a(name, str)), None)
