"""Decide the order in which configs are tried until a model fits: the cheapest changes come first. Pure functions.

A config that saves memory becomes the base of all later configs. For example, a training step with Llama 3 8B and a batch of
1x4096 tokens reserves this much on an H100, whose limit is 84.48 GB::

    fp32                          232.29 GB
    amp-bf16                      189.17 GB   saves memory, so later configs keep amp-bf16
    amp-bf16,checkpoint=ops       163.18 GB
    amp-bf16,checkpoint=blocks    162.56 GB   the best checkpointing, so later configs keep it
    bf16,checkpoint=blocks         83.00 GB   fits: the search ends

A batch with more samples would be split into micro-batches before bf16 is tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import word_form
from pytest_gpumem.facts.values.rates import return_on
from pytest_gpumem.measuring.step_config.checkpoint_kinds import KINDS
from pytest_gpumem.measuring.step_config.config import StepConfig, combinations
from pytest_gpumem.measuring.step_config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.measuring.models.task import Task
    from pytest_gpumem.tools.advise.largest import SizeAxis

START = StepConfig(precision="fp32")
FASTER = ("amp-bf16", "bf16")
"""Precisions that GPUs with tensor cores compute faster than fp32. The search tries them if fp32 does not fit."""
OUT_OF_MEMORY = "out of memory"
_SEARCHED = sorted((kind for kind in KINDS.values() if kind.search_order), key=lambda kind: kind.search_order)


@dataclass(frozen=True, slots=True)
class Trial:
    """A config's trial: ``peak`` in bytes and ``time`` in seconds, or a clause ``why_not``."""

    config: StepConfig
    peak: int | None = None
    time: float | None = None
    why_not: str = ""
    allocated: int | None = None
    """Bytes in tensors at the peak. ``peak`` is larger if it counts bytes reserved by the allocator."""
    slow: str = ""
    """A clause if the device emulates the precision. Such a config is recommended only if no other config fits."""
    doubt: str = ""
    """A clause if an uncomputed value decided a branch, because the peak may be higher with another value."""
    warnings: tuple[str, ...] = ()
    """Warnings while the config ran: ``"transformers: ... is falling back to its reference PyTorch implementation ..."``."""

    def fits(self, limit: int) -> bool:
        """Return whether the peak is at most ``limit`` bytes."""
        return self.peak is not None and self.peak <= limit


def with_sharding(config: StepConfig, sharding: StepConfig | None, blocks: str | None = None) -> StepConfig:
    """Return a config with a sharding added.

    Args:
        config: The config.
        sharding: A config with nothing but a sharding, or ``None`` to add nothing.
        blocks: The pattern for the model's blocks, if the sharding treats blocks separately.

    Raises:
        ConfigError: The config and the sharding exclude each other.
    """
    if sharding is None:
        return config
    blocks = blocks if _shards_blocks(sharding) else config.blocks
    return replace(config, shard=sharding.shard, world=sharding.world, rank=sharding.rank, blocks=blocks)


def is_start(config: StepConfig) -> bool:
    """Return whether a config is the first trial, with or without sharding. An error in this trial is the model's own error."""
    return config.precision == START.precision and config.given().keys() <= {
        "precision",
        "shard",
        "world",
        "rank",
        "blocks",
    }


def candidates(samples: int | None, *, fully: bool = False) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the axes to change in order, each with the values to try.

    The order is mixed precision, recomputation, micro-batches, bfloat16 weights, 8-bit optimizer, offloading.

    Args:
        samples: The samples in the batch, which limit the micro-batches, or ``None`` if unknown.
        fully: Whether ``fully_shard`` is used. If so, ``mp-bf16`` comes first, because ``fully_shard`` casts the parameters
            that it gathers.
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
    """Return the possible micro-batch counts: ``(2, 4)`` for 12 samples."""
    return tuple(number for number in (2, 4, 8, 16) if samples is not None and samples % number == 0)


INFERENCE = tuple(map(StepConfig.parse, ("fp32", "bf16", "bf16,weights=int8")))
"""The configs for inference steps and generation, in order."""


def next_config(
    trials: Sequence[Trial], samples: int | None, blocks: str | None = None, start: StepConfig = START
) -> StepConfig | None:
    """Return the next config to try, or ``None`` when all candidates have been tried.

    Each candidate keeps the values that saved memory before. If both a value and its base ran out of memory, the value is kept,
    because a config with this value may nearly fit.

    Args:
        trials: The trials so far.
        samples: The samples in the batch, or ``None`` if unknown.
        blocks: The pattern for the model's blocks.
        start: The first config. All candidates keep its sharding. Candidates are skipped if they exclude it.
    """
    trials_by_config = {trial.config: trial for trial in trials}
    if start not in trials_by_config:
        return start
    base = trials_by_config[start]
    for axis, values in candidates(samples, fully=start.sharding is not None and start.sharding.fully):
        for value in values:
            config = _changed(base.config, blocks, **{axis: value})
            if config is None:
                continue
            if config not in trials_by_config:
                return config
            if _saves_memory(trials_by_config[config], base) and not trials_by_config[config].slow:
                base = trials_by_config[config]
                if axis == "precision":
                    # For precisions, the first value that works is kept. For other axes, the best value is kept.
                    break
    return None


def _changed(config: StepConfig, blocks: str | None, **values: Any) -> StepConfig | None:
    """Return the config with changed ``values``, and ``blocks`` if it needs a pattern; ``None`` if the result is invalid."""
    kind = KINDS[values.get("checkpoint", config.checkpoint)]
    try:
        return replace(config, **values, blocks=blocks if kind.on_blocks or _shards_blocks(config) else None)
    except ConfigError:
        return None


def with_blocks(config: StepConfig, blocks: str | None) -> StepConfig:
    """Return a named config with the pattern for the model's blocks, if the config needs and lacks a pattern."""
    acts = config.checkpointing.kind.on_blocks or _shards_blocks(config)
    return replace(config, blocks=blocks) if acts and config.blocks is None else config


def _shards_blocks(config: StepConfig) -> bool:
    return config.sharding is not None and (config.sharding.fully or config.sharding.staged)


def _saves_memory(trial: Trial, base: Trial) -> bool:
    if trial.peak is None:
        return trial.why_not == OUT_OF_MEMORY and base.peak is None
    return base.peak is None or trial.peak < base.peak


def every_config(
    samples: int | None, blocks: str | None = None, sharding: StepConfig | None = None
) -> list[StepConfig]:
    """Return every combination of candidate values, fp32 first.

    Args:
        samples: The samples in the batch, or ``None`` if unknown.
        blocks: The pattern for the model's blocks.
        sharding: A config with the sharding for every combination. Combinations are skipped if they exclude it.
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


def recommended(trials: Sequence[Trial], limit: int | None) -> Trial | None:
    """Return the trial to recommend, or ``None`` if no config fits or none was measured.

    The fastest config that fits wins. Without times, the first config that fits wins. Without a limit, the best saving per
    time wins. Configs that are slow on the device are recommended only if no other config fits.
    """
    measured = [trial for trial in trials if trial.peak is not None]
    return _best([trial for trial in measured if not trial.slow], limit) or _best(measured, limit)


def _best(measured: Sequence[Trial], limit: int | None) -> Trial | None:
    if limit is not None:
        fitting = [trial for trial in measured if trial.fits(limit)]
        if any(trial.time is None for trial in fitting):
            return fitting[0]
        return min(fitting, key=lambda trial: trial.time or 0.0, default=None)
    return max(measured, key=lambda trial: _saving_rank(trial, measured[0]), default=None)


def _saving_rank(trial: Trial, first: Trial) -> tuple[float, float]:
    """Return the sort key: saving per cost, then saving."""
    if not first.peak or not trial.peak:
        return 0.0, 0.0
    saving = (first.peak - trial.peak) / first.peak
    cost = (trial.time - first.time) / first.time if trial.time and first.time else 0.0
    return return_on(saving, cost), saving


@dataclass(frozen=True, slots=True)
class Search:
    """A search over named configs, or over the configs in `candidates` until a config fits."""

    fits: int | None
    """The bytes that a step may take; ``None`` without a limit."""
    configs: tuple[StepConfig, ...]
    """The named configs. If there are any, no other configs are measured."""
    everything: bool
    """True if every combination is measured, even after a config fits."""
    blocks: str | None
    """The pattern for the model's blocks."""
    task: Task
    """The model's task in a step."""
    size_axis: SizeAxis | None = None
    """The batch dimension to maximize, if any."""
    sharding: StepConfig | None = None
    """A config with nothing but the sharding for every config. ``configs`` contain this sharding already."""
    refused: tuple[Trial, ...] = ()
    """Failed trials for named configs that exclude the sharding. They are never run."""

    def over(self, trials: Sequence[Trial], limit: int | None, samples: int | None) -> Iterator[StepConfig]:
        """Yield the configs to try. The caller appends each result to ``trials`` before it asks for the next config."""
        if self.configs or self.refused:
            yield from self.configs
        elif not self.task.trains:
            yield from _until_one_fits(INFERENCE, trials, None if self.everything else limit)
        elif self.everything:
            yield from every_config(samples, self.blocks, self.sharding)
        else:
            start = with_sharding(START, self.sharding, self.blocks)
            yield from _until_one_fits(_greedy_configs(trials, samples, self.blocks, start), trials, limit)

    def note_on_faster(self, trials: Sequence[Trial], limit: int | None) -> str | None:
        """Return a note if the search ended with fp32 before it tried a faster precision, and times are unknown; otherwise
        ``None``.
        """
        if self.configs or self.refused or self.everything or not trials:
            return None
        last = trials[-1]
        if limit is None or last.time is not None or last.config.precision != START.precision or not last.fits(limit):
            return None
        words = FASTER if self.task.trains else FASTER[1:]
        left_out = [word for word in words if all(trial.config.precision != word for trial in trials)]
        if not left_out:
            return None
        were = word_form(len(left_out), "was", "were")
        return (
            f"the search ended with {last.config}, the first config that fits, and times are not known: "
            f"{' and '.join(left_out)}, which GPUs with tensor cores compute faster, {were} not tried; --all tries every "
            "config, --config one of them"
        )

    def configs_for_largest(self, trials: Sequence[Trial], limit: int) -> list[StepConfig]:
        """Return the configs for which to search the largest batch: all named configs, or else the recommended config.

        If no config fits, the config with the smallest peak is used. Configs that fail for another reason than memory are left
        out.
        """
        able = [trial for trial in trials if trial.peak is not None or trial.why_not == OUT_OF_MEMORY]
        if self.configs or self.refused:
            return [trial.config for trial in able]
        best = recommended(able, limit) or min(able, key=lambda trial: trial.peak or float("inf"), default=None)
        return [] if best is None else [best.config]


def _until_one_fits(configs: Iterable[StepConfig], trials: Sequence[Trial], limit: int | None) -> Iterator[StepConfig]:
    for config in configs:
        yield config
        if limit is not None and trials and trials[-1].fits(limit) and not trials[-1].slow:
            return


def _greedy_configs(
    trials: Sequence[Trial], samples: int | None, blocks: str | None, start: StepConfig
) -> Iterator[StepConfig]:
    while (config := next_config(trials, samples, blocks, start)) is not None:
        yield config
