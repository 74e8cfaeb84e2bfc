"""The step config: precision, checkpointing, optimizer, accumulation and all other settings of a step, parsed from a text."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_gpumem.step_config.checkpoint_kinds import KINDS, Checkpointing
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.step_config.shard_kinds import NONE, Sharding, read_offload
from pytest_gpumem.units import nearest, number, whole_number
from pytest_gpumem.values.option_words import ROUTINGS, Routing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
PRECISIONS = ("fp32", "tf32", "amp-fp16", "amp-bf16", "bf16", "fp16", "mp-bf16", "mp-fp16")
CHECKPOINTS = tuple(kind.form for kind in KINDS.values())
OPTIMIZERS = (
    "none",
    *(f"{name}{form}" for name in ("sgd", "adam", "adamw") for form in ("", "-foreach", "-fused")),
    "adafactor",
    "adam-8bit",
    "adamw-8bit",
)
ZERO_GRADS = ("set_to_none", "zero")
COMPILES = ("none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "eager", "aot_eager")
"""``torch.compile``'s modes, and two of its backends that need no compiler."""
CACHES = ("on", "off")
WEIGHTS = ("int8",)
REDUCES = ("fp32", "bf16", "fp16")
PLAIN = "plain"
"""The text of a config that asks for nothing."""


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Configuration of a step. ``StepConfig.parse("amp-bf16,checkpoint=every:2,optimizer=adamw,accumulate=4")``.

    Raises `ConfigError` when a word is unknown, or two of them contradict one another. ``str()`` gives the text, without
    what is as by default; ``id`` a short name for test ids.
    """

    precision: str | None = None
    """One of `PRECISIONS`; ``None`` is whatever the model is in."""
    checkpoint: str = "none"
    """One of `CHECKPOINTS`."""
    blocks: str | None = None
    """Pattern of the modules that hold the repeated blocks (``transformer.h``); ``None`` lets them be found."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    clip: float | None = None
    """The norm that gradients are clipped to (``torch.nn.utils.clip_grad_norm_``)."""
    zero_grad: str = "set_to_none"
    """``zero`` keeps the gradients and fills them with zeros (``zero_grad(set_to_none=False)``)."""
    accumulate: int = 1
    """The number of micro-batches whose gradients are added up."""
    compile: str = "none"
    """One of `COMPILES`."""
    cache: str | None = None
    """Infer steps: with (``on``) or without (``off``) a key/value cache; ``None`` is what the model does by itself."""
    weights: str | None = None
    """Infer steps: ``int8`` weights (weight-only quantisation, torchao)."""
    shard: str = NONE
    """Words of `SHARD_KINDS`, several with a plus: ``"fsdp+tp:2"``."""
    world: int | None = None
    """The number of ranks that share the job; ``None`` is that of the process group, or what ``shard`` needs at least."""
    rank: int = 0
    """The rank whose step is run where nobody else is there."""
    reduce: str | None = None
    """One of `REDUCES`: the dtype in which ``fully_shard`` reduces gradients; ``None`` is that of the parameters."""
    routing: Routing | None = None
    """One of `ROUTINGS`: what is assumed of choices that an emulated GPU does not compute, such as those of experts."""
    offload: str = NONE
    """Words of `OFFLOADS`, several with a plus: what is kept in the host's memory."""

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value is not None and value not in words:
                raise ConfigError(_unknown(name, value, words))
        if not isinstance(self.checkpoint, str):
            raise ConfigError(_unknown("checkpoint", self.checkpoint, CHECKPOINTS))
        for name in ("shard", "offload"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: write a text, {NONE!r} for nothing")
        kind = self.checkpointing.kind
        object.__setattr__(self, "accumulate", _read("accumulate=", whole_number, self.accumulate))
        if self.clip is not None:
            object.__setattr__(self, "clip", _read("clip=", number, self.clip))
            if not (self.clip > 0 and math.isfinite(self.clip)):
                raise ConfigError(f"clip={self.clip}: the norm to clip to is a number above 0")
        if kind.part_of_compiler and self.compile not in COMPILES[1:5]:
            raise ConfigError(f"checkpoint={self.checkpoint} is {kind.part_of_compiler}; add compile=default")
        self._check_sharding()
        if self.weights is not None and self.precision in ("amp-fp16", "amp-bf16", "tf32"):
            raise ConfigError(f"weights={self.weights} goes with fp32, bf16 or fp16, not with {self.precision}")

    def _check_sharding(self) -> None:
        """Raise `ConfigError` for ranks that are no numbers, and for settings that contradict the sharding."""
        try:
            if self.world is not None:
                object.__setattr__(self, "world", whole_number(self.world))
            object.__setattr__(self, "rank", whole_number(self.rank, least=0))
            sharding = self.sharding
            for wrong, why in _against(self, sharding):
                if wrong:
                    raise ValueError(why)
            if sharding is not None and self.world is not None:
                sharding.over(self.world, self.rank)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @classmethod
    def parse(cls, text: str) -> StepConfig:
        """Return the config of a text: a precision and ``name=value`` pairs, in any order, separated by commas."""
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
        """Kind and argument of ``checkpoint``."""
        return _checkpointing(self.checkpoint)

    @property
    def sharding(self) -> Sharding | None:
        """The kinds of sharding that ``shard`` names; ``None`` where nothing is sharded."""
        return None if self.shard == NONE else Sharding.parse(self.shard)

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts of a step that are kept in the host's memory."""
        return frozenset() if self.offload == NONE else read_offload(self.offload)

    def given(self) -> dict[str, str]:
        """Return the settings that differ from the defaults, as texts, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {field.name: str(values[field.name]) for field in fields(self) if values[field.name] != field.default}
        # 1, as people write it, and not 1.0.
        return {name: text.removesuffix(".0") if name == "clip" else text for name, text in given.items()}

    def text(self, own_precision: str | None = None) -> str:
        """Return the config as `parse` reads it. ``own_precision`` stands for a precision that is not given."""
        given = self.given()
        precision = given.pop("precision", own_precision)
        parts = [precision] if precision else []
        parts += [f"{name}={value}" for name, value in given.items()]
        return ",".join(parts) or PLAIN

    def __str__(self) -> str:
        return self.text()

    @property
    def id(self) -> str:
        """A short name: ``"amp-bf16-ckpt-every2-adamw-fused-acc4"``."""
        return "-".join(_SHORT[name](value) for name, value in self.given().items()) or PLAIN

    def only_for(self, kind: str) -> None:
        """Raise `ConfigError` if a setting has no effect in a step of ``kind`` (train_step, infer_step)."""
        idle = sorted(self.given().keys() & _NOT_IN[kind])
        plain = ""
        if self.casts_shards and "shard" in idle:
            # Without shard= it is refused, too.
            idle.insert(0, str(self.precision))
            plain = f"; write {str(self.precision).removeprefix('mp-')}"
        if idle:
            raise ConfigError(f"step config '{self}': {', '.join(idle)} does nothing in gpumem.{kind}{plain}")

    @property
    def casts_shards(self) -> bool:
        """True if ``fully_shard`` casts what it gathers, instead of autocast (``mp-bf16``)."""
        return str(self.precision).startswith("mp-")


def _against(config: StepConfig, sharding: Sharding | None) -> Iterator[tuple[bool, str]]:
    """Yield what may be wrong with a config and its sharding: whether it is, and what would be right."""
    offloaded, precision, checkpoint = config.offloaded, str(config.precision), config.checkpoint
    fully, staged = sharding is not None and sharding.fully, sharding is not None and sharding.staged
    kind = config.checkpointing.kind
    policies = {
        precision: config.casts_shards,
        f"reduce={config.reduce}": config.reduce is not None,
        "offload=params": "params" in offloaded,
    }
    for policy, given in policies.items():
        plain = f", or write {precision.removeprefix('mp-')} in gpumem.infer_step" if policy == precision else ""
        yield given and not fully, f"{policy} is a policy of fully_shard; add shard=fsdp (or zero2, zero3, hsdp){plain}"
    for name, given in {
        f"world={config.world}": config.world is not None,
        f"rank={config.rank}": config.rank > 0,
    }.items():
        yield given and sharding is None, f"{name} does nothing without sharding; add shard="
    yield (
        config.blocks is not None and not (kind.on_blocks or fully or staged),
        f"blocks={config.blocks} does nothing with checkpoint={checkpoint}: it takes no blocks",
    )
    yield (
        staged and precision in ("amp-fp16", "mp-fp16"),
        f"{precision} scales gradients, and the schedule of pp does not; use bfloat16",
    )
    yield (
        fully and kind.name in ("sequential", "sqrt"),
        f"checkpoint={checkpoint} runs several blocks as one, and fully_shard gathers each; use checkpoint=blocks or every:N",
    )
    yield (
        "activations" in offloaded and checkpoint == "offload",
        "checkpoint=offload and offload=activations are the same; leave one out",
    )
    split = sharding is not None and sharding.degree("tp") > 1
    yield (
        split and not fully and precision == "amp-fp16",
        "amp-fp16 scales gradients, of which tp splits some only, and torch does not mix them; use amp-bf16 or fsdp+tp:N",
    )
    yield (
        (fully or split) and config.optimizer == "adafactor",
        "torch's Adafactor takes no sharded parameters; use adamw",
    )
    zero = sharding is not None and sharding.data is not None and sharding.data.shards_optimizer
    yield zero and config.optimizer == "none", "shard=zero1 shares out an optimizer's state, and there is none; use ddp"
    yield staged and config.compile != "none", "the schedule of pp calls the stage as it is; leave compile= out"
    for name, given in {
        "shard=zero1": zero,
        "zero_grad=zero": config.zero_grad == "zero",
        "optimizer=none": config.optimizer == "none",
        f"clip={config.clip}": config.clip is not None,
        precision: precision.endswith("p-fp16"),
    }.items():
        yield (
            given and "optimizer" in offloaded,
            f"offload=optimizer takes gradients to the host in backward, and does not go with {name}",
        )
    yield (
        {"optimizer", "params"} <= offloaded,
        "offload=params has the optimizer in the host's memory, too; leave optimizer out",
    )


AXES = tuple(field.name for field in fields(StepConfig))
_WORDS: dict[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "zero_grad": ZERO_GRADS,
    "compile": COMPILES,
    "cache": CACHES,
    "weights": WEIGHTS,
    "reduce": REDUCES,
    "routing": ROUTINGS,
}
_NOT_IN = {
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
    """Return the config that a test author wrote as text or config. Raises `ConfigError`."""
    return config if config is None or isinstance(config, StepConfig) else StepConfig.parse(config)


def combinations(axes: Mapping[str, object], skip: Sequence[str] = ()) -> list[StepConfig]:
    """Return every combination of the values of ``axes`` (a value, or a list of them), the last axis moving fastest.

    ``skip`` holds config texts (``"fp16,checkpoint=ops"``); a combination that has all that one of them says is left out.
    Raises `ConfigError` for an unknown axis, for a wrong value, and when nothing is left or a text skips nothing.
    """
    for name in axes:
        if name not in AXES:
            raise ConfigError(_unknown("axis", name, AXES))
    lists = [list(values) if isinstance(values, (list, tuple)) else [values] for values in axes.values()]
    empty = [name for name, values in zip(axes, lists, strict=True) if not values]
    if empty:
        raise ConfigError(f"{empty[0]} has no value, so that there is no config")
    used: set[str] = set()
    made: list[StepConfig] = []
    skipped = {text: _skipped_by(text) for text in skip}
    for values in itertools.product(*lists):
        chosen = dict(zip(axes, values, strict=True))
        # What is skipped may be a combination that makes no config at all.
        skipping = [
            text
            for text, wanted in skipped.items()
            if all(str(chosen.get(name)) == value for name, value in wanted.items())
        ]
        used.update(skipping)
        if skipping:
            continue
        config = StepConfig(**chosen)
        if config not in made:
            made.append(config)
    idle = [text for text in skipped if text not in used]
    if idle:
        raise ConfigError(f"skip={idle[0]!r} leaves nothing out: no combination has all of it")
    if not made:
        raise ConfigError("skip leaves nothing to run")
    return made


def _skipped_by(text: str) -> dict[str, str]:
    """Return the settings of a ``skip`` text by name: a part of a config need not be one by itself."""
    pairs = [part.strip().partition("=") for part in text.split(",")] if isinstance(text, str) else []
    settings = {
        name if equals else "precision": value if equals else _bare(name) for name, equals, value in pairs if name
    }
    unknown = [name for name in settings if name not in AXES]
    if not settings or unknown:
        raise ConfigError(f"skip={text!r}: write settings, like 'fp16,checkpoint=ops'")
    return settings


def _bare(word: str) -> str:
    """Return a precision, the only word without a name. Raises `ConfigError` for another one."""
    if word in PRECISIONS:
        return word
    for name, words in (("checkpoint", CHECKPOINTS), ("optimizer", OPTIMIZERS), ("compile", COMPILES)):
        if word.partition(":")[0] in {known.partition(":")[0] for known in words}:
            raise ConfigError(f"{word!r} is no precision; write {name}={word}")
    raise ConfigError(_unknown("precision", word, PRECISIONS))


def _unknown(what: str, value: object, words: Sequence[str]) -> str:
    hint = nearest(str(value), list(words))
    valid = f" Valid: {', '.join(words)}" if hint.endswith("?") else ""
    return f"unknown {what} {value!r}; {hint}{valid}"


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
    """Return the text without characters that are special in node ids, shells or ``-k``."""
    return re.sub(r"[^\w.*+-]+", "-", text).strip("-")
