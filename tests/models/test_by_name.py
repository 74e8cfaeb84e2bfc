"""Models by name: a model, a batch and a loss of transformers' classes, from configurations in a folder. Nothing is downloaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.hub import named_model
from pytest_gpumem.models.name import BatchSize, ModelName, batch_size, model_name
from tests.models.architectures import NEEDS_TRANSFORMERS, SIZES, TOKENS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = NEEDS_TRANSFORMERS
ROUTED = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
IMAGES = {"image_size": 32, "patch_size": 8}
OF_BOTH = {
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
T5 = {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "pad_token_id": 0}
SOUNDS = {"conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embeddings": 16}
CLASSES = {
    "LlamaForCausalLM": ("llama", {**SIZES, **TOKENS}),
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 64}),
    "MixtralForCausalLM": ("mixtral", {**SIZES, **TOKENS, **ROUTED, "num_local_experts": 4}),
    "BertForMaskedLM": ("bert", {**SIZES, **TOKENS}),
    "BertForPreTraining": ("bert", {**SIZES, **TOKENS}),
    "BertForSequenceClassification": ("bert", {**SIZES, **TOKENS, "num_labels": 3}),
    "BertForTokenClassification": ("bert", {**SIZES, **TOKENS, "num_labels": 3}),
    "BertForQuestionAnswering": ("bert", {**SIZES, **TOKENS}),
    "T5ForConditionalGeneration": ("t5", {**T5, "decoder_start_token_id": 0}),
    "BartForConditionalGeneration": ("bart", {**OF_BOTH, **TOKENS}),
    "WhisperForConditionalGeneration": (
        "whisper",
        {**OF_BOTH, **TOKENS, "num_mel_bins": 16, "max_source_positions": 32, "decoder_start_token_id": 0},
    ),
    "Wav2Vec2ForCTC": ("wav2vec2", {**SIZES, **SOUNDS, "num_feat_extract_layers": 2, "vocab_size": 32}),
    "ViTForImageClassification": ("vit", {**SIZES, **IMAGES}),
    "CLIPModel": (
        "clip",
        {"text_config": {**SIZES, **TOKENS}, "vision_config": {**SIZES, **IMAGES}, "projection_dim": 32},
    ),
}


def written(folder: Path, model_class: str | None, model_type: str, values: dict[str, Any]) -> ModelName:
    """Write a configuration as the hub has them, and return its name."""
    names = {} if model_class is None else {"architectures": [model_class]}
    text = json.dumps({**names, "model_type": model_type, **values})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return ModelName("hf", str(folder))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_gets_a_batch_that_it_has_a_loss_of(tmp_path, name):
    size = BatchSize(2, {"Wav2Vec2ForCTC": 800}.get(name, 16))
    size = BatchSize(2) if name.startswith("ViT") else size
    model = named_model(written(tmp_path, name, *CLASSES[name]), size, trains=True)
    assert model.model_class.__name__ == name
    loss = model.build(torch.float32)(**model.batch()).loss
    assert loss.shape == ()
    assert loss.requires_grad


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration", "CLIPModel", "BertModel"])
def test_inference_needs_no_labels(tmp_path, name):
    values = CLASSES.get(name, CLASSES["BertForMaskedLM"])
    model = named_model(written(tmp_path, name, *values), BatchSize(2, 16), trains=False)
    batch = model.batch()
    assert not {"labels", "start_positions"} & batch.keys()
    with torch.inference_mode():
        assert model.build(torch.float32).eval()(**batch) is not None


def test_weights_are_made_in_the_dtype_that_is_asked_for(tmp_path):
    model = named_model(written(tmp_path, "LlamaForCausalLM", *CLASSES["LlamaForCausalLM"]), None, trains=True)
    assert {one.dtype for one in model.build(torch.bfloat16).parameters()} == {torch.bfloat16}
    assert {one.dtype for one in model.build(torch.float32).parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


def test_a_tiny_one_has_two_layers_of_each_kind(tmp_path):
    name = written(tmp_path, "BartForConditionalGeneration", "bart", {**OF_BOTH, **TOKENS})
    tiny = named_model(ModelName("hf-tiny", name.name), None, trains=True)
    assert (tiny.config.encoder_layers, tiny.config.decoder_layers) == (2, 2)
    several = {"num_hidden_layers": 6, "layer_types": ["full_attention", "sliding_attention"] * 3, "head_dim": 16}
    written(tmp_path, "Gemma2ForCausalLM", "gemma2", {**SIZES, **TOKENS, **several})
    tiny = named_model(ModelName("hf-tiny", name.name), None, trains=True)
    assert (tiny.config.num_hidden_layers, len(tiny.config.layer_types)) == (2, 2)
    assert tiny.build(torch.float32)(**tiny.batch()).loss > 0


def test_a_batch_is_as_long_as_the_model_has_positions_and_images_as_large_as_it_takes_them(tmp_path):
    model = named_model(written(tmp_path, "LlamaForCausalLM", *CLASSES["LlamaForCausalLM"]), None, trains=True)
    assert model.title == f"hf:{tmp_path}: LlamaForCausalLM, random weights; batch 1x64"
    assert model.batch()["input_ids"].shape == (1, 64)
    model = named_model(written(tmp_path, None, *CLASSES["ViTForImageClassification"]), BatchSize(3), trains=True)
    assert model.batch()["pixel_values"].shape == (3, 3, 32, 32), "the class is the kind's usual one"


def test_names_are_of_a_source_or_else_a_function_is_meant():
    assert model_name("hf:org/name") == ModelName("hf", "org/name")
    assert model_name("hf-tiny:org/name").is_tiny
    assert model_name("my_project.models:make") is None
    assert model_name("my_project") is None
    with pytest.raises(ModelError, match="names no model; write hf:ORG/NAME"):
        model_name("hf:")


@pytest.mark.parametrize(("text", "size"), [("4x4096", BatchSize(4, 4096)), ("32", BatchSize(32))])
def test_sizes_are_read_as_they_are_written(text, size):
    assert batch_size(text) == size
    assert str(size) == text


@pytest.mark.parametrize("text", ["", "0", "4x0", "4*16", "4x", "x4", "-1", "4x4x4", "four", "1" * 30, "٤"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ModelError, match="is no size of a batch: write samples and tokens of each, like 4x4096"):
        batch_size(text)


@pytest.mark.parametrize(
    ("config", "size", "told"),
    [
        (None, None, "there is no config.json in this folder"),
        ("{", None, "not a valid JSON file"),
        ({"model_type": "nothing_known"}, None, "nothing_known"),
        ({"model_type": "llama", "architectures": ["NoSuchModel"]}, None, "has no class NoSuchModel"),
        (
            {"model_type": "llama", "architectures": ["LlamaModel"]},
            None,
            "LlamaModel has no loss, as its forward takes no labels",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMultipleChoice"]},
            None,
            "what labels BertForMultipleChoice takes",
        ),
        ({"model_type": "segformer", "architectures": ["SegformerDecodeHead"]}, None, "SegformerDecodeHead"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            BatchSize(1, 9999),
            "has 512 positions, and the batch has",
        ),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
            BatchSize(8, 9),
            "have its own size: write 8 for the batch",
        ),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7},
            None,
            "not a multiple of the number of",
        ),
        (
            {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
            None,
            "takes pixel_values beside texts, in parts that follow none",
        ),
        (
            {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 514},
            BatchSize(1, 514),
            "has 512 positions, and the batch has 514",
        ),
        (
            {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}},
            None,
            "needs code of its own (trust_remote_code), which is not run",
        ),
    ],
)
def test_what_no_model_or_batch_can_be_made_of_is_told_in_a_sentence(tmp_path, config, size, told):
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    with pytest.raises(ModelError) as raised:
        named_model(ModelName("hf", str(tmp_path)), size, trains=True)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_model_that_cannot_be_fetched_is_told_in_a_sentence(monkeypatch):
    import transformers

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your internet connection")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError, match=r"^hf:gone/model: We couldn't connect to 'https://huggingface.co' Check your"):
        named_model(ModelName("hf", "gone/model"), None, trains=True)
