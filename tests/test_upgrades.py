"""``gpumem ab`` between sets of requirements and ``gpumem bisect`` of packages, with releases that are installed indeed.

The packages are wheels that pip or uv finds in a folder, and what the tests measure is what they tell (`TELLING`). Runs are forks
(`tests.forked_runs`), but for those of two tests. Tests that have `at_once` are of the search alone: pytest runs in none of its
steps. Searches of commits in which it does are in tests/test_bisect.py.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import uv
from click.testing import CliRunner

from pytest_gpumem.base.errors import RunFailed, StopSignal
from pytest_gpumem.base.requirements import installers
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.tools.ab.runs import Runner, RunRecord, run_of
from pytest_gpumem.tools.bisect.driver import Search
from pytest_gpumem.tools.main import main
from tests.ab.values import measured, measurement
from tests.packages_here import make_wheel, only_from
from tests.support.processes import fork_runs
from tests.test_ab import PLAIN

if TYPE_CHECKING:
    from pathlib import Path

TELLING = """
import json

import pytest
import tinymodels

from pytest_gpumem.judging.gate.verdict import TestVerdict, Verdict
from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.plain import to_plain


@pytest.fixture(autouse=True)
def told(request):
    measurement = Measurement("call", Workload("call"), Environment("toy", "Toy"), {"peak_allocated": tinymodels.PEAK})
    file, _, test = request.node.nodeid.partition("::")
    verdict = TestVerdict(file, test, (Verdict(measurement, ()),))
    request.node.user_properties.append(("gpumem", json.dumps(to_plain(verdict))))
"""
MB = 10**6


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels in which pip and uv look, and nowhere else. What lies in the caches is this test's."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {**only_from(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    for name in ("PYTEST_ADDOPTS", "PYTHONPATH", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(installers, "find_uv", lambda: None)
    return folder


@pytest.fixture
def forks(monkeypatch):
    """Runs that are forks."""
    fork_runs(monkeypatch)


@pytest.fixture
def by_uv(monkeypatch):
    """Releases that uv installs, which takes a tenth of pip's time."""
    monkeypatch.setattr(installers, "find_uv", uv.find_uv_bin)


@pytest.fixture(scope="module")
def kept_for_others(tmp_path_factory):
    """A folder of environments that `releases` adds to, for the next test that has it."""
    return tmp_path_factory.mktemp("environments")


@pytest.fixture
def releases(index, forks, by_uv, kept_for_others, tmp_path):
    """Releases 1.0 to 1.2 of two packages, of which tinymodels needs more from 1.1 on.

    They are the same in each test that has them, so that environments that another test has made are used again.
    """
    for minor in range(3):
        release(index, f"1.{minor}", (12 if minor else 10) * MB)
        release(index, f"1.{minor}", 0, "another")
    (tmp_path / "cache" / "pytest-gpumem").mkdir(parents=True)
    (tmp_path / "cache" / "pytest-gpumem" / "environments").symlink_to(kept_for_others)


@pytest.fixture
def project(tmp_path, index, monkeypatch):
    """A project that is no git repository, whose test tells what the package tinymodels says."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "conftest.py").write_text(TELLING, encoding="utf-8")
    (folder / "test_it.py").write_text("def test_a(): ...\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


def release(index, version, peak, name="tinymodels", requires=None):
    return make_wheel(index, name, version, {f"{name}/__init__.py": f"PEAK = {peak}\n"}, requires)


def gpumem(*arguments):
    return CliRunner().invoke(main, [*arguments], catch_exceptions=False)


def environments(tmp_path):
    return sorted((tmp_path / "cache" / "pytest-gpumem" / "environments").glob("*/environment.json"))


def kept_runs(tmp_path):
    """The folders of the runs that bisections have left for the next start."""
    return sorted((tmp_path / "cache" / "pytest-gpumem" / "bisections").glob("*"))


def test_two_releases_are_compared_and_kept_for_the_next_time(project, index, tmp_path, monkeypatch):
    release(index, "1.0", 10 * MB, requires="pytest")
    release(index, "2.0", 12 * MB)
    command = ["ab", "--base-with", "tinymodels==1.0", "--head-with", "tinymodels==2.0"]
    result = gpumem(*command, "--report", str(tmp_path / "ab.json"), "--", *PLAIN)
    assert result.exit_code == 1, result.output
    assert "installed tinymodels==2.0 in" in result.stderr
    row = next(line for line in result.stdout.splitlines() if line.startswith("test_it.py::test_a"))
    assert row.split()[-5:] == ["10.00", "MB", "12.00", "MB", "+20.0", "%", "regressed"][-5:]
    assert result.stdout.endswith(
        "1 pair of runs, base tinymodels==1.0, head tinymodels==2.0, slowdown tolerated 1.5 %\n"
    )
    assert json.loads((tmp_path / "ab.json").read_text())["base"] == "tinymodels==1.0"
    held = [json.loads(path.read_text())["packages"] for path in environments(tmp_path)]
    assert sorted(held, key=str) == [{"tinymodels": "1.0"}, {"tinymodels": "2.0"}], "pytest is used from here"
    here = subprocess.run([sys.executable, "-c", "import tinymodels"], capture_output=True, check=False)
    assert here.returncode, "what is installed here is left alone"
    fork_runs(monkeypatch)
    again = gpumem(*command, "--", *PLAIN)
    assert again.exit_code == 1
    assert "install" not in again.stderr, "both environments are there"
    listed = gpumem("cache")
    assert "tinymodels==1.0  tinymodels 1.0" in listed.stdout
    cleared = gpumem("cache", "--clear")
    assert cleared.stdout.splitlines()[-1].startswith("gpumem cache: removed 2 environments, ")
    assert environments(tmp_path) == []
    assert gpumem("cache").stdout.startswith("gpumem cache: 0 environments, 0 B")


@pytest.mark.thorough
def test_uv_installs_the_same_where_it_is_on_the_path(project, index, forks, by_uv, tmp_path):
    release(index, "1.0", 10 * MB)
    release(index, "2.0", 12 * MB)
    result = gpumem("ab", "--base-with", "tinymodels==1.0", "--head-with", "tinymodels==2.0", "--", *PLAIN)
    assert result.exit_code == 1, result.output
    held = {json.loads(path.read_text())["packages"]["tinymodels"] for path in environments(tmp_path)}
    assert held == {"1.0", "2.0"}
    assert all((path.parent / "lock.txt").exists() for path in environments(tmp_path)), "uv has resolved it"
    branch = make_wheel(index.parent / "branch", "tinymodels", "3.0", {"tinymodels/__init__.py": f"PEAK = {14 * MB}\n"})
    command = ["ab", "--base-with", "tinymodels==1.0", "--head-with", f"tinymodels @ {branch.as_uri()}"]
    at_an_address = gpumem(*command, "--report", str(tmp_path / "ab.json"), "--", *PLAIN)
    assert at_an_address.exit_code == 1, at_an_address.output
    (moved,) = json.loads((tmp_path / "ab.json").read_text())["packages"]
    assert moved == {
        "name": "tinymodels",
        "base": "1.0",
        "head": "3.0",
        "requested": True,
        "url": branch.as_uri(),
    }
    release(index.parent / "elsewhere", "4.0", 12 * MB)
    (project / "newer.txt").write_text(
        f"--find-links {index.parent / 'elsewhere'}\ntinymodels==4.0\n", encoding="utf-8"
    )
    with_an_option = gpumem("ab", "--base-with", "tinymodels==1.0", "--head-with", "-r newer.txt", "--", *PLAIN)
    assert with_an_option.exit_code == 1, with_an_option.output
    refused = gpumem("ab", "--head-with", "tinymodels==9.9", "--", *PLAIN)
    assert refused.exit_code == 2
    assert (
        "tinymodels==9.9 cannot be installed: No solution found when resolving dependencies; Because" in refused.stderr
    )


BACKEND = """import zipfile

FILES = {{
    "{0}/__init__.py": "PEAK = {1}",
    "{0}-4.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: {0}\\nVersion: 4.0\\n",
    "{0}-4.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
}}


def build_wheel(folder, *_):
    with zipfile.ZipFile(f"{{folder}}/{0}-4.0-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            wheel.writestr(name, text)
        wheel.writestr("{0}-4.0.dist-info/RECORD", "".join(f"{{name}},,\\n" for name in FILES))
    return "{0}-4.0-py3-none-any.whl"


build_editable = build_wheel
"""
"""A build backend that needs nothing: of a project that lies in a folder."""


@pytest.mark.parametrize("installer", [pytest.param("pip", marks=pytest.mark.thorough), "uv"])
def test_paths_in_a_file_of_requirements_are_those_of_pip(project, index, forks, monkeypatch, installer):
    release(index, "1.0", 10 * MB)
    release(project / "reqs" / "wheels", "4.0", 12 * MB)
    release(project / "reqs" / "more", "4.0", 0, "found")
    for name in ("built", "edited"):
        source = project.parent / name
        source.mkdir()
        (source / "backend.py").write_text(BACKEND.format(name, 0), encoding="utf-8")
        (source / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n', encoding="utf-8"
        )
    lines = [
        "--find-links more",
        "found==4.0",
        "reqs/wheels/tinymodels-4.0-py3-none-any.whl",
        "../built",
        "-e ../edited",
    ]
    (project / "reqs" / "new.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if installer == "uv":
        monkeypatch.setattr(installers, "find_uv", uv.find_uv_bin)
    command = ["ab", "--base-with", "tinymodels==1.0", "--head-with", "-r reqs/new.txt", "--report", "ab.json"]
    result = gpumem(*command, "--", *PLAIN)
    assert result.exit_code == 1, result.output
    assert "regressed" in result.stdout
    packages = json.loads((project / "ab.json").read_text(encoding="utf-8"))["packages"]
    assert {one["name"]: one["head"] for one in packages} == dict.fromkeys(
        ("built", "edited", "found", "tinymodels"), "4.0"
    )


@pytest.mark.thorough
def test_a_set_of_no_exact_release_is_installed_anew(project, index, forks):
    release(index, "1.0", 10 * MB)
    command = ["ab", "--base-with", "tinymodels==1.0", "--head-with", "tinymodels", "--", *PLAIN]
    assert gpumem(*command).exit_code == 0
    release(index, "2.0", 12 * MB)
    assert gpumem(*command).exit_code == 1


def test_a_file_of_requirements_a_constraint_and_a_revision_go_together(project, index, forks, tmp_path):
    release(index, "1.0", 10 * MB)
    release(index, "2.0", 12 * MB)
    (project / "new.txt").write_text("tinymodels\n", encoding="utf-8")
    (project / "limits.txt").write_text("tinymodels<2\n", encoding="utf-8")
    for words in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "--all"],
        ["commit", "--quiet", "--message=one"],
    ):
        identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=project, check=True)
    both = ["--base-with", "tinymodels==1.0", "--head-with", "-r", "new.txt"]
    result = gpumem("ab", "main", "HEAD", *both, "--constraint", "limits.txt", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert "with tinymodels==1.0, head HEAD" in result.stdout


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("tinymodels==9.9", "tinymodels==9.9 cannot be installed: "),
        pytest.param("needs-more==1.0", "needs-more==1.0 cannot be installed: ", marks=pytest.mark.thorough),
        ("tinymodels=2.0", "'tinymodels=2.0' is not a valid requirement, like 'transformers==4.38.2'"),
        (
            "unused==1.0",
            "the tests import no package that differs (unused as installed and 1.0), so there is nothing to compare",
        ),
    ],
)
def test_what_cannot_be_compared_is_told_in_a_sentence_and_nothing_is_left(
    project, index, forks, tmp_path, monkeypatch, head, said
):
    release(index, "1.0", 10 * MB)
    release(index, "1.0", 0, "unused")
    make_wheel(index, "needs_more", "1.0", {"needs_more.py": ""}, requires="tinymodels>=5")
    base = [] if head.startswith("unused") else ["--base-with", "tinymodels==1.0"]
    if not base:
        (project / "conftest.py").write_text(TELLING.replace("import tinymodels", "class tinymodels:\n    PEAK = 1"))
    result = gpumem("ab", *base, "--head-with", head, "--", *PLAIN)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    kept = tmp_path / "cache" / "pytest-gpumem" / "environments"
    assert [path for path in kept.glob("*") if path.is_dir() and not (path / "environment.json").exists()] == []


@pytest.mark.parametrize("broken", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_the_release_that_did_it_is_found_and_one_that_cannot_be_imported_is_skipped(
    project, index, by_uv, tmp_path, monkeypatch, broken
):
    """The thorough one runs each in its own interpreter."""
    for minor in range(5):
        release(index, f"1.{minor}", 10 * MB if minor < 4 else 12 * MB)
    if broken:
        make_wheel(index, "tinymodels", "1.2", {"tinymodels/__init__.py": "raise ImportError('broken release')\n"})
        fork_runs(monkeypatch)
    ends = ["--good", "1.0", "--bad", "1.4"]
    result = gpumem("bisect", "--package", "tinymodels", *ends, "--report", "found.md", "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert (
        "gpumem bisect: tinymodels 1.4 did it: peak allocated 10.00 MB to 12.00 MB (+20.0 %), after 1.3\n"
        in result.stdout
    )
    assert ("skipped  ImportError: broken release" in result.stdout) is broken
    accepting = f"to accept it, install tinymodels 1.4 first: pytest test_it.py {' '.join(PLAIN)} --gpumem-update=all\n"
    assert result.stdout.endswith(accepting)
    assert "| `1.4` | 12.00 MB | bad |" in (project / "found.md").read_text(encoding="utf-8")
    assert kept_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        (
            "1.2",
            "1.0",
            "1.0 is better than 1.2 (peak allocated 12.00 MB and 10.00 MB); to find what fixed it, exchange",
        ),
        ("1.0", "9.9", "9.9 cannot be measured: tinymodels==9.9 cannot be installed: "),
        ("1.0", "1.0", "--good and --bad are the same release of tinymodels: 1.0"),
        ("1.0+cpu", "1.0", "tinymodels 1.0+cpu and 1.0 are the same release on the index; give two different releases"),
        ("main", "1.0", "'main' is not a release of tinymodels; give a release such as 4.38.2"),
    ],
)
def test_ends_that_hold_nothing_to_find_are_told_in_a_sentence(project, releases, tmp_path, good, bad, said):
    result = gpumem("bisect", "--package", "tinymodels", "--good", good, "--bad", bad, "test_it.py", "--", *PLAIN)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert kept_runs(tmp_path) == []


def test_a_release_that_mended_it_is_named_where_the_bad_one_is_earlier(project, releases):
    (project / "conftest.py").write_text(TELLING.replace("tinymodels.PEAK", f"{22 * MB} - tinymodels.PEAK"))
    ends = ["--good", "1.2", "--bad", "1.0"]
    result = gpumem("bisect", "--package", "tinymodels", *ends, "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert (
        "gpumem bisect: tinymodels 1.1 fixed it: peak allocated 12.00 MB to 10.00 MB (-16.7 %), after 1.0\n"
        in result.stdout
    )
    assert "to accept it" not in result.stdout


def test_a_growing_test_is_searched_and_accepted_with_the_release_installed_here(
    project, index, forks, by_uv, monkeypatch
):
    monkeypatch.setattr("pytest_gpumem.tools.bisect.command.versions", lambda names: dict.fromkeys(names, "1.1+local"))
    (project / "conftest.py").write_text(
        TELLING.replace("tinymodels.PEAK", "tinymodels.PEAKS[request.node.name]"), encoding="utf-8"
    )
    (project / "test_it.py").write_text("def test_a(): ...\ndef test_b(): ...\n", encoding="utf-8")
    for version, a, b in (("1.0", 10, 50), ("1.1", 12, 20)):
        text = f"PEAKS = {{'test_a': {a * MB}, 'test_b': {b * MB}}}\n"
        make_wheel(index, "tinymodels", version, {"tinymodels/__init__.py": text})
    ends = ["--good", "1.0", "--bad", "1.1"]
    result = gpumem("bisect", "--package", "tinymodels", *ends, "test_it.py", "--", *PLAIN)
    assert "tinymodels 1.1 did it: peak allocated 10.00 MB to 12.00 MB (+20.0 %), after 1.0\n" in result.stdout
    assert "to accept it: pytest test_it.py" in result.stdout, "as it is"


def test_a_cache_that_cannot_be_written_is_told_in_a_sentence(project, index, tmp_path, monkeypatch):
    release(index, "1.0", 10 * MB)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = gpumem("ab", "--head-with", "tinymodels==1.0", "--", *PLAIN)
    assert result.exit_code == 2, result.output
    why = f"the cache {tmp_path / 'file' / 'pytest-gpumem'} is not used: Not a directory; set GPUMEM_CACHE to a new folder, or remove this one if it is yours"
    assert f"tinymodels==1.0 cannot be installed: {why}\n" in result.stderr


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (
            "/bin/true",
            "/bin/true cannot be installed: /bin/true is not a Python interpreter: it made no virtual environment",
        ),
        ("/nowhere/python", "/nowhere/python cannot be run: No such file or directory"),
    ],
)
def test_a_python_that_is_none_is_told_in_a_sentence(project, index, python, said):
    result = gpumem("ab", "--head-python", python, "--", *PLAIN)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_runs_of_an_interrupted_bisection_go_with_the_environments(project, tmp_path):
    kept = tmp_path / "cache" / "pytest-gpumem" / "bisections" / "1234"
    kept.mkdir(parents=True)
    assert gpumem("cache").exit_code == 0
    assert kept_runs(tmp_path) == [kept]
    assert gpumem("cache", "--clear").exit_code == 0
    assert kept_runs(tmp_path) == []


@pytest.mark.thorough
def test_without_git_an_interrupted_bisection_goes_on_if_no_code_was_edited(project, releases, monkeypatch):
    def interrupted(*_arguments):
        raise StopSignal(signal.SIGINT)

    command = ["bisect", "--package", "tinymodels", "--good", "1.0", "--bad", "1.2", "test_it.py", "--", *PLAIN]
    going_on = "reusing 2 runs from an earlier search, which was interrupted\n"
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Search, "_trials", interrupted)
        assert gpumem(*command).exit_code == 130
        (project / "test_it.py").write_text("def test_a():\n    ...\n", encoding="utf-8")
        edited = gpumem(*command)
    assert edited.exit_code == 130
    assert going_on not in edited.stderr
    result = gpumem(*command)
    assert result.exit_code == 0, result.output
    assert going_on in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "gone.json"], "'gone.json' does not exist"),
        (["--from", "test_it.py"], "test_it.py: "),
        (
            ["--from", "ab.json", "test_it.py"],
            "--from already names the test and both ends; leave out TEST, --good, --bad,",
        ),
        ([], "Missing argument 'TEST...': name a test, or give --from REPORT."),
        (["--from", "ab.json", "--report", "found.txt"], "found.txt has to end with .json or .md"),
    ],
)
def test_a_wrong_report_to_search_from_is_told_in_a_sentence(project, index, words, said):
    (project / "ab.json").write_text(
        json.dumps(
            {
                "not_compared": [],
                "tests": [
                    {
                        "file": "test_it.py",
                        "test": "test_a",
                        "name": "call",
                        "outcome": "regressed",
                        "metrics": [{"metric": "peak_allocated", "outcome": "regressed"}],
                    }
                ],
            }
        ),
        encoding="utf-8",
    )
    result = gpumem("bisect", *words)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_of_several_packages_the_one_that_did_it_is_found_and_then_its_release(project, releases):
    names = ("another", "tinymodels")
    for file, version in (("old.txt", "1.0"), ("new.txt", "1.2")):
        (project / file).write_text("".join(f"{name}=={version}\n" for name in names), encoding="utf-8")
    result = gpumem("bisect", "--packages", "--good", "old.txt", "--bad", "new.txt", "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert "packages that differ: another 1.2, was 1.0; tinymodels 1.2, was 1.0\n" in result.stderr
    assert (
        "gpumem bisect: tinymodels 1.1 did it: peak allocated 10.00 MB to 12.00 MB (+20.0 %), after 1.0\n"
        in result.stdout
    )


def lock_files(project, **pins):
    """Write ``old.txt`` and ``new.txt`` with both releases of each package."""
    for at, file in enumerate(("old.txt", "new.txt")):
        text = "".join(f"{name}=={both[at]}\n" for name, both in pins.items())
        (project / file).write_text(text, encoding="utf-8")
    return ["--packages", "--good", "old.txt", "--bad", "new.txt"]


def test_packages_that_differ_in_their_build_only_are_one_release(project, index):
    locks = lock_files(project, tinymodels=("1.4", "1.4+local"), another=("1.0+cpu", "1.0+cu126"), same=("1.0", "1.0"))
    result = gpumem("bisect", *locks, "test_it.py", "--", *PLAIN)
    assert result.exit_code == 2, result.output
    assert result.stderr == (
        "Error: another 1.0+cpu and 1.0+cu126 are one release on the index; "
        "tinymodels 1.4 and 1.4+local are one release on the index, so there is no release to search\n"
    )


@pytest.mark.thorough
def test_of_packages_that_differ_those_of_another_release_are_searched(project, releases):
    locks = lock_files(project, tinymodels=("1.0", "1.1+local"), another=("1.0+cpu", "1.0+cu126"))
    result = gpumem("bisect", *locks, "test_it.py", "--", *PLAIN)
    assert result.exit_code == 0, result.output
    assert "another 1.0+cpu and 1.0+cu126 are one release on the index\n" in result.stderr
    assert "packages that differ: tinymodels 1.1+local, was 1.0\n" in result.stderr
    assert "gpumem bisect: tinymodels 1.1 did it: " in result.stdout
    assert "to accept it, install the packages in new.txt first: pytest test_it.py" in result.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("memlib[x]", "'memlib[x]' contains more than the name of a package; give only memlib\n"),
        ("memlib==1.0", "'memlib==1.0' contains more than the name of a package; give only memlib\n"),
        ("memlib @ https://example.org/m.whl", "contains more than the name of a package; give only memlib\n"),
        ("", "'' is not the name of a package; give a name such as transformers\n"),
        ("-r x", "'-r x' is not the name of a package; give a name such as transformers\n"),
    ],
)
def test_what_is_no_name_of_a_package_is_told_before_anything_runs(project, index, name, said):
    result = gpumem("bisect", "--package", name, "--good", "1.0", "--bad", "1.1", "test_it.py")
    assert result.exit_code == 2, result.output
    assert "Invalid value for '--package': " in result.stderr
    assert result.stderr.endswith(said)
    assert "candidates" not in result.stderr


class Commits:
    """A repository of small commits, of which the later ones need more, and some cannot be imported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        (path / "conftest.py").write_text(TELLING.replace("tinymodels", "shipped"), encoding="utf-8")
        (path / "test_it.py").write_text("def test_a(): ...\n", encoding="utf-8")

    def git(self, *words: str, given: str | None = None) -> str:
        identity = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *words], cwd=self.path, check=True, capture_output=True, text=True, input=given
        ).stdout

    def commit(self, number: int, peak: int) -> None:
        (self.path / "shipped.py").write_text(f"PEAK = {peak}  # {number}\n", encoding="utf-8")
        self.git("add", "--all")
        self.git("commit", "--quiet", f"--message=change {number}")


def change(number: int, peak: int, *, broken: bool = False) -> str:
    """A commit as ``git fast-import`` takes it."""
    text = f"PEAK = {peak}  # {number}\n" + ("import nothing_there\n" if broken else "")
    message = f"change {number}\n"
    return (
        f"commit refs/heads/main\ncommitter Ada <ada@example.org> {1_700_000_000 + number} +0000\n"
        f"data {len(message)}\n{message}M 100644 inline shipped.py\ndata {len(text)}\n{text}"
    )


@pytest.fixture(scope="module")
def sixty_four(tmp_path_factory):
    """A repository that `commits` copies, and its branch ``beside``, which leaves it after the second commit."""
    made = Commits(tmp_path_factory.mktemp("commits") / "repository")
    made.commit(0, 10 * MB)
    # With fast-import, in place of two processes a commit.
    changes = [
        change(number, 10 * MB if number < 41 else 12 * MB, broken=number in (31, 40, 42)) for number in range(1, 64)
    ]
    changes[0] = (
        changes[0].replace("M 100644", "from refs/heads/main^0\nM 100644").replace("main\n", "main\nmark :1\n", 1)
    )
    beside = change(99, 10 * MB).replace("M 100644", "from :1\nM 100644").replace("heads/main", "heads/beside")
    made.git("fast-import", "--quiet", given="".join([*changes, beside]))
    made.git("reset", "--quiet", "--hard")
    return made


@pytest.fixture
def commits(sixty_four, tmp_path, index, monkeypatch):
    made = copy.copy(sixty_four)
    made.path = shutil.copytree(sixty_four.path, tmp_path / "repository")
    monkeypatch.chdir(made.path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return made


@pytest.fixture
def at_once(monkeypatch):
    """Make runs start no process: their figures are those of ``shipped.py`` in the worktree."""

    def take(self, provided, tick=None, *, explained=False):
        try:
            shipped = runpy.run_path(str(provided.top / "shipped.py"))
        except ImportError as error:
            raise RunFailed(str(error)) from None
        one = measurement(peak=shipped.get("PEAK", MB), seconds=shipped.get("SECONDS"))
        verdict = json.dumps(to_plain(measured("test_a", one)))
        report = {"nodeid": "test_it.py::test_a", "when": "call", "outcome": "passed", "xfail": False, "why": ""}
        end = {"status": 0, "root": ".", "outside_modules": {}, "imported": []}
        taken = RunRecord((json.dumps({**report, "verdict": verdict}), json.dumps(end)), 0)
        return taken, run_of(*taken)

    monkeypatch.setattr(Runner, "take", take)


FIND = ["bisect", "--good", "HEAD~63", "--bad", "main", "test_it.py::test_a", "--", *PLAIN]


def killed_before_a_fifth_run():
    take, left = Runner.take, iter(range(4))

    def taken(*arguments, **named):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*arguments, **named)

    Runner.take = taken
    gpumem(*FIND)


def test_at_most_8_of_64_commits_are_measured_and_a_killed_search_resumes(commits, at_once, tmp_path):
    killed = multiprocessing.get_context("fork").Process(target=killed_before_a_fifth_run)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    result = gpumem(*FIND)
    assert result.exit_code == 0, result.output
    # Four were begun, and one of them could not be imported.
    assert "reusing 3 runs from an earlier search, which was interrupted\n" in result.stderr
    assert 3 + result.stderr.count("1 measured in") <= 8
    # The commit before it cannot be imported, and neither can the one after it.
    first, second = (commits.git("rev-parse", f"HEAD~{63 - number}")[:9] for number in (40, 41))
    assert (
        f"gpumem bisect: one of {first}, {second} did it: peak allocated 10.00 MB to 12.00 MB (+20.0 %)"
        in result.stdout
    )
    assert "skipped  No module named 'nothing_there'" in result.stdout
    assert len(commits.git("worktree", "list").splitlines()) == 1
    assert list(tmp_path.glob("gpumem-ab-*")) == []


def test_the_tolerance_is_that_of_the_bad_commit(commits, at_once):
    settings = '[tool.gpumem.tolerance]\npeak_allocated = "50 %"\n'
    (commits.path / "pyproject.toml").write_text(settings, encoding="utf-8")
    commits.commit(64, 12 * MB)
    (commits.path / "pyproject.toml").unlink()
    found = gpumem("bisect", "--good", "HEAD~30", "--bad", "main", "test_it.py::test_a", "--", *PLAIN)
    assert found.exit_code == 2
    assert "(peak allocated 10.00 MB and 12.00 MB): either both are good, or both are bad" in found.stderr


def test_the_commit_that_mended_it_is_named_and_what_is_not_committed_is_left_out(commits, at_once):
    commits.commit(64, 10 * MB)
    (commits.path / "shipped.py").write_text(f"PEAK = {12 * MB}\n", encoding="utf-8")
    result = gpumem("bisect", "--good", "main", "--bad", "HEAD~10", *FIND[5:])
    assert result.exit_code == 0, result.output
    assert "1 file has uncommitted changes, which are left out: only commits are compared\n" in result.stderr
    mended = commits.git("rev-parse", "HEAD")[:9]
    assert f"gpumem bisect: {mended} change 64 (Ada, " in result.stdout
    assert "fixed it: peak allocated 12.00 MB to 10.00 MB (-16.7 %), after " in result.stdout


@pytest.mark.thorough
def test_several_commits_at_a_time_find_the_same(commits, forks):
    result = gpumem("bisect", "--jobs", "2", "--good", "HEAD~30", *FIND[3:])
    assert result.exit_code == 0, result.output
    assert "did it: peak allocated 10.00 MB to 12.00 MB (+20.0 %)" in result.stdout


def test_a_test_that_one_end_does_not_have_is_told(commits, forks):
    result = gpumem("bisect", "--good", "HEAD~1", "test_it.py::test_gone", "--", *PLAIN)
    assert result.exit_code == 2
    assert " cannot be measured: not found: test_it.py::test_gone\n" in result.stderr


def test_a_slowdown_is_found_by_runs_in_turn(tmp_path, index, at_once, monkeypatch):
    made = Commits(tmp_path / "repository")
    for number in range(3):
        (made.path / "shipped.py").write_text(f"SECONDS = {0.11 if number else 0.1}  # {number}\n", encoding="utf-8")
        made.git("add", "--all")
        made.git("commit", "--quiet", f"--message=change {number}")
    monkeypatch.chdir(made.path)
    result = gpumem("bisect", "--metric", "step_time", "--good", "HEAD~2", *FIND[3:])
    assert result.exit_code == 0, result.output
    culprit = made.git("rev-parse", "HEAD~1")[:9]
    assert f"gpumem bisect: {culprit} change 1 (Ada, " in result.stdout
    assert "did it: step time 100.00 ms to 110.00 ms (+10.0 %)" in result.stdout
    assert result.stderr.count(" pairs of runs\n") == 2, "the step is one of both comparisons"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--good", "main", "--bad", "main"], "are the same commit"),
        (
            ["--good", "HEAD~63", "--bad", "beside"],
            "(peak allocated 10.00 MB and 10.00 MB): either both are good, or both are bad",
        ),
        (["--good", "main", "--bad", "beside"], "is not an ancestor of beside"),
        (["--good", "HEAD~63", "--bad", "beside", "--metric", "flops"], "no test has FLOPs both in base and in head"),
        (["--good", "nowhere"], "there is no revision 'nowhere'"),
        (["--bad", "main"], "Missing option '--good'"),
        (["--package", "a", "--good", "1.0"], "Missing option '--bad' or '--good': give both"),
        (["--package", "a", "--packages"], "exclude each other"),
    ],
)
def test_commits_that_hold_nothing_to_find_are_told_in_a_sentence(commits, at_once, words, said):
    result = gpumem("bisect", *words, *FIND[5:])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert len(commits.git("worktree", "list").splitlines()) == 1
