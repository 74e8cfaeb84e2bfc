"""Describe a batch for a transformers model: random inputs, and for training also labels.

Example: GPT2LMHeadModel with the batch ``4x1024`` gets ``input_ids`` and ``labels`` with 4 x 1,024 token ids each.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.models.inputs import Inputs, RandomTensor, by_sides
from pytest_gpumem.measuring.models.name import BatchSize
from pytest_gpumem.measuring.models.remedies import WRITE

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS, FEATURES = "input_ids", "input_features"
PIXELS, _SAMPLES = "pixel_values", "input_values"
MOST_TOKENS = 2048
"""Default sequence length in tokens. If the model has fewer positions, the default is the number of positions."""
_AUDIO = 160_000
"""Default recording length in audio samples: ten seconds at 16 kHz."""
_LABELS_OF_AUDIO = 32
"""The number of labels for an audio recording: about three labels for each second."""
_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
_AS_LONG = ("CausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_BEHIND_PADDING = {
    *(
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "longformer",
        "mpnet",
        "data2vec-text",
    ),
    *("ibert", "luke", "xmod", "esm"),
}
"""Model kinds that number positions from the padding token's id + 1 on, so fewer positions are usable than configured.

For example, RoBERTa has 514 positions and the padding token 1. So 512 positions are usable.
"""


def inputs_of(model_class: Any, config: Any, size: BatchSize | None, *, trains: bool) -> Inputs:
    """Describe the inputs for a model class, and the labels for training.

    Args:
        model_class: A transformers model class.
        config: The model's configuration, which also has the image size in pixels.
        size: The number of samples, and their length. ``None`` means a single sample with the model's default length.
        trains: Whether the model must return a loss.

    Raises:
        ModelError: No batch can be made for this class, or no batch with this size.
    """
    parameters = inspect.signature(model_class.forward).parameters
    samples = size.samples if size is not None else 1
    length = size.length if size is not None else None
    main = model_class.main_input_name
    tensors: dict[str, RandomTensor] = {}
    constants: dict[str, Any] = {}
    shape = None
    if main == TOKENS:
        length = _within(model_class, length, positions_of(config))
        tensors[TOKENS] = RandomTensor((samples, length), _text(config).vocab_size)
    elif main == FEATURES:
        tensors[FEATURES] = RandomTensor((samples, config.num_mel_bins, 2 * config.max_source_positions))
        length = _within(model_class, length, config.max_target_positions)
    elif main == _SAMPLES:
        length = length or _AUDIO
        tensors[_SAMPLES] = RandomTensor((samples, length))
    elif main == PIXELS:
        tensors[PIXELS] = _images(config, samples, f"write {samples}x224 for the batch")
        # For image models, the configuration determines the side, so there is no length.
        length, shape = None, by_sides(tensors[PIXELS].shape[1:])
    else:
        raise ModelError(f"{model_class.__name__} takes {main}, an input that is not known here; {WRITE}")
    beside_texts = sorted({PIXELS, FEATURES, _SAMPLES} & parameters.keys() - tensors.keys()) if main == TOKENS else []
    if beside_texts and "return_loss" not in parameters:
        raise ModelError(
            f"{model_class.__name__} takes {', '.join(beside_texts)} in addition to texts, and their number per text is not "
            f"known here; {WRITE}"
        )
    if "return_loss" in parameters and PIXELS in parameters:
        # A model such as CLIP compares texts with images, and needs both.
        tensors[PIXELS] = _images(config, samples, WRITE)
        constants["return_loss"] = trains
    elif trains:
        tensors |= _labels(model_class, config, tensors[main], length, parameters)
    elif getattr(config, "is_encoder_decoder", False) and main in (TOKENS, FEATURES) and length is not None:
        tensors["decoder_input_ids"] = RandomTensor((samples, length), _text(config).vocab_size)
    written = BatchSize(samples, length) if shape is None else size or BatchSize(samples)
    return Inputs(written, {**tensors, **constants}, shape)


def _text(config: Any) -> Any:
    """Return the configuration for the text model within a configuration."""
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config() if get_text_config is not None else config


def positions_of(config: Any) -> int | None:
    """Return the number of positions in a model. Return ``None`` if sequences may have any length."""
    text = _text(config)
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:  # some configurations have -1 for any length
        return None
    if getattr(text, "model_type", None) in _BEHIND_PADDING:
        positions -= (text.pad_token_id or 0) + 1
    return positions


def _within(model_class: Any, length: int | None, positions: int | None) -> int:
    if length is None:
        return min(MOST_TOKENS, positions or MOST_TOKENS)
    if positions is not None and length > positions:
        raise ModelError(
            f"{model_class.__name__} has {positions} positions, but the batch has {length} tokens a sample"
        )
    return length


def vision_part(config: Any) -> Any:
    """Return the configuration for the image model within a configuration."""
    return getattr(config, "vision_config", config)


def _images(config: Any, samples: int, remedy: str) -> RandomTensor:
    vision = vision_part(config)
    size = getattr(vision, "image_size", None)
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, (list, tuple)) or len(sides) != 2:
        raise ModelError(f"the configuration of {type(config).__name__} does not say how large images are; {remedy}")
    return RandomTensor((samples, getattr(vision, "num_channels", 3), *sides))


def _labels(
    model_class: Any, config: Any, main: RandomTensor, length: int | None, parameters: Mapping[str, object]
) -> dict[str, RandomTensor]:
    name, samples = model_class.__name__, main.shape[0]
    if name.endswith("ForQuestionAnswering") and length is not None:
        return dict.fromkeys(("start_positions", "end_positions"), RandomTensor((samples,), length))
    if "labels" not in parameters:
        raise ModelError(f"{name} has no loss, because its forward takes no labels; {WRITE}; or measure inference")
    if name.endswith(_CLASSES):
        return {"labels": RandomTensor((samples,), config.num_labels)}
    if name.endswith("ForTokenClassification") and length is not None:
        return {"labels": RandomTensor((samples, length), config.num_labels)}
    if name.endswith("ForSemanticSegmentation"):
        return {"labels": RandomTensor((samples, *main.shape[2:]), config.num_labels)}
    if name.endswith("ForCTC"):
        return {"labels": RandomTensor((samples, _LABELS_OF_AUDIO), config.vocab_size)}
    if name.endswith(_AS_LONG) and length is not None:
        labels = {"labels": RandomTensor((samples, length), _text(config).vocab_size)}
        return labels | (
            {"next_sentence_label": RandomTensor((samples,), 2)} if "next_sentence_label" in parameters else {}
        )
    raise ModelError(f"the labels of {name} are not known here; {WRITE}; or measure inference")
