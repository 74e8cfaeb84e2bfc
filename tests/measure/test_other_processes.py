"""Other processes in the runs of a step: their names, their settled peaks and their growth, from typed usage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.measuring.devices.contract import Peak
from pytest_gpumem.measuring.jobs.figures import ALL, OwnPeak, job_figures
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.measure.growth import growth_by_device
from pytest_gpumem.measuring.measure.other_processes import (
    StepProcesses,
    figures_in,
    growth_in,
    names_in,
    own_figures,
    process_figures,
)
from pytest_gpumem.measuring.measure.prepared import PreparedStep
from pytest_gpumem.measuring.measure.reading import Figures, Phase, read_once
from pytest_gpumem.plugin.relations.growth_elsewhere import GrowthElsewhere, live_in

OWN = {"cuda:0": Figures(50, 150, None, Peak(250), 150, 150)}
"""A step that needs 200 bytes, among 100 bytes that it owns from step to step."""


def server(
    pid: int,
    before: int,
    after: int,
    peak: int,
    *,
    script: str = "serve.py",
    allocations: int = 1,
    gpu: int = 0,
    published: int | None = None,
    **more: object,
):
    """A process that runs before and after a step."""
    device = DeviceUsage(gpu, peak, peak, 0, peak, after, before, allocations, published=published)
    return ProcessUsage(pid, None, (device,), process=_identity(pid, script), **{"window": 1, **more})


def left(number: int):
    """Processes that as many steps have left running. The latest is new."""
    return [
        server(pid, 0 if pid == number - 1 else 500, 500, 500, window=None if pid == number - 1 else 1)
        for pid in range(number)
    ]


def child(pid: int, peak: int, script: str = "job.py"):
    """A process that begins and ends in a step. It held all its memory when it ended."""
    return ProcessUsage(pid, 9, (DeviceUsage(0, peak, 2 * peak, 0, peak, peak),), process=_identity(pid, script))


def _identity(pid: int, script: str) -> ProcessIdentity:
    return ProcessIdentity(pid, pid, ("python", script))


def beside(*steps, own=OWN):
    """The figures in each step with these processes."""
    reports = iter(steps)

    def end_step(own, earlier):
        own_peak = own["cuda:0"].own_peak if own else 0
        return job_figures(next(reports), "cuda:{}", {0: OwnPeak("cuda:0", own_peak)}, earlier)

    processes = StepProcesses(end_step)
    return [processes.beside(own) for _ in steps]


def peaks_in(run):
    return {place: figures.own_peak for place, figures in run.items()}


def test_a_step_without_other_processes_has_the_figures_of_its_own_process_alone():
    assert StepProcesses(None).beside(OWN) is OWN
    (run,) = beside(())
    assert run is OWN


def test_a_process_and_all_processes_stand_beside_the_steps_own_figures():
    (run,) = beside([server(7, 1000, 1000, 1500), child(8, 300)])
    assert peaks_in(run) == {
        "cuda:0": 200,
        "cuda:0 in serve.py": 1500,
        "cuda:0 in job.py": 300,
        "cuda:0 in all processes": 2000,
    }
    assert own_figures(run) == OWN
    assert names_in([run]) == ["serve.py", "job.py", ALL]
    assert run["cuda:0 in serve.py"].memory_metrics() == {"peak_allocated": 1500, "retained": 0}
    assert run["cuda:0 in job.py"].memory_metrics() == {"peak_allocated": 300, "peak_reserved": 600, "retained": 0}


def test_a_process_that_each_step_starts_has_a_single_name():
    runs = beside(*([server(1, 10, 10, 20), child(pid, 300), child(pid + 1, 400)] for pid in (10, 20, 30)))
    assert [list(peaks_in(run).values()) for run in runs] == [[200, 20, 300, 400, 920]] * 3
    assert names_in(runs) == ["serve.py", "job.py", "job.py 2", ALL]


def test_a_process_keeps_its_name_when_an_older_one_of_its_program_ends():
    first = [child(1, 300, "serve.py"), server(2, 0, 10, 20)]
    later = [[server(2, 10, 10, 20), child(pid, 300, "serve.py")] for pid in (3, 4)]
    runs = beside(first, *later)
    assert [figures_in(run, "serve.py")["cuda:0"].own_peak for run in runs] == [300, 300, 300]
    assert [figures_in(run, "serve.py 2")["cuda:0"].own_peak for run in runs] == [20, 20, 20]


def test_an_idle_server_counts_from_the_first_step_that_uses_it():
    idle, busy = server(2, 10, 10, 10, allocations=0), server(2, 10, 10, 30)
    runs = beside([server(1, 10, 10, 20), idle], [server(1, 10, 10, 20), busy], [server(1, 10, 10, 20), idle])
    assert [len(run) for run in runs] == [3, 4, 4]
    assert [figures_in(run, "serve.py 2")["cuda:0"].own_peak for run in runs[1:]] == [30, 10]


def test_a_gpu_keeps_its_name_from_step_to_step():
    runs = beside([server(1, 0, 0, 20, gpu=5)], [server(2, 0, 0, 30, gpu=3), server(1, 0, 0, 20, gpu=5)])
    assert figures_in(runs[1], "serve.py")["cuda:1"].own_peak == 20
    assert figures_in(runs[1], "serve.py 2")["cuda:2"].own_peak == 30


def test_growth_of_a_server_is_not_growth_of_the_own_process():
    steps = [[server(1, 40 * n, 40 * (n + 1), 1000 + 40 * n)] for n in range(12)]
    growth = growth_by_device(beside(*steps))
    assert growth_in(growth) == {"cuda:0": 0}
    assert growth_in(growth, "serve.py") == growth_in(growth, ALL) == {"cuda:0": 40}


def test_processes_that_steps_leave_running_grow_only_together():
    growth = growth_by_device(beside(*(left(number) for number in range(1, 13))))
    assert growth_in(growth, ALL) == {"cuda:0": 500}
    assert not any(value for place, value in growth.items() if "serve.py" in place)


def test_a_child_that_ends_keeps_nothing():
    growth = growth_by_device(beside(*([child(pid, 300)] for pid in range(12))))
    assert {*growth.values()} == {0}


@pytest.mark.parametrize(
    ("peaks", "expected", "is_settled"),
    [
        pytest.param((900, 500, 500, 500), 500, True, id="a warm-up"),
        pytest.param((500, 500, 500, 500), 500, True, id="settled at once"),
        pytest.param((900, 500, 600, 500), 600, False, id="different steps"),
        pytest.param((900,), 900, True, id="a single step"),
    ],
)
def test_a_process_has_its_settled_peak(peaks, expected, is_settled):
    runs = beside(*([server(1, 100, 100, peak)] for peak in peaks))
    figures = process_figures([figures_in(run, "serve.py") for run in runs], {"cuda:0": 0})
    assert figures.memory_metrics() == {"peak_allocated": expected, "retained": 0, "growth": 0}
    assert figures.is_settled == is_settled
    assert figures.step_peaks.allocated == peaks


@pytest.fixture
def step(device):
    """Measure an empty step, beside a server that keeps bytes in each run or in none."""

    def measure(kept, published_by_others=lambda _: 0):
        live = [0]

        def end_step(own, earlier):
            live.append(live[-1] + kept)
            usage = server(1, live[-2], live[-1], live[-1] + 1000, published=live[-1])
            own_peak = OwnPeak("cpu", own["cpu"].own_peak + 5, published_by_others(len(live)))
            return job_figures([usage], "cpu", {0: own_peak}, earlier, {0: live[-1] + 1000})

        context = MeasuringContext(device, None, end_step=end_step)
        prepared = PreparedStep(
            context=context,
            workload=Workload("measure"),
            work={},
            phases=[Phase("step", list)],
            other_bytes=[0],
            held=None,
        )
        return prepared.measure(), len(live) - 1

    return measure


def test_a_leak_that_only_a_server_has_makes_the_step_run_until_its_growth_is_known(step):
    measured, runs = step(40)
    assert measured.is_elsewhere
    assert (measured.figures.growth, runs) == ({"cpu": 0}, 6 + 4 + 18)
    assert measured.processes["serve.py"].metrics() == {"peak_allocated": 1400, "retained": 40, "growth": 40}
    assert measured.of_all_processes().metrics() == {"peak_allocated": 1405, "growth": 40}


def test_a_leak_of_a_server_is_no_difference_between_the_own_steps(step):
    measured, _ = step(40)
    assert measured.figures.is_settled
    assert measured.notes == ()


def test_runs_that_only_show_growth_are_in_no_remark_on_the_peak(step):
    measured, _ = step(40)
    (note,) = (note for note in measured.processes[ALL].notes if "sum of 2 processes' peaks" in note)
    peak = measured.processes[ALL].metrics()["peak_allocated"]
    assert note.startswith(f"cpu: {format_bytes(int(peak))} is the sum")
    assert measured.processes[ALL].simultaneous == {"cpu": peak - 5}


def test_simultaneous_bytes_of_a_step_are_unknown_if_those_of_any_run_are(step):
    measured, _ = step(0, lambda run: None if run == 3 else 0)
    assert measured.processes[ALL].simultaneous == {}


@pytest.mark.parametrize(("after", "others"), [(140, 100), (180, 100), (139, None), (None, None)])
def test_published_bytes_are_known_if_they_grew_as_much_as_the_live_bytes(device, after, others):
    """torch's profiler may subtract a block that was freed before, because it did not see that free."""
    published = [100]
    device.publishing = SimpleNamespace(own=lambda _: published[0])
    with read_once(device, [0], lambda: [0]) as figures:
        kept = torch.empty(40, dtype=torch.uint8)
        published[0] = after
    assert kept.nbytes == 40
    assert figures()["cpu"].published_by_others == others


def test_a_step_beside_a_server_that_keeps_nothing_runs_no_further_steps(step):
    measured, runs = step(0)
    assert (measured.processes["serve.py"].metrics()["growth"], runs) == (0, 2 + 4)


def test_an_unknown_process_ends_the_measurement(device):
    def end_step(*_):
        raise MeasuringError("`serve.py` did not report")

    with pytest.raises(MeasuringError, match="did not report"):
        StepProcesses(end_step).beside(OWN)


def grown(*steps):
    """The text about steps with these processes."""
    reports = iter(steps)
    elsewhere = GrowthElsewhere(lambda _, earlier: job_figures(next(reports), "cuda:{}", {}, earlier))
    for _ in steps:
        elsewhere.end()
    return elsewhere.text(list)


def test_the_process_whose_memory_grows_is_named():
    leak = [[server(1, 40 * n, 40 * (n + 1), 1000), server(2, 70, 70, 90)] for n in range(4)]
    assert grown(*leak) == "memory grows in serve.py: 40 B a step, 160 B in 4 steps"
    assert grown(*([server(1, 40, 40, 1000)] for _ in range(4))) == ""


def test_processes_that_each_step_leaves_running_grow_together():
    assert (
        grown(*(left(number) for number in range(1, 5)))
        == "memory grows in all processes: 500 B a step, 2.00 kB in 4 steps"
    )


def test_a_process_that_begins_later_has_no_growth_by_its_start():
    runs = beside((), left(1), [server(0, 500, 500, 500)])
    assert live_in("serve.py", runs) == [500, 500, 500]
