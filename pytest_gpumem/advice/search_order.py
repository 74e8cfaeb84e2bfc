"""The order in which configs are tried until a model fits: what costs least first. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.steps.checkpoint_kinds import KINDS
from pytest_gpumem.steps.config import StepConfig, combinations
from pytest_gpumem.values.rates import return_on

if TYPE_CHECKING:
    from collections.abc import Sequence

START = StepConfig(precision="fp32")
OUT_OF_MEMORY = "out of memory"
_SEARCHED = sorted((kind for kind in KINDS.values() if kind.search_order), key=lambda kind: kind.search_order)


@dataclass(frozen=True, slots=True)
class Tried:
    """A config and what it took: ``peak`` in bytes, ``time`` in seconds; or why it gave no figures, as a clause."""

    config: StepConfig
    peak: int | None = None
    time: float | None = None
    why_not: str = ""

    def fits(self, limit: int) -> bool:
        """Whether it needs at most ``limit`` bytes."""
        return self.peak is not None and self.peak <= limit


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Values of one axis, tried one after the other. ``first`` takes the first that works, otherwise the best is kept."""

    axis: str
    values: tuple[Any, ...]
    first: bool = False


def candidates(samples: int | None) -> tuple[_Candidate, ...]:
    """Return precisions, recomputation, accumulation as far as ``samples`` can be shared out, 8-bit optimizer, offloading."""
    return (
        _Candidate("precision", ("amp-bf16", "amp-fp16"), first=True),
        _Candidate("checkpoint", tuple(kind.name for kind in _SEARCHED if kind.recomputed)),
        _Candidate("accumulate", shares(samples)),
        _Candidate("optimizer", ("adamw-8bit",)),
        _Candidate("checkpoint", tuple(kind.name for kind in _SEARCHED if not kind.recomputed)),
    )


def shares(samples: int | None) -> tuple[int, ...]:
    """The numbers of micro-batches that a batch of ``samples`` can be shared out to."""
    return tuple(number for number in (2, 4, 8, 16) if samples is not None and samples % number == 0)


def next_config(tried: Sequence[Tried], samples: int | None, blocks: str | None = None) -> StepConfig | None:
    """The next config to try; ``None`` when there is no other. ``blocks`` is the pattern that names the model's blocks.

    Each rung keeps what the ones before it brought. What ran out of memory is kept, too: it may have come close.
    """
    known = {one.config: one for one in tried}
    if START not in known:
        return START
    base = known[START]
    for rung in candidates(samples):
        for value in rung.values:
            config = _changed(base.config, blocks, **{rung.axis: value})
            if config not in known:
                return config
            if _helps(known[config], base):
                base = known[config]
                if rung.first:
                    break
    return None


def _changed(config: StepConfig, blocks: str | None, **values: Any) -> StepConfig:
    """The config with other ``values``. It names the blocks where its checkpointing acts on them: elsewhere it may not."""
    kind = KINDS[values.get("checkpoint", config.checkpoint)]
    return replace(config, **values, blocks=blocks if kind.on_blocks else None)


def _helps(one: Tried, base: Tried) -> bool:
    if one.peak is None:
        return one.why_not == OUT_OF_MEMORY and base.peak is None
    return base.peak is None or one.peak < base.peak


def every_config(samples: int | None, blocks: str | None = None) -> list[StepConfig]:
    """Every combination of what the ladder uses, fp32 first. ``blocks`` is the pattern that names the model's blocks."""
    configs = combinations(
        {
            "precision": [START.precision, "amp-bf16", "amp-fp16", "bf16"],
            "checkpoint": [START.checkpoint, *(kind.name for kind in _SEARCHED)],
            "accumulate": [1, *shares(samples)[:2]],
            "optimizer": [START.optimizer, "adamw-8bit"],
        }
    )
    return [_changed(config, blocks) for config in configs]


def recommended(tried: Sequence[Tried], limit: int | None) -> Tried | None:
    """The fastest of those that fit; without times the first that fits. Without a limit the one whose saving is worth most.

    ``None`` when nothing fits, or nothing could be measured.
    """
    measured = [one for one in tried if one.peak is not None]
    if limit is not None:
        fitting = [one for one in measured if one.fits(limit)]
        if any(one.time is None for one in fitting):
            return fitting[0]
        return min(fitting, key=lambda one: one.time or 0.0, default=None)
    return max(measured, key=lambda one: _worth(one, measured[0]), default=None)


def _worth(one: Tried, first: Tried) -> tuple[float, float]:
    """Saving over cost, and the saving itself where two are equal."""
    if not first.peak or not one.peak:
        return 0.0, 0.0
    saving = (first.peak - one.peak) / first.peak
    cost = (one.time - first.time) / first.time if one.time and first.time else 0.0
    return return_on(saving, cost), saving
