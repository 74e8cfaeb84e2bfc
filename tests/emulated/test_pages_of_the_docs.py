"""The files of the pages that come first measure something on a GPU, with the settings that stand there."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from tests.pages import blocks_of
from tests.workspaces import KEPT

PAGES = (
    "README.md",
    "docs/ci.md",
    *(f"docs/guide/{name}.md" for name in ("matrix", "relations", "scripts-and-loops", "start", "steps")),
    *(f"docs/migrate/{name}.md" for name in ("asserts", "golden-numbers", "pytest-benchmark", "pytest-memray")),
)
RULE = "conftest.py"
"""A rule for a suite, which would also hold for the files of other pages."""
RELATIONS, GRADIENTS = "test_relations_relations.py", "test_checkpointing_learns_the_same"
BEFORE = ("test_asserts_before.py", "test_golden_numbers_before.py")
"""Files of tests that run without the plugin."""
FROM_2_15_ON = {
    "test_asserts_before.py": {"20e6": "44_565_505"},
    "golden_peaks.json": {"2621440": "3670016", "5242880": "6291456"},
}
"""Limits and golden numbers in files, and those that hold if a peak includes the workspace of a product (torch 2.15)."""
OTHERS_TOOL = {"pytest-benchmark": "test_before.py", "pytest-memray": "test_before.py"}
"""Files of tests that need another plugin."""


@pytest.fixture
def files(tmp_path):
    """Write the files of all pages into one folder, since a session takes seconds to start. Tests have the page in their name."""
    for page in PAGES:
        stem = PurePosixPath(page).stem
        for block in blocks_of(page):
            if block.language != "python" and not (block.file or "").endswith(".json"):
                continue
            if not block.file or block.file == RULE or block.file == OTHERS_TOOL.get(stem):
                continue
            name = block.file.replace("test_", f"test_{stem.replace('-', '_')}_", 1)
            assert name == block.file or not (tmp_path / name).exists()
            (tmp_path / name).write_text(block.text, encoding="utf-8")
    return tmp_path


def test_the_first_pages_measure_all_their_tests_on_a_gpu_within_budget(processes, files):
    # Gradients are values, which an emulated GPU does not compute.
    done = processes.pytest("--gpumem-update=new", "--no-gpumem-time", "--deselect", f"{RELATIONS}::{GRADIENTS}")
    assert done.returncode == 0, done.stdout
    assert {
        line.partition(" ")[0] for line in done.stdout.splitlines() if line.startswith("test_") and " new" in line
    } >= {
        "test_README_mlp.py::test_forward",
        "test_README_mlp.py::test_train_step",
        "test_start_generate.py::TestInference::test_many",
        "test_asserts_after.py::test_forward",
    }
    assert "unmeasured" not in done.stdout
    assert len(list((files / "gpumem-baselines").rglob("test_*.toml"))) == len(list(files.glob("test_*"))) - len(BEFORE)


def test_what_was_there_before_asserts_something_of_a_gpu(processes, files):
    words = ["-p", "no:gpumem", "-p", "no:randomly", "-p", "no:cacheprovider", *BEFORE]
    run = f"import sys, pytest\nsys.exit(pytest.main({words}))"
    done = processes.run(run)
    if not KEPT:
        assert " 3 failed, 1 passed in " in done.stdout, done.stdout
        assert {*re.findall(r"assert (\d+) <", done.stdout)} == {"44565504", "3670016", "6291456"}
        for name, numbers in FROM_2_15_ON.items():
            source = (files / name).read_text(encoding="utf-8")
            for earlier, later in numbers.items():
                assert source.count(earlier) == 1
                source = source.replace(earlier, later)
            (files / name).write_text(source, encoding="utf-8")
        done = processes.run(run)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in BEFORE:
        source = (files / name).read_text(encoding="utf-8")
        (files / name).write_text(source.replace("2048", "8192").replace("4 * width", "16 * width"), encoding="utf-8")
    assert " 4 failed in " in processes.run(run).stdout
