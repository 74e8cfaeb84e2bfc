"""Frees that the profiler does not report, since another thread than the measured one frees: gloo's, of a collective."""

from __future__ import annotations

from pytest_gpumem.devices.live_blocks import LiveBlocks
from pytest_gpumem.values.events import AllocationEvent


def after(blocks: LiveBlocks, *events: tuple[int, int]) -> int:
    blocks.apply(AllocationEvent(0, address, nbytes) for address, nbytes in events)
    return blocks.live


def test_a_free_that_was_missed_is_noticed_when_the_address_is_used_again():
    blocks = LiveBlocks()
    assert after(blocks, (64, 1000)) == 1000
    assert after(blocks, (64, 300)) == 300


def test_a_free_that_was_missed_before_changes_no_later_reading():
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
