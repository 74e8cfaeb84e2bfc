"""Reports of whole sessions: every format of tests with hostile ids, what GitHub is told, and files that cannot be written."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.json_report import from_json
from pytest_gpumem.reporting.reports.layout import Screen, text_of
from pytest_gpumem.reporting.reports.terminal import failure_lines
from tests.hostile import TEXTS
from tests.reports.rendered import read
from tests.reports.test_github import command

if TYPE_CHECKING:
    from tests.conftest import Project

# What pytest itself can run: it keeps the running test's id in the environment, and has no other way to name it.
IDS = {
    name: text
    for name, text in TEXTS.items()
    if name in ("quotes", "newlines", "colons", "command", "tags", "cdata", "pipes", "bidi", "controls")
} | {"file name": "a\udcffb"}
HOSTILE = """
import json
from pathlib import Path

IDS = json.loads((Path(__file__).parent / "ids.json").read_text(encoding="ascii"))


# What exceeds one budget alike is told once.
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=pytest.mark.gpumem(max_gb=0.001 + n / 10**8)) for n, text in enumerate(IDS)],
    ids=IDS,
)
def test_a(text):
    torch.ones(10 ** 6)


def test_named(gpumem):
    gpumem.measure(lambda: torch.ones(10), name=IDS[-2])
"""


@pytest.fixture
def github(monkeypatch: pytest.MonkeyPatch, project: Project) -> Project:
    """A project in a job of GitHub Actions."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path.parent))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    return project


def test_no_id_breaks_out_of_any_report_and_none_is_lost(github):
    (github.path / "ids.json").write_text(json.dumps(list(IDS.values())), encoding="ascii")
    (github.path / "pytest.ini").write_text(
        "[pytest]\ndisable_test_id_escaping_and_forfeit_all_rights_to_community_support = true\n", encoding="utf-8"
    )
    github.write(HOSTILE)
    ran = github.run("-q", "--gpumem-report=r.json", "--gpumem-report=out/r.md", "--junitxml=r.xml")
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    tests = {"test_named", *(f"test_a[{text}]" for text in IDS.values())}

    report = from_json((github.path / "r.json").read_text(encoding="utf-8"), "r.json")
    assert {result.verdict.test for result in report.results} == tests
    assert [result.verdict.outcome for result in report.results].count(Outcome.OVER_BUDGET) == len(IDS)

    page = read((github.path / "out/r.md").read_text(encoding="utf-8"))
    assert all(f"test_it.py::{visible(test)}" in page.text for test in tests)
    assert set(page.tags) <= {
        *("h3", "h4", "p", "br", "ul", "li", "strong", "em", "code", "details", "summary"),
        *("table", "thead", "tbody", "tr", "th", "td"),
    }
    assert read((github.path / "summary.md").read_text(encoding="utf-8")) == page

    told = [json.loads(value) for name, value in properties(github.path / "r.xml") if name == "gpumem"]
    assert {verdict["test"] for verdict in told} == tests
    named = [name for name, _ in properties(github.path / "r.xml") if name.endswith(".peak_allocated")]
    assert f"gpumem.{visible(IDS['controls'])}.peak_allocated" in named

    # pytest's own headlines have the ids as they are, where it is told not to escape them.
    last = next(number for number, line in enumerate(ran.outlines) if line.startswith("gpumem: "))
    commands = [command(line) for line in ran.outlines[last + 1 : last + 1 + len(IDS)]]
    assert {(kind, given["file"], given["line"]) for kind, given, _ in commands} == {
        ("error", f"{github.path.name}/test_it.py", "13")
    }
    assert {given["title"] for _, given, _ in commands} == {
        f"gpumem: {visible(test)}" for test in tests - {"test_named"}
    }
    assert all(data.startswith("Memory over budget: peak 4.00 MB, budget 1.00 MB") for _, _, data in commands)


def properties(file) -> list[tuple[str, str]]:
    return [(str(entry.get("name")), str(entry.get("value"))) for entry in ElementTree.parse(file).iter("property")]


MARKED = """
@pytest.mark.gpumem
def test_a():
    torch.ones(10)
"""


def test_outside_of_github_nothing_is_annotated_and_no_summary_is_written(project, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    project.write(MARKED)
    ran = project.run("--gpumem-baseline")
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    ran.stdout.no_fnmatch_line("::*")
    assert not (project.path / "summary.md").exists()


def test_that_nothing_was_gated_is_annotated(github):
    github.write(MARKED)
    ran = github.run("-q", "--gpumem-baseline")
    assert [line for line in ran.outlines if line.startswith("::")] == [
        (
            "::error title=gpumem::nothing was gated: 1 test new, there is no baseline for CPU (x86_64) yet "
            "(record one with --gpumem-update=new)"
        )
    ]


PLAIN = (
    "\n\ndef test_plain(request):\n    assert False\n\n\n@pytest.fixture\ndef broken():\n    yield\n    raise OSError\n"
)
PLAIN += "\n\ndef test_torn(broken): ...\n\n\n@pytest.mark.xfail\ndef test_expected():\n    assert False\n"
PLAIN += "\n\n@pytest.mark.flaky(reruns=1)\ndef test_flaky(tries=[]):\n    tries.append(1)\n    assert len(tries) > 1\n"


@pytest.mark.parametrize(
    "workers", [pytest.param([], id="alone"), pytest.param(["-n1"], id="workers", marks=pytest.mark.thorough)]
)
def test_tests_that_are_not_measured_and_failed_make_the_report_red(project, workers):
    project.plugins.append("pytest_rerunfailures")
    project.write(MARKED + PLAIN)
    ran = project.run("--gpumem-report=r.json", *workers, separate=bool(workers))
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    ran.stdout.no_fnmatch_line("*not measured failed*")
    report = from_json((project.path / "r.json").read_text(encoding="utf-8"), "r.json")
    assert report.unmeasured_failures == 2
    assert report.problems == ("2 tests that are not measured failed",)
    assert not report.passed


def test_a_report_is_never_greener_than_pytest(project):
    project.write(MARKED)
    project.write(
        "@pytest.hookimpl(wrapper=True)\ndef pytest_runtestloop(session):\n    yield\n"
        "    session.testsfailed = 1\n    return True\n",
        "conftest.py",
    )
    assert project.run("--gpumem-report=r.json").ret == pytest.ExitCode.TESTS_FAILED
    report = from_json((project.path / "r.json").read_text(encoding="utf-8"), "r.json")
    assert report.problems == ("another plugin made the session red, although no test failed",)


@pytest.mark.parametrize(
    ("source", "arguments", "status", "why"),
    [
        ("", ["no-such-file.py"], 4, "pytest ended with exit status 4 before any test ran"),
        (
            "def pytest_collection_finish():\n    raise OSError\n",
            [],
            3,
            "pytest ended with exit status 3 before any test ran",
        ),
        ("def pytest_runtest_protocol():\n    raise OSError('full')\n", [], 3, "full"),
    ],
    ids=["usage", "internal", "internal, later"],
)
def test_a_session_that_pytest_ended_early_does_not_leave_an_earlier_report_in_place(
    project, source, arguments, status, why
):
    project.write(MARKED)
    project.run("--gpumem-report=r.json")
    (project.path / "conftest.py").write_text(source, encoding="utf-8")
    assert project.run("--gpumem-report=r.json", *arguments).ret == status
    report = from_json((project.path / "r.json").read_text(encoding="utf-8"), "r.json")
    assert report.problems == (f"the session ended early: {why}",)


def test_a_report_that_cannot_be_written_makes_the_session_red_and_the_others_say_so(project):
    (project.path / "folder.json").mkdir()
    project.write(MARKED)
    ran = project.run("--gpumem-report=folder.json", "--gpumem-report=r.json", "--gpumem-report=new/r.md")
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    ran.stdout.fnmatch_lines(["gpumem: *folder.json: the report cannot be written: *directory*"])
    report = from_json((project.path / "r.json").read_text(encoding="utf-8"), "r.json")
    assert not report.passed
    assert "folder.json: the report cannot be written" in report.errors[0]
    assert (project.path / "new/r.md").read_text(encoding="utf-8").startswith("### ❌ gpumem failed")


MEASURED = "@pytest.mark.gpumem\ndef test_a():\n    torch.ones(10)\n"


def test_a_session_that_is_killed_leaves_no_report_of_an_earlier_one(project):
    project.write(MEASURED)
    project.run("--gpumem-report=r.json")
    assert from_json((project.path / "r.json").read_text(encoding="utf-8"), "r.json").results
    project.write(f"{MEASURED}\n\ndef test_b():\n    import os\n    os._exit(0)\n")
    project.run("--gpumem-report=r.json", separate=True)
    assert not (project.path / "r.json").exists()


@pytest.mark.parametrize(("source", "kept"), [("def test_c():\n    pass\n", True), (MEASURED, False)])
def test_a_report_of_the_settings_is_left_alone_by_sessions_that_measure_nothing(project, source, kept):
    project.settings("[tool.gpumem]\nreport = ['r.json']\n")
    (project.path / "r.json").write_text("an earlier one", encoding="utf-8")
    project.write(source)
    project.run()
    assert ((project.path / "r.json").read_text(encoding="utf-8") == "an earlier one") is kept


FAILING = """
@pytest.fixture
def broken():
    raise RuntimeError("no data")


@pytest.fixture
def torn():
    yield
    raise RuntimeError("a file is left")


@pytest.mark.gpumem(max_gb=0.01)
class TestFailing:
    def test_set_up(self, broken):
        pass

    def test_itself(self):
        assert torch.ones(10).sum() == 9

    def test_subtest(self, subtests):
        torch.ones(10)
        with subtests.test(msg="one of them"):
            raise ValueError("wrong")

    def test_tear_down(self, torn):
        torch.ones(10)

    def test_budget(self):
        torch.ones(10 ** 7)

    def test_after_a_subtest(self, subtests):
        with subtests.test():
            raise ValueError("wrong")
        assert torch.ones(10).sum() == 9
"""
WHY = {
    "test_set_up": "Its set-up failed",
    "test_itself": "The test itself failed",
    "test_subtest": "A subtest failed",
    "test_tear_down": "Its tear-down failed",
    "test_budget": "Memory over budget: peak 40.00 MB, budget 10.00 MB: +30.00 MB (+300.0 %)",
    "test_after_a_subtest": "The test itself failed",
}


def test_why_a_test_failed_is_told_alike_wherever_it_is_told(github):
    github.write(FAILING)
    ran = github.run("--gpumem-report=r.json", "--gpumem-report=r.html", "--gpumem-report=r.md")
    found = [command(line) for line in ran.outlines if line.startswith("::error") and "Failing" in line]
    annotated = {one["title"].rpartition("::")[2]: data.split("\n")[0] for _, one, data in found}
    assert annotated == WHY
    report = from_json((github.path / "r.json").read_text(encoding="utf-8"), "r.json")
    told = [text_of(line) for line in failure_lines(report, Screen())]
    assert sorted(told) == sorted(f"FAILED test_it.py::TestFailing::{test} - {why}" for test, why in WHY.items())
    markdown = (github.path / "r.md").read_text(encoding="utf-8").replace("\\", "")
    assert all(f"❌ `test_it.py::TestFailing::{test}`  \n{why}" in markdown for test, why in WHY.items())
    assert markdown in (github.path / "summary.md").read_text(encoding="utf-8").replace("\\", "")
    html = (github.path / "r.html").read_text(encoding="utf-8")
    headlines = re.findall(
        r'<h2 class="alone">test_it.py::TestFailing::(\w+)</h2>.*?<h3 class="why">(.*?)</h3>', html, re.DOTALL
    )
    assert dict(headlines) == WHY


REFUSED = """
def test_tf32(gpumem):
    model = torch.nn.Linear(8, 8)
    gpumem.train_step(model, torch.rand(4, 8), config="tf32")
"""


def test_what_the_gate_does_not_let_pass_unmeasured_did_not_fail_by_itself(github):
    github.write(REFUSED)
    ran = github.run("--gpumem-strict")
    why = "Not measured (required by --gpumem-strict): TF32 is a format of NVIDIA GPUs, and this is a CPU"
    assert [command(line)[2] for line in ran.outlines if "test_tf32" in line and line.startswith("::error")] == [why]
    ran.stdout.fnmatch_lines(["gpumem: 0 gated, 1 unmeasured (TF32 is a format of NVIDIA GPUs, and this is a CPU)"])
