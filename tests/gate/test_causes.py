"""Causes of a session's failures: the fewest lines that explain what grew, with the share of each in every test's growth."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import FIRST_USE, REST, Composition, Explanation, Holder, Row, holder_at
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.judging.gate.causes import causes_of
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.growths import ENOUGH
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Origin, Outcome, TestVerdict, Verdict
from pytest_gpumem.reporting.reports.causes import cause_notes

MB = 10**6
SCORES = Row("activation", 0, "blocks.*.attn", "model.py:38", "", "_softmax", "float32[8, 256, 256]", 4)
MLP = Row("activation", 0, "blocks.*.mlp", "model.py:60", "", "gelu", "float32[8, 1024]", 4)
OTHERS = Row("activation", 0, operator=REST)


def regressed(name, *parts, baseline=100 * MB, packages=None, **others):
    """A test whose peak has grown by rows, given as (row, bytes)."""
    changes = tuple(
        Change(None, replace(row, nbytes=nbytes)) if nbytes > 0 else Change(replace(row, nbytes=-nbytes), None)
        for row, nbytes in parts
    )
    grown = sum(nbytes for _, nbytes in parts)
    peak = MetricVerdict("peak_allocated", Outcome.REGRESSED, baseline + grown, baseline, 0)
    return TestVerdict(
        "test_it.py", name, (verdict(peak, Difference(baseline, baseline + grown, changes), packages, **others),)
    )


def verdict(metric, difference=None, packages=None, **others):
    environment = Environment("toy", "Toy", {"torch": "2.13.0"}, packages={"lib": "2.0"} if packages else {})
    measurement = Measurement("train_step", Workload("train_step"), environment, {metric.metric: metric.value})
    measurement = replace(measurement, explanation=others.pop("explanation", None))
    origin = Origin("2026-11-01", "Toy", "2.13.0", packages={"lib": packages} if packages else {})
    return Verdict(measurement, (metric, *others.pop("metrics", ())), origin, difference=difference, **others)


def told(found):
    return [(cause.lines, len(cause.tests), cause.total) for cause in found.causes]


def test_a_line_that_explains_all_tests_is_the_only_cause():
    tests = [
        regressed("test_a", (SCORES, 60 * MB), (MLP, 2 * MB), (OTHERS, -20 * MB)),
        regressed("test_b", (SCORES, 10 * MB)),
        regressed("test_c", (replace(SCORES, tensor="bfloat16[8, 8]", operator="to"), 30 * MB), (MLP, 3 * MB)),
    ]
    found = causes_of(tests)
    # Of 42 MB there are 60 more at the line, since others have shrunk.
    assert told(found) == [(("model.py:38",), 3, 42 * MB + 10 * MB + 30 * MB)]
    (cause,) = found.causes
    assert (cause.module, cause.operator, cause.tensors) == ("blocks.*.attn", "_softmax", "4 x float32[8, 256, 256]")
    assert (cause.largest.growth.test, cause.largest.amount) == ("test_it.py::test_a", 42 * MB)
    assert [(share.growth.test, share.amount) for share in found.not_explained] == [("test_it.py::test_c", 3 * MB)]
    assert found.unexplained == ()
    assert found.of("test_it.py::test_b") == (cause,)


def test_two_changes_are_two_causes_and_each_test_has_its_own():
    both = regressed("test_both", (SCORES, 60 * MB), (MLP, 40 * MB))
    tests = [regressed("test_a", (SCORES, 9 * MB)), both, regressed("test_b", (MLP, 7 * MB))]
    found = causes_of(tests)
    assert told(found) == [(("model.py:38",), 2, 69 * MB), (("model.py:60",), 2, 47 * MB)]
    assert [cause.lines[0] for cause in found.of("test_it.py::test_both")] == ["model.py:38", "model.py:60"]
    assert [cause.lines[0] for cause in found.of("test_it.py::test_b")] == ["model.py:60"]


def test_lines_of_one_module_that_grow_in_the_same_tests_are_one_cause():
    other = replace(SCORES, site="model.py:39", operator="mul")
    found = causes_of([regressed(name, (SCORES, 6 * MB), (other, 5 * MB)) for name in ("test_a", "test_b")])
    assert told(found) == [(("model.py:38", "model.py:39"), 2, 22 * MB)]
    apart = causes_of([regressed("test_a", (SCORES, 6 * MB)), regressed("test_b", (other, 5 * MB))])
    assert told(apart) == [(("model.py:38",), 1, 6 * MB), (("model.py:39",), 1, 5 * MB)]


def test_a_module_within_another_model_is_the_same():
    inner = replace(SCORES, module="model.decoder.blocks.*.attn")
    found = causes_of([regressed("test_a", (SCORES, 6 * MB)), regressed("test_b", (inner, 7 * MB))])
    assert told(found) == [(("model.py:38",), 2, 13 * MB)]


def test_a_line_is_one_cause_in_whichever_modules_it_ran():
    """A module that is measured alone has its class as its name, and an attribute's within a model."""
    alone, listed = (replace(SCORES, module=module) for module in ("Attention", "*"))
    other = [replace(row, site="model.py:39") for row in (SCORES, alone)]
    tests = [
        *(regressed(f"test_{n}", (SCORES, 6 * MB), (other[0], 3 * MB)) for n in range(3)),
        *(regressed(f"test_alone_{n}", (alone, 7 * MB), (other[1], 4 * MB)) for n in range(2)),
        regressed("test_listed", (listed, 5 * MB)),
    ]
    (cause,) = causes_of(tests).causes
    assert (cause.lines, len(cause.tests)) == (("model.py:38", "model.py:39"), 6)
    assert cause.modules == ("blocks.*.attn", "Attention", "*")
    assert cause.module == "blocks.*.attn, Attention and 1 other"
    assert causes_of(tests[:4]).causes[0].module == "blocks.*.attn, Attention"
    elsewhere = replace(SCORES, module="layers.*.attn")
    (cause,) = causes_of([tests[0], regressed("test_a", (elsewhere, 5 * MB))]).causes
    assert cause.module == "*.attn"


def test_a_line_of_a_package_is_a_cause_for_each_module():
    rows = [replace(SCORES, library="lib 1.0: norm.py:7", module=module) for module in ("attn_norm", "mlp_norm")]
    found = causes_of([regressed(f"test_{n}", (row, MB)) for n, row in enumerate(rows)])
    assert [cause.module for cause in found.causes] == ["attn_norm", "mlp_norm"]


def test_lines_of_two_releases_of_a_package_are_the_same():
    rows = [replace(SCORES, site=f"test_{n}.py:9", library=f"lib {n}.0: attn.py:7") for n in (1, 2)]
    found = causes_of([regressed(f"test_{n}", (row, n * MB)) for n, row in enumerate(rows, 1)])
    assert told(found) == [(("lib 2.0: attn.py:7",), 2, 3 * MB)]


def test_what_each_step_keeps_is_counted_with_the_peak_that_grows_by_it():
    kept = replace(SCORES, nbytes=2 * MB)
    kept_by_step = Composition(2 * MB, (kept,))
    explanation = Explanation(Composition(0, ()), kept_by_step, holders=(Holder("Block.seen[...]", kept_by_step),))
    growth = MetricVerdict("growth", Outcome.REGRESSED, 2 * MB, 0, 1000)
    (cause,) = causes_of([regressed("test_a", (SCORES, 18 * MB), explanation=explanation, metrics=(growth,))]).causes
    assert {share.growth.metric: share.amount for share in cause.shares} == {
        "growth": 2 * MB,
        "peak_allocated": 18 * MB,
    }
    assert (cause.kind, cause.holder, cause.lines) == ("holder", "Block.seen[...]", ("model.py:38",))
    assert (cause.metric, cause.total) == ("growth", 2 * MB)


def test_a_cause_has_the_tensors_of_a_step_if_it_has_the_growth_of_a_step():
    """A server keeps keys and values for each request. After 20 requests, the peak has 20 tensors from each line."""
    kept = [replace(SCORES, nbytes=MB, site=f"serve.py:{line}", tensor="float32[8]", count=1) for line in (16, 17)]
    peaks = [(replace(row, count=20), 20 * MB) for row in kept]
    holders = tuple(
        Holder(f"serve.{name}[...]", Composition(MB, (row,)))
        for name, row in zip(("keys", "values"), kept, strict=True)
    )
    explanation = Explanation(Composition(0, ()), Composition(2 * MB, tuple(kept)), holders=holders)
    growth = MetricVerdict("growth", Outcome.REGRESSED, 2 * MB, 0, 1000)
    causes = causes_of([regressed("test_a", *peaks, explanation=explanation, metrics=(growth,))]).causes
    shown = {(cause.holder, cause.metric, cause.total, cause.tensors, cause.lines) for cause in causes}
    assert shown == {
        ("serve.keys[...]", "growth", MB, "1 x float32[8]", ("serve.py:16",)),
        ("serve.values[...]", "growth", MB, "1 x float32[8]", ("serve.py:17",)),
    }


def test_counts_are_explained_by_their_lines_where_no_memory_grew():
    tallies = (
        Tally("bmm", 12, OperatorSite("blocks.*.attn", "model.py:38")),
        Tally("mul", -2, OperatorSite("head", "a.py:1")),
    )
    counts = MetricVerdict("operators", Outcome.REGRESSED, 110, 100, 0)
    found = causes_of([TestVerdict("test_it.py", "test_a", (verdict(counts, count_changes={"operators": tallies}),))])
    assert told(found) == [(("model.py:38",), 1, 10)]
    assert found.not_explained == ()


def test_rows_of_one_line_are_one_part_of_a_growth():
    """Else a line with many small tensors would explain no more than its largest."""
    other = replace(SCORES, tensor="float32[8, 1, 256]")
    found = causes_of([regressed("test_a", (SCORES, 6 * MB), (other, 5 * MB))])
    assert told(found) == [(("model.py:38",), 1, 11 * MB)]
    assert found.not_explained == ()


def test_syncs_are_a_growth_of_their_own_beside_memory():
    syncs = MetricVerdict("syncs", Outcome.REGRESSED, 3, 1, 0)
    reads = {"syncs": (Tally("item", 2, OperatorSite("", "train.py:9")),)}
    found = causes_of([regressed("test_a", (SCORES, 6 * MB), metrics=(syncs,), count_changes=reads)])
    assert told(found) == [(("model.py:38",), 1, 6 * MB), (("train.py:9",), 1, 2)]


def test_many_small_rows_at_the_peak_are_explained_by_what_was_left():
    left = Composition(9 * MB, (replace(SCORES, nbytes=9 * MB),))
    explanation = Explanation(Composition(0, ()), left)
    assert told(causes_of([regressed("test_a", (OTHERS, 9 * MB), explanation=explanation)])) == [
        (("model.py:38",), 1, 9 * MB)
    ]
    assert told(causes_of([regressed("test_a", (MLP, 9 * MB), explanation=explanation)])) == [
        (("model.py:60",), 1, 9 * MB)
    ]


def test_more_operators_are_told_beside_bytes_of_which_nothing_is_known():
    counts = MetricVerdict("operators", Outcome.REGRESSED, 110, 100, 0)
    changes = {"operators": (Tally("bmm", 10, OperatorSite()),)}
    unknown = regressed("test_a", (OTHERS, 6 * MB), metrics=(counts,), count_changes=changes)
    found = causes_of([unknown])
    assert [(cause.module, cause.metric, cause.total) for cause in found.causes] == [("bmm", "operators", 10)]
    assert [(share.growth.metric, share.amount) for share in found.unexplained] == [("peak_allocated", 6 * MB)]
    known = regressed("test_a", (SCORES, 6 * MB), metrics=(counts,), count_changes=changes)
    assert told(causes_of([known])) == [(("model.py:38",), 1, 6 * MB)]


def test_more_than_in_the_baseline_is_no_cause_by_its_budget():
    over = MetricVerdict("peak_allocated", Outcome.OVER_BUDGET, 12 * MB, baseline=9 * MB, budget=10 * MB)
    found = causes_of([TestVerdict("test_it.py", "test_a", (verdict(over),))])
    assert found.causes == ()
    assert [share.amount for share in found.unexplained] == [3 * MB]


def one_of(name, *rows, nbytes=6 * MB, others=()):
    """A test whose peak has grown by one of several rows."""
    whole = regressed(name, (OTHERS, nbytes), *others)
    (measured,) = whole.verdicts
    (change,) = [change for change in measured.difference.changes if change.row.operator == REST]
    alternatives = change._replace(alternatives=tuple(replace(row, nbytes=nbytes) for row in rows))
    changes = tuple(alternatives if one is change else one for one in measured.difference.changes)
    return replace(whole, verdicts=(replace(measured, difference=replace(measured.difference, changes=changes)),))


NORM = replace(SCORES, site="model.py:70", operator="native_layer_norm")


def test_one_of_several_rows_is_the_one_that_is_a_cause_in_another_test():
    known = regressed("test_a", (SCORES, 9 * MB))
    found = causes_of([known, one_of("test_b", MLP, SCORES)])
    assert told(found) == [(("model.py:38",), 2, 15 * MB)]
    assert found.not_explained == found.unproven == ()


def test_one_of_several_rows_is_no_cause_if_nothing_proves_which():
    pair = [one_of(name, MLP, SCORES) for name in ("test_a", "test_b")]
    both = [*pair, regressed("test_c", (SCORES, 9 * MB)), regressed("test_d", (MLP, 9 * MB))]
    for tests, lines in ((pair, []), (both, ["model.py:38", "model.py:60"])):
        found = causes_of(tests)
        assert sorted(cause.lines[0] for cause in found.causes) == lines
        (unproven,) = found.unproven
        assert unproven.lines == ("model.py:38", "model.py:60")
        assert [share.growth.test for share in unproven.shares] == ["test_it.py::test_a", "test_it.py::test_b"]
        assert [share.amount for share in found.unexplained] == [6 * MB, 6 * MB]


def test_what_other_tests_do_not_name_leaves_the_alternatives_open():
    elsewhere = regressed("test_a", (NORM, 9 * MB))
    found = causes_of([elsewhere, one_of("test_b", MLP, SCORES)])
    assert told(found) == [(("model.py:70",), 1, 9 * MB)]
    assert [one.lines for one in found.unproven] == [("model.py:38", "model.py:60")]


@pytest.mark.parametrize("tensors", [1, 2])
def test_a_single_line_is_no_cause_because_smaller_rows_may_have_grown(tensors):
    rows = [replace(SCORES, tensor=f"float32[8, {number}, 256]") for number in range(tensors)]
    found = causes_of([one_of("test_a", *rows)])
    assert found.causes == ()
    assert cause_notes(found, "si") == [
        "not certain: model.py:38: peak allocated +6.00 MB in 1 test: test_it.py::test_a"
    ]


def test_rows_of_one_line_are_a_cause_if_the_line_is_one_in_another_test():
    other = replace(SCORES, tensor="float32[8, 1, 256]")
    found = causes_of([one_of("test_a", other, SCORES), regressed("test_b", (SCORES, 9 * MB))])
    assert told(found) == [(("model.py:38",), 2, 15 * MB)]
    assert found.unproven == ()


def test_a_growth_that_is_partly_open_is_not_explained_by_its_remaining_bytes():
    """Of 60 MB 12 MB are at one of two lines, and nothing is known of the others."""
    test = one_of("test_a", MLP, SCORES, nbytes=12 * MB, others=((replace(NORM, site="", module=""), 48 * MB),))
    (measured,) = test.verdicts
    changes = tuple(
        one if one.alternatives else one._replace(after=replace(OTHERS, category="gradient", nbytes=48 * MB))
        for one in measured.difference.changes
    )
    measured = replace(measured, difference=replace(measured.difference, changes=changes))
    tests = [replace(test, verdicts=(measured,)), one_of("test_b", MLP, SCORES)]
    assert cause_notes(causes_of(tests), "si") == [
        "not explained: peak allocated +48.00 MB in 1 test: test_it.py::test_a",
        "not certain: model.py:38 or model.py:60: peak allocated +18.00 MB in 2 tests: test_it.py::test_a and 1 other",
    ]


def test_rows_of_one_line_in_several_modules_are_a_cause_without_a_module():
    in_package = replace(SCORES, library="lib 1.0: norm.py:7")
    certain = regressed("test_b", (replace(in_package, module=""), 9 * MB))
    found = causes_of([one_of("test_a", in_package, replace(in_package, module="blocks.*.mlp")), certain])
    assert [(cause.lines, cause.module, len(cause.tests)) for cause in found.causes] == [
        (("lib 1.0: norm.py:7",), "", 2)
    ]


def test_more_operators_at_the_line_of_an_alternative_decide_for_it():
    counts = MetricVerdict("operators", Outcome.REGRESSED, 110, 100, 0)
    changes = {"operators": (Tally("gelu", 10, OperatorSite("blocks.*.mlp", "model.py:60")),)}
    test = one_of("test_a", MLP, SCORES)
    (measured,) = test.verdicts
    measured = replace(measured, metrics=(*measured.metrics, counts), count_changes=changes)
    (cause,) = causes_of([replace(test, verdicts=(measured,))]).causes
    assert cause.lines == ("model.py:60",)
    assert {share.growth.metric: share.amount for share in cause.shares} == {"operators": 10, "peak_allocated": 6 * MB}


def test_growth_without_a_line_is_put_down_to_packages_or_a_budget_or_unexplained():
    same = [regressed(name, (OTHERS, 5 * MB), packages="1.0") for name in ("test_a", "test_b")]
    over = MetricVerdict("peak_allocated", Outcome.OVER_BUDGET, 12 * MB, budget=10 * MB)
    budgets = [TestVerdict("test_it.py", name, (verdict(over),)) for name in ("test_c", "test_d", "test_e")]
    alone = TestVerdict("test_it.py", "test_g", (verdict(replace(over, budget=11 * MB)),))
    found = causes_of([*same, *budgets, alone, regressed("test_f", (OTHERS, 3 * MB))])
    assert [(cause.kind, cause.packages, cause.tensors, len(cause.tests), cause.total) for cause in found.causes] == [
        ("budget", (), "peak_allocated 10000000", 3, 6 * MB),
        ("packages", ("lib 2.0, was 1.0",), "", 2, 10 * MB),
    ]
    assert [(share.growth.test, share.amount) for share in found.unexplained] == [
        ("test_it.py::test_f", 3 * MB),
        ("test_it.py::test_g", 1 * MB),
    ]


def measured(name, step, metric="peak_allocated", amount=0, *rows, **others):
    """A measurement in which a metric grew by ``amount``, explained by rows at the peak."""
    outcome = others.pop("outcome", Outcome.REGRESSED)
    metric = MetricVerdict(metric, outcome, 50 * MB + amount, 50 * MB, 0, **others)
    changes = tuple(Change(None, replace(row, nbytes=nbytes)) for row, nbytes in rows)
    difference = Difference(50 * MB, 50 * MB + amount, changes) if rows else None
    changed = verdict(metric, difference)
    return replace(changed, measurement=replace(changed.measurement, name=name, workload=Workload(step)))


def call(*verdicts, test="test_a"):
    return TestVerdict("test_it.py", test, verdicts)


def unexplained(*tests):
    found = causes_of(tests)
    return [(share.growth.test, share.growth.name, share.amount) for share in found.unexplained]


@pytest.mark.parametrize("total", ["call: all processes", "launch"])
@pytest.mark.parametrize("rank", ["", " rank 1 of 2"])
def test_bytes_of_a_process_are_not_counted_again_with_the_sum(total, rank):
    name, step = total.partition(": ")[0], "processes" if ":" in total else "launch"
    server = measured(f"{name}: serve.py{rank}", "process", "peak_allocated", 26 * MB, (SCORES, 20 * MB))
    whole = measured(f"{total}{rank}", step, "peak_allocated", 26 * MB)
    assert unexplained(*(call(server, whole, test=f"test_{n}") for n in range(2))) == [
        (f"test_it.py::test_{n}", f"{name}: serve.py{rank}", 6 * MB) for n in range(2)
    ]


def test_a_leak_that_a_line_of_a_process_explains_is_explained_in_the_sum_as_well():
    kept = Composition(MB, (replace(SCORES, nbytes=MB),))
    leak = Explanation(Composition(0, ()), kept, holders=(Holder("cache[...]", kept),))
    growth = MetricVerdict("growth", Outcome.REGRESSED, MB, 0, 1000)
    server = verdict(growth, explanation=leak)
    whole = replace(
        verdict(growth),
        measurement=replace(verdict(growth).measurement, name="loop: all processes", workload=Workload("processes")),
    )
    server = replace(
        server, measurement=replace(server.measurement, name="loop: serve.py", workload=Workload("process"))
    )
    found = causes_of([call(server, whole), call(server, whole, test="test_b")])
    assert (len(found.causes), found.unexplained) == (1, ())
    assert found.explained == {"test_it.py::test_a", "test_it.py::test_b"}


def test_of_a_sum_only_the_part_counts_that_no_process_explains():
    own = measured("call", "call", "peak_allocated", 5 * MB)
    server = measured("call: serve.py", "process", "peak_allocated", 20 * MB)
    fine = measured("call: job.py", "process", "peak_allocated", 4 * MB, outcome=Outcome.OK)
    whole = measured("call: all processes", "processes", "peak_allocated", 40 * MB)
    assert unexplained(call(own, server, fine, whole)) == [
        ("test_it.py::test_a", "call", 5 * MB),
        ("test_it.py::test_a", "call: all processes", 15 * MB),
        ("test_it.py::test_a", "call: serve.py", 20 * MB),
    ]
    # At most 20 % of the sum's growth need no cause.
    whole = measured("call: all processes", "processes", "peak_allocated", 31 * MB)
    assert [name for _, name, _ in unexplained(call(own, server, whole))] == ["call", "call: serve.py"]


def test_a_sum_counts_if_no_process_is_red_in_its_metric():
    whole = measured("call: all processes", "processes", "peak_allocated", 9 * MB)
    others = [
        measured("call: serve.py", "process", "peak_allocated", 9 * MB, outcome=Outcome.OK),
        measured("call: serve.py", "process", "retained", 9 * MB),
        measured("second: serve.py", "process", "peak_allocated", 9 * MB),
        # It exceeds only its budget, and has not grown.
        measured("call: serve.py", "process", "peak_allocated", 0, outcome=Outcome.OVER_BUDGET, budget=10 * MB),
    ]
    for other in others:
        assert ("test_it.py::test_a", "call: all processes", 9 * MB) in unexplained(call(other, whole))
    elsewhere = measured("call: serve.py", "process", "peak_allocated", 9 * MB)
    assert ("test_it.py::test_b", "call: all processes", 9 * MB) in unexplained(
        call(elsewhere), call(whole, test="test_b")
    )


def test_an_imbalance_is_a_growth_of_its_own_only_if_no_peak_grew():
    imbalance = MetricVerdict("imbalance", Outcome.REGRESSED, 1.25, 1.0, 0.02)
    peak = MetricVerdict("peak_allocated", Outcome.REGRESSED, 12 * MB, 10 * MB, 0)
    alone = TestVerdict("test_it.py", "test_a", (verdict(imbalance),))
    beside = TestVerdict("test_it.py", "test_b", (verdict(peak, metrics=(imbalance,)),))
    lines = regressed("test_c", (SCORES, 5 * MB)), regressed("test_d", (SCORES, 5 * MB))
    found = causes_of([alone, beside, *lines])
    assert [(share.growth.metric, share.amount) for share in found.unexplained] == [
        ("imbalance", 0.25),
        ("peak_allocated", 2 * MB),
    ]
    assert "imbalance over ranks +0.25" in cause_notes(found, "si")[0]


def test_a_line_says_which_packages_differ_in_all_of_its_tests():
    (cause,) = causes_of([regressed(name, (SCORES, MB), packages="1.0") for name in ("test_a", "test_b")]).causes
    assert (cause.kind, cause.packages) == ("line", ("lib 2.0, was 1.0",))
    mixed = [regressed("test_a", (SCORES, MB), packages="1.0"), regressed("test_b", (SCORES, MB))]
    assert causes_of(mixed).causes[0].packages == ()


def test_what_has_not_grown_has_no_cause():
    fine = MetricVerdict("peak_allocated", Outcome.OK, 12 * MB, 12 * MB, 0)
    better = MetricVerdict("peak_allocated", Outcome.IMPROVED, 10 * MB, 12 * MB, 0)
    tests = [TestVerdict("test_it.py", name, (verdict(one),)) for name, one in (("a", fine), ("b", better))]
    found = causes_of([*tests, TestVerdict("test_it.py", "test_c", unmeasured="it was skipped")])
    assert (found.causes, found.not_explained) == ((), ())


LINES = [
    Row("activation", 0, module, f"model.py:{line}", "", "mul", "float32[4]", 1)
    for line, module in enumerate(("head", "blocks.*", "blocks.*.attn", "model.blocks.*.attn", ""), 1)
]
TESTS = st.lists(
    st.lists(
        st.tuples(st.sampled_from([*LINES, OTHERS]), st.integers(-50, 100).filter(bool)), min_size=1, max_size=6
    ).filter(lambda parts: sum(nbytes for _, nbytes in parts) > 0),
    max_size=12,
)


@given(TESTS, st.randoms(use_true_random=False))
def test_shares_add_up_to_each_growth_no_test_is_lost_and_order_is_nothing(parts, chance):
    tests = [regressed(f"test_{number}", *rows) for number, rows in enumerate(parts)]
    found = causes_of(tests)
    shared = {}
    for share in (*(share for cause in found.causes for share in cause.shares), *found.not_explained):
        assert share.amount > 0
        shared[share.growth.test] = shared.get(share.growth.test, 0) + share.amount
    assert shared == {f"test_it.py::test_{n}": sum(nbytes for _, nbytes in rows) for n, rows in enumerate(parts)}
    shuffled = [*tests]
    chance.shuffle(shuffled)
    assert causes_of(shuffled) == found


@pytest.mark.parametrize("lines", [1, 1000])
def test_a_thousand_tests_have_their_causes(lines):
    rows = [replace(SCORES, site=f"model.py:{n}", module=f"part{n}") for n in range(lines)]
    chance = random.Random(1)
    tests = [
        regressed(f"test_{n}", (rows[n % lines], (n + 1) * MB), *((row, 1000) for row in chance.choices(rows, k=5)))
        for n in range(1000)
    ]
    found = causes_of(tests)
    assert len(found.causes) == lines
    assert not found.unexplained
    shares = {(share.growth.test, cause.lines[0]): share.amount for cause in found.causes for share in cause.shares}
    for number in range(1000):
        share = shares[f"test_it.py::test_{number}", f"model.py:{number % lines}"]
        assert share >= ENOUGH * (number + 1) * MB


# What is kept: the holder


def leaking(name, *held, first_use=False):
    """A test that retains rows, given as (path to the holder, row, bytes)."""
    rows = [(path, replace(row, nbytes=nbytes)) for path, row, nbytes in held]
    total = sum(nbytes for _, _, nbytes in held)
    holders = tuple(Holder(path, Composition(row.nbytes, (row,)), first_use=first_use) for path, row in rows)
    explanation = Explanation(Composition(0, ()), Composition(total, tuple(row for _, row in rows)), holders=holders)
    retained = MetricVerdict("retained", Outcome.REGRESSED, total, 0, 1000)
    return TestVerdict("test_it.py", name, (verdict(retained, explanation=explanation),))


def test_two_tests_that_leak_through_one_holder_are_one_cause():
    found = causes_of(
        [leaking("test_a", ("lib.CACHE[...]", SCORES, 6 * MB)), leaking("test_b", ("lib.CACHE[...]", MLP, 5 * MB))]
    )
    (cause,) = found.causes
    assert (cause.kind, cause.holder, cause.total) == ("holder", "lib.CACHE[...]", 11 * MB)
    assert cause.lines == ("model.py:38", "model.py:60")


def test_one_line_that_two_holders_keep_is_two_causes():
    found = causes_of(
        [leaking("test_a", ("Net.seen[...]", SCORES, 6 * MB)), leaking("test_b", ("lib.CACHE[...]", SCORES, 5 * MB))]
    )
    assert [(cause.holder, cause.lines) for cause in found.causes] == [
        ("Net.seen[...]", ("model.py:38",)),
        ("lib.CACHE[...]", ("model.py:38",)),
    ]


def test_no_holder_is_blamed_for_what_its_line_makes_in_other_tests():
    others = [leaking("test_b", ("", SCORES, 4 * MB)), regressed("test_c", (SCORES, 5 * MB))]
    found = causes_of([leaking("test_a", ("Net.seen[...]", SCORES, 6 * MB)), *others])
    assert [(cause.holder, cause.tests) for cause in found.causes] == [
        ("", ("test_it.py::test_b", "test_it.py::test_c")),
        ("Net.seen[...]", ("test_it.py::test_a",)),
    ]


def test_tensors_without_a_holder_have_their_line_as_the_cause_and_that_is_said():
    (cause,) = causes_of([leaking("test_a", ("", SCORES, 6 * MB))]).causes
    assert (cause.kind, cause.lines, cause.lacks_holder) == ("line", ("model.py:38",), True)
    (other,) = causes_of([regressed("test_b", (SCORES, 5 * MB))]).causes
    assert not other.lacks_holder


EITHER = ("Net.last", "Net.seen[...]")
"""Possible holders of tensors that are kept."""


def leaking_at(name, row, nbytes, paths):
    """A test that retains a row, kept by one of several holders."""
    test = leaking(name, ("", row, nbytes))
    (measured,) = test.verdicts
    explanation = measured.measurement.explanation
    (holder,) = explanation.holders
    explanation = replace(explanation, holders=(holder_at(paths, holder.kept),))
    return replace(
        test, verdicts=(replace(measured, measurement=replace(measured.measurement, explanation=explanation)),)
    )


def test_one_of_two_holders_is_no_cause_if_nothing_proves_which():
    found = causes_of([leaking_at("test_a", SCORES, 6 * MB, EITHER)])
    assert found.causes == ()
    assert cause_notes(found, "si") == [
        "not certain: kept in Net.last or kept in Net.seen[...]: retained +6.00 MB in 1 test: test_it.py::test_a"
    ]


def test_one_of_two_holders_is_the_one_that_is_a_cause_in_another_test():
    certain = leaking("test_b", ("Net.seen[...]", MLP, 5 * MB))
    found = causes_of([leaking_at("test_a", SCORES, 6 * MB, EITHER), certain])
    assert [(cause.holder, cause.total) for cause in found.causes] == [("Net.seen[...]", 11 * MB)]
    assert found.not_explained == found.unproven == ()


def test_a_holder_is_not_certain_if_another_one_was_not_found():
    found = causes_of([leaking_at("test_a", SCORES, 6 * MB, ("", "Net.seen[...]"))])
    assert found.causes == ()
    assert [one.lines for one in found.unproven] == [("kept in Net.seen[...]", "model.py:38")]


def test_the_peak_is_not_blamed_on_one_of_two_holders():
    kept = Composition(2 * MB, (replace(SCORES, nbytes=2 * MB),))
    explanation = Explanation(Composition(0, ()), kept, holders=(holder_at(EITHER, kept),))
    growth = MetricVerdict("growth", Outcome.REGRESSED, 2 * MB, 0, 1000)
    found = causes_of([regressed("test_a", (SCORES, 18 * MB), explanation=explanation, metrics=(growth,))])
    assert [(cause.kind, cause.lines, cause.metric) for cause in found.causes] == [
        ("line", ("model.py:38",), "peak_allocated")
    ]
    assert [share.growth.metric for one in found.unproven for share in one.shares] == ["growth"]


def test_a_peak_at_a_changed_caller_has_the_holder_of_its_line_as_the_cause():
    kept = Composition(2 * MB, (replace(SCORES, nbytes=2 * MB),))
    explanation = Explanation(Composition(0, ()), kept, holders=(Holder("Block.seen[...]", kept),))
    growth = MetricVerdict("growth", Outcome.REGRESSED, 2 * MB, 0, 1000)
    called = replace(SCORES, named="train.py:4")
    (cause,) = causes_of([regressed("test_a", (called, 18 * MB), explanation=explanation, metrics=(growth,))]).causes
    assert cause.holder == "Block.seen[...]"
    assert {share.growth.metric for share in cause.shares} == {"growth", "peak_allocated"}


def test_a_row_of_a_peak_that_is_not_proven_is_the_one_that_the_holder_keeps():
    kept = Composition(2 * MB, (replace(SCORES, nbytes=2 * MB),))
    explanation = Explanation(Composition(0, ()), kept, holders=(Holder("Block.seen[...]", kept),))
    growth = MetricVerdict("growth", Outcome.REGRESSED, 2 * MB, 0, 1000)
    test = one_of("test_a", MLP, SCORES)
    (measured,) = test.verdicts
    measurement = replace(measured.measurement, explanation=explanation)
    measured = replace(measured, metrics=(*measured.metrics, growth), measurement=measurement)
    found = causes_of([replace(test, verdicts=(measured,))])
    assert [cause.holder for cause in found.causes] == ["Block.seen[...]"]
    assert found.unproven == ()


def test_a_cache_that_the_first_use_fills_has_a_cause_without_a_line():
    row = Row("other", 0, tensor="float32[512, 512]")
    (cause,) = causes_of([leaking("test_a", ("lib.CACHE[...]", row, MB), first_use=True)]).causes
    assert (cause.holder, cause.lines, cause.reason) == ("lib.CACHE[...]", (), FIRST_USE)


def with_last_output(row, *parts):
    """A test whose peak has grown by rows, with an input of 1 MB that ``Net.last_output`` keeps from step to step."""
    kept = Composition(MB, (replace(row, nbytes=MB),))
    holders = (Holder("Net.last_output", kept),)
    return regressed("test_a", *parts, explanation=Explanation(Composition(0, ()), holders_of_inputs=holders))


OUTPUT = Row("input", 0, "net", "m.py:5", operator="add", tensor="float32[250000]")


def test_an_input_that_grew_has_its_holder_as_the_cause():
    (cause,) = causes_of([with_last_output(OUTPUT, (OUTPUT, MB))]).causes
    assert (cause.kind, cause.holder, cause.total) == ("holder", "Net.last_output", MB)


@pytest.mark.parametrize(
    ("row", "nbytes"),
    [
        pytest.param(replace(OUTPUT, category="activation", operator="bmm"), 100 * MB, id="an activation"),
        pytest.param(replace(OUTPUT, category="activation"), MB, id="an activation that is alike"),
        pytest.param(replace(OUTPUT, operator="bmm"), MB, id="an input of another operator"),
        pytest.param(replace(OUTPUT, tensor="float32[8]"), MB, id="another tensor"),
        pytest.param(OUTPUT, 100 * MB, id="more than the holder keeps"),
    ],
)
def test_other_tensors_at_the_line_of_a_holder_are_not_kept_by_it(row, nbytes):
    (cause,) = causes_of([with_last_output(OUTPUT, (row, nbytes))]).causes
    assert (cause.kind, cause.holder, cause.lines, cause.total) == ("line", "", ("m.py:5",), nbytes)


def test_what_each_step_keeps_explains_only_such_tensors_at_the_peak():
    kept = Composition(2 * MB, (replace(SCORES, nbytes=2 * MB),))
    explanation = Explanation(Composition(0, ()), kept, holders=(Holder("Block.seen[...]", kept),))
    growth = MetricVerdict("growth", Outcome.REGRESSED, 2 * MB, 0, 1000)
    other = replace(SCORES, operator="bmm")
    found = causes_of([regressed("test_a", (other, 90 * MB), explanation=explanation, metrics=(growth,))])
    assert {(cause.holder, cause.total) for cause in found.causes} == {("Block.seen[...]", 2 * MB), ("", 90 * MB)}


OTHER_LEAK = replace(SCORES, site="model.py:39", operator="exp")


def leaking_more(name, *held, before, peak=()):
    """A test that retained ``before`` bytes in its baseline, and retains rows now; ``peak`` are rows that grew at the peak."""
    test = leaking(name, *held)
    (measured,) = test.verdicts
    (retained,) = measured.metrics
    explanation = measured.measurement.explanation
    metrics = (replace(retained, baseline=before),)
    if not peak:
        return replace(test, verdicts=(replace(measured, metrics=metrics),))
    return regressed(name, *peak, explanation=explanation, metrics=metrics)


BOTH = (("lib.FIRST[...]", SCORES, 2 * MB), ("lib.SECOND[...]", OTHER_LEAK, 2 * MB))


@pytest.mark.parametrize(
    ("row", "holder"), [(SCORES, "lib.FIRST[...]"), (OTHER_LEAK, "lib.SECOND[...]")], ids=["the first", "the second"]
)
def test_of_two_leaks_of_one_size_the_one_that_grew_at_the_peak_is_the_cause(row, holder):
    """The baseline has the bytes of the other leak, and does not say which it is."""
    found = causes_of([leaking_more("test_a", *BOTH, before=2 * MB, peak=((row, 2 * MB),))])
    (cause,) = found.causes
    assert (cause.holder, cause.lines) == (holder, (row.site,))
    assert {share.growth.metric: share.amount for share in cause.shares} == {
        "retained": 2 * MB,
        "peak_allocated": 2 * MB,
    }
    assert found.not_explained == found.unproven == ()


def test_of_two_leaks_of_one_size_neither_is_the_cause_if_nothing_proves_which():
    for peak in ((), ((SCORES, 2 * MB), (OTHER_LEAK, 2 * MB))):
        found = causes_of([leaking_more("test_a", *BOTH, before=2 * MB, peak=peak)])
        assert not any(share.growth.metric == "retained" for cause in found.causes for share in cause.shares)
        assert [one.lines for one in found.unproven] == [("kept in lib.FIRST[...]", "kept in lib.SECOND[...]")]


def test_of_three_leaks_of_one_size_the_two_that_grew_at_the_peak_are_the_causes():
    third = replace(SCORES, site="model.py:40", operator="sin")
    held, peak = (*BOTH, ("lib.THIRD[...]", third, 2 * MB)), ((OTHER_LEAK, 2 * MB), (third, 2 * MB))
    found = causes_of([leaking_more("test_a", *held, before=2 * MB, peak=peak)])
    assert sorted(cause.holder for cause in found.causes) == ["lib.SECOND[...]", "lib.THIRD[...]"]
    assert found.not_explained == found.unproven == ()


def test_a_leak_larger_than_what_the_baseline_kept_is_the_cause():
    small = ("lib.FIRST[...]", SCORES, MB // 2)
    for before in (MB // 2, 1):
        found = causes_of([leaking_more("test_a", small, ("lib.SECOND[...]", OTHER_LEAK, 9 * MB), before=before)])
        assert found.causes[0].holder == "lib.SECOND[...]"
        assert found.unproven == ()


def test_a_holder_that_keeps_more_than_before_is_the_cause():
    found = causes_of([leaking_more("test_a", ("lib.FIRST[...]", SCORES, 3 * MB), before=2 * MB)])
    assert [(cause.holder, cause.total) for cause in found.causes] == [("lib.FIRST[...]", MB)]


def test_two_holders_of_tensors_from_one_line_share_its_growth_at_the_peak():
    held = tuple(Holder(f"lib.{name}[...]", Composition(MB, (replace(SCORES, nbytes=MB),))) for name in ("A", "B"))
    kept = Composition(2 * MB, (replace(SCORES, nbytes=2 * MB),))
    explanation = Explanation(Composition(0, ()), kept, holders=held)
    growth = MetricVerdict("growth", Outcome.REGRESSED, 2 * MB, 0, 1000)
    found = causes_of([regressed("test_a", (SCORES, 20 * MB), explanation=explanation, metrics=(growth,))])
    assert [
        (cause.holder, {share.growth.metric: share.amount for share in cause.shares}) for cause in found.causes
    ] == [(f"lib.{name}[...]", {"growth": MB, "peak_allocated": 10 * MB}) for name in ("A", "B")]
