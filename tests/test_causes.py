"""One change told once: a session in which one line makes several tests fail, in every output, with and without workers."""

from __future__ import annotations

import json
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from pytest_gpumem.plugin.session import pytest_failures
from pytest_gpumem.reporting.reports.json_report import from_json
from pytest_gpumem.reporting.reports.markdown import markdown
from pytest_gpumem.tools.main import main

MODEL = """\
class Attention(torch.nn.Module):
    def forward(self, x):
        y = x @ x.mT
        PLANT
        return y @ x


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        x = x + self.attention(x)
        OTHER
        return x


class Model(torch.nn.Sequential):
    def __init__(self, depth=2):
        super().__init__(*(Block() for _ in range(depth)))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x * self.scale)
"""
TESTS = """\
from model import Model


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth(gpumem, depth):
    gpumem.train_step(lambda: Model(depth), torch.ones(4, 128, 32), loss=lambda out, _: out.sum())


def test_infer(gpumem):
    gpumem.infer_step(lambda: Model(2).eval(), torch.ones(4, 128, 32))


def test_other(gpumem):
    gpumem.measure(lambda: torch.ones(1000).exp())
"""
SCORES = "y = y.exp().log().softmax(-1)"
KEPT = "self.seen = [*getattr(self, 'seen', []), x.detach()]"


class Planted:
    """A project whose model can be changed at two lines, with the report of its recording."""

    def __init__(self, project, kept):
        self.project = project
        self.path = project.path
        if begun(kept / "recorded", self.path):
            self.plant()
            project.write(TESTS)
            project.run("--gpumem-update=new", "--gpumem-report=old.json").assert_outcomes(passed=5)
            shutil.copytree(self.path, kept / "recorded")

    def plant(self, plant="pass", other="pass"):
        self.project.write(MODEL.replace("PLANT", plant).replace("OTHER", other), "model.py")

    def gate(self, *arguments):
        return self.project.run("--gpumem-baseline", *arguments)

    def causes(self, name="report.json"):
        return json.loads((self.path / name).read_text(encoding="utf-8"))["causes"]


def begun(kept, path):
    """Copy the project as an earlier test has left it. Return whether this is the first one."""
    if not kept.exists():
        return True
    # Compiled files name the folder that they are from.
    shutil.copytree(kept, path, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return False


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return a folder for the project as the first test has recorded and gated it, which others copy."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def planted(project, kept, monkeypatch):
    monkeypatch.chdir(project.path)
    return Planted(project, kept)


@pytest.fixture
def red(planted, kept, monkeypatch):
    """A project that one line has made red in four tests, gated by a job of GitHub's, and its output."""
    if begun(kept / "red", planted.path):
        planted.plant(SCORES)
        with monkeypatch.context() as job:
            job.setenv("GITHUB_ACTIONS", "true")
            result = planted.gate("--gpumem-report=report.json", "--junitxml=junit.xml")
        result.assert_outcomes(failed=4, passed=1)
        (planted.path / "output").write_text("\n".join(result.outlines), encoding="utf-8")
        shutil.copytree(planted.path, kept / "red")
    planted.outlines = (planted.path / "output").read_text(encoding="utf-8").splitlines()
    return planted


def failures(outlines):
    """The text of each failure in pytest's output, by test."""
    found, name = {}, None
    for line in outlines:
        if line.startswith("____") and line.endswith("____"):
            name = line.strip("_ ")
            found[name] = []
        elif line.startswith("===="):
            name = None
        elif name is not None:
            found[name].append(line)
    return {name: [line for line in lines if line.strip()] for name, lines in found.items()}


def test_one_line_in_four_tests_is_one_cause_that_is_told_once(red):
    (cause,) = red.causes()
    assert (cause["kind"], cause["lines"][0], cause["module"]) == ("line", "model.py:8", "Model.*.attention")
    assert cause["tests"] == [*(f"test_it.py::test_depth[{n}]" for n in (1, 2, 3)), "test_it.py::test_infer"]
    table = next(n for n, line in enumerate(red.outlines) if line.startswith("# cause "))
    assert red.outlines[table + 1].startswith("1 model.py:8  4 of 5")
    assert table < next(n for n, line in enumerate(red.outlines) if line.startswith("test  "))
    assert len(told_in_one(red.outlines)) == 4
    in_full = [one for one in ElementTree.parse("junit.xml").iter("failure") if "what grew" in (one.text or "")]
    assert len(in_full) == 4
    summary = [line for line in red.outlines if line.startswith("FAILED ")]
    assert len(summary) == 4
    assert all("emory regressed: peak" in line for line in summary)


def told_in_one(outlines):
    """Assert that one failure tells its cause and the others lead to it, and return the tests that failed."""
    texts = failures(outlines)
    (whole,) = (name for name, lines in texts.items() if any("what grew" in line for line in lines))
    for name in texts.keys() - {whole}:
        # Where it ran stands before it, in a run with workers.
        lines = [line for line in texts[name] if not line.startswith("[gw")]
        assert len(lines) <= 6
        assert any(
            line.startswith("  cause:    model.py:8: +") and line.endswith(f"as in test_it.py::{whole}")
            for line in lines
        )
        assert any(line.startswith("  accept:   pytest ") for line in lines)
    return texts.keys()


@pytest.mark.thorough
def test_workers_and_shards_in_any_order_give_the_same_cause(red):
    expected = red.causes()
    result = red.gate("--gpumem-report=1.json", "-n1", "-k", "infer or 2")
    assert told_in_one(result.outlines) == {"test_infer", "test_depth[2]"}
    red.gate("--gpumem-report=2.json", "-k", "1 or 3 or other", "-p", "randomly", "--randomly-seed=3")
    result = CliRunner().invoke(main, ["merge", "1.json", "2.json", "--report", "merged.json"])
    assert result.exit_code == 1, result.output
    assert red.causes("merged.json") == expected


def test_all_is_told_where_that_is_asked_for(red):
    texts = failures(red.gate("-vv", "-k", "infer or 1").outlines)
    assert [any("what grew" in line for line in lines) for lines in texts.values()] == [True] * 2


def test_two_changes_are_two_causes_and_a_test_of_both_is_accepted_with_both_only(planted):
    planted.plant(SCORES, KEPT)
    planted.gate("--gpumem-report=report.json")
    kept, scores = planted.causes()
    assert (kept["kind"], kept["kept_in"], kept["lines"]) == ("holder", "Block.seen[...]", ["model.py:18"])
    assert (scores["lines"][0], scores["module"]) == ("model.py:8", "Model.*.attention")
    assert "test_it.py::test_other" not in (*kept["tests"], *scores["tests"])
    assert set(kept["tests"]) >= {f"test_it.py::test_depth[{n}]" for n in (1, 2, 3)}
    before = planted.project.stored()
    told = accept("--cause", "1", code=1)
    assert "not accepted: test_it.py::test_infer: the test also grew because of cause 2 (model.py:8)" in told
    assert "4 refused (other causes)" in told
    assert planted.project.stored() == before
    assert "gpumem accept: 4 accepted" in accept("--cause", "1", "--cause", "2")


def test_a_test_that_grew_alone_says_so_itself_and_there_is_no_table(planted):
    planted.plant(SCORES)
    result = planted.gate("-k", "infer", "--gpumem-report=report.json")
    assert not any(line.startswith("# cause ") for line in result.outlines)
    assert len(planted.causes()) == 1
    assert any("what grew" in line for line in result.outlines)


def test_markdown_and_annotations_have_a_cause_at_its_line(red):
    (error,) = [line for line in red.outlines if line.startswith("::error ")]
    assert error.startswith("::error file=model.py,line=8,title=gpumem%3A model.py%3A8%3A +")
    assert "test_it.py::test_depth[1]%0Atest_it.py::test_depth[2]" in error
    report = from_json((red.path / "report.json").read_text(encoding="utf-8"), "report.json")
    text = markdown(report)
    assert text.index("#### Causes") < text.index("❌ `test_it.py::test_depth[1]`")
    assert "| 1 | `model.py:8` | 4 of 5 |" in text


def test_two_reports_compared_have_the_causes_before_tests(red):
    done = CliRunner().invoke(main, ["compare", "old.json", "report.json", "--format=markdown"])
    assert done.exit_code == 1, done.output
    assert done.stdout.index("| 1 | `model.py:8` | 4 of 5 |") < done.stdout.index("| `test_it.py::test_depth[1]` |")
    done = CliRunner().invoke(main, ["compare", "old.json", "report.json"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    table = next(n for n, line in enumerate(lines) if line.startswith("# cause "))
    assert lines[table + 1].startswith("1 model.py:8  4 of 5")
    assert table < next(n for n, line in enumerate(lines) if line.startswith("test  "))
    assert sum("what grew" in line for line in lines[table:]) == 1
    assert sum("as in test_it.py::test_depth[1]" in line for line in lines[table:]) == 3


def test_reports_of_sessions_that_recorded_nothing_are_compared_by_what_they_counted(planted):
    planted.gate("--gpumem-report=old.json")
    planted.plant(SCORES)
    planted.project.run("--gpumem-report=new.json").assert_outcomes(passed=5)
    lines = CliRunner().invoke(main, ["compare", "old.json", "new.json"]).stdout.splitlines()
    table = next(n for n, line in enumerate(lines) if line.startswith("# cause "))
    assert lines[table + 1].split()[:7] == ["1", "_softmax", "4", "of", "5", "+8", "+3"]
    note = "not explained: peak allocated +2.77 MB in 4 tests: test_it.py::test_depth[1] and 3 others"
    assert note in lines[: next(n for n, line in enumerate(lines) if line.startswith("test  "))]


@pytest.mark.thorough
def test_two_revisions_compared_have_the_causes_before_tests(planted):
    def git(*arguments):
        identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=planted.path, check=True, capture_output=True)

    git("init", "--quiet")
    for plant in ("pass", SCORES):
        planted.plant(plant)
        git("add", "model.py", "test_it.py")
        git("commit", "--quiet", "--message", plant)
    few = ["-k", "infer or 1", "-pno:randomly", "--gpumem-device=cpu", "--no-gpumem-time"]
    done = planted.project.gpumem("ab", "HEAD~1", "HEAD", "--report=ab.md", "--", *few)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 model.py:8  2 of 2" in done.stdout
    text = (planted.path / "ab.md").read_text(encoding="utf-8")
    assert text.index("| 1 | `model.py:8` | 2 of 2 |") < text.index("| `test_it.py::test_depth[1]` |")


ALONE = """\
def test_alone(gpumem):
    gpumem.infer_step(lambda: Attention().eval(), torch.ones(4, 128, 32))
"""


def test_a_module_that_is_also_measured_alone_is_the_same_cause(planted):
    planted.project.write(TESTS.replace("import Model", "import Attention, Model") + f"\n\n{ALONE}")
    planted.project.run("--gpumem-update=new", "-k", "alone").assert_outcomes(passed=1)
    planted.plant(SCORES)
    planted.gate("--gpumem-report=report.json", "-k", "alone or infer")
    (cause,) = planted.causes()
    assert (cause["lines"][0], cause["module"], len(cause["tests"])) == (
        "model.py:8",
        "Attention, Model.*.attention",
        2,
    )
    assert "gpumem accept: 2 accepted" in accept("--cause", "1")


def accept(*arguments, code=0, keys=None):
    done = CliRunner().invoke(main, ["accept", "report.json", *arguments], input=keys)
    assert done.exit_code == code, done.output
    return done.output


def test_a_cause_is_accepted_with_its_tests(red):
    told = accept("--cause", "1", "--reason", "until #12")
    assert told.splitlines()[-1] == "gpumem accept: 4 accepted"
    assert "".join(red.project.stored().values()).count('reason = "until #12"') == 4
    red.gate().assert_outcomes(passed=5)


@pytest.mark.usefixtures("red")
def test_a_cause_that_there_is_not_is_told_with_those_that_there_are():
    assert "the report has no cause 2: 1 is model.py:8, in 4 tests" in accept("--cause", "2", code=2)
    assert "no cause 0" in accept("--cause", "0", code=2)
    assert "not both" in accept("test_infer", "--cause", "1", code=2)


@pytest.mark.parametrize(
    ("keys", "told"),
    [("a\n", "4 accepted, 1 unchanged"), ("s\n", "0 accepted, 4 skipped, 1 unchanged")],
    ids=["accept", "skip"],
)
@pytest.mark.usefixtures("red")
def test_on_a_terminal_a_cause_is_one_question(monkeypatch, keys, told):
    monkeypatch.setattr("pytest_gpumem.tools.accept.command._is_terminal", lambda: True)
    output = accept(keys=keys)
    assert output.count("accept (a), skip (s) or quit (q)") == 1
    assert output.startswith("cause 1: model.py:8: peak allocated +2.77 MB in 4 of 5 tests\n  Model.*.attention exp ")
    assert output.splitlines()[-1] == f"gpumem accept: {told}"


FIXTURE = """\
@pytest.fixture
def batch():
    return torch.ones(4, SIZE, 32)
"""
WITH_FIXTURE = """\
@pytest.mark.parametrize("n", [1, 2])
def test_mean(gpumem, batch, n):
    gpumem.measure(lambda: batch.mean())
    gpumem.train_step(lambda: torch.nn.Linear(32, n), batch, loss=lambda out, _: out.sum())
"""


def test_a_fixture_that_grew_in_two_tests_is_one_cause(project):
    project.write(FIXTURE.replace("SIZE", "1024"), "conftest.py")
    project.write(WITH_FIXTURE)
    project.run("--gpumem-update=new").assert_outcomes(passed=2)
    project.write(FIXTURE.replace("SIZE", "8192"), "conftest.py")
    project.run("--gpumem-baseline", "--gpumem-report=report.json").assert_outcomes(failed=2)
    (cause,) = json.loads((project.path / "report.json").read_text(encoding="utf-8"))["causes"]
    assert (cause["lines"], cause["category"], len(cause["tests"])) == ([], "input", 2)
    assert (cause["tensors"], cause["reason"]) == (
        "1 x float32[4, 8192, 32]",
        "was float32[4, 1024, 32], now float32[4, 8192, 32]",
    )


SUBTESTS = """\
def test_parts(gpumem, subtests):
    with subtests.test("own"):
        raise ValueError("a fault of its own")
    gpumem.infer_step(lambda: Model(2).eval(), torch.ones(4, 128, 32))
"""


def test_a_failure_of_its_own_is_never_shortened(planted):
    planted.plant(SCORES)
    planted.project.write(
        TESTS.replace(
            "def test_other", f"def test_kept(gpumem):\n    assert 0, 'broken'\n\n\n{SUBTESTS}\n\ndef test_other"
        )
    )
    output = "\n".join(planted.gate("-k", "infer or kept or parts").outlines)
    assert "ValueError: a fault of its own" in output
    assert "AssertionError: broken" in output


MANY = """\
from model import Model


@pytest.mark.gpumem
@pytest.mark.parametrize("n", range(4))
def test_it(n):
    Model(1)(torch.ones(4, 128, 32)).sum().backward()


def test_that_fails_by_itself():
    assert not "its own reason"
"""
COUNTING = """\
def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{len(terminalreporter.stats['failed'])} reports of failures")
"""


def test_of_more_tests_than_can_be_read_the_first_is_told_and_the_others_are_counted(project, monkeypatch):
    monkeypatch.setattr(pytest_failures, "MOST_SHORT", 2)

    def gate(*arguments):
        result = project.run("--gpumem-baseline", *arguments)
        result.assert_outcomes(failed=5)
        assert "5 reports of failures" in result.outlines
        return (
            failures(result.outlines),
            [line for line in result.outlines if line.startswith("FAILED ")],
            result.outlines,
        )

    project.write(MODEL.replace("PLANT", "pass").replace("OTHER", "pass"), "model.py")
    project.write(MANY)
    project.write(COUNTING, "conftest.py")
    project.run("--gpumem-update=new").assert_outcomes(passed=4, failed=1)
    project.write(MODEL.replace("PLANT", SCORES).replace("OTHER", "pass"), "model.py")
    more = "... and 3 more failures that the causes in the table explain (-v shows all)"

    texts, summary, lines = gate()
    assert [*texts] == ["test_it[0]", "test_that_fails_by_itself"]
    assert [line.split(" - ")[0] for line in summary] == [f"FAILED test_it.py::{name}" for name in texts]
    assert lines.count(more) == 2
    texts, summary, lines = gate("--tb=no", "-rN")
    assert (texts, summary, lines.count(more)) == ({}, [], 0)
    texts, summary, lines = gate("-v")
    assert (len(texts), len(summary), lines.count(more)) == (5, 5, 0)
