"""Attention implementation of a model, read from the configurations of its attention modules alone."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem.measuring.models.attention import attention_of
from tests import needs

pytestmark = needs.package("transformers")
TEXT = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
TOKENS = {"bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 16}
IMAGES = {**TEXT, "image_size": 32, "patch_size": 16}


def model_of(name, implementation=None, **values):
    import transformers

    config = getattr(transformers, f"{name}Config")(**values)
    config._attn_implementation = implementation
    with torch.device("meta"):
        return getattr(transformers, f"{name}Model")(config)


@pytest.mark.parametrize(
    ("name", "implementation", "attention"),
    [("Llama", None, "sdpa"), ("Llama", "eager", "eager"), ("Mamba2", None, "")],
)
def test_the_implementation_is_that_of_attention_modules(name, implementation, attention):
    values = {**TEXT, "num_heads": 4, "head_dim": 16, "n_groups": 1} if name == "Mamba2" else TEXT
    assert attention_of(model_of(name, implementation, **values)) == attention


def test_a_model_of_images_without_attention_has_none():
    model = model_of("ResNet", embedding_size=8, hidden_sizes=[8], depths=[1])
    assert model.config._attn_implementation is not None
    assert attention_of(model) == ""


def test_each_part_of_a_model_counts():
    parts = {"text_config": {**TEXT, **TOKENS}, "vision_config": IMAGES}
    model = model_of("CLIP", {"text_config": "eager", "vision_config": "sdpa"}, **parts)
    assert attention_of(model) == "eager and sdpa"


def test_no_code_of_a_configuration_runs():
    class Config:
        @property
        def _attn_implementation(self):
            raise AssertionError("it was run")

    class Attention(torch.nn.Identity):
        config = property(lambda _: Config())

    module = Attention()
    module.__dict__["config"] = Config()
    assert attention_of(module) == ""
