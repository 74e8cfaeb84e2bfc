"""Tokens of a recording, through JSON and back."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.values.events import AllocationEvent, Close, Open, Seen, tokens_from_plain, tokens_to_plain

unhurried = settings(deadline=None)
NUMBERS = st.integers(-1, 2**63 - 1)
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
TOKENS = st.one_of(
    st.builds(AllocationEvent, NUMBERS, NUMBERS, st.integers(-(2**62), 2**62)),
    st.builds(Open, NUMBERS, st.sampled_from(["operator", "node", "mark"]), NAMES, NUMBERS, NUMBERS),
    st.builds(Close, NUMBERS),
    st.builds(Seen, NUMBERS, NAMES, st.lists(NUMBERS, max_size=4).map(tuple)),
)


@unhurried
@given(st.lists(TOKENS, max_size=10))
def test_tokens_travel_whole_and_stay_of_their_kind(tokens):
    back = tokens_from_plain(json.loads(json.dumps(tokens_to_plain(tokens))))
    assert back == tokens
    assert [type(token) for token in back] == [type(token) for token in tokens]


def test_each_token_begins_with_what_it_is():
    tokens = [AllocationEvent(1, 2, -3), Open(1, "node", "MulBackward0", 7), Close(2), Seen(2, "float32", (8, 256))]
    assert tokens_to_plain(tokens) == [
        ["allocation", 1, 2, -3],
        ["open", 1, "node", "MulBackward0", 7, -1],
        ["close", 2],
        ["seen", 2, "float32", [8, 256]],
    ]


@pytest.mark.parametrize("entry", [[], ["free", 1, 2, 3], ["Open", 1]])
def test_what_is_no_token_is_refused_with_what_one_begins_with(entry):
    message = f"{entry!r} is no token; one begins with allocation, open, close, seen"
    with pytest.raises(ValueError, match=re.escape(message)):
        tokens_from_plain([["close", 1], entry])
