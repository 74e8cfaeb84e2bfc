"""Build timm models with random weights from their names.

timm's configuration determines the image size and the number of classes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.images import check_side, cross_entropy, main_argument
from pytest_gpumem.measuring.models.inputs import TARGET, Inputs, RandomTensor, by_sides
from pytest_gpumem.measuring.models.library import library_of
from pytest_gpumem.measuring.models.name import BatchSize
from pytest_gpumem.measuring.models.named_model import NamedModel, on_meta
from pytest_gpumem.measuring.models.remedies import WRITE, nearest_of_many

if TYPE_CHECKING:
    from pytest_gpumem.measuring.models.name import ModelName
    from pytest_gpumem.measuring.models.task import Task


def model_of(name: ModelName, size: BatchSize | None, task: Task) -> NamedModel:
    """Describe a timm model: how to build it, its inputs, and its loss.

    Args:
        name: The model's name, for example ``timm:vit_base_patch16_224``.
        size: The number of images, and their side. ``None`` means a single image with the model's default side.
        task: The model's task.

    Raises:
        ModelError: timm has no model with this name, the images are too small, or the model has no classes and so no loss for
            training.
    """
    timm = library_of(name, "timm")
    config = _configuration(timm, name)
    channels, *sides = config.input_size
    options = {}
    if size is not None and size.length is not None and sides != [size.length, size.length]:
        sides = [size.length, size.length]
        check_side(name, size.length, max((config.min_input_size or (0, 0, 0))[1:]))
        if config.fixed_input_size:
            options["img_size"] = size.length
    make = partial(timm.create_model, name.name, pretrained=False, **options)
    model = on_meta(name, make)
    samples = 1 if size is None else size.samples
    shape = (channels, *sides)
    arguments = {main_argument(model): RandomTensor((samples, *shape))}
    classes = int(getattr(model, "num_classes", 0))
    if task.trains and classes == 0:
        raise ModelError(f"{name} has no loss, because it has no classes; {WRITE}; or measure inference")
    if task.trains:
        arguments[TARGET] = RandomTensor((samples,), classes)
    inputs = Inputs(BatchSize(samples, sides[0]), arguments, by_sides(shape))
    return NamedModel(name, type(model).__name__, make, inputs, cross_entropy if task.trains else None)


def _configuration(timm: Any, name: ModelName) -> Any:
    """Return timm's configuration for the published weights that ``name`` chooses. The weights are not loaded."""
    architecture, _, tag = name.name.partition(".")
    if not timm.is_model(architecture):
        near = nearest_of_many(architecture, timm.list_models(), "timm.list_models()")
        raise ModelError(f"{name}: timm has no such model; {near}")
    published = timm.models.get_arch_pretrained_cfgs(architecture)
    if tag and name.name not in published:
        names = ", ".join(sorted(published)) or f"{architecture} alone"
        raise ModelError(f"{name}: timm has no such model; it has {names}")
    return timm.models.get_pretrained_cfg(name.name)
