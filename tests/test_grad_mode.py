"""A forgotten ``no_grad`` is named where it made memory grow, and nowhere else."""

from __future__ import annotations

import html
import json

import pytest

from pytest_gpumem.judging.baselines.format import parse
from tests.test_explain import COMPARE, RECORD, grown, place

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


def said(result: pytest.RunResult) -> str:
    """The sentence right before the rows of what grew in the teacher, which is in none of them."""
    result.assert_outcomes(failed=1)
    rows = grown(result)
    assert any("models.py:12" in row for row in rows)
    assert not any("rad mode" in row or "ackward did" in row for row in rows)
    lines = [line.strip() for line in result.outlines]
    (sentence,) = [line for line in lines if line.startswith(("Grad mode was", "Backward did"))]
    assert lines[lines.index(sentence) + 1].startswith("what grew")
    return sentence


KEPT = "autograd keeps its activations for backward."


# test_it_is_named_in_inference has the other mode.
@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(WITHOUT_GRAD, id="no_grad"),
        pytest.param(IN_INFERENCE, id="inference_mode", marks=pytest.mark.thorough),
    ],
)
def test_a_forgotten_no_grad_is_said_first_with_the_line_that_calls_the_module(project, forward):
    write(project, forward)
    project.run(*RECORD)
    assert '"1 of 1 x teacher",' in next(iter(project.stored().values()))
    write(project, FORGOTTEN)
    line = place(project, FORGOTTEN, "models.py")
    assert said(project.run(*COMPARE)) == (
        f"Grad mode was off in `teacher` (called at {line}) in the baseline, and is on now: {KEPT}"
    )


def test_a_forgotten_detach_is_named_as_what_backward_now_goes_through(project):
    write(project, DETACHED)
    project.run(*RECORD)
    write(project, FORGOTTEN)
    line = place(project, FORGOTTEN, "models.py")
    assert said(project.run(*COMPARE)) == (
        f"Backward did not reach `teacher` (called at {line}) in the baseline, and does now: "
        "its activations are kept until then."
    )


def test_parameters_that_are_not_frozen_any_more_are_what_backward_now_goes_through(project):
    write(project, f"self.teacher.requires_grad_(False)\n        {FORGOTTEN}")
    project.run(*RECORD)
    write(project, FORGOTTEN)
    assert said(project.run(*COMPARE)).startswith("Backward did not reach `teacher` (called at models.py:")


@pytest.mark.parametrize("test", [MEASURE, MARKED], ids=["measure", "call"])
def test_it_is_named_in_every_kind_of_measurement(project, test):
    write(project, test=test, on=False)
    project.run(*RECORD)
    write(project, test=test, on=True)
    line = place(project, "target = teacher(x)", "test_it.py")
    assert said(project.run(*COMPARE)).startswith(f"Grad mode was off in `Teacher` (called at {line}) in the baseline")


def test_it_is_named_in_inference(project):
    write(project, test=INFER, inference=True)
    project.run(*RECORD)
    assert "(all)" in next(iter(project.stored().values()))
    write(project, test=INFER, inference=False)
    assert said(project.run(*COMPARE)).startswith("Grad mode was off in `net` (called at test_it.py:")


@pytest.mark.thorough
def test_of_models_of_one_kind_it_is_told_how_often(project):
    test = MEASURE.replace("Net, Teacher", "Net").replace("Teacher()", "Net()")
    write(project, test=test, on=False)
    project.run(*RECORD)
    write(project, test=test, on=True)
    target, student = (place(project, text, "test_it.py") for text in ("= teacher(x)", "(student(x)"))
    assert said(project.run(*COMPARE)) == (
        f"Grad mode was off in 1 of 2 calls of `Net` (called at {target} or {student}) in the baseline, "
        f"and in none of 2 now: {KEPT}"
    )


def test_what_grew_for_another_reason_has_no_hint(project):
    write(project)
    project.run(*RECORD)
    write(project)
    wider = MODELS.replace("{forward}", WITHOUT_GRAD).replace("self.up(x).relu()", "self.up(x).relu().sigmoid()")
    project.write(wider, "models.py")
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    assert grown(result)
    assert "Grad mode" not in result.stdout.str()
    assert "Backward did" not in result.stdout.str()


def test_a_step_that_runs_everything_with_grad_keeps_nothing_of_it(project):
    write(project, "target = 0.0\n        self.teacher = None")
    project.run(*RECORD)
    (text,) = project.stored().values()
    assert "no_grad" not in text
    assert "no_backward" not in text
    (entry,) = parse(text, "test_it.py").values()
    assert entry.composition is not None


VALIDATED = """
from models import Net


def test_it(gpumem):
    net, x = Net(), torch.ones(512, 64)
    steps = 0

    def step():
        nonlocal steps
        steps += 1
        net(x[:256]).square().mean().backward()
        net.zero_grad()
        if steps % 5 == 0:
            with torch.set_grad_enabled({on}):
                net(x).square().mean()

    gpumem.measure(step)
"""


def test_a_validation_in_every_fifth_step_that_lost_its_no_grad_is_said(project):
    write(project, test=VALIDATED, on=False)
    project.run(*RECORD)
    write(project, test=VALIDATED, on=True)
    lines = [place(project, text, "test_it.py") for text in ("net(x[:256])", "net(x).square()")]
    assert said(project.run(*COMPARE)) == (
        f"Grad mode was off in 1 of 3 calls of `Net` (called at {lines[0]} or {lines[1]}) in the baseline, "
        f"and in none of 3 now: {KEPT}"
    )


def test_every_report_says_it_of_the_line_that_calls_the_module(project):
    write(project)
    again = TRAIN.replace("test_it", "test_again").replace("512", "640")
    project.write(again, "test_again.py")
    project.run(*RECORD)
    write(project, FORGOTTEN)
    line = place(project, FORGOTTEN, "models.py")
    sentence = f"Grad mode was off in `teacher` (called at {line}) in the baseline, and is on now: {KEPT}"
    files = [f"--gpumem-report=r.{suffix}" for suffix in ("json", "html", "md")]
    result = project.run(*COMPARE, *files)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([f"1 {line} *2 of 2 *", f"{line}: {sentence}"])
    report = json.loads((project.path / "r.json").read_text(encoding="utf-8"))
    assert [cause["reason"] for cause in report["causes"]] == [sentence]
    (change,) = project.verdicts()["test_it"]["verdicts"][0]["growth"]["graph"]
    assert (change["kind"], change["module"], change["lines"]) == ("no_grad", "teacher", [line])
    assert sentence in html.unescape((project.path / "r.html").read_text(encoding="utf-8"))
    assert "Grad mode was off in" in (project.path / "r.md").read_text(encoding="utf-8")
    assert sentence in project.gpumem("why", "test_it.py::test_it", "--report", "r.json").stdout


FUNCTION = """
def target(x, w):
    return torch.nn.functional.relu(x @ w).exp().sum(1)


def test_it(gpumem):
    w, x = torch.ones(64, 512, requires_grad=True), torch.ones(512, 64)

    def step():
        with torch.set_grad_enabled({on}):
            aim = {call}
        loss = ((x @ w).sum(1) - aim).square().mean()
        loss.backward()
        {end}
        w.grad = None

    gpumem.measure(step)
"""
CLIP = "torch.nn.utils.clip_grad_norm_([w], 1.0)"


@pytest.mark.parametrize(
    ("call", "where"),
    [("target(x, w)", "`target()` (called "), ("torch.relu(x @ w).exp().sum(1)", "a part of `step()` (")],
)
def test_a_no_grad_around_plain_functions_is_said_of_the_function(project, call, where):
    project.write(FUNCTION.format(on=False, call=call, end=CLIP))
    project.run(*RECORD)
    project.write(FUNCTION.format(on=True, call=call, end=CLIP))
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"*Grad mode was off in {where}at test_it.py:*) in the baseline, and is on now: {KEPT}"]
    )


def test_functions_of_torch_that_switch_grad_mode_off_by_themselves_are_no_change(project):
    project.write(FUNCTION.format(on=True, call="(x @ w).sum(1)", end=CLIP))
    project.run(*RECORD)
    assert "no_grad" not in next(iter(project.stored().values()))
    project.write(FUNCTION.format(on=True, call="(x @ w).exp().sigmoid().sum(1)", end="pass"))
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    assert "Grad mode" not in result.stdout.str()


TWO_CALLERS = """
import torch

NET = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)))


def first(x):
    loss = NET(x).sum()
    {no_grad}
        other = NET(x * 2)
    return loss + other.sum().detach()


def second(x):
    loss = NET(x).sum()
    {no_grad}
        other = NET(x * 3)
    return loss + other.sum().detach()
"""
CALLING = """
import models
import torch


def test_first(gpumem):
    gpumem.measure(lambda: models.first(torch.ones(1024, 512)))


def test_second(gpumem):
    gpumem.measure(lambda: models.second(torch.ones(1024, 512)))
"""


def test_calls_at_different_lines_are_two_causes_although_one_of_two_made_each(project):
    project.write(TWO_CALLERS.format(no_grad="with torch.no_grad():"), "models.py")
    project.write(CALLING)
    project.run(*RECORD)
    project.write(TWO_CALLERS.format(no_grad="if True:"), "models.py")
    told = project.run(*COMPARE).stdout.str()
    _, _, second = told.partition("___ test_second ___")
    assert "as in test_it.py::test_first" not in second
    assert "(called at models.py:19 or models.py:21)" in second.partition("gpumem ===")[0]


CALLING_FUNCTIONS = """
import contextlib

import torch

MODE = {mode}


def left(x, w):
    return (x @ w).exp()


def right(x, w):
    return (x @ w).sigmoid()


def halves(x, w):
    for _ in range(2):
        yield (x @ w).tanh() * left(x, w) * right(x, w)


{target}


def test_it(gpumem):
    w, x = torch.ones(64, 512, requires_grad=True), torch.ones(512, 64)

    def step():
        aim = target(x, w)
        aim = aim.clone() if aim.is_inference() else aim
        ((x @ w).sum(1) - aim).square().mean().backward()
        w.grad = None

    gpumem.measure(step)
"""
OWN = "    return ((x @ w).tanh() * left(x, w) * right(x, w)).sum(1)"
WITHIN = """
def target(x, w):
    with MODE:
        own = (x @ w).tanh()
        both = left(x, w) * right(x, w)
        return (own * both).sum(1)
"""
DECORATED = f"""
@MODE
def target(x, w):
{OWN}
"""
NESTED = """
@MODE
def target(x, w):
    with torch.no_grad():
        before = left(x, w)
    return (before * right(x, w) * (x @ w)).sum(1)
"""
GENERATOR = """
def target(x, w):
    with MODE:
        first, second = halves(x, w)
        return (first * second).sum(1)
"""
SWITCHED = f"""
def target(x, w):
    with MODE:
        return inner(x, w)


def inner(x, w):
{OWN}
"""
PARTLY = """
def target(x, w):
    with MODE:
        own = (x @ w).tanh() * left(x, w)
        other = right(x, w)
    return (own + other).sum(1) + (x @ w).sin().sum(1)
"""
PARTLY_AROUND_ONE = """
def target(x, w):
    with MODE:
        own = (x @ w).tanh() * left(x, w)
    return own.sum(1) + (x @ w).sin().sum(1)
"""
NO_GRAD, WITH_GRAD = "torch.no_grad()", "torch.enable_grad()"


@pytest.mark.parametrize(
    ("target", "off", "named"),
    [
        pytest.param(WITHIN, NO_GRAD, "`target()` (called at {step})", id="within"),
        pytest.param(DECORATED, NO_GRAD, "`target()` (called at {step})", id="decorator"),
        pytest.param(DECORATED, "torch.inference_mode()", "`target()` (called at {step})", id="inference"),
        pytest.param(NESTED, NO_GRAD, "`target()` (called at {step})", id="nested"),
        pytest.param(GENERATOR, NO_GRAD, "`target()` (called at {step})", id="generator"),
        pytest.param(SWITCHED, "torch.set_grad_enabled(False)", "`inner()` (called at {inner})", id="switched"),
        pytest.param(PARTLY, NO_GRAD, "a part of `target()` (at {own} and {other})", id="a part"),
        pytest.param(PARTLY_AROUND_ONE, NO_GRAD, "`left()` (called at {own})", id="a part around one"),
    ],
)
def test_a_caller_that_computes_beside_what_it_calls_is_one_sentence(project, target, off, named):
    texts = {mode: CALLING_FUNCTIONS.format(mode=mode, target=target) for mode in (off, WITH_GRAD)}
    project.write(texts[off])
    project.run(*RECORD)
    project.write(texts[WITH_GRAD])
    result = project.run(*COMPARE)
    result.assert_outcomes(failed=1)
    lines = {
        name: place(project, text, "test_it.py")
        for name, text in (
            ("step", "aim = target"),
            ("inner", "return inner("),
            ("own", "own = "),
            ("other", "other = "),
        )
        if text in texts[off]
    }
    sentences = [line.strip() for line in result.outlines if line.strip().startswith("Grad mode was")]
    assert sentences == [f"Grad mode was off in {named.format(**lines)} in the baseline, and is on now: {KEPT}"]


BACKWARD_AT_THE_PEAK = """
class Teacher(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x):
        hidden = self.up(x)
        hidden = hidden.relu() * hidden.sigmoid()
        return self.down(hidden).sum(1)


def left(x, w):
    return (x @ w).exp()


def test_it(gpumem):
    teacher, w, x = Teacher(), torch.ones(64, 64, requires_grad=True), torch.ones(512, 64)

    def step():
        with torch.set_grad_enabled({on}):
            start = (x @ w).tanh()
            aim = teacher(start) + left(start, w).sum(1)
        ((x @ w).sum(1) - aim).square().mean().backward()
        w.grad = None
        teacher.zero_grad()

    gpumem.measure(step)
"""


def test_a_peak_that_moved_to_a_backward_there_was_not_says_so(project):
    write(project, test=BACKWARD_AT_THE_PEAK, on=False)
    project.run(*RECORD)
    write(project, test=BACKWARD_AT_THE_PEAK, on=True)
    result = project.run(*COMPARE, "--gpumem-report=r.json")
    result.assert_outcomes(failed=1)
    (sentence,) = [line.strip() for line in result.outlines if line.strip().startswith("Grad mode was")]
    line = place(project, "aim = teacher(", "test_it.py")
    assert sentence.startswith(f"Grad mode was off in a part of `step()` (at {line}) in the baseline")
    (cause, *_) = json.loads((project.path / "r.json").read_text(encoding="utf-8"))["causes"]
    assert cause["reason"].startswith("Grad mode was off in")
