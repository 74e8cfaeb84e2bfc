"""Live bytes and their peak from allocation events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.facts.values.events import AllocationEvent
from pytest_gpumem.measuring.devices.live_blocks import FreeCallbacks, LiveBlocks

if TYPE_CHECKING:
    from pytest_gpumem.measuring.devices.contract import Peak

unhurried = settings(deadline=None)


def pop_peak(ledger: LiveBlocks) -> Peak:
    peak = ledger.peak
    ledger.reset_peak()
    return peak


def test_a_free_that_was_not_recorded_is_told_once():
    callbacks, tensor = FreeCallbacks(), torch.ones(25)
    address = tensor.data_ptr()
    callbacks.watch(tensor.untyped_storage(), recording=lambda: False)
    del tensor
    assert callbacks.put_into([]) == [AllocationEvent(0, address, -1)]
    # The address may be another block's from now on.
    assert callbacks.put_into([]) == []


def known_at(ledger, addresses):
    """What the ledger knows of these addresses."""
    return frozenset(block for block in ledger.known if block[0] in addresses)


def after(blocks: LiveBlocks, *events: tuple[int, int]) -> int:
    blocks.apply(AllocationEvent(0, address, nbytes) for address, nbytes in events)
    return blocks.live


def test_a_block_that_took_the_place_of_a_known_one_is_another():
    ledger = LiveBlocks()
    after(ledger, (1, 100))
    known = ledger.known
    after(ledger, (1, -100), (1, 100))
    ledger.restrict(known, {2: 100})
    assert (ledger.live, ledger.addresses) == (100, {2})


def test_a_free_that_was_missed_before_changes_no_later_reading():
    """As of a block that another thread than the measured one frees: gloo's, of a collective."""
    blocks = LiveBlocks()
    foreign = after(blocks, (64, 1000))
    blocks.hold_known()
    assert after(blocks, (64, 300)) - foreign == 300
    assert after(blocks, (64, -300)) - foreign == 0
    # Of a block that came later, a missed free is noticed as ever.
    assert after(blocks, (64, 500)) - foreign == 500
    assert after(blocks, (64, 200)) - foreign == 200


def test_a_held_block_whose_free_is_seen_is_gone():
    blocks = LiveBlocks()
    after(blocks, (64, 1000), (128, 10))
    blocks.hold_known()
    assert after(blocks, (64, -1000)) == 10


class Naive:
    """The same in the plainest way: every number of live bytes since the last peak is kept."""

    def __init__(self):
        self.blocks = {}
        self.history = [0]

    def live(self):
        return sum(self.blocks.values())

    def apply(self, address, nbytes):
        self.blocks.pop(address, None)
        if nbytes > 0:
            self.blocks[address] = nbytes
        self.history.append(self.live())

    def register_existing(self, blocks):
        before = self.live()
        self.blocks = {**blocks, **self.blocks}
        self.history = [value + self.live() - before for value in self.history]

    def restrict(self, addresses, blocks):
        self.blocks = {address: n for address, n in self.blocks.items() if address in addresses} | blocks
        self.history = [self.live()]

    def pop_peak(self):
        peak = max(self.history)
        self.history = [self.live()]
        return peak


ADDRESSES = st.integers(1, 6)
BLOCKS = st.dictionaries(ADDRESSES, st.integers(1, 100), max_size=3)
ACTIONS = st.lists(
    st.tuples(st.just("apply"), ADDRESSES, st.integers(-100, 100).filter(bool))
    | st.tuples(st.just("register_existing"), BLOCKS)
    | st.tuples(st.just("restrict"), st.frozensets(ADDRESSES), BLOCKS)
    | st.tuples(st.just("pop_peak")),
    max_size=25,
)


@settings(unhurried, max_examples=300)
@given(ACTIONS)
def test_live_blocks_are_counted_as_one_would_by_hand(actions):
    ledger, naive = LiveBlocks(), Naive()
    for action, *arguments in actions:
        if action == "apply":
            ledger.apply([AllocationEvent(0, *arguments)])
        elif action == "restrict":
            naive_addresses, blocks = arguments
            ledger.restrict(known_at(ledger, naive_addresses), blocks)
        elif action != "pop_peak":
            getattr(ledger, action)(*arguments)
        if action == "pop_peak":
            assert pop_peak(ledger).allocated == naive.pop_peak()
        else:
            getattr(naive, action)(*arguments)
        assert (ledger.live, ledger.addresses) == (naive.live(), naive.blocks.keys())
    assert pop_peak(ledger).allocated == naive.pop_peak()


@unhurried
@given(st.lists(st.tuples(ADDRESSES, st.integers(-100, 100).filter(bool)), max_size=25), st.integers(0, 25))
def test_it_does_not_matter_in_how_many_pieces_events_are_applied(events, cut):
    made = [AllocationEvent(0, address, nbytes) for address, nbytes in events]
    whole, pieces = LiveBlocks(), LiveBlocks()
    whole.apply(made)
    pieces.apply(made[:cut])
    pieces.apply(made[cut:])
    assert (whole.live, whole.addresses, whole.peak.allocated) == (
        pieces.live,
        pieces.addresses,
        pieces.peak.allocated,
    )
