"""Predict the memory peak of a long token generation on an emulated GPU. Only a few tokens are generated.

An emulated GPU needs about a second for each token in a model with 32 layers. So this module records the allocations for a few
tokens, derives the allocations for all tokens (see `token_pattern`), and replays them in torch's caching allocator, which takes
10 ms for each token. A replay includes fragmentation, which no formula predicts: a growing tensor needs a larger block for each
token, and such a block rarely fits into the gaps between earlier, smaller blocks.

For example, let a model generate 1,000 tokens after a prompt with 100 tokens. `foretold_peak` generates only 41 tokens: the
first 28 tokens, and then 13 tokens after a longer prompt with 1,087 tokens, in place of the last 13 tokens. Then it replays the
allocations for all 1,000 tokens. Each replay takes about 10 s.
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
"""An allocation's identity: the number of its step, and its index among the allocations in this step."""
LAST_TOKENS = FIRST + PERIODS[-1] + 2
"""The number of tokens in the second recording: 13. The recording has 14 steps, one step before the first token and one for
each token. The first three steps (`FIRST`) and the last step do not follow the pattern. The 10 steps between them must follow
the pattern, so they must cover at least the longest of the `PERIODS`, 8 steps."""
LEAST_TOKENS = 2 * (FIRST_TOKENS + LAST_TOKENS)
"""The minimum length of a generation whose peak is predicted: 82 tokens. A shorter generation runs completely, because
recording and replaying it would take longer."""
_MOST_RUNS = 8


def is_long(new_tokens: int | None) -> bool:
    """Return whether a step generates at least `LEAST_TOKENS` tokens, so `foretold_peak` can predict its peak."""
    return new_tokens is not None and new_tokens >= LEAST_TOKENS


class _NotForetold(Exception):
    """Error if the peak cannot be predicted from the recorded tokens, so all tokens have to run."""


def foretold_peak(device: Device, model: torch.nn.Module, prompt: Any, tokens: int, config: StepConfig) -> Peak | None:
    """Return the peak of a generation that is repeated, or ``None`` if it cannot be predicted, so all tokens have to run.

    Args:
        device: An emulated GPU.
        model: A model whose ``generate`` accepts ``max_new_tokens``.
        prompt: The arguments for ``generate``. The peak is predicted only if all arguments are tensors with the same shape
            ``(samples, tokens)``.
        tokens: The number of tokens to generate.
        config: The step config.
    """
    if not is_long(tokens) or not _has_one_size(prompt):
        return None
    # An earlier dry run has allocated cuBLAS's workspace. Free the workspace, so the recording includes its allocation.
    clear_cublas_workspaces()
    try:
        with device.peak_from_now_on() as peak:
            assert peak is not None, "an emulated GPU reports its peak"
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
    """Return whether all arguments in a prompt are tensors with the same shape ``(samples, tokens)``."""
    import torch

    if not isinstance(prompt, dict) or not all(isinstance(value, torch.Tensor) for value in prompt.values()):
        return False
    sizes = {tuple(value.shape) for value in prompt.values()}
    return len(sizes) == 1 and len(next(iter(sizes))) == 2


def _lengthened(prompt: Mapping[str, torch.Tensor], extra: int) -> dict[str, torch.Tensor]:
    """Return a prompt with ``extra`` more tokens, which repeat its last token."""
    import torch

    return {name: torch.cat([value, value[:, -1:].expand(len(value), extra)], dim=1) for name, value in prompt.items()}


def _recorded(device: Device, model: torch.nn.Module, prompt: Any, tokens: int, config: StepConfig) -> Recording:
    """Generate ``tokens`` tokens, and return the allocations and frees in the step for each token.

    Raises:
        _NotForetold: The number of forward passes differs from the number of tokens, a block from before the recording was
            freed, or memory ran out in the second recording with its longer prompt.
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
    """Split the recorded entries into steps at the indices ``borders``, and yield each step's allocations and frees.

    Raises:
        _NotForetold: A block that already existed when the recording began was freed.
    """
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
    """Replay steps in torch's allocator until a further replay no longer changes the peak.

    Returns:
        The peak, and the places of blocks that stay allocated after the last step. These blocks are cuBLAS workspaces, which
        the next replay uses again.

    Raises:
        _NotForetold: Some block for a generated token is never freed, or the peak still changes after ``runs`` replays.
    """
    with _replay(device) as replay, device.peak_from_now_on() as peak:
        assert peak is not None, "an emulated GPU reports its peak"
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
    """Yield a replay that starts without cuBLAS workspaces. Free the replay's blocks when the context ends."""
    clear_cublas_workspaces()
    replay = _Replay(device.torch_device)
    try:
        yield replay
    finally:
        replay.free_all()
        device.empty_cache()


class _Replay:
    """Replays allocations and frees in torch's caching allocator, without running a model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: dict[Place, int] = {}
        """The address of each block, by the place of its allocation. A freed block is removed."""

    @property
    def kept(self) -> frozenset[Place]:
        """The places of all blocks still allocated."""
        return frozenset(self._blocks)

    def run(self, steps: Sequence[Step]) -> None:
        """Replay the allocations and frees of all steps.

        Raises:
            _NotForetold: Some block for a generated token is never freed. Or a block to free does not exist, because the two
                recordings have different allocations.
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
        """Free all blocks still allocated."""
        for key in list(self._blocks):
            self._free(*key)

    def _free(self, step: int, index: int) -> None:
        address = self._blocks.pop((step, index), None)
        if address is None:
            raise _NotForetold
        free_on_cuda(address)
