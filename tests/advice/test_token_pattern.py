"""The pattern of a generation's allocations: made from few tokens, refused if the tokens do not repeat."""

from __future__ import annotations

import pytest

from pytest_gpumem.tools.advise.token_pattern import FIRST_TOKENS, Allocation, Free, Recording, pattern_of, place_of

LAST_TOKENS = 13


def generation(prompt, tokens, *, padded_to=1, capped_at=None, kept=False):
    """A cache of one layer that grows by a token in each step, and a mask that is made and freed in each step."""
    steps = [(Allocation(8 * prompt),), (Allocation(64 * prompt), Allocation(1000), Free(None, 1))]
    for number in range(2, tokens + 1):
        length = prompt + number - 1
        mask = -(-length // padded_to) * padded_to
        rows = min(length, capped_at or length)
        step = [Allocation(mask), Allocation(64 * rows)]
        step += [Free(place_of(1, number) if number == 2 else place_of(number - 1, number), 0 if number == 2 else 1)]
        step += [] if kept else [Free(None, 0)]
        steps.append(tuple(step))
    steps[-1] = (*steps[-1], Free(None, 1), Free(place_of(0, tokens), 0))
    return Recording(tuple(steps))


def foretold(prompt, tokens, **how):
    first = generation(prompt, FIRST_TOKENS, **how)
    last = generation(prompt + tokens - LAST_TOKENS, LAST_TOKENS, **how)
    return pattern_of(first, last, tokens)


@pytest.mark.parametrize("padded_to", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [84, 100, 1023])
def test_the_pattern_is_the_generation_of_all_tokens(padded_to, tokens):
    pattern = foretold(20, tokens, padded_to=padded_to)
    assert pattern is not None
    assert pattern.period == padded_to
    assert tuple(pattern.steps()) == generation(20, tokens, padded_to=padded_to).steps


def test_a_mask_padded_to_more_tokens_than_a_recording_repeats_has_no_pattern():
    assert foretold(20, 100, padded_to=32) is None


def test_a_window_that_is_reached_between_the_recordings_has_no_pattern():
    assert foretold(20, 100, capped_at=64) is None
    pattern = foretold(70, 100, capped_at=64)
    assert pattern is not None
    assert tuple(pattern.steps()) == generation(70, 100, capped_at=64).steps


def test_recent_steps_are_counted_back_and_early_ones_from_the_beginning():
    assert (place_of(20, 20), place_of(19, 20), place_of(12, 20)) == (None, -1, -8)
    assert (place_of(11, 20), place_of(0, 13)) == (11, 0)
