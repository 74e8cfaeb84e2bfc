"""Derive the allocations in a long token generation from two recordings of a few tokens. Pure functions.

A step generates a token. Each further step runs the same operators on longer tensors. So it repeats the allocations and frees
of an earlier step in the same order, and each allocation is larger by a fixed number of bytes.

For example, let a Llama model with 4 attention heads of size 64 continue 128 prompts with 100 tokens each in float32. In each
step, each layer allocates a tensor with the keys for all tokens so far, and frees the previous step's tensor. The keys need
``128 * 4 * 64 * 4 = 131,072`` bytes for each token::

     101 tokens   13,238,272 bytes
     102 tokens   13,369,344 bytes
     103 tokens   13,500,416 bytes
    1000 tokens  131,072,000 bytes, after 897 more steps of 131,072 bytes

The period is the number of steps after which allocations repeat. If, for example, a mask is padded to a multiple of 8 tokens,
it grows only in every eighth step, so the period is 8 steps.

Two short generations are recorded. The first recording starts from the user's prompt, and contains the first tokens. The second
recording starts from a prompt that is nearly as long as the final text, and contains the last tokens. The pattern in the first
recording must predict the allocations in the second recording. Otherwise the generation has no pattern, for example because the
model has a sliding window, so its tensors stop growing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PERIODS = (1, 2, 4, 8)
"""The possible periods, in the order in which they are tried. A period is the number of steps after which allocations
repeat."""
FIRST = 3
"""The first step in a pattern. Step 0 precedes all forward passes, step 1 processes the prompt, and step 2 frees tensors from
step 1."""
FIRST_TOKENS = FIRST + 3 * PERIODS[-1] + 1
"""The number of tokens in the first recording: 28. The recording has 29 steps. The first three steps (`FIRST`) and the last
step do not follow the pattern. The 25 steps between them cover three times the longest period, 8 steps."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of ``nbytes`` bytes."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Free:
    """The free of an allocation from the same or an earlier step.

    ``step`` and ``index`` name the allocation: ``Free(-1, 5)`` frees the sixth allocation in the previous step, ``Free(2, 0)``
    the first allocation in step 2, and ``Free(None, 3)`` the fourth allocation in its own step. A negative number counts steps
    back from the current step, at most 8. Older steps are numbered from the beginning (see `place_of`).
    """

    step: int | None
    index: int


def place_of(made_in: int, number: int) -> int | None:
    """Return the value of `Free.step` if step ``number`` frees an allocation from step ``made_in``. Return ``None`` if both are
    the same step.
    """
    age = number - made_in
    return (-age or None) if age <= PERIODS[-1] else made_in


Step = tuple["Allocation | Free", ...]
"""The allocations and frees from the beginning of a forward pass to the beginning of the next."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded steps of a token generation: a step before the first forward pass, and then a step for each token."""

    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.steps) - 1


@dataclass(frozen=True, slots=True)
class TokenPattern:
    """A pattern from which `step` predicts any step of a generation.

    Args:
        first: The recording with the first tokens.
        last: The last step from the second recording, which does not follow the pattern.
        period: The number of steps after which allocations repeat.
        tokens: The number of generated tokens.
    """

    first: Recording
    last: Step
    period: int
    tokens: int

    def steps(self) -> Iterator[Step]:
        """Yield all steps of the generation, first recorded and then predicted steps."""
        for number in range(self.tokens):
            yield self.step(number)
        yield self.last

    def step(self, number: int) -> Step:
        """Return the recorded or predicted step with this number, which must not be the last step."""
        steps = self.first.steps
        repeating = len(steps) - 1
        if number < repeating:
            return steps[number]
        periods = (number - repeating) // self.period + 1
        base = number - periods * self.period
        earlier, later = steps[base - self.period], steps[base]
        return tuple(
            Allocation(event.nbytes + periods * (event.nbytes - event_before.nbytes))
            if isinstance(event, Allocation) and isinstance(event_before, Allocation)
            else event
            for event_before, event in zip(earlier, later, strict=True)
        )


def pattern_of(first: Recording, last: Recording, tokens: int) -> TokenPattern | None:
    """Return the pattern of a generation, or ``None`` if no period predicts both recordings.

    Args:
        first: The recording with the first tokens after the prompt.
        last: The recording with the last tokens, from a prompt as long as the text up to these tokens.
        tokens: The number of generated tokens.
    """
    for period in PERIODS:
        if not _repeats(first.steps[FIRST:-1], period):
            continue
        pattern = TokenPattern(first, last.steps[-1], period, tokens)
        skipped = tokens - last.tokens
        late = range(FIRST, last.tokens)
        if len(late) >= period and all(last.steps[number] == pattern.step(number + skipped) for number in late):
            return pattern
    return None


def _repeats(steps: Sequence[Step], period: int) -> bool:
    """Return whether steps repeat after ``period`` steps, and each allocation grows by the same bytes in each period.

    Return False if the steps cover fewer than three periods.
    """
    if len(steps) < 3 * period:
        return False
    return all(
        _grow_alike(*steps_in_a_row) for steps_in_a_row in zip(steps, steps[period:], steps[2 * period :], strict=False)
    )


def _grow_alike(first: Step, second: Step, third: Step) -> bool:
    if not len(first) == len(second) == len(third):
        return False
    for first_event, second_event, third_event in zip(first, second, third, strict=True):
        if (
            isinstance(first_event, Allocation)
            and isinstance(second_event, Allocation)
            and isinstance(third_event, Allocation)
        ):
            if second_event.nbytes - first_event.nbytes != third_event.nbytes - second_event.nbytes:
                return False
        elif not first_event == second_event == third_event:
            return False
    return True
