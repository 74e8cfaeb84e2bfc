"""Facts about a machine, its Python and a project: frozen values that `collecting` collects and `findings` judges.

Field names are keys in ``gpumem doctor --format json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gpumem.command_name import OtherCommand
from pytest_gpumem.measurement import Environment
from pytest_gpumem.values.interference import Conditions


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The installed torch, for example ``TorchFacts("2.13.0+cpu")`` for a build without CUDA."""

    release: str | None = None
    """``None`` if torch is not installed, or its release is unknown."""
    cuda: str | None = None
    """The CUDA release of this build, for example ``"13.0"``."""
    trouble: str | None = None
    """The exception that the import raised, or the way in which the importing process ended."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device that was opened and closed. No step ran on it.

    For example, on a machine without a GPU: ``DeviceFacts("cuda", trouble="no CUDA device: ...")``.
    """

    word: str
    """The word for ``--gpumem-device``."""
    environment: Environment | None = None
    trouble: str | None = None
    """The message of the `DeviceUnavailable` or `EmulationError`, if the device cannot be used here."""
    tells_time: bool = True
    pace: float | None = None
    """The rate of its clock: Hz of a GPU's SM clock, or runs per second of the reference workload on the CPU."""
    conditions: tuple[Conditions, Conditions] | None = None
    """Two readings, half a second apart."""
    lacking: str | None = None
    """On an emulated GPU, the reason why convolution workspaces count as 0 bytes."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Everything that a process reports after it imported torch and opened devices."""

    torch: TorchFacts = field(default_factory=TorchFacts)
    devices: tuple[DeviceFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """The baselines from one device in one environment."""

    environment: Environment
    baselines: int
    """The number of baselines."""
    metrics: frozenset[str] = frozenset()
    """The names of all metrics in these baselines."""
    has_times: bool = False


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The project's store."""

    location: str
    """Its folder or URL, without credentials."""
    stored: tuple[StoredFacts, ...] = ()
    is_there: bool = True
    trouble: str | None = None
    """The reason why the store cannot be read."""
    restore: str | None = None
    """The command that restores the store from git. ``None`` if the store exists, or git does not track it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts from which the findings are derived."""

    device: str
    """The device in the project's settings."""
    releases: Mapping[str, str]
    """Releases of Python, pytest and this plugin, by name."""
    driver: str
    """The driver release that NVML reports, or ``unknown`` with NVML's error."""
    torch: TorchFacts
    torch_emulated: TorchFacts
    """torch as imported on an emulated GPU. Empty if this machine cannot emulate a GPU."""
    devices: tuple[DeviceFacts, ...]
    store: StoreFacts
    compiling: str | None = None
    """A sentence about what torch.compile lacks on an emulated GPU, with its fix."""
    ignored: str | None = None
    """The pyproject.toml nearest to this folder, if pytest ignores its settings because the root directory is above it."""
    is_default_device: bool = False
    """True if no setting names the device."""
    unread: str | None = None
    """A sentence about settings that are not read, for example in a mistyped table, with its fix."""
    reports: tuple[str, ...] = ()
    """A sentence for each report format that cannot be written, with its fix."""
    other_command: OtherCommand | None = None
    """The command ``gpumem`` that a shell finds first, if it belongs to another package."""

    def device_facts(self, word: str) -> DeviceFacts | None:
        """Return the facts about the device called ``word``."""
        return next((device for device in self.devices if device.word == word), None)

    @property
    def chosen(self) -> DeviceFacts | None:
        """The device that the project measures on. ``auto`` chooses CUDA if it can be used, otherwise the CPU."""
        if self.device != "auto":
            return self.device_facts(self.device)
        cuda = self.device_facts("cuda")
        return cuda if cuda is not None and cuda.trouble is None else self.device_facts("cpu")
