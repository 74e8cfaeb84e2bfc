"""A training step as its sources told of it on a GPU, so that it can be composed again where there is none.

What is kept is the raw material: the profiler's tokens with the allocator's rounded blocks, the allocator's history, and
what was marked and looked at. Beside it stand the peak by the statistics, and what was made of it on the GPU.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from pytest_gpumem.devices.cuda_history import HistoryEntry, in_order_of_time, with_requested_sizes
from pytest_gpumem.devices.cuda_runtime import TorchCuda
from pytest_gpumem.explain.artifacts import Artifacts
from pytest_gpumem.explain.compose import composition_of_peak
from pytest_gpumem.explain.lifetimes import timeline_of
from pytest_gpumem.explain.sites import Sites
from pytest_gpumem.explain.trace import Label, Mark, Trace
from pytest_gpumem.measure.context import MeasuringContext
from pytest_gpumem.steps.config import as_config
from pytest_gpumem.steps.train_step import prepared_train_step
from pytest_gpumem.values.composition import Composition
from pytest_gpumem.values.events import AllocationEvent, Close, Open, Seen, Token
from pytest_gpumem.values.plain import from_plain, to_plain
from tests.gpu.project import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.cuda_runtime import RecordedRegion
    from pytest_gpumem.explain.recording import Recorded
    from pytest_gpumem.values.composition import Explanation

FORMAT = 2
WIDTH, CLASSES, SAMPLES = 36, 10, 24


class Block(torch.nn.Module):
    """Half of what a transformer's layer is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class TwoLayers(torch.nn.Module):
    """Sizes that no allocator rounds to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), labels)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, dtype=torch.long)


@dataclass(frozen=True)
class StepRecording:
    """See above. ``trace`` is without its tokens, which are made of ``tokens`` and ``history``; bytes are the step's."""

    device: str
    details: dict[str, str | int]
    tokens: list[Token]
    history: list[HistoryEntry]
    trace: Trace
    own_bytes: int
    peak: int
    composition: Composition

    def composed(self) -> Composition:
        """What the sources' tokens make of the peak, here and now."""
        tokens = with_requested_sizes(in_order_of_time(self.tokens), self.history)
        return composition_of_peak(timeline_of(replace(self.trace, tokens=tuple(tokens))), self.own_bytes)

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "device": self.device,
            "details": self.details,
            "peak": self.peak,
            "own_bytes": self.own_bytes,
            "composition": to_plain(self.composition),
            "trace": _trace_to_plain(self.trace),
            "history": [list(entry) for entry in self.history],
            "tokens": _tokens_to_plain(self.tokens),
        }
        return json.dumps(document, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StepRecording:
        """The recording that `to_json` wrote. Raises ``ValueError`` for another format."""
        document: dict[str, Any] = json.loads(text)
        if document.get("format") != FORMAT:
            raise ValueError(f"not a recording of a step of format {FORMAT}; record it again")
        return cls(
            document["device"],
            document["details"],
            _tokens_from_plain(document["tokens"]),
            [HistoryEntry(*entry) for entry in document["history"]],
            _trace_from_plain(document["trace"]),
            document["own_bytes"],
            document["peak"],
            from_plain(Composition, document["composition"]),
        )


_TOKENS: dict[str, Any] = {"allocation": AllocationEvent, "open": Open, "close": Close, "seen": Seen}
_NAMES = {kind: name for name, kind in _TOKENS.items()}


def _tokens_to_plain(tokens: Sequence[Token]) -> list[list[object]]:
    return [[_NAMES[type(token)], *token] for token in tokens]


def _tokens_from_plain(plain: list[list[Any]]) -> list[Token]:
    return [
        _TOKENS[kind](*(tuple(value) if isinstance(value, list) else value for value in values))
        for kind, *values in plain
    ]


def _trace_to_plain(trace: Trace) -> dict[str, Any]:
    return {
        "tokens": _tokens_to_plain(trace.tokens),
        "marks": [asdict(mark) for mark in trace.marks],
        "snapshots": {str(mark): [asdict(label) for label in labels] for mark, labels in trace.snapshots.items()},
        "results": {str(mark): _tokens_to_plain(seen) for mark, seen in trace.results.items()},
        "before": {str(address): nbytes for address, nbytes in trace.before.items()},
        "own": sorted(trace.own),
    }


def _trace_from_plain(plain: Mapping[str, Any]) -> Trace:
    return Trace(
        tuple(_tokens_from_plain(plain["tokens"])),
        tuple(Mark(**mark) for mark in plain["marks"]),
        {int(mark): tuple(Label(**label) for label in labels) for mark, labels in plain["snapshots"].items()},
        {int(address): nbytes for address, nbytes in plain["before"].items()},
        frozenset(plain["own"]),
        {
            int(mark): tuple(Seen(address, dtype, tuple(shape)) for _, address, dtype, shape in seen)
            for mark, seen in plain["results"].items()
        },
    )


class KeepingCuda(TorchCuda):
    """Keeps what its sources told of each stretch."""

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[RecordedRegion] = []

    @contextmanager
    def recorded(self, *, with_history: bool) -> Iterator[RecordedRegion]:
        with super().recorded(with_history=with_history) as stretch:
            yield stretch
        self.stretches.append(stretch)


@dataclass(frozen=True)
class Ran:
    """A step that was measured and explained."""

    peak: int
    explanation: Explanation
    recorded: Recorded


class Kept(Artifacts):
    """Recordings as they are, in place of files."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recordings: list[Recorded] = []

    def keep(self, recorded: Recorded) -> str | None:
        self.recordings.append(recorded)
        return None


def run_step(device: Device, config: str = "fp32") -> Ran:
    """Measure and explain a training step of `TwoLayers` on an open device."""
    kept = Kept(None, "", device)
    context = MeasuringContext(device, time_budget=None, sites=Sites(REPOSITORY), artifacts=kept)
    with prepared_train_step(context, TwoLayers, batch(), config=as_config(config)) as prepared:
        step = prepared.measure()
        explanation = prepared.explain(step)
    assert not isinstance(explanation, str), explanation
    (recorded,) = kept.recordings
    return Ran(step.metrics()["peak_allocated"], explanation, recorded)


def recording_of(ran: Ran, stretch: RecordedRegion, device: str, details: Mapping[str, str | int]) -> StepRecording:
    """What is to be kept of a step, with what the sources told of its recorded run."""
    trace = replace(ran.recorded.trace, tokens=())
    return StepRecording(
        device,
        dict(details),
        stretch.tokens,
        stretch.history,
        trace,
        ran.recorded.own_bytes,
        int(ran.peak),
        ran.explanation.peak,
    )
