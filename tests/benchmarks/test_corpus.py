"""The corpus of regressions: its cases can be planted, its judge finds fault, and the command tells the score."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING

import corpus
import pytest
from corpus_judge import BrokenCase, Case, Refactoring, Shown, refactoring_shown, regression_shown, what_is_wrong
from corpus_project import CULPRIT, WRITTEN_FOR, Edit, EditError, Project

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pytest_gpumem.devices.cpu import CpuDevice

REGRESSIONS = [case for case in corpus.all_cases() if isinstance(case, Case)]
REFACTORINGS = [case for case in corpus.all_cases() if isinstance(case, Refactoring)]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or not metadata.version("transformers").startswith(WRITTEN_FOR),
    reason=f"needs transformers {WRITTEN_FOR}: the edits are of its sources",
)


def named(name: str, model: str = "gpt") -> Case:
    (found,) = (case for case in REGRESSIONS if (case.name, case.model) == (name, model))
    return found


ONE_HOT = named("one-hot targets")


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with corpus.open_device() as device:
        yield device


@pytest.fixture(scope="module")
def shown() -> Shown:
    """What the case `ONE_HOT` shows."""
    with corpus.open_device() as device:
        return regression_shown(ONE_HOT, device)


# The corpus


def test_there_are_enough_cases_of_each_model():
    assert len(REGRESSIONS) >= 24
    assert len(REFACTORINGS) >= 6
    for cases in (REGRESSIONS, REFACTORINGS):
        assert {case.model for case in cases} == {"gpt2", "llama", "bert", "vit", "gpt", "convnet"}
        names = [(case.model, case.name) for case in cases]
        assert len(set(names)) == len(names)


@needs_transformers
@pytest.mark.parametrize("case", REGRESSIONS, ids=lambda case: f"{case.model}-{case.name}")
def test_every_regression_fits_its_source_and_has_a_line_to_answer_for(case: Case, tmp_path: Path):
    before, after = Project(tmp_path / "before", case.library), Project(tmp_path / "after", case.library)
    before.write(case.given)
    after.write((*case.given, *case.edits))
    assert 1 <= len(after.culprits()) <= 2
    assert case.why or len(after.culprits()) == 1, "of several lines the case says why"
    for name in ("train", case.model):
        compile(after.path(name).read_text(encoding="utf-8"), name, "exec")


@needs_transformers
@pytest.mark.parametrize("refactoring", REFACTORINGS, ids=lambda case: f"{case.model}-{case.name}")
def test_every_refactoring_fits_its_source(refactoring: Refactoring, tmp_path: Path):
    project = Project(tmp_path)
    project.write((*refactoring.given, *refactoring.edits))
    compile(project.path(refactoring.model).read_text(encoding="utf-8"), refactoring.model, "exec")
    assert refactoring.edits or refactoring.moved


def test_a_culprit_is_named_as_a_composition_names_lines(tmp_path: Path):
    edit = Edit("gpt", "        x = self.token(tokens)", f"        pass  {CULPRIT}\n        x = self.token(tokens)")
    project = Project(tmp_path)
    project.write((edit,))
    (line,) = project.culprits()
    name, _, number = line.partition(":")
    assert name == "gpt.py"
    assert CULPRIT in project.path("gpt").read_text(encoding="utf-8").splitlines()[int(number) - 1]


def test_a_model_of_the_library_is_shown_by_its_place_in_the_library(tmp_path: Path):
    assert Project(tmp_path, library=True).shown("bert") == "transformers/models/bert/modeling_bert.py"
    assert Project(tmp_path, library=True).shown("train") == "train.py"
    assert Project(tmp_path).shown("bert") == "bert.py"


@pytest.mark.parametrize("old", ["no such line", "self"])
def test_an_edit_that_does_not_fit_one_place_is_refused(old: str, tmp_path: Path):
    with pytest.raises(EditError, match="expected 1"):
        Project(tmp_path).write((Edit("gpt", old, "x"),))


# The judge


def test_a_right_first_row_is_right_and_a_wrong_expectation_is_counted_wrong(shown: Shown):
    assert (shown.right, shown.wrong) == (True, "")
    first = shown.difference.changes[0].row
    assert {first.site} == shown.culprits
    assert what_is_wrong(ONE_HOT, replace(shown, culprits=frozenset({"gpt.py:1"}))) == "line"
    assert what_is_wrong(replace(ONE_HOT, modules=("head", "blocks.*")), shown) == "module"
    assert what_is_wrong(replace(ONE_HOT, reason="was bfloat16"), shown) == "reason"
    assert what_is_wrong(ONE_HOT, replace(shown, difference=replace(shown.difference, changes=()))) == "no row"


def test_what_is_in_a_later_row_does_not_count(shown: Shown):
    changes = shown.difference.changes
    other = changes[0]._replace(after=replace(changes[0].row, site="gpt.py:2"))
    swapped = replace(shown.difference, changes=(other, *changes))
    assert what_is_wrong(ONE_HOT, replace(shown, difference=swapped)) == "line"


def test_a_case_whose_peak_does_not_grow_is_broken(device: CpuDevice):
    with pytest.raises(BrokenCase, match=r"peak changed by \+0\.0%"):
        regression_shown(replace(ONE_HOT, edits=()), device)


# The command


def test_the_command_records_cases_and_prints_rows_and_score(capsys: pytest.CaptureFixture[str]):
    assert corpus.main(["--only", "class renamed"]) == 0
    assert "empty: 1 of 1" in capsys.readouterr().out
    assert corpus.main(["--only", "mask registered", "--show"]) == 0
    told = capsys.readouterr().out
    assert "right: blocks.*.attention at gpt.py:31" in told
    assert "gpt: mask registered as a buffer in every layer  +48" in told
    assert "buffer blocks.*.attention" in told
    assert "first row right: 1 of 1 (100%)" in told
    assert "empty" not in told


def command(monkeypatch: pytest.MonkeyPatch, results: Sequence[tuple[Case | Refactoring, Shown | Exception]]) -> int:
    """Run the command with these results in place of recordings. Its exit status."""
    pending = list(results)

    def next_result(*_: object) -> Shown:
        _, result = pending.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(corpus, "all_cases", lambda: [case for case, _ in results])
    monkeypatch.setattr(corpus, "shown_of", next_result)
    return corpus.main([])


@pytest.mark.parametrize(("wrong", "status", "score"), [(1, 0, "9 of 10 (90%)"), (2, 1, "8 of 10 (80%)")])
def test_a_score_below_nine_in_ten_fails_the_command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shown: Shown,
    wrong: int,
    status: int,
    score: str,
):
    results = [(ONE_HOT, replace(shown, wrong="line" if number < wrong else "")) for number in range(10)]
    assert command(monkeypatch, results) == status
    told = capsys.readouterr().out
    assert told.count("WRONG: line") == wrong
    assert f"first row right: {score}" in told


def test_a_refactoring_that_shows_a_change_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown: Shown
):
    assert command(monkeypatch, [(ONE_HOT, shown), (REFACTORINGS[0], replace(shown, wrong="not empty"))]) == 1
    assert "empty: 0 of 1" in capsys.readouterr().out


@pytest.mark.parametrize("error", [BrokenCase("its peak changed by +0.0%"), EditError("gpt has 0 places like 'x'")])
def test_a_broken_case_fails_the_command_and_the_others_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown: Shown, error: Exception
):
    assert command(monkeypatch, [(REGRESSIONS[0], error), (ONE_HOT, shown)]) == 1
    told = capsys.readouterr().out
    assert f"gpt2: softmax in fp32 is broken: {error}" in told
    assert "first row right: 1 of 1 (100%)" in told


def test_a_refactoring_that_moves_the_peak_is_not_empty(device: CpuDevice):
    result = refactoring_shown(Refactoring("none", "gpt", ONE_HOT.recipe, ONE_HOT.edits), device)
    assert result.wrong.startswith("the peak changed by ")


def test_a_word_without_cases_is_told(capsys: pytest.CaptureFixture[str]):
    assert corpus.main(["--only", "gpt5"]) == 2
    assert "no case has gpt5 in its name" in capsys.readouterr().err
