"""No growth: what a step may keep, and what is said of one that keeps more and more."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from pytest_gpumem.plugin.relations import growth
from pytest_gpumem.plugin.relations.growth import assert_no_growth, growth_text

KB = 1000


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def here() -> str:
    """The name of the test that calls this."""
    return sys._getframe(1).f_code.co_name


def grows(device, step, steps: int) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_no_growth(device, step, steps)
    return str(caught.value)


# What is no growth


def test_a_training_loop_keeps_nothing_more(device):
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    losses: list[float] = []

    def step():
        loss = model(torch.ones(4, 100)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert assert_no_growth(device, step)
    assert len(losses) == 20


def test_a_cache_that_fills_in_the_first_half_is_fine(device):
    cache: dict[int, torch.Tensor] = {}
    numbers = iter(range(100))

    def step():
        key = next(numbers) % 5
        cache.setdefault(key, tensor(KB))

    assert assert_no_growth(device, step, steps=10)
    assert len(cache) == 5


def test_garbage_that_the_collector_frees_is_no_growth(device):
    def step():
        cycle: list = [tensor(KB)]
        cycle.append(cycle)

    assert assert_no_growth(device, step)


@pytest.mark.parametrize("steps", [2, 20])
def test_the_step_is_called_as_often_as_said(device, steps):
    calls: list[int] = []
    assert_no_growth(device, lambda: calls.append(tensor(KB).numel()), steps)
    assert len(calls) == steps


@pytest.mark.parametrize("steps", [1, -5])
def test_growth_is_not_seen_in_a_single_step(device, steps):
    with pytest.raises(ValueError, match=re.escape(f"steps={steps}: growth is seen only over two steps or more")):
        assert_no_growth(device, lambda: None, steps)


@pytest.mark.parametrize("steps", [[1, 2, 3], "20", 20.0, True])
def test_steps_that_are_no_whole_number_are_a_type_error(device, steps):
    said = f"steps must be a whole number, 2 or more, but is a {type(steps).__name__}"
    with pytest.raises(TypeError, match=re.escape(said)):
        assert_no_growth(device, lambda: None, steps)


def test_steps_that_hold_nothing_on_the_device_prove_nothing(device):
    assert not assert_no_growth(device, lambda: None)


@pytest.mark.parametrize(
    ("live", "is_growth"),
    [
        ([5, 5, 5, 5, 5], False),
        ([9, 8, 7, 6, 5], False),
        ([5, 6, 7, 8, 9], True),
        ([5, 5, 5, 5, 6], True),
        # Something large was freed meanwhile.
        ([50, 51, 52, 3, 4, 5], True),
        # Up and down, as with two buffers in turns; and the same with a leak.
        ([5, 9, 5, 9, 5, 9], False),
        ([5, 9, 6, 10, 7, 11], True),
        ([5, 6], True),
    ],
)
def test_growth_is_what_ends_higher_and_does_not_come_down(live, is_growth):
    assert growth.grows(live) is is_growth


def test_a_leak_is_not_hidden_by_something_large_that_is_freed(device):
    kept: list[torch.Tensor] = []
    large = [tensor(4000 * KB)]
    numbers = iter(range(100))

    def step():
        kept.append(tensor(KB))
        if next(numbers) == 15:
            large.clear()

    assert grows(device, step, 20).startswith("memory grows: 1.00 kB a step, 4.00 kB in 4 steps")


# What is growth


def test_a_list_that_keeps_tensors_grows_by_those_of_the_second_half(device):
    kept = [tensor(7 * KB)]
    assert grows(device, lambda: kept.append(tensor(KB)), 10) == (
        "memory grows: 1.00 kB a step, 5.00 kB in 5 steps\n"
        "  kept: 5 x uint8[1000], 5.00 kB\n"
        f"  kept in: {here()}.<locals>.kept[...]"
    )


def test_a_list_that_keeps_losses_with_their_graph_grows(device):
    model = torch.nn.Linear(100, 50)
    losses: list[torch.Tensor] = []

    def step():
        loss = model(torch.ones(4, 100)).square().mean()
        loss.backward(retain_graph=True)
        model.zero_grad()
        losses.append(loss)

    assert grows(device, step, 10) == (
        "memory grows: 2.40 kB a step, 12.02 kB in 5 steps\n"
        "  kept: 5 x float32[4, 100], 8.00 kB\n"
        "  kept: 5 x float32[4, 50], with the graph of its gradient, 4.00 kB\n"
        "  kept: 5 x float32[], with the graph of its gradient, 20 B\n"
        f"  kept in: the autograd graph of {here()}.<locals>.losses[...]\n"
        f"  kept in: {here()}.<locals>.losses[...]"
    )


def test_a_cache_that_goes_on_filling_in_the_second_half_grows(device):
    cache: dict[int, torch.Tensor] = {}
    numbers = iter(range(100))

    def step():
        cache.setdefault(min(next(numbers), 6), tensor(KB))

    assert grows(device, step, 10).startswith("memory grows: 400 B a step, 2.00 kB in 5 steps")


def test_a_tensor_that_each_step_replaces_is_not_kept(device):
    latest: dict[str, torch.Tensor] = {}
    kept: list[torch.Tensor] = []
    calls: list[int] = []

    def step():
        calls.append(1)
        latest["target"] = tensor(KB)
        latest["batch"] = tensor(5 * KB)
        kept.append(tensor(KB))

    assert grows(device, step, 10).splitlines()[1:] == [
        "  kept: 5 x uint8[1000], 5.00 kB",
        f"  kept in: {here()}.<locals>.kept[...]",
    ]
    assert len(calls) == 11, "once more, to see what is still there"


def test_a_cache_that_a_longer_one_replaces_is_what_grows(device):
    latest = {"cache": tensor(0)}

    def step():
        latest["batch"] = tensor(50 * KB)
        latest["cache"] = torch.cat([latest["cache"], tensor(KB)])

    assert grows(device, step, 10).splitlines()[1:] == [
        "  kept: 1 x uint8[11000], 11.00 kB",
        f"  kept in: {here()}.<locals>.latest[...]",
    ]


@pytest.mark.parametrize("outcome", [pytest.skip, pytest.fail, pytest.xfail], ids=["skip", "fail", "xfail"])
def test_an_outcome_of_the_step_after_the_last_does_not_hide_that_memory_grows(device, outcome):
    kept: list[torch.Tensor] = []
    calls = iter(range(10))

    def step():
        if next(calls, None) is None:
            outcome("no data is left")
        kept.append(tensor(KB))

    assert "memory grows: 1.00 kB a step" in grows(device, step, 10)


def test_an_error_of_the_step_after_the_last_does_not_hide_that_memory_grows(device):
    kept: list[torch.Tensor] = []
    calls = iter(range(10))

    def step():
        next(calls)
        kept.append(tensor(KB))

    assert grows(device, step, 10).splitlines()[1] == "  kept: 5 x uint8[1000], 5.00 kB"


def test_views_of_one_storage_count_once(device):
    kept: list[torch.Tensor] = []

    def step():
        whole = tensor(KB)
        kept.extend([whole[:500], whole[500:]])

    assert grows(device, step, 10).splitlines()[1:] == [
        "  kept: 5 x uint8[1000], 5.00 kB",
        f"  kept in: {here()}.<locals>.kept[...]",
    ]


def test_objects_that_answer_for_others_are_not_asked(device):
    class Deprecated:
        @property
        def __class__(self):
            raise AssertionError("asked")

    kept: list[object] = []
    told = grows(device, lambda: kept.extend([Deprecated(), tensor(KB)]), 10)
    assert told.splitlines()[1:] == ["  kept: 5 x uint8[1000], 5.00 kB", f"  kept in: {here()}.<locals>.kept[...]"]


def test_an_error_of_the_step_goes_up(device):
    with pytest.raises(ZeroDivisionError):
        assert_no_growth(device, lambda: 1 / 0)


# What is said


def test_the_kinds_that_hold_most_are_said_first_and_the_rest_is_counted():
    tensors = [torch.zeros(size) for size in (1, 50, 20, 40, 30, 50)]
    assert growth_text(1000, 10, tensors) == (
        "memory grows: 100 B a step, 1.00 kB in 10 steps\n"
        "  kept: 2 x float32[50], 400 B\n"
        "  kept: 1 x float32[40], 160 B\n"
        "  kept: 1 x float32[30], 120 B\n"
        "  kept: tensors of 2 more kinds\n"
        "  kept: 236 B more, in tensors that replace smaller tensors, or in tensors saved for backward"
    )


def test_where_tensors_explain_everything_nothing_more_is_said():
    assert growth_text(40, 1, [torch.zeros(10)]) == (
        "memory grows: 40 B a step, 40 B in 1 step\n  kept: 1 x float32[10], 40 B"
    )


def test_a_test_that_grows_fails_with_what_it_kept(project):
    project.write(
        """
KEPT = []


def test_grows(gpumem):
    gpumem.assert_no_growth(lambda: KEPT.append(torch.empty(250)), steps=4)
"""
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E * AssertionError: memory grows: 1.00 kB a step, 2.00 kB in 2 steps", "E * kept in: test_it.KEPT?...?"]
    )


PACKAGE = """
class State:
    _shared_state = {}

    def __init__(self):
        self.__dict__ = self._shared_state
        self.__dict__.setdefault("loaders", [])


class Loader:
    def __init__(self, data):
        self.data = data
        State().loaders.append(self)
"""
"""Keeps what is prepared, as accelerate 1.3.0 does (huggingface/accelerate#3391)."""

KEPT_BY_A_PACKAGE = """
from holdall import Loader


def step():
    Loader([torch.empty(1000) for _ in range(4)])


def test_asserted(gpumem):
    gpumem.assert_no_growth(step, steps=4)


def test_measured(gpumem):
    gpumem.measure(step)


@pytest.mark.gpumem(max_retained="1 kB")
def test_marked():
    step()
"""


@pytest.mark.parametrize(
    "workers", [pytest.param([], id="alone"), pytest.param(["-n1"], id="a worker", marks=pytest.mark.thorough)]
)
def test_what_a_package_keeps_is_told_with_it_in_each_way_to_find_a_leak(project, workers):
    project.settings("[[tool.gpumem.budget]]\ntests = '*'\nmax_retained = '1 kB'\n")
    project.write(PACKAGE, "site-packages/holdall.py")
    project.write("", "conftest.py")
    (project.path / "conftest.py").write_text(
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'site-packages'))\n",
        encoding="utf-8",
    )
    information = project.path / "site-packages" / "holdall-1.2.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: holdall\nVersion: 1.2.3\n", encoding="utf-8")
    project.write(KEPT_BY_A_PACKAGE)
    result = project.run("-vv", *workers, separate=True)
    result.assert_outcomes(failed=3)
    lines = [line.removeprefix("E").strip() for line in result.outlines]
    told = [line for line in lines if line.startswith("kept in: ")]
    assert len(told) >= 3
    holder = "kept in: holdall 1.2.3: State._shared_state[...] -> Loader.data[...]"
    assert set(told) == {holder, f"{holder}: made at test_it.py:10"}
