"""Each recipe has its patch, each patch its page, and a patch that does not apply says how to redo it."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.pages import blocks_of, read
from tests.recipes.recipes import ROOT, apply_patch, files_of, patch_of

RECIPES = sorted(path.stem for path in (ROOT / "docs/development").glob("add-*.md"))


def test_every_recipe_has_a_patch_and_every_patch_a_recipe():
    assert sorted(path.stem for path in patch_of("").parent.glob("*.patch")) == RECIPES
    assert len(RECIPES) == 6


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_links_its_patch_and_shows_code_from_it(name):
    page = f"docs/development/{name}.md"
    assert f"](../../tests/recipes/{name}.patch)" in read(page)
    added = re.findall(r"^\+(?!\+\+ )(.*)", patch_of(name).read_text(), flags=re.MULTILINE)
    shown = [line for block in blocks_of(page) if block.language == "python" for line in block.text.splitlines()]
    assert shown
    assert [line for line in shown if _code(line) not in _code("".join(added))] == []


def _code(text: str) -> str:
    """Return a text without spaces and commas, which depend on the length of a line and on its place in a table."""
    return re.sub(r"[\s,]", "", text)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_every_file_that_its_patch_changes(name):
    page = read(f"docs/development/{name}.md")
    assert {file for file in files_of(name) if file not in page} == set()


@pytest.mark.parametrize("name", RECIPES)
def test_git_applies_every_line_that_a_patch_adds(name):
    """A hunk whose header counts too few lines is cut short without an error."""
    patch = patch_of(name)
    done = subprocess.run(["git", "apply", "--numstat", patch], capture_output=True, text=True, check=True)
    applied = sum(int(line.split()[0]) for line in done.stdout.splitlines())
    assert applied == len(re.findall(r"^\+(?!\+\+ )", patch.read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_a_patch_that_does_not_apply_is_named_with_the_file_and_the_way_to_redo_it(tmp_path):
    (tmp_path / "pytest_gpumem/measuring/step_config").mkdir(parents=True)
    (tmp_path / "pytest_gpumem/measuring/step_config/checkpoint_kinds.py").write_text("changed = 1\n")
    with pytest.raises(ValueError, match=r"add-a-checkpointing-kind\.patch no longer applies") as error:
        apply_patch(tmp_path, "add-a-checkpointing-kind")
    assert "error: patch failed: pytest_gpumem/measuring/step_config/checkpoint_kinds.py:" in str(error.value)
    assert "git apply --3way --index tests/recipes/add-a-checkpointing-kind.patch" in str(error.value)


def test_a_patch_applies_in_a_folder_of_a_repository_too(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    folder = tmp_path / "copy"
    file = folder / "pytest_gpumem/reporting/reports/formats.py"
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / "pytest_gpumem/reporting/reports/formats.py").read_text())
    apply_patch(folder, "add-a-report-format")
    assert re.search(r"^    Format\(\"\.csv\",", file.read_text(), flags=re.MULTILINE)
