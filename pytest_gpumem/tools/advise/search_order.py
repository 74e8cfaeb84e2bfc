"""Decide the order in which step configs are tried until a step fits into memory. Changes with little effect on speed and
accuracy come first. Pure functions.

A config that saves memory becomes the base of all later configs. For example, a training step with Llama 3 8B and a batch of
1x4096 tokens reserves the following bytes on an H100, where at most 84.48 GB can be reserved::

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

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.base.units import word_form
from pytest_gpumem.facts.values.rates import return_on
from pytest_gpumem.measuring.step_config.checkpoint_kinds import KINDS
from pytest_gpumem.measuring.step_config.config import StepConfig, combinations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_gpumem.measuring.models.task import Task
    from pytest_gpumem.tools.advise.largest import SizeAxis

START = StepConfig(precision="fp32")
FASTER = ("amp-bf16", "bf16")
"""Precisions in which GPUs with tensor cores compute faster than in fp32. The search tries these precisions only if fp32 does
not fit."""
OUT_OF_MEMORY = "out of memory"
_SEARCHED = sorted((kind for kind in KINDS.values() if kind.search_order), key=lambda kind: kind.search_order)


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of running a step with a config: ``peak`` in bytes and ``time`` in seconds. If the step failed, ``why_not`` is
    a clause with the reason instead.
    """

    config: StepConfig
    peak: int | None = None
    time: float | None = None
    why_not: str = ""
    allocated: int | None = None
    """Bytes in tensors at the peak. If the device reports reserved bytes, ``peak`` is the allocator's reserved bytes, which
    include unused memory."""
    slow: str = ""
    """A clause if the device computes the precision in another, slower precision; otherwise empty. Such a config is recommended
    only if no other config fits."""
    doubt: str = ""
    """A clause if an uncomputed value decided a branch in the step; otherwise empty. With another value, the peak may be
    higher."""
    warnings: tuple[str, ...] = ()
    """Warnings from the measured code: ``"transformers: ... is falling back to its reference PyTorch implementation ..."``."""

    def fits(self, limit: int) -> bool:
        """Return whether the peak is at most ``limit`` bytes."""
        return self.peak is not None and self.peak <= limit


def with_sharding(config: StepConfig, sharding: StepConfig | None, blocks: str | None = None) -> StepConfig:
    """Return a config with a sharding added.

    Args:
        config: The config.
        sharding: A config with only a sharding, or ``None`` to return ``config`` unchanged.
        blocks: The path pattern for the model's repeated blocks, such as ``h.*``. It is added only if the sharding treats each
            block separately, as ``fsdp`` does.

    Raises:
        ConfigError: The sharding cannot be combined with the config.
    """
    if sharding is None:
        return config
    blocks = blocks if _shards_blocks(sharding) else config.blocks
    return replace(config, shard=sharding.shard, world=sharding.world, rank=sharding.rank, blocks=blocks)


def is_start(config: StepConfig) -> bool:
    """Return whether a config is the first config of a search: fp32, with or without sharding.

    If a step with this config raises an error, the model's own code is the cause, and not a setting such as ``bf16``.
    """
    return config.precision == START.precision and config.given().keys() <= {
        "precision",
        "shard",
        "world",
        "rank",
        "blocks",
    }


def candidates(samples: int | None, *, fully: bool = False) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Return the config fields to change, in search order, each with the values to try.

    The order is mixed precision, recomputation, micro-batches, bfloat16 weights, 8-bit optimizer, offloading.

    Args:
        samples: The number of samples in the batch, which must be divisible by the number of micro-batches. ``None`` if
            unknown.
        fully: Whether ``fully_shard`` shards the model. If so, ``mp-bf16`` is tried first, because ``fully_shard`` then gathers
            the parameters in bfloat16, with half the bytes of float32.
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
    """Return the numbers of micro-batches to try, which must divide the number of samples: ``(2, 4)`` for 12 samples."""
    return tuple(number for number in (2, 4, 8, 16) if samples is not None and samples % number == 0)


INFERENCE = tuple(map(StepConfig.parse, ("fp32", "bf16", "bf16,weights=int8")))
"""The configs to try for inference and token generation, in order."""


def next_config(
    trials: Sequence[Trial], samples: int | None, blocks: str | None = None, start: StepConfig = START
) -> StepConfig | None:
    """Return the next config to try, or ``None`` when all candidates have been tried.

    Each candidate changes a single value in a base config. A candidate that saves memory becomes the base for later candidates.
    If both the candidate and its base ran out of memory, the candidate becomes the base as well, because it may nearly fit.

    Args:
        trials: The trials so far.
        samples: The number of samples in the batch, or ``None`` if unknown.
        blocks: The path pattern for the model's repeated blocks, such as ``h.*``.
        start: The first config to try. All candidates have its sharding. A candidate that cannot be combined with it is
            skipped.
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
                    # For precisions, use the first value that saves memory. For other fields, use the value that saves the most
                    # memory.
                    break
    return None


def _changed(config: StepConfig, blocks: str | None, **values: Any) -> StepConfig | None:
    """Return the config with changed ``values``, and with the pattern ``blocks`` if the new config needs a pattern. Return
    ``None`` if the new config is invalid.
    """
    kind = KINDS[values.get("checkpoint", config.checkpoint)]
    try:
        return replace(config, **values, blocks=blocks if kind.on_blocks or _shards_blocks(config) else None)
    except ConfigError:
        return None


def with_blocks(config: StepConfig, blocks: str | None) -> StepConfig:
    """Return the config with the pattern ``blocks`` added, if the config needs a pattern and has none."""
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
    """Return all combinations of the values in a search, starting with plain fp32.

    Args:
        samples: The samples in the batch, or ``None`` if unknown.
        blocks: The path pattern for the model's repeated blocks, such as ``h.*``.
        sharding: A config whose sharding is added to every combination. Combinations that cannot have this sharding are
            skipped.
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
    """Return the trial to recommend, or ``None`` if no measured config fits.

    With a memory limit, the fastest config that fits is recommended. If times are unknown, the first config that fits is
    recommended instead. Without a memory limit, the config that saves the most memory for its extra time is recommended.
    Configs with a slow precision are recommended only if no other config fits.
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
    """Return the trial's memory saving relative to its extra time, and the saving itself.

    Saving and extra time are ratios to the peak and the time of the first trial.
    """
    if not first.peak or not trial.peak:
        return 0.0, 0.0
    saving = (first.peak - trial.peak) / first.peak
    cost = (trial.time - first.time) / first.time if trial.time and first.time else 0.0
    return return_on(saving, cost), saving


@dataclass(frozen=True, slots=True)
class Search:
    """A search over the configs named by the user. If the user named none, the search tries the configs from `next_config`
    until a config fits.
    """

    fits: int | None
    """The memory limit for a step in bytes; ``None`` without a limit."""
    configs: tuple[StepConfig, ...]
    """The configs named by the user. If the user named any config, no other configs are measured."""
    everything: bool
    """True if every combination is measured, even after a config fits."""
    blocks: str | None
    """The path pattern for the model's repeated blocks, such as ``h.*``."""
    task: Task
    """The model's task in a step."""
    size_axis: SizeAxis | None = None
    """The batch dimension to maximize, if any."""
    sharding: StepConfig | None = None
    """A config with only the sharding for all tried configs. The configs in ``configs`` already have this sharding."""
    refused: tuple[Trial, ...] = ()
    """A failed trial for each of the user's configs that cannot be combined with the sharding. These configs are never run."""

    def over(self, trials: Sequence[Trial], limit: int | None, samples: int | None) -> Iterator[StepConfig]:
        """Yield the configs to try. The caller appends each trial to ``trials`` before it requests the next config."""
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
        """Return a note if the search ended with fp32, measured no times, and did not try a faster precision. Otherwise, return
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
            f"the search ended with {last.config}, the first config that fits, and measured no times: "
            f"{' and '.join(left_out)}, which GPUs with tensor cores compute faster, {were} not tried. Use --all to try every "
            "config, or --config to try one of them"
        )

    def configs_for_largest(self, trials: Sequence[Trial], limit: int) -> list[StepConfig]:
        """Return the configs for which to search the largest batch: all configs named by the user, or else the recommended
        config.

        If no config fits, the config with the smallest peak is used. Configs that fail for another reason than lack of memory
        are left out.
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
