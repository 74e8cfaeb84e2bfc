"""Compiled steps: the model as torch.compile calls it, and how it is told that nothing was compiled."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch

from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.steps.compiling import compile_now, compiled_model, warnings_of_compiling
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap
from pytest_gpumem.torch_support.private_api.compiler import compiled_graphs
from tests.needs import NEEDS_COMPILER


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.linear(x)).sum()


def step_of(run, batch=None) -> list[Phase]:
    """A step in one phase."""
    batch = torch.ones(2, 4) if batch is None else batch
    return [Phase("step", lambda: run(batch).backward())]


def gradient(word: str) -> torch.Tensor:
    model = Model()
    with compiled_model(model, word) as run:
        compile_now(step_of(run), word)
    return model.linear.weight.grad


@pytest.mark.thorough
@NEEDS_COMPILER
def test_the_default_mode_compiles_for_the_cpu_and_gives_the_same_gradients():
    model = Model()
    step_of(model)[0].run()
    before = compiled_graphs()
    torch.testing.assert_close(gradient("default"), model.linear.weight.grad)
    assert compiled_graphs() == before + 1


def test_a_model_is_compiled_once_and_again_for_another_shape():
    with compiled_model(Model(), "eager") as run:
        compile_now(step_of(run), "eager")
        first = compiled_graphs()
        step_of(run)[0].run()
        assert compiled_graphs() == first
        step_of(run, torch.ones(3, 4))[0].run()
        assert compiled_graphs() == first + 1


def test_what_was_compiled_before_does_not_decide_what_is_compiled_now():
    shapes = []

    def backend(graph, example_inputs):
        shapes.append([tuple(value.shape) for value in example_inputs if isinstance(value, torch.Tensor)][-1])
        return graph.forward

    model = Model()
    for samples in (2, 3):
        with compiled_model(model, "eager"):
            torch.compile(model, backend=backend)(torch.ones(samples, 4))
    # Without a fresh start the second shape would have been compiled as a dynamic one.
    assert shapes == [(2, 4), (3, 4)]
    assert all(isinstance(size, int) for shape in shapes for size in shape)


def test_compiled_state_from_earlier_tests_is_dropped_before_measuring():
    class Node:
        pass

    earlier = [Node()]
    heap = FrozenHeap()
    heap.freeze()
    try:
        with compiled_model(Model(), "eager") as run:
            (step,) = step_of(run)
            kept = []

            def compiles() -> None:
                step.run()
                node = earlier.pop()
                node.itself, node.kept = node, torch.ones(8)
                kept.append(weakref.ref(node.kept))

            compile_now([Phase("step", compiles)], "eager")
            assert [one() for one in kept] == [None]
    finally:
        heap.thaw()


def test_a_compiled_model_is_forgotten_after_an_error():
    resets = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compiler.reset", lambda: resets.append(True))
        with pytest.raises(ZeroDivisionError), compiled_model(Model(), "eager"):
            raise ZeroDivisionError
    assert resets == [True, True]


def test_nobody_is_warned_while_a_step_is_compiled():
    def warn():
        warnings.warn("of compiling", stacklevel=1)

    with warnings_of_compiling():
        warn()
    with pytest.warns(UserWarning, match="of compiling"):
        warn()
