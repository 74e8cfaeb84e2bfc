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
