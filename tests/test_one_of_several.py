"""A new row as large as one that the baseline does not list: every output says that it is one of the two."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from pytest_gpumem.tools.main import main
from tests.pages import follows
from tests.pages import output as block_of

MODEL = """\
class Attention(torch.nn.Module):
    def __init__(self, first):
        super().__init__()
        self.to_k, self.to_v = (torch.nn.Linear(32, 32, bias=False) for _ in "kv")
        self.scale, self.first = torch.nn.Parameter(torch.ones(())), first

    def forward(self, x):
        scores = (x @ x.mT * self.scale).softmax(-1)
        keys = self.to_k(x)
        values = self.to_v(x)
        values = keys * values
        out = scores @ values
        PLANT
        return out + x


class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(Attention(first=True), Attention(first=False))
"""
TESTS = """\
from model import Model


@pytest.mark.parametrize("samples", [3, 4])
def test_it(gpumem, samples):
    gpumem.train_step(Model, torch.ones(samples, 512, 32), loss=lambda out, _: out.sum())
"""
IN_THE_GUIDE = block_of("docs/guide/read-a-failure.md", "  one of these 2 rows")
TO_V, PLANTED = "model.py:14", "model.py:16"
FIRST, SECOND = "test_it.py::test_it[3]", "test_it.py::test_it[4]"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return a folder for the project as the first test has recorded it, which others copy."""
    return tmp_path_factory.mktemp("kept") / "recorded"


@pytest.fixture
def red(project, kept, monkeypatch):
    """Return a function that gates a planted line, with baselines of some tests that do not list ``to_v``."""
    monkeypatch.chdir(project.path)
    if kept.exists():
        shutil.copytree(kept, project.path, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        project.write(MODEL.replace("PLANT", "pass"), "model.py")
        project.write(TESTS)
        project.run("--gpumem-update=new").assert_outcomes(passed=2)
        shutil.copytree(project.path, kept)

    def red(*split):
        (store,) = (project.path / "gpumem-baselines").glob("*/*.toml")
        entries = re.split(r"(?=^\[tests)", store.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for number, entry in enumerate(entries):
            if any(f'"{test.partition("::")[2]}"' in entry for test in split):
                entries[number] = without_to_v(entry)
        store.write_text("".join(entries), encoding="utf-8")
        project.write(MODEL.replace("PLANT", "self.last_hidden = out if self.first else None"), "model.py")
        reports = [f"--gpumem-report=report.{ending}" for ending in ("json", "md", "html", "sarif")]
        result = project.run("--gpumem-baseline", *reports)
        result.assert_outcomes(failed=2)
        return "\n".join(result.outlines)

    return red


def without_to_v(entry):
    """Return an entry of the store whose first composition has ``to_v`` in the sum of smaller rows, as older versions had it."""
    row = re.search(r'^    "activation \| Model\.0\.to_v \| .* \| (\d+)",\n', entry, re.MULTILINE)
    entry = entry[: row.start()] + entry[row.end() :]
    return re.sub(
        r'"activation \|  \| smaller rows \|  \|  \| (\d+) x block \| (\d+)"',
        lambda rest: (
            f'"activation |  | smaller rows |  |  | {int(rest[1]) + 1} x block | {int(rest[2]) + int(row[1])}"'
        ),
        entry,
        count=1,
    )


def test_every_output_says_that_it_is_one_of_two_rows(red, project):
    output = red(FIRST, SECOND)
    explained = re.findall(r"what grew.*\n(.*)\n(.*)\n(.*)", output)
    assert len(explained) == 2
    for first, *rows in explained:
        assert first.split("  ")[1] == "one of these 2 rows"
        assert [re.search(r"model.py:\d+", row)[0] for row in rows] == [PLANTED, TO_V]
    why = CliRunner().invoke(main, ["why", FIRST, "--report", "report.json"]).output
    (folder,) = (project.path / "gpumem-baselines").glob("*/")
    compared = CliRunner().invoke(main, ["compare", folder.name, "report.json"]).output
    for text in (why, compared, *((project.path / f"report.{ending}").read_text("utf-8") for ending in ("md", "html"))):
        told = text.index("one of these 2 rows")
        assert told < text.index(PLANTED, told) < text.index(TO_V, told)
    plain = json.loads((project.path / "report.json").read_text("utf-8"))
    growth = plain["results"][0]["verdict"]["verdicts"][0]["growth"]
    assert [[row.split(" | ")[3] for row in change[3]] for change in growth["changes"]] == [[PLANTED, TO_V]]
    assert plain["causes"] == []
    for sarif in json.loads((project.path / "report.sarif").read_text("utf-8"))["runs"][0]["results"]:
        assert sarif["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "test_it.py"
    assert follows(IN_THE_GUIDE, output.splitlines())
    assert "not explained" not in output
    note = f"not certain: {TO_V} or {PLANTED}: peak allocated +458.75 kB in 2 tests: {FIRST} and 1 other"
    assert note in output.splitlines()


def test_the_cause_of_another_test_decides_between_two_rows(red, project):
    output = red(FIRST)
    assert "one of these 2 rows" in output
    (cause,) = json.loads((project.path / "report.json").read_text("utf-8"))["causes"]
    assert (cause["lines"], cause["tests"]) == ([PLANTED], [FIRST, SECOND])
    assert "not certain" not in output
