"""Record where a program reads uncomputed values on an emulated GPU, and for which use.

- A read is a *trouble* if the program makes an integer, an order or a size from the value. Memory may depend on the value, so
  the measurement is invalid. Example: ``int(loss)`` at train.py:9.
- If a float decides a branch, the line is recorded, but the measurement is valid. Example: ``if loss < best_loss``. Memory
  rarely depends on such a branch.
- If the program reads values which depend on an assumed routing, only the first line is recorded.
- All other reads are counted for each line. Example: ``losses.append(loss.item())``.
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
"""Functions in transformers and torch that read values only before a warning or an exception."""

_DECODERS = tuple(
    f"{_INSTALLED}transformers{os.sep}{file}" for file in ("tokenization_", f"generation{os.sep}streamers")
)
"""The begin of the paths of the files in which transformers makes texts from tokens."""

_MENDS = {
    "a value is read": (
        " (log a float in its place, `(prediction == target).float().mean().item()`, or read it outside the measured code)"
    )
}
"""Advice that a message gives to the user, by the beginning of the message (``clause`` in `Reads.invalid`)."""

Use = Literal["kept", "branch", "order", "integer"]
"""The way in which a program uses a float: it decides a branch, sorts a list, or becomes an integer. ``"kept"`` is any other
use, for example a print, because such a use should not change memory."""


class Reads:
    """Record of all lines in which a program read uncomputed values."""

    def __init__(self) -> None:
        self.first_trouble: str | None = None
        """A text about the first read in this process that was a trouble or decided a branch: ``"a value is read ..., at
        train.py:9"``."""
        self.first_invalid: str | None = None
        """A text about the first read in this process that makes peaks wrong."""
        self._trouble: str | None = None
        self._decided: Counter[str] = Counter()
        self._other: Counter[str] = Counter()
        self._routed: dict[str, str] = {}
        self._ignored = 0
        self._in_backward: list[int] = []
        """The threads in which a backward pass was started and has not ended, the innermost last."""

    def take_trouble(self) -> str | None:
        """Return a text about the first read since the last call that made the measurement invalid; ``None`` without one."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def take_others(self) -> UnknownReads:
        """Return the reads since the last call, except reads that made the measurement invalid."""
        other_reads = UnknownReads(self._decided, self._other, self._routed)
        self._decided, self._other, self._routed = Counter(), Counter(), {}
        return other_reads

    def invalid(self, clause: str) -> None:
        """Record a read that makes the measurement invalid, because memory may depend on the value.

        A tokenizer that makes a text from tokens only counts, like a float in a text.

        Args:
            clause: The beginning of the message about this read: ``"a value is read"``.
        """
        if _makes_text():
            self.of_float()
        elif self._trouble is None and not self._is_harmless():
            self._trouble = (
                f"{clause} that an emulated GPU does not compute{_MENDS.get(clause, '')}, at {self._users_line()}"
            )
            self.first_trouble = self.first_trouble or self._trouble
            self.first_invalid = self.first_invalid or self._trouble

    def of_float(self, use: Use = "kept") -> None:
        """Record how the program uses an uncomputed float. The default ``"kept"`` stands for uses that do not change memory."""
        if use == "order":
            self.invalid("the program sorts values")
        elif use == "integer":
            self.invalid("the program makes an integer from a value")
        elif not self._is_harmless():
            line = self._users_line()
            (self._decided if use == "branch" else self._other)[line] += 1
            if use == "branch":
                self.first_trouble = self.first_trouble or f"{DECIDED} at {line}"

    def of_routing(self, routing: Routing) -> None:
        """Record a read of a value from an assumed routing."""
        if routing not in self._routed and not self._is_harmless():
            self._routed[routing] = self._users_line()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore all reads within the context, because the code there only prints values."""
        self._ignored += 1
        try:
            yield
        finally:
            self._ignored -= 1

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within the context, record reads in autograd's threads at the line that called ``backward``.

        Autograd's threads run no Python lines themselves.
        """
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


def _makes_text() -> bool:
    """Return whether a tokenizer or a streamer of transformers is reading tokens, to make a text from them."""
    frames = walk_stack(sys._getframe(1))  # noqa: SLF001 -- the interpreter's, documented
    return any(decoder in frame.f_code.co_filename for frame, _ in frames for decoder in _DECODERS)


def _of_no_memory() -> bool:
    """Return whether the currently reading code cannot change memory.

    Such code initialises weights (some functions draw a weight again if it is out of range), checks values to print a warning,
    or writes pytest's text about a failed assertion.
    """
    frames = walk_stack(sys._getframe(1))  # noqa: SLF001 -- the interpreter's, documented
    codes = (frame.f_code for frame, _ in frames)
    return any(
        code.co_filename == torch.nn.init.__file__ or code.co_name in _CHECKING or _TEXTS_OF_PYTEST in code.co_filename
        for code in codes
    )
