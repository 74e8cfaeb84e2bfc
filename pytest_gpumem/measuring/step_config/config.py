"""The step config: all settings of a step (precision, checkpointing, optimizer, accumulation), parsed from a text."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.base.units import nearest, number, whole_number
from pytest_gpumem.facts.values.option_words import ROUTINGS, Routing
from pytest_gpumem.measuring.step_config.checkpoint_kinds import KINDS, Checkpointing
from pytest_gpumem.measuring.step_config.shard_kinds import NONE, OFFLOADS, SHARD_KINDS, Sharding, read_offload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

T = TypeVar("T")
PRECISIONS = {
    "fp32": "float32 weights. Float32 matrix products and convolutions run in full precision.",
    "tf32": "float32 weights. Float32 matrix products and convolutions run in TF32. It needs CUDA with compute capability 8.0 "
    "or higher.",
    "amp-fp16": "float32 weights, autocast to float16, and `torch.amp.GradScaler`.",
    "amp-bf16": "float32 weights and autocast to bfloat16. GPUs before Ampere (such as a T4) compute bfloat16 in float32. "
    "This is slow and may take more memory, because flash attention and cuDNN have no bfloat16 kernels for these GPUs. On such "
    "a GPU, the measurement has a note.",
    "bf16": "bfloat16 weights, without autocast. On GPUs before Ampere, the limits are the same as for `amp-bf16`.",
    "fp16": "float16 weights, without autocast and without a gradient scaler.",
    "mp-bf16": "float32 weights. `fully_shard` gathers parameters in bfloat16 (`MixedPrecisionPolicy`), so it needs `shard=`. "
    "With `reduce=fp32` it reduces gradients in float32, as torch 2.15 does without `reduce=`.",
    "mp-fp16": "Like `mp-bf16`, in float16 and with `torch.amp.GradScaler`.",
}
"""The words for ``precision``, with their meaning."""
CHECKPOINTS = {kind.form: kind.help for kind in KINDS.values()}
OPTIMIZER_CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
"""The ``torch.optim`` classes with several implementations, by word."""
_IMPLEMENTATIONS = {"": "torch chooses the implementation", "-foreach": "`foreach=True`", "-fused": "`fused=True`"}
_MOMENTUM = {"sgd": " without momentum"}
OPTIMIZERS = {
    "none": "Forward and backward only.",
    **{
        f"{name}{form}": f"`torch.optim.{class_name}`{_MOMENTUM.get(name, '')}; {implementation}."
        for name, class_name in OPTIMIZER_CLASSES.items()
        for form, implementation in _IMPLEMENTATIONS.items()
    },
    "adafactor": "`torch.optim.Adafactor`.",
    "adam-8bit": "`Adam8bit` from torchao (the extra `torchao`), or from bitsandbytes if torchao is missing.",
    "adamw-8bit": "`AdamW8bit` from torchao (the extra `torchao`), or from bitsandbytes if torchao is missing.",
}
"""The words for ``optimizer``, with their meaning."""
ZERO_GRADS = {
    "set_to_none": "`zero_grad()` frees the gradients.",
    "zero": "`zero_grad(set_to_none=False)` keeps the gradients and fills them with zeros.",
}
COMPILER_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
COMPILES = {
    "none": "Eager execution.",
    **{mode: f'`torch.compile(model, mode="{mode}")`.' for mode in COMPILER_MODES},
    **{
        backend: f'`torch.compile(model, backend="{backend}")`, which needs no compiler.'
        for backend in ("eager", "aot_eager")
    },
}
CACHES = {
    "on": "The step runs the prompt (the batch without its last token), then the last token with the prompt's keys and values. "
    "The model's forward must take `use_cache`, and `cache` or `past_key_values`. With `new_tokens`, leave `cache=on` out, "
    "because `generate()` uses a cache by default.",
    "off": "The step caches no keys and values.",
}
WEIGHTS = {
    "int8": "int8 weights in the linear layers, with unquantized activations. This needs the extra `torchao`, and a class or "
    "function that builds the model. `tf32` and `amp-*` cannot be combined with int8 weights."
}
REDUCES = {word: f"`{dtype}`." for word, dtype in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"))}
PLAIN = "plain"
"""The text of a config without settings."""


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Settings for a step: precision, checkpointing, optimizer and more. Fixture methods take a config as ``config=``.

    A config is either a text or a frozen `StepConfig`. The text consists of a precision and ``name=value`` pairs in any order,
    separated by commas. A config without any setting is ``plain``. The text is part of a measurement's workload, so a baseline
    is compared only with a measurement under the same config. A measurement under another config is ``stale``, or
    ``regressed`` if memory grew.

    A training step with a config first makes a dry run, eagerly. With a gradient scaler, the dry run repeats the step until the
    scale no longer falls. The dry run raises `ConfigError` if the config has nothing to act on, for example if backward
    recomputes no block or autocast casts nothing. Without this check, a plain step would be measured under the config's name.
    Like every step, the dry run trains the model that the test passes.

    If the device cannot run the step, the test is skipped with the reason, and counts as ``unmeasured``. With
    ``--gpumem-strict``, the test fails. The CPU cannot run ``tf32``, ``offload``, ``cp:N`` and, with torch 2.6,
    ``fully_shard``.

    Raises:
        ConfigError: A word is unknown, two settings contradict each other, or a setting has no effect without another setting
            or in this kind of step.

    Example:
        >>> config = StepConfig.parse("amp-bf16,checkpoint=every:2,clip=1,accumulate=4")
        >>> config == StepConfig("amp-bf16", checkpoint="every:2", clip=1, accumulate=4)
        True
        >>> config.id
        'amp-bf16-ckpt-every2-clip1-acc4'
    """

    precision: str | None = None
    """The dtype of the weights, autocast and the gradient scaler. A config has the word without ``precision=``:
    ``"amp-bf16,clip=1"``.

    By default the step runs in the model's own precision with autocast off, even inside an autocast context. The autocast
    state, the ``torch.backends`` settings for float32 and the random numbers are restored after the step. A model that the test
    passes is never converted, so its parameters must already have the right dtype. A model that a function builds is converted.
    With ``bf16`` and ``fp16``, floating-point tensors in the batch are converted as well.
    """
    checkpoint: str = "none"
    """The kind of activation checkpointing: which activations forward does not save, so backward recomputes them.

    The model's code does not change. While the step is measured, the ``forward`` of each block is replaced by a call to
    ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``. Dropout draws the same random numbers in forward and in
    the recomputation. In a recomputed block, BatchNorm updates its running statistics twice, as always with
    ``torch.utils.checkpoint``.
    """
    blocks: str | None = None
    """A pattern for the repeated blocks: the path of their list (``transformer.h``), or the blocks' paths
    (``attn_layers.layers.*.1``).

    By default, the blocks are detected. A list (``ModuleList`` or ``Sequential``) qualifies if all its members have the same
    type. The step uses the list with the most parameters, and all other lists with this type of members, such as the stages of
    a ResNet, or encoder and decoder. If forward calls none of these blocks, the error names the lists, and suggests a pattern
    for modules that forward calls.
    """
    optimizer: str = "adamw"
    """The optimizer for the trainable parameters, with torch's default arguments. For other arguments, pass an ``optimizer=``
    function to the fixture method."""
    clip: float | None = None
    """The norm, above 0, to which ``torch.nn.utils.clip_grad_norm_`` clips gradients after unscaling. By default gradients are
    not clipped."""
    zero_grad: str = "set_to_none"
    """The way in which the step clears the gradients at its end."""
    accumulate: int = 1
    """The number of micro-batches. The batch is split into equal micro-batches, whose gradients are added up.

    Every tensor with the same first dimension as the batch's first tensor is split. All other tensors are the same in each
    micro-batch. A ``[T, T]`` mask is split as well if T is the number of samples. `peak_forward` and `peak_backward` are the
    largest peaks among all micro-batches. For example, ``accumulate=4`` splits an ``int64[8, 256]`` batch into four
    ``int64[2, 256]`` micro-batches.
    """
    compile: str = "none"
    """A mode or backend for ``torch.compile``. torch's compile caches are reset before and after the step."""
    cache: str | None = None
    """A key/value cache for an infer step. By default the model decides."""
    weights: str | None = None
    """Weight-only quantization for an infer step. By default weights are not quantized."""
    shard: str = NONE
    """The kinds of sharding across a job's ranks, separated by plus signs: at most one data-parallel kind, and any kinds that
    split the model or the sequence into parts (``tp:N``, ``pp:N``, ``cp:N``).

    Examples: ``shard=fsdp,world=8``, ``shard=fsdp+tp:8,world=64``. ``ddp`` and ``zero1`` cannot be combined with another kind,
    and ``pp:N`` cannot be combined with ``tp:N`` or ``cp:N``. ``checkpoint=sqrt`` and ``sequential:S`` run several blocks as
    one block, so they cannot be combined with ``fully_shard``. A gradient scaler cannot be combined with ``pp:N``.

    The step uses the test's own process group, or a group with ``torchrun``'s ranks. If there is no group, a single rank runs.
    torch's ``fake`` backend then returns the rank's own parts in place of the other ranks' parts, so sizes are right but values
    are wrong. A single rank shows neither NCCL's memory nor the memory that asynchronous collectives hold a little longer. It
    also shows no times, and no differences between ranks (experts, sequence lengths).

    Under data parallelism, the test passes the batch for one rank, not for the whole job. ``fully_shard``, ``tp:N`` and
    ``pp:N`` replace parameters, so the test must pass a function that builds the model (``lambda: copy.deepcopy(model)``).
    Parameters get memory only when they are sharded, so a model may be larger than the device. These parameters get new values:
    normal with a standard deviation of 0.02, biases 0, one-dimensional weights 1. Buffers keep their values. A model that reads
    its parameters during construction is built with all parameters in memory.

    The schedule of a pipeline stage alternates forward and backward, so a stage has no ``peak_forward``, and
    ``peak_backward`` is the whole schedule's peak.
    """
    world: int | None = None
    """The job's number of ranks. The default is the process group's size, or the product of the numbers in ``shard``: 8 for
    ``cp:2+tp:4``."""
    rank: int = 0
    """The rank to run if this process is the only rank, a whole number below ``world``."""
    reduce: str | None = None
    """The dtype in which ``fully_shard`` reduces gradients (``reduce_dtype``). The default is the parameters' dtype."""
    routing: Routing | None = None
    """The assumption about choices that an emulated GPU does not compute, such as the experts for a token. The default is the
    setting ``routing``."""
    offload: str = NONE
    """The parts that a step keeps in the host's memory, separated by plus signs: ``offload=params+activations``. This needs
    a GPU."""

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            value = getattr(self, name)
            if value is not None and value not in words:
                raise ConfigError(_unknown(name, value, words))
        if not isinstance(self.checkpoint, str):
            raise ConfigError(_unknown("checkpoint", self.checkpoint, CHECKPOINTS))
        for name in ("shard", "offload"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: write a text, or {NONE!r} to switch it off")
        kind = self.checkpointing.kind
        object.__setattr__(self, "accumulate", _read("accumulate=", whole_number, self.accumulate))
        if self.clip is not None:
            object.__setattr__(self, "clip", _read("clip=", number, self.clip))
            if not (self.clip > 0 and math.isfinite(self.clip)):
                raise ConfigError(f"clip={self.clip}: the norm to clip to must be a finite number above 0")
        if kind.part_of_compiler and self.compile not in COMPILER_MODES:
            raise ConfigError(f"checkpoint={self.checkpoint} is {kind.part_of_compiler}; add compile=default")
        self._check_sharding()
        if self.weights is not None and self.precision in ("amp-fp16", "amp-bf16", "tf32"):
            raise ConfigError(
                f"weights={self.weights} cannot be combined with {self.precision}; use fp32, bf16 or fp16, or no precision"
            )

    def _check_sharding(self) -> None:
        """Raise `ConfigError` for invalid rank numbers, and for settings that contradict the sharding."""
        try:
            if self.world is not None:
                object.__setattr__(self, "world", whole_number(self.world))
            object.__setattr__(self, "rank", whole_number(self.rank, least=0))
            sharding = self.sharding
            for is_wrong, correction in _contradictions(self, sharding):
                if is_wrong:
                    raise ValueError(correction)
            if sharding is not None and self.world is not None:
                sharding.over(self.world, self.rank)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @classmethod
    def parse(cls, text: str) -> StepConfig:
        """Return the config for a text.

        The text consists of a precision and ``name=value`` pairs in any order, separated by commas.

        Raises:
            ConfigError: The text is not a valid config. For an unknown word, the message suggests the most similar valid word.
        """
        if not isinstance(text, str):
            raise ConfigError(f"{text!r} is no step config; write a text like 'amp-bf16,checkpoint=blocks'")
        values: dict[str, Any] = {}
        try:
            for part in filter(None, map(str.strip, text.split(","))):
                name, equals, value = part.partition("=")
                if not equals:
                    if part == PLAIN:
                        continue
                    name, value = "precision", _bare(part)
                if name not in AXES:
                    raise ConfigError(_unknown("setting", name, AXES))
                if name in values:
                    raise ConfigError(f"{name} is given twice")
                values[name] = value
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"step config {text!r}: {error}") from None

    @property
    def checkpointing(self) -> Checkpointing:
        """The kind and argument of ``checkpoint``."""
        return _checkpointing(self.checkpoint)

    @property
    def sharding(self) -> Sharding | None:
        """The kinds of sharding in ``shard``; ``None`` without sharding."""
        return None if self.shard == NONE else Sharding.parse(self.shard)

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts that the step keeps in the host's memory."""
        return frozenset() if self.offload == NONE else read_offload(self.offload)

    def given(self) -> dict[str, str]:
        """Return the settings that differ from their defaults, as texts by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = {field.name: str(values[field.name]) for field in fields(self) if values[field.name] != field.default}
        # Write 1 instead of 1.0, as people do.
        return {name: text.removesuffix(".0") if name == "clip" else text for name, text in texts.items()}

    def text(self, own_precision: str | None = None) -> str:
        """Return the config as a text that `parse` accepts, without settings at their defaults.

        ``str(config)`` returns the same text as ``config.text()``.

        Args:
            own_precision: The precision to write if the config has no precision.
        """
        settings = self.given()
        precision = settings.pop("precision", own_precision)
        parts = [precision] if precision else []
        parts += [f"{name}={value}" for name, value in settings.items()]
        return ",".join(parts) or PLAIN

    def __str__(self) -> str:
        return self.text()

    @property
    def id(self) -> str:
        """A short name for test ids: ``"amp-bf16-ckpt-every2-adamw-fused-acc4"``."""
        return "-".join(_SHORT[name](value) for name, value in self.given().items()) or PLAIN

    def only_for(self, kind: str) -> None:
        """Raise `ConfigError` if a setting does nothing in a step of ``kind`` (``train_step``, ``infer_step``)."""
        idle = sorted(self.given().keys() & NOT_IN[kind])
        plain = ""
        if self.casts_shards and "shard" in idle:
            # This precision is only valid with shard=, so the message names both settings.
            idle.insert(0, str(self.precision))
            plain = f"; write {str(self.precision).removeprefix('mp-')}"
        if idle:
            raise ConfigError(f"step config '{self}': {', '.join(idle)} does nothing in gpumem.{kind}{plain}")

    @property
    def casts_shards(self) -> bool:
        """True if ``fully_shard`` casts the gathered parameters in place of autocast (``mp-bf16``)."""
        return str(self.precision).startswith("mp-")


def _contradictions(config: StepConfig, sharding: Sharding | None) -> Iterator[tuple[bool, str]]:
    """Yield a pair for each possible contradiction in a config: True if the config has it, and a message with a correction."""
    offloaded, precision, checkpoint = config.offloaded, str(config.precision), config.checkpoint
    fully, staged = sharding is not None and sharding.fully, sharding is not None and sharding.staged
    kind = config.checkpointing.kind
    policies = {
        precision: config.casts_shards,
        f"reduce={config.reduce}": config.reduce is not None,
        "offload=params": "params" in offloaded,
    }
    for policy, is_set in policies.items():
        plain = f", or write {precision.removeprefix('mp-')} in gpumem.infer_step" if policy == precision else ""
        yield (
            is_set and not fully,
            f"{policy} works only with fully_shard; add shard=fsdp (or zero2, zero3, hsdp){plain}",
        )
    for name, is_set in {
        f"world={config.world}": config.world is not None,
        f"rank={config.rank}": config.rank > 0,
    }.items():
        yield is_set and sharding is None, f"{name} does nothing without sharding; add shard="
    yield (
        config.blocks is not None and not (kind.on_blocks or fully or staged),
        f"blocks={config.blocks} does nothing with checkpoint={checkpoint}, because this kind does not act on blocks",
    )
    yield (
        staged and precision in ("amp-fp16", "mp-fp16"),
        f"{precision} scales gradients, but the schedule of pp does not scale them; use bfloat16",
    )
    yield (
        fully and kind.name in ("sequential", "sqrt"),
        f"checkpoint={checkpoint} runs several blocks as one, but fully_shard gathers each block; use checkpoint=blocks",
    )
    yield (
        "activations" in offloaded and checkpoint == "offload",
        "checkpoint=offload and offload=activations do the same; leave one out",
    )
    split = sharding is not None and sharding.degree("tp") > 1
    yield (
        split and not fully and precision == "amp-fp16",
        "amp-fp16 cannot be combined with tp: torch cannot unscale split and whole gradients; use amp-bf16 or fsdp+tp:N",
    )
    yield (
        (fully or split) and config.optimizer == "adafactor",
        "torch's Adafactor does not accept sharded parameters; use adamw",
    )
    zero = sharding is not None and sharding.data is not None and sharding.data.shards_optimizer
    yield (
        zero and config.optimizer == "none",
        "shard=zero1 shards the optimizer's state, but there is no optimizer; use ddp",
    )
    yield (
        staged and config.compile != "none",
        "the schedule of pp calls the stage without compiling it; leave compile= out",
    )
    for name, is_set in {
        "shard=zero1": zero,
        "zero_grad=zero": config.zero_grad == "zero",
        "optimizer=none": config.optimizer == "none",
        f"clip={config.clip}": config.clip is not None,
        precision: precision.endswith("p-fp16"),
    }.items():
        yield (
            is_set and "optimizer" in offloaded,
            f"offload=optimizer moves gradients to the host during backward, so it cannot be combined with {name}",
        )
    yield (
        {"optimizer", "params"} <= offloaded,
        "offload=params already keeps the optimizer in the host's memory; leave optimizer out",
    )


AXES = tuple(field.name for field in fields(StepConfig))
WORDS: dict[str, Mapping[str, str]] = {
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "zero_grad": ZERO_GRADS,
    "compile": COMPILES,
    "cache": CACHES,
    "weights": WEIGHTS,
    "reduce": REDUCES,
    "routing": ROUTINGS,
}
"""The valid words for each setting whose value is a single word, with their meaning."""
FORMS: dict[str, Mapping[str, str]] = {
    **WORDS,
    "checkpoint": CHECKPOINTS,
    "shard": {kind.form: kind.help for kind in SHARD_KINDS.values()},
    "offload": OFFLOADS,
}
"""The valid values for each setting as they are written in a config (``every:N``), with their meaning."""
NOT_IN = {
    "train_step": {"cache", "weights"},
    "infer_step": {
        *("checkpoint", "blocks", "optimizer", "clip", "zero_grad", "accumulate"),
        *("shard", "world", "rank", "reduce", "offload"),
    },
}
_SHORT: dict[str, Callable[[str], str]] = {
    "precision": str,
    "checkpoint": lambda value: f"ckpt-{in_an_id(_without_colon(value))}",
    "blocks": lambda value: f"of-{in_an_id(value)}",
    "optimizer": lambda value: "no-optimizer" if value == "none" else value,
    "clip": lambda value: f"clip{value}",
    "zero_grad": lambda _: "zero-grad",
    "accumulate": lambda value: f"acc{value}",
    "compile": lambda value: "compile" if value == "default" else f"compile-{value}",
    "cache": lambda value: "cache" if value == "on" else "no-cache",
    "weights": str,
    "shard": lambda value: value.replace("+", "-").replace(":", ""),
    "world": lambda value: f"world{value}",
    "rank": lambda value: f"rank{value}",
    "reduce": lambda value: f"reduce-{value}",
    "routing": lambda value: f"routing-{value}",
    "offload": lambda value: f"offload-{value.replace('+', '-')}",
}


def as_config(config: StepConfig | str | None) -> StepConfig | None:
    """Return ``config`` as a `StepConfig`; ``None`` stays ``None``. Raises `ConfigError` if a text is not a valid config."""
    return config if config is None or isinstance(config, StepConfig) else StepConfig.parse(config)


def combinations(axes: Mapping[str, object], skip: Sequence[str] = ()) -> list[StepConfig]:
    """Return every combination of the values in ``axes``. The last axis varies fastest.

    For example, ``combinations({"precision": ["fp32", "bf16"], "clip": [1, 2]}, skip=["bf16,clip=2"])`` returns the configs
    ``fp32,clip=1``, ``fp32,clip=2`` and ``bf16,clip=1``.

    Args:
        axes: The name of each setting to vary, with a value or a list of values.
        skip: Config texts. A combination that has all settings in one of these texts is left out.

    Raises:
        ConfigError: A setting or value is unknown, no combination is left, or a text in ``skip`` matches no combination.
    """
    for name in axes:
        if name not in AXES:
            raise ConfigError(_unknown("axis", name, AXES))
    lists = [list(values) if isinstance(values, (list, tuple)) else [values] for values in axes.values()]
    empty = [name for name, values in zip(axes, lists, strict=True) if not values]
    if empty:
        raise ConfigError(f"{empty[0]} has no value, so there is no config")
    used: set[str] = set()
    configs: list[StepConfig] = []
    skipped = {text: _skipped_by(text) for text in skip}
    for values in itertools.product(*lists):
        combination = dict(zip(axes, values, strict=True))
        # Look for matching texts in ``skip`` before creating the config, because a skipped combination may be an invalid
        # config.
        matching_texts = [
            text
            for text, settings in skipped.items()
            if all(str(combination.get(name)) == value for name, value in settings.items())
        ]
        used.update(matching_texts)
        if matching_texts:
            continue
        config = StepConfig(**combination)
        if config not in configs:
            configs.append(config)
    idle = [text for text in skipped if text not in used]
    if idle:
        raise ConfigError(f"skip={idle[0]!r} leaves nothing out, because no combination has all settings in this text")
    if not configs:
        raise ConfigError("skip leaves out all combinations, so there is nothing to run")
    return configs


def _skipped_by(text: str) -> dict[str, str]:
    """Return the settings in a ``skip`` text by name. The settings need not form a valid config."""
    pairs = [part.strip().partition("=") for part in text.split(",")] if isinstance(text, str) else []
    settings = {
        name if equals else "precision": value if equals else _bare(name) for name, equals, value in pairs if name
    }
    unknown = [name for name in settings if name not in AXES]
    if not settings or unknown:
        raise ConfigError(f"skip={text!r}: write settings, like 'fp16,checkpoint=ops'")
    return settings


def _bare(word: str) -> str:
    """Return ``word`` if it is a precision, the only setting written without its name. Otherwise raise `ConfigError`."""
    if word in PRECISIONS:
        return word
    for name, words in (("checkpoint", CHECKPOINTS), ("optimizer", OPTIMIZERS), ("compile", COMPILES)):
        if word.partition(":")[0] in {form.partition(":")[0] for form in words}:
            raise ConfigError(f"{word!r} is no precision; write {name}={word}")
    raise ConfigError(_unknown("precision", word, PRECISIONS))


def _unknown(subject: str, value: object, words: Collection[str]) -> str:
    hint = nearest(str(value), list(words))
    valid = f" Valid: {', '.join(words)}" if hint.endswith("?") else ""
    return f"unknown {subject} {value!r}; {hint}{valid}"


@functools.lru_cache
def _checkpointing(text: str) -> Checkpointing:
    name, colon, argument = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise ConfigError(_unknown("checkpoint", text, CHECKPOINTS))
    if bool(kind.argument) != bool(argument) or (colon and not argument):
        raise ConfigError(f"checkpoint={text}: write checkpoint={kind.form}")
    return Checkpointing(kind, _read(f"checkpoint={name}:", kind.argument.read, argument) if kind.argument else None)


def _read(name: str, read: Callable[[Any], T], value: object) -> T:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{name}{value}: {error}") from None


def _without_colon(checkpoint: str) -> str:
    kind = KINDS[checkpoint.partition(":")[0]]
    return checkpoint.replace(":", kind.argument.separator_in_ids) if kind.argument else checkpoint


def in_an_id(text: str) -> str:
    """Return the text with hyphens in place of characters that are special in node ids, shells or ``-k``."""
    return re.sub(r"[^\w.*+-]+", "-", text).strip("-")
