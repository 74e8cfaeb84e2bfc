"""A failure says what grew, in which module, at which line: ``--gpumem-explain`` from end to end."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.judging.baselines.format import parse

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem.judging.gate.baseline import Baseline
    from tests.conftest import Project

MODEL = """
class Block(torch.nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        hidden = self.up(x)
        hidden = hidden.relu()
        return x + self.down(hidden)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()
"""
RELU = "hidden = hidden.relu()"
GATED = "hidden = hidden.relu() * hidden.sigmoid()"
STEP = "from model import Model\n\n\ndef test_it(gpumem):\n    gpumem.train_step(Model, torch.ones(512, 128))\n"
MARKED = (
    "from model import Model\n\n\n@pytest.mark.gpumem\ndef test_it():\n    Model()(torch.ones(512, 128)).backward()\n"
)
RECORD = ("--no-gpumem-time", "--gpumem-update=new")
COMPARE = ("--no-gpumem-time", "--gpumem-baseline", "--junitxml=report.xml")


def write_model(project: Project, source: str = MODEL, name: str = "model.py") -> None:
    project.write(source, name)


def place(project: Project, text: str, name: str = "model.py") -> str:
    """The one line of a file that has a text, as failures name it: ``model.py:13``."""
    lines = (project.path / name).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return f"{name}:{number}"


def grown(result: pytest.RunResult) -> list[str]:
    """The rows under "what grew", without those of less than 1 %."""
    lines = [line.strip() for line in result.outlines]
    if not any(line.startswith("what grew") for line in lines):
        return []
    start = next(number for number, line in enumerate(lines) if line.startswith("what grew"))
    rows = lines[start + 1 : lines.index("", start)]
    return [row for row in rows if not re.match(r"\d+ other change", row)]


def explained(project: Project, test: str = "test_it") -> dict[str, Any] | None:
    """The explanation of the last run's measurement of a test."""
    (verdict,) = project.verdicts()[test]["verdicts"]
    explanation: dict[str, Any] | None = verdict["measurement"]["explanation"]
    return explanation


def entry(project: Project, test: str = "test_it") -> Baseline:
    """The only baseline of a test in test_it.py."""
    (text,) = project.stored().values()
    (found,) = [one for key, one in parse(text, "test_it.py").items() if key.test == test]
    return found


def calls(project: Project) -> dict[str, int]:
    """How often each of those that told ``calls.txt`` was called since it was last asked."""
    path = project.path / "calls.txt"
    names = path.read_text(encoding="utf-8").split() if path.exists() else []
    path.unlink(missing_ok=True)
    return {name: names.count(name) for name in names}


COUNTED = """
from pathlib import Path


def called(name):
    with Path("calls.txt").open("a") as file:
        file.write(f"{name}\\n")
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the store that the first test records, which others copy."""
    return tmp_path_factory.mktemp("kept") / "store"


@pytest.fixture
def recorded(project: Project, kept: Path) -> Project:
    """A project with a baseline of a step of the model."""
    write_model(project)
    project.write(STEP)
    if kept.exists():
        shutil.copytree(kept, project.store)
    else:
        project.run(*RECORD)
        shutil.copytree(project.store, kept)
    return project


# What grew


@pytest.mark.parametrize("source", [STEP, MARKED], ids=["step", "call"])
def test_growth_is_told_with_its_module_line_tensors_and_why(project, source):
    write_model(project)
    project.write(source)
    project.run(*RECORD)
    write_model(project, MODEL.replace(RELU, GATED))
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    first, second, *_ = grown(result)
    line = place(project, GATED)
    assert re.fullmatch(
        rf"activations +- +4\.19 MB +\+4\.19 MB +blocks\.\* +{line} +sigmoid +4 x float32\[512, 512\] +saved twice: .*",
        first,
    )
    assert re.match(rf"activations .*\+3\.15 MB +blocks\.\{{0-2\}} +{line} +mul +3 x float32\[512, 512\]", second)
    report = (project.path / "report.xml").read_text(encoding="utf-8")
    assert first in report[report.index("<failure") : report.index("</failure>")]


def test_a_layer_that_is_no_longer_checkpointed_is_told_as_that(project):
    checkpointed = MODEL.replace("x = block(x)", "x = self.run(block, x)").replace(
        "    def forward(self, x):\n        for",
        "    def run(self, block, x):\n"
        "        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)\n\n"
        "    def forward(self, x):\n        for",
    )
    write_model(project, checkpointed)
    project.write(STEP.replace("torch.ones", "torch.rand"))
    project.run(*RECORD)
    assert "4 x blocks.*" in next(iter(project.stored().values()))
    write_model(
        project,
        checkpointed.replace(
            "return torch", "if block is not self.blocks[0]:\n            return block(x)\n        return torch"
        ),
    )
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    first = grown(result)[0]
    assert place(project, RELU) in first
    assert first.endswith("checkpointing off: blocks.* was recomputed in 4 calls, now in 1")


# What did not grow


def test_a_row_names_the_layers_that_differ_where_not_all_do(recorded):
    ((file, stored),) = recorded.stored().items()
    assert "| blocks.*.up |" in stored

    wide = "torch.nn.ModuleList(Block(hidden) for hidden in (512, 512, 512, 2048))"
    source = MODEL.replace("torch.nn.ModuleList(Block() for _ in range(4))", wide)
    source = source.replace("def __init__(self, width=128)", "def __init__(self, hidden, width=128)")
    write_model(recorded, source.replace("4 * width", "hidden"))
    rows = grown(recorded.run(*COMPARE))
    paths = {path for row in rows for path in re.findall(r"blocks\.\S+", row)}
    assert paths
    assert all(path.startswith("blocks.3.") or path == "blocks.3" for path in paths)
    assert any("was float32[512, 512], now float32[512, 2048]" in row for row in rows)

    recorded.run("--no-gpumem-time", "--gpumem-update=all")
    assert "| blocks.{0-2}.up |" in recorded.stored()[file]
    assert "| blocks.3.up |" in recorded.stored()[file]
    # A baseline from before layers were named is equal.
    older = re.sub(r"blocks\.(3|\{0-2\})", "blocks.*", recorded.stored()[file])
    (recorded.store / file).write_text(older, encoding="utf-8")
    write_model(recorded, source.replace("4 * width", "hidden").replace(RELU, GATED))
    rows = grown(recorded.run(*COMPARE))
    assert {cells[6] for row in rows if len(cells := re.split("  +", row)) > 6} == {"MulBackward0", "mul", "sigmoid"}


def test_more_work_in_one_layer_is_told_with_that_layer(project):
    source = MODEL.replace("hidden = hidden.relu()", "hidden = hidden.relu()\n        hidden = self.more(hidden)")
    source = source.replace(
        "    def forward(self, x):\n        hidden",
        "    more = torch.nn.Identity()\n\n    def forward(self, x):\n        hidden",
    )
    write_model(project, source)
    project.write(STEP)
    project.run(*RECORD)
    write_model(project, source.replace("range(4))\n", "range(4))\n        self.blocks[2].more = torch.exp\n"))
    lines = [line.strip() for line in project.run(*COMPARE).outlines]
    start = lines.index(next(line for line in lines if line.startswith("more operators")))
    rows = [re.split("  +", line)[:3] for line in lines[start + 1 : lines.index("", start)]]
    assert rows == [["exp", "+1", "blocks.2"], ["mul", "+1", "blocks.2"]]


OWN_STEP = """
def test_it(gpumem):
    weight, ones = torch.nn.Parameter(torch.ones(500, 500)), torch.ones(1000, 500)

    def step():
        x = ones @ weight
        y = x.exp()
        {between}
        y.sum().backward()
        weight.grad = None

    gpumem.measure(step)
"""
UNCHANGED = "(y * 2).sum()"
COPYING = "z = y * 2; z.t().contiguous().sum(); del z"


def test_a_peak_that_moved_to_another_phase_tells_what_grew_there_and_where_it_was(project):
    project.write(OWN_STEP.format(between=UNCHANGED))
    project.run(*RECORD)
    ((file, text),) = project.stored().items()
    project.write(OWN_STEP.format(between=COPYING))
    told = "note: the peak is in forward; in the baseline it was in backward, whose peak is now 10.00 MB"
    result = project.run(*COMPARE)
    lines = [line.strip() for line in result.outlines]
    (row,) = [line for line in grown(result) if "MB" in line and not line.startswith("note")]
    assert re.match(r"temporaries +- +2\.00 MB +\+2\.00 MB .*contiguous", row)
    assert told in lines
    assert any(line.startswith("what grew in forward ") for line in lines)

    # A baseline without the tensors of forward: nothing that is in both phases is blamed.
    without = re.sub(r"(?m)^other_phases = \[\n( .*\n)*\]\n", "", text)
    assert without != text
    (project.store / file).write_text(without, encoding="utf-8")
    lines = [line.strip() for line in project.run(*COMPARE).outlines]
    start = next(n for n, line in enumerate(lines) if line.startswith("in forward, not in backward "))
    rows = lines[start + 1 : lines.index("", start)]
    (copied,) = [row for row in rows[:-1] if "MB" in row]
    assert re.match(r"temporaries +2\.00 MB .*contiguous", copied)
    assert rows[-1] == f"{told}; the baseline does not list the tensors of forward"

    # What grew where the peak was, too, does not take the place of what moved it.
    project.write(OWN_STEP.format(between=f"held = torch.ones(300_000); {COPYING}"))
    result = project.run(*COMPARE)
    (held,) = [row for row in grown(result) if "MB" in row]
    assert re.match(r"\w+ +- +1\.20 MB +\+1\.20 MB .*ones", held)
    lines = [line.strip() for line in result.outlines]
    assert any(line.startswith("what grew in backward ") for line in lines)
    start = next(n for n, line in enumerate(lines) if line.startswith("in forward, not in backward "))
    assert [row for row in lines[start + 1 : lines.index("", start)][:-1] if "MB" in row] == [copied]


def moved(project: Project, model: str, old: str = RELU, new: str = RELU) -> None:
    """The same model with its block in a module of its own, further down and in another function, under another name."""
    source = model.replace(old, new)
    block, rest = source.split("\n\n\nclass Model")
    block = block.replace(new, "hidden = self.act(hidden)").replace("hidden.relu()", "activated")
    block += f"\n\n    def act(self, hidden):\n        {new}\n        return hidden\n"
    write_model(project, "\n# moved\n\n\n" + block, "layers.py")
    write_model(project, "from layers import Block\n\n\nclass Model" + rest.replace("blocks", "layers"))


def test_a_refactoring_is_no_growth(recorded):
    moved(recorded, MODEL)
    recorded.run(*COMPARE).assert_outcomes(passed=1)
    recorded.write(STEP.replace("def test_it", "@pytest.mark.gpumem(max_gb=0.001)\ndef test_it"))
    result = recorded.run(*COMPARE)
    result.assert_outcomes(failed=1)
    assert grown(result) == []
    result.stdout.fnmatch_lines(["*over budget: peak*", f"*layers.?*{place(recorded, RELU, 'layers.py')}*"])


# Tests that only have the marker

KINDS = """
import unittest

SIZE = 1_000_000


def work(name, size=None):
    called(name)
    return torch.zeros(SIZE if size is None else size)


@pytest.mark.gpumem
def test_function():
    work("function")


@pytest.fixture
def held():
    return torch.empty(500_000)


@pytest.mark.gpumem
def test_fixture(held):
    work("fixture")


@pytest.mark.gpumem
@pytest.mark.parametrize("extra", [1, 2])
def test_parametrised(extra):
    work(f"parametrised-{extra}")


class TestClass:
    @pytest.mark.gpumem
    def test_method(self):
        work("method")


@pytest.mark.gpumem
class TestCase(unittest.TestCase):
    def setUp(self):
        self.own = torch.empty(500_000)

    def test_unittest(self):
        work("unittest")


@pytest.mark.gpumem
class TestAsyncCase(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.extra = 0

    async def test_unittest_async(self):
        work("unittest-async", SIZE + self.extra)


@pytest.mark.anyio
@pytest.mark.gpumem
async def test_async():
    import anyio

    kept = work("async")
    await anyio.sleep(0)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.gpumem
def test_same():
    work("same", 1_000_000)


@pytest.mark.gpumem
def test_wrong():
    work("wrong")
    assert SIZE == 1_000_000, "for its own reason"
"""
REGRESSING = {
    "function",
    "fixture",
    "parametrised-1",
    "parametrised-2",
    "method",
    "unittest",
    "unittest-async",
    "async",
}


@pytest.fixture
def kinds(project: Project) -> Project:
    """A project with tests of every kind that have only the marker; all that regress allocate at one line."""
    project.plugins.append("anyio.pytest_plugin")
    project.write(COUNTED + KINDS)
    project.run(*RECORD)
    calls(project)
    project.write(COUNTED + KINDS.replace("SIZE = 1_000_000", "SIZE = 3_000_000"))
    return project


def test_a_test_of_any_kind_that_regresses_is_run_once_more_and_no_other_is(kinds):
    result = kinds.run(*COMPARE, "-vv")
    result.assert_outcomes(failed=9, passed=1)
    assert calls(kinds) == dict.fromkeys(REGRESSING, 2) | {"same": 1, "wrong": 1}
    line = place(kinds, "return torch.zeros(SIZE if", "test_it.py")
    rows = [text for text in result.outlines if text.startswith("  ")]
    told = [text for text in rows if text.endswith("was float32[1000000], now float32[3000000]")]
    assert len(told) == len(REGRESSING)
    assert all(line in text and "+8.00 MB" in text for text in told)
    result.stdout.no_fnmatch_line("*the recorded run needed*")


def test_a_test_is_run_again_only_for_a_reason(kinds):
    result = kinds.run(*COMPARE, "--gpumem-explain=never")
    result.assert_outcomes(failed=9, passed=1)
    assert calls(kinds) == dict.fromkeys(REGRESSING | {"same", "wrong"}, 1)
    assert grown(result) == []
    assert explained(kinds, "test_function") is None
    kinds.run("--junitxml=report.xml")
    assert set(calls(kinds).values()) == {1}
    assert explained(kinds, "test_function") is None
    kinds.run(*COMPARE, "--gpumem-explain=always")
    assert calls(kinds) == dict.fromkeys(REGRESSING | {"same"}, 2) | {"wrong": 1}
    same = explained(kinds, "test_same")
    assert same is not None
    assert same["peak"]["total"] == 4_000_000


LEAVES_SOMETHING = {
    "gradients": """
@pytest.fixture
def model():
    return torch.nn.Linear(1000, 1000)


@pytest.mark.gpumem
def test_it(model):
    called("it")
    model(torch.ones(ROWS, 1000)).sum().backward()
""",
    "an attribute": """
class TestClass:
    @pytest.mark.gpumem
    def test_it(self):
        called("it")
        self.kept = torch.zeros(ROWS, 1000)
        torch.zeros(500, 1000)
""",
    "an attribute of a TestCase": """
import unittest


@pytest.mark.gpumem
class TestCase(unittest.TestCase):
    def setUp(self):
        self.kept = torch.zeros(ROWS, 1000)

    def test_it(self):
        called("it")
        torch.zeros(500, 1000)
""",
    "another state of random numbers": """
@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.mark.gpumem
def test_it(seeded):
    called("it")
    x = torch.ones(ROWS, 1000)
    x[torch.rand(ROWS) > 0.5].sum()
""",
    "a leak": """
KEPT = []


@pytest.mark.gpumem(max_retained="1 GB")
def test_it():
    called("it")
    KEPT.append(torch.zeros(500, 1000))
    torch.zeros(ROWS, 1000)
""",
}


@pytest.mark.parametrize("left", LEAVES_SOMETHING)
def test_a_second_run_begins_as_the_first_did_whatever_that_left(project, left):
    source = COUNTED + LEAVES_SOMETHING[left]
    project.write(source + "\n\nROWS = 1000\n")
    project.run(*RECORD)
    assert calls(project) == {"it": 2}
    found = next(iter(project.stored().values()))
    assert "composition" in found
    assert "unattributed" not in found
    project.write(source + "\n\nROWS = 2000\n")
    result = project.run(*COMPARE)
    assert calls(project) == {"it": 2}
    result.assert_outcomes(failed=1)
    assert any("ROWS" in text_at(project, row) for row in grown(result))
    result.stdout.no_fnmatch_line("*the recorded run needed*")


def text_at(project: Project, row: str) -> str:
    """The text of the line that a row names."""
    found = re.search(r"test_it\.py:(\d+)", row)
    lines = (project.path / "test_it.py").read_text(encoding="utf-8").splitlines()
    return lines[int(found.group(1)) - 1] if found is not None else ""


@pytest.mark.parametrize(
    ("way_out", "said"),
    [
        ("raise RuntimeError('only once\\nmore lines')", "RuntimeError: only once"),
        ("pytest.skip('not again')", "Skipped: not again"),
    ],
    ids=["raise", "skip"],
)
def test_a_test_that_cannot_be_run_twice_fails_by_its_regression_with_a_note(project, way_out, said):
    source = (
        "CALLS = []\n\n\n@pytest.mark.gpumem\ndef test_it():\n    if CALLS:\n        {way_out}\n"
        "    CALLS.append(1)\n    torch.empty({count})\n"
    )
    project.write(source.format(way_out="...", count=1_000_000))
    project.run(*RECORD)
    project.write(source.format(way_out=way_out, count=2_000_000))
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Memory regressed: peak 8.00 MB, baseline 4.00 MB*",
            f"  note: the measured code could not be run again to explain its peak: {said}",
            "gpumem: 1 gated, 1 regressed",
        ]
    )
    assert grown(result) == []


def test_a_test_that_needs_less_the_second_time_says_so(project):
    source = (
        "CACHE = {{}}\n\n\n@pytest.mark.gpumem\ndef test_it():\n"
        "    if 'table' not in CACHE:\n        CACHE['table'] = torch.zeros({count})\n        torch.zeros({count})\n"
    )
    project.write(source.format(count=500_000))
    project.run(*RECORD)
    assert entry(project).composition is None
    project.write(source.format(count=1_000_000))
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Memory regressed: peak 8.00 MB*",
            "*note: the recorded run needed 0 B, 8.00 MB less than the measured run, so *",
        ]
    )


def test_what_the_first_run_cached_is_there_in_the_second(project):
    write_model(project)
    source = (
        COUNTED
        + "from functools import lru_cache\nfrom model import Model\n\n\n@lru_cache\ndef load():\n    return Model()\n\n\n"
        + "@pytest.mark.gpumem(max_retained='1 GB')\ndef test_it():\n    called('it')\n"
        + "    load()(torch.ones(512, 128)).backward()\n    load().zero_grad()\n"
    )
    project.write(source)
    project.run(*RECORD)
    assert calls(project) == {"it": 2}
    found = entry(project).composition
    assert found is not None
    assert found.of("parameter") > 2_000_000
    write_model(project, MODEL.replace(RELU, GATED))
    result = project.run(*COMPARE)
    assert place(project, GATED) in grown(result)[0]
    result.stdout.no_fnmatch_line("*the recorded run needed*")


# Who has a composition


def test_a_step_has_a_composition_where_its_test_reads_it_or_asks_for_it(project):
    write_model(project)
    project.write(
        """
from model import Block, Model


class Model(Model):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])


def step(gpumem, **more):
    return gpumem.train_step(Model, torch.ones(256, 128), **more)


def activations(measurement):
    return measurement.composition.of("activation", "blocks.*")


def hidden(measurement):
    return getattr(measurement, "compo" + "sition")


def test_reads(gpumem):
    found = step(gpumem).composition
    assert sum(row.nbytes for row in found.rows) == found.total


def test_reads_in_a_helper(gpumem):
    assert activations(step(gpumem)) > 500_000


def test_asks(gpumem):
    assert hidden(step(gpumem, explain=True)).total > 1_000_000


def test_does_not(gpumem):
    step(gpumem)


def test_asks_not_to(gpumem):
    measurement = step(gpumem, explain=False)
    with pytest.raises(AttributeError):
        measurement.composition


class TestClass:
    def test_method_reads(self, gpumem):
        assert step(gpumem).composition.dtypes("blocks.*") == {"float32"}


@pytest.mark.parametrize("way", ["measure", "infer"])
def test_other_steps(gpumem, way):
    model = Model()
    batch = torch.ones(512, 128)
    m = gpumem.measure(lambda: model(batch)) if way == "measure" else gpumem.infer_step(model, batch)
    assert m.composition.total == m.peak_allocated
    assert sum(row.nbytes for row in m.composition.rows) == m.peak_allocated
"""
    )
    result = project.run("--no-gpumem-time", "--junitxml=report.xml")
    result.assert_outcomes(passed=8)
    with_one = {name for name in project.verdicts() if explained(project, name) is not None}
    assert with_one == {
        "test_reads",
        "test_reads_in_a_helper",
        "test_asks",
        "test_method_reads",
        "test_other_steps[measure]",
        "test_other_steps[infer]",
    }


@pytest.mark.parametrize(
    "call", ["train_step(Model, torch.ones(512, 128), explain=True)", "measure(lambda: torch.ones(9))"]
)
def test_under_never_reading_a_composition_says_what_to_do(project, call):
    write_model(project)
    project.write(f"from model import Model\n\n\ndef test_it(gpumem):\n    gpumem.{call}.composition\n")
    result = project.run("--no-gpumem-time", "--gpumem-explain=never")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *MissingComposition: the composition of * was not recorded*--gpumem-explain=always *never*"]
    )


def test_a_region_has_no_composition_and_says_what_has(project):
    project.write(
        "def test_it(gpumem):\n    with gpumem.track() as region:\n        torch.ones(9)\n    region.measurement.composition\n"
    )
    result = project.run("--gpumem-explain=always")
    result.stdout.fnmatch_lines(
        [
            "E *MissingComposition: *'region', a region, was not recorded; gpumem.measure, train_step, infer_step, load and loop*"
        ]
    )


# The store


def test_no_composition_is_kept_under_never_and_update_all_supplies_it(project):
    write_model(project)
    project.write(STEP)
    project.run(*RECORD, "--gpumem-explain=never")
    (text,) = project.stored().values()
    assert "composition" not in text
    bare = entry(project)
    project.run(*RECORD)
    assert list(project.stored().values()) == [text]
    project.run("--no-gpumem-time", "--gpumem-update=all")
    whole = entry(project)
    assert whole.composition is not None
    assert whole.metrics == bare.metrics
    assert whole.composition.total == bare.metrics["peak_allocated"]


def test_lines_that_moved_are_no_news_to_the_store(recorded):
    before = recorded.stored()
    write_model(recorded, 100 * "\n" + MODEL)
    result = recorded.run("--no-gpumem-time", "--gpumem-update=all", "--gpumem-explain=always", "--junitxml=report.xml")
    result.stdout.fnmatch_lines(["gpumem store: 0 baselines written (all), 1 left as it was"])
    assert recorded.stored() == before
    now = explained(recorded)
    assert now is not None
    assert any(place(recorded, RELU) in row for row in now["peak"]["rows"])
    assert place(recorded, RELU) not in next(iter(before.values()))


# Without anything to compare with, and beside the peak


def test_retained_over_budget_tells_what_was_retained_and_where(project):
    project.write(
        "KEPT = []\n\n\n@pytest.mark.gpumem(max_retained='1 MB')\ndef test_it():\n"
        "    KEPT.append(torch.zeros(500, 1000))\n    torch.zeros(4_000_000)\n\n\n"
        "@pytest.mark.gpumem(max_retained='1 MB')\ndef test_step(gpumem):\n"
        "    gpumem.measure(lambda: KEPT.append(torch.zeros(600, 1000)))\n"
    )
    result = project.run("--no-gpumem-time", "-vv")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "Memory over budget: retained 2.00 MB, budget 1.00 MB*",
            "  what was retained *",
            f"  * 2.00 MB *{place(project, 'zeros(500', 'test_it.py')} *zeros *1 x float32?500, 1000?",
            "  kept in: test_it.KEPT?...?",
            "Memory over budget: retained 2.40 MB, budget 1.00 MB*",
            "  kept by each step *",
            f"  * 2.40 MB *{place(project, 'zeros(600', 'test_it.py')} *zeros *1 x float32?600, 1000?",
            "  kept in: test_it.KEPT?...?",
        ]
    )
    result.stdout.no_fnmatch_line("*what is there at the peak*")


CYCLE = """
class Trainer:
    def __init__(self):
        self.buffer = torch.zeros(500, 1000)
        self.hook = {hook}

    def save(self): ...


@pytest.mark.gpumem
def test_it():
    Trainer()


def test_step(gpumem):
    gpumem.measure(lambda: Trainer())
"""


def test_memory_that_hangs_in_a_reference_cycle_is_told_with_the_types_of_the_cycle(project):
    project.write(CYCLE.format(hook="None"))
    project.run(*RECORD)
    project.write(CYCLE.format(hook="self.save"))
    result = project.run(*COMPARE, "-vv")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        2
        * [
            "Memory regressed: cyclic garbage 2.00 MB, baseline 0 B*",
            "  held by cycles *",
            f"  * 2.00 MB *{place(project, 'zeros(500', 'test_it.py')} *zeros *1 x float32?500, 1000?",
            "  cycle: Trainer -> *method -> Trainer",
        ]
    )
    assert {line for line in result.outlines if line.startswith("  cycle: ")} == {
        line for line in result.outlines if line.startswith("  cycle: Trainer -> ")
    }


# Out of memory

OUT_OF_MEMORY = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1000, 1000)

    def forward(self, x):
        x = self.first(x)
        return x.sum() + torch.empty(1 << 45).sum()
"""
OUT_OF_MEMORY_TESTS = {
    "step": "def test_it(gpumem):\n    called('test')\n    gpumem.train_step(Model, torch.ones(500, 1000))\n",
    "measure": (
        "def test_it(gpumem):\n    called('test')\n    model = Model()\n    batch = torch.ones(500, 1000)\n"
        "    gpumem.measure(lambda: model(batch))\n"
    ),
    "call": (
        "@pytest.mark.gpumem\ndef test_it():\n    called('test')\n    model = Model()\n    batch = torch.ones(500, 1000)\n"
        "    model(batch)\n"
    ),
}


@pytest.mark.parametrize("case", OUT_OF_MEMORY_TESTS)
def test_out_of_memory_is_told_with_what_was_asked_for_and_what_was_there(project, case):
    write_model(project, OUT_OF_MEMORY)
    project.write(COUNTED + "from model import Model\n\n\n" + OUT_OF_MEMORY_TESTS[case])
    result = project.run("--no-gpumem-time", "--junitxml=report.xml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *RuntimeError: *DefaultCPUAllocator: *tried to allocate 140737488355328 bytes*",
            "*gpumem out of memory*",
            "memory ran out when 140.74 TB more were asked for; the step held 8.00 MB (in another run, which was recorded)",
            "what was there *",
            "*4.00 MB *first *1 x float32?1000, 1000?",
            f"activation* 2.00 MB *first *{place(project, 'self.first(x)')} *addmm *1 x float32?500, 1000?",
        ]
    )
    assert calls(project) == {"test": 2 if case == "call" else 1}
    assert project.verdicts()["test_it"]["failed_by_itself"]


def test_out_of_memory_is_not_told_under_never(project):
    write_model(project, OUT_OF_MEMORY)
    project.write(COUNTED + "from model import Model\n\n\n" + OUT_OF_MEMORY_TESTS["call"])
    result = project.run("--gpumem-explain=never")
    result.assert_outcomes(failed=1)
    assert calls(project) == {"test": 1}
    result.stdout.no_fnmatch_line("*gpumem out of memory*")


def test_out_of_memory_with_a_debugger_is_not_run_again(project):
    write_model(project, OUT_OF_MEMORY)
    project.write(COUNTED + "from model import Model\n\n\n" + OUT_OF_MEMORY_TESTS["call"])
    (project.path / "quiet.py").write_text(
        "import pdb\n\n\nclass Quiet(pdb.Pdb):\n    def interaction(self, frame, error):\n"
        "        traceback = getattr(error, '__traceback__', error)  # pytest gives the error itself from Python 3.13 on\n"
        "        while traceback.tb_next is not None:\n            traceback = traceback.tb_next\n"
        "        print('x is', traceback.tb_frame.f_locals['x'].shape)\n",
        encoding="utf-8",
    )
    result = project.run("--pdb", "--pdbcls=quiet:Quiet", "-s")
    result.assert_outcomes(failed=1)
    assert calls(project) == {"test": 1}
    result.stdout.fnmatch_lines(["*x is torch.Size(?500, 1000?)"])


def test_an_ordinary_error_of_a_step_is_not_run_again(project):
    project.write(
        COUNTED + "def wrong():\n    called('step')\n    raise RuntimeError('of its own')\n\n\n"
        "def test_it(gpumem):\n    gpumem.measure(wrong)\n"
    )
    project.run().assert_outcomes(failed=1)
    assert calls(project) == {"step": 1}


# Being explained changes no figure


CONFIGS = """
def test_configs(gpumem):
    gpumem.train_step(Model, torch.ones(512, 128), config="amp-bf16,checkpoint=blocks")


def test_again(gpumem):
    model, kept = Model(), []
    for number in range(2):
        gpumem.train_step(model, torch.ones(512, 128), name=f"train-{number}")
        with gpumem.track(f"region-{number}"):
            kept.append(model(torch.ones(512, 128)))
"""


def test_figures_are_the_same_whether_steps_are_explained_or_not_in_any_order(project):
    write_model(project)
    tests = [
        MARKED.partition("\n\n\n")[2].replace("test_it", "test_marked"),
        CONFIGS,
        CYCLE.format(hook="self.save").replace("test_it", "test_cycle").replace("test_step", "test_cycle_step"),
    ]
    tests = [source.replace("(512, 128)", "(32, 128)") for source in tests]
    project.write("\n\n".join(["from model import Model\n", *tests]))
    never = project.figures("--no-gpumem-time", "--gpumem-explain=never")
    assert len(never) == 5
    project.write("\n\n".join(["from model import Model\n", *reversed(tests)]))
    assert project.figures("--no-gpumem-time", "--gpumem-explain=always") == never


def test_random_numbers_after_a_step_do_not_depend_on_whether_it_was_explained(project):
    write_model(project, MODEL.replace(RELU, "hidden = torch.nn.functional.dropout(hidden)"))
    project.write(
        "import json\nfrom pathlib import Path\nfrom model import Model\n\n\ndef test_it(gpumem):\n    torch.manual_seed(0)\n"
        "    gpumem.train_step(Model, torch.ones(512, 128))\n"
        "    Path('drawn.json').write_text(json.dumps(torch.rand(3).tolist()))\n"
    )
    drawn = []
    for mode in ("always", "never"):
        project.run("--no-gpumem-time", f"--gpumem-explain={mode}").assert_outcomes(passed=1)
        drawn.append(json.loads((project.path / "drawn.json").read_text(encoding="utf-8")))
    assert drawn[0] == drawn[1]


def test_a_model_that_a_call_built_and_left_in_a_cycle_is_garbage_as_a_whole(project):
    project.write(
        "import torch\n\n\nclass Trainer:\n    def __init__(self):\n        self.model = torch.nn.Linear(500, 1000)\n"
        "        self.optimizer = torch.optim.AdamW(self.model.parameters())\n        self.again = self.step\n\n"
        "    def step(self):\n        self.model(torch.ones(4, 500)).sum().backward()\n        self.optimizer.step()\n\n\n"
        "@pytest.mark.gpumem\ndef test_it():\n    Trainer().step()\n"
    )
    project.run("--no-gpumem-time", "--gpumem-explain=always", "--junitxml=report.xml")
    found = explained(project)
    assert found is not None
    (verdict,) = project.verdicts()["test_it"]["verdicts"]
    assert verdict["measurement"]["metrics"]["cyclic_garbage"] == found["garbage"]["total"] > 8_000_000
    assert found["retained"]["total"] == verdict["measurement"]["metrics"]["retained"] == 0


MAPPED = """
def doubled(row):
    return (row * 2 + 1).square()


def test_step(gpumem):
    rows = torch.ones(64, 4096)
    gpumem.measure(lambda: torch.vmap(doubled)(rows), name="first")
    gpumem.measure(lambda: torch.vmap(doubled)(rows), name="second")


@pytest.mark.gpumem
def test_call():
    torch.vmap(doubled)(torch.ones(64, 4096))
"""


def test_steps_under_vmap_keep_their_composition_and_name_what_grew(project):
    project.write(MAPPED)
    project.run(*RECORD).assert_outcomes(passed=2)
    (text,) = project.stored().values()
    entries = parse(text, "test_it.py")
    assert len(entries) == 3
    for entry in entries.values():
        assert entry.metrics["peak_allocated"] > 3_000_000, "the first recording left no block behind"
        assert entry.composition is not None
    project.write(MAPPED.replace("row * 2 + 1", "row * 2 + row.exp()"))
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=2)
    (row,) = grown(result)
    line = place(project, "row.exp()", "test_it.py")
    assert re.search(rf" {line} +exp +1 x float32\[64, 4096\]$", row)


AUTOCAST = """
@pytest.mark.parametrize("rows", [64, 1024], ids=["few rows", "as many bytes as the weight"])
def test_it(gpumem, rows):
    model = torch.nn.Linear(512, 1024)
    batch = torch.ones(rows, 512)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch).float().softmax(-1).sum().backward()
        model.zero_grad()

    gpumem.measure(step, explain=True)
"""


def test_a_weights_copy_in_autocasts_cache_is_told_as_such(project):
    project.write(AUTOCAST)
    project.run("--gpumem-update=new").assert_outcomes(passed=2)
    (text,) = project.stored().values()
    few, many = text.split("[tests", 2)[1:]
    if "few rows" not in few.partition("\n")[0]:
        few, many = many, few
    assert re.search(r"Linear \| autocast's cached cast \|.*bfloat16\[1024, 512\]", few)
    assert "Linear | linear" not in few.replace("bfloat16[64, 512]", "")
    # The copy of the batch is as large: which of the two is the cache's cannot be told.
    assert "autocast's cached cast" not in many
