"""Adapters of PEFT on a model by name, whose own weights are frozen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.library import library_of
from pytest_gpumem.models.lora import ALL_LINEAR
from pytest_gpumem.models.named_model import on_meta
from pytest_gpumem.steps.model_step import quietly

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.models.lora import Lora
    from pytest_gpumem.models.named_model import NamedModel


def with_adapters(model: NamedModel, wanted: Lora) -> NamedModel:
    """Return the model with adapters, which alone are trained.

    Where no targets are given they are PEFT's own for its kind of model, else all linear layers of a model of transformers.

    Raises:
        ModelError: PEFT is not installed, or knows no targets for such a model, or there are none of these names.
    """
    peft = library_of(model.name, "peft")
    plain = on_meta(model.name, model.make)
    if not wanted.targets:
        kind = getattr(getattr(plain, "config", None), "model_type", None)
        if kind is None:
            raise ModelError(
                f"{model.name}: PEFT knows no modules of {model.class_name} for LoRA; name some, like "
                f"targets={'+'.join(_usual_linear_layers(plain))}"
            )
        if kind not in peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
            wanted = replace(wanted, targets=(ALL_LINEAR,))

    def make() -> torch.nn.Module:
        plain = model.make()
        # PEFT asks models of transformers for names that are to be replaced.
        with quietly():
            made: torch.nn.Module = peft.get_peft_model(plain, peft.LoraConfig(**wanted.arguments()))
        return made

    on_meta(model.name, make)
    return replace(model, make=make, task=replace(model.task, lora=wanted))


def _usual_linear_layers(model: torch.nn.Module) -> list[str]:
    """Return the two names that most of a model's linear layers have."""
    import torch

    names = Counter(
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not path.rpartition(".")[2].isdigit()
    )
    return [name for name, _ in names.most_common(2)] or ["NAME"]
