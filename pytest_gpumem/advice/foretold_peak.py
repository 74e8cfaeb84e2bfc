"""The peak of a long generation on a device that computes nothing: a few tokens run, and the allocator does the rest.

An emulated GPU needs about a second for each token of a model with 32 layers. The allocations of all tokens follow from a few
(`token_pattern`), and torch's own caching allocator takes 10 ms for those of a token. So the peak is the allocator's, with
all that it reserves: longer blocks rarely fit into the place of shorter ones, and no formula tells how much is lost by that.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.advice.token_pattern import (
    FIRST,
    FIRST_TOKENS,
    PERIODS,
    Allocation,
    Free,
    Recording,
    pattern_of,
    place_of,
)
from pytest_gpumem.devices.cuda_history import ALLOCATED, GIVEN_BACK, history_of
from pytest_gpumem.explain.recording import is_out_of_memory
from pytest_gpumem.measure.reading import run_phases
from pytest_gpumem.steps.generation import generation_phases
from pytest_gpumem.torch_support.private_api import (
    allocate_on_cuda,
    clear_cublas_workspaces,
    cuda_snapshot,
    free_on_cuda,
    start_cuda_history,
    stop_cuda_history,
)
from pytest_gpumem.torch_support.tracebacks import clear_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from pytest_gpumem.advice.token_pattern import Step
    from pytest_gpumem.devices.contract import Device, Peak
    from pytest_gpumem.devices.cuda_history import HistoryEntry
    from pytest_gpumem.step_config.config import StepConfig

Place = tuple[int, int]
"""A step and the index of an allocation in it."""
LAST_TOKENS = FIRST + PERIODS[-1] + 2
"""Tokens of the second recording: a whole period of the last steps."""
LEAST_TOKENS = 2 * (FIRST_TOKENS + LAST_TOKENS)
"""The fewest tokens for which foretelling is faster than running all of them."""
_MOST_RUNS = 8


def is_long(new_tokens: int | None) -> bool:
    """Return whether a step generates so many tokens that its peak is foretold from a few of them."""
    return new_tokens is not None and new_tokens >= LEAST_TOKENS


class _NotForetold(Exception):
    """The allocations of all tokens do not follow from those of a few."""


def foretold_peak(device: Device, model: torch.nn.Module, prompt: Any, tokens: int, config: StepConfig) -> Peak | None:
    """Return the peak of a generation that is run until it reserves no more, or ``None`` if all tokens have to be run.

    Args:
        device: An emulated GPU.
        model: A model whose ``generate`` takes ``max_new_tokens``.
        prompt: The arguments of ``generate``: tensors of one size, ``(samples, tokens)``.
        tokens: The number of tokens to generate.
        config: The step config.
    """
    if not is_long(tokens) or not _has_one_size(prompt):
        return None
    # The dry run, which shows that autocast casts, leaves cuBLAS's workspace. A recording has to allocate it.
    clear_cublas_workspaces()
    try:
        with device.peak_from_now_on() as peak:
            assert peak is not None, "an emulated GPU reserves"
            first = _recorded(device, model, prompt, FIRST_TOKENS, config)
            taken = peak()
        last = _recorded(device, model, _lengthened(prompt, tokens - LAST_TOKENS), LAST_TOKENS, config)
        pattern = pattern_of(first, last, tokens)
        if pattern is None:
            return None
        replayed, kept = _replayed(device, first.steps, runs=1)
        if replayed != taken:
            return None
        foretold, kept_by_all = _replayed(device, tuple(pattern.steps()), runs=_MOST_RUNS)
        return foretold if kept_by_all == kept else None
    except _NotForetold:
        return None


def _has_one_size(prompt: Any) -> bool:
    """Return whether a prompt is made of tensors of one size, ``(samples, tokens)``."""
    import torch

    if not isinstance(prompt, dict) or not all(isinstance(value, torch.Tensor) for value in prompt.values()):
        return False
    sizes = {tuple(value.shape) for value in prompt.values()}
    return len(sizes) == 1 and len(next(iter(sizes))) == 2


def _lengthened(prompt: Mapping[str, torch.Tensor], extra: int) -> dict[str, torch.Tensor]:
    """Return a prompt with ``extra`` more tokens."""
    import torch

    return {name: torch.cat([value, value[:, -1:].expand(len(value), extra)], dim=1) for name, value in prompt.items()}


def _recorded(device: Device, model: torch.nn.Module, prompt: Any, tokens: int, config: StepConfig) -> Recording:
    """Run the generation of a few tokens, and return its allocations and frees.

    Raises:
        _NotForetold: The model ran another number of forward passes than tokens, a block was there before, or memory ran out
            for a prompt as long as the whole text.
    """
    index = device.torch_device.index or 0
    borders: list[int] = []

    def entries() -> list[HistoryEntry]:
        return history_of(cuda_snapshot()["device_traces"][index])

    with _history(), model.register_forward_pre_hook(lambda *_: borders.append(len(entries()))):
        try:
            run_phases(generation_phases(model, prompt, tokens, config, device.torch_device))
        except RuntimeError as error:
            if tokens != LAST_TOKENS or not is_out_of_memory(error):
                raise
            clear_frames(error)
            raise _NotForetold from None
        done = entries()
    if len(borders) != tokens:
        raise _NotForetold
    return Recording(tuple(_steps(done, borders)))


@contextmanager
def _history() -> Iterator[None]:
    start_cuda_history(frames=False)
    try:
        yield
    finally:
        stop_cuda_history()


def _steps(entries: Sequence[HistoryEntry], borders: Sequence[int]) -> Iterator[Step]:
    """Yield the events between two borders each. Raises `_NotForetold` for a free of a block that was there before."""
    made_at: dict[int, tuple[int, int]] = {}
    for number, (begin, end) in enumerate(zip([0, *borders], [*borders, len(entries)], strict=True)):
        step: list[Allocation | Free] = []
        count = 0
        for entry in entries[begin:end]:
            if entry.action == ALLOCATED:
                made_at[entry.address] = number, count
                count += 1
                step.append(Allocation(entry.nbytes))
            elif entry.action == GIVEN_BACK:
                if entry.address not in made_at:
                    raise _NotForetold
                made_in, index = made_at.pop(entry.address)
                step.append(Free(place_of(made_in, number), index))
        yield tuple(step)


def _replayed(device: Device, steps: Sequence[Step], *, runs: int) -> tuple[Peak, frozenset[Place]]:
    """Return the peak of an allocator that does what ``steps`` say, until it reserves no more, and the blocks that stay.

    They are workspaces of cuBLAS, which stay for the next run.

    Raises:
        _NotForetold: Blocks of a token are never freed, or more is reserved in each of 8 runs.
    """
    with _replay(device) as replay, device.peak_from_now_on() as peak:
        assert peak is not None, "an emulated GPU reserves"
        before = None
        for _ in range(runs):
            replay.run(steps)
            now = peak()
            if now == before or runs == 1:
                return now, replay.kept
            before = now
    raise _NotForetold


@contextmanager
def _replay(device: Device) -> Iterator[_Replay]:
    """Yield a replay without cuBLAS's workspaces, and free its blocks at the end."""
    clear_cublas_workspaces()
    replay = _Replay(device.torch_device)
    try:
        yield replay
    finally:
        replay.free_all()
        device.empty_cache()


class _Replay:
    """Makes allocations by torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[Place, int] = {}
        """Addresses of live blocks."""

    @property
    def kept(self) -> frozenset[Place]:
        """The blocks that are live."""
        return frozenset(self._blocks)

    def run(self, steps: Sequence[Step]) -> None:
        """Make the allocations and frees of all steps.

        Raises:
            _NotForetold: Blocks of a token stay, or a block that is to be freed was not made: a prompt of another length has
                other allocations.
        """
        for number, step in enumerate(steps):
            count = 0
            for event in step:
                if isinstance(event, Allocation):
                    key = number, count
                    if key not in self._blocks:
                        self._blocks[key] = allocate_on_cuda(event.nbytes, self._device)
                    count += 1
                else:
                    made_in = number if event.step is None else event.step if event.step >= 0 else number + event.step
                    self._free(made_in, event.index)
        if any(number >= FIRST for number, _ in self._blocks):
            raise _NotForetold

    def free_all(self) -> None:
        """Free all live blocks."""
        for key in list(self._blocks):
            self._free(*key)

    def _free(self, step: int, index: int) -> None:
        address = self._blocks.pop((step, index), None)
        if address is None:
            raise _NotForetold
        free_on_cuda(address)
