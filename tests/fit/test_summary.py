"""What is said of a program on several GPUs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_gpumem.emulating.emulated_process.usage import OutOfMemory
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu, known_gpus
from pytest_gpumem.reporting.reports.layout import plain_lines
from pytest_gpumem.tools.fit.outcome import Fit, FitOutcome, RunResult
from pytest_gpumem.tools.fit.summary import conclusion, details, progress, table, to_json

GB = 10**9
CWD = "/mine"
RAN_OUT = OutOfMemory(0, 3 * GB, 18 * GB, 22 * GB, "/mine/models/train.py:7 step")


def fit(word: str, outcome: FitOutcome, reserved: int = 0, expanded: RunResult | None = None, **more) -> Fit:
    return Fit(
        emulated_gpu(f"emulated:{word}"),
        RunResult(outcome, 0, reserved - GB if reserved else 0, reserved, **more),
        expanded,
    )


def taken(reserved: int, outcome: FitOutcome = FitOutcome.FITS) -> RunResult:
    return RunResult(outcome, 0, reserved - GB, reserved, devices=1, expandable=True)


WANTED = ": 3.00 GB wanted, 18.00 GB allocated and 22.00 GB reserved"
OUT = {"ran_out": RAN_OUT, "times_out_of_memory": 1, "message": "CUDA out of memory. Tried to allocate 2.79 GiB."}
ISSUE = [
    fit("a100-40gb", FitOutcome.FITS, 25_100_000_000),
    fit("l40s", FitOutcome.FITS, 25_100_000_000),
    fit("l4", FitOutcome.OUT_OF_MEMORY, 23 * GB, taken(23_400_000_000), **OUT),
    fit("rtx4090", FitOutcome.OUT_OF_MEMORY, 24 * GB, taken(24 * GB, FitOutcome.OUT_OF_MEMORY), **OUT),
]


def test_the_conclusion_names_the_need_and_fitting_gpus_for_both_segment_kinds():
    assert conclusion(ISSUE) == (
        "needs 25.10 GB reserved (emulated): fits A100 40GB, L40S; not L4, RTX 4090; "
        "with expandable segments 23.40 GB: fits L4"
    )


def test_many_gpus_are_counted_and_the_few_others_named():
    noted = {"unknown": "a value was read"}
    fitting = [
        fit(gpu.word, FitOutcome.FITS, 5 * GB, **noted) for gpu in known_gpus() if gpu.word not in ("t4", "v100")
    ]
    assert conclusion(fitting) == "needs 5.00 GB reserved (emulated): fits all 22 GPUs"
    assert details(fitting, CWD)[0].startswith("note: all 22 GPUs: a value was read")
    found = [*fitting, fit("t4", FitOutcome.OUT_OF_MEMORY), fit("v100", FitOutcome.CANNOT_RUN)]
    assert conclusion(found) == (
        "needs 5.00 GB reserved (emulated): fits 22 of 24 GPUs; not T4; cannot run on V100 16GB"
    )
    assert "note: all but T4, V100 16GB: a value was read: later memory may differ on a real GPU" in details(found, CWD)


def test_where_gpus_differ_the_conclusion_says_from_how_much_to_how_much():
    found = [fit("h100", FitOutcome.FITS, 25 * GB), fit("a100", FitOutcome.FITS, 24 * GB)]
    assert conclusion(found).startswith("needs 24.00 GB to 25.00 GB reserved (emulated): fits ")


def test_a_conclusion_without_a_fit_says_what_came_instead():
    found = [
        fit("h100", FitOutcome.FAILED),
        fit("a100x8", FitOutcome.TOO_MUCH_TOGETHER, 90 * GB),
        fit("l4", FitOutcome.WENT_ON, 20 * GB),
        fit("v100", FitOutcome.CANNOT_RUN, cannot_run="torch has none for 7.0"),
    ]
    assert conclusion(found) == (
        "fits none (emulated); not A100 80GB x8; ran out of memory and went on: L4; cannot run on V100 16GB; "
        "failed by itself: H100 80GB"
    )
    assert "V100 16GB: cannot run on it: torch has none for 7.0" in details(found, CWD)


def test_the_table_lists_gpus_by_size_with_the_memory_left_beside_the_context():
    lines = plain_lines(table(ISSUE, GB))
    assert [line.split()[0] for line in lines] == ["GPU", "L4", "RTX", "A100", "L40S"]
    assert lines[1].split("  ")[0] == "L4"
    assert "out of memory; with expandable segments fits, 23.40 GB reserved" in lines[1]
    assert "25.10 GB" not in lines[1]
    a100 = next(line for line in lines if line.startswith("A100"))
    left = emulated_gpu("emulated:a100-40gb").total_bytes - GB - 25_100_000_000
    assert " ".join(a100.split()) == f"A100 40GB 42.30 GB 25.10 GB 24.10 GB {left / GB:.2f} GB fits"


def test_what_is_left_is_beside_a_context_of_each_process():
    (_, line) = plain_lines(table([fit("a100-40gb", FitOutcome.FITS, 25 * GB, together=3)], GB))
    left = emulated_gpu("emulated:a100-40gb").total_bytes - 3 * GB - 25 * GB
    assert f"24.00 GB  {left / GB:.2f} GB  fits" in line


def test_the_details_say_where_memory_ran_out_and_what_pytorch_said():
    lines = details(ISSUE, CWD)
    assert lines[:2] == [
        "L4: out of memory at models/train.py:7 step: 3.00 GB wanted, 18.00 GB allocated and 22.00 GB reserved",
        "  CUDA out of memory. Tried to allocate 2.79 GiB.",
    ]
    assert details(ISSUE, "/elsewhere")[0].startswith("L4: out of memory at /mine/models/train.py:7 step: ")


def test_the_details_say_why_a_program_failed_and_how_often_it_went_on():
    failed = fit("l4", FitOutcome.FAILED, last_lines=("Traceback", "ValueError: no data"))
    went_on = fit("h100", FitOutcome.WENT_ON, 9 * GB, ran_out=RAN_OUT, times_out_of_memory=3)
    assert details([failed, went_on], CWD) == [
        "L4: failed by itself (exit status 0)",
        "  Traceback",
        "  ValueError: no data",
        "H100 80GB: ran out of memory and went on, 3 times, first at models/train.py:7 step" + WANTED,
    ]


def test_what_has_to_be_known_is_noted_once_for_all_gpus_that_it_holds_for():
    more = {
        "unknown": "nonzero reads values, at train.py:3",
        "lacking": "workspaces of convolutions count as 0 bytes",
        "together": 2,
        "devices": 8,
        "killed": 1,
        "retries": 4,
    }
    lines = details([fit("h100", FitOutcome.FITS, GB, **more), fit("l4", FitOutcome.FITS, GB, **more)], CWD)
    assert [line.split(": ")[1] for line in lines] == ["L4, H100 80GB"] * 6
    texts = (
        "only just",
        "nonzero reads values",
        "may take more: workspaces",
        "2 processes",
        "8 devices",
        "CUDA was killed",
    )
    for text, said in zip(texts, lines, strict=True):
        assert text in said


def test_segments_that_could_grow_already_or_not_at_all_are_noted():
    already = fit("l4", FitOutcome.OUT_OF_MEMORY, GB, expandable=True)
    assert "note: L4: the allocator's segments were expandable already" in details([already], CWD)
    own = fit("l4", FitOutcome.OUT_OF_MEMORY, GB, RunResult(FitOutcome.OUT_OF_MEMORY, 1, devices=1))
    (note,) = details([own], CWD)[1:]
    assert note.startswith("note: L4: expandable segments were not tried: the program has settings of its own")


@pytest.mark.parametrize(("without_tensor", "said"), [(5 * GB, 1), (4 * GB, 0), (None, 0)])
def test_graphs_of_gradients_are_noted_if_a_quarter_of_memory_is_no_tensors(without_tensor, said):
    ran_out = replace(RAN_OUT, without_tensor=without_tensor)
    one = fit("l4", FitOutcome.OUT_OF_MEMORY, ran_out=ran_out)
    notes = [line for line in details([one], CWD) if line.startswith("note: L4: autograd graphs may fill the GPU")]
    assert len(notes) == said


def test_progress_is_a_phrase():
    said = [
        progress(fit(word, outcome, 2 * GB, **more).plain, CWD)
        for word, outcome, more in [
            ("l4", FitOutcome.FITS, {}),
            ("l4", FitOutcome.OUT_OF_MEMORY, OUT),
            ("l4", FitOutcome.WENT_ON, OUT),
            ("l4", FitOutcome.TOO_MUCH_TOGETHER, {"together": 2}),
            ("l4", FitOutcome.FAILED, {}),
            ("l4", FitOutcome.UNUSED, {}),
        ]
    ]
    where = " at models/train.py:7 step" + WANTED
    assert said == [
        "fits, 2.00 GB reserved",
        f"out of memory{where}",
        f"ran out of memory and went on, 2.00 GB reserved; once{where}",
        "out of memory together, 2.00 GB reserved by 2 processes",
        "failed by itself (exit status 0)",
        "no GPU memory used",
    ]


def test_a_program_killed_by_a_signal_is_told_with_its_name():
    assert progress(RunResult(FitOutcome.FAILED, -9), CWD) == "failed by itself (killed by SIGKILL)"


def test_programs_get_everything_in_bytes():
    plain = json.loads(to_json(ISSUE, ["python", "train.py"], 1))
    assert (plain["format"], plain["emulated"], plain["exit_status"]) == (1, True, 1)
    assert plain["command"] == ["python", "train.py"]
    assert plain["conclusion"] == conclusion(ISSUE)
    l4 = plain["gpus"][2]
    assert (l4["gpu"], l4["outcome"], l4["ran_out"]["wanted"]) == ("l4", "out of memory", 3 * GB)
    assert l4["with_expandable_segments"]["reserved"] == 23_400_000_000
    assert plain["gpus"][0]["with_expandable_segments"] is None
