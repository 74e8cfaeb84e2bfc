"""Whether a test reads a composition."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.plugin.runtest.explaining import COMPOSITION
from pytest_gpumem.torch_support.static_access import reads_any

if TYPE_CHECKING:
    from collections.abc import Iterator


def reads_it(gpumem):
    assert gpumem.measure(print).composition.of("workspace") == 0


def reads_all_of_it(gpumem):
    assert gpumem.measure(print).explanation.cycles == ()


def test_a_test_that_reads_a_composition_or_an_explanation_asks_for_it():
    assert reads_any(reads_it, COMPOSITION)
    assert reads_any(reads_all_of_it, COMPOSITION)


def test_a_test_that_reads_figures_does_not_ask():
    def reads_figures(gpumem):
        assert gpumem.measure(print).peak_allocated < 100

    assert not reads_any(reads_figures, COMPOSITION)


def helper(m):
    return m.composition


def helpers_helper(m):
    return helper(m)


def goes_around(m):
    return goes_around(m) if m else goes_about(m)


def goes_about(m):
    return goes_around(m)


def test_a_test_whose_helper_in_the_same_module_reads_it_asks_for_it():
    def one(gpumem):
        assert helper(gpumem.measure(print))

    def two(gpumem):
        assert helpers_helper(gpumem.measure(print))

    assert reads_any(one, COMPOSITION)
    assert reads_any(two, COMPOSITION)


def test_helpers_that_call_each_other_are_looked_at_once():
    assert not reads_any(goes_around, COMPOSITION)


def test_a_helper_of_another_module_is_not_followed():
    other: dict[str, Any] = {}
    exec("def elsewhere(m):\n    return m.composition\n", other)
    mine: dict[str, Any] = {"elsewhere": other["elsewhere"]}
    exec("def test_it(gpumem):\n    elsewhere(gpumem)\n", mine)
    assert reads_any(other["elsewhere"], COMPOSITION)
    assert not reads_any(mine["test_it"], COMPOSITION)


@pytest.mark.parametrize("kind", ["function", "lambda", "comprehension", "deep"])
def test_what_is_within_a_test_is_read_with_it(kind):
    def with_function(gpumem):
        def check(m):
            return m.composition

        assert check(gpumem)

    def with_lambda(gpumem):
        assert list(map(lambda m: m.composition, [gpumem]))  # noqa: C417

    def with_comprehension(gpumem):
        assert {m.composition for m in (gpumem, gpumem)}

    def deep(gpumem):
        def outer():
            return lambda: [m.composition for m in (gpumem,)]

        assert outer()()

    functions = {
        "function": with_function,
        "lambda": with_lambda,
        "comprehension": with_comprehension,
        "deep": deep,
    }
    assert reads_any(functions[kind], COMPOSITION)


def test_other_uses_of_the_word_do_not_ask():
    def argument(composition):
        return composition

    def local(gpumem):
        composition = gpumem.measure(print)
        return composition  # noqa: RET504

    def text(gpumem):
        """The composition."""
        return {"composition": gpumem}["composition"]

    def longer(gpumem):
        return gpumem.composition_of_it, gpumem.explanations

    assert not any(reads_any(one, COMPOSITION) for one in (argument, local, text, longer))


def test_what_a_decorator_wraps_is_read():
    def decorated(function):
        @functools.wraps(function)
        def around(*args):
            return function(*args)

        return around

    assert reads_any(decorated(decorated(reads_it)), COMPOSITION)


@contextlib.contextmanager
def checked(m) -> Iterator[None]:
    yield
    assert m.composition


@functools.lru_cache
def cached(m):
    return m.composition


@pytest.mark.parametrize("name", ["checked", "cached"])
def test_a_helper_that_a_library_decorates_is_still_a_helper_of_the_module(name):
    def with_context(gpumem):
        with checked(gpumem):
            pass

    def with_cache(gpumem):
        assert cached(gpumem)

    assert reads_any({"checked": with_context, "cached": with_cache}[name], COMPOSITION)


class TestMethods:
    def reads_it(self, gpumem):
        assert gpumem.measure(print).composition

    def reads_figures(self, gpumem):
        assert gpumem.measure(print).peak_allocated

    def test_a_method_asks_as_a_function_does(self):
        assert reads_any(self.reads_it, COMPOSITION)
        assert not reads_any(self.reads_figures, COMPOSITION)


@pytest.mark.parametrize("thing", [None, 3, print, functools.partial(reads_it, None), type])
def test_what_is_no_function_does_not_ask(thing):
    assert not reads_any(thing, COMPOSITION)
