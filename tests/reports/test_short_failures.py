"""Causes in every format, and which tests need not be told in full."""

from __future__ import annotations

import re
from dataclasses import replace

from pytest_gpumem.facts.values.composition import REST, Composition, Explanation, Holder, Row
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.facts.values.rank import Rank, name_on
from pytest_gpumem.judging.gate.causes import causes_of
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome
from pytest_gpumem.reporting.reports.github import annotation_lines
from pytest_gpumem.reporting.reports.html.page import html, page_of
from pytest_gpumem.reporting.reports.layout import Screen, text_of
from pytest_gpumem.reporting.reports.markdown import COMMENT_LIMIT, MOST_FOLDED, markdown
from pytest_gpumem.reporting.reports.short_failures import explained_before, short_failures
from pytest_gpumem.reporting.reports.terminal import terminal_text
from pytest_gpumem.tools.accept.by_cause import with_causes
from tests.reports.rendered import read
from tests.reports.sessions import GB, ORIGIN, measured, peak, result, session

SCORES = Row("activation", GB, "blocks.*.attn", "model.py:38", "", "_softmax", "float32[8, 256, 256]", 4)
LOSS = Row("temporary", GB, "", "train.py:7", "", "log_softmax", "float32[8, 256]", 1)


def grown(test, *rows, metrics=(), name="train_step", **changes):
    """A test whose peak has grown by the bytes of some rows."""
    nbytes = sum(row.nbytes for row in rows)
    difference = Difference(8 * GB, 8 * GB + nbytes, tuple(Change(None, row) for row in rows))
    measurement = changes.pop("measurement", {})
    verdict = measured(
        peak(Outcome.REGRESSED, 8 * GB + nbytes, 8 * GB),
        *metrics,
        name=name,
        difference=difference,
        measurement=measurement,
        count_changes=changes.pop("count_changes", {}),
    )
    failure = changes.pop("failure", "GPU memory regressed: much\n\n  and all of it")
    return result(verdict, test=test, failure=failure, accept=f"pytest {test}", **changes)


def names(told):
    return sorted(nodeid.partition("::")[2] for nodeid in told)


def told(*results):
    verdicts = [one.verdict for one in results]
    return names(explained_before(causes_of(verdicts), verdicts))


def text(report, verbosity=0):
    shown = terminal_text(report, Screen(None), verbosity)
    return [text_of(line) for line in (*shown.tables, *shown.lines)]


def test_a_test_is_told_in_full_unless_others_have_told_all_of_its_causes():
    a, b = grown("test_a", SCORES), grown("test_b", SCORES)
    both = grown("test_c", SCORES, LOSS)
    assert told(a, b) == ["test_b"]
    assert told(a, both, b) == ["test_b"]
    assert told(both, a, b, grown("test_d", LOSS)) == ["test_a", "test_b", "test_d"]


def test_what_a_test_has_besides_is_told_in_full():
    a = grown("test_a", SCORES)
    slower = MetricVerdict("step_time", Outcome.REGRESSED, 0.2, 0.1, 0.01)
    work = MetricVerdict("operators", Outcome.REGRESSED, 110, 100, 0)
    here, elsewhere = (
        {"operators": (Tally("mul", 10, OperatorSite(module, line)),)}
        for module, line in (("blocks.*.attn", "model.py:38"), ("head", "head.py:9"))
    )
    assert told(a, grown("test_b", SCORES, metrics=(slower,))) == []
    assert told(a, grown("test_b", SCORES, metrics=(work,), count_changes=here)) == ["test_b"]
    assert told(a, grown("test_b", SCORES, metrics=(work,), count_changes=elsewhere)) == []
    assert told(a, grown("test_b", SCORES, failed_by_itself=True)) == []
    assert told(a, grown("test_b", SCORES, missing=("step",))) == []
    assert told(a, grown("test_b", SCORES, replace(SCORES, site="", module="", operator="(others)"))) == []


def over(test, metric="peak_allocated", *others, **changes):
    """A test that is over its budget."""
    budget = MetricVerdict(metric, Outcome.OVER_BUDGET, 12 * GB, budget=10 * GB)
    return result(
        measured(budget, *others), test=test, failure="GPU memory is over its budget\n\n  and more", **changes
    )


def by_packages(test, *metrics, **changes):
    """A test whose peak has grown with the release of a package, at no line that is known."""
    one = grown(test, replace(SCORES, site="", module="", operator=REST), metrics=metrics, **changes)
    (verdict,) = one.verdict.verdicts
    environment = replace(verdict.measurement.environment, packages={"lib": "2.0"})
    measurement = replace(verdict.measurement, environment=environment)
    origin = replace(ORIGIN, packages={"lib": "1.0"})
    return replace(
        one, verdict=replace(one.verdict, verdicts=(replace(verdict, measurement=measurement, origin=origin),))
    )


def test_a_budget_that_several_tests_exceed_is_told_once():
    tests = [over(f"test_{n}") for n in range(3)]
    assert told(*tests) == ["test_1", "test_2"]
    _, error = annotation_lines(session(*tests))
    assert "budget of peak allocated%3A 10.00 GB" in error
    assert "2 more tests that failed only because of these causes" in read(markdown(session(*tests))).text
    assert told(tests[0], over("test_b", "retained")) == []
    work = MetricVerdict("operators", Outcome.REGRESSED, 110, 100, 0)
    assert told(tests[0], over("test_b", "peak_allocated", work)) == []
    assert told(tests[0], over("test_b", failed_by_itself=True)) == []


def test_packages_that_explain_several_tests_are_told_once():
    tests = [by_packages(f"test_{n}") for n in range(3)]
    assert [cause.kind for cause in session(*tests).causes.causes] == ["packages"]
    assert told(*tests) == ["test_1", "test_2"]
    assert len(annotation_lines(session(*tests))) == 1
    assert "2 more tests that failed only because of these causes" in read(markdown(session(*tests))).text
    slower = MetricVerdict("step_time", Outcome.REGRESSED, 0.2, 0.1, 0.01)
    assert told(tests[0], by_packages("test_b", slower)) == []


def test_the_short_text_has_the_share_of_each_cause_and_at_most_six_lines():
    rows = [replace(SCORES, site=f"model.py:{n}", module=f"part{n}") for n in range(3)]
    verdicts = [one.verdict for one in (grown("test_a", *rows), grown("test_b", *rows))]
    (short,) = short_failures(causes_of(verdicts), verdicts, "si").values()
    assert short.split("\n") == [
        "GPU memory regressed: much",
        "  cause:    model.py:0: +1.00 GB peak allocated, as in tests/test_gpt.py::test_a",
        "  cause:    model.py:1: +1.00 GB peak allocated, as in tests/test_gpt.py::test_a",
        "            and 1 other",
        "  accept:   pytest test_b",
        "  -vv shows the full text",
    ]


def test_the_share_of_a_leak_is_the_growth_of_a_step_and_not_the_peak_of_many_steps():
    kept = replace(SCORES, nbytes=10**6)
    by_step = Composition(10**6, (kept,))
    explanation = Explanation(Composition(0, ()), by_step, holders=(Holder("serve.cache[...]", by_step),))
    growth = MetricVerdict("growth", Outcome.REGRESSED, 10**6, 0, 1000)
    verdicts = [
        grown(name, SCORES, metrics=(growth,), measurement={"explanation": explanation}).verdict
        for name in ("test_a", "test_b")
    ]
    (short,) = short_failures(causes_of(verdicts), verdicts, "si").values()
    line = "cause:    kept in: serve.cache[...]: +1.00 MB growth per step, as in tests/test_gpt.py::test_a"
    assert line in short


def test_shards_on_two_devices_have_growth_of_their_own():
    a100 = replace(measured().measurement.environment, slug="a100", device="A100")
    results = (
        grown("test_a", SCORES),
        grown("test_a", replace(SCORES, nbytes=2 * GB), measurement={"environment": a100}),
    )
    found = session(*results, grown("test_b", LOSS)).causes
    assert found.measured == 2
    cause, _ = found.causes
    assert [(share.growth.device, share.amount) for share in cause.shares] == [
        ("A100", 2 * GB),
        ("NVIDIA H100 80GB HBM3", GB),
    ]
    page = page_of(session(*results, grown("test_b", SCORES)))
    assert [test for test, anchor in page.causes[0].tests if anchor] == [
        "tests/test_gpt.py::test_a",
        "tests/test_gpt.py::test_b",
    ]


def test_a_test_on_two_devices_is_not_its_own_explanation():
    on_both = [
        grown("test_a", SCORES, measurement={"environment": replace(measured().measurement.environment, device=device)})
        for device in ("A100", "H100")
    ]
    assert told(*on_both) == []
    report = session(*on_both, grown("test_b", SCORES))
    assert "1 more test that failed only because of these causes" in read(markdown(report)).text


def test_a_single_test_is_explained_by_its_own_failure():
    assert session(grown("test_a", SCORES)).causes.explained == frozenset()
    assert len(session(grown("test_a", SCORES), grown("test_b", SCORES)).causes.explained) == 2


def test_a_slower_test_is_only_partly_explained():
    slower = MetricVerdict("step_time", Outcome.REGRESSED, 0.2, 0.1, 0.01)
    report = session(grown("test_a", SCORES), grown("test_b", SCORES, metrics=(slower,)))
    assert names(report.causes.explained) == ["test_a"]
    assert names(report.causes.partly_explained) == ["test_b"]
    (_, accepted), (_, refused) = with_causes(report.causes, report.results, report.causes.causes, "si")
    assert accepted is None
    assert refused.why.startswith("the causes do not explain all of the test's growth")


def test_growth_in_a_test_that_counts_as_unmeasured_has_no_cause():
    causes = session(grown("test_a", SCORES, unmeasured="it was skipped"), grown("test_b", SCORES)).causes
    assert names(causes.by_test) == ["test_b"]
    assert causes.measured == 1


def test_growth_that_an_update_accepts_has_no_cause():
    accepted = replace(grown("test_a", SCORES), passed=True, failed=False)
    report = session(accepted, grown("test_b", SCORES))
    assert report.causes.causes[0].tests == ("tests/test_gpt.py::test_a", "tests/test_gpt.py::test_b")
    report = replace(report, terms=replace(report.terms, update="all"))
    assert report.causes.causes[0].tests == ("tests/test_gpt.py::test_b",)
    assert report.causes.measured == 2


def test_a_line_that_ran_in_a_model_and_alone_is_one_annotation():
    alone = replace(SCORES, module="Attention")
    report = session(grown("test_a", SCORES), grown("test_b", alone), grown("test_c", SCORES))
    (error,) = annotation_lines(report)
    assert error.startswith("::error file=model.py,line=38,")
    assert told(*report.results) == ["test_b", "test_c"]


def test_a_cause_on_some_ranks_says_on_which():
    on = [name_on(Rank(number, 4), "train_step") for number in (1, 2)]
    report = session(*(grown(f"test_{number}", SCORES, name=name) for number, name in enumerate(on)))
    assert "model.py:38: only on ranks 1 and 2 of 4" in text(report)
    all_of_them = [name_on(Rank(number, 2), "train_step") for number in (0, 1)]
    report = session(*(grown(f"test_{number}", SCORES, name=name) for number, name in enumerate(all_of_them)))
    assert not any("only on" in line for line in text(report))


def test_what_nothing_explains_is_told_also_where_there_is_no_cause():
    report = session(*(grown(f"test_{n}", replace(SCORES, site="", module="", operator=REST)) for n in range(3)))
    note = "not explained: peak allocated +3.00 GB in 3 tests: tests/test_gpt.py::test_0 and 2 others"
    assert text(report)[0] == note
    assert not any(line.startswith("# cause") for line in text(report))
    assert note in read(markdown(report)).text
    assert note in html(report)
    assert note not in text(session(report.results[0]))
    slower = MetricVerdict("step_time", Outcome.REGRESSED, 0.2, 0.1, 0.01)
    report = session(*(result(measured(slower), test=f"test_{n}", failure="slower") for n in range(3)))
    assert not any("not explained" in line for line in text(report))


def test_markdown_folds_the_tests_that_others_tell():
    report = session(*(grown(f"test_{number}", SCORES) for number in range(14)), grown("test_x", LOSS))
    page = read(markdown(report))
    assert "❌ 13 more tests that failed only because of these causes" in page.text
    assert markdown(report).count("What was measured") == 2
    for number in range(14):
        assert f"tests/test_gpt.py::test_{number}" in page.text


def test_the_comment_of_one_change_in_twelve_tests_is_read_at_one_sight():
    others = [result(measured(peak(Outcome.OK)), test=f"test_as_before_{number}") for number in range(9)]
    comment = markdown(session(*(grown(f"test_{number}", SCORES) for number in range(12)), *others), most=COMMENT_LIMIT)
    # What is folded is a line.
    rendered = re.sub(r"<details><summary>(.*?)</summary>.*?</details>", r"\1", comment, flags=re.DOTALL)
    assert len(rendered.splitlines()) < 30, rendered
    assert "| 12 of 21 |" in rendered


def test_eight_hundred_tests_end_in_less_than_120_lines_and_fit_into_a_comment():
    notes = {"notes": ("a note",)}
    results = [
        grown(
            f"test_{number}",
            replace(SCORES, site=f"model.py:{number % 40}", module=f"part{number % 40}"),
            measurement=notes | {"notes": (f"note {number}",)},
        )
        for number in range(800)
    ]
    report = session(*results)
    lines = text(report)
    assert len(lines) < 120
    assert "... and 30 other causes (-v shows all)" in lines
    assert "... and 770 regressed (-v shows all)" in lines
    assert "... and 780 other notes (-v shows all)" in lines
    assert len(text(report, verbosity=1)) > 1000
    comment = markdown(report, most=COMMENT_LIMIT)
    assert "... and 30 other causes\n" in comment.replace("\\", "")
    assert comment.index("#### Causes") < comment.index("tests/test_gpt.py::test_0`  ")
    whole = markdown(report)
    assert f"and {800 - 40 - MOST_FOLDED} others" in whole
    assert len(comment.encode()) <= COMMENT_LIMIT < len(whole.encode())
    assert len(report.causes.explained) == 800
