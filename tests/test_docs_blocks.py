"""Every block of the pages is executed, or compared with a run, or has its reason here why it is not."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulated import test_commands_of_the_docs as emulated
from tests.pages import COMPARED, RUN, SHELL, SITE, Block, blocks, blocks_of, read
from tests.support.processes import run_job
from tests.test_ci_docs import BLOCKS as OF_CI

for _name in (
    "reports.test_failure",
    "reports.test_results",
    "test_docs_output",
    "test_example_project",
    "test_gpu_use",
    "test_one_of_several",
):
    importlib.import_module(f"tests.{_name}")  # they note what they run, and compare
SHOWN_PAGES = ["README.md", *(page for page in SITE if not page.startswith("docs/development/"))]
"""Pages for users. Those for development have tests of their own: tests/test_docs.py, tests/recipes."""
BLOCKS = [one for page in SHOWN_PAGES for one in blocks_of(page)]
OF_COMMANDS = "docs/reference/command"
"""Pages whose commands are examples of the help: each is parsed, and the command's own tests run it."""
FOLLOWED = ("docs/ci.md", "docs/github.md", "docs/runner.md", "docs/ci-elsewhere.md", "docs/migrate/")
"""Pages of which each command is run by a test of the page: tests/test_ci_docs.py, tests/test_migrate_docs.py."""
MINUTES = "starts pytest a dozen times, which takes minutes; tests/test_ab.py"
INDEX = "needs a package index"
ENVIRONMENT = "makes an environment from a package index; tests/test_install.py"
WORKERS = "starts workers that load torch; tests/test_workers.py, tests/test_packing.py"
NOT_RUN = {
    "gpumem ab main --max-slowdown": MINUTES,
    "gpumem ab main --setup": MINUTES,
    "gpumem ab --base-with": INDEX,
    "gpumem bisect --package transformers": INDEX,
    "gpumem merge shard-*.json --report - |": "a pipe of a shell; tests/test_streams.py",
    "gpumem bisect --good v1.2": "runs pytest in eight processes; tests/bisect",
    "pip install": INDEX,
    "python -m venv": INDEX,
    "python3 -m venv emulated": ENVIRONMENT,
    "sed -i -E": ENVIRONMENT,
    "pytest --gpumem-store=s3://": "needs a bucket; tests/baselines has one that is served here",
    "pytest --gpumem-model=": "fetches a configuration; tests/test_model_tests.py",
    "pytest -n": WORKERS,
    "torchrun --nproc-per-node=4": "starts four ranks; tests/ranks, and one rank of its test below",
    "tensorboard --logdir": "serves until it is stopped",
    "gpumem advise hf:": "fetches a configuration; tests/emulated/test_advise_by_name.py",
    "gpumem doctor": "tells of this machine; tests/test_doctor.py",
}
"""Why a command that begins so is not run by the suite. It is parsed all the same, where it is of pytest or of gpumem."""
EMULATED = "of an emulated GPU; tests/emulated"
A_TIME = "a time of one machine; tests/test_time_gate.py"
NOT_COMPARED = {
    ("README.md", "test      "): "a model of the hub; tests/test_model_tests.py",
    ("docs/architecture.md", "options + [tool.gpumem]"): "a diagram",
    ("docs/guide/fits.md", "config                      H100"): EMULATED,
    ("docs/guide/fits.md", "needs 15.25 GB"): EMULATED,
    ("docs/guide/leaks.md", "  kept in: accelerate 1.3.0"): INDEX,
    ("docs/guide/pull-request.md", "test  "): MINUTES,
    ("docs/guide/scripts-and-loops.md", "test  "): "of an emulated GPU; tests/emulated/test_run.py",
    ("docs/guide/servers-and-launched-jobs.md", "In call: serve.py"): EMULATED,
    ("docs/guide/servers-and-launched-jobs.md", "In measure: serve.py"): EMULATED,
    ("docs/guide/several-gpus.md", "GPU memory regressed: peak on cuda:0"): "two GPUs; tests/emulated/test_devices.py",
    ("docs/guide/several-gpus.md", "FAILED tests/distributed"): "four ranks; tests/ranks/test_verdict.py",
    ("docs/guide/time.md", "Time regressed: step time 45.90 ms"): A_TIME,
    ("docs/guide/time.md", "Time regressed: step time 124.31 ms"): A_TIME,
    ("docs/guide/time.md", "uncertain: other processes used"): A_TIME,
    ("docs/guide/time.md", "gpumem store: 0 baselines written"): A_TIME,
    ("docs/guide/time.md", "note: no baseline of time yet"): "tests/test_no_time_yet.py",
    ("docs/reference/command-fit.md", "$ gpumem fit"): EMULATED,
    ("docs/reference/command-doctor.md", "$ gpumem doctor"): "tells of this machine; tests/test_doctor.py",
    ("docs/guide/which-change.md", "test  "): INDEX,
    ("docs/guide/which-change.md", "tried  "): INDEX,
    ("docs/guide/which-change.md", "Memory regressed: peak 288.85 MB"): INDEX,
    (
        "docs/concepts/verdicts.md",
        "gpumem: tests/test_gpt.py::test_block: renamed?",
    ): "one line, wrapped; tests/test_renamed_tests.py",
}
"""Why a block of output with a line that begins so is not compared with a run."""


def in_table(block: Block) -> bool:
    return any(page == block.page and f"\n{first}" in f"\n{block.text}" for page, first in NOT_COMPARED)


def is_synopsis(block: Block) -> bool:
    usage = block.page.startswith(OF_COMMANDS) and block.text.startswith("gpumem ")
    hook = block.page == "docs/reference/hooks.md" and block.text.startswith("pytest_gpumem_")
    return block.language == "text" and (usage or hook)


def is_run(block: Block, said: str) -> bool:
    """Whether a test runs a command of a block, or a table has the reason why none does."""
    on_emulated = said in emulated.commands(block.page)
    return (
        (block.page, said) in RUN
        or on_emulated
        or block.page.startswith((*FOLLOWED, OF_COMMANDS))
        or said.startswith((*NOT_RUN, "git add "))
    )


def is_of_the_readme(block: Block) -> bool:
    """Whether the site's front page shows a block of the README."""
    same = replace(block, page="README.md")
    return block.page == "docs/index.md" and any(
        same == replace(one, section=block.section) for one in blocks_of("README.md")
    )


def is_shown(block: Block) -> bool:
    """Whether a block is executed or compared, or has its reason. What `blocks` gives to a test by language is."""
    if is_of_the_readme(block):
        return True
    if block.language in SHELL:
        compared = not block.printed or block.language == "sh" or block in COMPARED or in_table(block)
        return compared and all(is_run(block, said) for said in block.commands)
    if block.language == "text":
        return block in COMPARED or block in OF_CI or in_table(block) or is_synopsis(block)
    if block.language == "diff":
        return block in COMPARED
    if block.language == "json":
        return block.page.startswith("docs/migrate/") and block.file is not None
    # By tests/test_docs.py; the tests below; tests/test_reference.py; tests/test_ci_docs.py and `make lint`;
    # tests/test_ci_docs.py; tests/test_docs.py.
    return block.language in ("toml", "python", "pycon", "yaml", "groovy", "{toctree}")


def test_every_block_of_the_pages_is_executed_or_compared_or_has_its_reason():
    assert [f"{one}: {one.text.splitlines()[0]}" for one in BLOCKS if not is_shown(one)] == []


def test_no_block_is_hidden_from_the_pattern_of_blocks():
    for page in SHOWN_PAGES:
        fences = re.findall(r"^ *```", read(page), flags=re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page


def test_each_reason_is_of_a_block_that_there_is():
    said = {(one.page, line) for one in BLOCKS if one.language in SHELL for line in one.commands}
    assert {begin for begin in NOT_RUN if not any(line.startswith(begin) for _, line in said)} == set()
    used = [key for key in NOT_COMPARED for one in BLOCKS if one.page == key[0] and f"\n{key[1]}" in f"\n{one.text}"]
    assert Counter(used) == Counter(NOT_COMPARED.keys())
    assert [one for one in COMPARED if in_table(one)] == []
    assert said >= RUN


def of_pytest(line: str) -> list[str] | None:
    """The arguments of pytest in a command, if it runs it."""
    found = re.search(r"(?:^|[;&] (?:do )?|-m |- run: )pytest (.*?)(?:; done| \|\| true)?$", line)
    return None if found is None else shlex.split(found[1].replace("...", "tests"))


TYPED = sorted(
    {
        line.strip()
        for one in BLOCKS
        if one.language in (*SHELL, "yaml")
        for line in (one.commands if one.language in SHELL else one.text.splitlines())
        if of_pytest(line.strip()) is not None
    }
)
OF_OTHERS = {"--splits": 2, "--group": 4}
"""Options of plugins that are not here, and how many words they are."""


@pytest.mark.parametrize("line", TYPED)
def test_every_command_of_pytest_in_the_pages_is_one_that_it_takes(line, pytester):
    words = of_pytest(line.replace("emulated:h100", "cpu"))  # which is emulated as soon as it is parsed
    for option, length in OF_OTHERS.items():
        if option in words:
            at = words.index(option)
            del words[at : at + length]
    options = [word for word in words if word.startswith("--gpumem-")]
    config = pytester.parseconfig("-p", "no:randomly", *words)
    given = {name.removeprefix("--").partition("=")[0].replace("-", "_") for name in options}
    assert all(getattr(config.option, name.removeprefix("no_"), None) is not None for name in given)


# Python that is no whole file


MODEL = """
import pytest
import torch
from torch import nn


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


Llama70B = GPT
batch = torch.ones(16, 64)


def token_batch(*_):
    return batch


def next_token_loss(output, _):
    return output


"""
FRAGMENTS = [one for one in blocks("python") if one.page in SHOWN_PAGES and not one.file]
HOOKS = "import logging, torch\nimport torch as my_library\nXpuDevice, log = object, logging.getLogger()\n"
"""Names in the examples of hooks."""
IN_A_TEST = "def test_it(gpumem):\n"


@pytest.mark.parametrize("block", FRAGMENTS, ids=lambda one: f"{one}: {one.text.splitlines()[-1].strip()[:30]}")
def test_python_that_is_no_whole_file_runs_with_what_it_names(project, block, monkeypatch):
    text = block.text
    if text.startswith("gpumem."):
        text = IN_A_TEST + re.sub(r"^", "    ", text, flags=re.MULTILINE)
    elif "def pytest_gpumem_" in text:
        (project.path / "conftest.py").write_text(HOOKS + text, encoding="utf-8")
        text = f"{IN_A_TEST}    gpumem.measure(lambda: torch.ones(9))\n"
    elif "def test_" not in text:
        text += "\n\ndef test_it(gpumem):\n    make, batch, loss = make_gpt()\n    gpumem.train_step(make, batch, loss=loss)\n"
    project.write(MODEL + text)
    if "init_process_group" in text:
        job = run_job(project.path, 1, "--gpumem-update=new", "--no-gpumem-time")
        assert job.status == 0, job.output
        assert list(project.stored()), job.output
    elif "gpumem.launch" in text:
        monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        project.write("torch.ones(1000)", "train.py")
        project.run().assert_outcomes(passed=1)
    else:
        result = project.run("--gpumem-update=new", "-k", "not 64 and not 512")
        result.assert_outcomes(**{name: number for name, number in result.parseoutcomes().items() if name != "failed"})
        assert "passed" in result.parseoutcomes()
        # A relation has no baseline.
        assert project.stored() or "gpumem.assert_" in text
