"""The CUDA device over a made-up allocator: which statistics are read, and what may happen to them meanwhile.

`SyntheticCuda` is written by hand and imitates what the caching allocator's statistics do. No figure here was measured on
a GPU; tests/gpu has the same of torch's own allocator, on an emulated GPU or a real one.
"""

from __future__ import annotations

import pickle
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pytest_gpumem.base.errors import DeviceUnavailable, MeasuringError
from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd
from pytest_gpumem.measuring.devices import proc
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.devices.cuda import CudaDevice, cuda_slug
from pytest_gpumem.measuring.devices.cuda_history import HistoryEntry
from pytest_gpumem.measuring.devices.cuda_runtime import GpuProperties, RecordedRegion
from pytest_gpumem.measuring.devices.nvml import GpuState, OtherProcesses
from pytest_gpumem.measuring.measure.reading import Figures
from pytest_gpumem.measuring.step_config.config import CHECKPOINTS, PRECISIONS
from tests.silent_cuda import SilentCuda

MIB = 2**20
FEATURES = [*PRECISIONS, *(word.partition(":")[0] for word in CHECKPOINTS)]
ROUNDING = 512
SEGMENT = 2 * MIB


class Block:
    """Memory that is given back when nobody holds it any more, as a tensor's."""


class SyntheticCuda(SilentCuda):
    """An allocator that rounds blocks up to 512 bytes and takes segments of 2 MiB, which it keeps until told otherwise.

    ``counters`` are the statistics that it keeps; the real one keeps all three.
    """

    def __init__(self, counters=("requested_bytes", "allocated_bytes", "reserved_bytes"), counts=True):
        self._counters = counters
        self._counts = counts
        self._current = dict.fromkeys(("requested_bytes", "allocated_bytes", "reserved_bytes"), 0)
        self._peak = dict(self._current)
        self._ever = dict(self._current)
        self._workspace: Block | None = None
        self._stretch: RecordedRegion | None = None
        self._blocks: dict[int, int] = {}
        self._events = 0
        self.calls: list[str] = []
        self.capability = (9, 0)
        self.retries = 0
        self.nvml = GpuState()

    def torch_device(self):
        return torch.device("cuda", 0)

    def properties(self):
        return GpuProperties("NVIDIA H100 80GB HBM3", 85_017_100_288, "580.95.05", "GPU-0", self.capability)

    def statistics(self):
        values = {}
        for counter in self._counters:
            values[f"{counter}.all.current"] = self._current[counter]
            values[f"{counter}.all.peak"] = self._peak[counter]
            values[f"{counter}.all.allocated"] = self._ever[counter]
        return {**values, "num_alloc_retries": self.retries}

    def reset_peaks(self):
        # As torch does it: our own resets go through the function that measured code calls, too.
        torch.cuda.reset_peak_memory_stats()

    def really_reset_peaks(self, _device=None):
        self._peak = dict(self._current)

    def clear_workspaces(self):
        self.calls.append("clear_workspaces")
        self._workspace = None

    def empty_cache(self):
        self.calls.append("empty_cache")
        self._current["reserved_bytes"] = _up(self._current["allocated_bytes"], SEGMENT)

    def synchronize(self):
        self.calls.append("synchronize")

    def finish_backward(self):
        self.calls.append("finish_backward")

    def allocate(self, nbytes):
        block = Block()
        if self._counts:
            self._change(nbytes, id(block))
            weakref.finalize(block, self._change, -nbytes, id(block))
        return block

    def segments(self):
        # As torch.cuda.memory_snapshot() tells them: each block follows the one before it.
        return [
            {
                "device": 0,
                "address": address,
                "blocks": [
                    {"state": "active_allocated", "size": _up(nbytes, ROUNDING), "requested_size": nbytes},
                    {"state": "inactive", "size": 4096, "requested_size": 0},
                ],
            }
            for address, nbytes in self._blocks.items()
        ]

    @contextmanager
    def recorded(self, *, with_history, operands):
        self.calls.append(f"recorded, {'with' if with_history else 'without'} history")
        self._stretch = stretch = RecordedRegion()
        yield stretch
        self._stretch = None
        if with_history:
            stretch.snapshot = {"made up": len(stretch.history)}
        else:
            stretch.history.clear()

    def run(self, operator, *nbytes):
        """An operator that allocates, if anybody records."""
        self._tell(lambda time: SpanBegin(time, "operator", operator))
        kept = [self.allocate(size) for size in nbytes]
        self._tell(SpanEnd)
        return kept

    def keep_workspace(self, nbytes):
        self._workspace = self.allocate(nbytes)

    def gpu(self):
        return self.nvml

    def sm_clock(self):
        return self.nvml.sm_clock

    def _tell(self, token, *actions):
        if self._stretch is not None:
            self._events += 1
            self._stretch.tokens.append(token(self._events))
            self._stretch.history += [HistoryEntry(self._events, *action) for action in actions]

    def _change(self, nbytes, address):
        sign = 1 if nbytes > 0 else -1
        if nbytes > 0:
            self._blocks[address] = nbytes
        else:
            self._blocks.pop(address, None)
        before = dict(self._current)
        actions = ["alloc"] if nbytes > 0 else ["free_requested", "free_completed"]
        self._tell(
            lambda time: AllocationEvent(time, address, sign * _up(abs(nbytes), ROUNDING)),
            *((action, address, abs(nbytes)) for action in actions),
        )
        self._current["requested_bytes"] += nbytes
        self._current["allocated_bytes"] += sign * _up(abs(nbytes), ROUNDING)
        reserved = _up(self._current["allocated_bytes"], SEGMENT)
        self._current["reserved_bytes"] = max(self._current["reserved_bytes"], reserved)
        for counter, value in self._current.items():
            self._peak[counter] = max(self._peak[counter], value)
            self._ever[counter] += max(value - before[counter], 0)


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def in_place_of_torchs(monkeypatch, cuda):
    """Have torch reset the peaks of this allocator."""
    for module in ("torch.cuda", "torch.cuda.memory"):
        monkeypatch.setattr(f"{module}.reset_peak_memory_stats", cuda.really_reset_peaks)
    return cuda


@contextmanager
def opened(cuda):
    device = CudaDevice(cuda)
    device.open()
    yield device
    device.close()


@pytest.fixture
def cuda(monkeypatch):
    return in_place_of_torchs(monkeypatch, SyntheticCuda())


@pytest.fixture
def device(cuda):
    with opened(cuda) as device:
        yield device


# Counting


def test_published_bytes_are_unknown_if_the_allocator_does_not_report(cuda, device):
    device.publishing = SimpleNamespace(own=lambda _: 0)
    assert (device.published(), device.published_excess()) == (0, 0)
    cuda.reports_allocations = lambda: False
    assert (device.published(), device.published_excess()) == (None, None)


def test_bytes_are_counted_as_they_were_asked_for_and_not_as_they_were_rounded(cuda, device):
    before = device.live()
    kept = [cuda.allocate(1), cuda.allocate(1000)]
    assert device.live() - before == 1001
    assert len(kept) == 2


def test_the_peak_is_that_since_the_last_was_taken(cuda, device):
    device.pop_peak()
    first = cuda.allocate(99 * MIB + 1)
    del first
    second = cuda.allocate(30 * MIB)
    assert device.pop_peak() == Peak(99 * MIB + 1, 100 * MIB)
    assert device.pop_peak().allocated == 30 * MIB
    del second
    assert device.pop_peak().allocated == 30 * MIB
    assert device.pop_peak().allocated == 0


def test_the_allocation_that_finds_the_statistics_is_in_no_peak(device):
    assert device.pop_peak().allocated == 0
    assert device.live() == 0


def test_reserved_memory_is_what_the_allocator_holds(cuda, device):
    block = cuda.allocate(1)
    assert device.reserved() == SEGMENT
    del block
    assert device.reserved() == SEGMENT
    device.quiesce()
    assert device.reserved() == 0


def test_turnover_counts_what_was_asked_for_whether_freed_or_not(cuda, device):
    before = device.turnover()
    kept = cuda.allocate(1001)
    cuda.allocate(7)
    torch.cuda.reset_peak_memory_stats()
    cuda.allocate(7)
    assert device.turnover() - before == 1015
    assert kept is not None


def test_foreign_bytes_cancel_out(cuda):
    foreign = cuda.allocate(70 * MIB)
    with opened(cuda) as device:
        own = cuda.allocate(10 * MIB)
        live_before, reserved_before = device.live(), device.reserved()
        window = device.open_window()
        temporary = cuda.allocate(4 * MIB)
        del temporary
        peak = device.close_window(window)
        figures = Figures(live_before - 10 * MIB, live_before, reserved_before, peak, device.live(), device.live())
    assert figures.memory_metrics() == {
        "peak_allocated": 14 * MIB,
        "peak_reserved": 14 * MIB,
        "retained": 0,
        "cyclic_garbage": 0,
    }
    assert own is not foreign


# Statistics that are not what they should be


@pytest.mark.parametrize(
    "made",
    [SyntheticCuda(counts=False), SyntheticCuda(counters=("reserved_bytes",))],
    ids=["never move", "of no tensors"],
)
def test_an_allocator_without_statistics_is_not_believed(made):
    device = CudaDevice(made)
    with pytest.raises(DeviceUnavailable, match="the CUDA allocator keeps no statistics") as caught:
        device.open()
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in str(caught.value)
    with pytest.raises(RuntimeError, match="not open"):
        device.live()


def test_without_counted_requests_bytes_are_rounded_and_recorded_without_history(monkeypatch):
    cuda = in_place_of_torchs(monkeypatch, SyntheticCuda(counters=("allocated_bytes", "reserved_bytes")))
    tokens = []
    with opened(cuda) as device:
        before = device.live()
        kept = cuda.allocate(1)
        assert device.live() - before == ROUNDING
        assert device.pop_peak().allocated == ROUNDING
        assert device.blocks() == {id(kept): ROUNDING}
        with device.recorded(tokens):
            del kept
    assert [token.nbytes for token in tokens] == [-ROUNDING]
    assert cuda.calls == ["recorded, without history"]


def test_an_allocator_whose_count_of_requests_stands_still_is_read_as_rounded(cuda):
    really = cuda.statistics
    cuda.statistics = lambda: {**really(), "requested_bytes.all.current": 0, "requested_bytes.all.peak": 0}
    with opened(cuda) as device:
        kept = cuda.allocate(1)
        assert device.live() == ROUNDING
    assert kept is not None


# Resets by measured code


def test_a_reset_by_measured_code_hides_no_peak_and_that_code_reads_its_own(cuda, device):
    first = cuda.allocate(100 * MIB)
    del first
    torch.cuda.reset_peak_memory_stats()
    second = cuda.allocate(30 * MIB)
    del second
    assert cuda.statistics()["requested_bytes.all.peak"] == 30 * MIB
    assert device.pop_peak() == Peak(100 * MIB, 100 * MIB)
    assert device.pop_peak().allocated == 0


def test_the_peak_after_a_reset_by_measured_code_counts_as_well(cuda, device):
    first = cuda.allocate(30 * MIB)
    del first
    torch.cuda.memory.reset_peak_memory_stats()
    second = cuda.allocate(100 * MIB)
    del second
    torch.cuda.reset_peak_memory_stats(0)
    assert device.pop_peak().allocated == 100 * MIB


def test_a_closed_device_leaves_resets_alone(cuda):
    before = torch.cuda.reset_peak_memory_stats
    with opened(cuda):
        assert torch.cuda.reset_peak_memory_stats is not before
    assert torch.cuda.reset_peak_memory_stats == before


def test_no_peak_reaches_back_before_the_device_was_opened(cuda, device):
    first = cuda.allocate(100 * MIB)
    del first
    torch.cuda.reset_peak_memory_stats()
    device.close()
    second = cuda.allocate(100 * MIB)
    del second
    device.open()
    assert device.pop_peak().allocated == 0


# Pausing


def test_what_happens_in_a_pause_is_not_in_the_peak_but_what_was_before_is(cuda, device):
    device.pop_peak()
    first = cuda.allocate(30 * MIB)
    del first
    with device.unrecorded():
        temporary = cuda.allocate(100 * MIB)
        del temporary
        torch.cuda.reset_peak_memory_stats()
    assert device.pop_peak().allocated == 30 * MIB
    assert device.pop_peak().allocated == 0


def test_what_a_pause_left_behind_is_live(cuda, device):
    with device.unrecorded():
        kept = cuda.allocate(MIB)
    assert device.live() == MIB
    assert kept is not None


def test_the_allocator_knows_every_block_so_that_there_is_none_to_adopt_or_believe(device):
    device.register_existing([])
    device.reconcile(frozenset(), [])
    assert device.live() == 0
    assert device.known() == frozenset()


# Recording


def test_what_is_recorded_is_told_with_its_operators_and_the_bytes_asked_for(cuda, device):
    tokens = []
    with device.recorded(tokens):
        (kept,) = cuda.run("aten::mul", 1001)
        cuda.run("aten::add", 7)
    (block,) = {token.address for token in tokens if isinstance(token, AllocationEvent) and token.nbytes == 1001}
    assert block == id(kept)
    shown = [token.nbytes if isinstance(token, AllocationEvent) else getattr(token, "name", "end") for token in tokens]
    assert shown == ["aten::mul", 1001, "end", "aten::add", 7, "end", -7]
    assert device.live() == 1001
    del kept
    assert device.live() == 0


def test_what_was_there_before_and_goes_is_told_with_the_bytes_that_were_asked_for(cuda, device):
    before = cuda.allocate(1001)
    address = id(before)
    tokens = []
    with device.recorded(tokens):
        del before
    assert [(token.address, token.nbytes) for token in tokens] == [(address, -1001)]


def test_the_tokens_of_another_thread_come_where_they_happened(cuda, device):
    tokens = []
    with device.recorded(tokens):
        cuda.run("aten::mul", 8)
        cuda.run("aten::add", 8)
        stretch = cuda._stretch
        # As the profiler's tree has what ran elsewhere.
        stretch.tokens[:] = stretch.tokens[4:] + stretch.tokens[:4]
    times = [token.time_ns for token in tokens]
    assert len(times) == 8
    assert times == sorted(times)


def test_the_peak_of_what_is_recorded_is_nobodys_and_that_before_it_is_kept(cuda, device):
    device.pop_peak()
    first = cuda.allocate(30 * MIB)
    del first
    with device.recorded([]):
        cuda.allocate(100 * MIB)
        torch.cuda.reset_peak_memory_stats()
    assert device.pop_peak().allocated == 30 * MIB
    assert device.pop_peak().allocated == 0


def record(device, run):
    with device.recorded([]):
        run()


def test_a_recording_that_does_not_add_up_to_the_statistics_is_not_believed(cuda, device):
    kept = []

    def run():
        kept.append(cuda.allocate(1001))
        cuda._stretch.tokens.clear()
        cuda._stretch.history.clear()

    with pytest.raises(MeasuringError, match=r"by 0, .* statistics \(requested_bytes\) changed by 1001"):
        record(device, run)


def test_a_recording_that_the_history_does_not_know_is_not_believed(cuda, device):
    def run():
        cuda.allocate(1001)
        cuda._stretch.history.clear()

    with pytest.raises(MeasuringError, match="1 GPU allocations in the profile do not match 0 allocations"):
        record(device, run)
    assert device.live() == 0


def test_what_is_raised_in_a_recording_comes_out_and_leaves_the_device_usable(cuda, device):
    def run():
        cuda.allocate(100 * MIB)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(device, run)
    assert device.pop_peak().allocated == 0


def test_the_blocks_are_those_that_tensors_hold_as_they_were_asked_for(cuda, device):
    kept, gone = cuda.allocate(1001), cuda.allocate(5000)
    assert device.blocks() == {id(kept): 1001, id(gone): 5000}
    address = id(gone)
    del gone
    assert address not in device.blocks()


def test_the_snapshot_is_that_of_the_latest_recording(cuda, device, tmp_path):
    with device.recorded([]):
        kept = [cuda.allocate(1)]
    with device.recorded([]):
        kept += [cuda.allocate(2), cuda.allocate(3)]
    device.keep_snapshot(tmp_path / "it.snapshot.pickle")
    assert (tmp_path / "it.snapshot.pickle").read_bytes() == pickle.dumps({"made up": 2})


def test_without_a_recording_there_is_no_snapshot(cuda, device, tmp_path):
    device.keep_snapshot(tmp_path / "it.snapshot.pickle")
    with device.recorded([]):
        pass
    device.close()
    device.keep_snapshot(tmp_path / "it.snapshot.pickle")
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_failed_leaves_no_snapshot_of_the_one_before(cuda, device, tmp_path):
    with device.recorded([]):
        pass
    with pytest.raises(KeyboardInterrupt), device.recorded([]):
        raise KeyboardInterrupt
    device.keep_snapshot(tmp_path / "it.snapshot.pickle")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_cannot_be_written_is_an_error_of_the_system(cuda, device, tmp_path):
    with device.recorded([]):
        pass
    (tmp_path / "no folder").write_text("a file", encoding="utf-8")
    with pytest.raises(OSError, match="no folder"):
        device.keep_snapshot(tmp_path / "no folder" / "it.snapshot.pickle")


# Opening and closing


@pytest.mark.parametrize(
    "read",
    [CudaDevice.live, CudaDevice.turnover, lambda device: device.recorded([]).__enter__()],
    ids=["live", "turnover", "recorded"],
)
def test_nothing_can_be_read_from_a_closed_device(cuda, read):
    with pytest.raises(RuntimeError, match="the cuda device is not open"):
        read(CudaDevice(cuda))


# Settling, time and place


def test_settling_waits_and_drops_workspaces_before_the_cache(cuda, device):
    device.quiesce()  # finds out once whether any are kept
    cuda.keep_workspace(32 * MIB)
    assert device.live() == 32 * MIB
    cuda.calls.clear()
    device.quiesce()
    assert cuda.calls == ["finish_backward", "synchronize", "clear_workspaces", "empty_cache"]
    assert (device.live(), device.reserved()) == (0, 0)


def test_releasing_workspaces_empties_the_cache_which_frees_other_streams_blocks(cuda, device):
    cuda.keep_workspace(32 * MIB)
    device.release_workspaces()
    assert (device.live(), device.reserved()) == (0, 0)


def test_random_numbers_are_those_of_this_gpu(cuda):
    assert CudaDevice(cuda).random_devices() == (0,)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_a_gpu_since_ampere_lacks_nothing(cuda, capability):
    cuda.capability = capability
    assert [feature for feature in FEATURES if CudaDevice(cuda).emulates(feature) is not None] == []
    assert [feature for feature in FEATURES if CudaDevice(cuda).lacks(feature) is not None] == []


@pytest.mark.parametrize("capability", [(7, 5), (6, 1)])
def test_a_gpu_before_ampere_lacks_tf32_and_emulates_bfloat16_and_says_so(cuda, capability):
    cuda.capability = capability
    has = "{}.{}".format(*capability)
    device = CudaDevice(cuda)
    lacking = {feature: said for feature in FEATURES if (said := device.lacks(feature)) is not None}
    assert lacking == {"tf32": f"TF32 needs a GPU of compute capability 8.0, and this one has {has}"}
    emulated = {feature: said for feature in FEATURES if (said := device.emulates(feature)) is not None}
    why = f"torch emulates bfloat16 slowly on a GPU of compute capability {has}; a GPU of 8.0 or higher computes in bfloat16"
    assert emulated == dict.fromkeys(("amp-bf16", "bf16", "mp-bf16"), why)
    assert device.why_cannot_run(ValueError("no data")) is None
    assert "needs compute capability 8.0" in device.why_cannot_run(RuntimeError("No available kernel."))


@pytest.mark.parametrize(
    ("variables", "allocator"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        ({"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""}, "default"),
    ],
)
def test_the_environment_names_what_moves_the_figures(cuda, monkeypatch, variables, allocator):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = CudaDevice(cuda).environment()
    assert (environment.slug, environment.device) == ("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3")
    assert dict(environment.details) == {
        "total_memory": 85_017_100_288,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": "580.95.05",
        "allocator": allocator,
        "machine": proc.machine(),
    }


# Conditions and pace


def test_conditions_are_the_allocators_retries_and_what_nvml_tells(cuda, monkeypatch):
    monkeypatch.setattr(proc, "seconds_of_children", lambda: 0.0)
    cuda.retries = 3
    cuda.nvml = GpuState(frozenset({"SwPowerCap"}), 1.41e9, 1.98e9, OtherProcesses(1, frozenset({4711})))
    conditions = CudaDevice(cuda).conditions()
    assert conditions.retries == 3
    assert (conditions.clock_events, conditions.sm_clock) == (frozenset({"SwPowerCap"}), 1.41e9)
    assert (conditions.sm_clock_default, conditions.other_processes) == (1.98e9, 1)
    assert conditions.other_pids == frozenset({4711})
    assert (conditions.other_cpu_seconds, conditions.stolen) == (None, None)


def test_beside_children_conditions_have_the_bound_of_their_waiting(cuda, monkeypatch):
    monkeypatch.setattr(proc, "waited_seconds", lambda: 0.25)
    monkeypatch.setattr(proc, "cpu_times", lambda: proc.CpuTimes(busy=30.0, stolen=0.5, cores=2))
    monkeypatch.setattr(proc, "seconds_of_children", lambda: 4.0)
    monkeypatch.setattr("time.process_time", lambda: 10.0)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    monkeypatch.setattr("time.thread_time", lambda: 5.0)
    conditions = CudaDevice(cuda).conditions()
    assert (conditions.waited, conditions.off_core, conditions.children_cpu_seconds) == (0.25, 2.0, 4.0)
    assert (conditions.other_cpu_seconds, conditions.stolen, conditions.cores) == (16.0, None, None)


def test_without_nvml_nothing_is_known_of_the_clocks_and_of_others(cuda):
    conditions = CudaDevice(cuda).conditions()
    assert (conditions.clock_events, conditions.sm_clock, conditions.other_processes) == (None, None, None)
    assert CudaDevice(cuda).pace() is None


def test_the_pace_of_a_gpu_is_its_sm_clock(cuda):
    cuda.nvml = GpuState(sm_clock=1.755e9)
    assert CudaDevice(cuda).pace() == 1.755e9


@pytest.mark.parametrize(
    ("device", "slug"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia-a100-sxm4-40gb-mig-1g-5gb"),
        ("AMD Instinct MI300X (XCD)", "amd-instinct-mi300x-xcd"),
    ],
)
def test_a_gpus_name_becomes_the_name_of_a_folder(device, slug):
    assert cuda_slug(device) == slug
