"""A config.json that strangers wrote: no key of it makes a library load code, weights or another repository."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.name import ModelName
from pytest_gpumem.measuring.models.sources import named_model
from pytest_gpumem.measuring.models.task import INFERENCE, TRAINING
from pytest_gpumem.tools.main import main
from tests.models.architectures import NEEDS_TRANSFORMERS, SIZES, TOKENS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = NEEDS_TRANSFORMERS
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **TOKENS}
KERNEL = "evil/kern"
REFUSED: dict[str, dict[str, Any]] = {
    # transformers 4.55 to 4.57 give it to kernels.get_kernel.
    "_attn_implementation_internal": {"_attn_implementation_internal": KERNEL},
    "attn_implementation": {"attn_implementation": KERNEL},
    "_attn_implementation": {"_attn_implementation": f"{KERNEL}@v1:flash"},
    "_experts_implementation": {"_experts_implementation": KERNEL},
    "experts_implementation": {"experts_implementation": KERNEL},
    "_experts_implementation_internal": {"_experts_implementation_internal": f"paged|{KERNEL}"},
    "attn_implementation.text_config": {"attn_implementation": {"": "sdpa", "text_config": KERNEL}},
    "text_config._attn_implementation_internal": {"text_config": {"_attn_implementation_internal": KERNEL}},
    "parts.attn_implementation": {"parts": [{"a": 1}, {"attn_implementation": KERNEL}]},
    "use_kernels": {"use_kernels": True},
    "kernel_config": {"kernel_config": {"RMSNorm": "evil/kern:RMSNorm"}},
    # LightGlue up to transformers 5.0 fetches the detector, and runs its code.
    "trust_remote_code": {"trust_remote_code": True, "keypoint_detector_config": {"_name_or_path": "evil/x"}},
    "vision_config.trust_remote_code": {"vision_config": {"trust_remote_code": "yes"}},
    "backbone": {"backbone": "hf-hub:evil/model", "use_timm_backbone": True},
    "backbone_config.backbone": {"backbone_config": {"model_type": "timm_backbone", "backbone": "evil/model"}},
    "architecture": {"architecture": "local-dir:evil", "pretrained_cfg": {}},
    "model_args.checkpoint_path": {"model_args": {"checkpoint_path": "weights.bin"}},
    "backbone_kwargs.pretrained_cfg.url": {"backbone_kwargs": {"pretrained_cfg": {"url": "https://evil.example/w"}}},
    # Would rename a harmless key to one that is refused.
    "attribute_map": {"attribute_map": {"harmless": "_attn_implementation_internal"}, "harmless": KERNEL},
    "__dict__": {"__dict__": {"harmless": 1}},
}


def written(folder: Path, values: dict[str, Any]) -> ModelName:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return ModelName("hf", str(folder))


@pytest.mark.parametrize("path", REFUSED)
def test_a_key_that_names_code_or_files_is_refused(tmp_path, path):
    with pytest.raises(ModelError) as raised:
        named_model(written(tmp_path, {**LLAMA, **REFUSED[path]}), None, TRAINING)
    assert f"names code or files outside the library ({path}: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_configuration_from_the_hub_is_checked_like_one_in_a_folder(tmp_path, monkeypatch):
    import transformers

    written(tmp_path, {**LLAMA, "_attn_implementation_internal": KERNEL})
    monkeypatch.setattr(transformers.utils, "cached_file", lambda *_: str(tmp_path / "config.json"))
    with pytest.raises(ModelError, match=r"^hf:evil/model: the configuration names code"):
        named_model(ModelName("hf", "evil/model"), None, TRAINING)


@pytest.mark.parametrize(
    "values", [{"attn_implementation": "eager"}, {"_attn_implementation": None}, {"use_kernels": False}]
)
def test_what_is_in_the_library_may_be_named(tmp_path, values):
    model = named_model(written(tmp_path, {**LLAMA, **values}), None, TRAINING)
    assert model.class_name == "LlamaForCausalLM"


def test_keys_that_lead_elsewhere_are_left_out_also_in_parts(tmp_path, monkeypatch):
    import huggingface_hub
    import torch

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    elsewhere = {
        "_name_or_path": "evil/x",
        "auto_map": {"AutoConfig": "evil/x--theirs.Theirs", "AutoModel": "evil/x--theirs.Theirs"},
        "configuration_files": ["config.1.0.0.json"],
        "custom_pipelines": {"evil": {"impl": "theirs.Theirs"}},
        "quantization_config": {"quant_method": "evil", "modules": ["theirs"]},
        "tokenizer_class": "theirs.Theirs",
    }
    text = {**SIZES, **TOKENS, "model_type": "clip_text_model", **elsewhere}
    seen = {**SIZES, "image_size": 32, "patch_size": 8, "model_type": "clip_vision_model", **elsewhere}
    values = {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": text, "vision_config": seen}
    (tmp_path / "config.1.0.0.json").write_text("{", encoding="utf-8")
    (tmp_path / "theirs.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    name = written(tmp_path, {**values, **elsewhere, "projection_dim": 32})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", asked)
    model = named_model(name, None, INFERENCE).build(torch.float32)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._name_or_path for part in parts] == [parts[0]._name_or_path, "", ""]
    assert "evil" not in parts[0]._name_or_path
    assert not any(hasattr(part, key) for part in parts for key in ("auto_map", "custom_pipelines"))


@pytest.mark.parametrize("name", ["pipeline", "models", "AutoModel", "Trainer", "LlamaConfig", "__version__"])
def test_a_class_that_is_no_model_is_none(tmp_path, name):
    with pytest.raises(ModelError, match=f"has no class {name}$"):
        named_model(written(tmp_path, {**LLAMA, "architectures": [name, 5]}), None, TRAINING)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "the JSON file contains no object"),
        ("[" * 100_000, "the JSON file is nested too deeply"),
        ('{"a": ' * 900 + "1" + "}" * 900, "the configuration names no model"),
        (
            json.dumps({"hidden_size": 64}),
            'the configuration names no model; add one to config.json, like "model_type"',
        ),
    ],
)
def test_what_is_no_configuration_is_told_in_a_sentence(tmp_path, text, told):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError) as raised:
        named_model(ModelName("hf", str(tmp_path / "config.json")), None, TRAINING)
    assert told in str(raised.value) or "nested too deeply" in str(raised.value)


def test_advise_refuses_a_folder_whose_configuration_names_a_kernel(tmp_path):
    name = written(tmp_path, {**LLAMA, "_attn_implementation_internal": KERNEL})
    done = CliRunner().invoke(main, ["advise", str(name), "--device", "cpu", "--fits", "24GB"])
    assert done.exit_code == 2
    assert '(_attn_implementation_internal: "evil/kern")' in done.output
