"""Commands of the guides run, and what the pages show of their output is that of a run, but for what varies."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner

from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.tools.main import main
from tests.git_store import Repository, entry
from tests.pages import COMPARED, ROOT, blocks, blocks_of, command, follows, lasting, output, read
from tests.test_example_project import HAS_AVX512

if TYPE_CHECKING:
    from tests.conftest import Project

BASELINES, ELSEWHERE, FAILURE, FITS, LEAKS, LOOPS, RELATIONS, START, TIME, VERDICTS = (
    *(f"docs/guide/{name}.md" for name in ("baselines", "figures-elsewhere", "read-a-failure", "fits", "leaks")),
    "docs/guide/scripts-and-loops.md",
    *(f"docs/guide/{name}.md" for name in ("relations", "start", "time", "verdicts")),
)
pytestmark = pytest.mark.skipif(
    f"torch {torch.__version__.partition('+')[0]}." not in read("docs/index.md"),
    reason="the output in the pages is of another release of torch, which docs/index.md names",
)


def type_in(project: Project, said: str) -> None:
    """Run a command in the folder of a project, in this process; it has to succeed."""
    program, *words = shlex.split(said)
    if program == "pytest":
        assert project.run(*words, device=None).ret == 0, said
        return
    words = [str(name) for word in words for name in ([*Path().glob(word)] if "*" in word else [word])]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output


# The project of the README


RECORD, GATE = (command("README.md", f"pytest --gpumem-{option}") for option in ("update=new", "baseline"))
RECORDED = output(BASELINES, "test_mlp.py::test_forward")
FAILED = output(FAILURE, "_________________________________ test_forward")
DIFFERENCE = output(BASELINES, "--- a/gpumem-baselines/cpu-x86_64/test_mlp.py.toml")
REASON, ACCEPTED = output(BASELINES, "  baseline: "), "flash attention off until #12"
README_FAILURE = output("README.md", "Memory regressed: peak 26.23 MB")
STORE = output("docs/concepts/store.md", "gpumem-baselines/")
NOT_TIMED = output(TIME, "note: test_mlp.py::test_train_step: it was not timed")
EXPLAINED = output(VERDICTS, "test_mlp.py::test_train_step")
command(BASELINES, "pytest --gpumem-update=new")


@pytest.fixture
def mlp(project):
    """The project of the README."""
    source, settings = (
        one.text
        for language in ("python", "toml")
        for one in blocks(language)
        if (one.page, one.section) == ("README.md", "Start with a test")
    )
    project.settings(settings)
    (project.path / "test_mlp.py").write_text(source, encoding="utf-8")
    return project


def widen(project: Project, width: int) -> None:
    path = project.path / "test_mlp.py"
    path.write_text(re.sub(r"\b(2048|4096|2560)\b", str(width), path.read_text(encoding="utf-8")), encoding="utf-8")


def test_output_in_the_guides_is_that_of_the_project_of_the_readme(mlp):
    def git(*words: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *named, *words], cwd=mlp.path, check=True, capture_output=True, text=True)
        return done.stdout

    git("init")
    git("add", "--all")
    git("commit", "--message", "Begin")
    recorded = lasting("\n".join(mlp.run(*shlex.split(RECORD)[1:], device=None, timed=True).outlines))
    assert [line for line in lasting(RECORDED.text) if line not in recorded] == []
    there = [path.relative_to(mlp.path).as_posix() for path in mlp.store.rglob("*") if path.is_file()]
    listed = [line.split()[0] for line in STORE.text.splitlines()[1:] if "nvidia" not in line]
    assert sorted(f"gpumem-baselines/{path}" for path in listed) == sorted(there)
    git("add", "--all")
    git("commit", "--message", "Record")

    widen(mlp, 4096)
    failed = mlp.run(*shlex.split(GATE)[1:], device=None)
    assert follows(FAILED, failed.outlines)
    assert follows(README_FAILURE, failed.outlines)
    mlp.run("test_mlp.py::test_forward", "--gpumem-update=all", device=None)
    difference = git("diff", "--unified=3", "gpumem-baselines").partition("--- ")
    assert lasting("".join(difference[1:])) == lasting(DIFFERENCE.text)

    git("commit", "--all", "--message", "Accept")
    widen(mlp, 2560)
    mlp.run("test_mlp.py::test_forward", "--gpumem-update=all", "--gpumem-reason", ACCEPTED, device=None)
    widen(mlp, 8192)
    failed = mlp.run("--gpumem-baseline", device=None)
    assert follows(REASON, failed.outlines)


def test_what_a_gate_says_of_times_and_of_the_peak_of_the_project_of_the_readme(mlp):
    mlp.run("--gpumem-update=new", device=None)
    assert follows(NOT_TIMED, mlp.run("--gpumem-baseline", device=None, timed=True).outlines)
    explained = mlp.run("--gpumem-baseline", "-vv", "--gpumem-explain=always", device=None)
    assert follows(EXPLAINED, explained.outlines)


HISTORY = command(BASELINES, "gpumem history")
HISTORY_SHOWN = output(BASELINES, "tests/test_gpt.py::test_train_step (train_step) on cpu-x86_64")


def test_the_history_of_a_baseline(tmp_path, monkeypatch):
    repository = Repository(tmp_path / "project")
    monkeypatch.chdir(repository.path)
    cpu, step = Environment("cpu-x86_64", "CPU (x86_64)"), Workload("train_step")
    for subject, author, peak, reason in (
        ("Baselines of the example project", "Ada", 86_100_000, None),
        ("Attention keeps its scores", "Bob", 119_790_000, ACCEPTED),
        ("Flash attention is back", "Ada", 86_100_000, None),
    ):
        made = entry(peak, device=cpu, workload=step, **({} if reason is None else {"reason": reason}))
        entries = {"test_train_step (train_step)": made}
        repository.commit(subject, entries, author=author, file="tests/test_gpt.py", slug="cpu-x86_64")
    done = CliRunner().invoke(main, shlex.split(HISTORY)[1:])
    assert lasting(done.output) == lasting(HISTORY_SHOWN.text)


# What leaks, and what runs out of memory


LEAKY = """\
import pytest
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.seen = []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.seen.append(x.detach())
        return x


def loss(output, batch):
    return output.square().mean()


def test_keeps_outputs(gpumem):
    gpumem.train_step(Net, torch.ones(450, 512), loss=loss)


@pytest.fixture(scope="module")
def mlp():
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


@pytest.mark.gpumem(max_retained="64 kB")
def test_keeps_losses(mlp):
    test_keeps_losses.kept = [mlp(torch.ones(256, 512)).mean() for _ in range(2)]


class Trainer:
    def __init__(self, model):
        self.output = model(torch.ones(256, 512))
        self.hooks = {"end": self.end}

    def end(self):
        pass


@pytest.mark.gpumem
def test_leaves_cycles(mlp):
    Trainer(mlp)


@pytest.mark.gpumem
def test_runs_out_of_memory(mlp):
    output = mlp(torch.ones(256, 512))
    torch.empty(2**46)
    assert output.sum()
"""
NO_LEAK = {"self.seen.append(x.detach())": "pass", '{"end": self.end}': "{}", ".mean() for": ".mean().item() for"}
KEPT, RETAINED, CYCLES = (
    output(LEAKS, first)
    for first in ("Memory regressed: growth per step", "  what was retained    bytes  module   ", "  held by cycles")
)
OUT_OF_MEMORY = output(FITS, "---------------------- Captured gpumem out of memory call")
FIRST_USE = output(LEAKS, "Memory over budget: retained 1.05 MB")
SETTINGS_FAILURE = output(LEAKS, "Memory over budget: retained 400.00 kB")


def test_what_leaks_and_what_was_there_when_memory_ran_out(project):
    clean = LEAKY
    for leak, instead in NO_LEAK.items():
        assert clean.count(leak) == 1
        clean = clean.replace(leak, instead)
    path = project.path / "test_leaks.py"
    path.write_text(clean, encoding="utf-8")
    project.run("--gpumem-update=new").assert_outcomes(passed=3, failed=1)
    path.write_text(LEAKY, encoding="utf-8")
    result = project.run("--gpumem-baseline")
    result.assert_outcomes(failed=4)
    for shown in (KEPT, RETAINED, CYCLES, OUT_OF_MEMORY):
        assert follows(shown, result.outlines), shown.text


def test_the_settings_of_the_page_on_leaks_find_the_test_that_leaks(project):
    (settings,) = (block.text for block in blocks("toml") if block.page == LEAKS)
    project.settings(settings)
    project.write(
        "kept = []\ndef test_leaks():\n    kept.append(torch.ones(1000, 100))\ndef test_keeps_nothing():\n"
        "    torch.ones(1000, 100)\ndef test_of_no_tensor(): ...\n",
        name="tests/test_leaks.py",
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=2)
    assert follows(SETTINGS_FAILURE, result.outlines)


def test_a_cache_that_the_first_use_fills_is_told_as_on_the_page_on_leaks(project):
    project.write("import torch\ncache = {}\n", name="masks.py")
    project.write(
        "import masks\n\n@pytest.mark.gpumem(max_retained='64 kB')\ndef test_mask():\n"
        "    masks.cache.setdefault(512, torch.ones(512, 512))\n"
    )
    assert follows(FIRST_USE, project.run().outlines)


# Relations


NO_SAVING = output(RELATIONS, "E   AssertionError: assert 0.000")
GROWS = output(RELATIONS, "E   AssertionError: memory grows")
ESTIMATE = output(RELATIONS, "amp-bf16                formula")
FINDING = output(RELATIONS, "6.87 MB at rest")
BROKEN = """\
import torch
from test_relations import loss, make_batch, make_model


def test_checkpointing_pays(gpumem):
    plain = gpumem.train_step(make_model, make_batch, loss=loss, config="fp32", name="plain")
    recomputing = gpumem.train_step(make_model, make_batch, loss=loss, config="fp32", name="recomputing")
    assert recomputing.saves(plain) > 0.5


def test_training_keeps_nothing(gpumem):
    model, batch, losses = make_model(), make_batch(), []

    def step():
        losses.append(loss(model(batch), batch))

    gpumem.assert_no_growth(step)
"""
THEORY = """\
import torch
from tiny_models.advice import make_gpt


class KeepsACopy(torch.optim.AdamW):
    def step(self, closure=None):
        super().step(closure)
        self.copy = [value.clone() for state in self.state.values() for value in state.values()]


def test_estimate(gpumem):
    _, batch, loss = make_gpt()
    print()
    print(gpumem.estimate(lambda: make_gpt()[0], batch, "amp-bf16", loss=loss))
    (finding,) = gpumem.estimate(
        lambda: make_gpt()[0], batch, "amp-bf16", loss=loss, optimizer=KeepsACopy, name="copy"
    ).findings
    print(finding)
"""


def test_relations_that_fail(project):
    (relations,) = (one.text for one in blocks_of(RELATIONS) if one.file == "test_relations.py")
    (project.path / "test_relations.py").write_text(relations, encoding="utf-8")
    (project.path / "test_broken.py").write_text(BROKEN, encoding="utf-8")
    result = project.run("test_broken.py")
    result.assert_outcomes(failed=2)
    assert follows(NO_SAVING, result.outlines)
    assert follows(GROWS, result.outlines)


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_AVX512, reason="without AVX-512, oneDNN takes less memory for bfloat16")
def test_theory_beside_practice(project):
    shutil.copytree(ROOT / "example_project" / "tiny_models", project.path / "tiny_models")
    (project.path / "test_theory.py").write_text(THEORY, encoding="utf-8")
    result = project.run("-s", "-p", "no:xdist")
    result.assert_outcomes(passed=1)
    assert follows(ESTIMATE, result.outlines)
    assert follows(FINDING, result.outlines)


# Counts


COUNTED = """\
from torch import nn
import torch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def loss(output, batch):
    return output.square().mean()


def test_it(gpumem):
    gpumem.train_step(Model, torch.ones(4, 2, 128, 64), loss=loss)
"""
MORE_WORK = (
    ("nn.functional.scaled_dot_product_attention(q, k, v)", "(q @ k.mT * 0.125).softmax(-1) @ v"),
    ("return output.square().mean()", "value = output.square().mean(); value.item(); return value"),
)
WORK, MORE = output(TIME, "Work regressed: syncs"), output(TIME, "  more syncs")


def test_more_work_is_told_by_line(project):
    path = project.path / "test_it.py"
    path.write_text(COUNTED, encoding="utf-8")
    project.run("--gpumem-update=new").assert_outcomes(passed=1)
    changed = COUNTED
    for line, instead in MORE_WORK:
        assert changed.count(line) == 1
        changed = changed.replace(line, instead)
    path.write_text(COUNTED.replace(*MORE_WORK[1]), encoding="utf-8")
    assert follows(WORK, project.run("--gpumem-baseline").outlines)
    path.write_text(changed, encoding="utf-8")
    assert follows(MORE, project.run("--gpumem-baseline").outlines)


# Messages about settings and markers


UNUSED_BUDGET = output(START, "gpumem: the budget for tests = ")


def test_a_budget_without_effect(project):
    project.settings("[[tool.gpumem.budget]]\ntests = 'test_p*'\nmax_gb = 1\n")
    project.write("def test_it(): ...\n@pytest.mark.gpumem\ndef test_y():\n    torch.ones(9)\n", name="test_plain.py")
    (project.path / "test_plain.py").write_text("def test_it(): ...\n", encoding="utf-8")
    project.write("@pytest.mark.gpumem\ndef test_y():\n    torch.ones(9)\n", name="test_y.py")
    assert follows(UNUSED_BUDGET, project.run().outlines)


# A script


SCRIPT = """\
import argparse

import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(128, 4 * width), nn.Linear(4 * width, 128))

    def forward(self, x):
        return self[1](self[0](x).clamp_min(0))


def train():
    options = argparse.ArgumentParser()
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--lr", type=float, default=1e-3)
    given = options.parse_args()
    model = Net(given.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    outputs = []
    for _ in range(10**6):
        x = torch.randn(256, 128)
        output = model(x)
        outputs.append(output.detach())
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train()
"""
SMALL, SCRIPT_FAILURE = command(LOOPS, "gpumem run --as small"), output(LOOPS, "Memory regressed: growth per step")


def test_a_script_with_arguments_and_one_that_keeps_its_outputs(project):
    path = project.path / "train.py"
    project.settings('[tool.gpumem]\ndevice = "cpu"\ntime = false\n')
    path.write_text(SCRIPT.replace("outputs.append(output.detach())", "pass"), encoding="utf-8")
    _, run, *small = shlex.split(SMALL)
    done = project.gpumem(run, "--gpumem-update=new", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(SCRIPT.replace("output.detach()", "output"), encoding="utf-8")
    done = project.gpumem(run, "--gpumem-baseline", *small)
    assert done.returncode == 1
    assert follows(SCRIPT_FAILURE, done.stdout.splitlines())


(CHANGED_COMMAND,) = (one for one in blocks_of("README.md") if one.language == "diff")
COMPARED.add(CHANGED_COMMAND)


def test_a_script_is_measured_by_the_command_that_the_readme_changes(project):
    """The script is that of example_project/start_here.py."""
    before, after = CHANGED_COMMAND.text.splitlines()
    assert before == "-python train.py"
    assert after.startswith("+gpumem run train.py ")
    project.settings("[tool.gpumem]\ntime = false\n")
    shutil.copy(ROOT / "example_project" / "start_here.py", project.path / "train.py")
    for option in ("--gpumem-update=new", "--gpumem-baseline"):
        done = project.gpumem(*shlex.split(after.replace("--gpumem-update=new", option))[1:])
        assert done.returncode == 0, done.stdout + done.stderr


# Figures elsewhere


REPORTS = [command(ELSEWHERE, f"pytest --gpumem-baseline --gpumem-report={name}") for name in ("gpumem.md", "report")]
HTML = command(ELSEWHERE, "pytest --gpumem-baseline --gpumem-report=gpumem.html")
EXPORTS = [command(ELSEWHERE, f"gpumem export {name}") for name in ("openmetrics", "tensorboard")]
COLLECTED = "/var/lib/node_exporter/"
RECORD_TIMES = command(TIME, "for run in")


def test_reports_and_exports_are_written(project, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(project.path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    named = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *named, "commit", "--quiet", "--allow-empty", "--message", "Begin"], check=True)
    project.settings('[tool.gpumem]\ndevice = "cpu"\n')
    project.write("@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1000)\n")
    loop = re.fullmatch(r"for run in ([\d ]+); do (.+); done", RECORD_TIMES)
    assert loop
    for _ in loop[1].split():
        type_in(project, loop[2])
    for said in (*REPORTS, HTML):
        type_in(project, said)
    (project.path / "reports").mkdir()
    shutil.copy(project.path / "report.json", project.path / "reports" / "1.json")
    assert EXPORTS[0].count(COLLECTED) == 1
    type_in(project, EXPORTS[0].replace(COLLECTED, ""))
    type_in(project, EXPORTS[1])
    made = {path.name for path in project.path.iterdir()}
    assert made >= {"gpumem.md", "gpumem.json", "gpumem.html", "report.json", "gpumem.prom", "runs"}
