"""What a session says at its end: how much of it at which verbosity, in which style, on which screen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.gate.baseline import NoBaseline
from pytest_gpumem.reporting.reports.layout import Line, Screen, Table, cells, plain_lines, text_of
from pytest_gpumem.reporting.reports.session_report import SessionReport, Terms
from pytest_gpumem.reporting.reports.terminal import (
    MARKUP,
    MOST_COMPOSITIONS,
    compositions,
    details,
    phase_table,
    terminal_text,
)
from pytest_gpumem.reporting.reports.view import ShownMeasurement, shown_measurements
from tests.hostile import ALL
from tests.reports.made_up import (
    GB,
    MB,
    cell,
    explained,
    new,
    ok,
    recorded,
    regressed,
    result,
    verdict_on,
)

GATING = Terms(baseline=True)


def report(*results, terms=GATING, **more) -> SessionReport:
    return SessionReport("2026-11-21T16:20:05Z", "0.1.0", terms=terms, results=results, **more)


def lines(said: SessionReport, verbosity: int = 0, width: int | None = None, **more) -> list[str]:
    text = terminal_text(said, Screen(width), verbosity, **more)
    return [text_of(line) for line in (*text.tables, *text.lines)]


def style_of(line: Line):
    (span,) = line
    return span.style


# How much


def test_where_everything_is_fine_the_accounting_line_is_all():
    assert lines(report(ok(1), ok(2), ok(3))) == ["gpumem: 3 gated"]


def test_what_is_not_fine_is_a_table_and_the_rest_is_counted():
    assert lines(report(ok(1), regressed(2), ok(3))) == [
        "test               peak    change  verdict",
        "a.py::test_002  2.00 GB  +100.0 %  regressed",
        "... and 2 ok (-v shows all)",
        "",
        "gpumem: 3 gated, 1 regressed",
    ]


def test_the_peak_of_each_gpu_is_a_line_of_a_measurement_that_used_several():
    by_device = {"cuda:0": {"peak_allocated": int(0.9 * GB)}, "cuda:1": {"peak_allocated": GB}}
    one = recorded(1)
    (verdict,) = one.verdict.verdicts
    several = replace(verdict, measurement=replace(verdict.measurement, by_device=by_device))
    split = replace(one, verdict=replace(one.verdict, verdicts=(several,)))
    assert lines(report(split, recorded(2), terms=Terms())) == [
        "test               peak  verdict",
        "a.py::test_001  1.00 GB  recorded",
        "a.py::test_002  1.00 GB  recorded",
        "a.py::test_001: peak 1.00 GB on cuda:1 (cuda:0 900.00 MB)",
        "",
        "gpumem: 0 gated, 2 recorded (no budget, and no --gpumem-baseline)",
    ]


def test_recording_baselines_shows_what_was_recorded_and_where_it_went():
    said = report(
        new(1), terms=Terms(update="new"), closing_lines=("store: 1 baseline written (new), 0 left as they were",)
    )
    assert lines(said) == [
        "test               peak  verdict",
        "a.py::test_001  1.00 GB  new",
        "new: there is no baseline for NVIDIA H100 80GB HBM3 yet",
        "",
        "gpumem store: 1 baseline written (new), 0 left as they were",
        "gpumem: 1 recorded, new",
    ]


def test_what_was_not_compared_is_told_of_tests_that_are_fine_as_well():
    then = {"peak_allocated": GB}
    said = lines(report(result(verdict_on(then, then, notes=("not counted: no such mode",)))))
    assert said == ["note: a.py::test_a: not counted: no such mode", "", "gpumem: 1 gated"]


def test_what_a_recording_has_to_say_is_told_once_at_any_verbosity_but_q():
    noted = Explanation(Composition(GB, (), notes=("the recorded run had another peak",)))
    said = report(result(verdict_on({"peak_allocated": GB}, {"peak_allocated": GB}, explanation=noted)))
    counts = [sum("had another peak" in line for line in lines(said, verbosity)) for verbosity in (-1, 0, 1, 2)]
    assert counts == [0, 1, 1, 1]


def test_tests_that_are_not_measured_are_left_to_pytest_to_tell():
    said, alone = (terminal_text(report(ok(1), unmeasured_failures=count), Screen()) for count in (3, 0))
    assert said == alone


def test_tests_with_a_process_that_was_not_measured_are_named_at_any_verbosity_but_q():
    clause = "not seen: `python -I x.py` loads torch"
    alone = [
        result(test=f"test_{n}", unmeasured=f"{clause}; no tensor", unmeasured_processes=(clause,)) for n in range(3)
    ]
    beside = replace(ok(3), verdict=replace(ok(3).verdict, unmeasured_processes=(clause, "not seen: `y`")))
    for verbosity, names in ((-1, []), (0, ["a.py::test_0, a.py::test_1, a.py::test_2 and 1 other"])):
        said = lines(report(*alone, beside), verbosity)
        assert [line for line in said if clause in line and "::" in line] == [f"note: {n}: {clause}" for n in names]
    assert "note: a.py::test_003: not seen: `y`" in said
    failed = replace(alone[0], verdict=replace(alone[0].verdict, failure=f"Not measured: {clause}"))
    assert not any("::test_0" in line for line in lines(report(failed)))


def test_v_shows_everything():
    said = lines(report(ok(1), regressed(2), ok(3)), 1)
    assert [line.split()[0] for line in said if line] == ["test", *(f"a.py::test_00{n}" for n in (1, 2, 3)), "gpumem:"]


def test_vv_shows_phases_and_compositions():
    said = report(explained(peak_forward=5 * GB))
    assert not any("forward" in line or "activations" in line for line in lines(said, 1))
    assert any(line.split() == ["forward", "5.00", "GB"] for line in lines(said, 2))
    assert any("activations" in line for line in lines(said, 2))


def test_what_explaining_always_asked_for_is_shown_without_any_v():
    assert "a.py::test_a: 5.00 GB at the peak" in lines(report(explained()), explain_all=True)
    assert not any("at the peak" in line for line in lines(report(explained())))


def test_q_leaves_the_accounting_line_and_why_the_session_is_red():
    said = report(
        new(1),
        closing_lines=("store: ...",),
        errors=("baselines were not written: no room",),
        selection=Selection(budgets_without_effect=("the budget has no effect",)),
    )
    assert lines(said, -1) == [
        "gpumem: the budget has no effect",
        "gpumem: baselines were not written: no room",
        f"gpumem: {said.nothing_gated}",
        "gpumem: 0 gated, 1 new",
    ]


MATRIX = (cell("fp32", 0, 4 * GB), cell("bf16", 1, 2 * GB), cell("tf32", 2, None, "TF32 is not for CPUs"))


def test_a_matrix_is_shown_for_its_figures_and_where_a_gate_is_asked_for_all():
    title = "a.py::test_matrix"
    assert any(line.startswith(f"{title} ") for line in lines(report(*MATRIX, terms=Terms())))
    assert not any(line.startswith(f"{title} ") for line in lines(report(*MATRIX)))
    assert any(line.startswith(f"{title} ") for line in lines(report(*MATRIX), 1))


def test_a_matrix_of_which_nothing_was_measured_is_shown_on_request_only():
    title = "a.py::test_matrix"
    skipped = [cell("tf32", 0, None, "it was skipped"), cell("fp32", 1, None, "it was skipped")]
    assert not any(line.startswith(f"{title} ") for line in lines(report(*skipped, terms=Terms())))
    assert any(line.startswith(f"{title} ") for line in lines(report(*skipped, terms=Terms()), 1))


def test_asking_for_a_gate_of_nothing_is_told():
    assert lines(report()) == ["gpumem: nothing to gate: no measured test was selected"]
    assert lines(report(terms=Terms())) == []


def test_tests_that_were_not_run_are_accounted_for():
    assert lines(report(not_run=(("a.py", "test_b"),))) == ["gpumem: 0 gated, 1 did not finish"]


# Styles


@pytest.mark.parametrize(
    ("said", "style"),
    [
        (report(ok()), "good"),
        (report(ok(), regressed("test_b")), "bad"),
        (report(ok(), not_run=(("a.py", "test_b"),)), "bad"),
        (report(ok(), result(test="test_b", unmeasured="no CUDA device")), "doubtful"),
        (report(recorded(), terms=Terms()), None),
    ],
    ids=["ok", "regressed", "not-run", "unmeasured", "recorded"],
)
def test_the_accounting_line_has_the_style_of_the_worst_that_it_tells(said, style):
    assert style_of(terminal_text(said, Screen()).lines[-1]) == style


def test_a_verdict_has_the_style_of_its_meaning():
    text = terminal_text(report(ok(1), regressed(2), new(3)), Screen(), 1)
    styles = {span.text: span.style for line in text.tables for span in line if span.text in ("ok", "regressed", "new")}
    assert styles == {"ok": "good", "regressed": "bad", "new": None}


def test_pytest_has_a_markup_for_every_style():
    text = terminal_text(report(*MATRIX, regressed(1), explained(peak_forward=5 * GB)), Screen(), 2)
    assert {span.style for line in (*text.tables, *text.lines) for span in line} <= set(MARKUP)


# Screens


EVERYTHING = report(
    ok("test_with_a_name_that_is_rather_long_for_a_terminal[fp32-ckpt-blocks]"),
    regressed("test_漢字" * 8, operators=7, step_time=0.5),
    result(verdict_on({"peak_allocated": GB}, NoBaseline(("NVIDIA A100",))), test="test_foreign"),
    *MATRIX,
    explained(peak_forward=5 * GB, forward_time=0.25),
)


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_row_is_wider_than_the_terminal(width, encoding):
    text = terminal_text(EVERYTHING, Screen(width, encoding), 2)
    prose = ("foreign: ", "  saving and cost", "what other peaks", "not shown", "  not shown")
    rows = [line for line in map(text_of, text.tables) if not line.startswith(prose)]
    assert len(rows) > 20
    assert max(map(cells, rows)) <= width


def test_nothing_is_cut_where_there_is_no_terminal():
    name = "test_" + "x" * 500
    assert any(f"a.py::{name} " in line for line in lines(report(regressed(name))))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("hostile", [ALL, ""], ids=["all", "nothing"])
def test_no_text_of_a_test_breaks_a_line_or_cannot_be_written(hostile, encoding):
    then = {"peak_allocated": GB}
    noted = Explanation(Composition(GB, (), notes=(hostile,)))
    said = report(
        result(verdict_on(then, None, f"m{hostile}", notes=(hostile,)), verdict_on(then, None), test=hostile),
        result(verdict_on(then, then, explanation=noted), file=f"{hostile}.py", test="test_b"),
        result(test="test_c", unmeasured=hostile or "so"),
        closing_lines=(hostile,),
        errors=(hostile,),
        selection=Selection(budgets_without_effect=(hostile,)),
        terms=Terms(),
    )
    plain = terminal_text(report(result(verdict_on(then, None, "m"), verdict_on(then, None), test="x")), Screen(), 2)
    text = terminal_text(said, Screen(None, encoding), 2)
    for line in (*text.tables, *text.lines):
        assert len(text_of(line).splitlines()) <= 1
        assert "\x1b" not in text_of(line)
        text_of(line).encode(encoding)
    assert len(text.tables) > len(plain.tables)


# Phases and compositions: -vv and --gpumem-explain=always


TRAINED = {
    "peak_allocated": 86 * MB,
    "peak_forward": 86 * MB,
    "peak_backward": 80 * MB,
    "peak_optimizer": 14 * MB,
    "forward_time": 0.060,
    "backward_time": 0.090,
    "optimizer_time": 0.010,
}


def piece_lines(pieces) -> list[str]:
    return [line for piece in pieces for line in (plain_lines(piece) if isinstance(piece, Table) else [text_of(piece)])]


def test_each_phase_has_its_peak_and_its_time_and_how_they_changed():
    verdict = verdict_on(TRAINED, TRAINED | {"peak_backward": 40 * MB, "forward_time": 0.050})
    table = phase_table(ShownMeasurement(result(verdict).verdict, verdict), "si")
    assert table is not None
    assert piece_lines([table]) == [
        "  phase          peak    change      time   change",
        "  forward    86.00 MB    +0.0 %  60.00 ms  +20.0 %",
        "  backward   80.00 MB  +100.0 %  90.00 ms   +0.0 %",
        "  optimizer  14.00 MB    +0.0 %  10.00 ms   +0.0 %",
    ]


def test_a_call_has_no_phases():
    (measured,) = shown_measurements([recorded()])
    assert phase_table(measured, "si") is None


def test_details_are_the_phases_and_what_is_there_at_the_peak():
    shown = piece_lines(details(shown_measurements([explained(peak_forward=5 * GB)]), "si"))
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
    measured = shown_measurements([result(verdict_on({"peak_allocated": GB}, None, explanation=noted))])
    assert "  note: the recorded run had another peak" in piece_lines(details(measured, "si"))


def test_where_a_step_was_not_explained_the_option_is_named_once():
    steps = [result(verdict_on(TRAINED, None), test=f"test_{number}") for number in range(2)]
    shown = piece_lines(details(shown_measurements([*steps, explained()]), "si"))
    assert [line for line in shown if "--gpumem-explain=always" in line] == [shown[-2]]
    assert not any(
        "--gpumem-explain" in line for line in piece_lines(details(shown_measurements([explained(), recorded()]), "si"))
    )


def test_every_measurement_that_was_explained_is_told_with_its_peak():
    shown = piece_lines(
        compositions(shown_measurements([explained("test_a"), explained("test_b", 2)]), "si", everything=False)
    )
    assert [line for line in shown if line.startswith("a.py::")] == [
        "a.py::test_a: 5.00 GB at the peak",
        "a.py::test_b (call): 5.00 GB at the peak",
        "a.py::test_b (call): 5.00 GB at the peak",
    ]
    assert sum("activations" in line for line in shown) == 3


def test_of_very_many_the_first_are_told_unless_all_are_asked_for():
    measured = shown_measurements([explained(f"test_{number}") for number in range(MOST_COMPOSITIONS + 2)])
    short = piece_lines(compositions(measured, "si", everything=False))
    assert sum("at the peak" in line for line in short) == MOST_COMPOSITIONS
    assert short[-2] == "... and 2 more; -v shows all"
    assert (
        sum("at the peak" in line for line in piece_lines(compositions(measured, "si", everything=True)))
        == MOST_COMPOSITIONS + 2
    )


@pytest.mark.parametrize("verbosity", [0, 2], ids=["explain=always", "-vv"])
def test_every_composition_is_told_with_its_notes(verbosity):
    rows = (Row("activation", 5 * GB, "net"), Row("unattributed", -GB))
    explanation = Explanation(Composition(4 * GB, rows, notes=("recorded by module",)))
    one = result(verdict_on({"peak_allocated": 4 * GB}, None, explanation=explanation))
    told = lines(report(one, terms=Terms()), verbosity, explain_all=not verbosity)
    notes = [line for line in told if line.startswith("  note: ")]
    assert notes == [
        "  note: 1.00 GB are left out, because as much older memory was freed meanwhile",
        "  note: recorded by module",
    ]


def test_what_was_not_explained_is_not_told():
    assert compositions(shown_measurements([recorded()]), "si", everything=True) == []
