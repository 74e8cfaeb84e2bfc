"""Regressions planted in models of transformers fail on an emulated GPU, with the module and the line; their clean twins pass."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.emulated.conftest import PLANTED_PROJECT
from tests.emulated.processes import Processes
from tests.workspaces import KEPT

if TYPE_CHECKING:
    import subprocess


@dataclass(frozen=True)
class Plant:
    """A regression of the planted project, and what the first row of its failure has to say."""

    name: str
    module: str
    library: tuple[str, str] | None = None
    """A file of transformers, and the beginning of the line there: of settings, which allocate nothing themselves."""
    says: str = ""
    first: str = ""
    """Text before the rows."""

    @property
    def test(self) -> str:
        return f"test_{self.name.replace('-', '_')}"

    def lines(self) -> list[str]:
        """The lines that may be named: those that the project marks, or the library's."""
        if self.library is None:
            found = [
                f"{path.name}:{number}"
                for path in PLANTED_PROJECT.glob("*.py")
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
                if line.endswith(f"# planted: {self.name}")
            ]
        else:
            file, text = self.library
            spec = importlib.util.find_spec("transformers")
            source = (Path(spec.origin).parent / file).read_text(encoding="utf-8")
            found = [
                f"transformers {importlib.metadata.version('transformers')}: {file}:{number}"
                for number, line in enumerate(source.splitlines(), 1)
                if line.strip().startswith(text)
            ]
        assert found, f"no line is planted: {self}"
        return found

    def is_told_by(self, row: dict[str, str]) -> bool:
        library, _, own = row["line"].partition(" (from ")
        named = (library, own.rstrip(")"))
        return (
            fnmatchcase(row["module"], self.module)
            and not {*named}.isdisjoint(self.lines())
            and self.says in row["row"]
        )


PLANTS = (
    Plant(
        "gpt2-eager",
        "transformer.h.[*].attn",
        ("models/gpt2/modeling_gpt2.py", "attn_weights = nn.functional.softmax("),
    ),
    Plant("gpt2-not-checkpointed", "transformer.h.[*].*"),
    Plant("gpt2-float32-copy", "transformer.h.[*].mlp", says="was bfloat16 only, now also float32"),
    Plant("llama-repeated-heads", "model.layers.[*].self_attn", says="repeat_interleave"),
    Plant("llama-logits-in-float32", "(no module)", says="float32[2040, 4096]"),
    Plant(
        "llama-bigger-mlp",
        # From torch 2.15 on, the peak is at backward's first product, which takes a workspace: before the gradients of layer 1.
        "model.layers.1.mlp" if KEPT else "model.layers.[*].mlp",
        ("models/llama/modeling_llama.py", "down_proj = self.down_proj(self.act_fn("),
        says="2 x float32[8, 256, 1024]",
    ),
    Plant("bert-softmax-in-float32", "bert.encoder.layer.[*].attention.self", says="now also float32"),
    Plant(
        "bert-teacher-with-gradients", "teacher.encoder.layer.[*].*", first="Grad mode was off in `teacher` (called at "
    ),
    Plant("bert-leak", "(no module)", says="argmax"),
    Plant("vit-kept-clone", "vit.layers.[*].mlp", says="a copy"),
    Plant("vit-buffer-in-every-layer", "vit.layers.[*].mlp", says="buffers"),
    Plant("vit-hidden-states", "vit.layers.{1-10}", says="10 x float32[8, 257, 256]"),
    Plant("t5-mask-in-float32", "*coder.block.[*].layer.[*].DenseReluDense", says="was bool, now float32"),
    Plant("t5-other-optimizer", "*coder.block.[*].layer.[*].DenseReluDense.w?", says="optimizer state"),
    Plant("t5-retained-graph", "*coder.block.[*].layer.[*].*", says="1 -> 2 tensors"),
    Plant(
        "perceptron-average-of-more-rows",
        "wide",
        says=f"was float32[1024, 2048], now float32[{2048 if KEPT else 4096}, 2048]",
    ),
)


def session(project: Processes, *arguments: str, planted: str = "") -> subprocess.CompletedProcess[str]:
    return project.pytest(*arguments, timeout=500, PLANTED=planted, HF_HUB_OFFLINE="1")


def failures(text: str) -> dict[str, str]:
    """The failure text of each test, by its name."""
    parts = re.split(r"^_+ (test_\w+) _+$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_row(failure: str) -> dict[str, str]:
    """The first row of what grew, or of what each step keeps, by column; ``row`` is the whole row."""
    lines = iter(failure.splitlines())
    header = next(line for line in lines if re.match(r"  (what grew|kept by each step) ", line))
    row = next(lines)
    columns, cells = (re.split(r"\s{2,}", line.strip()) for line in (header, row))
    return {"row": row, **dict(zip(columns, cells, strict=False))}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Processes:
    """The planted project, with the baselines of its models as they should be."""
    pytest.importorskip("transformers", "5.0")
    folder = tmp_path_factory.mktemp("planted") / "project"
    shutil.copytree(PLANTED_PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    project = Processes(folder)
    done = session(project, "--gpumem-update=new")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(PLANTS)} recorded, new" in done.stdout
    return project


def test_models_as_they_should_be_are_green(recorded):
    done = session(recorded, "--gpumem-baseline", "--gpumem-report=report.html")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"gpumem: {len(PLANTS)} gated\n" in done.stdout
    assert "NVIDIA H100 80GB HBM3 (emulated)" in (recorded.folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="workers", marks=pytest.mark.thorough)]
)
def test_what_is_planted_is_red_with_its_module_and_line(recorded, workers):
    done = session(recorded, "--gpumem-baseline", "--gpumem-report=report.html", *workers, planted="all")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{len(PLANTS)} gated, {len(PLANTS)} regressed" in done.stdout
    assert "(emulated)" in (recorded.folder / "report.html").read_text(encoding="utf-8")
    told = failures(done.stdout)
    assert set(told) == {plant.test for plant in PLANTS}
    wrong = [
        f"{plant}\n{plant.lines()}\n{told[plant.test]}"
        for plant in PLANTS
        if not re.search(r"^Emulated GPU memory regressed: ", told[plant.test], re.MULTILINE)
        or plant.first not in told[plant.test].partition("what grew")[0]
        or not plant.is_told_by(first_row(told[plant.test]))
    ]
    assert not wrong, "\n".join(wrong)
