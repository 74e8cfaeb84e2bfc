"""The example project end to end: pytest in processes of its own, on copies of it, always on the CPU."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from pytest_gpumem.facts.values.composition import MOST_KEPT
from pytest_gpumem.judging.baselines.format import parse
from pytest_gpumem.tools.main import main
from pytest_gpumem.torch_support.private_api.numerics import bfloat16_instructions
from tests import preloaded
from tests.pages import COMPARED, FENCE, blocks_of, command, follows, output, read
from tests.support.processes import LEFT_OUT, hide_what_is_loaded

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = Path(__file__).parents[1] / "example_project"
SECONDS = 240
"""Longer than any run needs; a run that hangs must not hang the suite."""
COMMITTED_FOR = "x86_64"
FUSED = "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
BREAKS_CHECKPOINTING = {
    "blocks-that-are-not-called": (
        "            x = block(x)\n",
        """\
            x = x + block.attention(block.attention_norm(x))
            x = x + block.mlp(block.mlp_norm(x))
""",
        "test_checkpointing_saves_memory",
        "forward calls none of these modules; name modules that forward calls, such as 4 x Sequential with 'checkpoint=blocks,blocks=blocks.*.mlp'",
    ),
    "scores-that-are-kept": (
        FUSED,
        FUSED + "        self.scores = (q @ k.transpose(-2, -1)).detach().double()\n",
        "test_checkpointing_saves_memory",
        "> 0.35",
    ),
    "dropout-that-is-drawn-again": (
        "        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))\n",
        """\
        self.draws = getattr(self, "draws", torch.Generator(x.device).manual_seed(0))
        kept = torch.rand(x.shape, generator=self.draws, device=x.device) > 0.1
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x)) * kept
""",
        "test_checkpointing_gives_the_same_gradients",
        "gradients differ: ",
    ),
    "logits-that-are-kept": (
        "        return logits\n",
        """\
        self.seen = [*getattr(self, "seen", []), logits.detach()]
        return logits
""",
        "test_training_keeps_nothing",
        "memory grows: 1.05 MB a step",
    ),
}
"""What is replaced in the GPT, by what, the test that fails for it, and what it says."""
KEEPS_ITS_SCORES = next(
    re.sub("^(?=.)", "        ", found["text"], flags=re.MULTILINE)
    for found in FENCE.finditer((EXAMPLE / "README.md").read_text(encoding="utf-8"))
    if "masked_fill" in found["text"]
)
"""The attention of *See it fail*."""
IN_README, IN_GUIDE, IN_TABLE = (
    output(page, first)
    for page, first in (
        ("README.md", "_______________________________ test_train_step"),
        ("docs/guide/read-a-failure.md", "_______________________________ test_train_step"),
        ("docs/guide/verdicts.md", "tests/test_gpt.py::TestGenerate"),
    )
)
WHAT_GREW = next(one for one in blocks_of("docs/guide/read-a-failure.md") if one.text.startswith("  what grew "))
COMPARED.add(WHAT_GREW)
ADVISE, ADVICE = (
    command("docs/guide/fits.md", "gpumem advise tiny"),
    output("docs/guide/fits.md", "config                          peak"),
)
SHOW = command("docs/guide/baselines.md", "gpumem show")
EXPORT = command("docs/guide/figures-elsewhere.md", "gpumem export bencher")
MATRIX = output("docs/guide/matrix.md", "tests/test_gpt_configs.py::test_matrix ")
GREEN, EXPORTED = (
    output("docs/guide/verdicts.md", "gpumem: 21 gated"),
    output("docs/guide/figures-elsewhere.md", "$ pytest"),
)
SOME = ("-k", "by_depth[2] or TestGenerate or test_evaluation or test_matrix[fp32-ckpt-blocks")
"""Tests of each kind, for runs that need not be of all: these are most of what the suite spends on the project."""
CHECKPOINTING = ("", ",checkpoint=ops", ",checkpoint=blocks")
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512" and bfloat16_instructions() != "none"
SLOW = "amp-bf16-ckpt or checkpointing_saves_memory or sharded"
"""Four tests in bfloat16 that take most of a minute without AVX-512, where oneDNN also takes less memory for them."""
GATED, MEASURED = (21, 22) if HAS_AVX512 else (17, 17)
"""Tests and measurements of the project that are gated here."""
OF_THE_PAGES = pytest.mark.skipif(
    not HAS_AVX512
    or platform.machine() != COMMITTED_FOR
    or f"torch {torch.__version__.partition('+')[0]}." not in read("docs/index.md"),
    reason="the output in the pages is of another CPU or release of torch",
)
REVERSES = """
import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.reverse()
"""


@dataclass(frozen=True)
class Run:
    """What a run of pytest gave."""

    code: int
    output: str
    report: ElementTree.Element
    json: str

    @property
    def figures(self) -> dict[str, dict[str, int]]:
        """Bytes of every measurement, by test."""
        found: dict[str, dict[str, int]] = {}
        for case in self.report.iter("testcase"):
            for entry in case.iter("property"):
                prefix, _, name = str(entry.get("name")).partition(".")
                if prefix == "gpumem" and name and not name.endswith(("_time", "throughput")):
                    found.setdefault(str(case.get("name")), {})[name] = int(str(entry.get("value")))
        return found

    @property
    def order(self) -> list[str]:
        """The tests, as they ran."""
        return [f"{case.get('classname')}::{case.get('name')}" for case in self.report.iter("testcase")]

    @property
    def accounting(self) -> str:
        """What the line that accounts for every measured test says."""
        lines = re.findall(r"^gpumem: (\d+ gated.*)$", self.output, flags=re.MULTILINE)
        assert len(lines) == 1, self.output
        return str(lines[0])

    @property
    def printed(self) -> dict[str, list[str]]:
        """The sizes in the rows of the printed table, by test and measurement."""
        rows = re.findall(r"^(tests/\S+::\S+(?: \(\w+\))?) +(\d.*)$", self.output, flags=re.MULTILINE)
        return {test: re.findall(r"[\d.]+ [kMGT]?B", cells) for test, cells in rows}


@dataclass(frozen=True)
class Example:
    """A copy of the example project. ``folder`` is called as the original is, and pytest starts in the one above."""

    folder: Path

    def run(self, *arguments: str, tests: str = "example_project") -> Run:
        report = self.folder.parent / "report.xml"
        as_json = self.folder.parent / "report.json"
        report.unlink(missing_ok=True)
        command = ["-m", "pytest", *LEFT_OUT, tests, "--gpumem-device=cpu", f"--junitxml={report}"]
        command += [f"--gpumem-report={as_json}", *arguments]
        ours = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "COLUMNS")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        # Where a plugin of a test's own lies.
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(self.folder.parent), os.environ.get("PYTHONPATH")])
        )
        done = preloaded.run(
            *command, cwd=self.folder.parent, env=environment, before=hide_what_is_loaded, timeout=SECONDS
        )
        output = done.stdout + done.stderr
        assert report.exists(), output
        return Run(done.returncode, output, ElementTree.parse(report).getroot(), as_json.read_text(encoding="utf-8"))

    def copy(self, folder: Path) -> Example:
        kept_out = shutil.ignore_patterns("__pycache__", ".pytest_cache", ".lock")
        return replace(self, folder=Path(shutil.copytree(self.folder, folder / "example_project", ignore=kept_out)))

    def plant(self, line: str, fault: str) -> None:
        """Replace a line of the GPT."""
        path = self.folder / "tiny_models" / "gpt.py"
        text = path.read_text(encoding="utf-8")
        assert text.count(line) == 1
        path.write_text(text.replace(line, fault), encoding="utf-8")

    def time_for(self, budget: str) -> None:
        """Let the timing of a test's steps take no longer than this."""
        path = self.folder / "pyproject.toml"
        header = "[tool.gpumem]\n"
        text = path.read_text(encoding="utf-8")
        assert text.count(header) == 1
        path.write_text(text.replace(header, f'{header}time_budget = "{budget}"\n'), encoding="utf-8")

    @property
    def store(self) -> Path:
        return self.folder / "gpumem-baselines"

    def stored(self) -> dict[str, list[str]]:
        """The lines of every file of the store."""
        return {path.name: path.read_text(encoding="utf-8").splitlines() for path in sorted(self.store.rglob("*.toml"))}


@pytest.fixture(scope="module")
def committed() -> Example:
    """The example project as it is: to be copied, and not to be run in."""
    return Example(EXAMPLE)


@pytest.fixture(scope="module")
def recorded(committed, tmp_path_factory) -> tuple[Example, Run]:
    """A copy in which baselines of `SOME` were recorded here, in the order of the files, and the run that did it."""
    example = committed.copy(tmp_path_factory.mktemp("recorded"))
    shutil.rmtree(example.store, ignore_errors=True)
    return example, example.run("--gpumem-update=new", "--no-gpumem-time", *SOME)


@pytest.fixture(scope="module")
def gated_in_reverse(committed, tmp_path_factory) -> Callable[..., Run]:
    """Gate a copy in one process in the reversed order, timed, against the committed baselines."""

    def run(*selected: str) -> Run:
        example = committed.copy(tmp_path_factory.mktemp("reversed"))
        (example.folder.parent / "reversed_order.py").write_text(REVERSES, encoding="utf-8")
        example.time_for("100 ms")
        return example.run("--gpumem-baseline", "-v", "-p", "reversed_order", *selected)

    return run


@pytest.fixture(scope="module")
def some_reversed(gated_in_reverse) -> Run:
    return gated_in_reverse(*SOME)


@pytest.fixture(scope="module")
def all_reversed(gated_in_reverse) -> Run:
    """All tests; without AVX-512 less `SLOW`."""
    return gated_in_reverse(*(() if HAS_AVX512 else ("-k", f"not ({SLOW})")))


@pytest.mark.skipif(
    platform.machine() != COMMITTED_FOR,
    reason=f"the committed baselines were recorded on {COMMITTED_FOR}, this is {platform.machine()}",
)
@pytest.mark.parametrize(
    ("run", "gated", "measured"),
    # `make example-cpu` gates all of them, too.
    [("some_reversed", 5, 5), pytest.param("all_reversed", GATED, MEASURED, marks=pytest.mark.thorough)],
)
def test_the_committed_baselines_hold(request, run, gated, measured):
    done = request.getfixturevalue(run)
    assert done.code == 0, done.output
    assert done.accounting == f"{gated} gated", done.output
    # They keep no times, which would be those of one machine.
    assert " it was not timed: its baseline has no time to compare with; " in done.output
    assert len(done.printed) == measured


@pytest.mark.thorough
def test_recording_writes_what_was_measured(recorded):
    example, run = recorded
    assert run.code == 0, run.output
    written = [
        int(value) for lines in example.stored().values() for value in re.findall(r"peak_\w+ = (\d+)", "\n".join(lines))
    ]
    assert sorted(written) == sorted(
        value for metrics in run.figures.values() for name, value in metrics.items() if ".peak_" in name
    )
    assert not any(value < 1_000_000 for value in written)


@pytest.mark.parametrize(
    ("which", "device", "number"),
    [("committed", "cpu-", 22), ("recorded", "cpu-", 5), ("committed", "emulated-h100-80gb", 20)],
)
def test_every_baseline_but_that_of_a_region_keeps_what_its_peak_is_made_of(committed, recorded, which, device, number):
    example = committed if which == "committed" else recorded[0]
    entries = [
        entry
        for file in sorted(example.store.glob(f"{device}*/**/*.toml"))
        for entry in parse(file.read_text(encoding="utf-8"), file.name).values()
    ]
    assert len(entries) == number
    assert {entry.workload.step for entry in entries if entry.composition is None} == {"region"}
    for entry in entries:
        if entry.composition is not None:
            assert entry.composition.rest <= 0.05 * entry.composition.total or len(entry.composition.rows) == MOST_KEPT
            assert entry.composition.of("unattributed") == 0


def test_figures_are_the_same_in_the_reversed_order_and_beside_times(recorded, some_reversed):
    _, expected = recorded
    assert some_reversed.order == expected.order[::-1]
    assert expected.figures
    assert some_reversed.figures == expected.figures
    assert expected.printed
    assert some_reversed.printed == expected.printed


@pytest.mark.parametrize(
    ("line", "fault", "test", "message"),
    [
        # Two of them break the same test.
        pytest.param(*broken, id=name, marks=[pytest.mark.thorough] if name.startswith("blocks") else [])
        for name, broken in BREAKS_CHECKPOINTING.items()
    ],
)
def test_a_broken_model_fails_its_relation(committed, tmp_path, line, fault, test, message):
    example = committed.copy(tmp_path)
    example.plant(line, fault)
    # Without AVX-512, bfloat16 is slow.
    configs = example.folder / "tests" / "test_gpt_configs.py"
    configs.write_text(configs.read_text(encoding="utf-8").replace("amp-bf16", "fp32"), encoding="utf-8")
    run = example.run("--no-gpumem-time", tests=f"example_project/tests/test_gpt_configs.py::{test}")
    assert run.code == 1, run.output
    (failure,) = (text for case in run.report.iter("testcase") if (text := _failed(case)))
    assert message in failure
    assert run.accounting == "0 gated, 1 failed by itself"


@pytest.fixture(scope="module")
def sees_it_fail(committed, tmp_path_factory):
    """A copy with the attention of *See it fail*, gated in one process; the lines of its output without the device."""
    example = committed.copy(tmp_path_factory.mktemp("fails"))
    example.plant(FUSED, KEEPS_ITS_SCORES)

    def run(tests: str) -> list[str]:
        done = example.run("--gpumem-baseline", "--no-gpumem-time", tests=tests)
        assert done.code == 1, done.output
        return done.output.replace(" --gpumem-device=cpu", "").splitlines()

    return run


@OF_THE_PAGES
def test_attention_that_keeps_its_scores_fails_as_the_pages_show(sees_it_fail):
    said = sees_it_fail("example_project/tests/test_gpt.py::test_train_step")
    for block in (IN_README, IN_GUIDE, WHAT_GREW):
        assert follows(block, said), block


@OF_THE_PAGES
@pytest.mark.thorough
def test_all_tests_that_fail_by_it_are_those_of_the_page(sees_it_fail):
    assert follows(IN_TABLE, sees_it_fail("example_project/tests/test_gpt.py"))


@OF_THE_PAGES
@pytest.mark.thorough
def test_the_advice_for_the_project_is_that_of_the_page(committed, tmp_path):
    example = committed.copy(tmp_path)
    done = preloaded.run("-m", "pytest_gpumem.tools.main", *shlex.split(ADVISE)[1:], cwd=example.folder)
    assert done.returncode == 0, done.stderr
    shown, said = (
        [re.sub(r" +[\d.]+ ms.*", "", line) for line in lines] for lines in (ADVICE.printed, done.stdout.splitlines())
    )
    assert [line for line in shown if line not in said] == []


def test_the_baselines_of_a_file_are_shown(monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    done = CliRunner().invoke(main, shlex.split(SHOW)[1:])
    assert done.exit_code == 0
    assert "tests/test_gpt.py::test_train_step" in done.output
    assert "test_convnet" not in done.output


@OF_THE_PAGES
@pytest.mark.thorough
def test_what_a_green_gate_says_and_exports_is_that_of_the_pages(all_reversed, tmp_path, monkeypatch):
    assert follows(GREEN, all_reversed.output.splitlines())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.json").write_text(all_reversed.json, encoding="utf-8")
    done = CliRunner().invoke(main, shlex.split(EXPORT)[1:])
    assert done.exit_code == 0
    assert done.output.splitlines() == EXPORTED.printed
    assert (tmp_path / "bencher.json").exists()


@pytest.mark.thorough
def test_the_matrix_is_shown_as_a_table_of_what_each_config_saves(all_reversed):
    run = all_reversed
    configs = [f"{precision}{ckpt}" for precision in ("fp32", "amp-bf16") for ckpt in CHECKPOINTING]
    if not HAS_AVX512:
        configs = configs[: len(CHECKPOINTING) + 1]
    table = run.output.partition("tests/test_gpt_configs.py::test_matrix ")[2].splitlines()[1 : 1 + len(configs)]
    assert [line.split()[0] for line in table] == configs
    peaks = {
        config: run.figures[f"test_matrix[{config.replace(',checkpoint=', '-ckpt-')}]"]["train_step.peak_allocated"]
        for config in configs
    }
    for line, config in zip(table[1:], configs[1:], strict=True):
        assert f"+{(1 - peaks[config] / peaks['fp32']) * 100:.1f} %" in line
    if HAS_AVX512:
        bytes_of = [line.split()[:5] for line in table]
        assert [line.split()[:5] for line in MATRIX.printed[2:-1]] == bytes_of[1:]


def _failed(case: ElementTree.Element) -> str:
    """The text of a test's failure, empty when it passed."""
    return "\n".join(str(failure.text) for failure in case.iter("failure"))
