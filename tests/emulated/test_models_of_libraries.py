"""Models by name of timm, torchvision and diffusers: what they are given, and what it takes on an emulated GPU, to the byte."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.emulated.processes import REPOSITORY

BEGIN = """
import json, multiprocessing
from pytest_gpumem.tools.advise.cards import begin, try_on
from pytest_gpumem.tools.advise.trial import subject_by_name
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.emulating.emulation.load import become
from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.name import batch_size
from pytest_gpumem.measuring.models.sources import model_name, named_model
from pytest_gpumem.measuring.models.task import Task
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.torch_support.private_api.allocator import gpu_unseen

begin(emulated_gpu("emulated:h100"))
H100 = emulated_gpu("emulated:h100")


def model_of(name, size=None, trains=True):
    return named_model(model_name(name), None if size is None else batch_size(size), Task(trains))


def described(name, size=None, trains=True):
    try:
        with gpu_unseen():
            model = model_of(name, size, trains)
    except ModelError as error:
        return [str(error)]
    return [model.title, {key: shapes(one) for key, one in model.batch().items()}]


def shapes(one):
    if isinstance(one, dict):
        return {key: shapes(part) for key, part in one.items()}
    return [shapes(part) for part in one] if isinstance(one, list) else [*one.shape]


def tried(name, size, config="fp32", trains=True):
    with gpu_unseen():
        subject = subject_by_name(model_of(name, size, trains))
    one, _ = try_on(H100, subject, StepConfig.parse(config))
    return [one.allocated, one.peak] if one.peak is not None else [one.why_not]


def loss_here(name, size):
    # On the CPU, where all is computed.
    with gpu_unseen():
        model = model_of(name, size)
        batch = model.batch()
        loss = model.loss(model.build(torch.float32)(**batch), batch)
    return [[*loss.shape], loss.requires_grad, loss.isfinite().item()]


def as_a_program(build, shape, target_shape, loss_of):
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def program():
        become(H100)
        images = torch.randn(shape).cuda()
        target = torch.randint(10, target_shape).cuda()
        with torch.device("cuda"):
            model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            loss_of(model(images), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        sending.send([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])

    process = multiprocessing.get_context("fork").Process(target=program)
    process.start()
    return receiving.recv()
"""
PARAMETERS_OF_VIT_B = 86_567_656
PARAMETERS_OF_SDXL = 2_567_463_684
TIMM = """
import timm
from torch.nn.functional import cross_entropy

print(json.dumps({
    "plain": described("timm:resnet50", "8"),
    "another size": described("timm:vit_base_patch16_224", "2x256"),
    "one tag's": described("timm:vit_base_patch16_224.augreg_in21k"),
    "unknown": described("timm:resnet5"),
    "nothing like it": described("timm:hf-hub:org/name"),
    "unknown tag": described("timm:vit_base_patch16_224.gone"),
    "no classes": described("timm:vit_small_patch14_dinov2"),
    "of a feature model": described("timm:vit_small_patch14_dinov2", None, False),
    "too small": described("timm:eca_halonext26ts", "8x64"),
    "resnet50": tried("timm:resnet50", "8"),
    "resnet50 program": as_a_program(lambda: timm.create_model("resnet50"), (8, 3, 224, 224), (8,), cross_entropy),
    "inference": tried("timm:vit_base_patch16_224", "8", "bf16", False),
}))
"""


def needs(library: str) -> pytest.MarkDecorator:
    """Skip where `make` could not install it, as of a torch for which there is no release of torchvision."""
    return pytest.mark.skipif(
        importlib.util.find_spec(library) is None, reason=f"needs {library}: these are its models"
    )


@needs("timm")
def test_of_timm_a_model_gets_images_of_its_size_and_takes_what_a_program_takes(on_gpu):
    told = json.loads(on_gpu(BEGIN + TIMM))
    assert told["plain"] == [
        "timm:resnet50: ResNet, random weights; training, batch 8 of 3x224x224",
        {"x": [8, 3, 224, 224], "target": [8]},
    ]
    assert told["another size"][1]["x"] == [2, 3, 256, 256]
    assert told["one tag's"][0].endswith("VisionTransformer, random weights; training, batch 1 of 3x224x224")
    (unknown,) = told["unknown"]
    assert unknown.startswith("timm:resnet5: timm has no such model; did you mean 'resnet50' or ")
    assert told["nothing like it"] == ["timm:hf-hub:org/name: timm has no such model; timm.list_models() lists them"]
    assert "it has vit_base_patch16_224.augreg" in told["unknown tag"][0]
    assert (
        "has no loss, because it has no classes; write a function that returns (model, batch, loss)"
        in told["no classes"][0]
    )
    assert [*told["of a feature model"][1]] == ["x"]
    assert told["too small"][0].endswith("needs images with 256 or more pixels a side, but the batch has 64")
    assert told["resnet50"] == told["resnet50 program"]
    assert 2 * PARAMETERS_OF_VIT_B < told["inference"][0] < 3 * PARAMETERS_OF_VIT_B


TORCHVISION = """
import torchvision
from torch.nn.functional import cross_entropy

models = torchvision.models
print(json.dumps({
    "plain": described("torchvision:resnet50", "8"),
    "as its weights": described("torchvision:vit_h_14"),
    "another size": described("torchvision:vit_b_16", "2x256"),
    "no such size": described("torchvision:vit_b_16", "2x250"),
    "too small": described("torchvision:inception_v3", "2x64"),
    "pixels": described("torchvision:fcn_resnet50", "2"),
    "frames": described("torchvision:r3d_18", "2"),
    "boxes": described("torchvision:ssd300_vgg16", "2"),
    "masks": described("torchvision:maskrcnn_resnet50_fpn"),
    "pairs": described("torchvision:raft_small"),
    "unknown": described("torchvision:resnet5"),
    "vit": tried("torchvision:vit_b_16", "8"),
    "vit program": as_a_program(models.vit_b_16, (8, 3, 224, 224), (8,), cross_entropy),
    "segmentation": tried("torchvision:fcn_resnet50", "2"),
    "segmentation program": as_a_program(
        lambda: models.segmentation.fcn_resnet50(weights=None, weights_backbone=None),
        (2, 3, 520, 520),
        (2, 520, 520),
        lambda output, target: cross_entropy(output["out"], target),
    ),
    "losses": [loss_here(f"torchvision:{name}", size) for name, size in (
        ("googlenet", "2x32"), ("lraspp_mobilenet_v3_large", "2x32"), ("r3d_18", "2x32"), ("ssdlite320_mobilenet_v3_large", "2")
    )],
    "detection": tried("torchvision:ssd300_vgg16", "2"),
}))
"""


@needs("torchvision")
def test_torchvision_classes_pixels_and_frames_get_labels_and_detection_is_refused(on_gpu):
    told = json.loads(on_gpu(BEGIN + TORCHVISION))
    assert told["plain"] == [
        "torchvision:resnet50: ResNet, random weights; training, batch 8 of 3x224x224",
        {"x": [8, 3, 224, 224], "target": [8]},
    ]
    assert told["as its weights"][1]["x"] == [1, 3, 518, 518]
    assert told["another size"][1]["x"] == [2, 3, 256, 256]
    assert told["no such size"] == [
        "torchvision:vit_b_16 cannot be built: AssertionError: Input shape indivisible by patch size!"
    ]
    assert told["too small"][0].endswith("needs images with 75 or more pixels a side, but the batch has 64")
    assert told["pixels"][1] == {"x": [2, 3, 520, 520], "target": [2, 520, 520]}
    assert told["frames"][0].endswith("VideoResNet, random weights; training, batch 2 of 3x16x112x112")
    assert told["boxes"][1] == {"images": [[3, 300, 300]] * 2, "targets": [{"boxes": [7, 4], "labels": [7]}] * 2}
    assert "needs more than boxes for the objects in its images; write a function" in told["masks"][0]
    assert "the training of models for optical flow is not known here; write a function" in told["pairs"][0]
    assert told["unknown"][0].startswith(
        "torchvision:resnet5: torchvision has no such model; did you mean 'resnet50' or "
    )
    for one in ("vit", "segmentation"):
        assert told[one] == told[f"{one} program"], one
    assert told["losses"] == [[[], True, True]] * 4
    (why_not,) = told["detection"]
    assert "reads values that an emulated GPU does not compute, at " in why_not


SDXL = REPOSITORY / "benchmarks/models/sdxl_unet.json"
DIFFUSERS = """
print(json.dumps({
    "sdxl": described("diffusers:sdxl.json"),
    "no size": described("diffusers:UNet2DConditionModel"),
    "sd3": described("diffusers:SD3Transformer2DModel")[1],
    "flux": described("diffusers:FluxTransformer2DModel", "2x64")[1],
    "dit": described("diffusers:DiTTransformer2DModel")[1],
    "autoencoder": described("diffusers:AutoencoderKL", "1x256", False),
    "unknown": described("diffusers:UNet2DCondModel"),
    "no model": described("diffusers:DDIMScheduler"),
    "not known": described("diffusers:WanTransformer3DModel"),
    "of images": described("diffusers:of_images.json"),
    "pipeline": described("diffusers:."),
    "no class": described("diffusers:no_class.json"),
    "offline": described("diffusers:org/name"),
    "sdxl's step": tried("diffusers:sdxl.json", "1", "bf16", False),
    "losses": [loss_here(*one) for one in (
        ("diffusers:flux.json", "2x16"),
        ("diffusers:sd3.json", "2x16"),
        ("diffusers:dit.json", "2x8"),
        ("diffusers:AutoencoderKL", "2x32"),
        ("diffusers:VQModel", "2x32"),
        ("diffusers:unet.json", "2x16"),
    )],
}))
"""


@needs("diffusers")
def test_a_diffusers_network_gets_its_configured_inputs_and_sdxl_its_parameters(on_gpu, tmp_path):
    sdxl = json.loads(SDXL.read_text(encoding="utf-8"))
    small = {"num_layers": 2, "num_attention_heads": 2}
    files = {
        "sdxl.json": sdxl,
        "of_images.json": {**sdxl, "addition_embed_type": "image"},
        "no_class.json": {"in_channels": 4},
        "flux.json": {
            "_class_name": "FluxTransformer2DModel",
            "num_single_layers": 2,
            "guidance_embeds": True,
            **small,
        },
        "sd3.json": {"_class_name": "SD3Transformer2DModel", "caption_projection_dim": 128, **small},
        "dit.json": {"_class_name": "DiTTransformer2DModel", "sample_size": 8, **small},
        "unet.json": {"_class_name": "UNet2DModel", "block_out_channels": [32, 64, 64, 64], "num_class_embeds": 10},
        "unet/config.json": sdxl,
    }
    for name, values in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(values), encoding="utf-8")
    told = json.loads(on_gpu(BEGIN + DIFFUSERS, HF_HUB_OFFLINE="1"))
    assert told["sdxl"] == [
        "diffusers:sdxl.json: UNet2DConditionModel, random weights; training, batch 1 of 4x128x128",
        {
            "sample": [1, 4, 128, 128],
            "timestep": [1],
            "encoder_hidden_states": [1, 77, 2048],
            "added_cond_kwargs": {"text_embeds": [1, 1280], "time_ids": [1, 6]},
            "target": [1, 4, 128, 128],
        },
    ]
    assert told["no size"][0].endswith("does not say how large samples are; write 1x64 for the batch")
    assert told["sd3"]["encoder_hidden_states"] == [1, 333, 4096]
    assert (told["flux"]["hidden_states"], told["flux"]["img_ids"]) == ([2, 1024, 64], [1024, 3])
    assert told["dit"]["class_labels"] == [1]
    assert told["autoencoder"][1] == {"sample": [1, 3, 256, 256]}
    assert "has no class UNet2DCondModel; did you mean 'UNet2DConditionModel' or " in told["unknown"][0]
    assert "DDIMScheduler is not a diffusers model; known models are UNet2DConditionModel, " in told["no model"][0]
    assert "the inputs of WanTransformer3DModel are not known here; write a function" in told["not known"][0]
    assert "its inputs for addition_embed_type='image' are not known here; write a function" in told["of images"][0]
    assert told["pipeline"][0].endswith("there is no config.json in this folder; name one of its models: unet")
    assert (
        'the configuration names no class; add one, like "_class_name": "UNet2DConditionModel"' in told["no class"][0]
    )
    assert told["offline"][0].endswith("models are in subfolders: write diffusers:ORG/NAME/unet")
    allocated, reserved = told["sdxl's step"]
    assert 2 * PARAMETERS_OF_SDXL < allocated <= reserved < 2.5 * PARAMETERS_OF_SDXL
    assert told["losses"] == [[[], True, True]] * 6
