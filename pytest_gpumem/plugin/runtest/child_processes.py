"""Measure the processes started by a test, its fixtures or its session, as part of a test's call or region."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.base.variables import CUDA_VISIBLE_DEVICES
from pytest_gpumem.emulating.emulated_process.start import STARTUP
from pytest_gpumem.emulating.emulated_process.usage import among_all, rank_in, ticks_of
from pytest_gpumem.facts.values.option_words import NOT_SEEN
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.jobs.beside_torch import ProcessBytes, beside_torch
from pytest_gpumem.measuring.jobs.figures import (
    WITHOUT_STATISTICS,
    JobFigures,
    OwnPeak,
    invalid_figures,
    is_active,
    job_figures,
    killed_text,
    program_name,
)
from pytest_gpumem.measuring.jobs.windows import ProcessWindows, Window, command_text
from pytest_gpumem.measuring.measure.growth import WINDOW
from pytest_gpumem.measuring.measure.reading import Figures

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulated_process.usage import ProcessUsage
    from pytest_gpumem.facts.values.rank import Rank
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.jobs.figures import Names, ProcessFigures
    from pytest_gpumem.measuring.jobs.windows import WindowUsage
    from pytest_gpumem.measuring.measure.reading import ByDevice
    from pytest_gpumem.plugin.runtest.explaining import RunAgain
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement

_RAY_WORKER = "default_worker.py"
"""The program of Ray's workers."""
_POOL_WORKER = "PoolWorker-"
"""A part of the name that `multiprocessing.Pool` gives to a worker: ``SpawnPoolWorker-1``."""
_OTHER_RANKS = "the other ranks would not run the code again with this rank"


class SessionProcesses:
    """The processes started by this session. While the session measures, environment variables let them report.

    They inherit the variables, so this process has them too, from here to `close`. With one of them, ``TORCH_SYMBOLIZE_MODE``,
    torch's C++ stacks have functions and no lines. `close` restores the environment.
    """

    def __init__(self, variables: Mapping[str, str], began: float | None) -> None:
        """Set the environment variables.

        Args:
            variables: `Device.variables_of_processes`.
            began: The time when the session began, in seconds since the machine started. Children from before it are not the
                session's. ``None`` if unknown.
        """
        self._windows = ProcessWindows(variables, None if began is None else ticks_of(began))
        self._variables = self._windows.variables(os.environ)
        self._previous = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)
        self.environment = dict(self._variables)
        """The variables by which processes report, and `CUDA_VISIBLE_DEVICES` as it was before the first GPU was opened. A test
        may change its own environment later."""
        self._has_gpu = False
        # torch.compile's worker processes get `sys.path`, but not the variable PYTHONPATH.
        self._extends_path = str(STARTUP) not in sys.path
        if self._extends_path:
            sys.path.insert(0, str(STARTUP))

    def close(self) -> None:
        """Restore the environment, except variables that tests have changed. Processes that still run are left alone."""
        self._windows.close()
        for name, value in self._previous.items():
            if os.environ.get(name) == self._variables[name]:
                del os.environ[name]
                os.environ.update({} if value is None else {name: value})
        if self._extends_path and str(STARTUP) in sys.path:
            sys.path.remove(str(STARTUP))

    def window(
        self, *, record: bool = False, look: Callable[[frozenset[int]], None] = lambda _: None
    ) -> AbstractContextManager[Window]:
        """Return the context `ProcessWindows.window`."""
        return self._windows.window(record=record, look=look)

    def ending_new_processes(self) -> AbstractContextManager[None]:
        """Return the context `ProcessWindows.ending_new_processes`."""
        return self._windows.ending_new_processes()

    def publish(self, device: Device) -> None:
        """Publish the bytes of the test's own process on a test's device and on further GPUs, from now on."""
        if device.torch_device.index is not None and not self._has_gpu:
            self._has_gpu = True
            self.environment |= {CUDA_VISIBLE_DEVICES: os.environ.get(CUDA_VISIBLE_DEVICES, "")}
        shared, visible = self._windows.shared, self.environment.get(CUDA_VISIBLE_DEVICES)
        indices = [on_device.torch_device.index for on_device in device.everywhere]
        in_machine = [_in_machine(index, visible) for index in range(max(index or 0 for index in indices) + 1)]
        shared.publish_own(device.torch_device.type, in_machine)
        for on_device in device.everywhere:
            on_device.publishing = shared

    def end_step(self, device: Device, own: ByDevice, earlier: Names | None) -> JobFigures | None:
        """End a step, which is a part of a window, and return all processes' figures as `figures_of_processes` does.

        If there are no other processes, return ``None``.
        """
        step = self._windows.divide()
        is_alone = not (step.usages or step.killed or step.silent or step.unknown)
        return None if is_alone else figures_of_processes(step, device, own, self.environment, earlier)


@dataclass(eq=False, repr=False)
class OtherProcesses:
    """The processes besides its own which a running test uses.

    Example:
        A test asks a server in ``with processes.window() as window:``. Then `figures_of_processes` returns the server's peak
        from ``window.usage``, and `unmeasured` names the processes whose memory is not known.
    """

    device: Device
    session: SessionProcesses | None = None
    """The processes that the session starts; ``None`` to leave them alone."""
    rank: Rank | None = None
    """The own process's rank; ``None`` without ranks."""
    unmeasured: dict[str, None] = field(default_factory=dict)
    """`TestVerdict.unmeasured_processes` so far."""
    beside_torch: dict[str, int | None] = field(default_factory=dict)
    """`TestVerdict.jobs_beside_torch` so far."""
    bounds: Mapping[int, int | None] | None = None
    """The bytes beside torch in the last window by pid, from `beside_torch`; ``None`` if NVML was not read."""

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Read the figures of the processes that the session starts, within the context."""
        if self.session is None:
            yield Window()
            return
        process_bytes = ProcessBytes(self.device.everywhere)
        with self.session.window(look=process_bytes.look) as window:
            yield window
        self.bounds = beside_torch(window.usage.usages, process_bytes.by_pid) if process_bytes.is_read else None
        self.unmeasured |= dict.fromkeys(unmeasured_processes(window.usage, self.device, self.session.environment))

    def figures(self, window: Window, own: ByDevice) -> JobFigures:
        """Return all processes' figures as `figures_of_processes` does."""
        return figures_of_processes(window.usage, self.device, own, self._environment)

    def check(self, window: Window) -> None:
        """Raise `MeasuringError` if the memory of a process in a window is not known."""
        check_processes(window.usage, self.device, self._environment)

    @property
    def _environment(self) -> Mapping[str, str]:
        return {} if self.session is None else self.session.environment

    def note_beside_torch(
        self, processes: Sequence[JudgedMeasurement], bounds: Mapping[int, int | None] | None
    ) -> None:
        """Add the processes' bytes beside torch. ``bounds`` has them by pid, and is ``None`` if NVML was not read."""
        if bounds is None:
            return
        for judged in processes:
            seen = [bound for bound in map(bounds.get, judged.pids) if bound is not None]
            self.beside_torch[judged.measurement.name] = max(seen, default=None)

    def ending_new(self, window: Window) -> AbstractContextManager[None]:
        """Return a context for code that loads an object again. It ends processes that started for the second object.

        Args:
            window: The processes when the object was loaded first. Without any, no process is ended.
        """
        if self.session is None or not window.usage.usages:
            return nullcontext()
        return self.session.ending_new_processes()

    def if_alone(self, run_again: Callable[[], Sequence[ProcessFigures]]) -> RunAgain:
        """Return ``run_again``, or the reason why a rank does not run code again for its processes."""
        return run_again if self.rank is None else _OTHER_RANKS

    def recorded(self, run: Callable[[], object]) -> Sequence[ProcessFigures]:
        """Run code while its processes record their allocations. The code's result is alive until they have answered."""
        assert self.session is not None, "only called if there are processes"
        with self.session.window(record=True) as window:
            result = run()
        del result
        nothing = Figures(0, 0, None, Peak(0), None, 0)
        own = {str(device.torch_device): nothing for device in self.device.everywhere}
        return self.figures(window, own).processes

    def recorded_step(self, step: Callable[[], object], growing: Collection[str]) -> Sequence[ProcessFigures]:
        """Run a step again while its processes record their allocations.

        If memory grows, but only some steps keep bytes, the step runs until each growing process keeps bytes.
        """
        recorded: Sequence[ProcessFigures] = ()
        for _ in range(WINDOW):
            recorded = self.recorded(step)
            keeping = {
                process.name: any(blocks.retained for blocks in process.recorded.values())
                for process in recorded
                if process.recorded
            }
            if all(keeping.get(process, True) for process in growing):
                break
        return recorded


def figures_of_processes(
    window: WindowUsage,
    device: Device,
    own: ByDevice,
    environment: Mapping[str, str],
    earlier: Names | None = None,
) -> JobFigures:
    """Return all processes' figures in a window. They are empty if no process used the device.

    Args:
        window: The processes in the test's call, region or step.
        device: The test's device.
        own: The figures of the test's own process.
        environment: `SessionProcesses.environment`.
        earlier: The names in the step before.

    Raises:
        MeasuringError: The memory of a process that the test used is not known.
    """
    if _lacking(device, environment) is not None:
        return JobFigures({}, ())
    check_processes(window, device, environment)
    visible = environment.get(CUDA_VISIBLE_DEVICES)
    own_peaks = {
        _in_machine(on_device.torch_device.index, visible): OwnPeak(
            gpu, own[gpu].own_peak, own[gpu].published_by_others
        )
        for on_device in device.everywhere
        if (gpu := str(on_device.torch_device)) in own
    }
    usages = without_rank_in(os.environ, window.usages)
    return job_figures(usages, name_of_devices(device), own_peaks, earlier, window.simultaneous, os.getpid())


def name_of_devices(device: Device) -> str:
    """Return the name of devices in torch, with ``{}`` for the index: ``"cuda:{}"``, or ``"cpu"``."""
    torch_device = device.torch_device
    return torch_device.type if torch_device.index is None else f"{torch_device.type}:{{}}"


def _in_machine(index: int | None, visible: str | None) -> int:
    """Return a device's index among the machine's devices. The CPU has none."""
    return 0 if index is None else among_all(index, visible)


def _lacking(device: Device, environment: Mapping[str, str]) -> str | None:
    """Return the reason why other processes' memory does not count on a device; ``None`` if it counts."""
    if device.variables_of_processes().items() <= environment.items():
        return device.lacks("processes")
    return "other processes of this session report only their GPU memory, because not all tests are measured on the CPU"


def without_rank_in(environment: Mapping[str, str], usages: Iterable[ProcessUsage]) -> Iterator[ProcessUsage]:
    """Remove the rank that a process inherits from an environment: the test's own rank, which is not a rank in a job."""
    own_rank = rank_in(environment)
    for usage in usages:
        is_inherited = (usage.process.rank, usage.process.rank_variable) == own_rank
        process = replace(usage.process, rank=None, local_rank=None) if is_inherited else usage.process
        yield replace(usage, process=process)


def check_processes(window: WindowUsage, device: Device, environment: Mapping[str, str]) -> None:
    """Raise `MeasuringError` if the memory of a process that the test used is not known."""
    if _lacking(device, environment) is not None:
        return
    for sentence in (*window.unknown, *window.silent):
        raise MeasuringError(sentence)
    for usage in window.killed:
        raise MeasuringError(f"`{command_text(usage)}` {killed_text(usage)}. {_mend_of(usage)}")
    active = tuple(filter(is_active, window.usages))
    for usage in active:
        if usage.without_statistics:
            raise MeasuringError(f"`{command_text(usage)}` {WITHOUT_STATISTICS}")
    invalid = invalid_figures(active) if active else None
    if invalid is not None:
        raise MeasuringError(invalid)


def _mend_of(killed: ProcessUsage) -> str:
    """Return advice about a process that was killed, or that C code ended."""
    if killed.status is not None:
        return "Let it end by Python's sys.exit()"
    if _POOL_WORKER in killed.process.name:
        mend = "end its pool by close() and join() instead"
    elif program_name(killed.process.command) == _RAY_WORKER:
        mend = (
            "delete the actor's last handle instead of ray.kill(), and call ray.shutdown() in a fixture after the test"
        )
    else:
        mend = "end it by terminate() and not by kill() instead"
    return f"If it was killed on purpose, {mend}. Otherwise the system may have killed it because no memory was free"


def unmeasured_processes(window: WindowUsage, device: Device, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a clause for each process whose memory does not count."""
    lacking = _lacking(device, environment)
    uncounted = window.uncounted if lacking is None else [(command, lacking) for command in window.importing]
    return (
        *(f"{NOT_SEEN}: {process.text}" for process in window.unseen),
        *(f"not counted: `{command}` loads torch, and {reason}" for command, reason in uncounted),
    )
