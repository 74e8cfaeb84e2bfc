"""``gpumem why``: what a session had to say of one test, from the report that pytest's cache keeps."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pytest_gpumem.judging.gate.verdict import Cell
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.reporting.reports.merging import merge_reports
from pytest_gpumem.reporting.reports.session_report import SessionReport, Terms
from pytest_gpumem.reporting.reports.why import why_lines
from pytest_gpumem.tools.main import main
from tests.hostile import TEXTS
from tests.reports.made_up import GB, cell, explained, ok, recorded, regressed, result, verdict_on

KEPT = ".pytest_cache/d/gpumem/report.json"
CACHE = ("-p", "cacheprovider")
TESTS = """
N = 1000


def test_grown(gpumem):
    model = torch.nn.Sequential(torch.nn.Linear(N, 64), torch.nn.Linear(64, 8))
    gpumem.train_step(model, torch.ones(8, N), loss=lambda out, batch: out.sum())


def test_fine(gpumem):
    gpumem.measure(lambda: torch.ones(50_000))


@pytest.mark.gpumem
def test_skipped():
    pytest.skip("no weights here")


def test_plain():
    pass
"""


@pytest.fixture(scope="module")
def gated_once(tmp_path_factory):
    """A folder that is still empty: the first test that needs it fills it, and the others copy it."""
    return tmp_path_factory.mktemp("gated")


@pytest.fixture
def gated(project, gated_once):
    """A project of which a gate has run, with its output under -vv."""
    output = gated_once / "output"
    if output.exists():
        shutil.copytree(gated_once, project.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        return project, output.read_text(encoding="utf-8")
    project.write(TESTS)
    assert project.run("--gpumem-update=new").ret == 0
    project.write(TESTS.replace("N = 1000", "N = 3000"))
    said = project.run("--gpumem-baseline", "-vv", *CACHE).stdout.str()
    shutil.copytree(project.path, gated_once, dirs_exist_ok=True)
    output.write_text(said, encoding="utf-8")
    return project, said


def why(project, *args, folder=None, ends=0):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder or project.path)
        done = CliRunner().invoke(main, ["why", *args], catch_exceptions=False)
    assert done.exit_code == ends, done.output
    return done.stdout if ends == 0 else done.stderr


def session(*results, **more) -> SessionReport:
    return SessionReport("2026-11-26T00:00:00Z", "0.1.0", terms=Terms(baseline=True), results=results, **more)


def texts(report, test="test_a", file="a.py"):
    return ["".join(span.text for span in line) for line in why_lines(report, file, test, Screen())]


def filled(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


# What is told


def test_a_failing_test_is_told_as_the_run_told_it(gated):
    project, output = gated
    told = why(project, "test_grown")
    failure = re.search(r"^_+ test_grown _+$\n(.*?)^=", output, re.MULTILINE | re.DOTALL)[1]
    assert failure in told
    assert "what grew" in failure
    # Its phases, and what its peak is made of.
    details = re.search(r"^test_it.py::test_grown$\n(  .*?)^\n", output, re.MULTILINE | re.DOTALL)[1]
    assert details in told
    assert "optimizer" in details
    assert filled(told)[0] == "test_it.py::test_grown: regressed"
    assert "\ntest_it.py:9\n" in told
    assert re.search(r"^from the session that ended 20\S+ \S+ UTC.*: --gpumem-baseline$", told, re.MULTILINE)


SHARED = """
class Model(torch.nn.Module):
    def forward(self, x):
        return [x + 1 for _ in range(N)]


@pytest.mark.parametrize("n", [1000, 2000])
def test_it(gpumem, n):
    gpumem.infer_step(Model(), torch.ones(n, 1000))
"""


def test_a_failure_that_the_run_shortened_is_told_in_full(project):
    project.write(f"N = 1\n{SHARED}")
    assert project.run("--gpumem-update=new").ret == 0
    project.write(f"N = 3\n{SHARED}")
    output = project.run("--gpumem-baseline", *CACHE).stdout.str()
    short = re.search(r"^_+ test_it\[2000\] _+$\n(.*?)^[=_]", output, re.MULTILINE | re.DOTALL)[1]
    assert "-vv shows the full text" in short
    assert "what grew" not in short
    whole = project.run("--gpumem-baseline", "-vv").stdout.str()
    told = why(project, "*[2000]")
    assert "what grew" in told
    assert re.search(r"^_+ test_it\[2000\] _+$\n(.*?)^[=_]", whole, re.MULTILINE | re.DOTALL)[1] in told


def test_a_passing_test_is_told_with_its_figures(gated):
    told = why(gated[0], "test_fine")
    assert filled(told)[0] == "test_it.py::test_fine: ok"
    (row,) = (line for line in filled(gated[1]) if line.startswith("test_it.py::test_fine") and line.endswith("ok"))
    cells = row.split()
    assert cells[:3] == next(
        line.split()[:3] for line in filled(told) if line.endswith("ok") and line != filled(told)[0]
    )
    assert "test_grown" not in told


def test_an_unmeasured_test_is_told_with_the_reason(gated):
    told = filled(why(gated[0], "test_skipped"))
    assert told[0] == "test_it.py::test_skipped: unmeasured"
    assert "not measured: it was skipped" in told


def test_a_test_that_is_not_measured_is_none_of_the_report(gated):
    error = why(gated[0], "test_plain", ends=2)
    assert error.startswith(
        "Error: none of the 3 measured tests in the last session matches 'test_plain'; there is test_it.py"
    )


def test_a_test_that_did_not_finish_is_told_as_such():
    report = session(ok("test_a"), not_run=(("a.py", "test_b"),))
    assert texts(report, "test_b")[:3] == ["a.py::test_b: not run", "", "The test was selected, but did not finish"]


def test_a_test_that_failed_by_itself_is_told_as_such():
    one = result(verdict_on({"peak_allocated": GB}, None), failed_by_itself=True)
    told = texts(session(replace(one, passed=False, failed=True, failed_in="call")))
    assert told[0] == "a.py::test_a: failed by itself"
    assert "The test itself failed" in told


def test_the_whole_text_of_a_failure_is_told_line_by_line():
    one = regressed()
    failed = replace(one, verdict=replace(one.verdict, failure="Memory regressed\n\n  metric  now"))
    assert texts(session(failed))[1:5] == ["", "Memory regressed", "", "  metric  now"]


def test_what_a_peak_is_made_of_is_told():
    told = "\n".join(texts(session(explained())))
    assert "5.00 GB at the peak" in told
    assert "blocks.*.attn" in told


def test_a_test_of_a_matrix_is_told_with_all_of_the_matrix():
    report = session(cell("fp32", 0, 4 * GB), cell("amp-bf16", 1, 2 * GB), recorded("test_other"))
    told = texts(report, "test_matrix[amp-bf16]")
    assert sum("a.py::test_matrix" in line for line in told) == 3  # its title, its row, and the matrix
    assert any(line.startswith("amp-bf16 ") and "50" in line for line in told)
    assert any(line.startswith("fp32 ") for line in told)
    assert "test_other" not in "\n".join(told)
    assert Cell("a.py::test_matrix", "fp32", 0) == report.results[0].verdict.cell


def test_a_merged_report_tells_both_devices_of_a_test():
    one = ok("test_a")
    there = one.verdict.verdicts[0]
    environment = replace(there.measurement.environment, slug="a100", device="NVIDIA A100")
    other = replace(there, measurement=replace(there.measurement, environment=environment))
    whole = merge_reports([session(one), session(replace(one, verdict=replace(one.verdict, verdicts=(other,))))])
    told = texts(whole)
    assert told.count("a.py::test_a: ok") == 2
    assert any("on NVIDIA A100" in line for line in told)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_of_tests_break_out_of_no_line(tmp_path, text):
    name = f"test_{text.replace(chr(0), '')}"
    one = result(verdict_on({"peak_allocated": GB}, None, notes=(text,)), test=name)
    (tmp_path / "report.json").write_text(to_json(session(replace(one, verdict=replace(one.verdict, failure=text)))))
    done = CliRunner().invoke(main, ["why", "a.py", "--report", str(tmp_path / "report.json")])
    assert done.exit_code == 0, done.output
    assert all(line.isprintable() and not line.startswith(("::", "##[")) for line in done.output.splitlines())


# Which test


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(to_json(session(*(ok(name) for name in ("test_a", "test_a[1]", "test_b", "test_bb")))))
    return path


def of_report(report, test):
    return CliRunner().invoke(main, ["why", test, "--report", str(report)])


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("a.py::test_a", "test_a"),
        ("test_bb", "test_bb"),
        ("*_a[[]1]", None),
        ("*a[1]", "test_a[1]"),
        ("a.py::*bb (call)", "test_bb"),
    ],
)
def test_a_test_is_named_by_its_id_a_part_of_it_or_a_pattern(report, name, test):
    done = of_report(report, name)
    if test is None:
        assert done.exit_code == 2
    else:
        assert done.exit_code == 0, done.output
        assert done.output.startswith(f"a.py::{test}: ok\n")


def test_several_tests_are_listed(report):
    done = of_report(report, "test_b")
    assert done.exit_code == 2
    assert done.output.splitlines() == [
        "Error: 'test_b' matches 2 tests; choose one of them:",
        "  a.py::test_b",
        "  a.py::test_bb",
    ]


def test_a_misspelt_test_is_told_with_the_nearest(report):
    done = of_report(report, "tset_bb")
    assert done.exit_code == 2
    assert done.output.startswith(
        f"Error: none of the 4 measured tests in {report} matches 'tset_bb'; there is a.py::test_bb"
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"format": 1}', '{"format": 2, "terms": {}}', "\x00\xff", "[" * 100_000]
)
def test_a_file_that_is_no_report_is_told_with_its_name(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="latin-1")
    done = of_report(path, "test_a")
    assert done.exit_code == 2
    assert done.output.startswith(f"Error: {path}")
    assert len(done.output) < 1000


def test_a_file_that_is_not_there_is_told_with_what_writes_it(tmp_path):
    done = of_report(tmp_path / "no.json", "test_a")
    assert done.exit_code == 2
    assert "--gpumem-report=" in done.output


# What is kept


def test_a_report_is_found_from_a_folder_within_the_project(gated):
    project, _ = gated
    project.settings("[tool.pytest.ini_options]\n")
    folder = project.path / "docs" / "deep"
    folder.mkdir(parents=True)
    assert why(project, "test_fine", folder=folder).startswith("test_it.py::test_fine: ok\n")
    assert not (folder / ".pytest_cache").exists()


def test_a_session_that_ran_no_measured_test_keeps_the_report_before(gated):
    project, _ = gated
    before = (project.path / KEPT).read_bytes()
    for options in (["-k", "plain"], ["--collect-only"], ["-k", "no_such_test"]):
        project.run(*CACHE, "--gpumem-baseline", *options)
        assert (project.path / KEPT).read_bytes() == before
    project.run(*CACHE, "-k", "fine")
    assert [one["verdict"]["test"] for one in json.loads((project.path / KEPT).read_text())["results"]] == ["test_fine"]


@pytest.mark.thorough
def test_the_whole_run_is_kept_where_workers_ran_it(project):
    project.write(TESTS)
    assert project.run("-n1", *CACHE, "-k", "fine or skipped", separate=True).ret == 0
    assert why(project, "test_fine").startswith("test_it.py::test_fine: recorded\n")


def test_another_folder_of_the_cache_is_found(project, monkeypatch):
    monkeypatch.setenv("WHERE", "build")
    project.settings('[tool.pytest.ini_options]\ncache_dir = "$WHERE/cache"\n')
    project.write(TESTS)
    project.run(*CACHE)
    assert (project.path / "build" / "cache" / "d" / "gpumem" / "report.json").is_file()
    assert why(project, "test_fine").startswith("test_it.py::test_fine")


def test_without_a_cache_nothing_is_kept_and_the_sentence_says_what_writes_a_report(project):
    project.settings('[tool.pytest.ini_options]\naddopts = "-p no:cacheprovider"\n')
    project.write(TESTS)
    assert project.run().ret == 0
    assert not (project.path / ".pytest_cache").exists()
    error = why(project, "test_fine", ends=2)
    assert error == (
        "Error: no report is kept, because pytest's cache is switched off (-p no:cacheprovider): "
        "`pytest --gpumem-report=FILE.json` writes one for `gpumem why test_fine --report FILE.json`\n"
    )


def test_where_no_session_ran_the_sentence_says_what_to_run(project):
    error = why(project, "test_fine", ends=2)
    assert "`pytest --gpumem-baseline` and any other session with a measured test keep a report there" in error
    assert not (project.path / ".pytest_cache").exists()


@pytest.mark.parametrize("what", ["the folder is a file", "the cache is a file", "full"])
def test_a_cache_that_cannot_be_written_fails_no_session_and_keeps_no_older_report(project, monkeypatch, what):
    project.write(TESTS)
    project.run(*CACHE)
    kept = project.path / KEPT
    assert kept.is_file()
    if what == "full":

        def full(*_args, **_named):
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr("pytest_gpumem.plugin.session.cached_report.write_atomically", full)
    else:
        folder = kept.parent if what == "the folder is a file" else project.path / ".pytest_cache"
        folder.rename(project.path / "away")
        folder.write_text("")
    result = project.run(*CACHE, "-W", "ignore::pytest.PytestCacheWarning")
    assert result.ret == 0
    assert not kept.exists()


def test_a_corrupt_report_is_told_with_its_file(gated):
    project, _ = gated
    path = project.path / KEPT
    path.write_text(path.read_text()[:200])
    error = why(project, "test_fine", ends=2)
    assert error.startswith(f"Error: {path}: it is cut off after ")


def test_a_report_that_is_named_is_read_in_place_of_the_kept_one(gated):
    project, _ = gated
    project.run("-k", "skipped", f"--gpumem-report={project.path / 'other.json'}")
    assert why(project, "test_skipped", "--report", "other.json").startswith("test_it.py::test_skipped: unmeasured")
    assert "of the 1 measured test in other.json" in why(project, "test_fine", "--report", "other.json", ends=2)
