"""``gpumem ab`` from end to end: small repositories, real worktrees and processes of pytest.

Measured are tests that say themselves what they took (`TELLING`), so that a planted slowdown is exact and no process has to
load torch; one test is measured indeed. Where only the comparison is shown, runs are forks.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.errors import RunFailed
from pytest_gpumem.base.processes import Stop
from pytest_gpumem.tools.ab.runs import Runner, RunRecord
from pytest_gpumem.tools.ab.variants import ProvisionedVariant, Variant
from pytest_gpumem.tools.checkout import Checkout
from pytest_gpumem.tools.main import main
from tests import preloaded
from tests.ab.values import measured, measurement, run, unmeasured
from tests.support.processes import fork_runs, wait_until_ended

TELLING = """
import json

import pytest
from shipped import PEAK, SECONDS

from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.facts.values.times import Round, Sample, Times


@pytest.fixture(autouse=True)
def told(request):
    rounds = tuple(Round(SECONDS * factor) for factor in (1.0, 1.001, 0.999, 1.002, 0.998, 1.0))
    figures = {"peak_allocated": PEAK, "step_time": SECONDS}
    measurement = Measurement("call", Workload("call"), Environment("toy", "Toy"), figures, times=Times((Sample(rounds),)))
    file, _, test = request.node.nodeid.partition("::")
    verdict = TestVerdict(file, test, (Verdict(measurement, ()),))
    request.node.user_properties.append(("gpumem", json.dumps(to_plain(verdict))))
"""
TESTS = "def test_a(): ...\n\n\ndef test_b(): ...\n"


class Repository:
    """A repository whose tests tell what ``shipped.py`` says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.write("tests/conftest.py", TELLING)
        self.write("tests/test_it.py", TESTS)
        self.write("pytest.ini", "[pytest]\n")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=self.path, check=True, capture_output=True, text=True
        ).stdout

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def commit(self, tag: str, *, seconds: float = 0.1, peak: int = 10_000_000) -> None:
        self.write("src/shipped.py", f"SECONDS = {seconds}\nPEAK = {peak}\n")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", tag)
        self.git("tag", tag)

    def is_untouched(self) -> bool:
        """Whether nothing of a comparison is left: one checkout, no change, and its branch."""
        (checkout,) = self.git("worktree", "list").splitlines()
        return self.git("status", "--porcelain") == "" and "[main]" in checkout


@pytest.fixture(autouse=True)
def temporary_files(tmp_path_factory, monkeypatch):
    """Where the command keeps its worktrees; empty again at the end of each test."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert not list(folder.glob("gpumem-ab-*"))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path / "a project")
    monkeypatch.chdir(made.path)
    # Runs of this suite's own settings do not concern the repository's.
    for name in ("PYTEST_ADDOPTS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def forks(monkeypatch):
    """Runs that are forks."""
    fork_runs(monkeypatch)


PLAIN = [
    f"-pno:{plugin}" for plugin in ("randomly", "hypothesispytest", "cacheprovider", "benchmark", "memray", "anyio")
]


def ab(*arguments):
    return CliRunner().invoke(main, ["ab", *arguments])


def test_a_planted_slowdown_is_found_and_what_changed_otherwise_is_told(repository, forks, monkeypatch, tmp_path):
    repository.commit("before")
    repository.write("tests/test_it.py", TESTS.replace("test_b", "test_c"))
    repository.commit("after", seconds=0.105, peak=12_000_000)
    # From a sub-folder, with changes that are not committed.
    repository.write("tests/test_it.py", "raise RuntimeError('not committed')\n")
    repository.write("new.py", "")
    monkeypatch.chdir(repository.path / "tests")
    result = ab("before", "--report", str(tmp_path / "ab.json"), "--report", str(tmp_path / "ab.md"), "--", *PLAIN)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith(
        "2 files have uncommitted changes, which are left out: only commits are compared\n1/16 base "
    )
    assert len(result.stderr.splitlines()) == 11
    lines = result.stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["slower", "regressed"]
    assert "+5.0 %" in lines[1]
    assert "not compared: tests/test_it.py::test_b: it ran in base only" in lines
    assert "not compared: tests/test_it.py::test_c: it ran in head only" in lines
    assert lines[-1].startswith("gpumem ab: 1 compared, 1 regressed, 2 not compared; step times: 1 slower; 5 pairs of")
    written = json.loads((tmp_path / "ab.json").read_text())
    assert (written["exit_status"], written["tests"][0]["metrics"][0]["outcome"]) == (1, "regressed")
    assert "| `tests/test_it.py::test_a` | step time |" in (tmp_path / "ab.md").read_text()
    assert (repository.path / "tests" / "test_it.py").read_text().startswith("raise")
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_code_that_is_imported_from_the_checkout_ends_it(repository, monkeypatch):
    # Importing code leaves its bytecode beside it.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    repository.commit("before")
    # What an editable install does, by other means.
    trap = f"import sys\nsys.path.insert(0, {str(repository.path / 'src')!r})\n"
    repository.write("tests/conftest.py", trap + TELLING)
    repository.commit("after", seconds=0.2)
    result = ab("before", "after", "--", *PLAIN)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"head after ({repository.git('rev-parse', 'after')[:7]}): the tests did not run this revision's code" in (
        result.stderr
    )
    assert f"they imported shipped from {repository.path / 'src' / 'shipped.py'}." in result.stderr
    assert repository.is_untouched()


def test_code_that_workers_import_from_the_checkout_is_seen(repository):
    # The controller, which loads the conftest, too, imports the right code.
    worker = f"if 'PYTEST_XDIST_WORKER' in os.environ:\n    sys.path.insert(0, {str(repository.path / 'src')!r})\n"
    repository.write("tests/conftest.py", f"import os\nimport sys\n\n{worker}{TELLING}")
    repository.commit("before")
    result = ab("before", "--", *PLAIN, "-n1")
    assert result.exit_code == 2
    assert "they imported shipped from" in result.stderr


def test_where_nothing_is_measured_one_pair_shows_it(repository, forks):
    repository.write("tests/conftest.py", "")
    repository.commit("before")
    result = ab("before", "--", *PLAIN)
    assert result.exit_code == 2
    assert result.stdout.startswith("gpumem ab: 0 compared; 1 pair of runs, ")


def test_setup_runs_in_the_worktree_before_each_run_there(repository, forks):
    repository.write("src/shipped.py", "")
    repository.commit("before")
    # Without the sources in git, only what --setup makes can be imported.
    repository.git("rm", "--quiet", "--cached", "src/shipped.py")
    repository.write(".gitignore", "shipped.py\nlog\n")
    repository.git("add", ".gitignore")
    repository.git("commit", "--quiet", "--message", "not in git")
    count = repository.path / "log"
    make = f"mkdir -p src && echo 'SECONDS, PEAK = 0.1, 1' > src/shipped.py && pwd >> '{count}'"
    result = ab("HEAD", "--setup", make, "--rounds", "4", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    folders = [Path(line).name for line in count.read_text().splitlines()]
    assert folders == ["base", "head", "head", "base"] * 2
    assert "--setup ran in worktrees, which are removed now" in result.stderr


def test_a_setup_that_fails_ends_it_with_what_it_said(repository):
    repository.commit("before")
    result = ab("before", "--setup", "echo no compiler; exit 7", "--", *PLAIN)
    assert result.exit_code == 2
    assert "--setup ended with exit status 7\n  \n  no compiler\n" in result.stderr


def test_tests_that_cannot_be_collected_end_it_with_what_pytest_said(repository, forks):
    repository.commit("before")
    repository.write("tests/test_it.py", "import nothing_of_that_name\n")
    repository.commit("after")
    result = ab("before", "--", *PLAIN)
    assert result.exit_code == 2
    assert "head HEAD (" in result.stderr
    assert "pytest could not collect the tests" in result.stderr
    assert "No module named 'nothing_of_that_name'" in result.stderr


INTERRUPTED_WHILE = """
import time


def test_a():
    print("RUNNING", flush=True)
    with open({file!r}, "w") as file:
        file.write("running")
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of a terminal")
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_even_twice_it_leaves_no_worktree_and_no_process(repository, tmp_path, signum, status):
    started = tmp_path / "started"
    repository.write("tests/test_it.py", INTERRUPTED_WHILE.format(file=str(started)))
    repository.commit("before")
    process = preloaded.start("-m", "pytest_gpumem.tools.main", "ab", "before", "--", *PLAIN, cwd=repository.path)
    until = time.monotonic() + 60
    while not started.exists() and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signum)
    time.sleep(0.05)  # Python takes two signals that arrive together for one
    with suppress(ProcessLookupError):  # on a fast machine it has ended
        os.kill(process.pid, signum)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert said.endswith("interrupted\n")
    assert "Traceback" not in said
    assert repository.is_untouched()
    assert not [command for command in commands_that_run() if os.environ["TMPDIR"] in command]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_worktrees_of_a_killed_comparison_go_with_the_next_one_and_no_others(repository, forks, tmp_path):
    started = tmp_path / "started"
    waiting = "import os, time\n\n\ndef test_a():\n    with open({file!r}, 'a') as file:\n        print(os.getpid(), file=file, flush=True)\n    time.sleep(600)\n"
    repository.write("tests/test_it.py", waiting.format(file=str(started)))
    repository.commit("waiting")
    repository.write("tests/test_it.py", TESTS)
    # Without times a pair of runs is enough.
    repository.write("tests/conftest.py", TELLING.replace(', "step_time": SECONDS', ""))
    repository.commit("before")
    repository.commit("after")

    def begun(number):
        process = preloaded.start("-m", "pytest_gpumem.tools.main", "ab", "waiting", "--", *PLAIN, cwd=repository.path)
        until = time.monotonic() + 60
        while not (started.exists() and started.read_text().count("\n") == number):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        return process

    killed, running = begun(1), begun(2)
    try:
        killed.kill()
        killed.communicate(60)
        assert len(repository.git("worktree", "list").splitlines()) == 5
        result = ab("before", "after", "--", *PLAIN)
        assert result.exit_code == 0
        assert "removed 2 worktrees of a comparison that was killed" in result.stderr
        assert len(repository.git("worktree", "list").splitlines()) == 3
        assert running.poll() is None
    finally:
        os.kill(running.pid, signal.SIGTERM)
        running.communicate(60)
        orphan = int(started.read_text().split()[0])
        try:
            if sys.platform.startswith("linux"):
                # It is ended with the command that started it.
                wait_until_ended([orphan], seconds=20)
        finally:
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
    assert repository.is_untouched()


def commands_that_run() -> list[str]:
    """The command lines of all processes; none where there is no /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no revision 'nowhere' in "),
        (["before", "nowhere"], "there is no revision 'nowhere' in "),
        (["before", "--max-slowdown", "2"], "'2' is not a percentage; write it like '2 %'"),
        (["before", "--rounds", "3"], "3 is not in the range x>=4"),
        (["before", "--report", "no/such/ab.json"], "there is no folder no/such"),
        (
            ["before", "--", "--gpumem-update=all"],
            "leave out --gpumem-update: this command neither reads nor writes baselines",
        ),
        ([], "Missing argument 'BASE'"),
        (["--", "tests"], "Missing argument 'BASE'"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(repository, monkeypatch, arguments, said):
    repository.commit("before")
    monkeypatch.setattr(Runner, "take", None)
    result = ab(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_outside_of_a_repository_there_is_nothing_to_compare(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    result = ab("HEAD")
    assert result.exit_code == 2
    assert "not a git repository" in result.stderr


@pytest.fixture
def runs(repository, monkeypatch):
    """Makes the command take these runs, by side, instead of running pytest; an exception is raised."""
    repository.commit("before")

    def answer(base, head, ends=None):
        numbers = itertools.count(1)

        def take(self, provided, tick, *, explained=False):
            number = next(numbers)
            assert explained == (number <= 2)  # the first pair
            if number == (ends or (0, None))[0]:
                raise ends[1]
            side = "base" if provided.variant.revision.name == "before" else "head"
            return RunRecord((), 0), run(side, *(base if side == "base" else head), root=str(repository.path))

        monkeypatch.setattr(Runner, "take", take)

    return answer


def test_a_test_that_only_fails_in_head_ends_in_1(runs):
    works, fails = measured("test_a", measurement()), unmeasured("test_b", "it failed by itself", failed=True)
    runs([works, measured("test_b", measurement())], [works, fails])
    result = ab("before")
    assert result.exit_code == 1
    assert "broken: test_it.py::test_b: it failed by itself, in head\n" in result.stdout
    assert "1 compared, 1 broken; step times: " in result.stdout


def test_what_was_known_when_a_later_run_fails_is_told(runs, tmp_path):
    works = measured("test_a", measurement())
    runs([works], [works], ends=(4, RunFailed("pytest was ended by signal 9")))
    result = ab("before", "--report", str(tmp_path / "ab.md"))
    assert result.exit_code == 2
    assert "gpumem ab: 1 compared; step times: 1 not slower; 1 pair of runs" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("base before (")
    assert result.stderr.endswith("): pytest was ended by signal 9\n")
    assert "Not finished" in (tmp_path / "ab.md").read_text()


def test_an_error_of_our_own_leaves_no_worktree(runs, repository):
    runs([], [], ends=(1, ZeroDivisionError()))
    result = ab("before")
    assert isinstance(result.exception, ZeroDivisionError)
    assert repository.is_untouched()


def test_tolerance_and_units_are_those_of_the_project(runs, repository):
    repository.write(
        "pyproject.toml", '[tool.gpumem]\nunits = "iec"\n\n[tool.gpumem.tolerance]\npeak_allocated = "50 %"\n'
    )
    runs(
        [measured("test_a", measurement(seconds=None, peak=10 * 2**20))],
        [measured("test_a", measurement(seconds=None, peak=12 * 2**20))],
    )
    result = ab("before")
    assert result.exit_code == 0
    assert "10.00 MiB  12.00 MiB" in result.stdout
    assert "1 pair of runs" in result.stdout


MEASURED = """
import itertools

import pytest
import torch
from shipped import PEAK, SECONDS

from pytest_gpumem.measuring.devices.cpu import CpuDevice


class Clock(CpuDevice):
    name = "clock"
    wobble = itertools.cycle([1.0, 1.001, 0.999])

    def time(self, run):
        run()
        return SECONDS * next(self.wobble)

    def pace(self):
        return 1e9


def pytest_gpumem_devices(config):
    return {"clock": Clock}
"""


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_what_the_plugin_measures_is_what_a_run_gives_and_no_store_is_written(repository, monkeypatch, forked):
    if forked:
        fork_runs(monkeypatch)
    repository.write("tests/conftest.py", MEASURED)
    repository.write(
        "tests/test_it.py",
        "import torch\nfrom shipped import PEAK\n\n\n"
        "def test_a(gpumem):\n    gpumem.measure(lambda: torch.ones(PEAK // 4))\n",
    )
    (repository.path / "pytest.ini").unlink()
    repository.write(
        "pyproject.toml", '[tool.gpumem]\ndevice = "clock"\nbaseline = true\nupdate = "all"\nstrict = true\n'
    )
    repository.commit("before", seconds=0.25)
    folder = repository.path.parent / "runs"
    runner = Runner(Checkout.around(repository.path), PLAIN, None, folder, Stop(), ())
    _, taken = runner.take(ProvisionedVariant(Variant(), repository.path), explained=True)
    (verdict,) = taken.tests.values()
    (one,) = verdict.verdicts
    assert one.measurement.peak_allocated == 10_000_000
    assert one.measurement.explanation.peak.rows[0].site == "tests/test_it.py:6"
    assert one.measurement.times.median == pytest.approx(0.25, rel=0.001)
    # With the baseline and strictness that are switched off it would be missing one.
    assert "1 passed" in (folder / "run-1" / "log.txt").read_text()
    assert (taken.root, taken.measured) == (".", 1)
    stores = [repository.path / "gpumem-baselines", folder / "run-1" / "store"]
    assert not any(store.exists() for store in stores)


def test_a_changed_line_that_calls_what_allocates_is_named_before_it(repository, forks):
    repository.write("src/helper.py", "import torch\n\n\ndef copied(x, count):\n    return torch.cat([x] * count)\n")
    call = "from helper import copied\n\n\ndef step(x):\n    return copied(\n        x,\n        {},\n    )\n"
    repository.write("tests/conftest.py", "")
    repository.write(
        "tests/test_it.py",
        "import torch\nfrom model import step\n\n\n"
        "def test_a(gpumem):\n    gpumem.measure(lambda: step(torch.ones(65536)))\n",
    )
    for tag, count in (("before", 2), ("after", 4)):
        repository.write("src/model.py", call.format(count))
        repository.commit(tag)
    result = ab("before", "after", "--", *PLAIN, "--gpumem-device=cpu", "--no-gpumem-time")
    assert result.exit_code == 1, result.output
    (row,) = [line for line in result.stdout.splitlines() if " cat " in line]
    assert "src/model.py:5, which calls src/helper.py:5" in row
    assert "changed line" in row


def test_the_command_does_not_load_torch():
    code = "import sys, pytest_gpumem.tools.main, pytest_gpumem.tools.ab.compare_variants, pytest_gpumem.reporting.reports.comparison_formats; "
    loaded = subprocess.run(
        [sys.executable, "-c", f"{code}print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert loaded.stdout == "False\n"
