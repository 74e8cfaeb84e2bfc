"""The ``gpumem`` command as a whole: each of its commands teaches, and says what its exit status means."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from pytest_gpumem.tools import main as main_module
from pytest_gpumem.tools.console.streams import WholeLines
from pytest_gpumem.tools.main import main

COMMANDS = main.list_commands(click.Context(main))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_says_what_for_how_and_with_which_exit_status(command):
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    # Beside the line of usage.
    assert re.search(rf"^ {{4,}}gpumem {command}( |$)", result.output, flags=re.MULTILINE), "no line that can be typed"
    said = " ".join(result.output.partition("Exit status:")[2].partition("Options:")[0].split())
    told = [int(code) for code in re.findall(r"(?:^|, )(\d+) (?=if |when |for |after )", said)]
    assert told == sorted(told)
    assert {0, 2} <= set(told) <= {0, 1, 2, 130, 143}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_same_first_line_in_its_help_as_in_the_list(command):
    summary = str(main.get_command(click.Context(main), command).help).partition("\n\n")[0]
    assert " ".join(summary.split()).startswith(main_module.COMMANDS[command].help.removesuffix("."))


def test_the_help_of_all_names_every_command_and_fits_a_terminal():
    result = CliRunner().invoke(main, ["--help"])
    assert set(COMMANDS) <= set(re.findall(r"^  (\w+) ", result.output, flags=re.MULTILINE))
    assert max(map(len, result.output.splitlines())) <= 80
    assert len(re.findall(r"^  \w+  +[A-Z].*\.$", result.output, flags=re.MULTILINE)) >= len(COMMANDS), "one line each"


def test_the_help_of_all_imports_no_command_and_none_of_what_commands_need():
    code = (
        "import sys\n"
        "from pytest_gpumem.tools.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(*(name for name in sys.modules if name.startswith('pytest_gpumem.')), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Compare two revisions" in done.stdout
    light = {"base", "base.terminals", "base.units", "base.variables", "tools", "tools.main"}
    assert set(done.stderr.split()) == {f"pytest_gpumem.{name}" for name in light}


def test_a_misspelt_command_is_told_with_the_nearest_one():
    done = CliRunner().invoke(main, ["shwo"])
    assert done.exit_code == 2
    assert "No such command 'shwo'; did you mean 'show'?" in done.output


def test_wrong_usage_ends_with_2():
    ended = {command: CliRunner().invoke(main, [command, "--no-such-option"]).exit_code for command in COMMANDS}
    assert ended == dict.fromkeys(COMMANDS, 2)


@pytest.mark.parametrize("terminal", [False, True], ids=["a log", "a terminal"])
def test_progress_is_in_whole_lines_whatever_torch_writes_in_between(monkeypatch, terminal):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", stream)
    progress = WholeLines()
    progress.write("[1] fp32 ... ")
    stream.write("[W1129 10:00:00 Context.cpp:1] Warning: TF32\n")
    progress.write("12.00 MB\n")
    progress.write("[2] amp-bf16 ... 8.00 MB\n")
    lines = [line.rpartition("\x1b[K")[2] for line in stream.getvalue().strip().split("\n")]
    assert lines[-2:] == ["[1] fp32 ... 12.00 MB", "[2] amp-bf16 ... 8.00 MB"]
    begun = "[1] fp32 ... " if terminal else ""
    assert lines[0] == f"{begun}[W1129 10:00:00 Context.cpp:1] Warning: TF32"
