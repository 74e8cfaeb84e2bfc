"""What stands in a terminal, a pipe or a stream of another encoding at the end of a run, through pytest itself.

The verdicts are made up and handed to the plugin as those of measured tests are, so that nothing has to be measured.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.reporting.reports.layout import cells
from tests.hostile import TEXTS
from tests.reports.made_up import GB, new, ok, recorded, regressed, result, verdict_on

SOURCE = """
import json
from pathlib import Path

import pytest

VERDICTS = json.loads(Path("verdicts.json").read_text())

@pytest.mark.parametrize("number", range(len(VERDICTS)))
def test_it(number, record_property):
    record_property("gpumem", json.dumps(VERDICTS[number]))
"""
ARGUMENTS = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--gpumem-baseline")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def told(pytester, monkeypatch):
    """Writes a test for each of these results, which hands its verdict to the plugin."""
    for name in ("PY_COLORS", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "GITHUB_ACTIONS", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)

    def write(*results) -> None:
        pytester.makepyfile(SOURCE)
        plain = json.dumps([to_plain(one.verdict) for one in results])
        (pytester.path / "verdicts.json").write_text(plain, encoding="utf-8")

    return write


def in_a_terminal(pytester, *arguments: str) -> str:
    child = pytester.spawn_pytest(" ".join([*ARGUMENTS, *arguments]), expect_timeout=120)
    text = child.read().decode()
    child.close()
    return text.replace("\r\n", "\n")


def test_a_run_without_a_finding_ends_with_the_accounting_line(told, pytester):
    told(ok(1), ok(2))
    lines = pytester.runpytest_inprocess(*ARGUMENTS).outlines
    assert [line for line in lines if "gpumem" in line and not line.startswith("plugins: ")] == ["gpumem: 2 gated"]


@pytest.mark.parametrize(("option", "rows"), [("-q", 0), ("-rN", 1), ("-v", 2)])
def test_how_much_is_shown_is_pytest_s_verbosity(told, pytester, option, rows):
    told(ok(1), new(2))
    lines = pytester.runpytest_inprocess(*ARGUMENTS, option).outlines
    assert sum(line.startswith("a.py::") for line in lines) == rows
    assert "gpumem: 1 gated, 1 new" in lines


def test_in_a_terminal_the_table_fits_and_has_colours(told, pytester, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "48")
    told(
        regressed("test_of_a_model_with_a_name_that_is_long[fp32-ckpt-blocks]"),
        ok("test_漢字漢字漢字漢字漢字漢字漢字漢字漢字"),
    )
    text = in_a_terminal(pytester, "--color=auto", "-v")
    table = text.partition(" gpumem =")[2].partition("\n")[2].partition("\n\n")[0].splitlines()
    assert ESCAPE.sub("", table[0]) == "test"
    assert max(cells(ESCAPE.sub("", line)) for line in table) <= 48
    assert any("\x1b[31mregressed\x1b[0m" in line for line in table)
    assert any("…" in line for line in table)
    assert "\x1b[31mgpumem: 2 gated, 1 regressed\x1b[0m" in text


def test_no_color_is_heard(told, pytester, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    told(regressed(1))
    text = in_a_terminal(pytester)
    assert "gpumem: 1 gated, 1 regressed" in text
    assert "\x1b[" not in text


def test_in_a_pipe_nothing_is_cut(told, pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = "test_" + "x" * 200
    told(regressed(name))
    lines = pytester.runpytest_inprocess(*ARGUMENTS).outlines
    assert any(line.startswith(f"a.py::{name} ") and line.endswith("regressed") for line in lines)


def test_a_stream_of_ascii_gets_what_it_can_show(told, pytester, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    timed = result(verdict_on({"peak_allocated": GB, "step_time": 0.000840}, None), test="test_漢")
    told(ok(1), timed, *(recorded(text) for name, text in TEXTS.items() if name != "long"))
    outcome = pytester.runpytest_subprocess(*ARGUMENTS, "-v")
    assert outcome.ret == 0
    assert outcome.stderr.str() == ""
    lines = outcome.outlines
    assert any(line.startswith(r"a.py::test_\u6f22 ") and " 840.00 us " in line for line in lines)
    rows = [line for line in lines if line.startswith("a.py::")]
    assert len(rows) == 2 + len(TEXTS) - 1
    assert all(re.search(r" 1\.00 GB .* (ok|recorded)$", row) for row in rows)


@pytest.mark.parametrize("options", [(), ("--gpumem-baseline",)], ids=["by itself", "gate"])
def test_a_session_that_finds_no_gpu_ends_with_the_ways_on(project, monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    project.write("def test_it(gpumem):\n    gpumem.measure(lambda: torch.ones(10))\n")
    result = project.run(*options, device="cuda")
    result.stdout.fnmatch_lines(
        [
            "gpumem: without a GPU, choose where steps run, here or as `device` in [[]tool.gpumem]:",
            "  --gpumem-device=emulated:h100 *",
            "  --gpumem-device=cpu *",
            "  --gpumem-device=auto *",
            "gpumem: 0 gated, 1 unmeasured (no CUDA device: *)",
        ]
    )
    result = project.run(*options, "--gpumem-update=new")
    assert "without a GPU" not in result.stdout.str()
