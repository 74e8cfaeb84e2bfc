"""The cuda device against what was recorded on real GPUs, played back where there is none: statistics, and a step's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.devices.cpu import CpuDevice
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.cuda_history import HistoryEntry
from pytest_gpumem.devices.cuda_runtime import RecordedRegion
from pytest_gpumem.measure.reading import Phase
from pytest_gpumem.measure.runner import measure_step
from pytest_gpumem.values.events import AllocationEvent
from tests.gpu.recording import (
    ACTIVATIONS,
    COUNTERS,
    END,
    PARAMETERS,
    STEP,
    TEMPORARY,
    TENSORS,
    Action,
    Recording,
    ReplayedCuda,
    Seen,
    record,
    seen_by_device,
)
from tests.gpu.step_recording import StepRecording, recording_of, run_step
from tests.silent_cuda import SilentCuda

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.devices.cuda_runtime import CudaRuntime
    from pytest_gpumem.values.events import Token

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = sorted(DATA.glob("cuda-statistics-*.json"))
STEPS = sorted(DATA.glob("cuda-composition-*.json"))
NO_RECORDING = "there is no recording of a GPU in tests/data; `make gpu` makes one where there is a GPU"
MADE_UP = {"total_memory": 8 * 10**9, "driver": "1.2"}


@pytest.fixture(params=RECORDINGS or [None], ids=lambda path: path.stem if path else "none")
def recording(request: pytest.FixtureRequest) -> Recording:
    if request.param is None:
        pytest.skip(NO_RECORDING)
    return Recording.from_json(request.param.read_text(encoding="utf-8"))


@pytest.fixture(params=STEPS or [None], ids=lambda path: path.stem if path else "none")
def step(request: pytest.FixtureRequest) -> StepRecording:
    if request.param is None:
        pytest.skip(NO_RECORDING)
    return StepRecording.from_json(request.param.read_text(encoding="utf-8"))


def by_hand(recording: Recording) -> list[Seen]:
    return [Seen(moment.name, moment.held, moment.peak) for moment in recording.moments if moment.peak is not None]


def test_live_bytes_and_peaks_of_a_recorded_gpu_are_those_made_by_hand(recording: Recording) -> None:
    seen = seen_by_device(recording)
    assert [one.held for one in seen] == [moment.held for moment in recording.moments]
    known = {one.name for one in by_hand(recording)}
    assert [one for one in seen if one.name in known] == by_hand(recording)


def test_the_recorded_gpu_rounds_what_the_device_reports_unrounded(recording: Recording) -> None:
    first = recording.moments[0]
    counted = {
        counter: first.after[f"{counter}.current"] - recording.start[f"{counter}.current"] for counter in COUNTERS
    }
    assert counted["requested_bytes.all"] == first.held
    assert counted["allocated_bytes.all"] > first.held
    assert counted["reserved_bytes.all"] >= counted["allocated_bytes.all"]


def test_workspaces_of_a_recorded_gpu_are_in_the_peak_and_not_left_over(recording: Recording) -> None:
    seen = {one.name: one for one in seen_by_device(recording)}
    product = seen["matmul"].held
    assert seen["matmul"].peak >= 2 * product
    assert seen["no more product"].held == -product


def test_a_step_of_a_recorded_gpu_measures_as_made_by_hand(recording: Recording) -> None:
    assert measured_step(recording) == STEP_BY_HAND


def test_a_step_of_a_recorded_gpu_is_composed_as_it_was_there(step: StepRecording) -> None:
    composed = step.composed()
    assert composed.total == step.peak
    assert composed.rows == step.composition.rows
    assert composed == step.composition


def test_a_recorded_gpu_rounds_what_a_step_asked_for_and_has_workspaces(step: StepRecording) -> None:
    rounded_up = sum(token.nbytes for token in step.tokens if isinstance(token, AllocationEvent) and token.nbytes > 0)
    assert rounded_up > sum(entry.nbytes for entry in step.history if entry.action == "alloc")
    assert step.composition.of("workspace") > 0


# The same, against a GPU that is made up: so that what plays recordings back is known to work while there are none.


def test_a_made_up_gpu_is_recorded_and_played_back_to_the_byte() -> None:
    recording = record(MadeUpCuda(), (*TENSORS, *END), "a made-up GPU", MADE_UP)
    assert len(by_hand(recording)) == len(TENSORS) + len(END)
    assert seen_by_device(recording) == by_hand(recording)


def test_a_step_of_a_made_up_gpu_measures_as_made_by_hand() -> None:
    recording = record(MadeUpCuda(), (*TENSORS, *END), "a made-up GPU", MADE_UP)
    assert measured_step(recording) == STEP_BY_HAND


def test_workspaces_of_a_made_up_gpu_are_in_the_peak_and_not_left_over() -> None:
    workload = (
        Action("matmul", multiply, held=1000, peak=None),
        Action("no more product", lambda runtime, held: held.clear(), held=-1000, peak=0),
    )
    seen = seen_by_device(record(MadeUpCuda(), workload, "a made-up GPU", MADE_UP))
    assert seen == [Seen("matmul", 1000, 1000 + WORKSPACE), Seen("no more product", -1000, 0)]


def test_what_a_made_up_gpu_allocates_in_all_is_counted_each_time_that_it_is_played_back() -> None:
    recording = record(MadeUpCuda(), (*TENSORS, *END), "a made-up GPU", MADE_UP)
    device = CudaDevice(runtime := ReplayedCuda(recording))
    device.open()
    turnover = []
    for name in ("parameters", *STEP, *STEP):
        before = device.turnover()
        runtime.play(name)
        turnover.append(device.turnover() - before)
    device.close()
    step = [ACTIVATIONS + TEMPORARY, PARAMETERS + TEMPORARY, PARAMETERS]
    assert turnover == [PARAMETERS, *step, *step]


def test_an_allocator_that_counts_no_requests_is_played_back_as_rounded() -> None:
    recording = record(MadeUpCuda(counts_requests=False), (*TENSORS, *END), "a made-up GPU", MADE_UP)
    assert "requested_bytes.all.current" not in recording.start
    assert [one.held for one in seen_by_device(recording)] == [
        rounded(PARAMETERS),
        rounded(ACTIVATIONS),
        rounded(PARAMETERS) - rounded(ACTIVATIONS),
        -rounded(PARAMETERS),
        -rounded(PARAMETERS),
    ]


@pytest.fixture(scope="module", params=["fp32", "amp-bf16,checkpoint=blocks"])
def made_up_step(request: pytest.FixtureRequest) -> StepRecording:
    """A step on the CPU, told as a GPU would."""
    device = CpuDevice()
    device.open()
    try:
        ran = run_step(device, request.param)
    finally:
        device.close()
    return recording_of(ran, as_of_a_gpu(ran.recorded.trace.tokens), "a made-up GPU", MADE_UP)


def test_a_step_of_a_made_up_gpu_is_composed_as_it_was_there(made_up_step: StepRecording) -> None:
    composed = StepRecording.from_json(made_up_step.to_json()).composed()
    assert composed == made_up_step.composition
    assert composed.total == made_up_step.peak


def test_a_recording_of_a_step_survives_its_file(made_up_step: StepRecording) -> None:
    assert StepRecording.from_json(made_up_step.to_json()) == made_up_step


def test_a_recording_of_a_step_of_another_format_is_refused(made_up_step: StepRecording) -> None:
    text = made_up_step.to_json().replace('"format":2', '"format":1')
    with pytest.raises(ValueError, match="not a recording of a step of format 2"):
        StepRecording.from_json(text)


def test_a_recording_survives_its_file() -> None:
    recording = record(MadeUpCuda(), TENSORS, "a made-up GPU", MADE_UP)
    assert Recording.from_json(recording.to_json()) == recording


def test_a_recording_of_another_format_is_refused() -> None:
    text = record(MadeUpCuda(), TENSORS, "a made-up GPU", MADE_UP).to_json().replace('"format": 1', '"format": 0')
    with pytest.raises(ValueError, match="not a recording of format 1"):
        Recording.from_json(text)


def test_a_replay_reads_the_names_of_its_gpu() -> None:
    runtime = ReplayedCuda(record(MadeUpCuda(), TENSORS, "a made-up GPU", MADE_UP))
    environment = CudaDevice(runtime).environment()
    assert (environment.device, environment.slug) == ("a made-up GPU", "a-made-up-gpu")
    assert environment.details["total_memory"] == MADE_UP["total_memory"]
    assert environment.details["driver"] == "1.2"


def test_a_replay_keeps_the_cache_until_it_is_emptied() -> None:
    recording = record(MadeUpCuda(), TENSORS, "a made-up GPU", MADE_UP)
    device = CudaDevice(runtime := ReplayedCuda(recording))
    device.open()
    for name in ("parameters", *STEP):
        runtime.play(name)
    cached = device.reserved()
    device.quiesce()
    rest = device.reserved()
    device.close()
    assert cached is not None
    assert rest is not None
    assert rest < cached
    assert rest >= PARAMETERS


STEP_BY_HAND = {
    "peak_allocated": PARAMETERS + ACTIVATIONS + PARAMETERS + TEMPORARY,
    "peak_forward": PARAMETERS + ACTIVATIONS + TEMPORARY,
    "peak_backward": PARAMETERS + ACTIVATIONS + PARAMETERS + TEMPORARY,
    "peak_optimizer": PARAMETERS + PARAMETERS + PARAMETERS,
    "retained": 0,
    "cyclic_garbage": 0,
}


def measured_step(recording: Recording) -> dict[str, int]:
    """What measuring makes of the recorded training step, with the parameters as the step's own."""
    runtime = ReplayedCuda(recording)
    device = CudaDevice(runtime)
    device.open()
    try:
        runtime.play("parameters")
        device.quiesce()
        figures = measure_step(
            [Phase(name, playing(runtime, name)) for name in STEP],
            device,
            own=dict,
            not_own=[device.live() - PARAMETERS],
            time_budget=None,
        )
        metrics = figures.memory.memory_metrics()
        assert figures.settled
        assert metrics.pop("peak_reserved") >= metrics["peak_allocated"]
        return metrics
    finally:
        device.close()


def playing(runtime: ReplayedCuda, name: str) -> Callable[[], None]:
    return lambda: runtime.play(name)


WORKSPACE = 8_519_680


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def as_of_a_gpu(tokens: tuple[Token, ...]) -> RecordedRegion:
    """Tokens with rounded blocks, and the history that has what was asked for."""
    stretch = RecordedRegion()
    for token in tokens:
        if not isinstance(token, AllocationEvent):
            stretch.tokens.append(token)
            continue
        nbytes = rounded(abs(token.nbytes))
        stretch.tokens.append(token._replace(nbytes=nbytes if token.nbytes > 0 else -nbytes))
        for action in ("alloc",) if token.nbytes > 0 else ("free_requested", "free_completed"):
            stretch.history.append(HistoryEntry(token.time_ns, action, token.address, abs(token.nbytes)))
    return stretch


class Block:
    """Memory of the made-up GPU, freed when it is dropped."""

    def __init__(self, gpu: MadeUpCuda, nbytes: int) -> None:
        self._gpu, self._nbytes = gpu, nbytes
        gpu.count(nbytes)

    def __del__(self) -> None:
        self._gpu.count(-self._nbytes)


@dataclass
class MadeUpCuda(SilentCuda):
    """A GPU whose allocator rounds to 512 bytes, and reserves what it ever needed until its cache is emptied."""

    counts_requests: bool = True
    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    peaks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    ever: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    workspace: Block | None = None

    def count(self, nbytes: int) -> None:
        requested, allocated, reserved = COUNTERS
        before = dict(self.now)
        self.now[requested] += nbytes
        self.now[allocated] += rounded(nbytes) if nbytes > 0 else -rounded(-nbytes)
        self.now[reserved] = max(self.now[reserved], self.now[allocated])
        for counter in COUNTERS:
            self.peaks[counter] = max(self.peaks[counter], self.now[counter])
            self.ever[counter] += max(self.now[counter] - before[counter], 0)

    def statistics(self) -> dict[str, int]:
        counters = COUNTERS if self.counts_requests else COUNTERS[1:]
        return {
            f"{counter}.{which}": values[counter]
            for which, values in (("current", self.now), ("peak", self.peaks), ("allocated", self.ever))
            for counter in counters
        }

    def reset_peaks(self) -> None:
        self.peaks = dict(self.now)

    def clear_workspaces(self) -> None:
        self.workspace = None

    def empty_cache(self) -> None:
        _, allocated, reserved = COUNTERS
        self.now[reserved] = self.now[allocated]

    def allocate(self, nbytes: int) -> object:
        return Block(self, nbytes)


def multiply(runtime: CudaRuntime, held: dict[str, object]) -> None:
    assert isinstance(runtime, MadeUpCuda)
    runtime.workspace = Block(runtime, WORKSPACE)
    held["product"] = runtime.allocate(1000)
