"""Build torchvision models with random weights from their names.

By default, images have the same size as for the best published weights.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.images import check_side, cross_entropy, main_argument
from pytest_gpumem.measuring.models.inputs import TARGET, Inputs, RandomBoxes, RandomTensor, by_sides
from pytest_gpumem.measuring.models.library import library_of
from pytest_gpumem.measuring.models.name import BatchSize
from pytest_gpumem.measuring.models.named_model import NamedModel, on_meta
from pytest_gpumem.measuring.models.remedies import WRITE, nearest_of_many

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from pytest_gpumem.measuring.models.name import ModelName
    from pytest_gpumem.measuring.models.task import Task

_FRAMES = 16
"""The default length for video clips, in frames."""
_OBJECTS = 7
"""The number of objects in an image for detection models, as on average in the COCO data set."""
_SIZED: dict[str, Callable[[int], object]] = {
    "image_size": int,
    "input_size": lambda side: (side, side),
    "spatial_size": lambda side: (side, side),
}
"""Constructor arguments for the image size in model classes with a fixed image size. Each function converts a side in pixels to
the argument's value."""


def model_of(name: ModelName, size: BatchSize | None, task: Task) -> NamedModel:
    """Describe a torchvision model: how to build it, its inputs, and its loss.

    Args:
        name: The model's name, for example ``torchvision:resnet50``.
        size: The number of images or clips, and their side. ``None`` means a single sample with the model's default side.
        task: The model's task.

    Raises:
        ModelError: torchvision has no model with this name, the images are too small, or this module does not know the model's
            inputs.
    """
    models = library_of(name, "torchvision").models
    if name.name not in models.list_models():
        near = nearest_of_many(name.name, models.list_models(), "torchvision.models.list_models()")
        raise ModelError(f"{name}: torchvision has no such model; {near}")
    builder = models.get_model_builder(name.name)
    parameters = inspect.signature(builder).parameters
    # Without this argument, torchvision would download weights for the backbone.
    backbone = {"weights_backbone": None} if "weights_backbone" in parameters else {}
    make = partial(builder, weights=None, **backbone)
    model = on_meta(name, make)
    kind = builder.__module__.removeprefix("torchvision.models.").partition(".")[0]
    weights = models.get_model_weights(name.name).DEFAULT
    if kind == "detection":
        return _detection(name, size, task.trains, make, model, len(weights.meta["categories"]))
    if kind in ("quantization", "optical_flow"):
        raise ModelError(f"{name}: the training of models for {kind.replace('_', ' ')} is not known here; {WRITE}")
    side = _side(weights) if size is None or size.length is None else size.length
    check_side(name, side, _least(weights.meta))
    sized = _SIZED.keys() & inspect.signature(type(model).__init__).parameters.keys()
    if sized:
        make = partial(make, **{argument: _SIZED[argument](side) for argument in sized})
        on_meta(name, make)
    samples = 1 if size is None else size.samples
    shape: tuple[int, ...] = (3, side, side)
    if kind == "video":
        shape = (3, max(_FRAMES, weights.meta.get("min_temporal_size", 1)), side, side)
    arguments = {main_argument(model): RandomTensor((samples, *shape))}
    if task.trains:
        labelled = (samples, side, side) if kind == "segmentation" else (samples,)
        arguments[TARGET] = RandomTensor(labelled, len(weights.meta["categories"]))
    inputs = Inputs(BatchSize(samples, side), arguments, by_sides(shape))
    return NamedModel(name, type(model).__name__, make, inputs, cross_entropy if task.trains else None)


def _side(weights: Any) -> int:
    """Return the side in pixels to which the published weights' transforms resize or crop images."""
    settings: Mapping[str, Any] = weights.transforms.keywords
    side = settings.get("crop_size", settings.get("resize_size"))
    return int(side[0] if isinstance(side, (tuple, list)) else side)


def _least(meta: Mapping[str, Any]) -> int:
    least = meta.get("min_size", 1)
    return max(least) if isinstance(least, (tuple, list)) else int(least)


def _detection(
    name: ModelName, size: BatchSize | None, trains: bool, make: Any, model: torch.nn.Module, classes: int
) -> NamedModel:
    """Describe a detection model: how to build it, its inputs, and its loss.

    For training, the batch also contains the boxes and labels of objects, and the model itself returns its losses.
    """
    if trains and type(model).__name__ in ("MaskRCNN", "KeypointRCNN"):
        raise ModelError(f"{name} needs more than boxes for the objects in its images; {WRITE}; or measure inference")
    resized: Any = model.transform
    side = (resized.fixed_size or resized.min_size)[-1] if size is None or size.length is None else size.length
    samples = 1 if size is None else size.samples
    arguments: dict[str, Any] = {"images": [RandomTensor((3, side, side))] * samples}
    if trains:
        objects = {"boxes": RandomBoxes(_OBJECTS, side), "labels": RandomTensor((_OBJECTS,), classes)}
        arguments["targets"] = [objects] * samples
    inputs = Inputs(BatchSize(samples, side), arguments, by_sides((3, side, side)))
    return NamedModel(name, type(model).__name__, make, inputs, _sum_of_losses if trains else None)


def _sum_of_losses(output: Mapping[str, torch.Tensor], _batch: object) -> torch.Tensor:
    import torch

    return torch.stack([*output.values()]).sum()
