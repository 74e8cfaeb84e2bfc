"""Standard streams in place of files, and colours: what a shell user expects of a command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from _pytest._io.terminalwriter import should_do_markup
from click.testing import CliRunner

from pytest_gpumem.base.terminals import wants_colour
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.tools.ab.compare_variants import Progress
from pytest_gpumem.tools.console.files import STANDARD, FilePath
from pytest_gpumem.tools.console.streams import WholeLines
from pytest_gpumem.tools.main import main
from tests.reports.test_merging import measured, shard

PASSED = to_json(shard(measured(test=("a.py", "test_a"))))
OTHER = to_json(shard(measured(Outcome.IMPROVED, ("a.py", "test_b"))))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    for name in ("PY_COLORS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    Path("a.json").write_text(PASSED, encoding="utf-8")
    return tmp_path


def run(*arguments, stdin=None, status=0, **more):
    result = CliRunner().invoke(main, arguments, input=stdin, **more)
    assert result.exit_code == status, result.output
    return result


def every_parameter():
    for name in main.list_commands(click.Context(main)):
        command = main.get_command(click.Context(main), name)
        commands = command.commands.values() if isinstance(command, click.Group) else [command]
        yield from ((name, one, parameter) for one in commands for parameter in one.params)


def test_every_option_that_names_a_file_has_the_type_that_takes_a_stream():
    paths = [
        (name, one.name, parameter)
        for name, one, parameter in every_parameter()
        if isinstance(parameter.type, click.Path)
    ]
    others = {(command, parameter.name) for command, _, parameter in paths if not isinstance(parameter.type, FilePath)}
    # A folder, a script that is run, and files that pip reads.
    assert others == {("export", "output"), ("run", "script"), ("ab", "constraints")}
    writing = {command for command, _, parameter in paths if parameter.name in ("files", "output")}
    assert writing == {"ab", "bisect", "export", "merge"}


def test_a_merged_report_goes_to_standard_output_and_its_text_beside_it():
    result = run("merge", "a.json", "-", "--report", "-", "--report", "whole.md", stdin=OTHER)
    assert json.loads(result.stdout)["shards"] == 2
    assert "gpumem merged: 2 shards" in result.stderr
    assert "test_a" in Path("whole.md").read_text(encoding="utf-8")
    assert not Path("-").exists()


def test_commands_can_be_joined_by_pipes():
    merged = run("merge", "a.json", "--report", "-").stdout
    exported = run("export", "bencher", "-", "-o", "-", stdin=merged)
    assert exported.stdout_bytes == run("export", "bencher", "a.json").stdout_bytes != b""
    assert "test_a" in run("why", "test_a", "--report", "-", stdin=merged).stdout
    assert "nothing is worse" not in run("compare", "a.json", "-", stdin=merged).stderr


def test_a_file_whose_name_is_a_dash_is_written_with_its_folder(folder):
    run("export", "bencher", "a.json", "-o", "./-")
    assert (folder / "-").read_bytes() == run("export", "bencher", "a.json").stdout_bytes
    Path("-").write_text(PASSED, encoding="utf-8")
    assert run("merge", "./-", stdin="no report").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["merge", "-", "-"], "- is given twice"),
        (
            ["merge", "a.json", "--report", "-", "--report", "-"],
            "- is given twice, but there is only one standard output",
        ),
        (["ab", "main", "--report", "-", "--report", "-"], "- is given twice, but there is only one standard output"),
        (["merge", "-"], "standard input: it is not JSON"),
        (["export", "bencher", "-"], "standard input: it is not JSON"),
        (["export", "tensorboard", "a.json", "-o", "-"], "event files are written into a folder"),
        (["compare", "-", "-"], "OLD and NEW cannot both be standard input"),
        (["why", "test_a", "--report", "-"], "standard input: it is not JSON"),
        (["bisect", "--from", "-"], "standard input"),
    ],
)
def test_a_stream_that_cannot_be_taken_is_told(arguments, said):
    assert said in run(*arguments, stdin="no report", status=2).stderr


def test_the_reason_why_nothing_was_compared_goes_to_the_stream_as_well():
    result = run("ab", "nowhere", "--report", "-", status=2)
    assert json.loads(result.stdout)
    assert result.stderr.startswith("Error: ")


def test_the_type_tells_a_stream_from_a_file(folder):
    convert = FilePath().convert
    assert convert("-", None, None) == STANDARD
    assert convert("./-", None, None) == folder / "-"
    assert convert("a/-", None, None) == Path("a/-")


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, None),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, None),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": ""}, None),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm"}, None),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"PY_COLORS": "1", "NO_COLOR": "1"}, True),
        ({"PY_COLORS": "0", "FORCE_COLOR": "1"}, False),
    ],
)
def test_colours_follow_the_rules_of_pytest(environment, wanted, monkeypatch):
    assert wants_colour(environment) is wanted
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    assert should_do_markup(terminal) is (wanted is not False)
    assert should_do_markup(io.StringIO()) is (wanted is True)


@pytest.mark.parametrize(("environment", "coloured"), [({"FORCE_COLOR": "1"}, True), ({}, False)])
def test_a_pipe_gets_colours_only_if_they_are_forced(environment, coloured):
    command = [sys.executable, "-m", "pytest_gpumem", "merge", "a.json"]
    piped = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert ("\x1b[" in piped.stdout) is coloured


@pytest.mark.parametrize(
    ("environment", "coloured"), [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, True)]
)
def test_a_terminal_gets_colours_unless_they_are_refused(environment, coloured):
    # `color` says that the runner's stream takes colours, as a terminal does.
    assert ("\x1b[" in run("merge", "a.json", env=environment, color=True).stdout) is coloured


@pytest.mark.parametrize(("term", "redrawn"), [("dumb", False), ("xterm", True)])
def test_a_dumb_terminal_gets_no_line_that_is_drawn_anew(monkeypatch, term, redrawn):
    monkeypatch.setenv("TERM", term)
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stream)
    WholeLines().write("begun ... ")
    progress = Progress(stream, 2)
    progress.tick()
    assert ("\x1b[K" in stream.getvalue()) is redrawn


def test_the_package_is_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "pytest_gpumem", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: python -m pytest_gpumem [OPTIONS] COMMAND")
