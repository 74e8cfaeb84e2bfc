"""The order in which configs are tried until a model fits: what costs least first. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.step_config.checkpoint_kinds import KINDS
from pytest_gpumem.step_config.config import StepConfig, combinations
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.units import agreeing
from pytest_gpumem.values.rates import return_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.advice.largest import Sought
    from pytest_gpumem.models.task import Task

START = StepConfig(precision="fp32")
FASTER = ("amp-bf16", "bf16")
"""Precisions that GPUs with tensor cores compute faster than fp32. The search tries them if fp32 does not fit."""
OUT_OF_MEMORY = "out of memory"
_SEARCHED = sorted((kind for kind in KINDS.values() if kind.search_order), key=lambda kind: kind.search_order)


@dataclass(frozen=True, slots=True)
class Tried:
    """A config and its figures: ``peak`` in bytes, ``time`` in seconds; or why there are none, as a clause."""

    config: StepConfig
    peak: int | None = None
    time: float | None = None
    why_not: str = ""
    allocated: int | None = None
    """Bytes that tensors hold at the peak, where ``peak`` is what the allocator takes for them."""
    slow: str = ""
    """A clause where the device computes it in another precision: recommended only where nothing else fits."""
    doubt: str = ""
    """A clause where the peak followed from a value that the device does not compute: with another one it may be higher."""
    warnings: tuple[str, ...] = ()
    """Warnings while the config ran: ``"transformers: ... is falling back to its reference PyTorch implementation ..."``."""

    def fits(self, limit: int) -> bool:
        """Return whether it needs at most ``limit`` bytes."""
        return self.peak is not None and self.peak <= limit


def with_sharding(config: StepConfig, sharding: StepConfig | None, blocks: str | None = None) -> StepConfig:
    """Return a config with the words of another one that says nothing but a sharding, if there is one.

    ``blocks`` is the pattern for the model's blocks, where they are sharded by themselves. Raises `ConfigError` where the two
    do not go together.
    """
    if sharding is None:
        return config
    blocks = blocks if _shards_blocks(sharding) else config.blocks
    return replace(config, shard=sharding.shard, world=sharding.world, rank=sharding.rank, blocks=blocks)


def is_start(config: StepConfig) -> bool:
    """Return whether a config is the first that is tried, sharded or not: what fails in it fails by the model's own fault."""
    return config.precision == START.precision and config.given().keys() <= {
        "precision",
        "shard",
        "world",
        "rank",
        "blocks",
    }


def candidates(samples: int | None, *, fully: bool = False) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return values of an axis to try one after the other, for each axis in turn.

    They are precisions, recomputation, accumulation as far as ``samples`` can be shared out, weights and all else in bfloat16,
    8-bit optimizer, offloading. Where ``fully_shard`` gathers parameters, it casts them by itself.
    """
    return (
        ("precision", (*(("mp-bf16",) if fully else ()), "amp-bf16", "amp-fp16")),
        ("checkpoint", tuple(kind.name for kind in _SEARCHED if kind.recomputed)),
        ("accumulate", shares(samples)),
        ("precision", ("bf16",)),
        ("optimizer", ("adamw-8bit",)),
        ("checkpoint", tuple(kind.name for kind in _SEARCHED if not kind.recomputed)),
    )


def shares(samples: int | None) -> tuple[int, ...]:
    """Return the numbers of micro-batches into which a batch of ``samples`` can be split."""
    return tuple(number for number in (2, 4, 8, 16) if samples is not None and samples % number == 0)


INFERENCE = tuple(map(StepConfig.parse, ("fp32", "bf16", "bf16,weights=int8")))
"""Configs of inference steps, and of generation, in the order in which they are tried."""


def next_config(
    tried: Sequence[Tried], samples: int | None, blocks: str | None = None, start: StepConfig = START
) -> StepConfig | None:
    """Return the next config to try; ``None`` when there is no other. ``blocks`` is the pattern for the model's blocks.

    Each candidate keeps the values that helped before it. One that ran out of memory is kept, too: it may have come close.
    ``start`` is the first, of which each keeps the sharding; those that do not go with it are left out.
    """
    known = {one.config: one for one in tried}
    if start not in known:
        return start
    base = known[start]
    for axis, values in candidates(samples, fully=start.sharding is not None and start.sharding.fully):
        for value in values:
            config = _changed(base.config, blocks, **{axis: value})
            if config is None:
                continue
            if config not in known:
                return config
            if _helps(known[config], base) and not known[config].slow:
                base = known[config]
                if axis == "precision":
                    # The first that works; of other axes the best is kept.
                    break
    return None


def _changed(config: StepConfig, blocks: str | None, **values: Any) -> StepConfig | None:
    """Return the config with other ``values``, and with ``blocks`` only where it acts on them; ``None`` where it is none."""
    kind = KINDS[values.get("checkpoint", config.checkpoint)]
    try:
        return replace(config, **values, blocks=blocks if kind.on_blocks or _shards_blocks(config) else None)
    except ConfigError:
        return None


def with_blocks(config: StepConfig, blocks: str | None) -> StepConfig:
    """Return a config that was named with the pattern for the model's blocks, if it acts on them and has none itself."""
    acts = config.checkpointing.kind.on_blocks or _shards_blocks(config)
    return replace(config, blocks=blocks) if acts and config.blocks is None else config


def _shards_blocks(config: StepConfig) -> bool:
    return config.sharding is not None and (config.sharding.fully or config.sharding.staged)


def _helps(one: Tried, base: Tried) -> bool:
    if one.peak is None:
        return one.why_not == OUT_OF_MEMORY and base.peak is None
    return base.peak is None or one.peak < base.peak


def every_config(
    samples: int | None, blocks: str | None = None, sharding: StepConfig | None = None
) -> list[StepConfig]:
    """Return every combination of the candidates' values, fp32 first. ``blocks`` is the pattern for the model's blocks.

    Each gets the ``sharding``; those that do not go with it are left out.
    """
    configs = combinations(
        {
            "precision": [START.precision, "amp-bf16", "amp-fp16", "bf16"],
            "checkpoint": [START.checkpoint, *(kind.name for kind in _SEARCHED)],
            "accumulate": [1, *shares(samples)[:2]],
            "optimizer": [START.optimizer, "adamw-8bit"],
        }
    )
    words = {} if sharding is None else {"shard": sharding.shard, "world": sharding.world, "rank": sharding.rank}
    return list(filter(None, (_changed(config, blocks, **words) for config in configs)))


def recommended(tried: Sequence[Tried], limit: int | None) -> Tried | None:
    """Return the fastest that fits; without times the first that fits, without a limit that with the best saving for its time.

    What is slow on the device is recommended only where it is all that there is. ``None`` when nothing fits, or nothing could
    be measured.
    """
    measured = [one for one in tried if one.peak is not None]
    return _best([one for one in measured if not one.slow], limit) or _best(measured, limit)


def _best(measured: Sequence[Tried], limit: int | None) -> Tried | None:
    if limit is not None:
        fitting = [one for one in measured if one.fits(limit)]
        if any(one.time is None for one in fitting):
            return fitting[0]
        return min(fitting, key=lambda one: one.time or 0.0, default=None)
    return max(measured, key=lambda one: _worth(one, measured[0]), default=None)


def _worth(one: Tried, first: Tried) -> tuple[float, float]:
    """Return the sort key: saving over cost, then saving."""
    if not first.peak or not one.peak:
        return 0.0, 0.0
    saving = (first.peak - one.peak) / first.peak
    cost = (one.time - first.time) / first.time if one.time and first.time else 0.0
    return return_on(saving, cost), saving


@dataclass(frozen=True, slots=True)
class Search:
    """A search: of configs that were named, or of those that fit, one after the other."""

    fits: int | None
    """Bytes that a step may take."""
    configs: tuple[StepConfig, ...]
    """Those that were named; others are not measured, then."""
    everything: bool
    """True if every combination is measured, also when one fits already."""
    blocks: str | None
    """The pattern for the model's blocks."""
    task: Task
    """The task of the model in a step."""
    sought: Sought | None = None
    """The part of the batch's size whose largest number that fits is looked for."""
    sharding: StepConfig | None = None
    """A config that says nothing but the sharding that each has; those in ``configs`` have it already."""
    refused: tuple[Tried, ...] = ()
    """Rows of those that were named and do not go with the sharding."""

    def over(self, tried: Sequence[Tried], limit: int | None, samples: int | None) -> Iterator[StepConfig]:
        """Yield the configs to try, each chosen by the results in ``tried``."""
        if self.configs or self.refused:
            yield from self.configs
        elif not self.task.trains:
            yield from _until_one_fits(INFERENCE, tried, None if self.everything else limit)
        elif self.everything:
            yield from every_config(samples, self.blocks, self.sharding)
        else:
            start = with_sharding(START, self.sharding, self.blocks)
            yield from _until_one_fits(_climbed(tried, samples, self.blocks, start), tried, limit)

    def note_on_faster(self, tried: Sequence[Tried], limit: int | None) -> str | None:
        """Return a sentence if the search ended with fp32 because it fits, and no time tells what a faster precision gains."""
        if self.configs or self.refused or self.everything or not tried:
            return None
        last = tried[-1]
        if limit is None or last.time is not None or last.config.precision != START.precision or not last.fits(limit):
            return None
        words = FASTER if self.task.trains else FASTER[1:]
        left_out = [word for word in words if all(one.config.precision != word for one in tried)]
        if not left_out:
            return None
        were = agreeing(len(left_out), "was", "were")
        return (
            f"the search ended with {last.config}, the first config that fits, and times are not known: "
            f"{' and '.join(left_out)}, which GPUs with tensor cores compute faster, {were} not tried; --all tries every "
            "config, --config one of them"
        )

    def sought_for(self, tried: Sequence[Tried], limit: int) -> list[StepConfig]:
        """Return the configs whose largest batch is looked for: those that were named, else the one that is recommended.

        Where nothing fits it is the one that takes least. What cannot run for another reason than memory is left out.
        """
        able = [one for one in tried if one.peak is not None or one.why_not == OUT_OF_MEMORY]
        if self.configs or self.refused:
            return [one.config for one in able]
        best = recommended(able, limit) or min(able, key=lambda one: one.peak or float("inf"), default=None)
        return [] if best is None else [best.config]


def _until_one_fits(configs: Iterable[StepConfig], tried: Sequence[Tried], limit: int | None) -> Iterator[StepConfig]:
    for config in configs:
        yield config
        if limit is not None and tried and tried[-1].fits(limit) and not tried[-1].slow:
            return


def _climbed(
    tried: Sequence[Tried], samples: int | None, blocks: str | None, start: StepConfig
) -> Iterator[StepConfig]:
    while (config := next_config(tried, samples, blocks, start)) is not None:
        yield config
