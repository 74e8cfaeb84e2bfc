"""Parse LoRA settings such as ``r=8,alpha=16``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.base.units import nearest, whole_number
from pytest_gpumem.measuring.step_config.config import in_an_id

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers in a transformers model except the output layer."""
DTYPE_OF_ADAPTERS = (
    "with bf16 and fp16, the adapters have this dtype as well. By default, PEFT makes float32 adapters, each with a float32 "
    "copy of its input"
)
"""A note about the measured peaks. Most programs need more memory, because they keep PEFT's float32 adapters."""
_KEYS = ["r", "alpha", "targets"]
_EXAMPLE = "write it like r=8 or r=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True, slots=True)
class Lora:
    """Settings for LoRA adapters, as in PEFT's ``LoraConfig``."""

    rank: int
    alpha: int | None = None
    """``None`` means PEFT's default."""
    targets: tuple[str, ...] = ()
    """Names of the modules to which adapters are added. If empty, PEFT chooses the modules by the kind of model."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``LoraConfig`` that differ from PEFT's defaults."""
        arguments: dict[str, Any] = {"r": self.rank}
        if self.alpha is not None:
            arguments["lora_alpha"] = self.alpha
        if self.targets:
            arguments["target_modules"] = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        return arguments

    @property
    def id(self) -> str:
        """The settings in the form for a test's id: ``"r8-alpha16-q_proj+v_proj"``."""
        alpha = "" if self.alpha is None else f"-alpha{self.alpha}"
        targets = f"-{in_an_id('+'.join(self.targets))}" if self.targets else ""
        return f"r{self.rank}{alpha}{targets}"

    def __str__(self) -> str:
        alpha = "" if self.alpha is None else f",alpha={self.alpha}"
        targets = f",targets={'+'.join(self.targets)}" if self.targets else ""
        return f"r={self.rank}{alpha}{targets}"


def lora(text: str) -> Lora:
    """Parse LoRA settings in a text such as ``"r=8"`` or ``"r=8,alpha=16,targets=q_proj+v_proj"``.

    Raises:
        ModelError: The text is not valid. The message is a sentence.
    """
    settings: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ModelError(f"{part.strip()!r} is not a LoRA setting: {_EXAMPLE}")
        if key not in _KEYS:
            raise ModelError(f"LoRA has no setting {key!r} here; {nearest(key, _KEYS)}")
        if key in settings:
            raise ModelError(f"LoRA's {key} is given twice: {_EXAMPLE}")
        settings[key] = value
    if "r" not in settings:
        raise ModelError(f"LoRA needs its rank: {_EXAMPLE}")
    targets = tuple(sorted({*filter(None, settings.get("targets", "").split("+"))}))
    if "targets" in settings and not targets:
        raise ModelError(f"LoRA's targets name no module: {_EXAMPLE}")
    return Lora(
        _number("r", settings["r"]), _number("alpha", settings["alpha"]) if "alpha" in settings else None, targets
    )


def _number(key: str, value: str) -> int:
    try:
        return whole_number(value, least=1)
    except ValueError as error:
        raise ModelError(f"LoRA's {key} is {value!r}, {error}") from None
