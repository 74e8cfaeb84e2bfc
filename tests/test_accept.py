"""``gpumem accept``: the store gets from a report what the session itself would have written, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import BackendError, ReportError
from pytest_gpumem.judging.baselines.changes import Source
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.format import parse
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.reporting.reports.json_report import from_json, to_json
from pytest_gpumem.tools.accept.from_report import by_device, candidates_of
from pytest_gpumem.tools.main import main
from tests.git_store import Repository
from tests.hostile import TEXTS
from tests.reports.sessions import everything
from tests.reports.test_json_report import WRONG, holder, places
from tests.test_time_gate import Timed

BEFORE = """
class Loss(torch.nn.Module):
    def forward(self, hidden):
        return hidden.float().pow(2).mean()


def model(width=64, deep=2):
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(deep)]
    return torch.nn.Sequential(*layers, Loss())


@pytest.mark.gpumem
def test_call():
    torch.ones(1_000_000)


@pytest.mark.gpumem
def test_alike():
    torch.ones(500_000)


def test_train(gpumem):
    gpumem.train_step(model(), torch.ones(8, 64))


def test_infer(gpumem):
    gpumem.infer_step(model(), torch.ones(8, 64))


def test_several(gpumem):
    gpumem.measure(lambda: torch.ones(100_000), name="first")
    gpumem.measure(lambda: torch.ones(200_000), name="second")


def test_region(gpumem):
    with gpumem.track("region"):
        torch.ones(400_000)


def test_load(gpumem):
    gpumem.load(lambda: model(256))


KEPT = []


def test_growth(gpumem):
    gpumem.measure(lambda: KEPT.append(torch.ones(1_000)))


def test_loop(gpumem):
    work = model()
    optimizer = torch.optim.SGD(work.parameters(), lr=0.1)
    with gpumem.loop(steps=6):
        for _ in range(200):
            work(torch.ones(8, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.gpumem_configs(precision=["fp32", "amp-bf16"])
def test_matrix(gpumem, gpumem_config):
    gpumem.train_step(model(), torch.ones(8, 64), config=gpumem_config)
"""
AFTER = (
    BEFORE.replace("range(deep)", "range(deep + 2)")
    .replace("torch.ones(1_000_000)", "torch.ones(2_000_000) + torch.ones(2_000_000)")
    .replace("torch.ones(1_000)", "torch.ones(300_000)")
    .replace("torch.ones(200_000), name='second'", "torch.ones(200_000), name='third'")
    .replace('name="second"', 'name="third"')
    .replace("torch.ones(400_000)", "torch.ones(100_000)")
    + """

def test_new(gpumem):
    gpumem.train_step(model(), torch.ones(16, 64))


@pytest.mark.gpumem
def test_new_call():
    torch.ones(3_000_000)
"""
)


@pytest.fixture(autouse=True)
def _here(project, monkeypatch):
    monkeypatch.chdir(project.path)


def accept(*arguments, code=0, given=None):
    result = CliRunner().invoke(main, ["accept", *map(str, arguments)], input=given)
    assert result.exit_code == code, result.output
    return result.output


def gated(project, *options, report="report.json", **how):
    return project.run("--gpumem-baseline", f"--gpumem-report={report}", *options, **how)


def both_ways(project, *options, reason=(), **how):
    """The store after the report of a gate was accepted, and after the session that accepts at once."""
    store, before = project.path / "gpumem-baselines", project.path / "before"
    if store.exists():
        shutil.copytree(store, before)
    gated(project, *options, **how)
    accept("report.json", *(f"--reason={one}" for one in reason))
    accepted = texts(store)
    shutil.rmtree(store)
    if before.exists():
        shutil.copytree(before, store)
    project.run("--gpumem-update=all", *options, *(f"--gpumem-reason={one}" for one in reason), **how)
    return accepted, texts(store)


def texts(store):
    return {path.relative_to(store).as_posix(): path.read_text("utf-8") for path in sorted(store.rglob("*.toml"))}


# The same bytes


def test_the_store_is_the_one_that_accepting_at_once_gives(project):
    project.write(BEFORE)
    project.run("--gpumem-update=new").assert_outcomes(passed=11)
    project.write(AFTER)
    accepted, at_once = both_ways(project)
    assert accepted == at_once
    (text,) = accepted.values()
    entries = parse(text, "test_it.py")
    assert {key.name for key in entries if key.test == "test_several"} == {"first", "third"}
    # A region runs once, and so is never explained.
    assert [key.name for key, entry in entries.items() if entry.composition is None] == ["region"]
    assert len(entries) == 14


def test_a_store_that_is_not_there_yet_is_begun(project):
    project.write(BEFORE)
    accepted, at_once = both_ways(project, "-k", "call or train", "--gpumem-strict", reason=["why"])
    assert accepted == at_once != {}


@pytest.mark.parametrize(
    ("recorded", "seconds"),
    [
        pytest.param(True, 0.012, id="slower"),
        pytest.param(False, 0.010, id="new"),
        pytest.param(True, 0.008, id="faster", marks=pytest.mark.thorough),
        pytest.param(True, 0.010, id="alike", marks=pytest.mark.thorough),
    ],
)
def test_times_are_accepted_as_the_session_would_have(project, monkeypatch, seconds, recorded):
    monkeypatch.setattr("pytest_gpumem.measuring.measure.timed_steps.SECONDS_BETWEEN_SAMPLES", 0.0)
    timed = Timed(project)
    timed.record() if recorded else timed.write()
    timed.script(seconds)
    accepted, at_once = both_ways(timed)
    assert accepted == at_once
    assert "step_times" in accepted["scripted/test_it.py.toml"]
    before = project.stored()
    accept("report.json")
    assert project.stored() == before


# Which tests


ONE = "@pytest.mark.gpumem{budget}\ndef test_{name}():\n    torch.ones({count})\n{more}\n\n"


def one(name, count=1_000_000, more="", budget=""):
    return ONE.format(name=name, count=count, more=more, budget=budget)


@pytest.fixture(scope="module")
def grown_once(tmp_path_factory):
    """A folder that is still empty: the first test that needs it fills it, and the others copy it."""
    return tmp_path_factory.mktemp("grown")


@pytest.fixture
def grown(project, grown_once):
    """A project with a report of two tests that grew, one that needs less and one that is as it was."""
    if (grown_once / "report.json").exists():
        shutil.copytree(grown_once, project.path, dirs_exist_ok=True)
        return project
    names = ("a", "b", "less", "same")
    project.write("".join(map(one, names)))
    project.run("--gpumem-update=new")
    counts = {"less": 500_000, "same": 1_000_000}
    project.write("".join(one(name, counts.get(name, 2_000_000)) for name in names))
    gated(project)
    shutil.copytree(project.path, grown_once, dirs_exist_ok=True)
    return project


def peaks(project):
    (text,) = project.stored().values()
    return {key.test: int(entry.metrics["peak_allocated"]) for key, entry in parse(text, "test_it.py").items()}


def test_a_test_whose_peak_is_as_it_was_is_told_with_what_changed(project):
    source = "KEPT = []\n\n@pytest.mark.gpumem\ndef test_a():\n    both = torch.zeros({}), torch.zeros({})\n"
    source += "    KEPT.append(both[0])\n"
    project.write(source.format(1_000_000, 2_000_000))
    project.run("--gpumem-update=new")
    project.write(source.format(2_000_000, 1_000_000))
    gated(project)
    assert accept("report.json").splitlines()[0] == (
        "accepted test_it.py::test_a (call) on cpu-x86_64: peak 12.00 MB, was 12.00 MB; retained 8.00 MB, was 4.00 MB"
    )


def test_each_test_is_told_with_its_figures_and_all_are_accounted_for(grown):
    output = accept("report.json", "--reason", "wider")
    assert output.splitlines()[0] == ("accepted test_it.py::test_a (call) on cpu-x86_64: peak 8.00 MB, was 4.00 MB")
    assert output.splitlines()[-1] == "gpumem accept: 3 accepted, 1 unchanged"
    (text,) = grown.stored().values()
    assert text.count('reason = "wider"') == 3
    assert grown.run("--gpumem-baseline").ret == 0
    assert accept("report.json") == "gpumem accept: nothing to accept, 4 unchanged\n"
    assert accept("report.json", "test_a") == "gpumem accept: nothing to accept, 1 unchanged\n"


@pytest.mark.parametrize(
    ("tests", "changed"),
    [
        (["test_it.py::test_a"], {"test_a"}),
        (["test_a", "less"], {"test_a", "test_less"}),
        (["test_it.py"], {"test_a", "test_b", "test_less"}),
        (["*test_?"], {"test_a", "test_b"}),
    ],
)
def test_tests_are_named_by_id_part_or_pattern(grown, tests, changed):
    before = peaks(grown)
    accept("report.json", *tests)
    after = peaks(grown)
    assert {test for test in after if after[test] != before[test]} == changed


def test_a_merged_report_is_accepted_on_each_of_its_devices(grown):
    plain = json.loads((grown.path / "report.json").read_text())
    (grown.path / "other.json").write_text(json.dumps(plain).replace("cpu-x86_64", "cpu-other"))
    result = CliRunner().invoke(main, ["merge", "report.json", "other.json", "--report", "whole.json"])
    assert result.exit_code == 1, result.output
    # The other device's baselines have gone: they are no longer those that the report was compared with.
    output = accept("whole.json", code=1)
    assert [line.partition(": the store no longer ")[0] for line in output.splitlines() if "no longer" in line] == [
        "not accepted: test_it.py::test_a on cpu-other",
        "not accepted: test_it.py::test_b on cpu-other",
    ]
    accept("whole.json", "--force-commit")
    assert sorted(grown.stored()) == ["cpu-other/test_it.py.toml", "cpu-x86_64/test_it.py.toml"]


# On a terminal


@pytest.mark.parametrize(
    ("keys", "changed", "told"),
    [
        ("a\na\na\n", {"test_a", "test_b", "test_less"}, "3 accepted, 1 unchanged"),
        ("s\na\ns\n", {"test_b"}, "1 accepted, 2 skipped, 1 unchanged"),
        ("a\nq\n", {"test_a"}, "1 accepted, 2 skipped, 1 unchanged"),
        ("x\ns\nq\n", set(), "0 accepted, 3 skipped, 1 unchanged"),
    ],
)
def test_on_a_terminal_each_test_is_shown_and_asked_for(grown, monkeypatch, keys, changed, told):
    before = peaks(grown)
    result = on_a_terminal(monkeypatch, keys)
    assert result.exit_code == 0
    assert (
        "1 of 3: test_it.py::test_a\n\n  Memory regressed: peak 8.00 MB, baseline 4.00 MB: +4.00 MB (+100.0 %)"
        in result.output
    )
    assert result.output.splitlines()[-1] == f"gpumem accept: {told}"
    after = peaks(grown)
    assert {test for test in after if after[test] != before[test]} == changed


def test_nothing_is_written_where_the_questions_are_not_answered_to_the_end(grown, monkeypatch):
    before = grown.stored()
    result = on_a_terminal(monkeypatch, "a\n")
    assert (result.exit_code, grown.stored()) == (130, before)
    assert "interrupted; nothing was written" in result.output


def on_a_terminal(monkeypatch, keys, *arguments):
    monkeypatch.setattr("pytest_gpumem.tools.accept.command._is_terminal", lambda: True)
    return CliRunner().invoke(main, ["accept", "report.json", *arguments], input=keys)


# What is refused


def refused(project, why, *arguments, code=1, report="report.json"):
    """Assert that a report is refused with these words, and that the store stays as it was."""
    before = project.stored()
    output = accept(report, *arguments, code=code)
    assert why in output
    assert project.stored() == before
    return output


@pytest.mark.parametrize(
    ("more", "budget", "why"),
    [
        ("    assert False\n", "", "the test itself failed"),
        (
            "",
            "(max_gb=0.001)",
            "the test is over its budget, which a baseline does not change (peak allocated 8.00 MB, budget 1.00 MB)",
        ),
        ("    pytest.xfail('so')\n", "", None),
    ],
    ids=["failed", "over budget", "xfail"],
)
def test_what_an_update_would_not_have_written_is_refused(project, more, budget, why):
    project.write(one("a"))
    project.run("--gpumem-update=new")
    project.write(one("a", 2_000_000, more, budget))
    gated(project)
    if why is None:
        assert refused(project, "nothing to accept, 1 unchanged", code=0)
        why = "not measured"
    output = refused(project, why, "test_a")
    assert output.splitlines()[-1].startswith("gpumem accept: 0 accepted, 1 refused (")


TORN = """
@pytest.fixture
def torn():
    yield
    raise RuntimeError("torn")


@pytest.mark.gpumem
def test_a(torn):
    torch.ones(2_000_000)
"""


def test_a_test_whose_teardown_failed_behind_the_gates_failure_is_refused(project):
    project.write(one("a"))
    project.run("--gpumem-update=new")
    project.write(TORN)
    gated(project)
    refused(project, "the gate failed the test, and the tear-down also failed or did not end")


def test_a_test_that_is_skipped_or_measured_no_more_is_refused_when_it_is_named(project):
    project.write(one("a") + one("b"))
    project.run("--gpumem-update=new")
    project.write(one("a", more="    pytest.skip('so')\n") + one("b").replace("@pytest.mark.gpumem", ""))
    gated(project)
    refused(project, "it was skipped", "test_a")
    refused(project, "is not measured any more", "test_b")


def test_a_limit_without_an_effect_fails_a_test_whatever_its_baseline_is(project):
    step = "def test_a(gpumem):\n    with gpumem.track():\n        torch.ones({count})\n"
    project.write(step.format(count=1_000_000))
    project.run("--gpumem-update=new")
    project.write("@pytest.mark.gpumem(max_slowdown='5 %')\n" + step.format(count=2_000_000))
    result = gated(project, timed=True)
    result.stdout.fnmatch_lines(["Memory regressed: *", "max_slowdown='5 %' has no effect: *"])
    result.stdout.no_fnmatch_line("*accept: *")
    refused(project, "a new baseline would not fix it: max_slowdown='5 %' has no effect: ")
    result = project.run("--gpumem-baseline", "--gpumem-update=all", timed=True)
    result.assert_outcomes(failed=1)


def test_what_is_as_its_baseline_has_nothing_to_accept(grown):
    refused(grown, "not accepted: test_it.py::test_same: it passed and equals its baseline", "test_same")
    assert "1 accepted, 1 refused (nothing to accept)" in accept("report.json", "test_same", "test_b", code=1)


def test_an_unknown_test_is_told_with_those_that_are_spelled_like_it(grown):
    refused(
        grown,
        "the report has no result for test_its.py::test_a; there is test_it.py::test_a",
        "test_its.py::test_a",
        code=2,
    )


def test_a_session_that_ended_early_says_what_has_no_result(project):
    project.write(one("a") + one("b"))
    project.run("--gpumem-update=new")
    project.write(one("a", 2_000_000) + one("b", 2_000_000))
    gated(project, "-x")
    refused(project, "test_b did not finish", "test_b", code=2)
    output = accept("report.json")
    assert "the session ended early: " in output
    assert "the report has no result of 1 selected test, so their baselines do not change: test_it.py::test_b" in output
    assert output.endswith("gpumem accept: 1 accepted\n")


def test_a_baseline_that_changed_since_is_not_written_over(grown):
    grown.write(one("a", 3_000_000))
    grown.run("--gpumem-update=all")
    (path,) = grown.store.rglob("*.toml")
    path.write_text(path.read_text().replace("recorded = ", "commit = 'abc123456'\nrecorded = "))
    why = "test_a: the store no longer has the baseline of call that the report was compared with (recorded 2"
    refused(grown, why, "test_a")
    accept("report.json", "test_a", "--force-commit")
    assert peaks(grown)["test_a"] == 8_000_000


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"terms.baseline": False}, "report.json: its session did not compare with baselines"),
        ({"terms.against": "nvidia-h100"}, "were compared with the baselines of nvidia-h100 (--gpumem-against)"),
        ({"ended": "yesterday"}, "report.json: ended is 'yesterday', expected a time like"),
        ({"commit": "--output=x"}, "report.json: commit is '--output=x', expected an abbreviated hash"),
        ({"format": 2}, "its format is 2, this version of pytest-gpumem reads 1"),
        ({"version": "99.0", "more": 1}, "more is not a known key"),
    ],
)  # fmt: skip
def test_a_report_that_does_not_fit_is_refused(grown, change, why):
    file = grown.path / "report.json"
    plain = json.loads(file.read_text())
    for path, value in change.items():
        *outer, key = path.split(".")
        (plain[outer[0]] if outer else plain)[key] = value
    file.write_text(json.dumps(plain))
    refused(grown, why, code=2)


def test_a_report_of_an_older_version_does_not_say_what_failed_a_test(grown):
    file = grown.path / "report.json"
    file.write_text(file.read_text().replace('"failed_by_gate": true, ', ""))
    output = accept("report.json", code=1)
    assert output.endswith("gpumem accept: 1 accepted, 2 refused (failed by itself), 1 unchanged\n")


def test_a_store_of_a_newer_format_is_left_as_it_is(grown):
    (path,) = grown.store.rglob("*.toml")
    path.write_text(path.read_text().replace("format = 1", "format = 2"))
    refused(grown, "format is 2, but this version of pytest-gpumem reads only format 1", code=2)


def test_a_store_that_cannot_be_written_is_told(grown, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pytest_gpumem.judging.baselines.folder.write_atomically", fail)
    refused(grown, "cannot be written: ", code=2)


def test_with_a_named_store_nothing_of_the_project_is_read_or_run(grown):
    """A checkout of somebody's pull request is code of theirs."""
    for name in ("conftest", "a_plugin"):
        (grown.path / f"{name}.py").write_text("raise ImportError('it was run')\n")
    (grown.path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "-p a_plugin"\n[tool.gpumem]\nstore = 3\n'
    )
    refused(grown, "[tool.gpumem]: store is 3, expected a string", code=2)
    accept("report.json", "test_a", "--store", "gpumem-baselines")
    assert peaks(grown)["test_a"] == 8_000_000
    refused(grown, "--store is empty", "--store", "", code=2)


def test_what_is_no_report_is_told(grown):
    (grown.path / "x.json").write_text("{}")
    refused(grown, "it is JSON, but not a report of pytest-gpumem", code=2, report="x.json")
    refused(grown, "there is no file none.json", code=2, report="none.json")


# Commits


@pytest.fixture
def committed(grown):
    """A clone with the report of its commit."""
    repository = Repository(grown.path)
    (grown.path / ".gitignore").write_text("*.json\n__pycache__\n")
    commit = repository.commit("all")
    grown.run("--gpumem-update=new")
    gated(grown)
    return grown, repository, commit


def test_the_commit_that_was_measured_is_kept(committed):
    project, _, commit = committed
    accept("report.json", "test_a")
    (text,) = project.stored().values()
    assert f'commit = "{commit[:9]}"' in text


def test_a_later_commit_of_the_store_alone_is_the_same_code(committed):
    project, repository, _ = committed
    accept("report.json", "test_a")
    repository.commit("accept test_a")
    accept("report.json", "test_b")
    assert peaks(project)["test_b"] == 8_000_000


def test_the_merge_commit_of_a_pull_request_that_is_up_to_date_is_the_same_code(committed):
    project, repository, commit = committed
    tree = repository.git("rev-parse", f"{commit}^{{tree}}").strip()
    merge = repository.git("commit-tree", tree, "-p", commit, "-m", "merge").strip()
    file = project.path / "report.json"
    file.write_text(file.read_text().replace(commit[:9], merge[:9]))
    accept("report.json", "test_a")
    (text,) = project.stored().values()
    assert f'commit = "{merge[:9]}"' in text


@pytest.mark.parametrize("reason", [(), ("--reason=wider",)])
def test_another_commit_is_refused_unless_it_is_forced_which_the_baseline_says(committed, reason):
    project, repository, commit = committed
    (project.path / "model.py").write_text("WIDTH = 3\n")
    head = repository.commit("other code")
    why = f"the report comes from commit {commit[:9]}, but HEAD is {head[:9]}: 1 file differs (model.py)"
    refused(project, why, code=2)
    accept("report.json", "test_a", "--force-commit", *reason)
    (text,) = project.stored().values()
    at = f"measured at {commit[:9]}, accepted at {head[:9]}"
    assert f'reason = "{f"wider ({at})" if reason else at}"' in text
    assert f'commit = "{commit[:9]}"' in text


@pytest.mark.parametrize(
    ("commit", "why"),
    [
        ('"abcdef123"', "the report comes from commit abcdef123, which this clone does not have (HEAD is "),
        ("null", "the report does not name its commit, and HEAD is "),
    ],
)
def test_a_commit_that_nobody_knows_is_refused(committed, commit, why):
    project, _, now = committed
    file = project.path / "report.json"
    file.write_text(file.read_text().replace(f'"commit": "{now[:9]}",\n"terms"', f'"commit": {commit},\n"terms"'))
    refused(project, why, code=2)
    accept("report.json", "test_a", "--force-commit")


def test_a_report_with_a_commit_is_refused_where_there_is_no_repository(grown):
    file = grown.path / "report.json"
    file.write_text(file.read_text().replace('"commit": null,\n"terms"', '"commit": "abcdef123",\n"terms"'))
    refused(grown, "is not in a git repository", code=2)


# Hostile reports


NAMES = [
    "../../outside",
    "../outside.py",
    "/tmp/outside",
    "..",
    ".",
    "",
    "a/../../b",
    "a//b",
    "C:/outside",
    "..\\..\\outside",
    "a\\..\\..\\b",
    ".lock",
    ".gitignore",
    "a\0b",
    "a\ud800b",
    "train_step on cuda:1",
    'x"]\n[tests.evil]\n"',
    "x" * 5_000,
]


def acceptable(text):
    """A report, as JSON, of a test whose every text is ``text`` and that may be accepted."""
    plain = json.loads(to_json(everything(text)))
    (_, result, *_) = plain["results"]
    plain["results"] = [result]
    # Two of one name are no two entries.
    del result["verdict"]["verdicts"][1:]
    parts = {"cuda:0": {"peak_allocated": 1}, "cuda:1": {"peak_allocated": 9 * 10**9}}
    result["verdict"]["verdicts"][0]["measurement"] |= {"by_device": parts, "step_peaks_by_device": {}}
    for metric in result["verdict"]["verdicts"][0]["metrics"]:
        metric["budget"] = None
        metric["outcome"] = "new" if metric["outcome"] == "over_budget" else metric["outcome"]
    return plain


def write(plain, store):
    """Write what the command does of a report, in a checkout of its commit; the only candidate."""
    report = from_json(json.dumps(plain), "a.json")
    there = Store(Folder(store))
    (candidate,) = candidates_of(report.results, report.terms, there, Source("2026-11-21", None), forced=True)
    for entries, gone in by_device([candidate] if candidate.changes_store else []).values():
        there.change(entries, gone)
    return candidate


def test_a_report_that_has_everything_can_be_accepted(tmp_path):
    assert write(acceptable("text"), tmp_path).refused is None
    ((slug, key),) = Store(Folder(tmp_path)).keys()
    assert (slug, str(key)) == ("text", "text::btext (text)")


@pytest.mark.parametrize("of", ["file", "test", "name", "slug", "step", "device"])
def test_a_hostile_name_leads_nowhere_outside_of_the_store(tmp_path, of):
    (tmp_path / "there").write_text("it stays")
    for number, name in enumerate(NAMES):
        store = tmp_path / "a" / "b" / f"store{number}"
        plain = acceptable("text")
        test = plain["results"][0]["verdict"]
        measurement = test["verdicts"][0]["measurement"]
        where = {"file": test, "test": test, "name": measurement, "step": measurement["workload"]}
        where.get(of, measurement["environment"])[of] = name
        with contextlib.suppress(BackendError):
            write(plain, store)
        assert outside(tmp_path, store.parent) == {tmp_path / "there"}
        Store(Folder(store)).check()


def outside(folder, store):
    """The files below a folder that are not in the store."""
    return {path for path in folder.rglob("*") if path.is_file() and store not in path.parents}


PLAIN = acceptable("text")
PATHS = [path for path in places(PLAIN) if path[0] == "results"]


@given(
    path=st.sampled_from(PATHS),
    value=st.sampled_from([*WRONG, *TEXTS.values(), *NAMES, 2**62, 1e300, "NaN", "Infinity"]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_a_report_says_the_store_can_be_read_afterwards(path, value):
    changed = copy.deepcopy(PLAIN)
    holder(changed, path)[path[-1]] = value
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "a" / "store"
        with contextlib.suppress(ReportError, BackendError):
            write(changed, store)
        Store(Folder(store)).check()
        assert outside(Path(folder), store) == set()


def test_an_entry_cannot_take_the_place_of_the_part_of_another_one(tmp_path):
    plain = acceptable("text")
    (verdict,) = plain["results"][0]["verdict"]["verdicts"]
    other = copy.deepcopy(verdict)
    other["measurement"] |= {"name": "text on cuda:1", "by_device": {}}
    plain["results"][0]["verdict"]["verdicts"].append(other)
    assert "the same name as a part of another entry" in write(plain, tmp_path).refused.why


# The report


def test_what_is_kept_to_be_accepted_leaves_a_report_below_twice_its_size(project, monkeypatch):
    few = ("-k", "train or call")
    project.write(BEFORE)
    project.run("--gpumem-update=new", *few)
    project.write(AFTER)
    gated(project, *few, report="now.json")
    never = "pytest_gpumem.plugin.config.settings.Settings.may_be_accepted_later"
    monkeypatch.setattr(never, property(lambda settings: False))
    gated(project, *few, report="then.json")
    then, now = ((project.path / name).stat().st_size for name in ("then.json", "now.json"))
    assert then < now < 2 * then
    # What grew is shown over time, as ever, and nothing else.
    assert shown_over_time(project.path / "now.json") == shown_over_time(project.path / "then.json")


def shown_over_time(file):
    report = from_json(file.read_text(), file.name)
    steps = [one for result in report.results for one in result.verdict.verdicts]
    explained = [one.measurement for one in steps if one.measurement.explanation is not None]
    return {one.name for one in explained if one.explanation.over_time is not None}
