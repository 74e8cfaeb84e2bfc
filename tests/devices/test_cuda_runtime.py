"""What lies between the cuda device and torch, as far as it can be tried without a GPU: the profiler, the history."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd
from pytest_gpumem.measuring.devices import cuda_runtime
from pytest_gpumem.measuring.devices.cuda_history import HistoryEntry, in_order_of_time
from pytest_gpumem.measuring.devices.cuda_runtime import TorchCuda
from pytest_gpumem.measuring.devices.profiled import profiled
from pytest_gpumem.torch_support.private_api.allocator import (
    cuda_history_is_on,
    cuda_snapshot,
    start_cuda_history,
    stop_cuda_history,
)
from pytest_gpumem.torch_support.private_api.profiler import quiet_kineto


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def recorded(run) -> list:
    tokens = []
    with profiled(tokens, torch.device("cpu")):
        run()
    return tokens


# The profiler


def test_allocations_are_told_in_their_operators_and_the_end_of_the_recording_is_not():
    tokens = recorded(lambda: tensor(1001))
    assert [type(token) for token in tokens] == [SpanBegin, AllocationEvent, SpanEnd, AllocationEvent]
    assert tokens[0].name == "aten::empty"
    assert [token.nbytes for token in tokens if isinstance(token, AllocationEvent)] == [1001, -1001]


@pytest.fixture
def elsewhere():
    """The exponential, computed on a thread to which the profiler goes along: as backward is on a GPU."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)

        @torch.jit.script
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.jit.wait(torch.jit.fork(torch.exp, x))

    return run


def test_operators_of_another_thread_are_in_what_waited_and_count_for_themselves(elsewhere):
    x = torch.ones(10, requires_grad=True)
    elsewhere(x)

    def run():
        for number in range(2):
            with record_function(f"gpumem#{number}"):
                x.exp()
                elsewhere(x)
        # The thread leaves its span after the result is there, and writes to what a profiler that has stopped let go.
        time.sleep(0.05)

    within, found, numbers = [], [], []
    for token in in_order_of_time(recorded(run)):
        if isinstance(token, SpanBegin):
            within.append(token)
            if token.name == "aten::exp":
                found.append(within[0].mark)
                numbers.append(token.sequence)
        elif isinstance(token, SpanEnd):
            within.pop()
    assert found == [0, 0, 1, 1]
    assert len(set(numbers)) == 4
    assert within == []


@pytest.mark.parametrize("starts_another", [False, True])
def test_a_recording_that_another_profiler_cut_short_is_refused(starts_another):
    def run():
        tensor(8)
        torch.autograd._disable_profiler()
        if starts_another:
            with profile(activities=[ProfilerActivity.CPU]):
                tensor(8)

    with pytest.raises(MeasuringError, match="was cut short: only one profiler can run at a time"):
        recorded(run)


def test_kineto_is_quiet_unless_somebody_wants_to_hear_it(monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with quiet_kineto():
        assert os.environ["KINETO_LOG_LEVEL"] == "99"
    assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    with quiet_kineto():
        assert os.environ["KINETO_LOG_LEVEL"] == "0"


# The history, over a made-up allocator


class MadeUpHistory:
    """What torch keeps of the allocator's history, for two devices."""

    def __init__(self, monkeypatch):
        self.is_on = False
        self.trace: list[dict] = []
        self.asked: list[tuple] = []
        monkeypatch.setattr("torch._C._cuda_isHistoryEnabled", lambda: self.is_on, raising=False)
        monkeypatch.setattr("torch.cuda.memory._record_memory_history", self._record)
        monkeypatch.setattr("torch.cuda.memory._snapshot", self._snapshot)
        monkeypatch.setattr("torch.cuda.synchronize", lambda _: self.happens("synchronize", 0))

    def happens(self, action, nbytes):
        if self.is_on:
            entry = {"action": action, "addr": 0xA000, "size": nbytes, "time_us": len(self.trace), "frames": []}
            self.trace.append(entry)

    def _record(self, enabled="all", **how):
        self.asked.append((enabled, how))
        self.is_on = enabled is not None
        if not self.is_on:
            self.trace.clear()

    def _snapshot(self):
        taken = {"segments": [], "device_traces": [[], list(self.trace)]}
        self.happens("snapshot", 0)
        return taken


@pytest.fixture
def history(monkeypatch):
    return MadeUpHistory(monkeypatch)


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    return TorchCuda()


def test_history_is_recorded_with_the_viewers_frames_and_then_dropped(history):
    assert not cuda_history_is_on()
    start_cuda_history()
    assert cuda_history_is_on()
    history.happens("alloc", 8)
    assert cuda_snapshot()["device_traces"][1][0]["size"] == 8
    stop_cuda_history()
    assert not cuda_history_is_on()
    assert history.asked == [("all", {"context": "alloc", "stacks": "python"}), (None, {})]


def test_a_torch_that_cannot_tell_whether_history_is_recorded_says_so(monkeypatch):
    monkeypatch.delattr("torch._C._cuda_isHistoryEnabled", raising=False)
    with pytest.raises(AttributeError, match="_cuda_isHistoryEnabled"):
        cuda_history_is_on()


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (lambda: torch.cuda.memory._record_memory_history("all", context="all", stacks="python"), "'all', 'python'"),
        (lambda: torch.cuda.memory._record_memory_history(None), "None"),
    ],
)
def test_this_torch_takes_what_its_history_is_asked_for(monkeypatch, call, arguments):
    taken = []
    monkeypatch.setattr("torch._C._cuda_record_memory_history", lambda *args: taken.append(args), raising=False)
    call()
    assert arguments in str(taken)


@pytest.mark.parametrize(("backend", "reports"), [("native", True), ("cudaMallocAsync", False)])
def test_only_torchs_own_allocator_reports_its_allocations(runtime, monkeypatch, backend, reports):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert runtime.reports_allocations() == reports


def test_a_stretch_has_the_history_of_this_gpu_and_leaves_none_on(history, runtime):
    with runtime.recorded(with_history=True) as stretch:
        history.happens("segment_alloc", 2**21)
        history.happens("alloc", 1001)
    assert stretch.history == [HistoryEntry(1000, "alloc", 0xA000, 1001)]
    assert [entry["action"] for entry in stretch.snapshot["device_traces"][1]] == [
        "segment_alloc",
        "alloc",
        "synchronize",
    ]
    assert not history.is_on


def test_somebody_elses_history_goes_on_and_what_was_in_it_is_not_the_stretchs(history, runtime):
    torch.cuda.memory._record_memory_history(max_entries=1000)
    history.happens("alloc", 7)
    with runtime.recorded(with_history=True) as stretch:
        history.happens("alloc", 1001)
    history.happens("alloc", 9)
    assert [entry.nbytes for entry in stretch.history] == [1001]
    assert history.is_on
    assert [entry["size"] for entry in history.trace if entry["action"] == "alloc"] == [7, 1001, 9]
    assert len(history.asked) == 1


def test_without_history_none_is_recorded(history, runtime):
    with runtime.recorded(with_history=False) as stretch:
        tensor(8)
    assert history.asked == []
    assert stretch.history == []
    assert stretch.snapshot is None
    assert [token.name for token in stretch.tokens if isinstance(token, SpanBegin)] == ["aten::empty"]


def test_history_is_off_and_the_profiler_free_after_a_stretch_that_failed(history, runtime):
    with pytest.raises(KeyboardInterrupt), runtime.recorded(with_history=True):
        raise KeyboardInterrupt
    assert not history.is_on
    assert len(recorded(lambda: tensor(8))) == 4


def test_history_is_off_after_a_profiler_that_did_not_start(history, runtime, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no profiler today")

    monkeypatch.setattr(cuda_runtime, "profiled", refuse)
    with pytest.raises(RuntimeError, match="no profiler today"), runtime.recorded(with_history=True):
        pass
    assert not history.is_on


def test_the_gpus_work_is_done_before_a_stretch_ends(history, runtime, monkeypatch):
    done = []
    monkeypatch.setattr("torch.cuda.synchronize", done.append)
    with runtime.recorded(with_history=True):
        assert done == []
    assert done == [1]
