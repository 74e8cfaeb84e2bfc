"""Models of diffusers by class or configuration: the network alone, with random weights. No pipeline, no code of the hub's."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.models.configuration import read_configuration, without_links
from pytest_gpumem.models.errors import WRITE, ModelError, nearest_of_many
from pytest_gpumem.models.inputs import TARGET, Inputs, RandomTensor, by_sides
from pytest_gpumem.models.library import library_of
from pytest_gpumem.models.name import BatchSize
from pytest_gpumem.models.named_model import NamedModel
from pytest_gpumem.steps.model_step import quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from pytest_gpumem.models.name import ModelName
    from pytest_gpumem.models.task import Task

_TIMESTEPS = 1000
_NUMBERS_OF_SIZE = 6
"""Numbers about an image that SDXL is given: its own height and width, where it is cut from, and the size that is wanted."""


@dataclass(frozen=True)
class _Sizes:
    """A model's configuration, and the samples of a batch and their side."""

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
    """Return the model of a class's own configuration, or of one from the hub, a folder or a file.

    The side of a batch is that of what the class takes: latents for a network that takes those, pixels for an autoencoder.

    Raises:
        ModelError: There is none, or it is not known here what it takes.
    """
    diffusers = library_of(name, "diffusers")
    said = _configuration(name)
    model_class = _class_of(diffusers, name, said)
    config = SimpleNamespace(**(_defaults(model_class) | said))
    taken = _TAKEN.get(model_class.__name__)
    if taken is None:
        raise ModelError(f"{name}: it is not known here what {model_class.__name__} takes; {WRITE}")
    side = size.length if size is not None and size.length is not None else getattr(config, "sample_size", None)
    side = side if side is not None else _SIDES.get(model_class.__name__)
    if not isinstance(side, int):
        raise ModelError(f"{name}: its configuration does not say how large samples are; write 1x64 for the batch")
    samples = 1 if size is None else size.samples
    try:
        arguments, target = taken(_Sizes(config, samples, side))
    except _NotKnown as unknown:
        raise ModelError(f"{name}: it is not known here what it takes for {unknown}; {WRITE}") from None
    shape = by_sides(next(iter(arguments.values())).shape[1:])
    if task.trains:
        arguments[TARGET] = target
    make = partial(_made, model_class, said)
    inputs = Inputs(BatchSize(samples, side), arguments, shape)
    return NamedModel(name, model_class.__name__, make, inputs, _mean_squared_error if task.trains else None)


def _made(model_class: Any, said: Mapping[str, Any]) -> torch.nn.Module:
    made: torch.nn.Module = model_class.from_config(dict(said))
    return made


def _mean_squared_error(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    import torch

    return torch.nn.functional.mse_loss(output.sample, batch[TARGET])


def _configuration(name: ModelName) -> dict[str, Any]:
    """Return what a configuration says, its class among it."""
    where = name.path
    if where.is_dir():
        where = where / "config.json"
        if not where.is_file():
            folders = sorted(one.parent.name for one in where.parent.glob("*/config.json"))
            there = f"; name one of its models: {', '.join(folders)}" if folders else ""
            raise ModelError(f"{name}: there is no config.json in this folder{there}")
    elif not where.is_file():
        if "/" not in name.name:
            return {"_class_name": name.name}
        where = _fetched(name)
    said: dict[str, Any] = without_links(read_configuration(name, where))
    if not isinstance(said.get("_class_name"), str):
        raise ModelError(f'{name}: it names no class; add one, like "_class_name": "UNet2DConditionModel"')
    return said


def _fetched(name: ModelName) -> Path:
    import huggingface_hub

    owner, repository, *folder = name.name.split("/")
    path = "/".join([*folder, "config.json"])
    try:
        return Path(huggingface_hub.hf_hub_download(f"{owner}/{repository}", path))
    except Exception as error:  # noqa: BLE001, of the network, the hub, or the name
        inside = "" if folder else "; a pipeline's models are in folders of it: write diffusers:ORG/NAME/unet"
        raise ModelError(
            f"{name}: {' '.join(str(error).split()) or type(error).__name__}".rstrip(".") + inside
        ) from None


def _class_of(diffusers: Any, name: ModelName, said: Mapping[str, Any]) -> Any:
    import torch

    word = said["_class_name"]
    with quietly():
        found = getattr(diffusers, word, None)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        return found
    if found is not None:
        raise ModelError(f"{name}: {word} is no model of diffusers; it has {', '.join(_TAKEN)}")
    known = nearest_of_many(word, dir(diffusers), "dir(diffusers)")
    raise ModelError(f"{name}: diffusers {diffusers.__version__} has no class {word}; {known}")


def _defaults(model_class: Any) -> dict[str, Any]:
    parameters = inspect.signature(model_class.__init__).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


class _NotKnown(Exception):
    """An input that a configuration asks for, and that is not known here. The message names it."""


_Taken = tuple[dict[str, Any], RandomTensor]
"""Arguments of forward, a sample first, and the target."""


def _output(sizes: _Sizes) -> RandomTensor:
    """Return the target of a network whose output is as large as its sample."""
    channels, height, width = sizes.image
    return sizes.tensor(getattr(sizes.config, "out_channels", None) or channels, height, width)


def _autoencoder(sizes: _Sizes) -> _Taken:
    return {"sample": sizes.tensor(*sizes.image)}, _output(sizes)


def _unet(sizes: _Sizes) -> _Taken:
    config = sizes.config
    arguments = {"sample": sizes.tensor(*sizes.image), "timestep": sizes.timestep}
    if getattr(config, "class_embed_type", None) not in (None, "timestep"):
        raise _NotKnown(f"class_embed_type={config.class_embed_type!r}")
    if config.class_embed_type == "timestep":
        arguments["class_labels"] = sizes.timestep
    elif config.num_class_embeds is not None:
        arguments["class_labels"] = RandomTensor((sizes.samples,), config.num_class_embeds)
    return arguments, _output(sizes)


def _conditioned_unet(sizes: _Sizes) -> _Taken:
    config = sizes.config
    arguments, target = _unet(sizes)
    widths = config.cross_attention_dim
    widths = {widths} if isinstance(widths, int) else set(widths)
    if config.encoder_hid_dim_type not in (None, "text_proj") or len(widths) > 1:
        raise _NotKnown(f"encoder_hid_dim_type={config.encoder_hid_dim_type!r}, cross_attention_dim={sorted(widths)}")
    # As many tokens as CLIP's encoder of texts has positions.
    arguments["encoder_hidden_states"] = sizes.tensor(77, config.encoder_hid_dim or widths.pop())
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - _NUMBERS_OF_SIZE * config.addition_time_embed_dim
        arguments["added_cond_kwargs"] = {
            "text_embeds": sizes.tensor(pooled),
            "time_ids": sizes.tensor(_NUMBERS_OF_SIZE),
        }
    elif config.addition_embed_type is not None:
        raise _NotKnown(f"addition_embed_type={config.addition_embed_type!r}")
    return arguments, target


def _sd3(sizes: _Sizes) -> _Taken:
    # Tokens of CLIP's and T5's encoders, one after the other.
    arguments = {
        "hidden_states": sizes.tensor(*sizes.image),
        "encoder_hidden_states": sizes.tensor(77 + 256, sizes.config.joint_attention_dim),
        "pooled_projections": sizes.tensor(sizes.config.pooled_projection_dim),
        "timestep": sizes.timestep,
    }
    return arguments, _output(sizes)


def _flux(sizes: _Sizes) -> _Taken:
    config, texts = sizes.config, 512
    # Four latents, two by two, are a token.
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


def _dit(sizes: _Sizes) -> _Taken:
    arguments = {
        "hidden_states": sizes.tensor(*sizes.image),
        "timestep": sizes.timestep,
        "class_labels": RandomTensor((sizes.samples,), sizes.config.num_embeds_ada_norm),
    }
    return arguments, _output(sizes)


_TAKEN: dict[str, Callable[[_Sizes], _Taken]] = {
    "UNet2DConditionModel": _conditioned_unet,
    "UNet2DModel": _unet,
    "AutoencoderKL": _autoencoder,
    "VQModel": _autoencoder,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "DiTTransformer2DModel": _dit,
}
"""By class."""
_SIDES = {"FluxTransformer2DModel": 128}
"""Latents of a side, of classes whose configuration does not say: those of an image of 1,024 pixels."""
