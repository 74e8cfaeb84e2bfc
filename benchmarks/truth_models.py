"""The models of the table of truth, with random weights: as they are published, and small ones of the same make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Batch = dict[str, torch.Tensor]

SIZES = ("full", "small")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its batch. Both are made on the device that torch makes tensors on by default."""

    build: Callable[[], torch.nn.Module]
    batch: Callable[[], Batch]


def subjects(size: str) -> dict[str, Subject]:
    """The models by name. ``size`` is one of `SIZES`: ``small`` is for a CPU."""
    return _full() if size == "full" else _small()


def _full() -> dict[str, Subject]:
    return {
        "gpt2-small": Subject(_transformer("GPT2LMHeadModel", "GPT2Config"), _tokens(50_257, 8, 1024)),
        # As wide and deep as GPT-2 small; the gate takes a third matrix, so the inner width is two thirds of its.
        "llama-125m": Subject(
            _transformer(
                "LlamaForCausalLM",
                "LlamaConfig",
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=12,
                num_attention_heads=12,
                num_key_value_heads=12,
            ),
            _tokens(32_000, 8, 1024),
        ),
        "bert-base": Subject(_transformer("BertForMaskedLM", "BertConfig"), _tokens(30_522, 16, 512)),
        "vit-b-16": Subject(
            _transformer("ViTForImageClassification", "ViTConfig", num_labels=1000), _images(64, 224, 1000)
        ),
        "t5-small": Subject(
            _transformer("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0),
            _tokens(32_128, 16, 512, targets=128),
        ),
        "resnet-50": Subject(_resnet(), _images(64, 224, 1000)),
    }


def _small() -> dict[str, Subject]:
    encoder = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 1}
    return {
        "gpt2-small": Subject(
            _transformer("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=2, vocab_size=128, **tokens),
            _tokens(128, 2, 16),
        ),
        "llama-125m": Subject(
            _transformer("LlamaForCausalLM", "LlamaConfig", **encoder, vocab_size=128, **tokens), _tokens(128, 2, 16)
        ),
        "bert-base": Subject(
            _transformer("BertForMaskedLM", "BertConfig", **encoder, vocab_size=128), _tokens(128, 2, 16)
        ),
        "vit-b-16": Subject(
            _transformer("ViTForImageClassification", "ViTConfig", **encoder, image_size=64, num_labels=10),
            _images(64, 64, 10),
        ),
        "t5-small": Subject(
            _transformer(
                *("T5ForConditionalGeneration", "T5Config"),
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                vocab_size=128,
                decoder_start_token_id=0,
            ),
            _tokens(128, 2, 16, targets=8),
        ),
        "resnet-50": Subject(_resnet((2, 2), 8, 10), _images(16, 32, 10)),
    }


def _transformer(model: str, config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        # Loading it takes seconds, and the names of the cases need not wait for it.
        import transformers

        made: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return build


def _resnet(*sizes: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        from resnet import ResNet

        return ResNet(*sizes)

    return build


def _tokens(vocabulary: int, samples: int, length: int, targets: int | None = None) -> Callable[[], Batch]:
    """Token ids, and labels of the same length unless ``targets`` says another."""

    def batch() -> Batch:
        return {
            "input_ids": torch.randint(vocabulary, (samples, length)),
            "labels": torch.randint(vocabulary, (samples, targets or length)),
        }

    return batch


def _images(samples: int, side: int, classes: int) -> Callable[[], Batch]:
    def batch() -> Batch:
        return {
            "pixel_values": torch.randn(samples, 3, side, side),
            "labels": torch.randint(classes, (samples,)),
        }

    return batch
