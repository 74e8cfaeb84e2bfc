"""What a job of GitHub Actions is told: annotations that no text breaks out of, and a summary within its limit."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from pytest_gpumem.facts.values.composition import REST, Composition, Explanation, Holder, Row
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import MetricVerdict, Outcome, TestVerdict
from pytest_gpumem.reporting.reports import github
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.github import annotation_lines, folder_within, report_to_github, shown_files
from pytest_gpumem.reporting.reports.markdown import markdown
from pytest_gpumem.reporting.reports.results import TestResult
from pytest_gpumem.reporting.reports.session_report import Terms
from tests.git_store import Repository
from tests.hostile import TEXTS
from tests.reports.sessions import GB, OK, REGRESSED, UNEXPLAINED, everything, measured, peak, result, session

UNSURE = result(
    measured(MetricVerdict("step_time", Outcome.UNCERTAIN, 0.1, 0.1, 0.004, reason="another process was there")),
    test="test_c",
)
COMMAND = re.compile(r"::(?P<kind>\w+) (?P<properties>[^:]*)::(?P<data>.*)")


def command(line: str) -> tuple[str, dict[str, str], str]:
    """A line as the runner reads it: its kind, properties and data."""
    found = COMMAND.fullmatch(line)
    assert found is not None, line
    properties = dict(one.split("=", 1) for one in found["properties"].split(","))
    return found["kind"], {name: unescaped(value) for name, value in properties.items()}, unescaped(found["data"])


def unescaped(text: str) -> str:
    for written, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(written, character)
    return text


def commands(report, folder: str = "") -> list[tuple[str, dict[str, str], str]]:
    return [command(line) for line in annotation_lines(report, folder)]


# Annotations


def test_a_failing_test_is_an_error_at_its_function_with_the_whole_failure():
    assert annotation_lines(
        session(OK, replace(REGRESSED, verdict=replace(REGRESSED.verdict, failure="50 % more\nso")))
    ) == ["::error file=tests/test_gpt.py,line=7,title=gpumem%3A test_b::50 %25 more%0Aso"]


def test_files_are_told_from_the_root_of_the_repository(tmp_path):
    root = tmp_path / "libs" / "model"
    root.mkdir(parents=True)
    assert folder_within(root, str(tmp_path)) == "libs/model/"
    assert folder_within(tmp_path, str(tmp_path)) == ""
    assert folder_within(tmp_path, str(root)) == ""
    assert folder_within(tmp_path, None) == ""
    ((_, properties, _),) = commands(session(REGRESSED), "libs/model/")
    assert properties["file"] == "libs/model/tests/test_gpt.py"


def test_what_makes_a_session_red_beside_its_tests_is_an_error_without_a_file():
    new = result(measured(peak(Outcome.NEW, then=None)))
    assert commands(session(new)) == [
        (
            "error",
            {"title": "gpumem"},
            "nothing was gated: 1 test new, nothing to compare with (record one with --gpumem-update=new)",
        )
    ]


def test_what_is_uncertain_or_has_no_effect_is_a_warning():
    report = session(OK, UNSURE, selection=Selection(budgets_without_effect=("the budget has no effect",)))
    assert commands(report) == [
        ("warning", {"title": "gpumem"}, "the budget has no effect"),
        (
            "warning",
            {"file": "tests/test_gpt.py", "line": "7", "title": "gpumem: test_c"},
            "step_time is uncertain: another process was there",
        ),
    ]


def test_a_test_that_did_not_finish_and_one_that_failed_by_itself_are_errors():
    broke = result(measured(peak(Outcome.OK)), failed_by_itself=True)
    assert [(kind, data) for kind, _, data in commands(session(broke, not_run=(("a.py", "test_z"),)))] == [
        ("error", "The test itself failed"),
        ("error", "The test was selected, but did not finish"),
    ]


def test_a_green_session_has_no_annotations():
    assert annotation_lines(session(OK)) == []


def test_of_many_the_most_serious_are_shown_and_the_last_says_how_many_more():
    over = result(measured(peak(Outcome.OVER_BUDGET)), test="test_over", failure="over")
    broke = result(measured(peak(Outcome.OK)), test="test_broke", failed_by_itself=True)
    found = commands(session(*[broke] * 3, *[UNEXPLAINED] * 12, over, *[UNSURE] * 12, errors=("disk full",)))
    assert [kind for kind, _, _ in found] == ["error"] * 10 + ["warning"] * 10
    titles = [properties["title"] for _, properties, _ in found]
    assert titles[:10] == ["gpumem", "gpumem: test_over", *["gpumem: test_b"] * 7, "gpumem"]
    assert found[9][2] == "and 8 more, which GitHub would not show"
    assert found[19][2] == "and 3 more, which GitHub would not show"


def test_ten_of_a_kind_are_all_shown():
    assert len(commands(session(*[REGRESSED] * 10))) == 10


@pytest.mark.parametrize(
    "name", ["newlines", "colons", "percent", "encoded", "command", "controls", "surrogates", "nothing", "long"]
)
def test_no_text_breaks_out_of_its_command_and_none_is_lost(name):
    text = TEXTS[name]
    report = everything(text)
    lines = annotation_lines(report)
    assert len(lines) == 8
    assert all(len(line.splitlines()) == 1 and line.isprintable() for line in lines)
    found = [command(line) for line in lines]
    assert all(properties.keys() <= {"file", "line", "title"} for _, properties, _ in found)
    # The file, the id and the message of the test that failed, but for what GitHub would cut off.
    kind, properties, data = next(one for one in found if one[1].get("line") == "7")
    assert kind == "error"
    assert properties["file"] == visible(text)
    assert visible(f"gpumem: {text}")[:250] in properties["title"]
    assert "\n".join(visible(line) for line in text.split("\n"))[:4_000] in data


def test_an_id_that_is_too_long_for_a_title_stands_in_the_message():
    long = result(measured(peak(Outcome.REGRESSED)), test=f"test_[{'x' * 300}]", failure="grew")
    ((_, properties, data),) = commands(session(long))
    assert len(properties["title"]) == github.TITLE_LIMIT
    assert data == f"tests/test_gpt.py::test_[{'x' * 300}]\ngrew"


# The line that grew


def grown(*changes: Change, **more) -> TestResult:
    growth = Difference(8 * GB, 9 * GB, changes)
    return result(measured(peak(Outcome.REGRESSED), difference=growth, **more), test="test_b", failure="it grew\n\nso")


def at_line(*results: TestResult, can_show=lambda _file: True) -> list[tuple[str, str, str]]:
    """File, line and message of the annotations that are not at a test."""
    lines = annotation_lines(session(*results), "libs/", can_show)
    found = [(properties, data) for _, properties, data in map(command, lines)]
    return [
        (properties["file"], properties["line"], data)
        for properties, data in found
        if properties["file"] != "libs/tests/test_gpt.py"
    ]


ACTIVATION = Row("activation", GB, "net.attn", "model.py:88", operator="_softmax")
"""A row whose line is the project's."""
IN_A_PACKAGE = replace(ACTIVATION, site="", library="peft 0.17: layer.py:3")


def test_a_failing_test_is_also_an_error_at_the_first_line_that_explains_it():
    smaller = Change(None, replace(ACTIVATION, site="other.py:3"))
    failed = grown(Change(None, ACTIVATION, "was bfloat16, now float32"), smaller)
    lines = annotation_lines(session(OK, failed), "libs/", lambda file: file == "model.py")
    assert [command(line)[1] for line in lines] == [
        {"file": "libs/tests/test_gpt.py", "line": "7", "title": "gpumem: test_b"},
        {"file": "libs/model.py", "line": "88", "title": "gpumem: test_b"},
    ]
    assert command(lines[1])[2] == (
        "+1.00 GB activations at model.py:88, by _softmax in net.attn: was bfloat16, now float32\n"
        "tests/test_gpt.py::test_b: it grew"
    )
    assert at_line(failed, can_show=lambda file: file != "model.py") == []


def test_the_caller_that_is_named_first_has_the_annotation():
    called = replace(IN_A_PACKAGE, site="train.py:9", named="model.py:12")
    assert [place[:2] for place in at_line(grown(Change(None, called)))] == [("libs/model.py", "12")]


@pytest.mark.parametrize(
    "failed",
    [
        grown(Change(None, IN_A_PACKAGE), Change(None, ACTIVATION)),
        grown(Change(None, Row("activation", 2 * GB, operator=REST), "", (ACTIVATION, IN_A_PACKAGE))),
        grown(Change(None, replace(ACTIVATION, site="../other/model.py:3"))),
        grown(Change(ACTIVATION, None)),
        result(
            measured(MetricVerdict("step_time", Outcome.REGRESSED, 2, 1, 0.1), difference=Difference(1, 2, ())),
            failure="slower",
        ),
    ],
    ids=["a package", "one of several", "outside of the root directory", "shrank", "time"],
)
def test_no_later_row_and_no_line_that_may_be_innocent_has_an_annotation(failed):
    assert at_line(failed) == []


def test_what_is_kept_is_annotated_with_its_holder_and_more_work_with_its_count():
    kept = Composition(GB, (replace(ACTIVATION, site="cache.py:5"),))
    explanation = Explanation(Composition(0, ()), kept, holders=(Holder("cache.kept[...]", kept),))
    retained = MetricVerdict("retained", Outcome.REGRESSED, GB, 0, 64_000)
    leaks = result(measured(peak(Outcome.OK), retained, measurement={"explanation": explanation}), failure="it kept")
    work = MetricVerdict("syncs", Outcome.REGRESSED, 5, 1, 0)
    more = {"syncs": (Tally("item", 4, OperatorSite("net", "loss.py:3")),)}
    waits = result(measured(peak(Outcome.OK), work, count_changes=more), failure="it waits")
    assert at_line(leaks, waits) == [
        (
            "libs/cache.py",
            "5",
            (
                "1.00 GB activations at cache.py:5, by _softmax in net.attn, kept afterwards: "
                "kept in: cache.kept[...]\ntests/test_gpt.py::test_a: it kept"
            ),
        ),
        ("libs/loss.py", "3", "+4 syncs at loss.py:3, by item in net\ntests/test_gpt.py::test_a: it waits"),
    ]


def test_an_uncertain_line_is_annotated_only_if_nothing_certain_failed():
    change = Change(None, ACTIVATION)
    unsure = result(
        measured(peak(Outcome.UNCERTAIN), difference=Difference(1, 2 * GB, (change,))), failure="may have grown"
    )
    assert [place[:2] for place in at_line(unsure)] == [("libs/model.py", "88")]
    slower = MetricVerdict("step_time", Outcome.REGRESSED, 2, 1, 0.1)
    beside = result(
        measured(peak(Outcome.UNCERTAIN), slower, difference=Difference(1, 2 * GB, (change,))), failure="slower"
    )
    assert at_line(beside) == []


def test_a_cause_in_a_package_is_also_annotated_at_the_projects_line_that_reached_it():
    reached = Change(None, replace(IN_A_PACKAGE, site="train.py:9"))
    tests = [
        replace(one, verdict=replace(one.verdict, test=name))
        for name, one in zip("ab", [grown(reached)] * 2, strict=True)
    ]
    lines = annotation_lines(session(*tests), "libs/", lambda _file: True)
    found = [properties for _, properties, _ in map(command, lines)]
    assert [(one["file"], one["line"]) for one in found] == [("libs/tests/test_gpt.py", "7"), ("libs/train.py", "9")]
    assert found[0]["title"].endswith("in 2 of 2 tests")


@pytest.fixture
def pull_request(tmp_path) -> Repository:
    """A project whose checkout is the merge of a pull request that changes ``libs/model.py``."""
    made = Repository(tmp_path / "project")
    root = made.path / "libs"
    root.mkdir()
    for name in ("model.py", "other.py"):
        (root / name).write_text("before", encoding="utf-8")
    made.git("add", ".")
    made.git("commit", "--quiet", "--message=first")
    made.git("checkout", "--quiet", "-b", "topic")
    (root / "model.py").write_text("after", encoding="utf-8")
    made.git("commit", "--quiet", "--all", "--message=change")
    made.git("checkout", "--quiet", "main")
    (root / "other.py").write_text("another's change", encoding="utf-8")
    made.git("commit", "--quiet", "--all", "--message=meanwhile")
    made.git("merge", "--quiet", "--no-ff", "--message=merge", "topic")
    return made


PULL_REQUEST = {"GITHUB_BASE_REF": "main"}


def shown_in(checkout, environment) -> list[str]:
    can_show = shown_files(checkout / "libs", environment)
    return [name for name in ("model.py", "other.py", "gone.py", "../secret") if can_show(name)]


@pytest.mark.parametrize("depth", [2, 9], ids=["its two parents", "all of it"])
def test_a_pull_request_shows_annotations_in_the_files_that_it_changes(pull_request, tmp_path, depth):
    (tmp_path / "secret").touch()
    url = pull_request.path.as_uri()
    pull_request.git("branch", "merge")
    pull_request.git("reset", "--quiet", "--hard", "HEAD^1")
    pull_request.git("clone", "--quiet", f"--depth={depth}", "--branch=merge", url, str(tmp_path / "checkout"))
    assert shown_in(tmp_path / "checkout", PULL_REQUEST) == ["model.py"]
    assert shown_in(tmp_path / "checkout", {}) == ["model.py", "other.py"]


def test_a_branch_is_compared_with_where_it_left_the_other_one(pull_request, tmp_path):
    pull_request.git("reset", "--quiet", "--hard", "HEAD^1")
    pull_request.git("clone", "--quiet", "--branch=topic", ".", str(tmp_path / "checkout"))
    assert shown_in(tmp_path / "checkout", PULL_REQUEST) == ["model.py"]


@pytest.mark.parametrize("is_shallow", [True, False], ids=["a clone of depth 1", "no repository"])
def test_where_git_does_not_know_the_diff_any_file_of_the_checkout_can_be_shown(pull_request, tmp_path, is_shallow):
    checkout = tmp_path / "checkout"
    if is_shallow:
        pull_request.git("clone", "--quiet", "--depth=1", pull_request.path.as_uri(), str(checkout))
        pull_request.git("-C", str(checkout), "update-ref", "-d", "refs/remotes/origin/main")
    else:
        shutil.copytree(pull_request.path / "libs", checkout / "libs")
    assert shown_in(checkout, PULL_REQUEST) == ["model.py", "other.py"]


def test_a_job_annotates_the_line_in_the_repository(pull_request):
    root = pull_request.path / "libs"
    failed = session(grown(Change(None, ACTIVATION)))
    job = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(pull_request.path)}
    assert [command(line)[1]["file"] for line in report_to_github(failed, root, job)] == [
        "libs/tests/test_gpt.py",
        "libs/model.py",
    ]


def test_a_job_without_a_checkout_annotates_the_line_as_well(tmp_path):
    # As `gpumem merge` in a job that has only the reports of the shards.
    failed = session(grown(Change(None, ACTIVATION)))
    outside = session(grown(Change(None, replace(ACTIVATION, site="src/../../model.py:3"))))
    job = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path), **PULL_REQUEST}
    places = [[command(line)[1]["file"] for line in report_to_github(one, tmp_path, job)] for one in (failed, outside)]
    assert places == [["tests/test_gpt.py", "model.py"], ["tests/test_gpt.py"]]


def test_a_checkout_without_the_line_s_file_has_no_annotation_of_it(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gpt.py").touch()
    job = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path)}
    (line,) = report_to_github(session(grown(Change(None, ACTIVATION))), tmp_path, job)
    assert command(line)[1]["file"] == "tests/test_gpt.py"


# The summary


def environment(tmp_path, **more) -> dict[str, str]:
    return {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), **more}


def test_the_report_is_added_to_what_the_summary_has(tmp_path):
    summary = tmp_path / "summary.md"
    summary.write_text("no line end", encoding="utf-8")
    assert report_to_github(session(OK), tmp_path, environment(tmp_path)) == []
    report_to_github(session(REGRESSED), tmp_path, environment(tmp_path))
    first, second = markdown(session(OK)), markdown(session(REGRESSED))
    assert summary.read_text(encoding="utf-8") == f"no line end\n{first}\n{second}"


def test_several_runs_of_a_step_stay_within_the_limit_together(tmp_path, monkeypatch):
    most = 2 * len(markdown(session(OK)).encode()) - 50
    monkeypatch.setattr(github, "SUMMARY_LIMIT", most)
    summary = tmp_path / "summary.md"
    said = [report_to_github(session(OK), tmp_path, environment(tmp_path)) for _ in range(9)]
    assert summary.stat().st_size <= most
    assert "Left out, because the text would be too long" in summary.read_text(encoding="utf-8")
    assert said[0] == []
    assert said[-1] == [
        (
            f"gpumem: the step's summary was not written: the summary has {summary.stat().st_size:,} bytes already, "
            f"and GitHub shows at most {most:,}"
        )
    ]


def test_a_summary_that_cannot_be_written_is_told_beside_the_annotations(tmp_path):
    (tmp_path / "summary.md").mkdir()
    first, second = report_to_github(session(REGRESSED), tmp_path, environment(tmp_path))
    assert first.startswith("gpumem: the step's summary was not written: ")
    assert "summary.md" in first
    assert second.startswith("::error ")


def test_nothing_is_told_outside_of_github_nor_of_a_session_that_measured_nothing(tmp_path):
    outside = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    assert report_to_github(session(REGRESSED), tmp_path, outside) == []
    assert report_to_github(session(terms=Terms()), tmp_path, environment(tmp_path)) == []
    assert not (tmp_path / "summary.md").exists()
    unmeasured = TestResult(TestVerdict("a.py", "test_z", unmeasured="no CUDA device"), passed=True)
    report_to_github(session(unmeasured, terms=Terms()), tmp_path, environment(tmp_path))
    assert (tmp_path / "summary.md").exists()
