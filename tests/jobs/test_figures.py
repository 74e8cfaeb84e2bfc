"""A job's figures: of each process and of each GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.jobs.figures import (
    ALL,
    OwnPeak,
    is_active,
    job_figures,
    killed_text,
    process_names,
    program_name,
)

SPAWNED = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python", "train.py", "--lr", "0.1"], "train.py"),
        (["python", "-u", "-X", "dev", "-Wignore", "-W", "error", "jobs/train.py"], "train.py"),
        (
            ["python3", "-m", "vllm.entrypoints.openai.api_server", "--port", "8000"],
            "-m vllm.entrypoints.openai.api_server",
        ),
        (["python", "-c", "print(1)"], "python -c"),
        (["python", "-c", SPAWNED, "--multiprocessing-fork"], "multiprocessing"),
        (["python", "-c", "from multiprocessing.forkserver import main; main(1)"], "multiprocessing"),
        (["python", "-"], "python"),
        (["python", "-m"], "-m"),
        (["python"], "python"),
        ([], "python"),
    ],
)
def test_a_program_is_named_without_its_interpreter_options_and_arguments(command, name):
    assert program_name(command) == name


def process(pid: int, script: str = "train.py", rank: int | None = None, started: int = 0) -> ProcessIdentity:
    return ProcessIdentity(pid, started, ("python", script), rank=rank)


def names_of(processes):
    return [each.name for each in process_names(processes)]


@pytest.mark.parametrize(
    ("identity", "text"),
    [
        (
            ProcessIdentity(
                1, command=("/bin/python", "-m", "serve", "--port", "8000"), parent=("/bin/python", "/bin/torchrun")
            ),
            "process 1 of 1: python -m serve --port 8000, child of torchrun, ended",
        ),
        (ProcessIdentity(1, command=("python", "a.py"), rank=0), "process 1 of 1: python a.py, rank 0, ended"),
        (
            ProcessIdentity(1, command=("python", "-c", SPAWNED), name="SpawnProcess-1", parent=("/bin/sh", "-c", "x")),
            "process 1 of 1: multiprocessing SpawnProcess-1, child of sh, ended",
        ),
    ],
)
def test_a_process_is_described_by_its_command_and_its_parents_program(identity, text):
    usage = ProcessUsage(1, 2, (DeviceUsage(0, 1000, 2000, 0),), process=identity)
    (process,) = job_figures([usage]).processes
    assert process.details.text == text


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "-m", "pytest", "-q"), "pytest"),
        (("python", "-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"), "pytest"),
        (("python", "/bin/pytest"), "pytest"),
        (("python", "/bin/gpumem", "run", "train.py"), "gpumem"),
    ],
)
def test_the_tests_own_process_is_called_pytest_with_xdist_as_well(command, name):
    usage = ProcessUsage(
        1, 2, (DeviceUsage(0, 1000, 2000, 0),), process=ProcessIdentity(8, parent=command, parent_pid=7)
    )
    (process,) = job_figures([usage], own_pid=7).processes
    assert process.details.parent == name
    (process,) = job_figures([usage], own_pid=6).processes
    assert process.details.parent == program_name(command)


def test_only_a_number_that_was_given_here_is_no_part_of_the_program():
    given = [ProcessIdentity(pid, command=("python", "-c", SPAWNED), name=f"stage {pid}") for pid in (1, 2)]
    assert [name.program for name in process_names([*given, process(3), process(4), process(5, rank=0)])] == [
        *("stage 1", "stage 2", "train.py", "train.py", "train.py rank 0")
    ]


def test_equal_programs_have_their_rank_or_a_number():
    processes = [process(1, "serve.py"), process(2), process(3, "serve.py"), process(4, rank=0), process(5, rank=1)]
    assert names_of(processes) == ["serve.py", "train.py", "serve.py 2", "train.py rank 0", "train.py rank 1"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("encoder", "encoder"),
        ("SpawnProcess-3", "multiprocessing"),
        ("ForkPoolWorker-2:1", "multiprocessing"),
        ("", "multiprocessing"),
    ],
)
def test_a_name_that_the_program_gave_to_a_process_is_its_name(given, name):
    assert names_of([ProcessIdentity(1, command=("python", "-c", SPAWNED), name=given)]) == [name]


@pytest.mark.parametrize(("given", "name"), [("worker-6223", "worker-N"), ("gpu-12", "gpu-12")])
def test_a_long_number_in_a_name_is_no_part_of_it(given, name):
    assert names_of([ProcessIdentity(1, command=("python", "-c", SPAWNED), name=given)]) == [name]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("worker rank 0 of 2", "worker rank 0/2"),
        ("worker rank 0 of", "worker rank 0/"),
        ("worker on cuda:1", "worker (cuda:1)"),
        ("worker \udce9", "worker \\udce9"),
        ("w" * 101, "w" * 100 + "..."),
    ],
)
def test_a_name_that_the_store_cannot_keep_is_changed(given, name):
    assert names_of([ProcessIdentity(1, command=("python", "-c", SPAWNED), name=given)]) == [name]
    assert names_of([process(1, given)]) == [name]


def test_programs_that_differ_by_a_number_are_different():
    assert names_of([process(1, "train_256.py"), process(2, "train_512.py")]) == ["train_256.py", "train_512.py"]


def test_ranks_that_torchrun_started_again_are_other_processes():
    processes = [ProcessIdentity(pid, command=("python", "t.py"), rank=0, restart=pid) for pid in range(2)]
    assert names_of(processes) == ["t.py rank 0", "t.py rank 0 restart 1"]


def usage(
    identity: ProcessIdentity, *peaks: tuple[int, int], span: tuple[int, int] = (1, 2), **more: object
) -> ProcessUsage:
    devices = tuple(DeviceUsage(gpu, allocated, 2 * allocated, 0) for gpu, allocated in peaks)
    return ProcessUsage(**{"began": span[0], "ended": span[1], "devices": devices, "process": identity, **more})


def test_a_gpus_figure_is_the_sum_of_its_processes_and_said_to_be_an_upper_bound():
    job = job_figures([usage(process(8, started=2), (0, 300)), usage(process(9, started=1), (0, 100), (1, 500))])
    assert [(one.name, one.by_gpu["cuda:0"]["peak_allocated"]) for one in job.processes] == [
        ("train.py", 100),
        ("train.py 2", 300),
    ]
    assert job.by_gpu == {
        "cuda:0": {"peak_allocated": 400, "peak_reserved": 800},
        "cuda:1": {"peak_allocated": 500, "peak_reserved": 1000},
    }
    (note,) = job.notes
    assert note.startswith("cuda:0: 400 B is the sum of 2 processes' peaks, an upper bound")


def timed(pid: int, started: int, written: int, ended: int | None = 2, peak: int = 100, **more: object) -> ProcessUsage:
    """A process on a GPU, from its start to its last report in ticks of the clock."""
    identity = ProcessIdentity(pid, started, ("python", "train.py"))
    return usage(identity, (0, peak), span=(pid, ended), written=written, **more)


@pytest.mark.parametrize(
    ("second", "peak"),
    [
        pytest.param(timed(2, started=20, written=30), 100, id="one after the other"),
        pytest.param(timed(2, started=19, written=30), 200, id="at the same time for a tick"),
        pytest.param(timed(2, started=12, written=13), 200, id="one within the other"),
        pytest.param(timed(2, started=0, written=30), 200, id="an unknown start"),
    ],
)
def test_peaks_are_added_unless_a_process_started_after_the_others_end(second, peak):
    usages = [timed(1, started=10, written=20), second]
    for order in (usages, usages[::-1]):
        job = job_figures(order)
        assert job.by_gpu["cuda:0"] == {"peak_allocated": peak, "peak_reserved": 2 * peak}
        assert bool(job.notes) == (peak == 200)


def test_a_program_and_the_program_that_replaces_it_by_exec_are_not_added():
    first, second = (timed(1, started=10, written=ticks, peak=peak) for ticks, peak in ((20, 100), (30, 300)))
    job = job_figures([first, replace(second, began=5)])
    assert job.by_gpu["cuda:0"]["peak_allocated"] == 300
    assert job.notes == ()


def test_a_process_that_still_runs_overlaps_with_every_later_process():
    running = timed(1, started=10, written=20, ended=None)
    later = timed(2, started=90, written=95)
    earlier = timed(3, started=1, written=5, peak=1000)
    assert job_figures([running, later]).by_gpu["cuda:0"]["peak_allocated"] == 200
    assert job_figures([running, later, earlier]).by_gpu["cuda:0"]["peak_allocated"] == 1000


def test_the_largest_sum_is_that_of_processes_at_the_start_of_one_of_them():
    """A runs during B and C, which follow each other."""
    usages = [timed(1, 10, 100, peak=5), timed(2, 20, 30, peak=70), timed(3, 40, 50, peak=60)]
    job = job_figures(usages)
    assert job.by_gpu["cuda:0"]["peak_allocated"] == 75
    assert job.notes[0].startswith("cuda:0: 75 B is the sum of 2 processes' peaks")


def test_ranks_that_torchrun_starts_again_are_not_added_to_the_ranks_before():
    attempts = [
        ProcessIdentity(pid, 10 + 50 * (pid // 2), ("t.py",), rank=pid % 2, restart=pid // 2) for pid in range(4)
    ]
    restarted = job_figures([usage(one, (0, 100 + one.pid), written=one.started + 40) for one in attempts])
    assert restarted.by_gpu["cuda:0"]["peak_allocated"] == 102 + 103
    assert "205 B is the sum of 2 processes' peaks" in restarted.notes[0]


def rank(number: int, peak: int, restart: int = 0, pid: int = 0) -> ProcessUsage:
    identity = ProcessIdentity(pid, started=pid, command=("python", "train.py"), rank=number, restart=restart)
    return usage(identity, (number, peak))


def test_imbalance_is_the_largest_rank_over_the_smallest_and_a_note_names_both():
    job = job_figures([rank(0, 4000), rank(1, 3000), rank(2, 5000)])
    assert job.imbalance == 1.667
    assert job.notes == (
        "train.py rank 2 has the largest peak of all ranks, 5.00 kB, and train.py rank 1 the smallest, 3.00 kB",
    )


@pytest.mark.parametrize("more", [0, 8])
def test_ranks_that_hardly_differ_have_an_imbalance_of_one_and_no_note(more):
    job = job_figures([rank(0, 4_000_000), rank(1, 4_000_000 + more)])
    assert (job.imbalance, job.notes) == (1, ())


def test_of_ranks_with_equal_peaks_the_lowest_is_named():
    usages = [rank(number, peak) for number, peak in enumerate((4000, 5000, 4000, 5000))]
    for order in (usages, usages[::-1]):
        (note,) = job_figures(order).notes
        assert note.startswith("train.py rank 1 has")
        assert "train.py rank 0 the smallest" in note


@pytest.mark.parametrize(
    "usages",
    [
        [],
        [rank(0, 4000)],
        [rank(0, 4000), usage(process(5), (1, 5000))],
        [rank(0, 4000), rank(0, 5000, pid=3)],
        [rank(0, 4000), rank(1, 5000, restart=1)],
        [rank(0, 4000), usage(process(1, rank=1))],
        [rank(0, 4000), rank(1, 0)],
    ],
    ids=["nothing", "one", "without a rank", "child", "of two attempts", "on the CPU", "0 bytes"],
)
def test_a_job_with_fewer_than_two_ranks_has_no_imbalance(usages):
    assert job_figures(usages).imbalance is None
    assert not any("rank" in note for note in job_figures(usages).notes)


@pytest.mark.parametrize(("peak", "ratio", "largest"), [(1000, 1.25, "rank 1"), (8000, 1.6, "rank 0 2")])
def test_a_rank_with_several_processes_has_the_peak_of_its_largest_process(peak, ratio, largest):
    usages = [rank(0, 4000, pid=1), rank(1, 5000, pid=2), rank(0, peak, pid=3)]
    for order in (usages, usages[::-1]):
        job = job_figures(order)
        assert job.imbalance == ratio
        assert job.notes[-1].startswith(f"train.py {largest} has the largest peak")


def test_a_rank_on_several_gpus_has_the_peak_of_its_fullest_gpu():
    job = job_figures([usage(process(1, rank=0), (0, 4000), (1, 6000)), usage(process(2, rank=1), (2, 3000))])
    assert job.imbalance == 2


def test_only_the_last_attempt_of_torchrun_counts_for_the_imbalance():
    first, last = [rank(0, 9000), rank(1, 1000)], [rank(0, 4000, restart=1), rank(1, 5000, restart=1)]
    job = job_figures([*first, *last])
    assert job.imbalance == 1.25
    assert job.notes[-1].startswith("train.py rank 1 restart 1 has the largest peak of all ranks, 5.00 kB")


def in_window(requested: int = 90, *, before: int = 40, live: int = 40, allocations: int = 1, **more: object):
    """A server that was there before the window and still runs. The allocator rounded its 90 requested bytes to 100."""
    device = DeviceUsage(0, 100, 200, 0, requested, live, before, allocations)
    identity = ProcessIdentity(7, 5, ("python", "server.py"))
    values = {"began": 1, "ended": None, "devices": (device,), "process": identity, "window": 3, "written": 50}
    return ProcessUsage(**{**values, **more})


OWN = {0: OwnPeak("cuda:0", 1000)}


@pytest.mark.parametrize(
    ("measured", "metrics"),
    [
        pytest.param(
            timed(1, 10, 20), {"peak_allocated": 100, "peak_reserved": 200}, id="it began and ended in the window"
        ),
        pytest.param(in_window(), {"peak_allocated": 90, "retained": 0}, id="it was there before and after"),
        pytest.param(in_window(live=70), {"peak_allocated": 90, "retained": 30}, id="it kept 30 bytes"),
        pytest.param(in_window(live=10), {"peak_allocated": 90, "retained": 0}, id="it freed earlier bytes"),
        pytest.param(
            in_window(window=None), {"peak_allocated": 90, "retained": 0}, id="it began in the window and goes on"
        ),
        pytest.param(in_window(ended=9), {"peak_allocated": 90}, id="it was there before and ended"),
        pytest.param(in_window(requested=0), {"peak_allocated": 100, "retained": 0}, id="no requested bytes"),
    ],
)
def test_a_process_has_the_metrics_that_repeat_for_its_kind(measured, metrics):
    (process_figures,) = job_figures([measured], own=OWN).processes
    assert process_figures.by_gpu == {"cuda:0": metrics}


def test_an_idle_server_is_left_out_unless_its_allocations_are_unknown():
    assert job_figures([in_window(allocations=0)], own=OWN).processes == ()
    assert is_active(in_window(allocations=0, window=None))
    assert is_active(in_window(allocations=0, devices=(), without_statistics=True))
    assert not is_active(in_window(allocations=0, devices=()))


def test_the_own_peak_is_a_part_of_the_sum_and_the_own_process_has_no_reserved_bytes():
    job = job_figures([timed(1, 10, 20)], own=OWN)
    assert job.by_gpu == {"cuda:0": {"peak_allocated": 1100}}
    (note,) = job.notes
    assert note == (
        "cuda:0: 1.10 kB is the sum of 2 processes' peaks, an upper bound, because the peaks may be at different times. The bytes at the "
        "same time are known only on Linux with a C compiler, and with torch's own allocator"
    )
    unused = job_figures([timed(1, 10, 20)], own={0: OwnPeak("cuda:0", 0)})
    assert (unused.by_gpu, unused.notes) == ({"cuda:0": {"peak_allocated": 100}}, ())


def publishing(measured: ProcessUsage, published: int | None = 0) -> ProcessUsage:
    """A process that published its bytes."""
    return replace(measured, devices=tuple(replace(device, published=published) for device in measured.devices))


def held(*usages: ProcessUsage, at_most: int, **more: object) -> object:
    return job_figures(usages, simultaneous={0: at_most}, **more).simultaneous


def test_processes_held_at_most_the_bytes_that_they_published_at_the_same_time():
    two = [publishing(timed(pid, 10, 20)) for pid in (1, 2)]
    assert held(*two, at_most=150) == {"cuda:0": 150}
    for others in (0, 400):
        assert held(*two, at_most=1060 + others, own={0: OwnPeak("cuda:0", 1000, others)}) == {"cuda:0": 1060}
    assert job_figures(two, simultaneous={0: 150}).by_gpu == job_figures(two).by_gpu


def test_simultaneous_bytes_are_never_less_than_the_peak_of_a_single_process():
    """A process may have published its bytes too late."""
    two = [publishing(timed(1, 10, 20)), publishing(timed(2, 10, 20))]
    assert held(*two, at_most=40) == {"cuda:0": 100}
    assert held(*two, at_most=0, own={0: OwnPeak("cuda:0", 1000, 0)}) == {"cuda:0": 1000}
    assert job_figures(two, simultaneous={0: 40}).notes == (
        "cuda:0: 200 B is the sum of 2 processes' peaks, an upper bound, because the peaks may be at different times",
    )


def test_simultaneous_bytes_are_never_more_than_the_sum_of_the_peaks():
    """A server's peak is the requested bytes, and it publishes allocated bytes."""
    two = [publishing(timed(1, 10, 20)), publishing(in_window(), 50)]
    assert held(*two, at_most=200) == {"cuda:0": 190}


def test_a_sum_that_processes_held_at_the_same_time_is_not_noted_as_an_upper_bound():
    two = [publishing(timed(pid, 10, 20)) for pid in (1, 2)]
    noted = [bool(job_figures(two, simultaneous={0: at_most}).notes) for at_most in (199, 200)]
    assert noted == [True, False]


def test_simultaneous_bytes_are_unknown_if_the_own_bytes_are_unknown():
    two = [publishing(timed(pid, 10, 20)) for pid in (1, 2)]
    job = job_figures(two, simultaneous={0: 1200}, own=OWN)
    assert (job.simultaneous, job.unknown) == ({}, {"cuda:0"})
    (note,) = job.notes
    assert note.startswith("cuda:0: 1.20 kB is the sum of 3 processes' peaks, an upper bound, because ")


def test_simultaneous_bytes_are_unknown_if_a_process_did_not_publish_its_own():
    assert held(publishing(timed(1, 10, 20)), timed(2, 10, 20), at_most=100) == {}
    assert held(publishing(timed(1, 10, 20)), at_most=100) == {}, "a single process has a peak and no sum"


def test_an_idle_server_that_still_runs_holds_none_of_the_simultaneous_bytes():
    two = [publishing(timed(pid, 10, 20)) for pid in (1, 2)]
    idle = replace(in_window(allocations=0), process=process(9, started=1))
    assert held(*two, publishing(idle, 40), at_most=170) == {"cuda:0": 130}
    assert held(*two, publishing(replace(idle, ended=5), 40), at_most=170) == {"cuda:0": 170}
    assert held(*two, idle, at_most=170) == {"cuda:0": 170}


def test_gpus_have_the_names_of_the_own_process_and_further_gpus_follow():
    own = {2: OwnPeak("cuda:0", 1), 3: OwnPeak("cuda:1", 10)}
    other = usage(process(1), (3, 100), (5, 300))
    job = job_figures([other], own=own)
    assert {gpu: metrics["peak_allocated"] for gpu, metrics in job.by_gpu.items()} == {
        "cuda:0": 1,
        "cuda:1": 110,
        "cuda:2": 300,
    }


def test_no_process_gets_the_name_of_the_sum_within_a_test():
    named = usage(ProcessIdentity(1, command=("python", "a.py"), name=ALL), (0, 10))
    assert [one.name for one in job_figures([named], own=OWN).processes] == [f"{ALL} 2"]
    assert [one.name for one in job_figures([named]).processes] == [ALL]


def test_gpus_are_numbered_among_those_of_the_job():
    first, second = (job_figures([usage(process(1), (gpu, 10), (gpu + 1, 20))]) for gpu in (0, 2))
    assert first.by_gpu == second.by_gpu
    assert list(first.by_gpu) == ["cuda:0", "cuda:1"]


def test_gpus_of_other_processes_are_named_beside_the_tests_own():
    job = job_figures([usage(process(1), (0, 10), (1, 20))], own={1: OwnPeak("cuda:1", 300)})
    assert {gpu: metrics["peak_allocated"] for gpu, metrics in job.by_gpu.items()} == {"cuda:0": 10, "cuda:1": 320}


@pytest.mark.parametrize(
    ("peaks", "told"),
    [
        (((0, 4_000_000), (1, 5_000_000)), ". Its peak was at least 5.00 MB, and may have been larger"),
        ((), ", so its peak is not known"),
    ],
)
def test_a_killed_process_has_a_lower_bound_or_no_peak_but_never_zero(peaks, told):
    assert killed_text(usage(process(1), *peaks, ended=None)) == f"was killed before it could report its memory{told}"


def test_processes_are_ordered_by_rank_before_the_time_of_their_start():
    late, early = process(7, rank=0, started=90), process(8, rank=1, started=10)
    assert [one.name for one in job_figures([usage(early, (1, 1)), usage(late, (0, 1))]).processes] == [
        "train.py rank 0",
        "train.py rank 1",
    ]


def test_the_order_of_starts_decides_whichever_process_used_cuda_first():
    first, second = process(1, started=5), process(2, started=6)
    usages = [usage(second, (0, 20)), usage(first, (0, 10))]
    for order in (usages, usages[::-1]):
        assert [one.by_gpu["cuda:0"]["peak_allocated"] for one in job_figures(order).processes] == [10, 20]


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"times_out_of_memory": 2}, "ran out of memory 2 times"),
        ({"unknown": "a value is read"}, "a value is read"),
        ({"lacking": "workspaces are taken as 0"}, "workspaces are taken as 0"),
        ({"no_kernels": "torch has none"}, "torch has none"),
    ],
)
def test_a_doubt_about_a_process_is_a_note_of_the_process_and_of_the_job(more, note):
    job = job_figures([usage(process(1), (0, 10), **more)])
    assert note in job.processes[0].notes[0]
    assert job.notes == (f"train.py: {job.processes[0].notes[0]}",)


def test_a_process_that_reserved_no_memory_is_left_out():
    assert job_figures([usage(process(1)), usage(process(2), (0, 10))]).processes[0].name == "train.py"


def test_the_cpu_has_no_number_and_no_reserved_bytes():
    on_cpu = DeviceUsage(0, 100, 0, 0, requested=100, allocations=1)
    job = job_figures([ProcessUsage(began=1, ended=2, devices=(on_cpu,), process=process(1))], "cpu")
    assert job.by_gpu == {"cpu": {"peak_allocated": 100}}
    assert [figures.by_gpu for figures in job.processes] == [job.by_gpu]
    with_own = job_figures(
        [ProcessUsage(began=1, ended=2, devices=(on_cpu,), process=process(1))], "cpu", {0: OwnPeak("cpu", 40)}
    )
    assert with_own.by_gpu == {"cpu": {"peak_allocated": 140}}
