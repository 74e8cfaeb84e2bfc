"""Facts about a machine, its Python and a project: frozen values that `collecting` collects and `findings` judges.

Field names are keys in ``gpumem doctor --format json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gpumem.base.command_name import OtherCommand
from pytest_gpumem.facts.measurement import Environment
from pytest_gpumem.facts.values.interference import Conditions


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The installed torch, for example ``TorchFacts("2.13.0+cpu")`` for a build without CUDA."""

    release: str | None = None
    """``None`` if torch is not installed, or its release is unknown."""
    cuda: str | None = None
    """The CUDA release of this build, for example ``"13.0"``."""
    trouble: str | None = None
    """The import's exception, or the way in which the importing process ended."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device after it was opened and closed. No step ran.

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
    """The report from a process after importing torch and opening devices."""

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
    """The store's folder or URL, without credentials."""
    stored: tuple[StoredFacts, ...] = ()
    is_there: bool = True
    trouble: str | None = None
    """The reason why the store cannot be read."""
    restore: str | None = None
    """The command for restoring the store from git. ``None`` if the store exists, or git does not track it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts from which the findings are derived."""

    device: str
    """The device in the project's settings."""
    releases: Mapping[str, str]
    """Releases of Python, pytest and this plugin, by name."""
    driver: str
    """The driver release from NVML, or ``unknown`` with NVML's error."""
    torch: TorchFacts
    torch_emulated: TorchFacts
    """torch as imported on an emulated GPU. Empty if this machine cannot emulate a GPU."""
    devices: tuple[DeviceFacts, ...]
    store: StoreFacts
    compiling: str | None = None
    """A sentence about missing requirements for torch.compile on an emulated GPU, with the fix."""
    ignored: str | None = None
    """The nearest pyproject.toml, if pytest ignores its settings because the root directory is above this file."""
    is_default_device: bool = False
    """True if no setting names the device."""
    unread: str | None = None
    """A sentence about unread settings, for example in a mistyped table, with the fix."""
    other_command: OtherCommand | None = None
    """The first command ``gpumem`` on the path, if it belongs to another package."""

    def device_facts(self, word: str) -> DeviceFacts | None:
        """Return the facts about the device called ``word``; ``None`` if it was not opened."""
        return next((device for device in self.devices if device.word == word), None)

    @property
    def chosen(self) -> DeviceFacts | None:
        """The project's device. ``auto`` chooses CUDA if CUDA can be used, otherwise the CPU."""
        if self.device != "auto":
            return self.device_facts(self.device)
        cuda = self.device_facts("cuda")
        return cuda if cuda is not None and cuda.trouble is None else self.device_facts("cpu")
