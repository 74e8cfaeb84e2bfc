"""Lines of the user's code: which frame a site is of, and which frames are passed over."""

from __future__ import annotations

import sys
import textwrap
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pytest_gpumem
from pytest_gpumem.measuring.explain.sites import MOST_CALLERS, Site, Sites

if TYPE_CHECKING:
    from collections.abc import Callable


class Code:
    """Functions that are written into files under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sites = Sites(root)

    def calling(self, path: str | Path, line: str = "return next()", name: str = "call") -> Callable[..., Any]:
        """``call(next)`` in a file at ``path`` (from the root, unless it is absolute), which does so in its line 2."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"def {name}(next):\n    {line}\n", encoding="utf-8")
        scope: dict[str, Any] = {}
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
        return scope[name]

    def here(self) -> Site:
        """The site of whoever calls this, without callers."""
        return self.sites.caller_site(2)._replace(callers=())

    def callers(self) -> tuple[str, ...]:
        """The callers of whoever calls this, as far as the project's or a library's."""
        return tuple(line for line in self.sites.caller_site(2).callers if "test_sites.py" not in line)


@pytest.fixture
def code(tmp_path: Path) -> Code:
    return Code(tmp_path / "project")


INSTALLED = "venv/lib/python3.11/site-packages"


def test_a_file_of_the_project_is_told_from_its_root(code):
    assert code.calling("models/gpt.py")(code.here) == Site("models/gpt.py:2", "")


def test_whoever_runs_pytest_has_not_called_what_a_test_without_a_file_calls(code):
    library = code.calling(f"{INSTALLED}/transformers/models/gpt2.py")
    pytests = code.calling(f"{INSTALLED}/_pytest/python.py", name="pytest_pyfunc_call")
    script = code.calling("bin/pytest")
    assert script(partial(pytests, partial(library, code.here))) == Site("", "transformers/models/gpt2.py:2")


def test_the_innermost_frame_of_the_project_is_the_site(code):
    model, train = code.calling("model.py"), code.calling("train.py")
    assert train(partial(model, code.here)).user == "model.py:2"


def test_a_library_is_shown_beside_the_users_line_from_its_installed_folder(code):
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


def test_the_frames_between_the_users_line_and_the_allocating_line_are_its_callers(code):
    user = code.calling("train.py")
    model = code.calling(f"{INSTALLED}/models/gpt.py")
    helper = code.calling(f"{INSTALLED}/helpers/ops.py")
    assert user(partial(model, partial(helper, code.callers))) == ("models/gpt.py:2", "train.py:2")
    assert user(partial(helper, code.callers)) == ("train.py:2",)


def test_the_users_frames_above_the_innermost_are_callers(code):
    train, wrapper, helper = code.calling("train.py"), code.calling("wrappers.py"), code.calling("helper.py")
    assert train(partial(wrapper, partial(helper, code.callers))) == ("wrappers.py:2", "train.py:2")


def test_a_function_that_calls_itself_is_one_caller(code):
    train = code.calling("train.py")
    scope: dict[str, Any] = {}
    source = "def call(next, depth=0):\n    return next() if not depth else call(next, depth - 1)\n"
    exec(compile(source, str(code.root / "tree.py"), "exec"), scope)
    assert train(partial(scope["call"], code.callers, 300)) == ("tree.py:2", "train.py:2")


def test_so_many_callers_are_kept_on_each_side_of_the_users_line(code):
    chain = code.callers
    for number in range(MOST_CALLERS + 4):
        chain = partial(code.calling(f"{INSTALLED}/deep/f{number}.py"), chain)
    for number in range(MOST_CALLERS + 4):
        chain = partial(code.calling(f"u{number}.py"), chain)
    found = chain()
    assert found[0] == "deep/f1.py:2"
    assert found[MOST_CALLERS - 1 : MOST_CALLERS + 2] == (f"deep/f{MOST_CALLERS}.py:2", "u0.py:2", "u1.py:2")
    assert len(found) == 2 * MOST_CALLERS + 1


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
        Path(pytest_gpumem.__file__).parent / "plugin" / "fixture.py",
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
    assert function(partial(Sites(link).caller_site, 1)).user == "model.py:2"


def test_who_called_backward_did_not_call_what_runs_in_it(code):
    backward = code.calling("train.py", "next.backward()")
    # Code that is nobody's, as of torch's own functions.
    scope: dict[str, Any] = {"seen": [], "here": code.here}
    exec(compile("def hook(grad):\n    seen.append(here())\n", "<generated>", "exec"), scope)
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(scope["hook"])
    backward((weight * 2).sum())
    assert scope["seen"] == [Site("", "")]


def install(code, name, version, modules=(), folder=INSTALLED):
    """Install the metadata of a package beside its code, as pip does."""
    info = code.root / folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    info.joinpath("top_level.txt").write_text("\n".join(modules))


def test_a_packages_line_begins_with_its_name_and_release_without_environment_path(code):
    install(code, "transformers", "4.38.2")
    model = code.calling(f"{INSTALLED}/transformers/models/llama/modeling_llama.py")
    assert code.calling("train.py")(partial(model, code.here)) == Site(
        "train.py:2", "transformers 4.38.2: models/llama/modeling_llama.py:2"
    )


def test_a_package_with_another_name_than_its_module_is_found_by_its_files(code):
    install(code, "scikit-image", "0.25.0", ["skimage"])
    install(code, "single-file", "1.0", ["onefile"])
    image, single = code.calling(f"{INSTALLED}/skimage/filters.py"), code.calling(f"{INSTALLED}/onefile.py")
    assert code.calling("train.py")(partial(image, code.here)).library == "scikit-image 0.25.0: skimage/filters.py:2"
    assert code.calling("train.py")(partial(single, code.here)).library == "single-file 1.0: onefile.py:2"


def test_the_release_is_that_of_the_folder_which_the_code_lies_in(code):
    """One environment may lie on top of another that has another release of the same package."""
    above = "above/lib/python3.11/site-packages"
    install(code, "transformers", "4.38.2", folder=above)
    install(code, "transformers", "5.0.0")
    model = code.calling(f"{above}/transformers/models/gpt.py")
    assert code.calling("train.py")(partial(model, code.here)).library == "transformers 4.38.2: models/gpt.py:2"


def test_every_package_on_the_way_is_noted_and_none_that_only_called_the_users_code(code):
    for name in ("peft", "transformers", "trainers"):
        install(code, name, "1.0")
    model, adapter, trainer = (
        code.calling(f"{INSTALLED}/{path}") for path in ("transformers/gpt.py", "peft/lora.py", "trainers/loop.py")
    )
    trainer(partial(code.calling("train.py"), partial(adapter, partial(model, code.here))))
    assert {package.name for package in code.sites.packages} == {"peft", "transformers"}


def test_a_recorded_call_stack_has_the_site_of_a_running_one(tmp_path):
    code = Code(tmp_path)

    def both():
        frames = [
            (frame.f_code.co_filename, line, frame.f_code.co_name)
            for frame, line in traceback.walk_stack(sys._getframe(1))
        ]
        return code.sites.caller_site(2), code.sites.site_of(frames)

    inner, outer = code.calling("model.py"), code.calling("train.py", name="main")
    running, recorded = outer(lambda: inner(both))
    assert running == recorded
    assert running.user == "model.py:2"
    assert "train.py:2" in running.callers


def test_generated_code_of_the_compiler_is_passed_over(tmp_path):
    code = Code(tmp_path / "project")
    generated = code.calling(tmp_path / "torchinductor_me" / "5x" / f"c5x2dqdf{'a2' * 22}.py")
    mine = code.calling("5x/c5x2.py")
    assert code.calling("train.py")(partial(generated, code.here)).user == "train.py:2"
    assert mine(code.here).user == "5x/c5x2.py:2"
