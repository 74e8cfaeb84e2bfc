"""A recorded step: events, marks and ownership snapshots of its blocks, and the calls of modules in it. Frozen values."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.values.events import Seen, Token, tokens_from_plain, tokens_to_plain
from pytest_gpumem.values.module_calls import ModuleCalls, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.values.events import Open


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


class GraphCalls:
    """Counter of module calls, fed with the spans of a trace in their order."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        self._calls: list[tuple[str, bool]] = []
        """Each call of a module: its folded path, and whether grad mode was off."""
        self._open: list[int] = []
        """The calls that have not ended, by their place among all."""
        self._nodes = 0
        self._made_in: dict[int, tuple[int, ...]] = {}
        """The calls in which each node of the graph was made in forward, by autograd's number."""
        self._ran: set[int] = set()

    def opened(self, span: Open) -> None:
        """A span begins."""
        if span.kind == "node":
            self._nodes += 1
            self._ran.add(span.sequence)
        elif span.kind == "operator":
            # What is computed again makes a graph of its own, of which nothing need run.
            if span.sequence >= 0 and not self._nodes:
                self._made_in[span.sequence] = tuple(self._open)
        elif self._is_module(span):
            mark = self._marks[span.mark]
            self._open.append(len(self._calls))
            self._calls.append((folded(mark.path), not mark.grad))

    def closed(self, span: Open) -> None:
        """The span ends."""
        if span.kind == "node":
            self._nodes -= 1
        elif self._is_module(span):
            self._open.pop()

    def _is_module(self, span: Open) -> bool:
        return span.kind == "mark" and self._marks[span.mark].kind == "module"

    def no_grad(self) -> ModuleCalls:
        """Return how many of each module's calls began with grad mode off."""
        return counted(self._calls)

    def no_backward(self) -> ModuleCalls:
        """Return for each module how many of its forward calls that made graph nodes had none of them run.

        Nothing of a step without backward.
        """
        if not self._ran:
            return {}
        made = {call for calls in self._made_in.values() for call in calls}
        reached = {call for number in self._ran for call in self._made_in.get(number, ())}
        return counted((self._calls[call][0], call not in reached) for call in sorted(made))
