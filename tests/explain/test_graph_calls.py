"""Which modules autograd recorded, and which of them backward came back to: over recordings written by hand."""

from __future__ import annotations

from dataclasses import replace

from tests.explain.stream import Stream


def module(stream: Stream, path: str, *numbers: int, grad: bool = True) -> None:
    """A module's call, in which operators ran that autograd gave these numbers."""
    with stream.mark("module", path):
        stream.marks[-1] = replace(stream.marks[-1], grad=grad)
        for number in numbers:
            with stream.operator("aten::mul", number):
                pass


def test_calls_with_grad_mode_off_are_told_of_all_by_folded_path():
    stream = Stream()
    module(stream, "h.0", grad=False)
    module(stream, "h.1", 0)
    assert stream.timeline().no_grad == {"h.*": (1, 2)}


def test_calls_of_which_no_node_ran_are_told_of_those_that_made_any():
    stream = Stream()
    module(stream, "teacher", 0, 1)
    module(stream, "student", 2, 3)
    module(stream, "views")
    for number in (3, 2):
        with stream.node("MulBackward0", number):
            pass
    assert stream.timeline().no_backward == {"teacher": (1, 1), "student": (0, 1)}


def test_backward_comes_to_the_modules_around_what_it_comes_to():
    stream = Stream()
    with stream.mark("module", "net"):
        module(stream, "net.h.0", 0)
        module(stream, "net.h.1", 1)
    with stream.node("MulBackward0", 1):
        pass
    assert stream.timeline().no_backward == {"net": (0, 1), "net.h.*": (1, 2)}


def test_without_backward_there_is_nothing_that_it_did_not_come_to():
    stream = Stream()
    module(stream, "net", 0)
    assert stream.timeline().no_backward == {}


def test_a_graph_that_is_made_in_backward_need_not_run():
    stream = Stream()
    module(stream, "h.0", 0)
    with stream.node("CheckpointBackward", 0):
        module(stream, "h.0", 1)
    assert stream.timeline().no_backward == {"h.*": (0, 1)}
    assert stream.timeline().no_grad == {"h.*": (0, 2)}


def call(stream: Stream, function: str, line: str, *, path: str = "", grad: bool = True) -> None:
    """A call of a torch function in a function."""
    with stream.mark("call", path):
        stream.marks[-1] = replace(stream.marks[-1], site=line, grad=grad, function=function, caller="train.py:40")


def test_calls_in_functions_are_told_of_each_but_where_the_module_has_grad_mode_off():
    stream = Stream()
    call(stream, "step", "train.py:7", grad=False)
    call(stream, "step", "train.py:8")
    with stream.mark("module", "net"):
        stream.marks[-1] = replace(stream.marks[-1], grad=False)
        call(stream, "target", "net.py:3", path="net", grad=False)
    timeline = stream.timeline()
    assert timeline.no_grad == {"net": (1, 1), "step()": (1, 2)}
    assert timeline.function_at == {"train.py:8": "step()"}
    assert timeline.callers == {"step()": (("", "train.py:40"),)}


def test_a_module_whose_parameters_are_frozen_is_one_that_backward_does_not_reach():
    stream = Stream()
    with stream.mark("module", "frozen"), stream.operator("aten::mul"):
        stream.alloc(1, 64)
    module(stream, "student", 0)
    with stream.node("MulBackward0", 0):
        pass
    assert stream.timeline().no_backward == {"frozen": (1, 1), "student": (0, 1)}
