"""A job's figures: of each process and of each GPU."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.jobs.figures import job_figures, process_names, program_name

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
        (["python", "-c", "print(1)"], "-c"),
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
    return ProcessIdentity(pid, 1, started, ("python", script), rank=rank)


def test_equal_programs_have_their_rank_or_a_number():
    processes = [process(1, "serve.py"), process(2), process(3, "serve.py"), process(4, rank=0), process(5, rank=1)]
    assert process_names(processes) == ["serve.py", "train.py", "serve.py 2", "train.py rank 0", "train.py rank 1"]


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
    assert process_names([ProcessIdentity(1, command=("python", "-c", SPAWNED), name=given)]) == [name]


@pytest.mark.parametrize(("given", "name"), [("worker-6223", "worker-N"), ("gpu-12", "gpu-12")])
def test_a_long_number_in_a_name_is_no_part_of_it(given, name):
    assert process_names([ProcessIdentity(1, command=("python", "-c", SPAWNED), name=given)]) == [name]


def test_programs_that_differ_by_a_number_are_different():
    assert process_names([process(1, "train_256.py"), process(2, "train_512.py")]) == ["train_256.py", "train_512.py"]


def test_ranks_that_torchrun_started_again_are_other_processes():
    processes = [ProcessIdentity(pid, command=("python", "t.py"), rank=0, restart=pid) for pid in range(2)]
    assert process_names(processes) == ["t.py rank 0", "t.py rank 0 restart 1"]


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
    assert note.startswith("cuda:0: the sum of 2 processes' peaks, an upper bound")


def test_chance_does_not_decide_a_sum_and_attempts_of_torchrun_are_not_added():
    one_after_the_other = job_figures([usage(process(pid), (0, 100), span=(pid, pid)) for pid in range(2)])
    assert one_after_the_other.by_gpu["cuda:0"]["peak_allocated"] == 200
    attempts = [ProcessIdentity(pid, command=("t.py",), rank=pid % 2, restart=pid // 2) for pid in range(4)]
    restarted = job_figures([usage(attempt, (0, 100 + attempt.pid)) for attempt in attempts])
    assert restarted.by_gpu["cuda:0"]["peak_allocated"] == 102 + 103
    assert "the sum of 2 processes' peaks" in restarted.notes[0]


def test_gpus_are_numbered_among_those_of_the_job():
    first, second = (job_figures([usage(process(1), (gpu, 10), (gpu + 1, 20))]) for gpu in (0, 2))
    assert first.by_gpu == second.by_gpu
    assert list(first.by_gpu) == ["cuda:0", "cuda:1"]


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
