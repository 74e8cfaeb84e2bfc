"""Results of `gpumem advise`: the trials on each device, and the recommended configs. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.tools.advise.shard_option import rank_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.facts.values.composition import Composition, Explanation
    from pytest_gpumem.measuring.models.task import Task
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.largest import Largest, SizeAxis
    from pytest_gpumem.tools.advise.search_order import Trial


@dataclass(frozen=True, slots=True)
class DeviceTrials:
    """The trials on a device, with the device's name, the limit in bytes, and the recommended trial."""

    name: str
    limit: int | None
    """``None`` if there is no limit."""
    tried: tuple[Trial, ...]
    chosen: Trial | None
    lacking: str | None = None
    """A clause with the reason why peaks may be too low; ``None`` if there is no such reason."""
    largest: Mapping[StepConfig, Largest] = field(default_factory=dict)
    """The largest batch, or the longest sequence, for each searched config."""
    finished: bool = True
    """False after Ctrl-C."""
    warnings: tuple[str, ...] = ()
    """The distinct warnings from all runs."""

    @property
    def smallest(self) -> Trial | None:
        """The measured config with the smallest peak; ``None`` if no config was measured."""
        measured = [trial for trial in self.tried if trial.peak is not None]
        return min(measured, key=lambda trial: trial.peak or 0, default=None)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended config, with its code and its peak's composition on the first device with this recommendation."""

    config: StepConfig
    device: str
    code: tuple[str, ...]
    explanation: Explanation | None = None
    why_not: str = ""
    """A clause that says why there is no explanation. Empty if no explanation was asked for."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The trials and recommendations for a model's step."""

    subject: str
    """The model and its batch, for people. Empty if a function made the model and the batch."""
    task: Task
    """The model's task in a step."""
    emulated: bool
    """True if the devices are emulated. If so, reserved bytes are compared with each card's memory."""
    devices: tuple[DeviceTrials, ...]
    recommended: tuple[Recommendation, ...] = ()
    finished: bool = True
    """False after Ctrl-C."""
    notes: tuple[str, ...] = ()
    size_axis: SizeAxis | None = None
    """The searched batch dimension, if any."""
    sharding: StepConfig | None = None
    """A config with nothing but the sharding that an option adds to each config."""
    attention: str = ""
    """The attention implementation, like ``"sdpa"``; empty if transformers did not choose it."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The distinct warnings from all devices."""
        return tuple(dict.fromkeys(warning for device in self.devices for warning in device.warnings))

    @property
    def title(self) -> str:
        """The model, its batch, and a sharded model's measured rank. May be empty."""
        rank = "" if self.sharding is None else rank_title(self.sharding)
        return "; ".join(filter(None, (self.subject, rank)))

    def fits(self, *, every: bool) -> bool:
        """Return whether a config fits into any device, or into each device if ``every``.

        A smaller batch from a search for the largest batch counts as well.
        """
        has_fit = [
            device.chosen is not None or any(largest.size for largest in device.largest.values())
            for device in self.devices
        ]
        return bool(has_fit) and (all(has_fit) if every else any(has_fit))


@dataclass(frozen=True, slots=True)
class CategoryShare:
    """A category's bytes, and their modules, the largest first."""

    category: str
    nbytes: int
    modules: tuple[tuple[str, int], ...]
    """Module paths with layers folded, and bytes: ``("h.*.mlp", 9437184)``. Blocks without a module have an empty path."""


def shares_of(composition: Composition) -> tuple[CategoryShare, ...]:
    """Return a composition's categories with their modules, the largest first."""
    categories: dict[str, dict[str, int]] = {}
    for row in composition.rows:
        modules = categories.setdefault(row.category, {})
        modules[row.path] = modules.get(row.path, 0) + row.nbytes
    shares = [
        CategoryShare(name, sum(modules.values()), _largest_first(modules)) for name, modules in categories.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.nbytes))


def _largest_first(modules: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(modules.items(), key=lambda share: (-share[1], share[0])))


def configs_in_order(devices: Sequence[DeviceTrials]) -> list[StepConfig]:
    """Return the configs from all devices, the recommended configs first."""
    chosen = [device.chosen.config for device in devices if device.chosen is not None]
    return list(dict.fromkeys([*chosen, *(trial.config for device in devices for trial in device.tried)]))
