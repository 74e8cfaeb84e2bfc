"""The CPU as a device: exact bytes of tensors, from torch's own allocator events."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from pytest_gpumem.base.errors import DeviceUnavailable, MeasuringError
from pytest_gpumem.facts.values.events import AllocationEvent, Token
from pytest_gpumem.measuring.devices import proc
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.devices.device_lock import DeviceLock
from pytest_gpumem.measuring.step_config.config import CHECKPOINTS, PRECISIONS
from pytest_gpumem.torch_support.private_api.numerics import bfloat16_instructions
from pytest_gpumem.torch_support.reachability import storages_of
from tests.support.processes import state_of

KB = 1000
MB = 1000 * KB


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


# Counting


def test_a_tensor_is_as_many_bytes_as_it_asked_for(device):
    kept = [tensor(1), tensor(4097), torch.empty(3, 5, dtype=torch.float64)]
    assert device.live() == 1 + 4097 + 3 * 5 * 8
    del kept
    assert device.live() == 0


def test_a_known_pattern_of_allocations_has_a_known_peak(device):
    first = tensor(100 * KB)
    second = tensor(50 * KB)
    del first
    third = tensor(20 * KB)
    del second
    assert device.live() == 20 * KB
    assert device.pop_peak() == Peak(150 * KB)
    del third
    assert device.pop_peak() == Peak(20 * KB)
    assert device.pop_peak() == Peak(0)


def test_readings_of_one_moment_are_those_of_its_beginning(device):
    kept = [tensor(10 * KB)]
    with device.one_moment():
        kept.append(tensor(KB))
        assert (device.live(), device.pop_peak(), len(device.known())) == (10 * KB, Peak(10 * KB), 1)
    assert device.live() == 11 * KB
    with suppress(KeyboardInterrupt), device.one_moment():
        raise KeyboardInterrupt
    kept.clear()
    assert device.live() == 0


def test_readings_take_no_memory(device):
    before = device.live()
    for _ in range(3):
        device.live()
        device.pop_peak()
        device.known()
    assert device.live() == before
    assert device.pop_peak() == Peak(before)


def test_a_device_opened_again_begins_anew(device):
    kept = tensor(KB)
    assert device.live() == KB
    device.close()
    device.open()
    assert device.live() == 0
    assert kept.numel() == KB


# Blocks from before


def test_of_blocks_from_before_the_free_of_an_adopted_one_is_seen(device):
    # As tensors of shared fixtures, they are made while the device is open an earlier time.
    tensors = [tensor(100 * KB), tensor(30 * KB)]
    device.close()
    device.open()
    device.register_existing(storages_of(tensors[:1], device.torch_device))
    assert device.live() == 100 * KB
    tensors.pop(0)
    assert device.live() == 0
    tensors.pop(0)
    assert device.live() == 0


@pytest.fixture
def adopted():
    """An open device, and tensors that it has adopted: made while nobody counted, as those of a module's globals are."""
    gc.collect()  # garbage of another test would be freed among what is recorded
    tensors = [tensor(100 * KB), tensor(70 * KB), tensor(40 * KB)]
    device = CpuDevice()
    device.open()
    device.register_existing(storages_of(tensors, device.torch_device))
    assert device.live() == 210 * KB
    device.pop_peak()
    yield device, tensors
    device.close()


def test_the_free_of_a_block_that_nobody_counted_is_seen_in_its_place(adopted):
    device, tensors = adopted
    first = tensor(50 * KB)
    tensors.pop(0)
    second = tensor(80 * KB)
    assert device.pop_peak() == Peak(260 * KB)
    assert device.live() == (70 + 40 + 50 + 80) * KB
    assert first.numel() + second.numel() == 130 * KB


def test_a_block_that_nobody_counted_is_seen_to_be_freed_in_a_pause(adopted):
    device, tensors = adopted
    with device.unrecorded():
        tensors.pop(0)
    assert device.live() == 110 * KB
    tensors.pop(0)
    kept = tensor(KB)
    assert device.live() == 40 * KB + kept.numel()
    assert device.pop_peak() == Peak(210 * KB)


def test_a_block_that_nobody_counted_lives_as_long_as_its_last_view(adopted):
    device, tensors = adopted
    view = tensors.pop(0)[:10]
    assert device.live() == 210 * KB
    del view
    assert device.live() == 110 * KB


def test_looking_at_blocks_that_nobody_counted_does_not_keep_them(adopted):
    device, tensors = adopted
    storages = list(storages_of(tensors, device.torch_device))
    del storages
    tensors.clear()
    assert device.live() == 0


@pytest.mark.parametrize("nbytes", [53, 59, 61])
def test_no_size_of_a_tensor_is_taken_for_a_free_of_another(adopted, nbytes):
    device, tensors = adopted
    # One of them is where the mark of a free will be.
    small = [tensor(nbytes) for _ in range(100)]
    del small
    large = tensor(500 * KB)
    del large
    tensors.pop(0)
    assert device.pop_peak() == Peak(710 * KB)
    assert device.live() == 110 * KB


def test_blocks_that_nobody_counted_may_be_freed_after_the_device_was_closed(adopted):
    device, tensors = adopted
    device.close()
    tensors.clear()
    device.open()
    assert device.live() == 0


# Settling


def test_settling_frees_what_only_cycles_hold(device):
    gc.disable()
    try:
        cycle = [tensor(100 * KB)]
        cycle.append(cycle)
        del cycle
        assert device.live() == 100 * KB
        device.quiesce()
        assert device.live() == 0
    finally:
        gc.enable()


# Threads


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_torch_runs_on_one_thread_while_the_device_is_open():
    device = CpuDevice()
    device.open()
    assert torch.get_num_threads() == 1
    for _ in range(2):
        device.close()
        assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_are_given_back_when_the_device_cannot_be_used(monkeypatch):
    monkeypatch.setattr("pytest_gpumem.measuring.devices.cpu.allocation_events", lambda _profiler: [])
    device = CpuDevice()
    with pytest.raises(DeviceUnavailable, match="does not report host allocations"):
        device.open()
    assert torch.get_num_threads() == 3
    monkeypatch.undo()
    device.open()
    device.close()


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("ends", ["open", "close"])
def test_whatever_ends_opening_or_closing_threads_and_the_lock_are_given_back(monkeypatch, tmp_path, ends):
    def interrupted(*_):
        raise KeyboardInterrupt

    device = CpuDevice(DeviceLock("cpu", folder=tmp_path))
    if ends == "close":
        device.open()
    monkeypatch.setattr("pytest_gpumem.measuring.devices.cpu.allocation_events", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(device, ends)()
    assert torch.get_num_threads() == 3
    assert state_of(tmp_path) == "free"
    monkeypatch.undo()
    device.open()
    assert (device.live(), state_of(tmp_path)) == (0, "shared")
    device.close()


# Misuse


@pytest.mark.parametrize(
    "read",
    [
        CpuDevice.live,
        lambda device: device.register_existing([]),
        lambda device: device.unrecorded().__enter__(),
        lambda device: device.recorded([]).__enter__(),
    ],
    ids=["live", "register_existing", "unrecorded", "recorded"],
)
def test_nothing_can_be_read_from_a_closed_device(read):
    with pytest.raises(RuntimeError, match="the cpu device is not open"):
        read(CpuDevice())


def test_a_profiler_inside_fails_the_next_reading_and_the_one_after_works(device):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        kept = tensor(KB)
    with pytest.raises(MeasuringError, match="only one profiler can run at a time"):
        device.live()
    more = tensor(KB)
    assert device.live() == more.numel()
    assert kept.numel() == KB


def test_a_device_can_be_closed_after_a_profiler_was_within(device):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass
    device.close()
    device.open()
    kept = tensor(KB)
    assert device.live() == kept.numel()


# Pausing


def test_a_pause_records_nothing_and_keeps_what_was_there(device):
    first = tensor(100 * KB)
    del first
    before = tensor(30 * KB)
    with device.unrecorded():
        temporary = tensor(500 * KB)
        del temporary
    assert device.live() == before.numel()
    assert device.pop_peak() == Peak(100 * KB)


def test_of_what_a_pause_left_only_what_is_believed_is_live(device):
    since = device.known()
    with device.unrecorded():
        left = [tensor(30 * KB), tensor(70 * KB)]
    device.reconcile(since, storages_of(left[:1], device.torch_device))
    assert device.live() == 30 * KB
    assert device.pop_peak() == Peak(30 * KB)


def test_what_was_freed_in_a_pause_is_not_believed_to_be_live(device):
    since = device.known()
    freed = tensor(100 * KB)
    with device.unrecorded():
        del freed
    device.reconcile(since, [])
    assert device.live() == 0


def test_what_was_known_before_is_believed_whatever_is_told(device):
    before = tensor(100 * KB)
    since = device.known()
    with device.unrecorded():
        pass
    device.reconcile(since, [])
    assert device.live() == before.numel()
    del before
    assert device.live() == 0


def test_counting_goes_on_after_an_error_in_a_pause(device):
    with pytest.raises(ZeroDivisionError), device.unrecorded():
        raise ZeroDivisionError
    kept = tensor(KB)
    assert device.live() == kept.numel()


def test_no_profiler_slows_a_pause_down(device):
    with device.unrecorded():
        assert not torch.autograd._profiler_enabled()
    assert torch.autograd._profiler_enabled()


# Recording


def events_of(tokens: list[Token]) -> list[tuple[int, int]]:
    return [(token.address, token.nbytes) for token in tokens if isinstance(token, AllocationEvent)]


def test_a_recorded_stretch_tells_every_allocation_and_free_and_no_more(device):
    tokens: list[Token] = []
    outside = tensor(10 * KB)
    with device.recorded(tokens):
        first, second = tensor(1 * KB), tensor(2 * KB)
        addresses = [first.data_ptr(), second.data_ptr()]
        del first
    tensor(10 * KB)
    assert events_of(tokens) == [(addresses[0], KB), (addresses[1], 2 * KB), (addresses[0], -KB)]
    assert outside.numel() == 10 * KB


def test_the_device_counts_on_through_a_recorded_stretch(device):
    before = tensor(100 * KB)
    device.pop_peak()
    with device.recorded([]):
        temporary = tensor(50 * KB)
        del temporary
        kept = tensor(20 * KB)
        del before
    assert device.live() == 20 * KB
    assert device.pop_peak() == Peak(150 * KB)
    assert device.blocks() == {kept.data_ptr(): 20 * KB}
    tensor(30 * KB)
    assert device.pop_peak() == Peak(50 * KB), "recording is over, and counting goes on"


def test_the_free_of_a_block_that_nobody_counted_has_its_place_in_a_recording(adopted):
    device, tensors = adopted
    addresses = [one.data_ptr() for one in tensors]
    tokens: list[Token] = []
    with device.recorded(tokens):
        first = tensor(1 * KB)
        tensors.clear()
        second = tensor(2 * KB)
    told = events_of(tokens)
    assert told[0] == (first.data_ptr(), KB)
    assert told[-1] == (second.data_ptr(), 2 * KB)
    assert {address for address, nbytes in told[1:-1] if nbytes < 0} == set(addresses)
    # torch tells of a free again where it remembers a block of before at this address; marks of ours are told of never.
    assert {nbytes for _, nbytes in told[1:-1]} <= {-1, -100 * KB, -70 * KB, -40 * KB}


def test_a_recorded_stretch_that_raises_is_told_and_counted_all_the_same(device):
    tokens: list[Token] = []
    kept = []

    def stretch() -> None:
        with device.recorded(tokens):
            kept.append(tensor(KB))
            raise ValueError("by the step")

    with pytest.raises(ValueError, match="by the step"):
        stretch()
    assert events_of(tokens) == [(kept[0].data_ptr(), KB)]
    assert device.live() == KB


def test_a_profiler_within_a_recorded_stretch_is_an_error_and_the_device_can_go_on(device):
    with pytest.raises(MeasuringError, match="cut short"), device.recorded([]), torch.profiler.profile():
        tensor(KB)
    before = device.live()
    kept = tensor(KB)
    assert device.live() - before == kept.numel()


def test_what_a_profile_keeps_alive_is_live_until_it_is_deleted(device):
    rows = torch.ones(4, KB)
    before = device.live()
    with device.recorded([]) as profiles:
        torch.vmap(lambda row: (row * 2 + 1).square())(rows)
    assert device.live() - before == 2 * rows.nbytes, "the products and the sums"
    profiles.clear()
    assert device.live() == before
    with device.recorded([], operands=False):
        torch.vmap(lambda row: (row * 2 + 1).square())(rows)
    assert device.live() == before


def test_blocks_are_told_by_address_with_their_bytes_as_they_were_when_asked_for(device):
    kept = [tensor(KB), tensor(2 * KB)]
    both = device.blocks()
    assert both == {one.data_ptr(): one.numel() for one in kept}
    kept.pop()
    assert device.blocks() == {one.data_ptr(): one.numel() for one in kept}
    assert len(both) == 2


def test_what_was_allocated_in_all_is_counted_whether_freed_or_not(device):
    before = device.turnover()
    kept = tensor(KB)
    for _ in range(3):
        tensor(2 * KB)
    device.live()
    assert device.turnover() - before == 7 * KB
    with device.recorded([]):
        tensor(5 * KB)
    assert device.turnover() - before == 12 * KB
    assert kept.numel() == KB


# Time and place


def test_time_is_that_of_the_monotonic_clock(device, monkeypatch):
    readings = iter([10.0, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(readings))
    ran = []
    assert device.time(lambda: ran.append(True)) == 2.5
    assert ran == [True]


def test_the_environment_names_what_moves_the_figures(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    environment = CpuDevice().environment()
    assert (environment.slug, environment.device) == ("cpu-amd64", "CPU (AMD64)")
    assert dict(environment.details) == {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_bfloat16": bfloat16_instructions(),
        "machine": proc.machine(),
    }
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert CpuDevice().environment().details["cpu_bfloat16"] == f"{bfloat16_instructions()}, at most AVX2"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "cpu_bfloat16" not in CpuDevice().environment().details


def test_conditions_are_this_threads_waiting_and_what_others_used(device, monkeypatch):
    monkeypatch.setattr(proc, "waited_seconds", lambda: 0.25)
    monkeypatch.setattr(proc, "cpu_times", lambda: proc.CpuTimes(busy=30.0, stolen=0.5, cores=2))
    monkeypatch.setattr("time.process_time", lambda: 10.0)
    monkeypatch.setattr(proc, "seconds_of_children", lambda: 4.0)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    monkeypatch.setattr("time.thread_time", lambda: 5.0)
    conditions = device.conditions()
    assert (conditions.seconds, conditions.waited, conditions.off_core) == (7.0, 0.25, 2.0)
    assert conditions.children_cpu_seconds == 4.0
    assert (conditions.other_cpu_seconds, conditions.stolen, conditions.cores) == (16.0, 0.5, 2)


def test_other_ranks_of_the_job_are_not_others(monkeypatch):
    monkeypatch.setattr(proc, "cpu_times", lambda: proc.CpuTimes(busy=30.0, stolen=0.5, cores=2))
    monkeypatch.setattr("time.process_time", lambda: 10.0)
    monkeypatch.setattr(proc, "seconds_of_children", lambda: 4.0)
    monkeypatch.setattr(proc, "seconds_of", lambda pids: {(101, 102): 9.0}[tuple(pids)])
    assert CpuDevice(other_ranks=lambda: (101, 102)).conditions().other_cpu_seconds == 7.0


def test_conditions_can_be_read_where_nothing_reports_the_load(device, monkeypatch):
    monkeypatch.setattr(proc, "waited_seconds", lambda: None)
    monkeypatch.setattr("pytest_gpumem.measuring.devices.load_source.load_source", lambda: None)
    conditions = device.conditions()
    assert (conditions.waited, conditions.other_cpu_seconds, conditions.stolen, conditions.cores) == (
        None,
        None,
        None,
        None,
    )


def test_the_pace_is_a_rate_and_taking_it_is_not_recorded(device):
    with device.unrecorded():
        assert device.pace() > 0
    before = device.turnover()
    device.pace()
    assert device.live() == 0
    assert device.turnover() == before


# Beside other ranks


@pytest.fixture
def rank(monkeypatch):
    """A device of a rank, whose collectives are held by a thread a little longer than by the rank."""
    threads = []

    def held(block: list[torch.Tensor]) -> None:
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        block.clear()

    def handed_over(nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        threads.append(threading.Thread(target=held, args=([tensor],)))
        threads[-1].start()
        return tensor

    monkeypatch.setattr(dist.Work, "wait", handed_over)
    monkeypatch.setattr(dist, "_broadcast_coalesced", lambda nbytes: handed_over(nbytes) is None)
    device = CpuDevice(other_ranks=tuple)
    device.open()
    yield device
    device.close()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("holder", "name"), [(dist.Work, "wait"), (dist, "_broadcast_coalesced")], ids=["wait", "broadcast"]
)
def test_what_a_thread_of_a_collective_is_the_last_to_hold_is_seen_to_be_freed(rank, holder, name):
    before = rank.live()
    for _ in range(3):
        with rank.window() as window:
            getattr(holder, name)(MB)
        assert window.highest.allocated - before == MB
        assert rank.live() == before


def test_collectives_are_as_they_were_when_the_device_is_closed():
    before = dist.Work.wait, dist._broadcast_coalesced
    device = CpuDevice(other_ranks=tuple)
    device.open()
    assert dist.Work.wait is not before[0]
    device.close()
    assert (dist.Work.wait, dist._broadcast_coalesced) == before


# What it cannot do


def test_the_cpu_lacks_tf32_and_a_host_to_move_tensors_to_and_says_so():
    features = [*PRECISIONS, *(word.partition(":")[0] for word in CHECKPOINTS)]
    lacking = {feature: said for feature in features if (said := CpuDevice().lacks(feature)) is not None}
    assert lacking == {
        "tf32": "TF32 is a format of NVIDIA GPUs, and this is a CPU",
        "offload": "offloading moves tensors from a GPU to the host, and the CPU is the host",
    }


def test_where_a_release_has_no_events_of_the_cpu_models_are_not_fully_sharded_there(monkeypatch):
    monkeypatch.setattr(torch.cpu, "current_stream", object)
    assert str(CpuDevice().lacks("fully_shard")).endswith(" has no events on a CPU")
