"""Words that a shell completes on ``gpumem``'s command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.tools.main import main

EXAMPLE = Path(__file__).parents[1] / "example_project"
HEAD = "tests/test_convnet.py::"
TRAINING = ["test_train_step[AdamW]", "test_train_step[SGD]"]


def completed(*words):
    """The words that may stand in place of the last one."""
    environment = {
        "_GPUMEM_COMPLETE": "zsh_complete",
        "COMP_WORDS": " ".join(f"'{word}'" for word in ("gpumem", *words)),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(main, prog_name="gpumem", env=environment)
    assert result.stderr == ""
    lines = result.stdout.strip("\n").splitlines()
    return list(zip(lines[::3], lines[1::3], strict=True))


def words(*typed):
    return [word for kind, word in completed(*typed) if kind == "plain"]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.chdir(EXAMPLE)


def test_commands_are_completed_and_none_is_imported():
    assert words("pr") == ["prune"]
    code = (
        "import sys\nfrom click.shell_completion import ShellComplete\nfrom pytest_gpumem.tools.main import main\n"
        "print([one.value for one in ShellComplete(main, {}, 'gpumem', 'X').get_completions([], 'sh')])\n"
        "print([name for name in sys.modules if name.startswith('pytest_gpumem.tools.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['show']", "['pytest_gpumem.tools.main']"]


@pytest.mark.parametrize("command", [["show"], ["history"], ["why"], ["accept", "a.json"], ["bisect"], ["prune"]])
def test_tests_of_the_store_are_completed_by_id_or_by_name(example, command):
    assert words(*command, f"{HEAD}test_train") == [HEAD + test for test in TRAINING]
    assert set(TRAINING) <= set(words(*command, "test_train"))


def test_a_store_that_is_named_is_read_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = str(EXAMPLE / "gpumem-baselines")
    assert words("show", "--store", store, f"{HEAD}test_train") == [HEAD + test for test in TRAINING]
    assert words("show", "--store", store, "--slug", "cpu") == ["cpu-x86_64"]
    assert words("show", f"{HEAD}test_train") == []


@pytest.mark.parametrize(
    ("typed", "among"),
    [
        (["emulate", "l4"], ["l4", "l40s"]),
        (["fit", "--device", "l4"], ["l4", "l40s"]),
        (["advise", "--device", "c"], ["cuda", "cpu"]),
        (["advise", "--device", "emulated:l4"], ["emulated:l4", "emulated:l40s"]),
        (["history", "--metric", "peak_b"], ["peak_backward"]),
        (["bisect", "--metric", "peak_r"], ["peak_reserved"]),
        (["export", "bencher", "--metric", "step"], ["step_time"]),
        (["export", "b"], ["bencher"]),
        (["compare", "--format", "m"], ["markdown"]),
        (["compare", "emulated-"], ["emulated-h100-80gb"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_cards_devices_metrics_and_formats_are_completed(example, typed, among):
    assert words(*typed) == among


def test_a_card_of_the_projects_own_is_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.gpumem.gpus.lab]\nlike = "h100"\nmemory = "10 GiB"\n')
    assert words("emulate", "la") == ["lab"]


@pytest.mark.parametrize("typed", [["merge", "a"], ["compare", "a"], ["export", "bencher", "a"], ["accept", "a"]])
def test_files_are_left_to_the_shell(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    assert completed(*typed) == [("file", "a")]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("gpumem-baselines/cpu/test_a.py.toml", "not TOML ["),
        ("pyproject.toml", "[tool.gpumem"),
        ("pyproject.toml", "[tool.gpumem]\nstore = 's3://bucket/store'\n"),
        ("pyproject.toml", "[tool.gpumem]\nstore = 5\n"),
        ("gpumem-baselines", "a file"),
    ],
    ids=["store", "settings", "url", "type", "no_folder"],
)
def test_what_cannot_be_read_completes_nothing_and_says_nothing(tmp_path, monkeypatch, file, text):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (tmp_path / "conftest.py").write_text("raise SystemExit('run')\n")
    assert words("show", "te") == []
    assert words("nonsense", "te") == []
