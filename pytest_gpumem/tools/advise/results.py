"""Results of `gpumem advise`: the trials on each device, and the recommended configs. All classes are frozen."""

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
    """The trials on a device, with the device's name and its recommended trial."""

    name: str
    limit: int | None
    """The memory limit for a step in bytes. ``None`` if there is no limit."""
    tried: tuple[Trial, ...]
    chosen: Trial | None
    lacking: str | None = None
    """The reason why peaks on this device may be too low, as a clause. ``None`` if peaks are complete."""
    largest: Mapping[StepConfig, Largest] = field(default_factory=dict)
    """The largest batch, or the longest sequence, for each config for which the user requested this search."""
    finished: bool = True
    """False after Ctrl-C."""
    warnings: tuple[str, ...] = ()
    """The distinct warnings from all trials on this device."""

    @property
    def smallest(self) -> Trial | None:
        """The trial with the smallest peak. ``None`` if no config could be measured."""
        measured = [trial for trial in self.tried if trial.peak is not None]
        return min(measured, key=lambda trial: trial.peak or 0, default=None)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended config, and a code snippet for it. ``device`` is the first device for which the config is recommended.
    ``explanation`` contains the composition of the peak on this device.
    """

    config: StepConfig
    device: str
    code: tuple[str, ...]
    explanation: Explanation | None = None
    why_not: str = ""
    """The reason why the peak could not be explained, as a clause. Otherwise empty."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The trials and recommendations for a model's step."""

    subject: str
    """A text with the model's name and its batch. Empty if the model comes from a project's function."""
    task: Task
    """The measured task: training, inference or token generation."""
    emulated: bool
    """True if the devices are emulated GPUs. If so, a config fits if the allocator's reserved bytes fit into the GPU's
    memory."""
    devices: tuple[DeviceTrials, ...]
    recommended: tuple[Recommendation, ...] = ()
    finished: bool = True
    """False after Ctrl-C."""
    notes: tuple[str, ...] = ()
    size_axis: SizeAxis | None = None
    """The batch dimension to maximize, or ``None`` if the user did not request this."""
    sharding: StepConfig | None = None
    """A config with only the sharding from ``--shard``. This sharding is added to each tried config."""
    attention: str = ""
    """The attention implementation that transformers chose, such as ``"sdpa"``. Empty for models from other libraries."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The distinct warnings from all devices."""
        return tuple(dict.fromkeys(warning for device in self.devices for warning in device.warnings))

    @property
    def title(self) -> str:
        """The model's name, its batch, and the measured rank of a sharded model. Empty for an unsharded model from a
        function.
        """
        rank = "" if self.sharding is None else rank_title(self.sharding)
        return "; ".join(filter(None, (self.subject, rank)))

    def fits(self, *, every: bool) -> bool:
        """Return whether any device has a config that fits. If ``every`` is true, every device must have such a config.

        A device also counts if only a smaller batch fits, which a search for the largest batch has found.
        """
        has_fit = [
            device.chosen is not None or any(largest.size for largest in device.largest.values())
            for device in self.devices
        ]
        return bool(has_fit) and (all(has_fit) if every else any(has_fit))


@dataclass(frozen=True, slots=True)
class CategoryShare:
    """The bytes in a category of a peak's composition, such as activations, divided by module."""

    category: str
    nbytes: int
    modules: tuple[tuple[str, int], ...]
    """Pairs of a module path and its bytes, the largest first: ``("h.*.mlp", 9437184)``. The star stands for the numbers of
    repeated layers. Tensors without a module have an empty path."""


def shares_of(composition: Composition) -> tuple[CategoryShare, ...]:
    """Return the categories in a composition, the largest first, each with its modules."""
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
    """Return the distinct configs in the trials on all devices, the recommended configs first."""
    chosen = [device.chosen.config for device in devices if device.chosen is not None]
    return list(dict.fromkeys([*chosen, *(trial.config for device in devices for trial in device.tried)]))
