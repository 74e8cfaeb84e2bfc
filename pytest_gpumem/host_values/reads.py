"""Reads of values that an emulated GPU did not compute: what the host makes of each, and the user's line.

An integer, an order or a size that is made of one is *trouble*: memory may depend on it, and nothing measured is valid. A
branch that a float decided may, too, but most do not (the best loss so far): it is noted, as is a read of what follows from
an assumed routing. All other reads are counted.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Literal

import torch

from pytest_gpumem.values.unknown_reads import DECIDED, UnknownReads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from pytest_gpumem.values.option_words import Routing

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_TORCHS = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_TEXTS_OF_PYTEST = f"{_INSTALLED}_pytest{os.sep}_io{os.sep}"
_SAFETENSORS = f"{_INSTALLED}safetensors{os.sep}"

_CHECKING = frozenset({"warn_if_padding_and_no_attention_mask", "gaussian_nll_loss"})
"""Functions that read values to warn or to refuse them, and for nothing else: of transformers and torch."""

_MENDS = {
    "a value is read": (
        " (log a float in its place, `(prediction == target).float().mean().item()`, or read it outside of what is measured)"
    )
}
"""Advice about a read, by its clause."""

Use = Literal["kept", "branch", "order", "integer"]
"""Use of a float: nothing that memory could depend on, as far as can be seen, or one of the others."""


class Reads:
    """Reads of uncomputed values by the host."""

    def __init__(self) -> None:
        self.first_trouble: str | None = None
        """The first read of the process that memory may depend on, or the first branch that a value decided."""
        self._trouble: str | None = None
        self._decided: Counter[str] = Counter()
        self._other: Counter[str] = Counter()
        self._routed: dict[str, str] = {}
        self._ignored = 0
        self._in_backward: list[int] = []
        """The threads that wait for backward."""

    def take_trouble(self) -> str | None:
        """Return the first read that memory may depend on since the last call, as a clause with its line."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def take_others(self) -> UnknownReads:
        """Return the other reads since the last call."""
        others = UnknownReads(self._decided, self._other, self._routed)
        self._decided, self._other, self._routed = Counter(), Counter(), {}
        return others

    def invalid(self, what: str) -> None:
        """Note a read that memory may depend on, as a clause without its line."""
        if self._trouble is None and not self._is_harmless():
            self._trouble = (
                f"{what} that an emulated GPU does not compute{_MENDS.get(what, '')}, at {self._users_line()}"
            )
            self.first_trouble = self.first_trouble or self._trouble

    def of_float(self, use: Use = "kept") -> None:
        """Note that a float leaves the GPU, or what is made of it."""
        if use == "order":
            self.invalid("values are put in an order")
        elif use == "integer":
            self.invalid("an integer is made of a value")
        elif not self._is_harmless():
            line = self._users_line()
            (self._decided if use == "branch" else self._other)[line] += 1
            if use == "branch":
                self.first_trouble = self.first_trouble or f"{DECIDED} at {line}"

    def of_routing(self, routing: Routing) -> None:
        """Note that the host reads what follows from an assumed routing."""
        if routing not in self._routed and not self._is_harmless():
            self._routed[routing] = self._users_line()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Note nothing within: values become text."""
        self._ignored += 1
        try:
            yield
        finally:
            self._ignored -= 1

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Name the line that called this for reads within by threads that have none: autograd's."""
        self._in_backward.append(threading.get_ident())
        try:
            yield
        finally:
            self._in_backward.pop()

    def _users_line(self) -> str:
        line = _users_line_of(walk_stack(sys._getframe(1)))  # noqa: SLF001 -- the interpreter's, documented
        for thread in () if line else reversed(self._in_backward):
            line = line or _users_line_of(walk_stack(sys._current_frames().get(thread)))  # noqa: SLF001 -- likewise
        return line or "an unknown line"

    def _is_harmless(self) -> bool:
        return self._ignored > 0 or _of_no_memory()


def _users_line_of(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    for frame, line in frames:
        file = frame.f_code.co_filename
        is_passed_over = file.startswith((_OURS, _TORCHS, "<")) or _SAFETENSORS in file
        if not is_passed_over and not (file.startswith(_STANDARD) and _INSTALLED not in file):
            return f"{file}:{line}"
    return None


def _of_no_memory() -> bool:
    """Return whether weights are initialised, a library warns, or pytest shows the values of a failed assertion.

    An initialisation may draw some weights again while values are out of a range.
    """
    frames = walk_stack(sys._getframe(1))  # noqa: SLF001 -- the interpreter's, documented
    codes = (frame.f_code for frame, _ in frames)
    return any(
        code.co_filename == torch.nn.init.__file__ or code.co_name in _CHECKING or _TEXTS_OF_PYTEST in code.co_filename
        for code in codes
    )
