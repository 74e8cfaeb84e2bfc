"""Work that repeats exactly, gated from end to end without a clock: what crept in fails, on any machine."""

from __future__ import annotations

import json
import re
import shutil

import pytest

STEP = """
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def attend(self, x):
        q, k, v = self.first(x).unsqueeze(1).split(16, -1)
        return ({attend}).squeeze(1)

    def forward(self, x):
        y = self.second({run}) + {bias}
        return y.square().mean()


def loss(output, _):
    {before_loss}
    return output


def test_step(gpumem):
    gpumem.train_step(Model, torch.ones(2, 6, 16), loss=loss)
"""
AS_IT_WAS = {
    "attend": "attention(q, k, v)",
    "run": "self.attend(x)",
    "bias": "torch.ones(16, device=x.device)",
    "before_loss": "pass",
}
PLANTED = {
    "a value is read": (
        {"before_loss": "output.item()"},
        r"Work regressed: syncs 1, baseline 0: \+1, allowed \+0",
        {"operators", "syncs"},
    ),
    "a tensor is printed": (
        {"before_loss": "str(output)"},
        r"Work regressed: syncs 1, baseline 0: \+1, allowed \+0",
        {"syncs"},
    ),
    "computed again": (
        {"run": "checkpoint(self.attend, x, use_reentrant=False)"},
        r"Work regressed: FLOPs 94\.46 kFLOP, baseline 71\.42 kFLOP: \+23\.04 kFLOP \(\+32\.3 %\), allowed \+0\.0 %",
        {"flops", "operators"},
    ),
    "fusion lost": (
        {"attend": "((q @ k.transpose(-1, -2)) * 0.25).softmax(-1) @ v"},
        r"Work regressed: operators \d+, baseline \d+: \+\d+ \(\+\d+\.\d %\), allowed \+0\.0 %",
        {"operators"},
    ),
    "made on the host": (
        {"bias": "torch.ones(16).to(x.device)"},
        r"Work regressed: syncs 1, baseline 0: \+1, allowed \+0",
        {"operators", "syncs"},
    ),
}


def write(project, **planted):
    project.write(STEP.format(**AS_IT_WAS | planted))


def outcomes(project) -> dict[str, str]:
    """What the gate said of each count, in the last run with a report."""
    (verdict,) = project.verdicts()["test_step"]["verdicts"]
    counts = ("flops", "operators", "syncs", "launches")
    return {metric["metric"]: metric["outcome"] for metric in verdict["metrics"] if metric["metric"] in counts}


def gate(project, *args: str):
    return project.run("--gpumem-baseline", "--no-gpumem-time", "--junitxml=report.xml", *args)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder for the store that the first test records, which others copy."""
    return tmp_path_factory.mktemp("kept") / "store"


@pytest.fixture
def recorded(project, kept):
    write(project)
    if not kept.exists():
        project.run("--gpumem-update=new", "--no-gpumem-time")
        shutil.copytree(project.store, kept)
    shutil.copytree(kept, project.store, dirs_exist_ok=True)
    return project


@pytest.mark.parametrize("name", PLANTED)
def test_what_crept_in_fails_the_test_and_is_told_with_module_and_line(recorded, name):
    planted, headline, regressed = PLANTED[name]
    write(recorded, **planted)
    result = gate(recorded)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert {name for name, outcome in outcomes(recorded).items() if outcome == "regressed"} == regressed
    result.stdout.re_match_lines([headline])
    result.stdout.fnmatch_lines(["  accept:   pytest test_it.py::test_step --gpumem-update=all*"])
    title, rows = WHERE[name]
    assert told(result, title) == [[*row[:-1], line_of(recorded, row[-1])] if len(row) > 1 else row for row in rows]


SYNC = '    " | test_it.py:25 |  | 1 _local_scalar_dense",\n'
MADE_OF = re.compile(r"^(flops|operators|syncs)_at = \[\n( .*\n)*\]\n", re.MULTILINE)


def test_less_work_is_an_improvement_that_is_lowered_on_request(project):
    write(project, **PLANTED["a value is read"][0])
    project.run("--gpumem-update=new", "--no-gpumem-time")
    (before,) = project.stored().values()
    write(project)
    assert gate(project, "--gpumem-update=improved").ret == 0
    assert outcomes(project) == {"flops": "ok", "operators": "improved", "syncs": "improved"}
    (after,) = project.stored().values()
    # The line of what made the difference goes; the others are where they were.
    both = (re.sub(MADE_OF, "", text).splitlines() for text in (before, after))
    changed = [pair for pair in zip(*both, strict=True) if pair[0] != pair[1]]
    assert [re.sub(r"\d+", "N", line) for _, line in changed] == ["operators = N", "syncs = N"]
    assert SYNC in before
    assert SYNC not in after


# Which operators are more, and where


def told(result: pytest.RunResult, title: str) -> list[list[str]]:
    """The cells of the table under "more operators" or such in a failure."""
    lines = [line.strip() for line in result.outlines]
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    return [re.split("  +", line) for line in lines[start + 1 : lines.index("", start)]]


def line_of(project, text: str) -> str:
    (number,) = [n for n, line in enumerate((project.path / "test_it.py").read_text().splitlines(), 1) if text in line]
    return f"test_it.py:{number}"


WHERE = {
    "a value is read": ("more syncs", [["_local_scalar_dense", "+1", "(no module)", "output.item()"]]),
    "a tensor is printed": ("more syncs", [["__repr__()", "+1", "(no module)", "str(output)"]]),
    "made on the host": ("more syncs", [["to()", "+1", "Model", "torch.ones(16).to(x.device)"]]),
    "computed again": (
        "more FLOPs",
        [
            ["addmm", "+18.43 kFLOP", "first", "self.first(x)"],
            ["_scaled_dot_product_flash_attention_for_cpu", "+4.61 kFLOP", "Model", "return ("],
        ],
    ),
    "fusion lost": (
        "more operators",
        [
            ["bmm", "+6", "Model", "return ("],
            ["mul", "+2", "Model", "return ("],
            ["_softmax", "+1", "Model", "return ("],
            ["_softmax_backward_data", "+1", "Model", "return ("],
            ["_scaled_dot_product_flash_attention_for_cpu", "-1", "Model", "return ("],
            ["1 other: -1 together"],
        ],
    ),
}


def test_an_operator_that_moved_is_not_told_beside_one_that_came(recorded):
    path = recorded.path / "test_it.py"
    path.write_text(
        path.read_text().replace("class Model", "# moved\n\n\nclass Model").replace("return y", "return y.exp()")
    )
    line = line_of(recorded, "y.exp()")
    assert told(gate(recorded), "more operators") == [["exp", "+1", "Model", line], ["mul", "+1", "Model", line]]


def test_inference_and_code_of_ones_own_tell_it_too(project):
    source = """
class Net(torch.nn.Module):
    def forward(self, x):
        {work}
        return x


def test_infer(gpumem):
    gpumem.infer_step(Net, torch.ones(8, 8))


def test_measure(gpumem):
    net, x = Net(), torch.ones(8, 8)
    gpumem.measure(lambda: net(x))
"""
    project.write(source.format(work="x = x + 1"))
    project.run("--gpumem-update=new")
    project.write(source.format(work="x = (x + 1) @ x"))
    result = gate(project, "-vv")
    result.assert_outcomes(failed=2)
    row = rf"mm +\+1 +Net +{line_of(project, '@ x')}"
    assert len(re.findall(row, result.stdout.str())) == 2


def test_a_baseline_that_does_not_say_what_its_counts_were_still_compares(recorded):
    (path,) = recorded.store.rglob("*.toml")
    whole = path.read_text()
    path.write_text(MADE_OF.sub("", whole))
    assert gate(recorded).ret == 0
    write(recorded, **PLANTED["fusion lost"][0])
    result = gate(recorded)
    first, *_ = told(result, "all operators")
    assert first[:2] == ["add_", "8"]
    result.stdout.fnmatch_lines(
        ["  note: the baseline does not list its operators; accepting the figures stores them*"]
    )
    write(recorded)
    assert gate(recorded, "--gpumem-update=all").ret == 0
    assert path.read_text() == whole


def test_without_explaining_operators_are_told_and_lines_are_not(recorded):
    write(recorded, **PLANTED["fusion lost"][0])
    rows = told(gate(recorded, "--gpumem-explain=never"), "more operators")
    assert rows[:2] == [["bmm", "+6"], ["mul", "+2"]]


def test_a_baseline_without_lines_tells_those_of_now(project):
    write(project)
    project.run("--gpumem-update=new", "--gpumem-explain=never")
    (text,) = project.stored().values()
    assert '    " |  |  | 8 mul_",\n' in text
    write(project, **PLANTED["fusion lost"][0])
    assert told(gate(project), "more operators")[0] == ["bmm", "+6", "Model", line_of(project, "return (")]
    write(project)
    assert gate(project, "--gpumem-update=all").ret == 0
    (text,) = project.stored().values()
    assert '    "second | test_it.py:20 |  | 1 addmm, 2 mm, 1 sum",\n' in text
    # Lines that are known are kept where nobody asks for them.
    assert gate(project, "--gpumem-update=all", "--gpumem-explain=never", "--gpumem-reason=again").ret == 0
    assert list(project.stored().values()) == [text]


def test_a_step_runs_once_more_only_where_it_fails_or_becomes_a_baseline(project):
    source = """
RUNS = []


def test_step(gpumem):
    x = torch.ones(8, 8)

    def step():
        RUNS.append(True)
        return {work}

    gpumem.measure(step)
    with open("runs.txt", "a") as file:
        file.write(f"{{len(RUNS)}}\\n")
"""
    project.write(source.format(work="x + x"))
    for args in ((), ("--gpumem-update=new",), ("--gpumem-baseline",), ("--gpumem-update=all",)):
        project.run(*args)
    project.write(source.format(work="x + x + x"))
    project.run("--gpumem-baseline")
    never = project.run("--gpumem-baseline", "--gpumem-explain=never")
    never.assert_outcomes(failed=1)
    plain, new, passed, same, failed, unexplained = map(int, (project.path / "runs.txt").read_text().split())
    assert plain == passed == same == unexplained
    # A new baseline has its peak explained, too.
    assert (new, failed) == (plain + 2, plain + 1)


def test_reports_tell_which_operators_are_more(recorded):
    write(recorded, **PLANTED["a value is read"][0])
    gate(recorded, "--gpumem-report=r.json", "--gpumem-report=r.md", "--gpumem-report=r.html")
    line = line_of(recorded, "output.item()")
    report = json.loads((recorded.path / "r.json").read_text())
    (verdict,) = report["results"][0]["verdict"]["verdicts"]
    assert verdict["count_changes"] == {
        key: [f" | {line} |  | 1 _local_scalar_dense"] for key in ("operators", "syncs")
    }
    assert f" | {line} |  | 1 _local_scalar_dense" in verdict["measurement"]["by_operator"]["syncs"]
    text = (recorded.path / "r.md").read_text()
    assert f"| `_local_scalar_dense` | +1 | `(no module)` | `{line}` |" in text
    page = (recorded.path / "r.html").read_text()
    assert re.search(rf"More syncs.*?_local_scalar_dense.*?\+1.*?{line}", page, re.DOTALL)


COUNTS = re.compile(r"^(flops|operators|syncs) = \d+\n", re.MULTILINE)


def test_a_baseline_from_before_there_were_counts_is_completed_and_nothing_else(recorded):
    (path,) = recorded.store.rglob("*.toml")
    whole = path.read_text()
    path.write_text(MADE_OF.sub("", COUNTS.sub("", whole)))
    result = gate(recorded)
    assert result.ret == 0
    assert set(outcomes(recorded).values()) == {"new"}
    assert gate(recorded, "--gpumem-strict").ret == pytest.ExitCode.TESTS_FAILED
    assert gate(recorded, "--gpumem-strict", "--gpumem-update=new").ret == 0
    assert path.read_text() == whole
    assert gate(recorded, "--gpumem-strict").ret == 0


def test_a_step_that_fails_only_when_it_is_counted_is_told_and_still_measured(project):
    project.write(
        """
from torch.utils._python_dispatch import _get_current_dispatch_mode


def test_step(gpumem):
    def step():
        torch.ones(10)
        assert _get_current_dispatch_mode() is None, "watched"

    measurement = gpumem.measure(step)
    assert measurement.peak_allocated == 40
    with pytest.raises(AttributeError, match="has no flops; it has peak_allocated, growth, retained, cyclic_garbage"):
        measurement.flops
"""
    )
    result = project.run("--no-gpumem-time")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["note: test_it.py::test_step: not counted: AssertionError: watched"])


def test_what_runs_once_is_not_counted(project):
    project.write(
        """
CALLS = []


@pytest.mark.gpumem
def test_call():
    torch.ones(10)


def test_region(gpumem):
    with gpumem.track() as region:
        torch.ones(10)
    assert "operators" not in region.measurement.metrics


def test_measured(gpumem):
    measurement = gpumem.measure(lambda: CALLS.append(torch.ones(10)) or CALLS.clear())
    assert (measurement.flops, measurement.operators, measurement.syncs) == (0, 1, 0)
"""
    )
    figures = project.figures("--no-gpumem-time")
    assert {name: [key for key in found if key.endswith("operators")] for name, found in figures.items()} == {
        "test_call": [],
        "test_region": [],
        "test_measured": ["measure.operators"],
    }


def test_work_that_random_numbers_decide_on_repeats_with_them(project):
    project.settings('[tool.gpumem]\ntime_budget = "0.1 s"\n')
    project.write(
        """
def test_step(gpumem):
    x = torch.rand(100, generator=torch.Generator().manual_seed(0))

    def step():
        for _ in range(int(torch.randint(100, (1,)))):
            x.exp()

    def operators(name):
        torch.manual_seed(0)
        return gpumem.measure(step, name=name).operators

    assert operators("once") == operators("again")
"""
    )
    # However many steps it takes to time it.
    project.run(timed=True).assert_outcomes(passed=1)
