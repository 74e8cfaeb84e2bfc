"""Lines of the user's code: which frame a site is of, and which frames are passed over."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pytest_gpumem
from pytest_gpumem.explain.sites import Site, Sites

if TYPE_CHECKING:
    from collections.abc import Callable


class Code:
    """Functions that are written into files under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sites = Sites(root)

    def calling(self, path: str | Path, line: str = "return next()") -> Callable[..., Any]:
        """``call(next)`` in a file at ``path`` (from the root, unless it is absolute), which does so in its line 2."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def call(next):\n    {line}\n", encoding="utf-8")
        scope: dict[str, Any] = {}
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
        return scope["call"]

    def here(self) -> Site:
        """The site of whoever calls this."""
        return self.sites.here(2)


@pytest.fixture
def code(tmp_path: Path) -> Code:
    return Code(tmp_path / "project")


INSTALLED = "venv/lib/python3.11/site-packages"


def test_a_file_of_the_project_is_told_from_its_root(code):
    assert code.calling("models/gpt.py")(code.here) == Site("models/gpt.py:2", "")


def test_the_innermost_frame_of_the_project_is_the_site(code):
    model, train = code.calling("model.py"), code.calling("train.py")
    assert train(partial(model, code.here)).user == "model.py:2"


def test_a_library_that_the_users_code_calls_is_told_beside_it_from_the_folder_it_is_installed_in(code):
    user, library = code.calling("train.py"), code.calling(f"{INSTALLED}/transformers/models/gpt2.py")
    assert user(partial(library, code.here)) == Site("train.py:2", "transformers/models/gpt2.py:2")


def test_of_several_frames_of_libraries_the_innermost_is_told(code):
    user = code.calling("train.py")
    trainer = code.calling(f"{INSTALLED}/trainers/loop.py")
    model = code.calling(f"{INSTALLED}/models/gpt.py")
    assert user(partial(trainer, partial(model, code.here))) == Site("train.py:2", "models/gpt.py:2")


def test_a_library_that_calls_back_into_the_users_code_is_not_beneath_it(code):
    user, library = code.calling("model.py"), code.calling(f"{INSTALLED}/trainers/loop.py")
    assert library(partial(user, code.here)) == Site("model.py:2", "")


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_what_is_installed_is_no_code_of_the_project_wherever_it_is_installed(code, folder):
    library = code.calling(f".venv/lib/{folder}/models/gpt.py")
    assert code.calling("train.py")(partial(library, code.here)).library == "models/gpt.py:2"


@pytest.mark.parametrize(
    "path",
    [
        f"{INSTALLED}/_pytest/python.py",
        f"{INSTALLED}/torch/nn/modules/module.py",
        Path(torch.__file__).parent / "nn" / "modules" / "module.py",
        Path(pytest_gpumem.__file__).parent / "fixture.py",
        Path(textwrap.__file__).parent / "contextlib.py",
        "<string>",
    ],
    ids=["pytest", "another torch", "torch", "ours", "stdlib", "generated"],
)
def test_frames_that_tell_nothing_are_passed_over(code, path):
    user = code.calling("train.py")
    scope: dict[str, Any] = {}
    # Not written: some of these files are there.
    file = str(path) if str(path).startswith(("/", "<")) else str(code.root / path)
    exec(compile("def call(next):\n    return next()\n", file, "exec"), scope)
    assert user(partial(scope["call"], code.here)) == Site("train.py:2", "")


def test_a_file_outside_of_the_root_is_shown_with_two_components(code, tmp_path):
    other = code.calling(tmp_path / "elsewhere" / "shared" / "layers.py")
    assert other(code.here) == Site("shared/layers.py:2", "")


def test_a_root_whose_name_another_folder_begins_with_is_not_that_folder(code, tmp_path):
    other = code.calling(tmp_path / "project-2" / "layers.py")
    assert other(code.here).user == "project-2/layers.py:2"


def test_a_root_that_is_reached_through_a_link_is_the_folder_behind_it(code, tmp_path):
    function = code.calling("model.py")
    link = tmp_path / "link"
    link.symlink_to(code.root)
    assert function(partial(Sites(link).here, 1)).user == "model.py:2"


def test_who_called_backward_did_not_call_what_runs_in_it(code):
    backward = code.calling("train.py", "next.backward()")
    # Code that is nobody's, as of torch's own functions.
    scope: dict[str, Any] = {"seen": [], "here": code.here}
    exec(compile("def hook(grad):\n    seen.append(here())\n", "<generated>", "exec"), scope)
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(scope["hook"])
    backward((weight * 2).sum())
    assert scope["seen"] == [Site("", "")]
