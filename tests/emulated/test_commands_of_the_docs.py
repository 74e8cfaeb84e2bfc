"""Each command of the docs that names a device runs on the emulated GPU; one for a GPU that is here runs on an emulated one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.emulated.processes import REPOSITORY, Processes
from tests.pages import FENCE

COMMAND = re.compile(r"^(?:\$ )?((?:gpumem|pytest|python) .*)$", re.MULTILINE)
NAMES_A_DEVICE = re.compile(r"--(?:gpumem-)?device[= ]|gpumem (?:emulate|fit) ")
LEFT_OUT = ("torchrun", "xpu", "example_project", "[--", "...", "cpu", "hf:meta-llama")
"""Of a command that is a synopsis, or of ranks, recipes, the CPU and models by name, which have tests of their own."""
RECORD = "pytest --gpumem-update=new --gpumem-device=emulated:h100"
PAGES = (
    "README.md",
    # Pages of commands have the examples of the help, about files of a project that is not here. They are parsed elsewhere.
    *sorted(
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "docs").rglob("*.md")
        if not path.name.startswith("command-")
    ),
    "example_project/README.md",
    "CONTRIBUTING.md",
)
TRAIN = """
import argparse
import torch


def train():
    options = argparse.ArgumentParser()
    options.add_argument("--batch", type=int, default=64)
    given = options.parse_args()
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(100):
        model(torch.ones(given.batch, 128, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train()
"""


def commands(page: str) -> list[str]:
    """The commands of a page that name a device, each once, as they are written but for comments."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    lines = [line for fence in FENCE.finditer(text) if not fence["file"] for line in COMMAND.findall(fence["text"])]
    lines = [re.sub(r"\s+#.*", "", line) for line in lines]
    return [
        *dict.fromkeys(
            line for line in lines if NAMES_A_DEVICE.search(line) and not any(word in line for word in LEFT_OUT)
        )
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """What the commands are run in: the project of docs/ci.md with its baselines, a script, and the example's models."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    for fence in FENCE.finditer((REPOSITORY / "docs" / "ci.md").read_text(encoding="utf-8")):
        name = fence["file"]
        if name in ("model.py", "test_model.py"):
            (folder / name).write_text(fence["text"], encoding="utf-8")
    shutil.copytree(REPOSITORY / "example_project" / "tiny_models", folder / "tiny_models")
    run(folder, RECORD)
    return folder


def run(folder: Path, command: str) -> None:
    program, *words = shlex.split(command)
    gpu = re.search(r"emulated:(\S+)", command)
    of = {"gpumem": Processes(folder).gpumem, "pytest": Processes(folder).pytest}[program]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = of(*words, gpu=gpu[1] if gpu else "h100", PATH=path)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def to_run() -> list[object]:
    """The commands, but for that which records: the fixture has run it. All GPUs take a minute, and some do as well."""
    here = [re.sub(r"(device[= ])cuda\b", r"\1emulated:h100", command) for page in PAGES for command in commands(page)]
    assert RECORD in here
    return [
        pytest.param(one, marks=pytest.mark.thorough) if "gpumem fit" in one and "--device" not in one else one
        for one in dict.fromkeys(here)
        if one != RECORD
    ]


@pytest.mark.parametrize("command", to_run())
def test_a_command_of_the_docs_that_names_a_device_runs(project, command):
    run(project, command)


def test_commands_of_each_kind_are_found():
    found = {command.split()[1] for page in PAGES for command in commands(page) if command.startswith("gpumem")}
    assert found == {"advise", "emulate", "fit", "run"}
