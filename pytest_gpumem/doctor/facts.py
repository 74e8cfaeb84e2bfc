"""Facts about a machine, its Python and a project: frozen values that `looking` collects, and `findings` judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_gpumem.command_name import OtherCommand
from pytest_gpumem.measurement import Environment
from pytest_gpumem.values.interference import Conditions


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch that an import found."""

    release: str | None = None
    """``None`` where none is installed."""
    cuda: str | None = None
    """The release of CUDA that it was built for."""
    trouble: str | None = None
    """The exception of its import, or how the process ended."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device that was opened and closed; no step was run."""

    word: str
    """The word of ``--gpumem-device``."""
    environment: Environment | None = None
    trouble: str | None = None
    """The reason why it cannot be used here, as its `DeviceUnavailable` or `EmulationError` has it."""
    tells_time: bool = True
    pace: float | None = None
    """The rate of its clock: Hz of a GPU, runs per second of the reference workload on the CPU."""
    conditions: tuple[Conditions, Conditions] | None = None
    """Two readings, half a second apart."""
    lacking: str | None = None
    """Of an emulated GPU: why workspaces of convolutions are taken as 0."""


@dataclass(frozen=True, slots=True)
class Looked:
    """All that a process which imported torch tells."""

    torch: TorchFacts = field(default_factory=TorchFacts)
    devices: tuple[DeviceFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """The baselines of one device in one environment. ``metrics`` are the names of all that they hold."""

    environment: Environment
    baselines: int
    metrics: frozenset[str] = frozenset()
    has_times: bool = False


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The project's store. ``location`` has no credentials."""

    location: str
    stored: tuple[StoredFacts, ...] = ()
    is_there: bool = True
    trouble: str | None = None
    """The reason why it cannot be read."""
    restore: str | None = None
    """The command that restores it from git; ``None`` if it is there, or git does not know it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the findings are made of."""

    device: str
    """The device of the project's settings."""
    releases: Mapping[str, str]
    """Releases of Python, pytest and this plugin, by name."""
    driver: str
    """NVML's release of the driver, or ``unknown`` with what NVML says."""
    torch: TorchFacts
    torch_emulated: TorchFacts
    """As imported on an emulated GPU, where there can be one."""
    devices: tuple[DeviceFacts, ...]
    store: StoreFacts
    compiling: str | None = None
    """A sentence on what torch.compile lacks on an emulated GPU, with its mend."""
    ignored: str | None = None
    """The pyproject.toml nearest to this folder, where it has settings that are not read, as pytest's root is above it."""
    is_default_device: bool = False
    """True if no setting names the device."""
    unread: str | None = None
    """A sentence on settings that are not read, such as those in a mistyped table, with its mend."""
    reports: tuple[str, ...] = ()
    """A sentence for each format of reports that cannot be written, with its mend."""
    other_command: OtherCommand | None = None
    """The command ``gpumem`` that a shell finds first, if it belongs to another package."""

    def of(self, word: str) -> DeviceFacts | None:
        """Return the facts about the device called ``word``."""
        return next((one for one in self.devices if one.word == word), None)

    @property
    def chosen(self) -> DeviceFacts | None:
        """The device that the project's settings take here: of ``auto``, CUDA where it can be used, and the CPU otherwise."""
        if self.device != "auto":
            return self.of(self.device)
        cuda = self.of("cuda")
        return cuda if cuda is not None and cuda.trouble is None else self.of("cpu")
