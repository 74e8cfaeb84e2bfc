"""Results of `gpumem advise`: what was tried on each device, and what is recommended. Frozen values, pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.advice.shard_option import rank_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.advice.largest import Largest, Sought
    from pytest_gpumem.advice.search_order import Tried
    from pytest_gpumem.models.task import Task
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.values.composition import Composition, Explanation


@dataclass(frozen=True, slots=True)
class DeviceTrials:
    """Trials on a device: its name, the bytes that a step may take there, what was tried, and the one that is recommended."""

    name: str
    limit: int | None
    """``None`` where nothing has to fit."""
    tried: tuple[Tried, ...]
    chosen: Tried | None
    lacking: str | None = None
    """The reason why peaks may be too low, as a clause."""
    largest: Mapping[StepConfig, Largest] = field(default_factory=dict)
    """The largest batch, or the longest sequence, of the configs that it was looked for."""
    finished: bool = True
    """False after Ctrl-C."""
    warnings: tuple[str, ...] = ()
    """The runs' warnings, each once."""

    @property
    def smallest(self) -> Tried | None:
        """The config that takes least of those that could be measured."""
        measured = [one for one in self.tried if one.peak is not None]
        return min(measured, key=lambda one: one.peak or 0, default=None)


@dataclass(frozen=True, slots=True)
class Recommended:
    """A config that is recommended, on the first device for which it is: its code, and what its peak is made of."""

    config: StepConfig
    device: str
    code: tuple[str, ...]
    explanation: Explanation | None = None
    why_not: str = ""
    """The reason why there is no explanation, as a clause; empty where none was asked for."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Findings for a model's step: trials, and what is recommended."""

    subject: str
    """The model and its batch, for people; empty of a function that makes them."""
    task: Task
    """The task of the model in a step."""
    emulated: bool
    """True where devices are emulated, whose reserved bytes are compared with what they have."""
    devices: tuple[DeviceTrials, ...]
    recommended: tuple[Recommended, ...] = ()
    finished: bool = True
    """False after Ctrl-C."""
    notes: tuple[str, ...] = ()
    sought: Sought | None = None
    """The part of the batch's size whose largest number was looked for, if any was."""
    sharding: StepConfig | None = None
    """A config that says nothing but the sharding that each has, where an option gave them one."""
    attention: str = ""
    """The attention implementation, like ``"sdpa"``; empty if transformers did not choose it."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The runs' warnings on all devices, each once."""
        return tuple(dict.fromkeys(warning for device in self.devices for warning in device.warnings))

    @property
    def title(self) -> str:
        """The model, its batch, and the rank that is measured where it is sharded; may be empty."""
        rank = "" if self.sharding is None else rank_title(self.sharding)
        return "; ".join(filter(None, (self.subject, rank)))

    def fits(self, *, every: bool) -> bool:
        """Return whether something fits into each of the devices, or into any of them: also with a smaller batch, if asked."""
        found = [
            one.chosen is not None or any(largest.size for largest in one.largest.values()) for one in self.devices
        ]
        return bool(found) and (all(found) if every else any(found))


@dataclass(frozen=True, slots=True)
class CategoryShare:
    """Bytes of a category, and how they are spread over modules, the largest first."""

    category: str
    nbytes: int
    modules: tuple[tuple[str, int], ...]
    """Paths of modules, with layers folded, and their bytes; the path is empty where blocks are of no module."""


def shares_of(composition: Composition) -> tuple[CategoryShare, ...]:
    """Return the categories of a composition with their modules, the largest first."""
    found: dict[str, dict[str, int]] = {}
    for row in composition.rows:
        modules = found.setdefault(row.category, {})
        modules[row.path] = modules.get(row.path, 0) + row.nbytes
    shares = [CategoryShare(name, sum(modules.values()), _largest_first(modules)) for name, modules in found.items()]
    return tuple(sorted(shares, key=lambda one: -one.nbytes))


def _largest_first(modules: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(modules.items(), key=lambda one: (-one[1], one[0])))


def configs_in_order(devices: Sequence[DeviceTrials]) -> list[StepConfig]:
    """Return every config that was tried on any device, those that are recommended first."""
    chosen = [one.chosen.config for one in devices if one.chosen is not None]
    return list(dict.fromkeys([*chosen, *(one.config for device in devices for one in device.tried)]))
