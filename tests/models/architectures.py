"""Models that the tests here measure, built small and with random weights: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import needs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.facts.measurement import Measurement

NEEDS_TRANSFORMERS = needs.package("transformers")
ON_THE_CPU = pytest.mark.gpumem(device="cpu")

SCALARS = 64
"""Bytes: operators with a Python number put it into a tensor or two of one element for as long as they run."""

VOCABULARY = 512
CLASSES = 10

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """A model and a batch for it. Both are random; their shapes are not."""

    make: Callable[..., torch.nn.Module]
    """Takes ``arguments`` by name."""
    arguments: dict[str, Any]
    batch: Callable[[], dict[str, torch.Tensor]]
    dropouts: tuple[str, ...]
    """The arguments that are rates of dropout."""
    some: str
    """Pattern of modules that can be computed again by themselves."""

    def build(self) -> torch.nn.Module:
        return self.make(**self.arguments)

    def but(self, **arguments: Any) -> Architecture:
        return replace(self, arguments=self.arguments | arguments)

    def with_dropout(self, rate: float) -> Architecture:
        return self.but(**dict.fromkeys(self.dropouts, rate))


def of_transformers(name: str, config: str) -> Callable[..., torch.nn.Module]:
    """Builds a model of transformers from its config's arguments."""

    def make(**arguments: Any) -> torch.nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**arguments))

    return make


def token_batch() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (4, 32)), "labels": torch.randint(VOCABULARY, (4, 32))}


def image_batch() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(CLASSES, (4,))}


GPT2 = Architecture(
    of_transformers("GPT2LMHeadModel", "GPT2Config"),
    SIZES | TOKENS,
    token_batch,
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "*.mlp",
)
LLAMA = Architecture(
    of_transformers("LlamaForCausalLM", "LlamaConfig"),
    {**SIZES, **TOKENS, "num_key_value_heads": 2},
    token_batch,
    ("attention_dropout",),
    "*.mlp",
)
BERT = Architecture(
    of_transformers("BertForMaskedLM", "BertConfig"),
    SIZES | TOKENS,
    token_batch,
    ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "*.intermediate",
)
VIT = Architecture(
    of_transformers("ViTForImageClassification", "ViTConfig"),
    {**SIZES, "image_size": 32, "patch_size": 8, "num_labels": CLASSES},
    image_batch,
    ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "*.mlp",
)


def bytes_of(measurement: Measurement) -> dict[str, int]:
    """The metrics that are bytes; times do not repeat."""
    return {name: int(value) for name, value in measurement.metrics.items() if name not in ("step_time", "throughput")}


def assert_rows_add_up(measurement: Measurement) -> None:
    """The rows of its composition are the measured peak, to the byte, and at most 2 % of them are unattributed."""
    composition = measurement.composition
    assert composition.notes == ()
    assert composition.total == measurement.peak_allocated
    assert composition.rest == 0
    assert abs(composition.of("unattributed")) <= 0.02 * composition.total
    assert composition.of("parameter") > 0
