"""Optimizers by the words of a step config, and the bytes of their state by formula."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from pytest_gpumem.steps.config import ConfigError
from pytest_gpumem.steps.quiet_import import import_quietly
from pytest_gpumem.torch_support.private_api import load_compiler
from pytest_gpumem.torch_support.reachability import is_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

_CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "adafactor": "Adafactor"}
_EIGHT_BIT = {"adam-8bit": "Adam8bit", "adamw-8bit": "AdamW8bit"}
COUNT = 4
"""Bytes of the float32 that counts an optimizer's steps, one for each parameter."""
LEAST_IN_8_BITS = 4096
"""Smaller tensors keep full-precision state, in torchao as in bitsandbytes."""
BLOCK_IN_8_BITS = 256
"""Values that share a scale (torchao's ``block_size``)."""


def optimizer_named(word: str) -> OptimizerFactory:
    """The function of the parameters that makes the optimizer that a config names (not ``none``), with its defaults.

    ``foreach`` and ``fused`` forms are asked for; without one the choice is torch's. Raises `ConfigError` when it needs
    a package that is not there.
    """
    import torch

    if word in _EIGHT_BIT:
        module, name = eight_bit_module(word)
        # torchao's optimizer compiles its step.
        load_compiler()
        eight_bit: OptimizerFactory = getattr(import_quietly(module), name)
        return eight_bit
    name, _, form = word.partition("-")
    optimizer: Any = getattr(torch.optim, _CLASSES[name])
    return functools.partial(optimizer, **({form: True} if form else {}))


def eight_bit_module(word: str) -> tuple[str, str]:
    """The module that has the optimizer of this word, torchao's or bitsandbytes', and its class there.

    Raises `ConfigError` when neither is installed.
    """
    for module in ("torchao.optim", "bitsandbytes.optim"):
        try:
            import_quietly(module)
        except ImportError:
            continue
        return module, _EIGHT_BIT[word]
    raise ConfigError(
        f"optimizer={word} needs torchao (pip install 'pytest-gpumem[torchao]') or bitsandbytes, and neither is installed"
    )


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> int | None:
    """Bytes of an optimizer's state for ``parameters``, by formula; ``None`` for an optimizer without one.

    Adam and AdamW (Kingma and Ba 2014): two averages in the parameter's dtype, three with ``amsgrad``, and a count. SGD: one
    with momentum. Adafactor (Shazeer and Stern 2018): a row and a column for each matrix. torchao's 8-bit Adam (Dettmers
    2021): two averages of a byte a value, a float32 scale for each block of 256, and a table of 256 float32. A count on
    the host, where torch leaves it unless fused or capturable, is not counted for a model on another device.
    """
    total = 0
    known = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        group = known.get(id(parameter))
        if group is None:
            continue
        one = _state_of(type(optimizer).__name__, type(optimizer).__module__, parameter, group)
        if one is None:
            return None
        total += one
    return total


def _state_of(name: str, module: str, parameter: torch.nn.Parameter, group: dict[str, Any]) -> int | None:
    nbytes = parameter.numel() * parameter.element_size()
    counted = group.get("fused") or group.get("capturable") or is_host(parameter.device)
    count = COUNT if counted else 0
    by_torch = module.startswith("torch.optim")
    if by_torch and name == "SGD":
        return nbytes if group["momentum"] else 0
    if by_torch and name in ("Adam", "AdamW"):
        return (3 if group["amsgrad"] else 2) * nbytes + count
    if by_torch and name == "Adafactor":
        shape = parameter.shape
        values = parameter.numel() * (1 / shape[-1] + 1 / shape[-2]) if len(shape) > 1 else parameter.numel()
        return round(values) * parameter.element_size() + count
    if module.startswith("torchao") and name in ("Adam8bit", "AdamW8bit"):
        if parameter.numel() < LEAST_IN_8_BITS or parameter.numel() % BLOCK_IN_8_BITS:
            return 2 * nbytes + count
        scales = math.ceil(parameter.numel() / BLOCK_IN_8_BITS) * 4
        return 2 * (parameter.numel() + scales + 256 * 4) + count
    return None
