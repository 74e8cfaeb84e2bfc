"""Figures and pictures of docs/concepts are those of runs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import statistics

import pytest

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.interference import PACE
from pytest_gpumem.judging.baselines.format import parse
from pytest_gpumem.judging.times.intervals import ratio_to_runs
from pytest_gpumem.reporting.reports.explanation import PLURALS
from tests.pages import ROOT, blocks, blocks_of, read
from tests.test_example_project import OF_THE_PAGES

MEASURING, COMPOSITION, VERDICTS, STEP_TIME = (
    f"docs/concepts/{name}.md" for name in ("measuring", "composition", "verdicts", "step-time")
)


def row_of(page: str, beginning: str) -> list[str]:
    """The cells of the only row of a page's tables that begins so, without its first cell."""
    (found,) = re.findall(rf"^\| {re.escape(beginning)} \| (.*) \|$", read(page), flags=re.MULTILINE)
    return [cell.strip() for cell in found.split(" | ")]


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw_pictures", ROOT / ".ci" / "draw_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagrams_are_those_that_the_script_draws(drawing):
    for name, text in drawing.pictures().items():
        assert read(f"docs/images/{name}") == text, "run `python .ci/draw_pictures.py`"


@OF_THE_PAGES
def test_the_picture_of_a_step_and_its_table_come_from_a_recorded_step(drawing, project):
    shutil.copytree(ROOT / "example_project", project.path, dirs_exist_ok=True)
    project.run(drawing.TEST, "--gpumem-explain=always", "--gpumem-artifacts=recorded", separate=True).assert_outcomes(
        passed=1
    )
    timeline = drawing.timeline_in(project.path / "recorded")
    assert read("docs/images/over-the-step.svg") == drawing.over_the_step(timeline), "run `python .ci/draw_pictures.py`"
    for category, series in timeline.categories.items():
        if series[timeline.peak]:
            nbytes, share, _ = row_of(COMPOSITION, PLURALS.get(category, category))
            digits = 2 if category == "input" else 1
            at_peak = series[timeline.peak]
            assert (nbytes, share) == (
                format_bytes(at_peak),
                f"{100 * at_peak / timeline.total[timeline.peak]:.{digits}f} %",
            )


@OF_THE_PAGES
def test_the_peaks_of_steps_are_those_of_the_examples(project):
    (example,) = (one.text for one in blocks_of(MEASURING) if one.file == "test_steps.py")
    (project.path / "test_steps.py").write_text(example, encoding="utf-8")
    project.run("--gpumem-update=new").assert_outcomes(passed=3)
    (text,) = project.stored().values()
    stored = {f"{key.test} {key.name}": one for key, one in parse(text, "test_steps.py").items()}
    sgd, adamw = (stored[f"test_optimizers {name}"].metrics for name in ("sgd", "adamw"))
    assert row_of(MEASURING, "`sgd`")[1] == f"{format_bytes(sgd['peak_allocated'])} in each"
    assert row_of(MEASURING, "`adamw`")[1] == f"{format_bytes(adamw['peak_allocated'])} in each"
    # In the first step AdamW has as little state as SGD.
    told = f"forward peaks at {format_bytes(sgd['peak_forward'])}, because AdamW has no state yet. From the second step on it is "
    assert told + format_bytes(adamw["peak_forward"]) in row_of(MEASURING, "`adamw`")[2]
    differ = stored["test_batches_that_differ measure"]
    low, middle, high = map(
        format_bytes, (min(differ.step_peaks), statistics.median_low(differ.step_peaks), max(differ.step_peaks))
    )
    page = " ".join(read(MEASURING).split())
    assert (
        f"differ from step to step: between {low} and {high} in {len(differ.step_peaks)} steps, median {middle}" in page
    )
    growth = stored["test_a_list_of_outputs measure"].metrics["growth"]
    assert row_of(MEASURING, "a list of outputs")[1] == f"{format_bytes(growth)} more in each"
    assert f"= {growth:,} bytes per step" in page


CHANGES = {
    "none": ("", ""),
    "hidden layer of 4096": ("2048", "4096"),
    "hidden layer of 1024": ("2048", "1024"),
    "batch of 512": ("gpumem.train_step(model, torch.ones(256", "gpumem.train_step(model, torch.ones(512"),
    "batch of 64": ("gpumem.train_step(model, torch.ones(256", "gpumem.train_step(model, torch.ones(64"),
    "`optimizer=torch.optim.SGD`": ("loss=lambda", "optimizer=torch.optim.SGD, loss=lambda"),
    '`max_memory="40 MB"`': ("def test_train", '@pytest.mark.gpumem(max_memory="40 MB")\ndef test_train'),
    '`name="x"`': ("loss=lambda", 'name="x", loss=lambda'),
    "the test is called `test_training`": ("test_train_step", "test_training"),
}
"""What is replaced in the README's test, by what."""


@OF_THE_PAGES
def test_one_test_has_the_verdicts_of_the_page(project):
    (source,) = (one.text for one in blocks("python") if (one.page, one.section) == ("README.md", "Start with a test"))
    path = project.path / "test_mlp.py"
    path.write_text(source, encoding="utf-8")

    def shown() -> tuple[str, str, str]:
        """The peak and the verdict in the table of the run, and all that it says."""
        result = project.run("--gpumem-baseline", "-v", "-k", "train")
        (line,) = (one for one in result.outlines if re.match(r"test_mlp\.py::test_train\w+  +\d", one))
        return *re.search(r"  (\d+\.\d+ MB).*  (\w[\w ]*)$", line).groups(), "\n".join(result.outlines)

    assert list(shown()[:2]) == [cell.strip("`") for cell in row_of(VERDICTS, "the store is empty")[:2]]
    project.run("--gpumem-update=new").assert_outcomes(passed=2)
    for change, (old, new) in CHANGES.items():
        assert old in source
        path.write_text(source.replace(old, new), encoding="utf-8")
        peak, verdict, text = shown()
        expected_peak, expected, because = row_of(VERDICTS, change)
        assert peak == expected_peak
        if expected == "`missing`":  # told of the test, beside the new measurement
            assert "1 missing" in text
        else:
            assert verdict == expected.strip("`").replace("_", " ")
        assert [one for one in re.findall(r"[+-]\d+\.\d %|`(another workload: .*)`", because) if one not in text] == []


def test_intervals_and_factors_of_the_page_on_time_are_those_of_the_package():
    for runs in (1, 3, 10):
        first, outcome, second, other = row_of(STEP_TIME, str(runs))
        for milliseconds, shown, verdict in ((45.90, first, outcome), (1.1 * 38.12, second, other)):
            interval = ratio_to_runs((milliseconds,) * 12, (38.12,) * runs)
            assert f"({shown})" in str(interval)
            slower = interval.low > 1 + METRICS["step_time"].tolerance.relative
            assert verdict == ("`regressed`" if slower else "`uncertain`")
    assert f"1 / 0.87^{PACE} = {0.87**-PACE:.2f}" in read(STEP_TIME)
    assert f"{124.31 / 46.02:.2f} / {0.87**-PACE:.2f} = {124.31 / 46.02 * 0.87**PACE:.2f}" in " ".join(
        read(STEP_TIME).split()
    )
