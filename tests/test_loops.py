"""Steps of a loop that a test runs itself: found at its optimizers' steps, and measured as those of ``gpumem.measure``."""

from __future__ import annotations

import pytest

LOOP = """
def net(width=64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, width))


class Training:
    def __init__(self, **settings):
        self.model = net(**settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.steps = 0

    def step(self):
        x = torch.ones(256, self.model[0].in_features)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def loop(self, steps=10**6):
        for _ in range(steps):
            self.step()
"""


@pytest.fixture
def loops(project):
    def run(body: str, *arguments: str, timed: bool = False):
        project.write(f"{LOOP}\n{body}")
        result = project.run("--junitxml=report.xml", *arguments, timed=timed)
        return result, project.verdicts()

    return run


def figures(verdicts, test: str, number: int = 0):
    return dict(verdicts[test]["verdicts"][number]["measurement"]["metrics"])


def notes(verdicts, test: str) -> str:
    return " ".join(verdicts[test]["verdicts"][0]["measurement"]["notes"])


def test_a_loop_has_the_figures_of_its_step_as_a_function(loops):
    result, verdicts = loops(
        """
def test_loop(gpumem):
    with gpumem.loop():
        Training().loop()

def test_function(gpumem):
    gpumem.measure(Training().step)
"""
    )
    result.assert_outcomes(passed=2)
    loop, function = figures(verdicts, "test_loop"), figures(verdicts, "test_function")
    assert loop == function
    assert loop["peak_allocated"] > 4 * 3 * 2 * 64 * 256
    assert loop["growth"] == 0


def test_a_loop_is_ended_when_it_is_measured_through_its_own_finally(loops):
    result, _ = loops(
        """
def test_loop(gpumem):
    training, ended = Training(), []
    with gpumem.loop(8) as steps:
        try:
            training.loop()
        except Exception:
            ended.append("caught")
        finally:
            ended.append("finally")
    assert ended == ["finally"]
    assert 8 <= training.steps < 16
    assert steps.measurement.name == "loop"
    training.loop(1)  # nothing is left of the hooks
"""
    )
    result.assert_outcomes(passed=1)


def test_a_loop_that_ends_before_is_measured_as_far_as_it_goes(loops):
    result, verdicts = loops(
        """
def test_loop(gpumem):
    with gpumem.loop():
        Training().loop(7)
"""
    )
    result.assert_outcomes(passed=1)
    assert "the loop ended after 7 of 20 steps: nothing was counted or timed" in notes(verdicts, "test_loop")
    assert "flops" not in figures(verdicts, "test_loop")


def test_a_loop_without_a_step_to_count_is_told_what_it_needs(loops):
    result, verdicts = loops(
        """
def test_loop(gpumem):
    with gpumem.loop(6):
        Training().loop(6)
"""
    )
    result.assert_outcomes(passed=1)
    said = "not counted: LoopEnded: the loop ended after 6 steps, before the measurement was complete: run more steps"
    assert said in notes(verdicts, "test_loop")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "loop(): Training().loop(3)",
            "MeasuringError: the loop ended after 3 steps, but a measurement needs 4 or more",
        ),
        (
            "loop(): net()(torch.ones(1, 64))",
            "MeasuringError: no step was seen: a step ends with optimizer.step() of a torch optimizer",
        ),
        (
            "loop(): concurrent.futures.ThreadPoolExecutor().submit(Training().loop, 9).result()",
            "MeasuringError: no step was seen: an optimizer stepped in another thread",
        ),
        ("loop(3): Training().loop()", "ValueError: steps=3: a loop's memory is read from at least 4 steps"),
        ("loop([1, 2]): Training().loop()", "TypeError: steps must be a whole number, 4 or more, but is a list: *"),
        ("loop(range(9)): Training().loop()", "TypeError: steps must be a whole number, 4 or more, but is a range: *"),
        ("loop(8.0): Training().loop()", "TypeError: steps must be a whole number, 4 or more, but is a float: *"),
    ],
)
def test_a_loop_with_too_few_steps_says_so(loops, body, said):
    result, _ = loops(
        f"""
import concurrent.futures

def test_loop(gpumem):
    with gpumem.{body}
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{said}*"])


def test_the_loops_own_error_is_what_its_test_fails_with(loops):
    result, _ = loops(
        """
def test_loop(gpumem):
    training = Training()
    with gpumem.loop():
        training.loop(5)
        raise RuntimeError("the disk is full")

def test_next(gpumem):
    gpumem.measure(Training().step)
"""
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: the disk is full*", "*peak allocated*loop*"])


def test_two_optimizers_make_one_step_together(loops):
    result, verdicts = loops(
        """
def test_pair(gpumem):
    small, large = Training(), Training()
    with gpumem.loop():
        for _ in range(100):
            small.step()
            large.step()

def test_one(gpumem):
    training = Training()
    def both():
        training.step()
        training.step()
    gpumem.measure(both)
"""
    )
    result.assert_outcomes(passed=2)
    assert figures(verdicts, "test_pair")["flops"] == figures(verdicts, "test_one")["flops"]


def test_accumulation_makes_one_step_of_its_micro_batches(loops):
    result, verdicts = loops(
        """
def test_loop(gpumem):
    training = Training()
    with gpumem.loop():
        for number in range(200):
            training.model(torch.ones(64, 64)).square().mean().backward()
            if number % 4 == 3:
                training.optimizer.step()
                training.optimizer.zero_grad()

def test_function(gpumem):
    training = Training()
    def step():
        for _ in range(4):
            training.model(torch.ones(64, 64)).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    gpumem.measure(step)
"""
    )
    result.assert_outcomes(passed=2)
    assert figures(verdicts, "test_loop") == figures(verdicts, "test_function")


def test_optimizers_that_step_within_backward_end_a_step_at_the_next_forward(loops):
    result, verdicts = loops(
        """
def test_loop(gpumem):
    model = net()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()
        parameter.register_post_accumulate_grad_hook(step)
    with gpumem.loop():
        for _ in range(100):
            model(torch.ones(256, 64)).square().mean().backward()

def test_function(gpumem):
    gpumem.measure(Training().step)
"""
    )
    result.assert_outcomes(passed=2)
    assert figures(verdicts, "test_loop")["flops"] == figures(verdicts, "test_function")["flops"]
    assert figures(verdicts, "test_loop")["peak_allocated"] < figures(verdicts, "test_function")["peak_allocated"]


def test_a_loop_without_an_optimizer_of_torch_says_where_its_steps_end(loops):
    result, verdicts = loops(
        """
def test_loop(gpumem):
    model = net()
    made = 0
    with gpumem.loop(6) as steps:
        while not steps.step_ended():
            model(torch.ones(256, 64)).square().mean().backward()
            model.zero_grad()
            made += 1
    assert 6 <= made < 12
    assert steps.measurement.peak_allocated > 0
"""
    )
    result.assert_outcomes(passed=1)
    assert figures(verdicts, "test_loop")["growth"] == 0


def test_a_callback_needs_a_trainer(loops, monkeypatch):
    result, _ = loops(
        """
import sys

def test_loop(gpumem, monkeypatch):
    for name in ("transformers", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with gpumem.loop() as steps:
        with pytest.raises(RuntimeError, match="neither is imported"):
            steps.callback()
        Training().loop(5)
"""
    )
    result.stdout.fnmatch_lines(["*no step was seen*"])


def test_a_loop_whose_batches_differ_has_not_settled_and_keeps_its_highest_peak(loops):
    result, verdicts = loops(
        """
def test_loop(gpumem):
    training = Training()
    with gpumem.loop():
        for step in range(100):
            training.model(torch.ones(64 + 8 * (step % 7), 64)).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
"""
    )
    result.assert_outcomes(passed=1)
    measurement = verdicts["test_loop"]["verdicts"][0]["measurement"]
    assert measurement["settled"] is False
    peaks = measurement["step_peaks"]["allocated"]
    assert len(peaks) == 20
    assert figures(verdicts, "test_loop")["peak_allocated"] == max(peaks[1:]) > min(peaks[1:])
    assert "peaks differ from step to step: between " in notes(verdicts, "test_loop")


RUNS_OUT = """
from torch.utils._python_dispatch import _get_current_dispatch_mode


def runs_out(when):
    if when:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.")


def is_counted():
    return _get_current_dispatch_mode() is not None
"""


@pytest.mark.parametrize(
    ("arguments", "number"),
    [pytest.param((), 1, id="first"), pytest.param(("--gpumem-update=new",), 2, id="for lines")],
)
def test_a_loop_that_runs_out_of_memory_only_when_it_is_counted_is_measured(loops, arguments, number):
    result, verdicts = loops(
        f"""
{RUNS_OUT}

def test_loop(gpumem):
    training, counted = Training(), 0
    with gpumem.loop() as steps:
        while True:
            training.step()
            counted += is_counted()
            runs_out(is_counted() and counted == {number})
    assert training.steps == {19 + number}
    assert steps.measurement.peak_allocated > 0
""",
        *arguments,
    )
    result.assert_outcomes(passed=1)
    measured = figures(verdicts, "test_loop")
    said = "not counted: OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB."
    assert (said in notes(verdicts, "test_loop"), "operators" in measured) == (number == 1, number == 2)


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        pytest.param("training.steps == 12", 12, id="measured"),
        pytest.param("training.steps == 30", 30, id="after it has been measured"),
        pytest.param("training.steps == 22 and not is_counted()", 22, id="after it has been counted"),
    ],
)
def test_a_loop_that_runs_out_of_memory_by_itself_fails(loops, when, steps):
    result, _ = loops(
        f"""
{RUNS_OUT}

def test_loop(gpumem):
    training = Training()
    with gpumem.loop() as steps:
        for _ in range(40):
            training.step()
            steps.step_ended()
            runs_out({when})
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*OutOfMemoryError: CUDA out of memory*"])


def test_a_loop_is_timed_and_has_throughput(loops, project):
    project.settings('[tool.gpumem]\ntime_budget = "0.1 s"\n')
    result, _ = loops(
        """
def test_loop(gpumem):
    with gpumem.loop(items=256) as steps:
        Training().loop()
    assert steps.measurement.throughput == pytest.approx(256 / steps.measurement.step_time)
""",
        timed=True,
    )
    result.assert_outcomes(passed=1)


def test_what_a_fixture_holds_for_others_is_not_the_loops(loops):
    result, verdicts = loops(
        """
@pytest.fixture(scope="module")
def held():
    return torch.ones(10**6)

def test_holds(gpumem, held):
    gpumem.measure(lambda: held.sum())

def test_loop(gpumem):
    with gpumem.loop(explain=True):
        Training().loop()

def test_alone(gpumem):
    gpumem.measure(Training().step)
"""
    )
    result.assert_outcomes(passed=3)
    assert figures(verdicts, "test_loop") == figures(verdicts, "test_alone")


def test_a_loop_that_was_ended_leaves_nothing_to_the_next_one(loops):
    result, _ = loops(
        """
import gc

def train():
    Training(width=256).loop()

def test_twice(gpumem):
    gc.disable()
    try:
        with gpumem.loop(5) as first:
            train()
        with gpumem.loop(5) as second:
            train()
    finally:
        gc.enable()
    assert first.measurement.peak_allocated == second.measurement.peak_allocated
"""
    )
    result.assert_outcomes(passed=1)


VARYING = """
import random


def lengths(seed):
    draw = random.Random(seed)
    while True:
        yield draw.randint(16, 512)


def train(gpumem, lengths, leak=0, **settings):
    training, held = Training(), []
    with gpumem.loop(**settings) as steps:
        for length in lengths:
            x = torch.ones(length, 64)
            held.append(torch.ones(leak))
            loss = training.model(x).square().mean()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
    return steps.measurement
"""


def test_a_loop_that_draws_other_batches_is_never_red_and_one_with_a_seed_green(loops, project):
    body = VARYING + "\ndef test_it(gpumem):\n    train(gpumem, lengths(SEED))\n"
    # Its longest batch is shorter than most others' is.
    loops(body.replace("SEED", "10"), "--gpumem-update=new")
    outcomes = set()
    for seed in (10, 0):
        result, verdicts = loops(body.replace("SEED", str(seed)), "--gpumem-baseline")
        result.assert_outcomes(passed=1)
        found = {one["metric"]: one["outcome"] for one in verdicts["test_it"]["verdicts"][0]["metrics"]}
        outcomes |= {found["peak_allocated"]}
        assert (found["growth"], found["retained"]) == ("ok", "ok"), seed
        assert seed != 10 or set(found.values()) <= {"ok", "recorded"}
    assert outcomes == {"ok", "uncertain"}


@pytest.mark.parametrize("kind", ["lengths(0)", "(64 * (1 + n * n % 5) for n in range(999))"])
def test_a_leak_is_told_from_batches_that_differ(loops, kind):
    body = (
        VARYING
        + f"\ndef test_it(gpumem):\n    assert train(gpumem, {kind}, leak=LEAK).growth == pytest.approx(4 * LEAK, rel=0.01)\n"
    )
    for leak in (0, 10**6):
        result, _ = loops(body.replace("LEAK", str(leak)))
        result.assert_outcomes(passed=1)


def test_the_first_step_of_a_loop_counts_for_its_budget_only(loops):
    result, verdicts = loops(
        """
@pytest.mark.gpumem(max_memory="30 MB")
def test_it(gpumem):
    with gpumem.loop():
        torch.ones(10_000_000)
        Training().loop()
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["Memory over budget: peak 40.00 MB, budget 30.00 MB: *", "*note: step 1 of 20 needed 40.00 MB: *"]
    )
    assert figures(verdicts, "test_it")["peak_allocated"] < 2_000_000


SHORT = """
def test_it(gpumem):
    kept, training = [], Training()
    with gpumem.loop(explain=True) as loop:
        for _ in range(60):
            kept.append(torch.ones(1000, 100))  # leak
            training.step()
    peak, retained = loop.measurement.composition, loop.measurement.explanation.retained
    assert [(row.site, row.nbytes) for row in retained.rows] == [("test_it.py:33", 400_000)]
    assert peak.total == sum(row.nbytes for row in peak.rows) == loop.measurement.peak_allocated
    assert all(row.nbytes > 0 for row in peak.rows)
"""


def test_a_short_loop_that_leaks_is_explained_before_its_steps_go_for_times(project, loops):
    project.settings('[tool.gpumem]\ntime_budget = "0.5 s"\n')
    result, _ = loops(SHORT, timed=True)
    result.assert_outcomes(passed=1)


GROWING = """
import itertools
import os
import random


class Gated(torch.nn.Module):
    def forward(self, x):
        if "GROWN" in os.environ:
            x = x.exp() * x
        return x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = torch.nn.Linear(64, 256), Gated(), torch.nn.Linear(256, 64)

    def forward(self, x):
        return self.last(self.gate(self.first(x)).relu())


def shuffled():
    draw, lengths = random.Random(7), [200, 300, 400, 500, 600]
    while True:
        draw.shuffle(lengths)
        yield from lengths


def test_cycle(gpumem):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with gpumem.loop():
        for length in shuffled():
            model(torch.ones(length, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_lbfgs(gpumem):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=2, line_search_fn="strong_wolfe")
    x, y = torch.randn(512, 64), torch.randn(512, 64)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    with gpumem.loop():
        while True:
            optimizer.step(closure)
"""


@pytest.mark.parametrize("test", ["test_cycle", pytest.param("test_lbfgs", marks=pytest.mark.thorough)])
def test_what_grew_in_a_loop_whose_steps_differ_is_told_with_its_module_and_line(project, monkeypatch, test):
    project.write(GROWING)
    project.run("--gpumem-update=new", "-k", test).assert_outcomes(passed=1)
    project.run("--gpumem-baseline", "-k", test).assert_outcomes(passed=1)
    monkeypatch.setenv("GROWN", "1")
    result = project.run("--gpumem-baseline", "-k", test)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["Memory regressed: peak *", "*what grew *", "* gate *test_it.py:* exp *1 x float32?*"])
