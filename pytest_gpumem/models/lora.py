"""Settings of LoRA, parsed from ``r=8,alpha=16``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.step_config.config import in_an_id
from pytest_gpumem.units import nearest, whole_number

ALL_LINEAR = "all-linear"
"""The word for all linear layers but the last, which PEFT knows of a model of transformers."""
DTYPE_OF_ADAPTERS = (
    "bf16 and fp16 have adapters in that dtype, too; PEFT makes them in float32, and keeps a float32 input of each then"
)
"""Said beside figures, since most programs leave adapters as PEFT makes them."""
_KEYS = ["r", "alpha", "targets"]
_EXAMPLE = "write it like r=8 or r=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True, slots=True)
class Lora:
    """Settings of the adapters, those of PEFT's ``LoraConfig``."""

    rank: int
    alpha: int | None = None
    """``None`` is PEFT's own."""
    targets: tuple[str, ...] = ()
    """Names of the modules that get adapters; without any those that PEFT knows for the kind of model."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``LoraConfig``, those alone that are not its own defaults."""
        found: dict[str, Any] = {"r": self.rank}
        if self.alpha is not None:
            found["lora_alpha"] = self.alpha
        if self.targets:
            found["target_modules"] = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        return found

    @property
    def id(self) -> str:
        """Its settings as a part of a test's id: ``"r8-alpha16-q_proj+v_proj"``."""
        alpha = "" if self.alpha is None else f"-alpha{self.alpha}"
        targets = f"-{in_an_id('+'.join(self.targets))}" if self.targets else ""
        return f"r{self.rank}{alpha}{targets}"

    def __str__(self) -> str:
        alpha = "" if self.alpha is None else f",alpha={self.alpha}"
        targets = f",targets={'+'.join(self.targets)}" if self.targets else ""
        return f"r={self.rank}{alpha}{targets}"


def lora(text: str) -> Lora:
    """Return the adapters that a text asks for: ``"r=8"``, ``"r=8,alpha=16,targets=q_proj+v_proj"``.

    Raises:
        ModelError: It asks for none. The message is a sentence.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (one.strip() for one in part.partition("="))
        if not equals or not value:
            raise ModelError(f"{part.strip()!r} is no setting of LoRA: {_EXAMPLE}")
        if key not in _KEYS:
            raise ModelError(f"LoRA has no setting {key!r} here; {nearest(key, _KEYS)}")
        if key in given:
            raise ModelError(f"{key} of LoRA is given twice: {_EXAMPLE}")
        given[key] = value
    if "r" not in given:
        raise ModelError(f"LoRA needs its rank: {_EXAMPLE}")
    targets = tuple(sorted({*filter(None, given.get("targets", "").split("+"))}))
    if "targets" in given and not targets:
        raise ModelError(f"targets of LoRA names no module: {_EXAMPLE}")
    return Lora(_number("r", given["r"]), _number("alpha", given["alpha"]) if "alpha" in given else None, targets)


def _number(key: str, value: str) -> int:
    try:
        return whole_number(value, least=1)
    except ValueError as error:
        raise ModelError(f"{key} of LoRA is {value!r}, {error}") from None
