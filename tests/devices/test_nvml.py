"""What is made of NVML's answers, over a made-up ``pynvml`` with the numbers and the names of the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from pytest_gpumem.measuring.devices.nvml import GpuState, NvmlGpu, OtherProcesses, other_processes

NOT_SUPPORTED, NOT_FOUND = 3, 6
OWN, OTHER = 4711, 4712


class NVMLError(Exception):
    def __init__(self, value: int):
        super().__init__(f"NVML error {value}")
        self.value = value


class NVMLLibraryMismatchError(Exception):
    """As in nvidia-ml-py: none of NVML's own errors."""


def processes(*pids: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]


def process(pid: int, nbytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)


class MadeUpNvml(ModuleType):
    """One GPU, which may be cut into a MIG instance. A value of ``answers`` that is an exception is raised."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    NVML_SUCCESS = 0
    NVML_CLOCK_GRAPHICS = 0
    NVML_CLOCK_SM = 1
    NVML_ERROR_NOT_FOUND = NOT_FOUND

    def __init__(self):
        super().__init__("pynvml")
        self.handles = {"GPU-12": "gpu"}
        self.parents = {}
        self.calls = []
        self.answers = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetDefaultApplicationsClock": 1830,
            "nvmlDeviceGetComputeRunningProcesses": processes(OWN),
            "nvmlDeviceGetProcessUtilization": NVMLError(NOT_FOUND),
        }

    def __getattr__(self, name):
        if name == "nvmlDeviceGetHandleByUUID":
            return lambda uuid: self._found(self.handles, uuid)
        if name == "nvmlDeviceGetDeviceHandleFromMigDeviceHandle":
            return lambda handle: self._found(self.parents, handle)
        if name not in self.answers:
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, arguments)

    def _found(self, table, key):
        if key not in table:
            raise NVMLError(NOT_FOUND)
        return table[key]

    def _answer(self, name, arguments):
        self.calls.append((name, *arguments))
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def nvml(monkeypatch):
    module = MadeUpNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def gpu():
    return NvmlGpu("12")


def now(gpu: NvmlGpu, *ours: int) -> GpuState:
    return gpu.now(lambda pid: pid in ours, 1)


@pytest.mark.parametrize("uuid", ["12", "GPU-12"])
def test_a_gpu_is_read_by_its_uuid_with_a_prefix_or_without(nvml, uuid):
    gpu = NvmlGpu(uuid)
    assert now(gpu, OWN) == GpuState(frozenset(), 1.755e9, 1.83e9, OtherProcesses(0))
    assert gpu.sm_clock() == 1.755e9
    assert ("nvmlDeviceGetClockInfo", "gpu", nvml.NVML_CLOCK_SM) in nvml.calls


def test_nvml_is_initialised_and_asked_for_the_default_clock_once(nvml, gpu):
    for _ in range(3):
        now(gpu, OWN)
        gpu.driver_version()
    asked = [name for name, *_ in nvml.calls]
    assert asked.count("nvmlInit") == asked.count("nvmlDeviceGetDefaultApplicationsClock") == 1


def test_where_there_is_no_default_the_highest_clock_is_it(nvml, gpu):
    nvml.answers["nvmlDeviceGetDefaultApplicationsClock"] = NVMLError(NOT_SUPPORTED)
    assert gpu.default_sm_clock() == 1.98e9


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0, set()),
        (0x4 | 0x2, {"SwPowerCap", "ApplicationsClocksSetting"}),
        (0x1 | 0x8 | 0x40, {"GpuIdle", "HwSlowdown", "HwThermalSlowdown"}),
        (0x20 | 0x80, {"SwThermalSlowdown", "HwPowerBrakeSlowdown"}),
        (0x10 | 0x100 | 0x8000, {"SyncBoost", "DisplayClockSetting"}),
    ],
)
def test_clock_events_are_told_by_name(nvml, gpu, bits, names):
    nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = bits
    assert gpu.clock_events() == names


@pytest.mark.parametrize("newer", [None, NVMLError(13)], ids=["module is older", "driver is older"])
def test_clock_events_are_asked_for_by_their_older_name_too(nvml, gpu, newer):
    del nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"]
    if newer is not None:
        nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"] = newer
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x40
    assert gpu.clock_events() == {"HwThermalSlowdown"}


def test_the_bits_are_those_of_nvml():
    pynvml = pytest.importorskip("pynvml")
    named = {
        "GpuIdle": 0x1,
        "SwPowerCap": 0x4,
        "HwSlowdown": 0x8,
        "SwThermalSlowdown": 0x20,
        "HwThermalSlowdown": 0x40,
        "HwPowerBrakeSlowdown": 0x80,
    }
    assert {name: getattr(pynvml, f"nvmlClocksEventReason{name}") for name in named} == named


def test_of_a_mig_instance_clocks_are_the_gpus_and_all_its_processes_may_work(nvml):
    nvml.handles["MIG-34"] = "instance"
    nvml.parents["instance"] = "gpu"
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(OWN, OTHER)
    others = OtherProcesses(1, frozenset({OTHER}))
    assert now(NvmlGpu("34"), OWN) == GpuState(frozenset(), 1.755e9, 1.83e9, others)
    asked = {name: rest[0] for name, *rest in nvml.calls if name.startswith("nvmlDevice")}
    assert asked["nvmlDeviceGetClockInfo"] == asked["nvmlDeviceGetCurrentClocksEventReasons"] == "gpu"
    assert asked["nvmlDeviceGetComputeRunningProcesses"] == "instance"


# Who else


def test_another_process_that_works_is_a_stranger_and_an_idle_one_is_not(nvml, gpu):
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(OWN, OTHER)
    assert now(gpu, OWN).other_processes == OtherProcesses(0)
    idle = SimpleNamespace(pid=OTHER, smUtil=0, memUtil=0)
    nvml.answers["nvmlDeviceGetProcessUtilization"] = [idle]
    assert now(gpu, OWN).other_processes == OtherProcesses(0)
    nvml.answers["nvmlDeviceGetProcessUtilization"] = [idle, SimpleNamespace(pid=OTHER, smUtil=30, memUtil=0)]
    assert now(gpu, OWN).other_processes == OtherProcesses(1, frozenset({OTHER}))


def test_another_process_is_believed_to_work_where_nobody_knows_that_it_did_not(nvml, gpu):
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(OWN, OTHER)
    for refused, others in (
        (NOT_SUPPORTED, OtherProcesses(1, frozenset({OTHER}))),
        (NOT_FOUND, OtherProcesses(0)),
        (nvml.NVML_SUCCESS, OtherProcesses(0)),
    ):
        nvml.answers["nvmlDeviceGetProcessUtilization"] = NVMLError(refused)
        assert now(gpu, OWN).other_processes == others


def test_bytes_are_listed_by_pid_and_0_bytes_are_unknown(nvml, gpu):
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = [process(OWN, 0), process(OTHER, 512), process(4713, None)]
    assert gpu.bytes_by_pid() == {OWN: None, OTHER: 512, 4713: None}
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = []
    assert gpu.bytes_by_pid() == {}
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = NVMLError(NOT_SUPPORTED)
    assert gpu.bytes_by_pid() is None


def test_an_older_driver_lists_its_processes_by_the_older_function(nvml, gpu):
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = NVMLLibraryMismatchError("use matching versions")
    assert gpu.processes() is None
    nvml.answers["nvmlDeviceGetComputeRunningProcesses_v2"] = processes(OWN)
    assert gpu.processes() == {OWN}


def test_what_nvidia_ml_py_raises_beside_nvmls_errors_is_what_the_made_up_one_does():
    pynvml = pytest.importorskip("pynvml")
    assert not issubclass(pynvml.NVMLLibraryMismatchError, pynvml.NVMLError)
    assert callable(pynvml.nvmlDeviceGetComputeRunningProcesses_v2)
    assert pynvml.NVML_SUCCESS == 0


def test_who_works_is_not_asked_where_this_process_is_the_only_one(nvml, gpu):
    now(gpu, OWN)
    assert "nvmlDeviceGetProcessUtilization" not in [name for name, *_ in nvml.calls]


def test_who_works_is_asked_of_the_last_seconds(nvml, gpu, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    gpu.working()
    assert nvml.calls[-1] == ("nvmlDeviceGetProcessUtilization", "gpu", 998_000_000)


@pytest.mark.parametrize(
    ("processes", "working", "workers", "others"),
    [
        ({901}, None, 1, 0),  # a container: 901 is this process, by the host's number
        ({901, 902}, None, 1, 1),
        ({901, 902}, None, 2, 0),
        ({901, 902, 903}, None, 2, 1),
        ({901, 902}, {901}, 1, 0),
        ({901, 902}, {901, 902}, 1, 1),
        ({901, 902, 903}, {901, 902, 903}, 2, 1),
    ],
)
def test_where_pids_are_another_namespaces_as_many_as_there_are_workers_are_ours(processes, working, workers, others):
    told = other_processes(frozenset(processes), None if working is None else frozenset(working), [], workers)
    assert told == OtherProcesses(others)


def test_other_workers_of_the_session_are_no_strangers():
    assert other_processes(frozenset({1, 2, 3}), None, [1, 2], 2) == OtherProcesses(1, frozenset({3}))


# Where NVML does not answer


def test_without_pynvml_nothing_is_known(monkeypatch, gpu):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert now(gpu, OWN) == GpuState()
    assert gpu.sm_clock() is None
    assert gpu.driver_version() == "unknown"


def test_without_a_driver_nothing_is_known_but_why(nvml, gpu):
    nvml.answers["nvmlInit"] = NVMLError(9)
    assert now(gpu, OWN) == GpuState()
    assert gpu.driver_version() == "unknown (NVML error 9)"


def test_a_gpu_that_nvml_does_not_know_has_a_driver_and_nothing_else(nvml):
    gpu = NvmlGpu("99")
    assert now(gpu, OWN) == GpuState()
    assert gpu.driver_version() == "580.95.05"


def test_each_question_that_nvml_refuses_is_one_that_nobody_answers(nvml, gpu):
    for name in nvml.answers:
        if name.startswith("nvmlDevice"):
            nvml.answers[name] = NVMLError(NOT_SUPPORTED)
    assert now(gpu, OWN) == GpuState()


@pytest.mark.parametrize(
    ("version", "said"),
    [("580.95.05", "580.95.05"), (b"535.1", "535.1"), (NVMLError(NOT_SUPPORTED), "unknown (NVML error 3)")],
)
def test_the_drivers_version_is_text(nvml, gpu, version, said):
    nvml.answers["nvmlSystemGetDriverVersion"] = version
    assert gpu.driver_version() == said
