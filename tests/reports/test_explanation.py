"""Why a measurement fails, as lines of text: what grew, what is there, what was left behind, and where memory ran out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.units import parse_size
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import REST, Composition, Explanation, Row
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.judging.gate.baseline import Baseline, Budget
from pytest_gpumem.judging.gate.changes import with_changes
from pytest_gpumem.judging.gate.difference import Change, Difference, difference
from pytest_gpumem.judging.gate.failing import failing_metrics
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.verdict import FAILING, Outcome, Verdict
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.explanation import (
    change_table,
    composition_table,
    explanation_blocks,
    out_of_memory_lines,
    part_lines,
)
from tests.reports.made_up import literal_lines

unhurried = settings(deadline=None)
MB, GB = 10**6, 10**9
CPU = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})


def growth_lines(growth: Difference, units: str) -> list[str]:
    return part_lines(change_table(growth, units))


def composition_lines(title: str, of: Composition, units: str, **most: int) -> list[str]:
    return part_lines(composition_table(title, of, units, **most))


def row(category: str, nbytes: int, module: str = "", operator: str = "mul", **rest: object) -> Row:
    return Row(category, nbytes, module, operator=operator, **rest)  # type: ignore[arg-type]


def composition(*rows: Row, rest: int = 0, **more: object) -> Composition:
    return Composition(sum(row.nbytes for row in rows) + rest, rows, **more)  # type: ignore[arg-type]


ATTENTION = row(
    "activation", 5 * GB, "blocks.*.attn", "_softmax", site="model.py:88", tensor="bfloat16[8, 12, 64, 64]", count=24
)
WEIGHTS = row("parameter", 2 * GB, "blocks.*.attn", "", tensor="bfloat16[64, 64]", count=24)


def verdict_of(
    now: Composition | None, then: Composition | None = None, *, baseline: bool = True, **more: object
) -> Verdict:
    """The verdict on a peak of ``now``, compared with ``then``; a baseline of half as much where that was not kept."""
    total = now.total if now is not None else 8 * GB
    explanation = None if now is None else Explanation(now, **more)  # type: ignore[arg-type]
    metrics = {"peak_allocated": total, "retained": 7, "cyclic_garbage": 8}
    measurement = Measurement("call", Workload("call"), CPU, metrics, explanation=explanation)
    earlier = {"peak_allocated": then.total if then is not None else total // 2}
    entry = Baseline(Workload("call"), CPU, earlier, "2026-11-02", "abc1234", then)
    return _verdict(measurement, entry if baseline else None)


def _verdict(measurement: Measurement, baseline: Baseline | None) -> Verdict:
    return with_changes(judge(measurement, Budget(), baseline, DEFAULT_TOLERANCES), baseline)


# What grew


def test_a_row_that_grew_is_told_with_its_line_operator_and_why():
    wider = row(
        "activation",
        10 * GB,
        "blocks.*.attn",
        "_softmax",
        site="model.py:90",
        tensor="float32[8, 12, 64, 64]",
        count=24,
    )
    told = growth_lines(difference(composition(ATTENTION, WEIGHTS), composition(wider, WEIGHTS)), "si")
    assert told == literal_lines(
        """
        what grew    baseline       now    change  module         line         operator  tensors
        activations   5.00 GB  10.00 GB  +5.00 GB  blocks.*.attn  model.py:90  _softmax  24 x float32[8, 12, 64, 64]  was bfloat16, now float32
        """
    )


def test_a_new_row_has_no_baseline_and_columns_that_nobody_needs_are_left_out():
    more = row("temporary", GB, site="train.py:3", tensor="float32[8]")
    told = growth_lines(difference(composition(WEIGHTS), composition(WEIGHTS, more)), "si")
    assert told == literal_lines(
        """
        what grew    baseline      now    change  module       line        operator  tensors
        temporaries         -  1.00 GB  +1.00 GB  (no module)  train.py:3  mul       1 x float32[8]
        """
    )


def test_calls_at_places_that_a_baseline_did_not_keep_are_of_other_lines():
    kept = Tally("mm", 8, OperatorSite("head", "model.py:10"))
    now = (
        kept,
        *(Tally("mm", 6, OperatorSite("h.*", f"model.py:{line}")) for line in (20, 21)),
        Tally("mul", 1, OperatorSite("", "t.py:3")),
    )
    workload = Workload("call")
    entry = Baseline(workload, CPU, {"operators": 14}, "2026-11-02", by_operator={"operators": (kept, Tally("mm", 6))})
    measurement = Measurement("call", workload, CPU, {"operators": 21}, by_operator={"operators": now})
    (told,) = explanation_blocks(_verdict(measurement, entry), ["operators"], "si")
    assert told == literal_lines(
        """
        more operators  change  module       line
        mm                  +6  h.*          (other lines)
        mul                 +1  (no module)  t.py:3
        """
    )


def test_the_librarys_line_is_told_with_the_users_that_reached_it():
    more = row("activation", GB, "h", site="train.py:3", library="transformers/gpt2.py:123")
    (_, line) = growth_lines(difference(composition(WEIGHTS), composition(WEIGHTS, more)), "si")
    assert "transformers/gpt2.py:123 (from train.py:3)" in line


def test_what_shrank_is_not_told_by_itself_but_in_the_sum_of_the_others():
    before = composition(row("activation", 3 * GB, "a"), WEIGHTS)
    after = composition(row("temporary", 10 * GB, "b", "add", tensor="float32[9]"), WEIGHTS)
    lines = growth_lines(difference(before, after), "si")
    assert len(lines) == 3
    assert lines[-1] == "1 other change: -3.00 GB together"


def test_what_the_baseline_did_not_keep_is_one_row():
    before = composition(WEIGHTS, rest=GB)
    after = composition(WEIGHTS, *(row("activation", GB // 50, f"m{number}") for number in range(150)))
    (line,) = [line for line in growth_lines(difference(before, after), "si") if line.startswith("smaller rows")]
    assert "block" not in line, "it is not one tensor"
    assert "(no module)" not in line


KEYS, VALUES = (
    row("activation", 50 * MB, f"{name}.*", "mm", site=f"model.py:{line}", tensor="float32[8, 64]", count=4)
    for name, line in (("to_k", 7), ("to_v", 8))
)
REST_OF_ACTIVATIONS = row("activation", 60 * MB, operator=REST, count=9)


def test_alternatives_are_told_first_each_with_its_line():
    before = composition(WEIGHTS, REST_OF_ACTIVATIONS)
    after = composition(WEIGHTS, KEYS, VALUES, row("activation", 10 * MB, "norm", count=5))
    assert growth_lines(difference(before, after), "si") == literal_lines(
        """
        what grew            baseline        now     change  module  line        operator  tensors
        one of these 2 rows  60.00 MB  110.00 MB  +50.00 MB                                                    the baseline does not list these rows
        - activations               -   50.00 MB          -  to_k.*  model.py:7  mm        4 x float32[8, 64]
        - activations               -   50.00 MB          -  to_v.*  model.py:8  mm        4 x float32[8, 64]
        """
    )


@pytest.mark.parametrize(
    ("growth", "number", "title"),
    [
        (50 * MB, 1, "this row or smaller ones"),
        (90 * MB, 1, "this row and smaller ones"),
        (50 * MB, 3, "one of these 3 rows"),
        (90 * MB, 3, "some of these 3 rows"),
        (50 * MB, 7, "one of these 7 rows"),
    ],
)
def test_the_title_says_whether_one_row_may_be_all_that_grew(growth, number, title):
    sums = (replace(REST_OF_ACTIVATIONS, nbytes=nbytes) for nbytes in (GB, GB + growth))
    rows = tuple(replace(KEYS, module=f"m{number}") for number in range(number))
    lines = growth_lines(Difference(GB, GB + growth, (Change(*sums, "", rows),)), "si")
    assert lines[1].startswith(f"{title}  ")
    assert len(lines) == 2 + min(number, 5) + (number > 5)
    assert lines[-1].startswith("- 2 other rows") is (number > 5)


MODULES = st.sampled_from(["attn", "mlp", "norm", "head", "embed", "blocks.*.attn", "blocks.*.mlp"])
ROWS = st.builds(
    Row,
    st.sampled_from(["parameter", "gradient", "activation", "temporary", "workspace", "other"]),
    st.integers(1, GB),
    MODULES,
    st.sampled_from(["model.py:1", "model.py:2", ""]),
    st.just(""),
    st.sampled_from(["mul", "addmm", "MulBackward0"]),
    st.sampled_from(["float32[8]", "bfloat16[8]", "float32[8, 8]", ""]),
    st.integers(1, 9),
)
COMPOSITIONS = st.lists(ROWS, max_size=12).map(lambda rows: composition(*rows))
CHANGES = re.compile(r"(\d+) other changes?: ([+-][\d.]+ \w+) together")


@unhurried
@given(COMPOSITIONS, COMPOSITIONS)
def test_rows_that_are_told_explain_most_of_the_growth_and_the_others_the_rest(before, after):
    found = difference(before, after)
    assume(found.nbytes > 0)
    told = found.explaining()
    lines = growth_lines(found, "si")
    others = CHANGES.fullmatch(lines[-1])
    assert len(lines) == 1 + len(told) + (others is not None)
    grown = [change for change in found.changes if change.nbytes > 0]
    assert list(told) == grown[: len(told)], "the largest"
    assert 1 <= len(told) <= 5
    explained = sum(change.nbytes for change in told)
    assert explained >= 0.8 * found.nbytes or len(told) == 5
    # A few more are told where they matter.
    worth = [change for change in grown[:3] if change.nbytes >= 0.01 * found.nbytes]
    assert len(told) >= len(worth)
    left = len(found.changes) - len(told)
    assert (int(others.group(1)) if others else 0) == left
    if others:
        amount = parse_size(others.group(2).removeprefix("-").removeprefix("+"))
        signed = -amount if others.group(2).startswith("-") else amount
        assert signed == pytest.approx(found.nbytes - explained, rel=0.01, abs=1)
    else:
        assert explained == found.nbytes


def test_bytes_are_shown_in_the_units_of_the_settings():
    lines = growth_lines(difference(composition(), composition(row("input", 2**30, "m"))), "iec")
    assert "+1.00 GiB" in lines[1]


# What is there


def test_a_composition_is_its_largest_rows_and_the_rest():
    shown = composition_lines("what is there", composition(ATTENTION, WEIGHTS, rest=3 * MB), "si")
    assert shown == literal_lines(
        """
        what is there    bytes  module         line         operator  tensors
        activations    5.00 GB  blocks.*.attn  model.py:88  _softmax  24 x bfloat16[8, 12, 64, 64]
        parameters     2.00 GB  blocks.*.attn                         24 x bfloat16[64, 64]
        the rest: 3.00 MB
        """
    )


def test_rows_that_are_not_shown_are_in_the_rest():
    many = composition(*(row("activation", GB + number, f"m{number}") for number in range(8)), rest=GB)
    lines = composition_lines("what is there", many, "si")
    assert len(lines) == 1 + 5 + 1
    assert lines[-1] == "the rest: 4.00 GB"
    assert len(composition_lines("what is there", many, "si", most=10)) == 1 + 8 + 1


def test_a_composition_that_is_shown_whole_has_no_rest():
    assert not any("rest" in line for line in composition_lines("what is there", composition(WEIGHTS), "si"))


def test_rows_are_not_more_than_the_total_if_a_row_is_negative():
    """Example: other owners' blocks of 4 MB were freed while the step ran."""
    freed = Row("unattributed", -4 * MB)
    made = composition(row("activation", 10 * MB, "net"), row("activation", 7 * MB, "head"), freed)
    assert composition_lines("what is there", made, "si") == literal_lines(
        """
        what is there    bytes  module  line  operator  tensors
        activations    7.00 MB  head          mul       1 x block
        activations    6.00 MB  net           mul       1 x block
        note: 4.00 MB are left out, because as much older memory was freed meanwhile
        """
    )
    alone = composition(row("activation", 10 * MB, "net"), freed)
    assert composition_table("what is there", alone, "si").parts[0].figures == ("6.00 MB",)
    hidden = composition(*(row("activation", 10 * MB, f"m{number}") for number in range(7)), freed)
    assert composition_lines("what is there", hidden, "si")[-1] == "the rest: 16.00 MB"


@given(st.lists(st.integers(-50, 50).filter(bool), max_size=9), st.integers(1, 9))
def test_what_is_shown_of_a_composition_adds_up_to_its_total(sizes, most):
    rows = [row("unattributed" if size < 0 else "activation", size, f"m{n}") for n, size in enumerate(sizes)]
    table = composition_table("what is there", composition(*rows), "si", most)
    figures = [*(part.figures[0] for part in table.parts), *([table.rest] if table.others_title else [])]
    assert sum(int(figure.removesuffix(" B")) for figure in figures) == max(0, sum(sizes))


# Which blocks


def test_a_peak_that_grew_is_explained_by_what_grew():
    more = row("activation", GB, "h", site="train.py:3")
    then, now = composition(WEIGHTS), composition(WEIGHTS, more)
    verdict = verdict_of(now, then)
    assert verdict.difference == difference(then, now)
    (block,) = explanation_blocks(verdict, ["peak_allocated"], "si")
    assert block == growth_lines(difference(then, now), "si")


def test_notes_on_a_recording_are_told_with_it():
    now = composition(WEIGHTS, ATTENTION, notes=("the recorded run needed 5 B",))
    for then in (composition(WEIGHTS), None):
        (block,) = explanation_blocks(verdict_of(now, then), ["peak_allocated"], "si")
        assert "note: the recorded run needed 5 B" in block


def test_a_baseline_without_a_composition_is_said_to_have_none_and_how_it_gets_one():
    (block,) = explanation_blocks(verdict_of(composition(WEIGHTS)), ["peak_allocated"], "si")
    assert block[0].startswith("what is there at the peak")
    assert block[-1] == (
        "note: the baseline has no composition to compare with; accepting the figures stores a composition "
        "(not under --gpumem-explain=never)"
    )


def test_without_a_baseline_what_is_there_at_the_peak_is_told_without_a_note():
    (block,) = explanation_blocks(verdict_of(composition(WEIGHTS), baseline=False), ["peak_allocated"], "si")
    assert block == composition_lines("what is there at the peak", composition(WEIGHTS), "si")


def test_a_peak_over_its_budget_that_did_not_grow_is_told_by_what_is_there():
    then = now = composition(WEIGHTS)
    (block,) = explanation_blocks(verdict_of(now, then), ["peak_allocated"], "si")
    assert block == composition_lines("what is there at the peak", now, "si")


@pytest.mark.parametrize("metric", ["peak_forward", "peak_reserved"])
def test_every_peak_is_explained_by_the_peak(metric):
    assert len(explanation_blocks(verdict_of(composition(WEIGHTS)), [metric], "si")) == 1


def test_what_was_retained_is_told_for_that_metric_alone():
    left = composition(row("activation", 4 * MB, "h", site="train.py:3"))
    verdict = verdict_of(composition(WEIGHTS), retained=left, garbage=left)
    assert explanation_blocks(verdict, ["retained"], "si") == [composition_lines("what was retained", left, "si")]
    assert explanation_blocks(verdict, ["step_time"], "si") == []


def test_cyclic_garbage_is_told_with_the_cycles_that_held_it():
    left = composition(row("activation", 4 * MB, "h", site="train.py:3"))
    verdict = verdict_of(composition(WEIGHTS), garbage=left, cycles=("Trainer -> dict -> Trainer", "list -> list"))
    (block,) = explanation_blocks(verdict, ["cyclic_garbage"], "si")
    assert block == [
        *composition_lines("held by cycles", left, "si"),
        "cycle: Trainer -> dict -> Trainer",
        "cycle: list -> list",
    ]


def test_what_was_not_recorded_and_what_is_not_there_has_no_block():
    assert explanation_blocks(verdict_of(None), ["peak_allocated", "retained", "cyclic_garbage"], "si") == []
    assert explanation_blocks(verdict_of(composition(WEIGHTS)), ["retained", "cyclic_garbage"], "si") == []


def test_the_metrics_in_bytes_that_fail_are_the_guilty_ones():
    metrics = {"peak_allocated": 2 * GB, "retained": 9 * MB, "cyclic_garbage": 0, "step_time": 9.0}
    earlier = {"peak_allocated": GB, "retained": 9 * MB, "cyclic_garbage": 0, "step_time": 1.0}
    measurement = Measurement("call", Workload("call"), CPU, metrics)
    verdict = judge(
        measurement,
        Budget({"retained": MB}),
        Baseline(Workload("call"), CPU, earlier, "2026-11-02"),
        DEFAULT_TOLERANCES,
    )
    assert failing_metrics(verdict, FAILING) == ["peak_allocated", "retained"]
    assert failing_metrics(verdict, {Outcome.OVER_BUDGET}) == ["retained"]
    assert failing_metrics(verdict, set()) == []


# Out of memory


def test_where_memory_had_gone_when_it_ran_out():
    lines = out_of_memory_lines(Explanation(composition(ATTENTION, WEIGHTS), asked=20 * GB), "si")
    assert lines[0] == (
        "memory ran out when 20.00 GB more were asked for; the step held 7.00 GB (in another run, which was recorded)"
    )
    assert lines[1:] == composition_lines("what was there", composition(ATTENTION, WEIGHTS), "si")


def test_where_nobody_knows_how_much_was_asked_for_it_is_not_told():
    (first, *_) = out_of_memory_lines(Explanation(composition(WEIGHTS)), "iec")
    assert first == "memory ran out; the step held 1.86 GiB (in another run, which was recorded)"


def test_of_what_was_there_more_is_told_than_of_a_regression():
    many = composition(*(row("activation", GB, f"m{number}") for number in range(20)))
    lines = out_of_memory_lines(Explanation(many), "si")
    assert len(lines) == 1 + 1 + 10 + 1
    assert lines[-1] == "the rest: 10.00 GB"


def test_a_difference_without_changes_has_a_header_only():
    assert len(growth_lines(Difference(1, 1, ()), "si")) == 1
