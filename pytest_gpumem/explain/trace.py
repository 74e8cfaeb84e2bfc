"""A recorded step: events, marks, and ownership snapshots of its blocks. Frozen values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.values.events import Seen, Token, tokens_from_plain, tokens_to_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

MarkKind = Literal["phase", "module", "call", "optimizer", "look", "rest"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Mark:
    """A span of Python code: a phase, a module's call, a torch function's call, an optimizer's step.

    ``look`` is a moment at which blocks were labelled; ``rest`` is what comes after the step (``workspaces``, ``garbage``).
    """

    kind: MarkKind
    path: str = ""
    """The module's path; the phase's name; what is at rest."""
    site: str = ""
    library: str = ""
    grad: bool = True
    """Of a module's call: whether autograd recorded when it began."""


@dataclass(frozen=True, slots=True)
class Label:
    """The owner of the block at an address."""

    address: int
    category: str
    module: str = ""
    tensor: str = ""
    site: str = ""


@dataclass(frozen=True)
class Trace:
    """A recording. ``before`` are the blocks that were there when it began, ``own`` those of them that are the step's."""

    tokens: tuple[Token, ...]
    marks: tuple[Mark, ...] = ()
    looks: Mapping[int, tuple[Label, ...]] = field(default_factory=dict)
    """What was seen at each ``look``, by the index of its mark."""
    before: Mapping[int, int] = field(default_factory=dict)
    own: frozenset[int] = frozenset()
    failed: bool = False
    """Whether the step ended with an exception: its tokens then end with the unwinding."""
    granularity: int = 1
    """To multiples of how many bytes the source rounds its blocks up."""
    results: Mapping[int, tuple[Seen, ...]] = field(default_factory=dict)
    """The tensors that each call returned, by the index of its mark: operators only tell those that they take."""

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for JSON; `trace_from_plain` is the inverse."""
        return {
            "tokens": tokens_to_plain(list(self.tokens)),
            "marks": [asdict(mark) for mark in self.marks],
            "looks": {str(mark): [asdict(label) for label in labels] for mark, labels in self.looks.items()},
            "results": {str(mark): tokens_to_plain(list(seen)) for mark, seen in self.results.items()},
            "before": {str(address): nbytes for address, nbytes in self.before.items()},
            "own": sorted(self.own),
            "failed": self.failed,
            "granularity": self.granularity,
        }


def trace_from_plain(plain: Mapping[str, Any]) -> Trace:
    """Return the trace that `Trace.to_plain` turned into plain values."""
    return Trace(
        tuple(tokens_from_plain(plain["tokens"])),
        tuple(Mark(**mark) for mark in plain["marks"]),
        {int(mark): tuple(Label(**label) for label in labels) for mark, labels in plain["looks"].items()},
        {int(address): nbytes for address, nbytes in plain["before"].items()},
        frozenset(plain["own"]),
        plain["failed"],
        plain["granularity"],
        {int(mark): tuple(_seen(tokens_from_plain(seen))) for mark, seen in plain["results"].items()},
    )


def _seen(tokens: list[Token]) -> list[Seen]:
    return [token for token in tokens if isinstance(token, Seen)]


def folded(path: str) -> str:
    """Return a module's path without layer numbers: ``h.0.attn`` is ``h.*.attn``."""
    return _NUMBER.sub("*", path)


def tensor_text(dtype: str, shape: tuple[int, ...]) -> str:
    """Return dtype and shape as text: ``float32[8, 256]``."""
    return f"{dtype}{list(shape)}"
