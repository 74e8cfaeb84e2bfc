"""A forgotten ``no_grad`` is named where it made memory grow, and nowhere else."""

from __future__ import annotations

import pytest

from pytest_gpumem.baselines.format import parse
from tests.test_explain import COMPARE, RECORD, grown

MODELS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Teacher(Net):
    pass


class Distilled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Net(), Teacher()

    def forward(self, x):
        {forward}
        return (self.student(x) - target).square().mean()
"""
WITHOUT_GRAD = "with torch.no_grad():\n            target = self.teacher(x)"
IN_INFERENCE = "with torch.inference_mode():\n            target = self.teacher(x)\n        target = target.clone()"
DETACHED = "target = self.teacher(x).detach()"
FORGOTTEN = "target = self.teacher(x)"

TRAIN = """
from models import Distilled


def test_it(gpumem):
    gpumem.train_step(Distilled, torch.ones(512, 64))
"""
MEASURE = """
from models import Net, Teacher


def test_it(gpumem):
    student, teacher = Net(), Teacher()
    x = torch.ones(512, 64)

    def step():
        with torch.set_grad_enabled({on}):
            target = teacher(x)
        (student(x) - target).square().mean().backward()
        student.zero_grad()
        teacher.zero_grad()

    gpumem.measure(step)
"""
MARKED = """
from models import Net, Teacher


@pytest.mark.gpumem
def test_it():
    student, teacher = Net(), Teacher()
    x = torch.ones(512, 64)
    with torch.set_grad_enabled({on}):
        target = teacher(x)
    (student(x) - target).square().mean().backward()
"""
INFER = """
from models import Net


class Switched(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        with torch.inference_mode({inference}):
            return self.net(x.clone())


def test_it(gpumem):
    gpumem.infer_step(Switched, torch.ones(512, 64))
"""


def write(project, forward: str = WITHOUT_GRAD, test: str = TRAIN, **filled: object) -> None:
    project.write(MODELS.replace("{forward}", forward), "models.py")
    project.write(test.format(**filled))


def hinted(result: pytest.RunResult, hint: str) -> list[str]:
    """The rows of what grew in modules of the teacher's, each of which has the hint, and no other one."""
    result.assert_outcomes(failed=1)
    rows = grown(result)
    assert any("models.py:12" in row for row in rows)
    for row in rows:
        assert row.endswith(hint) == ("models.py:12" in row or " teacher.blocks" in row), row
    return [row for row in rows if row.endswith(hint)]


# test_it_is_named_in_inference has the other mode.
@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(WITHOUT_GRAD, id="no_grad"),
        pytest.param(IN_INFERENCE, id="inference_mode", marks=pytest.mark.thorough),
    ],
)
def test_a_forgotten_no_grad_is_named_on_the_rows_that_grew(project, forward):
    write(project, forward)
    project.run(*RECORD)
    assert '"1 of 1 x teacher",' in next(iter(project.stored().values()))
    write(project, FORGOTTEN)
    rows = hinted(project.run(*COMPARE), "grad mode was off here")
    assert any("teacher.blocks.*" in row and "models.py:" in row for row in rows)


def test_a_forgotten_detach_is_named_as_what_backward_now_goes_through(project):
    write(project, DETACHED)
    project.run(*RECORD)
    write(project, FORGOTTEN)
    hinted(project.run(*COMPARE), "backward did not come here")


@pytest.mark.parametrize("test", [MEASURE, MARKED], ids=["measure", "call"])
def test_it_is_named_in_every_kind_of_measurement(project, test):
    write(project, test=test, on=False)
    project.run(*RECORD)
    write(project, test=test, on=True)
    rows = hinted(project.run(*COMPARE), "grad mode was off here")
    # The teacher runs first: of the student's modules the class stands before the path.
    assert all(" blocks.*" in row for row in rows)


def test_it_is_named_in_inference(project):
    write(project, test=INFER, inference=True)
    project.run(*RECORD)
    assert "(all)" in next(iter(project.stored().values()))
    write(project, test=INFER, inference=False)
    hinted(project.run(*COMPARE), "grad mode was off here")


@pytest.mark.thorough
def test_of_models_of_one_kind_it_is_told_how_often(project):
    test = MEASURE.replace("Net, Teacher", "Net").replace("Teacher()", "Net()")
    write(project, test=test, on=False)
    project.run(*RECORD)
    write(project, test=test, on=True)
    rows = hinted(project.run(*COMPARE), "calls")
    assert any(row.endswith("grad mode was off here in 3 of 6 calls") for row in rows)


def test_what_grew_for_another_reason_has_no_hint(project):
    write(project)
    project.run(*RECORD)
    write(project)
    wider = MODELS.replace("{forward}", WITHOUT_GRAD).replace("self.up(x).relu()", "self.up(x).relu().sigmoid()")
    project.write(wider, "models.py")
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    assert grown(result)
    assert "grad mode" not in result.stdout.str()
    assert "backward did" not in result.stdout.str()


def test_a_step_that_runs_everything_with_grad_keeps_nothing_of_it(project):
    write(project, "target = 0.0\n        self.teacher = None")
    project.run(*RECORD)
    (text,) = project.stored().values()
    assert "no_grad" not in text
    assert "no_backward" not in text
    (entry,) = parse(text, "test_it.py").values()
    assert entry.composition is not None
