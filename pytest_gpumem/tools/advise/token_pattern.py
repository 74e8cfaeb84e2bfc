"""Derive the allocations in a long generation from recordings of a few tokens. Pure functions.

Each further token runs the same operators on longer tensors. So the steps repeat: the same allocations and frees in the same
order, and each allocation grows by a fixed number of bytes.

For example, let a Llama with 4 heads of 64 numbers continue 128 prompts of 100 tokens in float32. Each layer allocates new
keys of ``128 * 4 * 64 * 4 = 131,072`` bytes for each token in the text, and frees the keys from the previous step::

     101 tokens   13,238,272 bytes
     102 tokens   13,369,344 bytes
     103 tokens   13,500,416 bytes
    1000 tokens  131,072,000 bytes, after 897 more steps of 131,072 bytes

A mask with padding to a multiple of 8 tokens grows every 8 steps, so its steps repeat after 8 steps.

Two short generations are recorded. One starts from the prompt and gives the first tokens. The other starts from the prompt
lengthened by the tokens in between, and gives the last tokens. The first recording's pattern must predict the second
recording. A model that changes its behaviour in between, for example by a sliding window, has no pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PERIODS = (1, 2, 4, 8)
"""Periods in steps after which allocations may repeat, in search order."""
FIRST = 3
"""The first step that may repeat. Step 0 comes before the forward passes, step 1 runs the prompt, and step 2 frees the
prompt's results."""
FIRST_TOKENS = FIRST + 3 * PERIODS[-1] + 1
"""Tokens in the first recording: `FIRST`, three times the longest period, and the last token, whose step differs."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of ``nbytes``."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Free:
    """A free of an allocation.

    ``step`` and ``index`` name the allocation: ``Free(-1, 5)`` frees the sixth allocation in the previous step, ``Free(2, 0)``
    the first allocation in step 2, and ``Free(None, 3)`` the fourth allocation in its own step. The last 8 steps are counted
    back from the current step, earlier steps from the beginning (see `place_of`).
    """

    step: int | None
    index: int


def place_of(made_in: int, number: int) -> int | None:
    """Return `Free.step` for a free in step ``number`` of an allocation from step ``made_in``; ``None`` in the same step."""
    age = number - made_in
    return (-age or None) if age <= PERIODS[-1] else made_in


Step = tuple["Allocation | Free", ...]
"""The events from the beginning of a forward pass to the next."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A generation's steps: a step before the first forward pass, and then a step for each token."""

    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.steps) - 1


@dataclass(frozen=True, slots=True)
class TokenPattern:
    """The steps of a generation of ``tokens`` tokens.

    Args:
        first: The recording with the first tokens.
        last: The last step.
        period: The number of steps after which allocations repeat.
        tokens: The number of generated tokens.
    """

    first: Recording
    last: Step
    period: int
    tokens: int

    def steps(self) -> Iterator[Step]:
        """Yield all steps."""
        for number in range(self.tokens):
            yield self.step(number)
        yield self.last

    def step(self, number: int) -> Step:
        """Return step ``number``, which must not be the last step."""
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
    """Return a generation's pattern, or ``None`` if no period fits both recordings.

    Args:
        first: The recording with the first tokens after the prompt.
        last: The recording with the last tokens, from a prompt lengthened by the tokens in between.
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
    """Return whether each step repeats after a period, with allocations that grow evenly.

    ``False`` for fewer than three periods.
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
