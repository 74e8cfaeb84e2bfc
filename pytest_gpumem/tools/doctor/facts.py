"""Classes for facts about a machine, its Python and a project. `collecting` makes the facts, and `findings` judges them.

The names of the fields are also the keys in ``gpumem doctor --format json``.
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
    """The reason why torch cannot be imported: an exception, or the crash of the process. ``None`` if torch was imported."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about a device after it was opened and closed. No step ran on the device.

    For example, on a machine without a GPU: ``DeviceFacts("cuda", trouble="no CUDA device: ...")``.
    """

    word: str
    """The device's name as a value of ``--gpumem-device``, for example ``"cuda"``."""
    environment: Environment | None = None
    trouble: str | None = None
    """The reason why the device cannot be used here, for example the message of a `DeviceUnavailable` or `EmulationError`."""
    tells_time: bool = True
    pace: float | None = None
    """The current speed: the frequency of a GPU's SM clock in Hz, or a CPU's runs of the reference workload in a second."""
    conditions: tuple[Conditions, Conditions] | None = None
    """The load on the device and its clock, read twice, half a second apart."""
    load_source: str | None = None
    """The source of the load on the CPU: ``"/proc"`` or ``"psutil"``. ``None`` on other devices, or without a source."""
    lacking: str | None = None
    """The reason why convolution workspaces count as 0 bytes on an emulated GPU; ``None`` if workspaces count."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Facts from a separate process, in which torch was imported and devices were opened."""

    torch: TorchFacts = field(default_factory=TorchFacts)
    devices: tuple[DeviceFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """Baselines in the store from the same device and the same environment, as a group."""

    environment: Environment
    baselines: int
    """The number of baselines in the group."""
    metrics: frozenset[str] = frozenset()
    """The names of all metrics in these baselines."""
    has_times: bool = False


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The project's store of baselines."""

    location: str
    """The store's folder or URL, without credentials."""
    stored: tuple[StoredFacts, ...] = ()
    is_there: bool = True
    trouble: str | None = None
    """The reason why the store cannot be read."""
    restore: str | None = None
    """The git command to restore a missing store. ``None`` if the store exists, or git does not track the store."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts from which the findings are derived."""

    device: str
    """The device in the project's settings, as a value of ``--gpumem-device``."""
    releases: Mapping[str, str]
    """The installed releases of Python, pytest and this plugin, by name."""
    driver: str
    """The driver's release from NVML, or ``"unknown"`` followed by NVML's error in parentheses."""
    torch: TorchFacts
    torch_emulated: TorchFacts
    """The facts from importing torch on an emulated GPU. Empty if this machine cannot emulate a GPU."""
    devices: tuple[DeviceFacts, ...]
    store: StoreFacts
    compiling: str | None = None
    """A sentence about missing requirements for torch.compile on an emulated GPU, and the fix; ``None`` if none is missing."""
    ignored: str | None = None
    """The nearest pyproject.toml with settings, if pytest ignores this file because pytest's root directory is above it."""
    is_default_device: bool = False
    """True if no setting names the device."""
    unread: str | None = None
    """A sentence about settings that pytest does not read, for example in a table with a mistyped name, and the fix."""
    other_command: OtherCommand | None = None
    """The first command ``gpumem`` on the ``PATH``, if the command belongs to another package."""

    def device_facts(self, word: str) -> DeviceFacts | None:
        """Return the facts about the device called ``word``; ``None`` if it was not opened."""
        return next((device for device in self.devices if device.word == word), None)

    @property
    def chosen(self) -> DeviceFacts | None:
        """The facts about the device in the settings. ``auto`` means CUDA if CUDA can be used, otherwise the CPU."""
        if self.device != "auto":
            return self.device_facts(self.device)
        cuda = self.device_facts("cuda")
        return cuda if cuda is not None and cuda.trouble is None else self.device_facts("cpu")
