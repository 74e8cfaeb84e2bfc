"""What came of running a program, by how it ended and by what its processes took."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, OutOfMemory, ProcessUsage
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.tools.fit.outcome import Fit, FitOutcome, ProgramRun, RunResult, ends_it, exit_status, result_of

TOTAL, CONTEXT = 1000, 50
SMALL = replace(emulated_gpu("t4"), total_bytes=TOTAL)
RAN_OUT = OutOfMemory(0, 500, 300, 400, "/mine/train.py:7 step")
MESSAGE = (
    "Traceback (most recent call last):\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2.00 GiB. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
)


def process(reserved: int = 400, device: int = 0, began: int = 0, ended: int | None = 10, **more) -> ProcessUsage:
    return ProcessUsage(began, ended, (DeviceUsage(device, reserved - 100, reserved, 0),), **more)


def of(*processes: ProcessUsage, status: int = 0, said: str = "") -> RunResult:
    return result_of(ProgramRun(status, said, processes), SMALL, CONTEXT)


def test_a_program_that_ends_well_fits_with_its_peaks():
    one = of(process(400))
    assert (one.outcome, one.reserved, one.allocated, one.devices, one.together) == (FitOutcome.FITS, 400, 300, 1, 1)


def test_one_process_may_take_all_that_the_emulated_gpu_gave_it():
    # The context is taken off there: counted twice, this would not fit.
    assert of(process(TOTAL - CONTEXT)).outcome is FitOutcome.FITS
    assert of(process(TOTAL)).outcome is FitOutcome.FITS


def test_a_failure_after_memory_ran_out_is_out_of_memory_with_torchs_message():
    one = of(process(times_out_of_memory=1, ran_out=RAN_OUT), status=1, said=MESSAGE)
    assert (one.outcome, one.ran_out) == (FitOutcome.OUT_OF_MEMORY, RAN_OUT)
    assert one.message == "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2.00 GiB."
    assert one.last_lines == ()


def test_an_error_in_memory_that_no_process_told_of_is_one_as_well():
    assert of(status=1, said="[rank0]: torch.cuda.OutOfMemoryError: it is full").message == "it is full"
    assert of(status=1, said="[rank0]: torch.OutOfMemoryError: it is full").outcome is FitOutcome.OUT_OF_MEMORY
    assert of(process(), said="caught torch.OutOfMemoryError: it is full").outcome is FitOutcome.FITS


def test_out_of_memory_under_another_error_shows_that_error():
    one = of(process(times_out_of_memory=1, ran_out=RAN_OUT), status=1, said="RuntimeError: no batch size works")
    assert (one.outcome, one.last_lines) == (FitOutcome.OUT_OF_MEMORY, ("RuntimeError: no batch size works",))


def test_a_gpu_without_kernels_is_named_for_torch_and_for_an_extension():
    said = "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device"
    one = of(process(no_kernels="torch has none"), status=1, said=said)
    torchs = "torch has none, as on a real GPU; a torch build for another CUDA release may have them"
    assert (one.outcome, one.cannot_run, one.last_lines) == (FitOutcome.CANNOT_RUN, torchs, ())
    other = of(process(), status=1, said=said)
    assert (other.outcome, other.cannot_run) == (
        FitOutcome.CANNOT_RUN,
        "AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    )
    assert of(process(no_kernels="torch has none"), status=1, said="ValueError: no data").outcome is FitOutcome.FAILED
    assert of(process(), said=said).cannot_run is None
    assert of(process(no_kernels="torch has none")).outcome is FitOutcome.FITS


def test_a_program_that_catches_the_error_went_on():
    one = of(process(times_out_of_memory=3, ran_out=RAN_OUT))
    assert (one.outcome, one.times_out_of_memory, one.reserved) == (FitOutcome.WENT_ON, 3, 400)


def test_a_failure_without_running_out_is_the_programs_own_with_its_last_lines():
    one = of(process(), status=-9, said="\n".join(f"line {number}\n" for number in range(30)))
    assert (one.outcome, one.status, len(one.last_lines)) == (FitOutcome.FAILED, -9, 20)
    assert one.last_lines[-1] == "line 29"


def test_a_program_without_gpu_memory_is_told():
    assert of().outcome is FitOutcome.UNUSED
    assert of(ProcessUsage(0, 5)).outcome is FitOutcome.UNUSED


def test_processes_on_one_device_at_the_same_time_are_added_up_with_a_context_each():
    both = of(process(400, began=0), process(500, began=5))
    assert (both.outcome, both.reserved, both.allocated, both.together) == (FitOutcome.FITS, 900, 700, 2)
    more = of(process(400, began=0), process(501, began=5))
    assert (more.outcome, more.reserved, more.together) == (FitOutcome.TOO_MUCH_TOGETHER, 901, 2)


def test_processes_one_after_the_other_or_on_other_devices_are_not():
    one = of(process(600, began=0, ended=10), process(700, began=10, ended=20))
    assert (one.outcome, one.reserved, one.together) == (FitOutcome.FITS, 700, 1)
    one = of(process(600, device=0), process(700, device=1))
    assert (one.outcome, one.reserved, one.together, one.devices) == (FitOutcome.FITS, 700, 1, 2)


def test_the_most_that_is_there_at_once_counts():
    one = of(process(300, began=0, ended=100), process(200, began=1, ended=5), process(250, began=6, ended=9))
    assert (one.reserved, one.together) == (550, 2)


def test_a_killed_process_may_have_lived_on_and_is_told():
    one = of(process(300, began=0, ended=None), process(200, began=50, ended=60))
    assert (one.reserved, one.killed) == (500, 1)


def test_retries_are_told_where_memory_did_not_run_out():
    usage = ProcessUsage(0, 10, (DeviceUsage(0, 300, 400, 2),))
    assert of(usage).retries == 2
    assert of(replace(usage, times_out_of_memory=1, ran_out=RAN_OUT)).retries == 0


def fits(*outcomes: FitOutcome, expanded: FitOutcome | None = None) -> list[Fit]:
    again = None if expanded is None else RunResult(expanded, 0)
    return [Fit(emulated_gpu("emulated:l4"), RunResult(outcome, 0), again) for outcome in outcomes]


FITS, NOT = FitOutcome.FITS, FitOutcome.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("outcomes", "every", "one"),
    [
        ((FITS, FITS), 0, 0),
        ((FITS, NOT), 1, 0),
        ((NOT, NOT), 1, 1),
        ((FitOutcome.WENT_ON,), 1, 1),
        ((FitOutcome.TOO_MUCH_TOGETHER,), 1, 1),
        ((FitOutcome.FAILED,), 2, 2),
        ((FitOutcome.UNUSED,), 2, 2),
        ((FITS, FitOutcome.FAILED), 2, 0),
        ((NOT, FitOutcome.FAILED), 1, 1),
    ],
)
def test_the_exit_status_says_whether_it_fits_all_or_one_and_whether_that_is_known(outcomes, every, one):
    for order in itertools.permutations(outcomes):
        assert exit_status(fits(*order), every=True) == every
        assert exit_status(fits(*order), every=False) == one


def test_what_fits_with_expandable_segments_only_does_not_fit_as_it_is():
    (fit,) = found_again = fits(NOT, expanded=FITS)
    assert fit.fits_expanded
    assert not fit.fits
    assert exit_status(found_again, every=True) == 1


def test_what_does_not_run_on_the_first_of_all_gpus_ends_it():
    ends = {
        (outcome, every): ends_it(fits(outcome)[0].plain, every=every)
        for outcome in FitOutcome
        for every in (True, False)
    }
    assert {case for case, ended in ends.items() if ended} == {
        (FitOutcome.UNUSED, True),
        (FitOutcome.UNUSED, False),
        (FitOutcome.FAILED, False),
    }
