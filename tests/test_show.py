"""``gpumem show``: what is in the store, as a table and for programs, and what is not there."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pytest_gpumem.facts.measurement import Environment
from pytest_gpumem.judging.times.comparison import Runs
from pytest_gpumem.tools.main import main
from tests.git_store import MB, Repository, entry
from tests.hostile import TEXTS

A100 = Environment("a100", "NVIDIA A100")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path / "project")
    monkeypatch.chdir(made.path)
    return made


@pytest.fixture
def filled(repository):
    timed = entry(
        20 * MB,
        metrics={"step_time": 0.012, "operators": 7},
        runs=Runs((0.012, 0.013, 0.012)),
        reason="twice the width",
    )
    repository.store({"test_b[fp32] (train_step)": timed, "test_a": entry()}, "tests/test_gpt.py")
    repository.store({"test_a": entry(11 * MB, device=A100)}, "tests/test_gpt.py", "a100")
    repository.store({"test_c": entry(metrics={"retained": 0})}, "tests/test_mlp.py")
    return repository


def show(*arguments):
    return CliRunner().invoke(main, ["show", *arguments])


def test_all_baselines_are_shown_sorted_and_counted(filled):
    assert show().output.splitlines() == [
        "test                                          device      peak          step time  recorded    commit   reason",
        "tests/test_gpt.py::test_a (call)              a100    11.00 MB                  -  2026-11-02  abc1234",
        "tests/test_gpt.py::test_a (call)              h100    10.00 MB                  -  2026-11-02  abc1234",
        "tests/test_gpt.py::test_b[fp32] (train_step)  h100    20.00 MB  12.00 ms (3 runs)  2026-11-02  abc1234  twice the width",
        "tests/test_mlp.py::test_c (call)              h100    10.00 MB                  -  2026-11-02  abc1234",
        "",
        "gpumem: 4 baselines, of 3 tests on 2 devices, in gpumem-baselines",
    ]


def test_counts_are_shown_when_they_are_asked_for(filled):
    assert "operators" not in show().output
    assert "operators" in show("-v").output


@pytest.mark.parametrize(
    ("arguments", "counted"),
    [
        (["test_gpt", "test_c"], "gpumem: 4 baselines, "),
        (["tests/test_gpt.py::test_b[fp32]"], "1 of 4 baselines"),
        (["test_b[fp32] (train_step)"], "1 of 4 baselines"),
        (["--slug", "a100"], "gpumem: 1 baseline, of 1 test on 1 device"),
    ],
)
def test_those_that_are_asked_for_are_shown(filled, arguments, counted):
    result = show(*arguments)
    assert result.exit_code == 0
    assert counted in result.output


def test_programs_are_given_every_figure(filled):
    (found,) = json.loads(show("--format", "json", "test_b").output)["baselines"]
    assert found["metrics"] == {"peak_allocated": 20 * MB, "operators": 7, "step_time": 0.012}
    assert found["runs"] == {"seconds": [0.012, 0.013, 0.012], "cycles": []}
    assert (found["slug"], found["device"], found["reason"]) == ("h100", "NVIDIA H100", "twice the width")


def test_settings_are_those_of_the_project_also_from_a_folder_in_it(filled, monkeypatch):
    (filled.path / "gpumem-baselines").rename(filled.path / "kept")
    settings = '[tool.pytest.ini_options]\naddopts = "--mine"\n[tool.gpumem]\nstore = "kept"\nunits = "iec"\n'
    (filled.path / "pyproject.toml").write_text(settings, encoding="utf-8")
    # An option of addopts that a conftest.py adds, and a conftest.py that fails when tests are collected.
    source = "def pytest_addoption(parser):\n    parser.addoption('--mine', action='store_true')\n"
    (filled.path / "conftest.py").write_text(source, encoding="utf-8")
    (filled.path / "test_it.py").write_text("raise RuntimeError\n", encoding="utf-8")
    (filled.path / "sub").mkdir()
    monkeypatch.chdir(filled.path / "sub")
    result = show("test_c")
    assert result.exit_code == 0, result.output
    assert "9.54 MiB" in result.output
    assert "in kept" in result.output


def test_an_empty_store_has_nothing_to_show(repository):
    (repository.path / "gpumem-baselines").mkdir()
    result = show()
    assert (result.exit_code, result.output) == (0, "gpumem: 0 baselines in gpumem-baselines\n")


@pytest.mark.parametrize("name", ["controls", "newlines"])
def test_whatever_a_test_is_called_it_stays_on_its_line(repository, name):
    repository.store({f"test[{TEXTS[name]}]": entry(reason=TEXTS[name])})
    lines = show().output.split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 5


@pytest.mark.parametrize(("given", "form"), [("option", ()), ("settings", ("--format", "json"))])
def test_the_stores_password_is_not_told(repository, form, given):
    url = "s3://me:hunter2secret@host/shown"
    if given == "settings":
        (repository.path / "pyproject.toml").write_text(f'[tool.gpumem]\nstore = "{url}"\n', encoding="utf-8")
    result = show(*form, *(["--store", url] if given == "option" else []))
    assert result.exit_code != 0
    assert "s3://***@host/shown" in result.output
    assert "hunter2secret" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["test_gtp"], "no baseline matches test_gtp; there is test_gpt.py"),
        (["tests/test_gpt.py::test_bb[fp32]"], "there is tests/test_gpt.py::test_b[fp32]"),
        (["--slug", "h10"], "did you mean 'h100'?"),
        (["--store", "nowhere"], "there is no store at"),
        (["--store", ""], "--store is empty"),
        (["--store", "nothing://x"], "nothing"),
        (["--store", "broken"], "format is 99"),
    ],
)
def test_what_is_not_there_is_said_and_ends_with_2(filled, arguments, said):
    broken = filled.path / "broken/h100/a.py.toml"
    broken.parent.mkdir(parents=True)
    broken.write_text("format = 99\n", encoding="utf-8")
    result = show(*arguments)
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_wrong_settings_are_told(filled):
    (filled.path / "pyproject.toml").write_text("[tool.gpumem]\nstor = 1\n", encoding="utf-8")
    result = show()
    assert result.exit_code == 2
    assert "unknown key 'stor'; did you mean 'store'?" in result.output
