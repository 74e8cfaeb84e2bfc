"""How a project's models are built, with random weights and small, and how their step is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.steps.config import StepConfig
from pytest_gpumem.steps.inference import prepared_infer_step
from pytest_gpumem.steps.prepared import prepared_function
from pytest_gpumem.steps.training import prepared_train_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from corpus_project import Project

    from pytest_gpumem.steps.prepared import MeasuringContext, PreparedStep
    from pytest_gpumem.values.composition import Explanation

    Batch = dict[str, torch.Tensor]
    Recipe = Callable[[MeasuringContext, Project], Explanation]

SEED = 0
_VOCABULARY = 256
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
_TOKENS = {"vocab_size": _VOCABULARY, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 1}
_HEADS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "bert": ("BertForMaskedLM", "BertConfig"),
    "vit": ("ViTForImageClassification", "ViTConfig"),
}


def model_of(name: str, module: Any, **settings: Any) -> torch.nn.Module:
    """A model of transformers, of the classes of its imported file."""
    sizes = _SIZES | ({"image_size": 48, "patch_size": 4, "num_labels": 10} if name == "vit" else _TOKENS)
    if name == "gpt2":
        sizes["n_inner"] = sizes.pop("intermediate_size")
    head, config = _HEADS[name]
    model: torch.nn.Module = getattr(module, head)(getattr(module, config)(**sizes | settings))
    return model


def batch_of(name: str, samples: int = 4, length: int = 96) -> Batch:
    """What a model of transformers takes, with labels."""
    if name == "vit":
        return {"pixel_values": torch.randn(samples, 3, 48, 48), "labels": torch.randint(10, (samples,))}
    ids = torch.randint(_VOCABULARY, (samples, length))
    return {"input_ids": ids, "labels": ids.clone()}


def trained(name: str, config: str = "", *, samples: int = 4, length: int = 96, **settings: Any) -> Recipe:
    """``gpumem.train_step`` of a model, as a factory; ``settings`` are those of the model's config."""

    def recipe(bench: MeasuringContext, project: Project) -> Explanation:
        with project.imported(name) as module:
            torch.manual_seed(SEED)
            batch = batch_of(name, samples, length)
            return _explanation(
                prepared_train_step(
                    bench,
                    lambda: model_of(name, module, **settings),
                    batch,
                    config=StepConfig.parse(config) if config else None,
                )
            )

    return recipe


def looped(name: str, loop: str, *, samples: int = 4, length: int = 96, **settings: Any) -> Recipe:
    """``gpumem.measure`` of a step of the project's training script."""

    def recipe(bench: MeasuringContext, project: Project) -> Explanation:
        with project.imported(name) as module, project.imported("train") as train:
            torch.manual_seed(SEED)
            step = getattr(train, loop)(model_of(name, module, **settings), batch_of(name, samples, length))
            return _explanation(prepared_function(bench, step))

    return recipe


def small_gpt(config: str = "", *, training: bool = True, samples: int = 4, length: int = 128, **sizes: Any) -> Recipe:
    """A step of the example project's GPT: ``gpumem.train_step``, or ``gpumem.infer_step``."""

    def recipe(bench: MeasuringContext, project: Project) -> Explanation:
        with project.imported("gpt") as module:
            torch.manual_seed(SEED)
            tokens = torch.randint(256, (samples, length))

            def build() -> torch.nn.Module:
                model: torch.nn.Module = module.GPT(
                    module.GPTConfig(**{"width": 64, "layers": 3, "context": length} | sizes)
                )
                return model

            if not training:
                return _explanation(prepared_infer_step(bench, build, tokens))
            return _explanation(
                prepared_train_step(
                    bench,
                    build,
                    tokens,
                    loss=module.next_token_loss,
                    config=StepConfig.parse(config) if config else None,
                )
            )

    return recipe


def small_convnet(*, samples: int = 8, side: int = 32) -> Recipe:
    """``gpumem.train_step`` of the example project's convnet."""

    def recipe(bench: MeasuringContext, project: Project) -> Explanation:
        with project.imported("convnet") as module:
            torch.manual_seed(SEED)
            images, labels = torch.randn(samples, 1, side, side), torch.randint(8, (samples,))
            return _explanation(
                prepared_train_step(
                    bench,
                    module.ConvNet,
                    images,
                    loss=lambda logits, _: torch.nn.functional.cross_entropy(logits, labels),
                )
            )

    return recipe


def _explanation(made_ready: AbstractContextManager[PreparedStep]) -> Explanation:
    with made_ready as prepared:
        explanation = prepared.explain(prepared.measure())
    assert not isinstance(explanation, str), explanation
    return explanation
