"""Compute a long generation's peak on an emulated GPU from a few tokens and torch's own allocator.

An emulated GPU needs about a second for each token in a model with 32 layers. The allocations for all tokens follow from a few
tokens (`token_pattern`), and torch's caching allocator replays a token's allocations in 10 ms. The replay includes
fragmentation: longer blocks rarely fit into the gaps between shorter blocks, and no formula predicts this loss.

For example, `foretold_peak` runs 41 instead of 1,000 tokens after a prompt with 100 tokens: the first 28 tokens, and 13 tokens
after a prompt with 1,087 tokens. Then it replays the allocations for all 1,000 tokens, in about 10 s for each replay.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measuring.devices.cuda_history import ALLOCATED, GIVEN_BACK, history_of
from pytest_gpumem.measuring.explain.recording import is_out_of_memory
from pytest_gpumem.measuring.measure.reading import run_phases
from pytest_gpumem.measuring.steps.generation import generation_phases
from pytest_gpumem.tools.advise.token_pattern import (
    FIRST,
    FIRST_TOKENS,
    PERIODS,
    Allocation,
    Free,
    Recording,
    pattern_of,
    place_of,
)
from pytest_gpumem.torch_support.private_api.allocator import (
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

    from pytest_gpumem.measuring.devices.contract import Device, Peak
    from pytest_gpumem.measuring.devices.cuda_history import HistoryEntry
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.token_pattern import Step

Place = tuple[int, int]
"""A step's number, and an allocation's index in this step."""
LAST_TOKENS = FIRST + PERIODS[-1] + 2
"""The number of tokens in the second recording. They are enough for the last steps to include a complete period."""
LEAST_TOKENS = 2 * (FIRST_TOKENS + LAST_TOKENS)
"""The fewest tokens for which a replay is faster than a complete run: 82."""
_MOST_RUNS = 8


def is_long(new_tokens: int | None) -> bool:
    """Return whether a step generates enough tokens for `foretold_peak`."""
    return new_tokens is not None and new_tokens >= LEAST_TOKENS


class _NotForetold(Exception):
    """Error if the allocations for all tokens do not follow from the recorded tokens."""


def foretold_peak(device: Device, model: torch.nn.Module, prompt: Any, tokens: int, config: StepConfig) -> Peak | None:
    """Return a repeated generation's peak, or ``None`` if all tokens have to run.

    Args:
        device: An emulated GPU.
        model: A model whose ``generate`` takes ``max_new_tokens``.
        prompt: The arguments for ``generate``: tensors with an equal shape ``(samples, tokens)``.
        tokens: The number of tokens to generate.
        config: The step config.
    """
    if not is_long(tokens) or not _has_one_size(prompt):
        return None
    # The dry run, a check of autocast, leaves cuBLAS's workspace. Free this workspace, because a recording has to allocate it.
    clear_cublas_workspaces()
    try:
        with device.peak_from_now_on() as peak:
            assert peak is not None, "an emulated GPU reserves"
            first = _recorded(device, model, prompt, FIRST_TOKENS, config)
            first_peak = peak()
        last = _recorded(device, model, _lengthened(prompt, tokens - LAST_TOKENS), LAST_TOKENS, config)
        pattern = pattern_of(first, last, tokens)
        if pattern is None:
            return None
        replayed, first_places = _replayed(device, first.steps, runs=1)
        if replayed != first_peak:
            return None
        foretold, last_places = _replayed(device, tuple(pattern.steps()), runs=_MOST_RUNS)
        return foretold if last_places == first_places else None
    except _NotForetold:
        return None


def _has_one_size(prompt: Any) -> bool:
    """Return whether a prompt consists of tensors with an equal shape ``(samples, tokens)``."""
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
    """Generate a few tokens, and return the allocations and frees.

    Raises:
        _NotForetold: The number of forward passes differs from the number of tokens, an older block was freed, or memory ran
            out with the longer prompt.
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
        events = entries()
    if len(borders) != tokens:
        raise _NotForetold
    return Recording(tuple(_steps(events, borders)))


@contextmanager
def _history() -> Iterator[None]:
    start_cuda_history(frames=False)
    try:
        yield
    finally:
        stop_cuda_history()


def _steps(entries: Sequence[HistoryEntry], borders: Sequence[int]) -> Iterator[Step]:
    """Yield the events between successive borders. Raises `_NotForetold` if a block from before the recording is freed."""
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
    """Replay steps in the allocator until it reserves no more.

    Returns:
        The peak, and the places of blocks that stay allocated. These are cuBLAS workspaces, which serve the next run.

    Raises:
        _NotForetold: A token's blocks are never freed, or each of ``runs`` replays reserves more.
    """
    with _replay(device) as replay, device.peak_from_now_on() as peak:
        assert peak is not None, "an emulated GPU reserves"
        previous_peak = None
        for _ in range(runs):
            replay.run(steps)
            current_peak = peak()
            if current_peak == previous_peak or runs == 1:
                return current_peak, replay.kept
            previous_peak = current_peak
    raise _NotForetold


@contextmanager
def _replay(device: Device) -> Iterator[_Replay]:
    """Yield a replay without cuBLAS workspaces, and free its blocks at the end."""
    clear_cublas_workspaces()
    replay = _Replay(device.torch_device)
    try:
        yield replay
    finally:
        replay.free_all()
        device.empty_cache()


class _Replay:
    """A replay of allocations in torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[Place, int] = {}
        """Addresses of live blocks."""

    @property
    def kept(self) -> frozenset[Place]:
        """The live blocks."""
        return frozenset(self._blocks)

    def run(self, steps: Sequence[Step]) -> None:
        """Replay the allocations and frees of all steps.

        Raises:
            _NotForetold: A token's blocks are never freed, or the block to free does not exist, because the two recordings
                have different allocations.
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
