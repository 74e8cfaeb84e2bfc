"""``gpumem export``: from reports on disk to another tool's file, and what is said and returned when it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.tools.main import main
from pytest_gpumem.tools.report.export import export
from tests.exports.values import TIMED, called, from_utf8, report, result, timed
from tests.hostile import TEXTS

FORMATS = list(export.commands)
TEXT_FORMATS = [name for name in FORMATS if name != "tensorboard"]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write reports into this folder: ``written(a=report)`` is a.json."""
    monkeypatch.chdir(tmp_path)

    def write(**reports):
        for name, one in reports.items():
            Path(f"{name}.json").write_text(to_json(one), encoding="utf-8")

    return write


def run(*arguments, status=0):
    ended = CliRunner().invoke(main, ["export", *arguments])
    assert ended.exit_code == status, ended.output
    return ended


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_a_format_goes_to_standard_output_or_to_a_file_and_what_is_told_to_neither(written, name):
    written(a=TIMED)
    shown = run(name, "a.json")
    to_file = run(name, "a.json", "-o", "out")
    assert Path("out").read_bytes() == shown.stdout_bytes
    figures = 4 if name == "github-action-benchmark" else 5
    assert shown.stderr == to_file.stderr == f"{figures} figures of 1 test\n"
    assert to_file.stdout == ""


def test_a_folder_of_event_files_is_written(written):
    written(a=TIMED, b=replace(TIMED, ended="2026-11-22T16:20:05Z"))
    assert run("tensorboard", "a.json", "b.json", "-o", "runs").stderr == "10 figures of 2 tests\n"
    (events,) = Path("runs/nvidia-h100-80gb-hbm3").iterdir()
    assert events.stat().st_size > 0


def test_throughput_is_exported_on_its_own_for_the_action_that_takes_one_direction(written):
    written(a=TIMED)
    (entry,) = json.loads(run("github-action-benchmark", "--better=bigger", "a.json").stdout)
    assert entry["unit"] == "samples/s"


def test_what_is_told_of_hostile_texts_stays_in_its_line(written):
    written(a=report(result("test_a", timed(invalid="\x1b[31m\nError: no"))))
    assert run("bencher", "a.json").stderr.endswith("left out (\\x1b[31m\\nError: no)\n")


def test_metrics_can_be_chosen(written):
    written(a=TIMED)
    shown = run("openmetrics", "--metric=flops", "--metric", "retained", "a.json").stdout
    assert [one.name for one in text_string_to_metric_families(shown)] == ["gpumem_retained_bytes", "gpumem_flops"]


def test_shards_may_be_exported_together(written):
    written(a=TIMED, b=report(result("test_b", called()), result("test_c", unmeasured="no CUDA device")))
    shown = run("bencher", "a.json", "b.json")
    assert len(json.loads(shown.stdout)) == 2
    assert shown.stderr == "6 figures of 2 tests; 1 test without a figure\n"


def test_hostile_test_ids_come_through_a_report_and_a_file(written):
    texts = {name: text for name, text in TEXTS.items() if name != "long"}
    written(a=report(*(result(text, called()) for text in texts.values())))
    run("openmetrics", "a.json", "-o", "out.txt")
    (family,) = text_string_to_metric_families(Path("out.txt").read_bytes().decode())
    ids = {from_utf8(sample.labels["test"]) for sample in family.samples}
    assert ids == {f"tests/test_a.py::{text}" for text in texts.values()}


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_of_nothing_is_an_error_and_leaves_no_file(written, name):
    written(a=report(result("test_a", unmeasured="no CUDA device")))
    ended = run(name, "a.json", "-o", "out", status=2)
    assert ended.stderr == "Error: there is no figure in a.json: 1 test has no figure (no CUDA device)\n"
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "a.json: it is empty"),
        (b"\xff\xfe", "a.json is not a JSON report of pytest-gpumem, because it is not UTF-8"),
        (b"{}", "a.json: it is JSON, but not a report of pytest-gpumem"),
    ],
)
def test_a_file_that_is_no_report_is_an_error_that_names_it(written, text, said):
    Path("a.json").write_bytes(text)
    assert said in run("openmetrics", "a.json", status=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bencher"], "Missing argument 'REPORT.json...'"),
        (["bencher", "none.json"], "there is no file none.json"),
        (["benchr", "a.json"], "no such format: benchr; did you mean 'bencher'?"),
        (["tensorboard", "a.json"], "Missing option '-o'"),
        (["bencher", "--metric=peak", "a.json"], "'peak' is not one of 'peak_allocated'"),
        (["bencher", "a.json", "./a.json"], "./a.json is given twice, also as a.json"),
        (["github-action-benchmark", "--metric=throughput", "a.json"], "add --better=bigger"),
        (["bencher", "a.json", "-o", "a.json/out.json"], "File exists"),
        (["tensorboard", "a.json", "-o", "runs", "--step=commits"], "the commits up to abc1234 cannot be counted"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(written, arguments, said):
    written(a=TIMED)
    assert said in run(*arguments, status=2).stderr


def test_the_report_of_a_real_session_can_be_exported(project):
    project.write("@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1000)\n")
    project.run("--gpumem-report=report.json").assert_outcomes(passed=1)
    figures = json.loads(run("github-action-benchmark", str(project.path / "report.json")).stdout)
    (peak,) = (one for one in figures if one["name"].endswith(": peak_allocated"))
    assert peak["name"].startswith("test_it.py::test_it (call) @ cpu-")
    assert peak["value"] == 4000


def test_a_format_has_a_help_text_that_says_what_reads_it():
    for name, command in export.commands.items():
        text = command.get_help(click.Context(command, info_name=name))
        assert "REPORT.json..." in text
        assert len(command.help.splitlines()[0]) > 20
