"""Build transformers models from a configuration on the hub, in a folder or in a file.

Weights are random, and no code from the hub runs.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.configuration import AUTO_MAP, read_configuration, without_links
from pytest_gpumem.measuring.models.library import library_of
from pytest_gpumem.measuring.models.named_model import NamedModel
from pytest_gpumem.measuring.models.remedies import WRITE
from pytest_gpumem.measuring.models.transformers_inputs import PIXELS, inputs_of, vision_part
from pytest_gpumem.measuring.models.transformers_prompts import prompt_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pytest_gpumem.measuring.models.name import BatchSize, ModelName
    from pytest_gpumem.measuring.models.task import Task

CONFIG = "config.json"
_OF_TIMM = "pretrained_cfg"
"""The key by which transformers recognises a configuration for a timm model. Such a configuration has no ``model_type``."""
_MAPPINGS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "MASKED_LM", "CTC")
"""Model kinds in transformers, in the order in which they are tried.

If a configuration names no model class, the class comes from the first kind that supports this configuration.
"""
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_FEWEST = 2
_DENSE_FIRST = "first_k_dense_replace"
"""The key for the number of layers before the first layer with experts."""


def model_of(name: ModelName, size: BatchSize | None, task: Task) -> NamedModel:
    """Describe a transformers model: how to build it, and its inputs.

    For training, the key-value cache is switched off, as in most programs.

    Args:
        name: ``hf:ORG/NAME`` or ``hf-tiny:ORG/NAME``. A path may replace ``ORG/NAME``.
        size: The number of samples, and their length. ``None`` means a single sample with the model's default length.
        task: The model's task.

    Raises:
        ModelError: The configuration does not exist or needs code from its repository, no batch can be made, or the model
            cannot generate tokens.
    """
    transformers = library_of(name, "transformers")
    config = _configuration(transformers, name)
    if name.is_tiny:
        for part in _parts(config):
            _shrink(part)
    if task.trains and hasattr(config, "use_cache"):
        config.use_cache = False
    model_class = _class_of(transformers, name, config)
    if size is not None and size.length is not None and model_class.main_input_name == PIXELS:
        _resize(config, size.length)
    if task.new_tokens is not None and not model_class.can_generate():
        raise ModelError(
            f"{name}: {model_class.__name__} generates no tokens, unlike LlamaForCausalLM and "
            "T5ForConditionalGeneration; leave the generation out to measure a forward pass"
        )
    try:
        if task.new_tokens is None:
            inputs = inputs_of(model_class, config, size, trains=task.trains)
        else:
            inputs = prompt_of(model_class, config, size, task.new_tokens)
    except AttributeError as error:
        raise ModelError(f"{name}: its configuration lacks a setting that a batch needs: {error}") from None

    def make() -> torch.nn.Module:
        model: torch.nn.Module = model_class(copy.deepcopy(config))
        if task.new_tokens is not None:
            _search_greedily(transformers, model)
        return model

    return NamedModel(name, model_class.__name__, make, inputs)


def _resize(config: Any, side: int) -> None:
    """Set the image side in a configuration, so the model has a position embedding for each image patch."""
    vision = vision_part(config)
    vision.image_size = [side, side] if isinstance(getattr(vision, "image_size", None), (list, tuple)) else side


def _search_greedily(transformers: Any, model: Any) -> None:
    """Replace the model's generation settings, so the model decodes greedily, and no token ends a text early."""
    original = model.generation_config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=original.bos_token_id, decoder_start_token_id=original.decoder_start_token_id
    )


def _configuration(transformers: Any, name: ModelName) -> Any:
    file = name.path
    if not file.exists():
        file = _fetched(transformers, name)
    elif file.is_dir():
        file = file / CONFIG
        if not file.is_file():
            raise ModelError(f"{name}: there is no {CONFIG} in this folder")
    values = read_configuration(name, file)
    if AUTO_MAP in values and values.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"{name}: its configuration needs code of its own (trust_remote_code), which is not run; {WRITE}"
        )
    if "model_type" not in values and _OF_TIMM not in values:
        raise ModelError(f'{name}: the configuration names no model; add one to {CONFIG}, like "model_type": "llama"')
    # Let transformers read the checked values from a temporary folder, because the hub could return other values for a second
    # request.
    with TemporaryDirectory(prefix="gpumem-config-") as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(without_links(values)), encoding="utf-8")
        try:
            return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001, each class of configurations checks its values in its own way
            text = " ".join(str(error).replace(folder, str(name)).split())
            raise ModelError(f"{name}: {text or type(error).__name__}") from None


def _fetched(transformers: Any, name: ModelName) -> Path:
    """Return the path to a configuration file in the hub's local cache. Download the file if it is not in the cache."""
    try:
        return Path(transformers.utils.cached_file(name.name, CONFIG))
    except Exception as error:  # noqa: BLE001, from the network, the hub or the cache
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ModelError(
            f"{name}: {reason}. Without the network, write hf: and the path of a folder with {CONFIG}"
        ) from None


def _class_of(transformers: Any, name: ModelName, config: Any) -> Any:
    """Return the model class for a configuration. Only model classes in transformers are accepted.

    For example, a configuration that names a pipeline's class is refused.
    """
    names = [each for each in config.architectures or () if isinstance(each, str)]
    for each in names:
        model_class = getattr(transformers, each, None)
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class
    if names:
        raise ModelError(f"{name}: transformers {transformers.__version__} has no class {', '.join(names)}")
    for kind in _MAPPINGS:
        mapping = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", {})
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModelError(
        f'{name}: its configuration names no class; add one to config.json, like "architectures": ["LlamaForCausalLM"]'
    )


def _parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and its nested configurations, for example for a text and a vision model."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _shrink(config: Any) -> None:
    """Keep only the first two layers, and the first layer of each further kind.

    A list with a value for each layer keeps only the values for the remaining layers.

    Example: a model has three layers with full attention, and then a layer with sliding attention. Three layers remain: the
        first two layers, and the sliding layer.
    """
    if getattr(config, _DENSE_FIRST, 0) > 1:
        setattr(config, _DENSE_FIRST, 1)
    for name in _LAYERS:
        layers = getattr(config, name, None)
        if not isinstance(layers, int) or layers <= _FEWEST:
            continue
        lists = {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == layers}
        kind_lists = [value for value in lists.values() if all(isinstance(element, str) for element in value)]
        kinds = list(zip(*kind_lists, strict=True)) or [()] * layers
        kept_layers = [layer for layer, kind in enumerate(kinds) if layer < _FEWEST or kind not in kinds[:layer]]
        setattr(config, name, len(kept_layers))
        for key, value in lists.items():
            setattr(config, key, [value[layer] for layer in kept_layers])
