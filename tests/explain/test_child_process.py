"""A process's explanation from its recorded blocks, typed out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.emulating.emulated_process.usage import Recorded, RecordedBlocks
from pytest_gpumem.facts.values.composition import Row
from pytest_gpumem.measuring.explain.child_process import process_explanation
from pytest_gpumem.measuring.explain.sites import Site

ASK = (("/serve.py", 9, "ask"),)


def site_of(frames):
    return next((Site(f"serve.py:{line}") for _, line, _ in frames), Site())


def blocks(nbytes, frames=(), count=1, category="other", module="", tensor="", holder=None, operator=""):
    return RecordedBlocks(nbytes, count, category, module, tensor, frames, holder, operator)


def test_bytes_in_no_recorded_block_are_unattributed():
    explanation = process_explanation(Recorded((blocks(90, ASK),)), 100, 100, site_of)
    assert explanation.peak.rows == (Row("other", 90, site="serve.py:9"), Row("unattributed", 10))
    assert (explanation.peak.total, explanation.peak.notes) == (100, ())


def test_tensors_that_the_measured_run_left_are_no_rows_of_its_peak():
    kept = blocks(20, ASK, 2, tensor="float32[2]")
    earlier = blocks(30, (), 3, tensor="float32[2]")
    recorded = Recorded((kept, earlier, blocks(20, (), 2, tensor="int64[1]")), (kept,))
    explanation = process_explanation(recorded, 70, 50, site_of)
    assert set(explanation.peak.rows) == {
        Row("other", 20, site="serve.py:9", tensor="float32[2]", count=2),
        Row("other", 10, tensor="float32[2]"),
        Row("other", 20, tensor="int64[1]", count=2),
    }
    assert explanation.peak.notes == ()
    assert explanation.retained.rows == (Row("other", 20, site="serve.py:9", tensor="float32[2]", count=2),)


def test_a_parameter_is_never_taken_for_a_tensor_that_the_measured_run_left():
    weight = blocks(8, (), category="parameter", module="fc", tensor="float32[2]")
    kept = blocks(8, ASK, tensor="float32[2]")
    explanation = process_explanation(Recorded((weight, kept), (kept,)), 16, 8, site_of)
    assert Row("parameter", 8, "fc", tensor="float32[2]") in explanation.peak.rows
    assert explanation.peak.notes != ()


def test_a_recorded_run_with_another_peak_says_so():
    recorded = Recorded((blocks(2000, ASK),))
    less = process_explanation(recorded, 2000, 3000, site_of)
    assert less.peak.notes == (
        "the recorded run needed 1.00 kB less than the measured run, so some rows are missing or wrong",
    )
    assert (less.peak.total, less.peak.rows) == (2000, (Row("other", 2000, site="serve.py:9"),))
    more = process_explanation(recorded, 2000, 1500, site_of)
    assert more.peak.notes == (
        "the recorded run needed 500 B more than the measured run, so some rows are missing or wrong",
    )
    assert (more.peak.total, more.peak.rows) == (2000, (Row("other", 2000, site="serve.py:9"),))


def test_retained_blocks_are_grouped_by_their_holders():
    kept = [
        blocks(40, ASK, 4, holder="serve.cache[...]"),
        blocks(20, ASK, 2, holder=""),
        blocks(10, holder="serve.cache[...]"),
    ]
    explanation = process_explanation(Recorded(retained=tuple(kept)), 0, 0, site_of)
    assert [(holder.text, holder.kept.total, len(holder.kept.rows)) for holder in explanation.holders] == [
        ("kept in: serve.cache[...]", 50, 2),
        ("holder not found", 20, 1),
    ]
    assert sum(row.nbytes for row in explanation.retained.rows) == 70


def test_without_a_search_there_are_no_holders():
    assert process_explanation(Recorded(retained=(blocks(40, ASK),)), 0, 0, site_of).holders == ()


def test_rows_have_operators():
    recorded = Recorded((blocks(8, ASK, operator="mm"), blocks(8, ASK, operator="exp")))
    rows = process_explanation(recorded, 16, 16, site_of).peak.rows
    assert {row.operator for row in rows} == {"mm", "exp"}


def test_equal_layers_are_a_row():
    paths = tuple(f"h.{number}" for number in range(3))
    recorded = Recorded(tuple(blocks(10, ASK, module=path) for path in paths), modules=paths)
    explanation = process_explanation(recorded, 30, 30, site_of)
    assert explanation.peak.rows == (Row("other", 30, "h.*", "serve.py:9", count=3),)
    assert not explanation.peak.rows[0].layers


def test_tensors_of_a_steps_earlier_runs_probably_have_the_line_that_leaves_them():
    kept = blocks(10, ASK, tensor="float32[2]", module="fc")
    earlier = blocks(50, (), 5, tensor="float32[2]")
    explanation = process_explanation(Recorded((kept, earlier), (kept,)), 60, 30, site_of, repeats=True)
    assert explanation.peak.rows == (Row("other", 30, "fc", "serve.py:9", tensor="float32[2]", count=3),)
    (note,) = explanation.peak.notes
    assert note.startswith(
        "20 B at the peak are from before the recorded step, and probably from the same lines as its tensors"
    )


ANSWER = (("/serve.py", 12, "answer"),)
TWO_LINES = (blocks(10, ASK, tensor="float32[2]"), blocks(10, ANSWER, tensor="float32[2]"))


def older_rows(kept, count, *, modules=(), freed=()):
    """Return the rows of older tensors with 10 bytes each, in a step that keeps ``kept``."""
    older = blocks(10 * count, (), count, tensor="float32[2]")
    recorded = Recorded((older,), kept, modules, freed)
    peak = process_explanation(recorded, 10 * count, 10 * count, site_of, repeats=True).peak
    assert len(peak.notes) == 1
    return {(row.path, row.site, row.count) for row in peak.rows}


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(4, {("serve.py:9", 2), ("serve.py:12", 2)}, id="whole runs"),
        pytest.param(5, {("serve.py:9", 2), ("serve.py:12", 2), ("serve.py:12 or serve.py:9", 1)}, id="and a rest"),
        pytest.param(1, {("serve.py:12 or serve.py:9", 1)}, id="less than a run"),
    ],
)
def test_tensors_of_earlier_runs_are_divided_over_the_lines_of_a_run(count, expected):
    assert older_rows(TWO_LINES, count) == {("", *row) for row in expected}


def test_tensors_of_earlier_runs_are_divided_as_those_of_a_run():
    more = blocks(30, ASK, 3, tensor="float32[2]")
    assert older_rows((more, TWO_LINES[1]), 8) == {("", "serve.py:9", 6), ("", "serve.py:12", 2)}


def test_if_a_step_replaces_a_tensor_either_line_may_have_made_the_older_tensors():
    rows = older_rows(TWO_LINES, 4, freed=(blocks(10),))
    assert rows == {("", "serve.py:12 or serve.py:9", 4)}
    assert older_rows(TWO_LINES, 4, freed=(blocks(20),)) == {("", "serve.py:9", 2), ("", "serve.py:12", 2)}


def test_tensors_of_earlier_runs_are_divided_over_layers():
    paths = tuple(f"h.{number}" for number in range(3))
    kept = tuple(replace(each, module=path) for path in paths for each in TWO_LINES)
    assert older_rows(kept, 12, modules=paths) == {("h.*", "serve.py:9", 6), ("h.*", "serve.py:12", 6)}
    assert older_rows(kept, 2, modules=paths) == {("h.*", "serve.py:12 or serve.py:9", 2)}


def test_tensors_that_later_runs_left_are_removed_by_whole_runs():
    kept = (*TWO_LINES, blocks(5, ASK, tensor="float32[1]"))
    older = (blocks(200, (), 20, tensor="float32[2]"), blocks(50, (), 10, tensor="float32[1]"))
    # Six of ten earlier runs came after the measured run.
    explanation = process_explanation(Recorded((*older, *kept), kept), 275, 125, site_of, repeats=True)
    assert {(row.site, row.tensor, row.count) for row in explanation.peak.rows} == {
        ("serve.py:9", "float32[2]", 5),
        ("serve.py:12", "float32[2]", 5),
        ("serve.py:9", "float32[1]", 5),
    }


K, V = blocks(10, ASK, tensor="float32[2, 8]"), blocks(10, ANSWER, tensor="float32[8, 2]")


def later_removed(keys, values, older_keys, older_values, *, runs=None, unknown=0):
    """Return the sites and counts after ``runs`` later runs are removed. Each run keeps this many keys and values."""
    kept = tuple(replace(each, nbytes=10 * count, count=count) for each, count in ((K, keys), (V, values)))
    counts = ((K.tensor, older_keys), (V.tensor, older_values), ("", unknown))
    older = tuple(blocks(10 * count, (), count, tensor=tensor) for tensor, count in counts if count)
    total = sum(group.nbytes for group in (*older, *kept))
    peak = total - 10 * (keys + values) * (runs or 1)
    for groups in ((*older, *kept), (*kept, *older[::-1])):
        explanation = process_explanation(Recorded(groups, kept), total, peak, site_of, repeats=runs is not None)
        yield {(row.site, row.tensor, row.count) for row in explanation.peak.rows}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param((1, 1, 10, 10), {(K.tensor, 5), (V.tensor, 5)}, id="as many of both"),
        pytest.param((2, 1, 20, 10), {(K.tensor, 10), (V.tensor, 5)}, id="more of a kind in each run"),
        pytest.param((1, 1, 13, 7), {(K.tensor, 8), (V.tensor, 2)}, id="more of a kind from earlier"),
        pytest.param((1, 1, 10, 4, 6), {(K.tensor, 5), (V.tensor, 1), ("", 4)}, id="some without a tensor"),
    ],
)
def test_later_runs_leftovers_of_equal_size_are_removed_by_dtype_and_shape(given, expected):
    keys, values, older_keys, older_values, *unknown = given
    for rows in later_removed(keys, values, older_keys, older_values, runs=6, unknown=sum(unknown)):
        sites = {K.tensor: "serve.py:9", V.tensor: "serve.py:12", "": ""}
        assert rows == {(sites[tensor], tensor, count) for tensor, count in expected}


def test_a_calls_leftovers_of_equal_size_are_removed_by_dtype_and_shape():
    for rows in later_removed(1, 1, 2, 1):
        assert rows == {("", K.tensor, 1), ("serve.py:9", K.tensor, 1), ("serve.py:12", V.tensor, 1)}


def test_a_tensor_that_each_run_replaces_is_no_leftover_of_later_runs():
    last = blocks(30, ANSWER, tensor="float32[6]")
    kept = (TWO_LINES[0], last)
    older = (blocks(100, (), 10, tensor="float32[2]"), blocks(30))
    recorded = Recorded((*older, *kept), kept, freed=(blocks(30),))
    explanation = process_explanation(recorded, 170, 110, site_of, repeats=True)
    assert {(row.site, row.tensor, row.count) for row in explanation.peak.rows} == {
        ("serve.py:9", "float32[2]", 5),
        ("serve.py:12", "float32[6]", 1),
        ("", "", 1),
    }


def test_blocks_of_earlier_runs_with_only_an_equal_size_have_no_line():
    kept, earlier = blocks(10, ASK), blocks(20, (), 2)
    explanation = process_explanation(Recorded((kept, earlier), (kept,)), 30, 30, site_of, repeats=True)
    assert Row("other", 20, count=2) in explanation.peak.rows
