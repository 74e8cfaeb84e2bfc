"""A session's report as JSON and back: everything comes back, by a published schema, and every mistake is told."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import re
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpumem import __version__
from pytest_gpumem.base.errors import ReportError
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.operator_counts import MADE_OF_OPERATORS
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.comparison import compare_sides, side_of_report
from pytest_gpumem.reporting.reports.comparison_formats import markdown
from pytest_gpumem.reporting.reports.formats import FORMATS
from pytest_gpumem.reporting.reports.json_report import FORMAT, from_json, to_json
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.reporting.reports.terminal import terminal_text
from tests.hostile import ALL
from tests.reports.sessions import OK, REGRESSED, everything, measured, peak, result, session

PUBLISHED = json.loads(
    files("pytest_gpumem.reporting.reports").joinpath("report.schema.json").read_text(encoding="utf-8")
)
SCHEMA = copy.deepcopy(PUBLISHED)
"""The published schema allows the metrics of later versions. This one allows the known metrics."""
SCHEMA["$defs"]["metric_name"] = {"enum": list(METRICS)}
SCHEMA["$defs"]["counted_metric"] = {"enum": list(MADE_OF_OPERATORS)}
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
FULL = to_json(everything("a text"))
PLAIN = json.loads(FULL)
SMALL = {**PLAIN, "results": [copy.deepcopy(PLAIN["results"][0])]}
"""All that is in the other results is in the first, and in the first of its two verdicts."""
del SMALL["results"][0]["verdict"]["verdicts"][1]


def places(value, path=()):
    """The paths of all keys and values within a plain one."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in parts:
        yield (*path, key)
        yield from places(one, (*path, key))


def holder(plain, path):
    for key in path[:-1]:
        plain = plain[key]
    return plain


PATHS = list(places(SMALL))
VERDICT = SMALL["results"][0]["verdict"]["verdicts"][0]
FIGURES = [
    path
    for path in places(VERDICT)
    if type(holder(VERDICT, path)[path[-1]]) in (int, float) and not {"seconds", "taken", "metrics"}.isdisjoint(path)
]


# There and back


@pytest.mark.parametrize("report", [session(), session(OK, REGRESSED), everything("x")], ids=["empty", "two", "full"])
def test_a_report_comes_back_whole_and_gives_the_same_bytes_again(report):
    text = to_json(report)
    assert from_json(text, "a.json") == report
    assert to_json(from_json(text, "a.json")) == text


@pytest.mark.parametrize("text", [ALL, ""], ids=["all", "nothing"])
def test_no_text_breaks_it_and_none_is_lost(text):
    # A row of a composition stands in one line of the store, which has no pipes.
    report = everything(text.replace("|", "/"))
    written = to_json(report)
    assert written.isascii()
    assert to_plain(from_json(written, "a.json")) == to_plain(report)
    VALIDATOR.validate(json.loads(written))


def test_it_tells_those_who_only_read_what_follows_from_the_rest():
    plain = json.loads(to_json(session(OK, REGRESSED, errors=("the disk is full",))))
    assert plain["format"] == FORMAT
    assert plain["accounting"] == "gpumem: 2 gated, 1 regressed"
    assert plain["passed"] is False
    assert plain["problems"] == ["the disk is full"]


def test_each_test_has_a_line():
    lines = to_json(session(OK, REGRESSED)).splitlines()
    tests = [json.loads(line.rstrip(","))["verdict"]["test"] for line in lines if line.startswith('{"failed"')]
    assert tests == ["test_a", "test_b"]


@pytest.mark.parametrize(("number", "written"), [(math.inf, "Infinity"), (-math.inf, "-Infinity"), (math.nan, "NaN")])
def test_a_number_that_json_does_not_have_is_a_text_there_and_a_number_again(number, written):
    verdict = measured(replace(peak(Outcome.OK), allowed=number, interval=(number, 1.0)))
    text = to_json(session(result(verdict)))
    metric = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["results"][0]["verdict"]
    assert metric["verdicts"][0]["metrics"][0]["allowed"] == written
    VALIDATOR.validate(json.loads(text))
    back = from_json(text, "a.json").results[0].verdict.verdicts[0].metrics[0]
    assert [repr(back.allowed), repr(back.interval)] == [repr(number), repr((number, 1.0))]
    assert to_json(from_json(text, "a.json")) == text


def test_a_whole_number_is_one_however_it_is_written():
    text = FULL
    for name, number in (("shards", 3), ("peak", 1), ("count", 3)):
        assert f'"{name}": {number}' in text
        text = text.replace(f'"{name}": {number}', f'"{name}": {number}.0')
    report = from_json(text, "a.json")
    assert report == everything("a text")
    assert to_json(report) == FULL


def test_bytes_and_counts_are_ints_again_where_others_wrote_them_with_a_point():
    changed = json.loads(FULL)
    for verdict in (one for each in changed["results"] for one in each["verdict"]["verdicts"]):
        for holds, keys in [
            (verdict["measurement"]["metrics"], ("peak_allocated",)),
            (verdict["metrics"][0], ("value", "baseline")),
            (verdict["metrics"][3], ("value", "baseline")),
        ]:
            holds.update({key: float(holds[key]) for key in keys})
    text = json.dumps(changed)
    assert '"peak_allocated": 9000000000.0' in text
    assert to_json(from_json(text, "a.json")) == FULL


@pytest.mark.parametrize(
    ("path", "number"),
    [
        *((path, 0) for path in (*FIGURES, ("measurement", "explanation", "over_time", "peak"))),
        # Of other keys none may be missing, which a test of its own tells.
        *((path, None) for path in FIGURES if path[:2] == ("measurement", "metrics")),
        (("metrics", 1, "baseline"), None),
    ],
    ids=lambda one: ".".join(map(str, one[-3:])) if isinstance(one, tuple) else str(one),
)
def test_every_format_shows_a_report_with_another_programs_figure_or_it_is_refused(path, number):
    changed = {**PLAIN, "results": copy.deepcopy(PLAIN["results"][:2])}
    for test, verdict in itertools.product((0, 1), repeat=2):
        holds = holder(changed["results"][test]["verdict"]["verdicts"][verdict], path)
        if number is None and isinstance(holds, dict):
            del holds[path[-1]]
        else:
            holds[path[-1]] = number
    try:
        report = from_json(json.dumps(changed), "a.json")
    except ReportError as error:
        report, refused = None, str(error)
    if report is None:
        assert refused.startswith("a.json: ")
        assert any(isinstance(key, str) and key in refused for key in path)
        return
    for one in FORMATS:
        assert one.render(report)
    assert terminal_text(report, Screen(100, "utf-8"), verbosity=2)
    old, new = side_of_report("old", from_json(FULL, "b.json")), side_of_report("new", report)
    for pair in ((old, new), (new, old)):
        assert markdown(compare_sides(*pair, DEFAULT_TOLERANCES), "si")


# The schema


def test_the_schema_is_one_and_a_report_that_has_everything_is_valid():
    for schema in (PUBLISHED, SCHEMA):
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.Draft202012Validator(schema).validate(PLAIN)


def test_the_schema_names_every_metric_category_and_outcome():
    definitions = SCHEMA["$defs"]
    (real,) = definitions["measurement"]["properties"]["metrics"]["patternProperties"]
    assert [name for name in METRICS if re.search(real, name)] == [
        name for name, one in METRICS.items() if one.unit not in WHOLE
    ]
    assert definitions["metric_verdict"]["if"]["properties"]["metric"] == {"not": {"pattern": real}}
    assert definitions["category"]["enum"] == list(CATEGORIES)
    assert definitions["metric_verdict"]["properties"]["outcome"]["enum"] == [outcome.value for outcome in Outcome]
    assert SCHEMA["properties"]["format"]["enum"] == [FORMAT]


@pytest.mark.parametrize("value", ["Infinity", 1.5])
@pytest.mark.parametrize("place", ["metrics", "value", "baseline", "budget"])
def test_bytes_and_counts_are_integers_and_other_metrics_may_be_infinite(value, place):
    for name in METRICS:
        changed = copy.deepcopy(SMALL)
        verdict = changed["results"][0]["verdict"]["verdicts"][0]
        verdict["metrics"][0]["metric"] = name
        holds, key = (verdict["measurement"]["metrics"], name) if place == "metrics" else (verdict["metrics"][0], place)
        holds[key] = value
        whole = METRICS[name].unit in WHOLE
        assert VALIDATOR.is_valid(changed) is not whole, name
        assert jsonschema.Draft202012Validator(PUBLISHED).is_valid(changed) is not whole, name
        if not whole:
            from_json(json.dumps(changed), "a.json")
            continue
        with pytest.raises(ReportError) as raised:
            from_json(json.dumps(changed), "a.json")
        at = f"measurement.metrics.{name}" if place == "metrics" else f"verdicts[0].metrics[0].{place}"
        assert f"{at} must be an integer, but is {json.dumps(value)}" in str(raised.value)


def objects(schema):
    """The schemas of all objects within one."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for one in schema.values():
            yield from objects(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from objects(one)


ADDED_SINCE = {
    "unmeasured_processes",
    "process",
    "causes",
    "not_explained",
    "simultaneous",
    "at_same_time",
    "accept",
    "bisect",
    "packages",
    "named_device",
    "missing_on",
    "renamed",
    "candidates",
    "skipped",
    "uncollected",
    "omitted",
    "failed_in",
    "failed_by_gate",
    "unwritten",
    "against",
    "by_device",
    "step_peaks",
    "step_peaks_by_device",
    "lowest_counts",
    "unused_before",
    "gained_before",
    "gpu",
    "gpu_uses",
    "jobs_beside_torch",
    "phase",
    "other_phases",
    "moved",
    "graph",
    "callers",
    "function_at",
}
"""Keys that the first reports did not have: these are read, too."""


def without_what_was_added(value):
    if isinstance(value, dict):
        return {key: without_what_was_added(one) for key, one in value.items() if key not in ADDED_SINCE}
    return [without_what_was_added(one) for one in value] if isinstance(value, list) else value


def test_a_report_without_what_was_added_since_is_read():
    assert from_json(json.dumps(without_what_was_added(SMALL)), "a.json").results


def test_no_key_may_be_missing_and_none_may_be_added():
    closed = [one for one in objects(SCHEMA) if "properties" in one]
    assert len(closed) > 15
    for one in closed:
        # Objects that were added since have all of theirs.
        assert sorted(one["required"]) in (sorted(one["properties"]), sorted(one["properties"].keys() - ADDED_SINCE))
        assert one["additionalProperties"] is False


def test_a_key_that_is_missing_is_told_wherever_it_is():
    named = [path for path in PATHS if any(path[-1] in one.get("required", ()) for one in objects(SCHEMA))]
    told = []
    for path in named:
        changed = copy.deepcopy(SMALL)
        del holder(changed, path)[path[-1]]
        try:
            from_json(json.dumps(changed), "a.json")
        except ReportError as error:
            told.append(path[-1] in str(error) or path == ("format",))
    # Names that a report chooses itself, as of metrics, may be left out.
    assert all(told)
    assert len(named) - len(told) <= 3


WRONG = (None, True, "wrong", 12, 12.5, [], {}, -1, [[]], {"a": 1}, 2**80)


@given(path=st.sampled_from(PATHS), value=st.sampled_from(WRONG))
@settings(max_examples=60, deadline=None)
def test_what_is_of_a_wrong_type_is_told_as_by_a_whole_validator_of_the_schema(path, value):
    changed = copy.deepcopy(SMALL)
    holder(changed, path)[path[-1]] = value
    try:
        from_json(json.dumps(changed), "a.json")
        told = ""
    except ReportError as error:
        told = str(error)
    # A schema cannot check the text of a row, or compare two lengths.
    assert VALIDATOR.is_valid(changed) is (not told or " is wrong: " in told), told
    assert not told or told.startswith("a.json: ")


# What cannot be read


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "a.json: it is empty; write a report with `pytest --gpumem-report=FILE.json`"),
        ("gpumem: 3 gated", "a.json: it is not JSON at line 1, column 1: Expecting value"),
        (FULL[:5000], "a.json: it is cut off after 14 lines"),
        ("[]", "a.json: it is JSON, but not a report of pytest-gpumem"),
        ('{"format": 1, "tests": [], "pairs": 5}', "a.json: it is JSON, but not a report of pytest-gpumem"),
        (FULL.replace('"format": 1', '"format": 2'), "a.json: its format is 2, this version of pytest-gpumem reads 1"),
        (FULL.replace('"format": 1', '"format": true'), "a.json: its format is true"),
        (FULL.replace('"format": 1', '"format": [["x"]]'), 'a.json: its format is [["x"]]'),
        (FULL.replace('"shards": 3', '"shards": NaN'), "a.json: it is not JSON: JSON has no number NaN"),
        (FULL.replace('"shards": 3', '"shards": 1e999'), "a.json: it is not JSON: the number 1e999 is too large"),
        (FULL.replace('"shards": 3', f'"shards": {"9" * 5000}'), "a.json: it is not JSON: Exceeds the limit"),
        (FULL.replace('"shards": 3', f'"shards": {"9" * 4000}'), "a.json: shards must be at most 1000000, but is a number with very many digits"),
        (FULL.replace('"shards": 3', '"shards": "3"'), 'a.json: shards must be an integer, but is "3"; it comes from pytest-gpumem a text, this is'),
        (FULL.replace('"shards": 3', '"shard": 3'), "a.json: shards is missing;"),
        (FULL.replace('"shards": 3', '"shards": 3, "shrads": 3'), "a.json: shrads is not a known key; did you mean 'shards'?"),
        (FULL.replace('"regressed"', '"worse"'), 'metrics[0].outcome must be one of "recorded", "ok", '),
        (FULL.replace('"settled": false', '"settled": 0'), "measurement.settled must be true or false, but is 0"),
        (FULL.replace('"peak": 1, ', '"peak": "1", '), 'over_time.peak must be an integer, but is "1"'),
        (FULL.replace('"units": "iec"', '"unit": "iec"'), "a.json: terms.units is missing;"),
        (FULL.replace('"step_time": 0.1', '"stpe_time": 0.1'), "measurement.metrics.stpe_time is not a known key; did you mean 'step_time'?"),
        (FULL.replace('"count": 3', '"a\\nb": [3]'), "environment.details.a\\nb must be a string or an integer, but is an array;"),
        (FULL.replace("[0.9, 1.1]", '[0.9, "x"]'), """.interval[1] must be a number or one of "Infinity", "-Infinity", "NaN", but is "x";"""),
        (FULL.replace("[0.9, 1.1]", "[0.9, 1.1, 2.1]"), ".interval must have 2 items, but has 3;"),
        (FULL.replace('"update": "all"', '"update": 3'), 'terms.update must be one of "new", "improved", "all" or null, but is 3;'),
        (FULL.replace('"peak": 1, ', '"peak": -1, '), "over_time.peak must be at least 0, but is -1;"),
        ("[" * 100_000, "a.json: its JSON is nested too deeply"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place_and_what_would_be_right(text, told):
    with pytest.raises(ReportError) as raised:
        from_json(text, "a.json")
    assert told in str(raised.value)


def test_however_deep_it_is_nested_it_is_told_to_be_no_report():
    # At some depth the JSON can be read, and what looks at it has no room left.
    for deep in range(700, 1000, 20):
        with pytest.raises(ReportError, match=r"^a\.json: it"):
            from_json(FULL.replace('"format": 1', f'"format": {"[" * deep}{"]" * deep}'), "a.json")


@pytest.mark.parametrize(
    ("others", "last", "told"),
    [
        (range(50), True, "must be an integer, but is true"),
        (range(50), 2**63, "must be at most 9223372036854775807, but is 9223372036854775808"),
        (range(50), "1", 'must be an integer, but is "1"'),
        ([1.0] * 50, 0.5, "must be an integer, but is 0.5"),
        ([1.0] * 50, 1e300, "must be at most 9223372036854775807, but is 1e+300"),
    ],
    ids=["no number", "too large", "a text", "no whole one", "too large as a float"],
)
def test_what_is_wrong_at_the_end_of_a_long_series_of_numbers_is_told(others, last, told):
    changed = copy.deepcopy(SMALL)
    measurement = changed["results"][0]["verdict"]["verdicts"][0]["measurement"]
    measurement["explanation"]["over_time"]["total"] = [*others, last]
    with pytest.raises(ReportError, match=re.escape(f"measurement.explanation.over_time.total[50] {told}")):
        from_json(json.dumps(changed), "a.json")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"activation | a text', '"food | a text', "'food' is no category"),
        ('"pace": [1000000000.0, null]', '"pace": [1.0]', "zip()"),
        ('"a a text": "a text"', '"slug": "a text"', "'slug' is reserved for the device"),
    ],
)
def test_what_no_schema_can_say_is_told_too(old, new, told):
    assert old in FULL
    with pytest.raises(ReportError) as raised:
        from_json(FULL.replace(old, new), "a.json")
    assert told in str(raised.value)


def test_a_report_of_a_newer_version_says_which():
    changed = FULL.replace('"version": "a text"', '"version": "99.0"').replace('"settled"', '"setled"')
    with pytest.raises(ReportError, match=rf"it comes from pytest-gpumem 99\.0, this is {__version__}"):
        from_json(changed, "a.json")


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.large_base_example, HealthCheck.too_slow])
def test_a_text_is_read_or_refused_whatever_was_cut_off_or_changed_in_it(data):
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(FULL))] * 2)))
    piece = data.draw(
        st.sampled_from(["", '"', "0", "-1", "1e400", "null", "[]", "{}", ",", "\\ud800", "\x00", "9" * 30])
    )
    text = data.draw(st.sampled_from([FULL[:end], FULL[start:end], FULL[:start] + piece + FULL[min(end, start + 9) :]]))
    with contextlib.suppress(ReportError):
        report = from_json(text, "a.json")
        assert to_plain(from_json(to_json(report), "b.json")) == to_plain(report)


@given(st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
@settings(max_examples=50, deadline=None)
def test_nothing_else_comes_out_of_any_text(text):
    with pytest.raises(ReportError):
        from_json(text, "a.json")
