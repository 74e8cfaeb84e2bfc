"""Record reads of uncomputed values on an emulated GPU, with their use and the user's line.

- If an integer, an order or a size is made from such a value, the read is a *trouble*: memory may depend on the value, so no
  figure is valid. Example: ``int(loss)`` at train.py:9.
- If a float decides a branch, memory rarely depends on it. Example: ``if loss < best_loss``. The line is recorded.
- If a value depends on an assumed routing, the first line with a read is recorded.
- All other reads are counted by line. Example: ``losses.append(loss.item())``.
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

from pytest_gpumem.facts.values.unknown_reads import DECIDED, UnknownReads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from pytest_gpumem.facts.values.option_words import Routing

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_TORCHS = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_TEXTS_OF_PYTEST = f"{_INSTALLED}_pytest{os.sep}_io{os.sep}"
_SAFETENSORS = f"{_INSTALLED}safetensors{os.sep}"

_CHECKING = frozenset({"warn_if_padding_and_no_attention_mask", "gaussian_nll_loss"})
"""Functions in transformers and torch that read values only to warn or to raise an error."""

_MENDS = {
    "a value is read": (
        " (log a float in its place, `(prediction == target).float().mean().item()`, or read it outside the measured code)"
    )
}
"""Advice about a read, by its clause."""

Use = Literal["kept", "branch", "order", "integer"]
"""The use of a float. ``"kept"`` is any use that cannot change memory as far as the code shows, for example a print."""


class Reads:
    """Record of reads by the host, for uncomputed values."""

    def __init__(self) -> None:
        self.first_trouble: str | None = None
        """The process's first trouble or first decided branch, as a clause with its line."""
        self._trouble: str | None = None
        self._decided: Counter[str] = Counter()
        self._other: Counter[str] = Counter()
        self._routed: dict[str, str] = {}
        self._ignored = 0
        self._in_backward: list[int] = []
        """The threads waiting for backward."""

    def take_trouble(self) -> str | None:
        """Return the first trouble since the last call, as a clause with its line; ``None`` without trouble."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def take_others(self) -> UnknownReads:
        """Return the other reads since the last call."""
        other_reads = UnknownReads(self._decided, self._other, self._routed)
        self._decided, self._other, self._routed = Counter(), Counter(), {}
        return other_reads

    def invalid(self, clause: str) -> None:
        """Record a trouble: a read on which memory may depend.

        Args:
            clause: The read without its line, for example ``"a value is read"``.
        """
        if self._trouble is None and not self._is_harmless():
            self._trouble = (
                f"{clause} that an emulated GPU does not compute{_MENDS.get(clause, '')}, at {self._users_line()}"
            )
            self.first_trouble = self.first_trouble or self._trouble

    def of_float(self, use: Use = "kept") -> None:
        """Record a use of an uncomputed float. By default, the float only leaves the GPU."""
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
        """Record that the host reads a value that depends on an assumed routing."""
        if routing not in self._routed and not self._is_harmless():
            self._routed[routing] = self._users_line()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Record no reads inside the context, because values only become text there."""
        self._ignored += 1
        try:
            yield
        finally:
            self._ignored -= 1

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Attribute reads by autograd's threads, which run no Python line, to the caller's line."""
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
    """Return whether the current read cannot change memory.

    Such reads happen when weights are initialised (some weights are drawn again if they are out of range), when a library
    checks values to warn, and when pytest shows values in a failed assertion.
    """
    frames = walk_stack(sys._getframe(1))  # noqa: SLF001 -- the interpreter's, documented
    codes = (frame.f_code for frame, _ in frames)
    return any(
        code.co_filename == torch.nn.init.__file__ or code.co_name in _CHECKING or _TEXTS_OF_PYTEST in code.co_filename
        for code in codes
    )
