"""Build diffusers models with random weights from a class name or a configuration.

Pipelines, and code from the hub, are not used.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.configuration import read_configuration, without_links
from pytest_gpumem.measuring.models.inputs import TARGET, Inputs, RandomTensor, by_sides
from pytest_gpumem.measuring.models.library import library_of
from pytest_gpumem.measuring.models.name import BatchSize
from pytest_gpumem.measuring.models.named_model import NamedModel
from pytest_gpumem.measuring.models.remedies import WRITE, nearest_of_many
from pytest_gpumem.measuring.steps.model_step import quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from pytest_gpumem.measuring.models.name import ModelName
    from pytest_gpumem.measuring.models.task import Task

_TIMESTEPS = 1000
_NUMBERS_OF_SIZE = 6
"""SDXL's input contains six numbers about an image: the original height and width, the crop's two coordinates, and the target
height and width."""


@dataclass(frozen=True)
class _BatchShape:
    """A batch's shape: the number of samples, their side, and the model's configuration, which determines all other sizes."""

    config: Any
    samples: int
    side: int

    def tensor(self, *shape: int) -> RandomTensor:
        return RandomTensor((self.samples, *shape))

    @property
    def image(self) -> tuple[int, int, int]:
        return self.config.in_channels, self.side, self.side

    @property
    def timestep(self) -> RandomTensor:
        return RandomTensor((self.samples,), _TIMESTEPS)


def model_of(name: ModelName, size: BatchSize | None, task: Task) -> NamedModel:
    """Describe a diffusers model: how to build it, its inputs, and its loss.

    The configuration comes from the hub, a folder or a file. If the name is a class, its default configuration is used.

    Args:
        name: ``diffusers:CLASS``, ``diffusers:ORG/NAME/FOLDER``, or ``diffusers:`` with a path.
        size: The number of samples, and the input's side: in latents for a denoiser, or in pixels for an autoencoder.
        task: The model's task.

    Raises:
        ModelError: The model does not exist, or this module does not know the model's inputs.
    """
    diffusers = library_of(name, "diffusers")
    settings = _configuration(name)
    model_class = _class_of(diffusers, name, settings)
    config = SimpleNamespace(**(_defaults(model_class) | settings))
    describe = _INPUTS.get(model_class.__name__)
    if describe is None:
        raise ModelError(f"{name}: the inputs of {model_class.__name__} are not known here; {WRITE}")
    side = size.length if size is not None and size.length is not None else getattr(config, "sample_size", None)
    side = side if side is not None else _SIDES.get(model_class.__name__)
    if not isinstance(side, int):
        raise ModelError(f"{name}: its configuration does not say how large samples are; write 1x64 for the batch")
    samples = 1 if size is None else size.samples
    try:
        arguments, target = describe(_BatchShape(config, samples, side))
    except _UnknownInput as unknown:
        raise ModelError(f"{name}: its inputs for {unknown} are not known here; {WRITE}") from None
    shape = by_sides(next(iter(arguments.values())).shape[1:])
    if task.trains:
        arguments[TARGET] = target
    make = partial(_make, model_class, settings)
    inputs = Inputs(BatchSize(samples, side), arguments, shape)
    return NamedModel(name, model_class.__name__, make, inputs, _mean_squared_error if task.trains else None)


def _make(model_class: Any, settings: Mapping[str, Any]) -> torch.nn.Module:
    model: torch.nn.Module = model_class.from_config(dict(settings))
    return model


def _mean_squared_error(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    import torch

    return torch.nn.functional.mse_loss(output.sample, batch[TARGET])


def _configuration(name: ModelName) -> dict[str, Any]:
    """Return the settings in a model's configuration, including the model's class name."""
    path = name.path
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            folders = sorted(file.parent.name for file in path.parent.glob("*/config.json"))
            suggestion = f"; name one of its models: {', '.join(folders)}" if folders else ""
            raise ModelError(f"{name}: there is no config.json in this folder{suggestion}")
    elif not path.is_file():
        if "/" not in name.name:
            return {"_class_name": name.name}
        path = _fetched(name)
    settings: dict[str, Any] = without_links(read_configuration(name, path))
    if not isinstance(settings.get("_class_name"), str):
        raise ModelError(
            f'{name}: the configuration names no class; add one, like "_class_name": "UNet2DConditionModel"'
        )
    return settings


def _fetched(name: ModelName) -> Path:
    import huggingface_hub

    owner, repository, *folder = name.name.split("/")
    path = "/".join([*folder, "config.json"])
    try:
        return Path(huggingface_hub.hf_hub_download(f"{owner}/{repository}", path))
    except Exception as error:  # noqa: BLE001, from the network, the hub, or the name
        remedy = "" if folder else "; a pipeline's models are in subfolders: write diffusers:ORG/NAME/unet"
        raise ModelError(
            f"{name}: {' '.join(str(error).split()) or type(error).__name__}".rstrip(".") + remedy
        ) from None


def _class_of(diffusers: Any, name: ModelName, settings: Mapping[str, Any]) -> Any:
    import torch

    word = settings["_class_name"]
    with quietly():
        attribute = getattr(diffusers, word, None)
    if isinstance(attribute, type) and issubclass(attribute, torch.nn.Module):
        return attribute
    if attribute is not None:
        raise ModelError(f"{name}: {word} is not a diffusers model; known models are {', '.join(_INPUTS)}")
    suggestion = nearest_of_many(word, dir(diffusers), "dir(diffusers)")
    raise ModelError(f"{name}: diffusers {diffusers.__version__} has no class {word}; {suggestion}")


def _defaults(model_class: Any) -> dict[str, Any]:
    parameters = inspect.signature(model_class.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


class _UnknownInput(Exception):
    """Error if a configuration needs an input that this module cannot describe. The message names the input."""


_Batch = tuple[dict[str, Any], RandomTensor]
"""The arguments for the model's forward, with the sample first, and the target for the loss."""


def _output(sizes: _BatchShape) -> RandomTensor:
    """Return the target for a model whose output has the same height and width as the sample."""
    channels, height, width = sizes.image
    return sizes.tensor(getattr(sizes.config, "out_channels", None) or channels, height, width)


def _autoencoder(sizes: _BatchShape) -> _Batch:
    return {"sample": sizes.tensor(*sizes.image)}, _output(sizes)


def _unet(sizes: _BatchShape) -> _Batch:
    config = sizes.config
    arguments = {"sample": sizes.tensor(*sizes.image), "timestep": sizes.timestep}
    if getattr(config, "class_embed_type", None) not in (None, "timestep"):
        raise _UnknownInput(f"class_embed_type={config.class_embed_type!r}")
    if config.class_embed_type == "timestep":
        arguments["class_labels"] = sizes.timestep
    elif config.num_class_embeds is not None:
        arguments["class_labels"] = RandomTensor((sizes.samples,), config.num_class_embeds)
    return arguments, _output(sizes)


def _conditioned_unet(sizes: _BatchShape) -> _Batch:
    config = sizes.config
    arguments, target = _unet(sizes)
    widths = config.cross_attention_dim
    widths = {widths} if isinstance(widths, int) else set(widths)
    if config.encoder_hid_dim_type not in (None, "text_proj") or len(widths) > 1:
        raise _UnknownInput(
            f"encoder_hid_dim_type={config.encoder_hid_dim_type!r}, cross_attention_dim={sorted(widths)}"
        )
    # Texts have 77 tokens, because CLIP's text encoder has 77 positions.
    arguments["encoder_hidden_states"] = sizes.tensor(77, config.encoder_hid_dim or widths.pop())
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - _NUMBERS_OF_SIZE * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": sizes.tensor(pooled),
            "time_ids": sizes.tensor(_NUMBERS_OF_SIZE),
        }
    elif config.addition_embed_type is not None:
        raise _UnknownInput(f"addition_embed_type={config.addition_embed_type!r}")
    return arguments, target


def _sd3(sizes: _BatchShape) -> _Batch:
    # The model concatenates 77 tokens from CLIP's encoders and 256 tokens from T5's encoder.
    arguments = {
        "hidden_states": sizes.tensor(*sizes.image),
        "encoder_hidden_states": sizes.tensor(77 + 256, sizes.config.joint_attention_dim),
        "pooled_projections": sizes.tensor(sizes.config.pooled_projection_dim),
        "timestep": sizes.timestep,
    }
    return arguments, _output(sizes)


def _flux(sizes: _BatchShape) -> _Batch:
    config, texts = sizes.config, 512
    # A token covers a square with 2 x 2 latents.
    tokens = (sizes.side // 2) ** 2
    arguments = {
        "hidden_states": sizes.tensor(tokens, config.in_channels),
        "encoder_hidden_states": sizes.tensor(texts, config.joint_attention_dim),
        "pooled_projections": sizes.tensor(config.pooled_projection_dim),
        "timestep": sizes.tensor(),
        "img_ids": RandomTensor((tokens, 3)),
        "txt_ids": RandomTensor((texts, 3)),
    }
    if config.guidance_embeds:
        arguments["guidance"] = sizes.tensor()
    return arguments, sizes.tensor(tokens, config.out_channels or config.in_channels)


def _dit(sizes: _BatchShape) -> _Batch:
    arguments = {
        "hidden_states": sizes.tensor(*sizes.image),
        "timestep": sizes.timestep,
        "class_labels": RandomTensor((sizes.samples,), sizes.config.num_embeds_ada_norm),
    }
    return arguments, _output(sizes)


_INPUTS: dict[str, Callable[[_BatchShape], _Batch]] = {
    "UNet2DConditionModel": _conditioned_unet,
    "UNet2DModel": _unet,
    "AutoencoderKL": _autoencoder,
    "VQModel": _autoencoder,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "DiTTransformer2DModel": _dit,
}
"""Functions that describe a batch for a model, by the model's class name."""
_SIDES = {"FluxTransformer2DModel": 128}
"""The default side in latents for model classes whose configuration contains no side. In Flux, 128 latents stand for 1,024
pixels."""
