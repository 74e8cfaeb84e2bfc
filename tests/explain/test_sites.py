"""Lines of the user's code: which frame a site is of, and which frames are passed over."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import pytest_gpumem
from pytest_gpumem.explain.sites import Site, Sites

if TYPE_CHECKING:
    from collections.abc import Callable


class Code:
    """Functions that are written into files under a folder: the first line of each file is its line 1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sites = Sites(root)

    def function(self, path: str | Path, source: str, name: str = "call") -> Callable[..., Any]:
        """The function called ``name`` in a file at ``path`` (from the root, unless it is absolute)."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source).lstrip("\n"), encoding="utf-8")
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
        return scope[name]

    def calling(self, path: str | Path) -> Callable[..., Any]:
        """``call(next)`` in a file at ``path``, which calls ``next`` in its line 2."""
        return self.function(path, "def call(next):\n    return next()\n")

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


def test_the_line_is_that_of_the_call_and_not_of_the_function(code):
    function = code.function(
        "model.py",
        """
        def call(next):
            first = next
            second = first
            return second()
        """,
    )
    assert function(code.here).user == "model.py:4"


def test_a_root_that_is_reached_through_a_link_is_the_folder_behind_it(code, tmp_path):
    function = code.calling("model.py")
    link = tmp_path / "link"
    link.symlink_to(code.root)
    assert function(partial(Sites(link).here, 1)).user == "model.py:2"


def test_who_called_backward_did_not_call_what_runs_in_it(code):
    backward = code.function("train.py", "def call(loss):\n    loss.backward()\n")
    # Code that is nobody's, as of torch's own functions.
    scope: dict[str, Any] = {"seen": [], "here": code.here}
    exec(compile("def hook(grad):\n    seen.append(here())\n", "<generated>", "exec"), scope)
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(scope["hook"])
    backward((weight * 2).sum())
    assert scope["seen"] == [Site("", "")]


def test_what_the_users_code_in_backward_calls_is_its_own(code):
    function = code.function(
        "model.py",
        """
        def call(here, weight):
            class Double(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 2

                @staticmethod
                def backward(ctx, grad):
                    here()
                    return grad * 2

            return Double.apply(weight)
        """,
    )
    seen: list[Site] = []
    function(lambda: seen.append(code.sites.here(2)), torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [Site("model.py:9", "")]


def test_a_call_of_a_module_is_of_the_line_that_calls_it(code):
    forward = code.function(
        "model.py",
        """
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = torch.nn.Linear(2, 2)

            def forward(self, x):
                return self.fc(x)
        """,
        "Model",
    )
    seen: list[Site] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(code.sites.here(2))
            return func(*args, **(kwargs or {}))

    model, x = forward(), torch.ones(1, 2)
    with Calls():
        model(x)
    assert set(seen) == {Site("model.py:7", "")}
