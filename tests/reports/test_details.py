"""What a measurement is made of, as shown with ``-vv`` and ``--gpumem-explain=always``: its phases, and its peak."""

from __future__ import annotations

import textwrap

from pytest_gpumem.reports.layout import Table, plain_lines, text_of
from pytest_gpumem.reports.terminal import MOST_COMPOSITIONS, compositions, details, phase_table
from pytest_gpumem.reports.view import Measured, measured_in
from pytest_gpumem.values.composition import Composition, Explanation
from tests.reports.made_up import GB, MB, explained, recorded, result, verdict_on

TRAINED = {
    "peak_allocated": 86 * MB,
    "peak_forward": 86 * MB,
    "peak_backward": 80 * MB,
    "peak_optimizer": 14 * MB,
    "forward_time": 0.060,
    "backward_time": 0.090,
    "optimizer_time": 0.010,
}


def lines(pieces) -> list[str]:
    return [line for piece in pieces for line in (plain_lines(piece) if isinstance(piece, Table) else [text_of(piece)])]


def literal(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


def test_each_phase_has_its_peak_and_its_time_and_how_they_changed():
    verdict = verdict_on(TRAINED, TRAINED | {"peak_backward": 40 * MB, "forward_time": 0.050})
    table = phase_table(Measured(result(verdict).verdict, verdict), "si")
    assert table is not None
    assert lines([table]) == [
        "  phase          peak    change      time   change",
        "  forward    86.00 MB    +0.0 %  60.00 ms  +20.0 %",
        "  backward   80.00 MB  +100.0 %  90.00 ms   +0.0 %",
        "  optimizer  14.00 MB    +0.0 %  10.00 ms   +0.0 %",
    ]


def test_phases_that_were_not_timed_have_peaks_only():
    verdict = verdict_on({"peak_allocated": GB, "peak_forward": GB}, None)
    table = phase_table(Measured(result(verdict).verdict, verdict), "si")
    assert table is not None
    assert [line.split() for line in lines([table])] == [["phase", "peak", "change"], ["forward", "1.00", "GB"]]


def test_a_call_has_no_phases():
    (measured,) = measured_in([recorded()])
    assert phase_table(measured, "si") is None


def test_details_are_the_phases_and_what_is_there_at_the_peak():
    shown = lines(details(measured_in([explained(peak_forward=5 * GB)]), "si"))
    assert shown == [
        "a.py::test_a",
        "  phase       peak  change",
        "  forward  5.00 GB",
        "  5.00 GB at the peak",
        "                 bytes  module         line         operator  tensors",
        "  activations  3.00 GB  blocks.*.attn  model.py:88  _softmax  24 x bfloat16[8, 12, 64, 64]",
        "  parameters   2.00 GB  blocks.*.attn                         24 x bfloat16[64, 64]",
        "",
    ]


def test_what_a_recording_has_to_say_stands_with_its_peak():
    noted = Explanation(Composition(GB, (), notes=("the recorded run had another peak",)))
    measured = measured_in([result(verdict_on({"peak_allocated": GB}, None, explanation=noted))])
    assert "  note: the recorded run had another peak" in lines(details(measured, "si"))


def test_where_a_step_was_not_explained_the_option_is_named_once():
    steps = [result(verdict_on(TRAINED, None), test=f"test_{number}") for number in range(2)]
    shown = lines(details(measured_in([*steps, explained()]), "si"))
    assert [line for line in shown if "--gpumem-explain=always" in line] == [shown[-2]]
    assert not any("--gpumem-explain" in line for line in lines(details(measured_in([explained(), recorded()]), "si")))


def test_every_measurement_that_was_explained_is_told_with_its_peak():
    shown = lines(compositions(measured_in([explained("test_a"), explained("test_b", 2)]), "si", everything=False))
    assert [line for line in shown if line.startswith("a.py::")] == [
        "a.py::test_a: 5.00 GB at the peak",
        "a.py::test_b (call): 5.00 GB at the peak",
        "a.py::test_b (call): 5.00 GB at the peak",
    ]
    assert sum("activations" in line for line in shown) == 3


def test_of_very_many_the_first_are_told_unless_all_are_asked_for():
    measured = measured_in([explained(f"test_{number}") for number in range(MOST_COMPOSITIONS + 2)])
    short = lines(compositions(measured, "si", everything=False))
    assert sum("at the peak" in line for line in short) == MOST_COMPOSITIONS
    assert short[-2] == "... and 2 more; -v shows them all"
    assert (
        sum("at the peak" in line for line in lines(compositions(measured, "si", everything=True)))
        == MOST_COMPOSITIONS + 2
    )


def test_what_was_not_explained_is_not_told():
    assert compositions(measured_in([recorded()]), "si", everything=True) == []
