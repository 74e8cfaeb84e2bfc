"""Segments: consecutive blocks in a model that are recomputed together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.torch_support.static_access import class_name, is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpumem.measuring.step_config.blocks import Block

    Forward = Callable[..., Any]
    Recompute = Callable[..., Any]


class Segment:
    """Two or more consecutive blocks that are recomputed together.

    `forwards` returns a replacement for each block's ``forward``. The first block's replacement runs all blocks. The
    replacements for the other blocks return their input unchanged.

    The results are correct only if the model's loop runs each block once and in order, passes the same arguments to each
    block, and changes nothing between two blocks. Each call checks these conditions.

    Example:
        A model's loop calls blocks 0, 1 and 2. The call to block 0 runs all three blocks and returns the output of block 2. The
        calls to blocks 1 and 2 return this output again.
    """

    def __init__(self, blocks: Sequence[Block], recompute: Recompute) -> None:
        """Create a segment.

        Args:
            blocks: The blocks, in the order in which they run.
            recompute: ``recompute(function, *args, **kwargs)`` runs ``function`` now, and again in backward.
        """
        self._paths = [block.path for block in blocks]
        self._own = [block.module.forward for block in blocks]
        self._recompute = recompute
        self._output: Any = None
        self._ran = 0
        """The number of blocks called so far by the model's loop in the current forward pass."""
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forwards(self) -> list[Forward]:
        """Return the replacement for each block's ``forward``, in order."""
        return [self._first(), *(self._follower(number) for number in range(1, len(self._own)))]

    def check_ended(self) -> None:
        """Raise `ConfigError` if the model's loop has run the first block but not all others."""
        if self._call is not None:
            raise self._wrong(self._ran, f"it did not run after {self._paths[self._ran - 1]}")

    def _first(self) -> Forward:
        def run_all(*args: Any, **kwargs: Any) -> Any:
            self.check_ended()
            self._output, self._call, self._ran = self._recompute(self._run, *args, **kwargs), (args, kwargs), 1
            return self._output

        return run_all

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        output = self._own[0](*args, **kwargs)
        for number, forward in enumerate(self._own[1:]):
            args, kwargs = _with_hidden(args, kwargs, self._hidden_of(output, number))
            output = forward(*args, **kwargs)
        return output

    def _follower(self, number: int) -> Forward:
        is_last = number == len(self._own) - 1

        def pass_through(*args: Any, **kwargs: Any) -> Any:
            if self._call is None:
                raise self._wrong(number, f"it ran before {self._paths[0]}")
            self._check(number, args, kwargs)
            output = self._output
            self._ran += 1
            if is_last:
                self._output = self._call = None
            return output

        return pass_through

    def _check(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._call is not None, "the caller has checked this"
        if number < self._ran:
            raise self._wrong(number, "it ran more than once")
        if number > self._ran:
            self.check_ended()
        hidden, place = _hidden(args, kwargs)
        if hidden is not self._hidden_of(self._output, number - 1):
            raise self._wrong(number, "its input is not the unchanged output of the previous block")
        first, current = _others(*self._call, place), _others(args, kwargs, place)
        if first.keys() != current.keys() or any(first[name] is not current[name] for name in current):
            differing = [
                str(name) for name in sorted({*first, *current}, key=str) if first.get(name) is not current.get(name)
            ]
            raise self._wrong(
                number, f"its argument {', '.join(differing)} differs from the argument of {self._paths[0]}"
            )

    def _hidden_of(self, output: Any, number: int) -> Any:
        """Return the next block's input from a block's output: the output, or the only tensor in a tuple."""
        import torch

        if is_a(output, torch.Tensor):
            return output
        if is_a(output, tuple, list) and output and is_a(output[0], torch.Tensor):
            if all(element is None for element in output[1:]):
                return output[0]
            raise self._wrong(number, "it returns more than one tensor")
        raise self._wrong(number, f"it returns {class_name(type(output))}")

    def _wrong(self, number: int, why: str) -> ConfigError:
        return ConfigError(
            f"{self._paths[number]} cannot be recomputed together with the blocks around it: {why}; "
            "use checkpoint=blocks or checkpoint=every:N"
        )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | str | None]:
    """Return the first tensor among a call's arguments, and its position or keyword."""
    import torch

    for place, value in _by_place(args, kwargs):
        if is_a(value, torch.Tensor):
            return value, place
    return None, None


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, place = _hidden(args, kwargs)
    if isinstance(place, int):
        return (*args[:place], hidden, *args[place + 1 :]), kwargs
    return args, kwargs if place is None else {**kwargs, place: hidden}


def _others(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: int | str | None) -> dict[int | str, Any]:
    return {place: value for place, value in _by_place(args, kwargs) if place != hidden}


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()
