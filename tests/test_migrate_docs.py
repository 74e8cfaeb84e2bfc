"""docs/migrate, followed to the letter: what was there before runs without the plugin, and what comes after gates the same model.

The commands of a page are run as they stand there. A change that its limits let pass is then made in both.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests import preloaded
from tests.pages import FENCE, ROOT, read

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "migrate").glob("*.md"))
NEEDS = {"docs/migrate/pytest-benchmark.md": "pytest_benchmark", "docs/migrate/pytest-memray.md": "pytest_memray"}
GROWN = {
    "docs/migrate/asserts.md": ("2048", "2112"),
    "docs/migrate/golden-numbers.md": ("4 * width", "4 * width + 64"),
    "docs/migrate/pytest-benchmark.md": ("torch.nn.GELU()", "torch.nn.GELU(), torch.nn.Identity(), torch.nn.ReLU()"),
    "docs/migrate/pytest-memray.md": ("2048", "2112"),
}
"""A change that needs more, by page."""


class Part(NamedTuple):
    files: dict[str, str]
    commands: list[list[str]]


def part(page: str, heading: str) -> Part:
    """The files of a section, and the arguments of pytest that it runs; without any, it runs pytest alone."""
    text = re.split(rf"^## {heading}$", read(page), flags=re.MULTILINE)[1].partition("\n## ")[0]
    found = list(FENCE.finditer(text))
    lines = [line for one in found if one["language"] == "sh" for line in one["text"].splitlines()]
    return Part(
        {one["file"]: one["text"] for one in found if one["file"]},
        [shlex.split(line)[1:] for line in lines if line.startswith("pytest ")] or [[]],
    )


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def pytest_without_this(folder: Path, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    # What a benchmark is compared with is a run of the same code, on a machine that has more to do.
    arguments = [one.replace("mean:5%", "mean:100000%") for one in arguments]
    if any("benchmark" in one for one in arguments):
        arguments += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1", "--benchmark-calibration-precision=1"]
    environment = {
        **os.environ,
        **variables,
        "PYTEST_ADDOPTS": "-p no:gpumem -p no:randomly -p no:xdist -p no:cacheprovider",
    }
    return preloaded.run("-m", "pytest", *arguments, cwd=folder, env=environment)


# None of it is this project's: what comes after is what its pages are about.
@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES)
def test_what_was_there_before_runs_without_the_plugin_and_lets_a_small_growth_pass(page, tmp_path):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    before = part(page, "Before")
    write(tmp_path, {"memory.py": part("docs/migrate/asserts.md", "Before").files["memory.py"], **before.files})
    for arguments in before.commands:
        done = pytest_without_this(tmp_path, arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    source = (tmp_path / "test_before.py").read_text(encoding="utf-8")
    assert GROWN[page][0] in source
    (tmp_path / "test_before.py").write_text(source.replace(*GROWN[page]), encoding="utf-8")
    done = pytest_without_this(tmp_path, before.commands[-1])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_what_comes_after_gates_the_same_models_and_fails_at_that_growth(project, page):
    after = part(page, "After")
    write(project.path, after.files)
    for arguments in after.commands:
        result = project.run(*arguments)
        result.assert_outcomes(passed=result.parseoutcomes()["passed"])
    (store,) = project.store.glob("*/*")
    assert store.name == "test_after.py.toml"
    source = (project.path / "test_after.py").read_text(encoding="utf-8")
    (project.path / "test_after.py").write_text(source.replace(*GROWN[page]), encoding="utf-8")
    result = project.run(*after.commands[-1])
    result.assert_outcomes(failed=result.parseoutcomes()["failed"])
    result.stdout.fnmatch_lines(["* what grew *" if page not in NEEDS or "memray" in page else "* more operators *"])


def test_golden_numbers_that_were_too_small_are_red_until_they_are_updated(tmp_path):
    files = part("docs/migrate/golden-numbers.md", "Before").files
    memory = part("docs/migrate/asserts.md", "Before").files["memory.py"]
    write(tmp_path, {**files, "memory.py": memory, "golden_peaks.json": '{"forward-256": 1, "forward-512": 1}'})
    assert pytest_without_this(tmp_path, []).returncode == 1
    assert pytest_without_this(tmp_path, [], UPDATE_GOLDEN="1").returncode == 0
    assert (tmp_path / "golden_peaks.json").read_text(encoding="utf-8") == files["golden_peaks.json"].rstrip("\n")


@pytest.mark.parametrize("number", [8, pytest.param(192, marks=pytest.mark.thorough)])
def test_many_golden_numbers_become_one_file_in_which_each_is_gated(project, number):
    """192 are as many as fairscale keeps; a few show the same."""
    after = part("docs/migrate/golden-numbers.md", "After")
    source = after.files["test_after.py"]
    assert "[256, 512]" in source
    grid = source.replace("[256, 512]", f"range(64, 64 + {number})")
    write(project.path, {"test_after.py": grid})
    record, gate = after.commands
    project.run(*record).assert_outcomes(passed=number)
    (store,) = project.store.glob("*/*")
    kept = re.findall(r'^\[tests\."test_forward\[\d+\]"\.', store.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(kept) == number
    wider = "width + 64 * (width == 70)"
    wider_once = grid.replace("    make_model(width)(", f"    make_model({wider})(").replace(
        "torch.ones(256, width)", f"torch.ones(256, {wider})"
    )
    write(project.path, {"test_after.py": wider_once})
    result = project.run(*gate)
    result.assert_outcomes(passed=number - 1, failed=1)
    result.stdout.fnmatch_lines(["*test_forward?70?*"])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_was_what_comes_and_what_is_gained_and_lost(page):
    headings = re.findall(r"^## (.+)$", FENCE.sub("", read(page)), flags=re.MULTILINE)
    assert headings == ["Before", "After", "What is gained", "What is lost"]
