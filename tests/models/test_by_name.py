"""Models by name: a model, a batch and a loss of transformers' classes, from configurations in a folder. Nothing is downloaded."""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.devices.registry import make_cpu
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.models.images import cross_entropy
from pytest_gpumem.measuring.models.inputs import TARGET, Inputs, RandomBoxes, RandomTensor
from pytest_gpumem.measuring.models.lora import Lora, lora
from pytest_gpumem.measuring.models.name import BatchSize, ModelName, batch_size
from pytest_gpumem.measuring.models.named_model import NamedModel
from pytest_gpumem.measuring.models.sources import model_name, named_model
from pytest_gpumem.measuring.models.task import INFERENCE, TRAINING, Task
from pytest_gpumem.measuring.models.transformers import _shrink
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.inference import prepared_infer_step
from pytest_gpumem.measuring.steps.model_source import ModelFactory
from pytest_gpumem.tools.advise.trial import subject_by_name, try_config
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
SEGFORMER = {
    "hidden_sizes": [8] * 4,
    "depths": [1] * 4,
    "num_attention_heads": [1] * 4,
    "decoder_hidden_size": 16,
}
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
    model = named_model(written(tmp_path, name, *CLASSES[name]), size, TRAINING)
    assert model.class_name == name
    loss = model.build(torch.float32)(**model.batch()).loss
    assert loss.shape == ()
    assert loss.requires_grad


@pytest.mark.parametrize(
    ("name", "model_type", "values"),
    [
        ("ViTForImageClassification", "vit", {**SIZES, **IMAGES}),
        ("DeiTForImageClassification", "deit", {**SIZES, **IMAGES, "image_size": [32, 64]}),
        # Their configurations say nothing of a size.
        ("ResNetForImageClassification", "resnet", {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}),
        ("SegformerForSemanticSegmentation", "segformer", SEGFORMER),
    ],
)
def test_a_model_of_images_takes_those_of_the_side_that_the_batch_has(tmp_path, name, model_type, values):
    model = named_model(written(tmp_path, name, model_type, values), BatchSize(2, 96), TRAINING)
    assert model.title.endswith("batch 2 of 3x96x96")
    assert model.inputs.size == BatchSize(2, 96)
    batch = model.batch()
    assert batch["pixel_values"].shape == (2, 3, 96, 96)
    assert model.build(torch.float32)(**batch).loss.requires_grad


def test_without_a_side_images_have_the_shape_of_the_configuration(tmp_path):
    values = {**SIZES, **IMAGES, "image_size": [32, 64]}
    model = named_model(written(tmp_path, "ViTForImageClassification", "vit", values), BatchSize(2), TRAINING)
    assert model.title.endswith("batch 2 of 3x32x64")
    assert model.inputs.size == BatchSize(2)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration", "CLIPModel", "BertModel"])
def test_inference_needs_no_labels(tmp_path, name):
    values = CLASSES.get(name, CLASSES["BertForMaskedLM"])
    model = named_model(written(tmp_path, name, *values), BatchSize(2, 16), INFERENCE)
    batch = model.batch()
    assert not {"labels", "start_positions"} & batch.keys()
    with torch.inference_mode():
        assert model.build(torch.float32).eval()(**batch) is not None


def generating(name: ModelName, size: BatchSize | None, new_tokens: int) -> NamedModel:
    return named_model(name, size, Task(trains=False, new_tokens=new_tokens))


def test_each_new_token_takes_its_keys_and_values_and_those_of_one_that_is_made_anew(tmp_path):
    name = written(tmp_path, "LlamaForCausalLM", *CLASSES["LlamaForCausalLM"])
    device = make_cpu()
    device.open()
    peaks = []
    for new_tokens in (2, 12, 24):  # the first fills caches of the process
        model = generating(name, BatchSize(3, 1), new_tokens)
        config = StepConfig.parse("fp32")
        context = MeasuringContext(device, None)
        source = ModelFactory(partial(model.build, torch.float32))
        with prepared_infer_step(context, source, model.batch, config=config, new_tokens=new_tokens) as step:
            peaks.append(int(step.measure().metrics()["peak_allocated"]))
    device.close()
    layers, heads, head_dim, samples = SIZES["num_hidden_layers"], SIZES["num_attention_heads"], 16, 3
    cache = 2 * layers * heads * head_dim * samples * 4
    copied, text = cache // (2 * layers), 2 * samples * 8
    assert peaks[2] - peaks[1] == (24 - 12) * (cache + copied + text)


@pytest.mark.parametrize(
    ("name", "size", "batch", "title"),
    [
        ("LlamaForCausalLM", None, {"input_ids": (1, 60)}, "1x60"),
        ("LlamaForCausalLM", BatchSize(2), {"input_ids": (2, 60)}, "2x60"),
        ("BartForConditionalGeneration", None, {"input_ids": (1, 64)}, "1x64"),
        (
            "WhisperForConditionalGeneration",
            BatchSize(2),
            {"input_features": (2, 16, 64)},
            "2 of 16x64",
        ),
    ],
)
def test_a_prompt_leaves_room_for_what_follows_it_and_a_decoder_makes_its_own(tmp_path, name, size, batch, title):
    model = generating(written(tmp_path, name, *CLASSES[name]), size, 4)
    assert {one: tuple(tensor.shape) for one, tensor in model.batch().items()} == batch
    assert model.title.endswith(f": {name}, random weights; generation of 4 tokens, batch {title}")


def test_what_a_configuration_asks_of_generation_is_left_out(tmp_path):
    asked = {"num_beams": 3, "no_repeat_ngram_size": 2, "forced_eos_token_id": 1, "decoder_start_token_id": 2}
    values = {**OF_BOTH, **TOKENS, **asked}
    model = generating(written(tmp_path, "BartForConditionalGeneration", "bart", values), BatchSize(2, 8), 5)
    text = model.build(torch.float32).eval().generate(**model.batch(), max_new_tokens=5)
    assert text.shape == (2, 1 + 5)
    assert text[:, 0].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("name", "size", "new_tokens", "message"),
    [
        (
            "LlamaForCausalLM",
            BatchSize(1, 60),
            8,
            "has 64 positions, but a prompt of 60 tokens with 8 new tokens needs 68",
        ),
        ("LlamaForCausalLM", None, 64, "has 64 positions, but a prompt of 1 token with 64 new tokens needs 65"),
        ("LlamaForCausalLM", None, 65, "has 64 positions, which are too few to generate 65 tokens"),
        ("BartForConditionalGeneration", None, 65, "has 64 positions, which are too few to generate 65 tokens"),
        ("WhisperForConditionalGeneration", BatchSize(2, 8), 4, "have a fixed length: write only 2 for the batch"),
        ("BertForMaskedLM", None, 4, "BertForMaskedLM generates no tokens, unlike LlamaForCausalLM and "),
        ("ViTForImageClassification", None, 4, "ViTForImageClassification generates no tokens"),
    ],
)
def test_what_cannot_be_generated_is_told_in_a_sentence(tmp_path, name, size, new_tokens, message):
    with pytest.raises(ModelError, match=message):
        generating(written(tmp_path, name, *CLASSES[name]), size, new_tokens)


@pytest.mark.parametrize("source", ["timm", "torchvision", "diffusers"])
def test_models_of_other_libraries_generate_no_tokens(source):
    with pytest.raises(ModelError, match=f"^{source}:any generates no tokens; only models from hf: and hf-tiny: do$"):
        generating(ModelName(source, "any"), None, 4)


def test_adapters_alone_are_trained_on_what_peft_knows_or_on_all_linear_layers(tmp_path):
    pytest.importorskip("peft")
    asked = Task(lora=Lora(4, 8, ("down_proj",)))
    name = written(tmp_path, "LlamaForCausalLM", *CLASSES["LlamaForCausalLM"])
    model = named_model(name, BatchSize(2, 16), asked)
    trained = {one: p for one, p in model.build(torch.bfloat16).named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == SIZES["num_hidden_layers"] * 4 * (128 + 64)
    assert model.title.endswith("; training of LoRA r=4,alpha=8,targets=down_proj, batch 2x16")
    # PEFT has no targets for these.
    granite = written(tmp_path, "GraniteForCausalLM", "granite", {**SIZES, **TOKENS})
    model = named_model(granite, BatchSize(2, 16), Task(lora=Lora(4)))
    assert model.task.lora == Lora(4, None, ("all-linear",))
    loss = model.build(torch.float32)(**model.batch()).loss
    loss.backward()
    with pytest.raises(ModelError, match=r"cannot be built: .*Error: Target modules .*'fc1'.* not found"):
        named_model(granite, None, Task(lora=Lora(4, None, ("fc1",))))


def test_adapters_need_peft_and_are_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    name = written(tmp_path, "LlamaForCausalLM", *CLASSES["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"needs peft: pip install peft$"):
        named_model(name, None, Task(lora=Lora(4)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("r=8", Lora(8)),
        ("alpha=16, r=8", Lora(8, 16)),
        ("r=8,targets=q_proj+v_proj", Lora(8, None, ("q_proj", "v_proj"))),
        ("r=0", "LoRA's r is '0', expected a whole number, 1 or more"),
        ("r=many", "LoRA's r is 'many', expected a whole number, 1 or more"),
        ("8", "'8' is not a LoRA setting: write it like r=8 or r=8,alpha=16"),
        ("alpha=16", "LoRA needs its rank: write it like r=8"),
        ("rank=8", "LoRA has no setting 'rank' here; valid: r, alpha, targets"),
        ("r=8,r=4", "LoRA's r is given twice"),
        ("r=8,alpha=-1", "LoRA's alpha is '-1', expected"),
        ("r=8,targets=+", "LoRA's targets name no module"),
        ("", "'' is not a LoRA setting"),
    ],
)
def test_settings_of_lora_are_those_that_are_written_or_a_sentence(text, said):
    if isinstance(said, Lora):
        assert lora(text) == said
        assert lora(str(said)) == said
        return
    with pytest.raises(ModelError) as refused:
        lora(text)
    assert str(refused.value).startswith(said)


def test_weights_are_made_in_the_dtype_that_is_asked_for(tmp_path):
    model = named_model(written(tmp_path, "LlamaForCausalLM", *CLASSES["LlamaForCausalLM"]), None, TRAINING)
    assert {one.dtype for one in model.build(torch.bfloat16).parameters()} == {torch.bfloat16}
    assert {one.dtype for one in model.build(torch.float32).parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


def test_a_tiny_one_has_two_layers_and_the_first_of_each_further_kind(tmp_path):
    name = written(tmp_path, "BartForConditionalGeneration", "bart", {**OF_BOTH, **TOKENS})
    tiny = named_model(ModelName("hf-tiny", name.name), None, TRAINING)
    config = tiny.build(torch.float32).config
    assert (config.encoder_layers, config.decoder_layers) == (2, 2)
    several = {"num_hidden_layers": 6, "layer_types": ["full_attention", "sliding_attention"] * 3, "head_dim": 16}
    written(tmp_path, "Gemma2ForCausalLM", "gemma2", {**SIZES, **TOKENS, **several})
    tiny = named_model(ModelName("hf-tiny", name.name), None, TRAINING)
    built = tiny.build(torch.float32)
    assert (built.config.num_hidden_layers, len(built.config.layer_types)) == (2, 2)
    several["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"] * 3
    written(tmp_path, "Gemma2ForCausalLM", "gemma2", {**SIZES, **TOKENS, **several})
    tiny = named_model(ModelName("hf-tiny", name.name), None, TRAINING)
    built = tiny.build(torch.float32)
    assert built.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert built.config.num_hidden_layers == 3
    assert built(**tiny.batch()).loss > 0


def test_a_tiny_model_keeps_experts_behind_dense_layers_and_their_entries():
    config = SimpleNamespace(
        num_hidden_layers=5, first_k_dense_replace=3, window=[1, 2, 3, 4, 5], kind=["a", "a", "b", "a", "b"]
    )
    _shrink(config)
    assert vars(config) == {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "window": [1, 2, 3],
        "kind": ["a", "a", "b"],
    }


def test_a_batch_is_as_long_as_the_positions_and_images_have_the_models_size(tmp_path):
    model = named_model(written(tmp_path, "LlamaForCausalLM", *CLASSES["LlamaForCausalLM"]), None, TRAINING)
    assert model.title == f"hf:{tmp_path}: LlamaForCausalLM, random weights; training, batch 1x64"
    assert model.batch()["input_ids"].shape == (1, 64)
    model = named_model(written(tmp_path, None, *CLASSES["ViTForImageClassification"]), BatchSize(3), TRAINING)
    assert model.batch()["pixel_values"].shape == (3, 3, 32, 32), "the class is the kind's usual one"


def test_names_are_of_a_source_or_else_a_function_is_meant():
    assert model_name("hf:org/name") == ModelName("hf", "org/name")
    assert model_name("hf-tiny:org/name").is_tiny
    assert model_name("my_project.models:make") is None
    assert model_name("my_project") is None
    assert model_name("timm:resnet50.a1_in1k") == ModelName("timm", "resnet50.a1_in1k")
    with pytest.raises(ModelError, match="names no model; write hf:ORG/NAME"):
        model_name("hf:")
    with pytest.raises(ModelError, match=r"names no model; write timm:NAME, as timm.list_models\(\) has them"):
        model_name("timm:")


@pytest.mark.parametrize("source", ["transformers", "timm", "torchvision", "diffusers"])
def test_a_library_that_is_missing_or_of_another_build_is_told_in_a_sentence(monkeypatch, source):
    name = ModelName({"transformers": "hf"}.get(source, source), "any")
    monkeypatch.setitem(sys.modules, source, None)
    with pytest.raises(ModelError, match=rf"^{name.source}:any needs {source}: pip install {source}"):
        named_model(name, None, TRAINING)

    def built_for_another(word: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("pytest_gpumem.measuring.models.library.import_quietly", built_for_another)
    with pytest.raises(
        ModelError, match=f"needs a build of {source} for the installed torch: operator torchvision::nms"
    ):
        named_model(name, None, TRAINING)


def test_a_target_goes_along_with_its_samples_and_only_the_loss_sees_it():
    arguments = {"input": RandomTensor((8, 4)), TARGET: RandomTensor((8,), 3)}
    model = NamedModel(
        ModelName("timm", "a"), "Linear", lambda: torch.nn.Linear(4, 3), Inputs(BatchSize(8), arguments), cross_entropy
    )
    batch = model.batch()
    subject = subject_by_name(model)
    tried = try_config(make_cpu(), subject, StepConfig.parse("fp32,accumulate=2"))
    assert tried.why_not == ""
    assert subject.samples == 8
    output = model.build(torch.float32)(**batch)
    assert output.shape == (8, 3)
    assert subject.loss(output, batch) == torch.nn.functional.cross_entropy(output, batch[TARGET])


def test_auxiliary_classifiers_add_to_the_loss_and_one_that_is_left_out_does_not():
    logits, target = torch.randn(4, 3), torch.randint(3, (4,))
    one = cross_entropy(logits, {TARGET: target})
    assert cross_entropy({"out": logits, "aux": logits}, {TARGET: target}) == 2 * one
    assert cross_entropy((logits, None), {TARGET: target}) == one


def test_boxes_lie_in_their_image_and_are_not_empty():
    boxes = RandomBoxes(200, 16).make()
    assert boxes.min() >= 0
    assert boxes.max() <= 16
    assert ((boxes[:, 2:] - boxes[:, :2]) >= 1).all()


@pytest.mark.parametrize(("text", "size"), [("4x4096", BatchSize(4, 4096)), ("32", BatchSize(32))])
def test_sizes_are_read_as_they_are_written(text, size):
    assert batch_size(text) == size
    assert str(size) == text


@pytest.mark.parametrize("text", ["", "0", "4x0", "4*16", "4x", "x4", "-1", "4x4x4", "four", "1" * 30, "٤"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(
        ModelError,
        match=r"is not a batch size: write SAMPLES like 32, SAMPLESxTOKENS like 4x4096, or for images and latents",
    ):
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
            "LlamaModel has no loss, because its forward takes no labels",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMultipleChoice"]},
            None,
            "the labels of BertForMultipleChoice are not known here",
        ),
        ({"model_type": "segformer", "architectures": ["SegformerDecodeHead"]}, None, "SegformerDecodeHead"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            BatchSize(1, 9999),
            "has 512 positions, but the batch has",
        ),
        (
            {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]},
            BatchSize(8),
            "does not say how large images are; write 8x224 for the batch",
        ),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7},
            None,
            "not a multiple of the number of",
        ),
        (
            {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
            None,
            "takes pixel_values in addition to texts, and their number per text is not known here",
        ),
        (
            {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 514},
            BatchSize(1, 514),
            "has 512 positions, but the batch has 514",
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
        named_model(ModelName("hf", str(tmp_path)), size, TRAINING)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["hf", "hf-tiny", "diffusers"])
@pytest.mark.parametrize("name", ["/gone/model", "./gone", "../gone/model", "~/gone", "sizes/llama.json", "gone.json"])
def test_a_path_at_which_nothing_lies_is_not_looked_for_on_the_hub(source, name):
    with pytest.raises(ModelError) as raised:
        named_model(ModelName(source, name), None, TRAINING)
    assert str(raised.value) == f"{source}:{name}: there is no such file or folder here"


def test_a_model_that_cannot_be_fetched_is_told_in_a_sentence(monkeypatch):
    import transformers

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your internet connection")

    monkeypatch.setattr(transformers.utils, "cached_file", offline)
    with pytest.raises(ModelError) as raised:
        named_model(ModelName("hf", "gone/model"), None, TRAINING)
    assert str(raised.value) == (
        "hf:gone/model: We couldn't connect to 'https://huggingface.co' Check your internet connection. "
        "Without the network, write hf: and the path of a folder with config.json"
    )
