"""Add PEFT adapters to a named model. The model's other weights are frozen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.library import library_of
from pytest_gpumem.measuring.models.lora import ALL_LINEAR
from pytest_gpumem.measuring.models.named_model import on_meta
from pytest_gpumem.measuring.steps.model_step import quietly

if TYPE_CHECKING:
    import torch

    from pytest_gpumem.measuring.models.lora import Lora
    from pytest_gpumem.measuring.models.named_model import NamedModel


def with_adapters(model: NamedModel, lora: Lora) -> NamedModel:
    """Return the model with LoRA adapters. Only the adapters' weights are trained.

    If ``lora`` names no targets, PEFT chooses targets by the kind of model. For ``hf:meta-llama/Llama-3.2-1B``, for example, it
    adds adapters to ``q_proj`` and ``v_proj``. If PEFT does not know a kind of transformers model, all linear layers are
    targets.

    Args:
        model: The model without adapters.
        lora: The adapters' settings.

    Raises:
        ModelError: PEFT is not installed, knows no targets for this model, or finds no module with a target's name.
    """
    peft = library_of(model.name, "peft")
    plain = on_meta(model.name, model.make)
    if not lora.targets:
        kind = getattr(getattr(plain, "config", None), "model_type", None)
        if kind is None:
            raise ModelError(
                f"{model.name}: PEFT knows no modules of {model.class_name} for LoRA; name some, like "
                f"targets={'+'.join(_usual_linear_layers(plain))}"
            )
        if kind not in peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
            lora = replace(lora, targets=(ALL_LINEAR,))

    def make() -> torch.nn.Module:
        plain = model.make()
        # PEFT reads deprecated attributes in transformers models, which print warnings.
        with quietly():
            adapted: torch.nn.Module = peft.get_peft_model(plain, peft.LoraConfig(**lora.arguments()))
        return adapted

    on_meta(model.name, make)
    return replace(model, make=make, task=replace(model.task, lora=lora))


def _usual_linear_layers(model: torch.nn.Module) -> list[str]:
    """Return the two most frequent names among a model's linear layers."""
    import torch

    names = Counter(
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not path.rpartition(".")[2].isdigit()
    )
    return [name for name, _ in names.most_common(2)] or ["NAME"]
