"""The allocations of a long generation, made from the recorded allocations of a few tokens. Pure functions.

Each further token runs the same operators on tensors that are one token longer. For example, a layer of a Llama with
128 prompts, 4 heads and heads of 64 numbers allocates keys of ``128 * 4 * 64 * 4 * tokens`` bytes, and frees those of the
token before. So the steps repeat: the same allocations and frees in the same order, each allocation larger by a fixed number
of bytes. A mask that is padded to a multiple of 8 tokens repeats after 8 steps.

Two recordings are compared: the first tokens after the prompt, and the last tokens after a prompt that is longer by the tokens
between. A model that changes its behaviour in between, such as one with a sliding window, has no pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PERIODS = (1, 2, 4, 8)
"""Steps after which allocations may repeat, in the order in which they are tried."""
FIRST = 3
"""The first step that may repeat. The steps before belong to the prompt and to its results."""
FIRST_TOKENS = FIRST + 3 * PERIODS[-1] + 1
"""Tokens of the first recording: three of the longest period, and the last one, whose step differs."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of ``nbytes``."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Free:
    """A free of an allocation.

    ``step`` and ``index`` name the allocation: ``Free(-1, 5)`` frees the sixth allocation of the step before, ``Free(2, 0)``
    the first allocation of step 2, and ``Free(None, 3)`` the fourth allocation of its own step. The last 8 steps are counted
    back from the step that frees, earlier steps from the beginning: `place_of`.
    """

    step: int | None
    index: int


def place_of(made_in: int, number: int) -> int | None:
    """Return the ``step`` of a `Free` in step ``number``, whose allocation was made in step ``made_in``."""
    age = number - made_in
    return (-age or None) if age <= PERIODS[-1] else made_in


Step = tuple["Allocation | Free", ...]
"""The events between the beginnings of two forward passes."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The steps of a generation: the one before the first forward pass, then one for each token."""

    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.steps) - 1


@dataclass(frozen=True, slots=True)
class TokenPattern:
    """The steps of a generation of ``tokens`` tokens.

    Args:
        first: The recording of its first tokens.
        last: The last step.
        period: The steps after which allocations repeat.
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
        """Return the step of a token, which is not the last."""
        steps = self.first.steps
        repeating = len(steps) - 1
        if number < repeating:
            return steps[number]
        periods = (number - repeating) // self.period + 1
        same = number - periods * self.period
        earlier, later = steps[same - self.period], steps[same]
        return tuple(
            Allocation(event.nbytes + periods * (event.nbytes - before.nbytes))
            if isinstance(event, Allocation) and isinstance(before, Allocation)
            else event
            for before, event in zip(earlier, later, strict=True)
        )


def pattern_of(first: Recording, last: Recording, tokens: int) -> TokenPattern | None:
    """Return the pattern of a generation, or ``None`` if its recorded steps do not repeat.

    Args:
        first: The first tokens after the prompt.
        last: The last tokens, after a prompt that is longer by all tokens between.
        tokens: The number of tokens of the generation.
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
    """Return whether each step is like the one a period before, with allocations that grow by the same bytes each time."""
    if len(steps) < 3 * period:
        return False
    return all(_grow_alike(*three) for three in zip(steps, steps[period:], steps[2 * period :], strict=False))


def _grow_alike(first: Step, second: Step, third: Step) -> bool:
    if not len(first) == len(second) == len(third):
        return False
    for one, two, three in zip(first, second, third, strict=True):
        if isinstance(one, Allocation) and isinstance(two, Allocation) and isinstance(three, Allocation):
            if two.nbytes - one.nbytes != three.nbytes - two.nbytes:
                return False
        elif not one == two == three:
            return False
    return True
