"""Segments: blocks that are recomputed together teach the same, and a loop that would make them wrong is told."""

from __future__ import annotations

import re
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.step_config.blocks import repeated_blocks
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.checkpointing import activation_checkpointing
from pytest_gpumem.measuring.steps.segments import Segment

ADVICE = "use checkpoint=blocks or checkpoint=every:N"


# Models whose loop a segment may stand in for


def as_it_is(hidden):
    return hidden


class Block(nn.Module):
    """Gives its hidden state on, as a tensor, or first in a tuple or list."""

    def __init__(self, output=as_it_is):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.output = output
        self.ran = 0

    def forward(self, hidden, scale=1.0, *, mask=None):
        self.ran += 1
        hidden = torch.tanh(self.linear(hidden)) * scale
        return self.output(hidden if mask is None else hidden * mask)


class Model(nn.Module):
    """Runs its blocks by ``loop(blocks, hidden)``."""

    def __init__(self, loop, output=as_it_is, count=3):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(Block(output) for _ in range(count))
        self.loop = loop

    def forward(self, hidden):
        return self.loop(self.h, hidden)


def run_again(function, *args, **kwargs):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def segmented(stack: ExitStack, model: Model, recompute=run_again) -> None:
    """Until the stack ends, the model's blocks are one segment."""
    (blocks,) = repeated_blocks(model)
    for block, forward in zip(blocks, Segment(blocks, recompute).forwards(), strict=True):
        stack.enter_context(mock.patch.object(block.module, "forward", forward))


def gradients(model: Model, *, as_segment: bool) -> list[torch.Tensor]:
    """Of two steps, one after the other."""
    found = []
    with ExitStack() as stack:
        if as_segment:
            segmented(stack, model)
        for number in range(2):
            model.zero_grad(set_to_none=True)
            output = model(torch.linspace(-1, 1 + number, 8).view(2, 4))
            (output[0] if isinstance(output, (tuple, list)) else output).square().sum().backward()
            found += [parameter.grad for parameter in model.parameters()]
    return found


def plain_loop(blocks, hidden):
    for block in blocks:
        hidden = block(hidden)
    return hidden


def loop_with_arguments(blocks, hidden):
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    for block in blocks:
        hidden = block(hidden, 0.5, mask=mask)
    return hidden


def loop_by_keyword(blocks, hidden):
    for block in blocks:
        hidden = block(hidden=hidden, scale=2.0)
    return hidden


def loop_over_firsts(blocks, hidden):
    for block in blocks:
        hidden = block(hidden)[0]
    return (hidden,)


@pytest.mark.parametrize(
    ("loop", "output"),
    [
        (plain_loop, as_it_is),
        (loop_with_arguments, as_it_is),
        (loop_by_keyword, as_it_is),
        (loop_over_firsts, lambda hidden: (hidden,)),
        (loop_over_firsts, lambda hidden: [hidden, None]),
    ],
    ids=["plain", "arguments", "keyword", "tuple of one", "list with None"],
)
def test_a_segment_gives_the_same_gradients_step_after_step(loop, output):
    plain = gradients(Model(loop, output), as_segment=False)
    together = gradients(Model(loop, output), as_segment=True)
    assert len(plain) == len(together) == 12
    assert all(torch.equal(one, other) for one, other in zip(plain, together, strict=True))


def test_a_block_that_is_recomputed_alone_may_stand_in_any_loop():
    def changing(blocks, hidden):
        for number, block in enumerate(blocks):
            hidden = block(hidden + number, number)
        return hidden

    model = Model(changing, count=2)
    with activation_checkpointing(model, StepConfig(checkpoint="blocks")):
        model(torch.ones(2, 4)).sum().backward()
    assert [block.ran for block in model.h] == [2, 2]


def test_a_segment_holds_no_tensor_when_its_last_block_has_run():
    import weakref

    model = Model(plain_loop)
    with ExitStack() as stack:
        segmented(stack, model)
        output = weakref.ref(model(torch.ones(2, 4)))
        assert output() is None


# Models whose loop it may not stand in for


def changing_hidden_states(blocks, hidden):
    for block in blocks:
        hidden = block(hidden) + 1
    return hidden


def with_other_keywords(blocks, hidden):
    for number, block in enumerate(blocks):
        hidden = block(hidden, mask=torch.ones(4) * number)
    return hidden


def with_other_positions(blocks, hidden):
    for number, block in enumerate(blocks):
        hidden = block(hidden, number * 1000.5)
    return hidden


def with_an_argument_for_the_first_only(blocks, hidden):
    return plain_loop(blocks[1:], blocks[0](hidden, mask=torch.ones(4)))


def skipping(blocks, hidden):
    return plain_loop([blocks[0], blocks[2]], hidden)


def twice(blocks, hidden):
    return plain_loop([blocks[0], blocks[1], blocks[1], blocks[2]], hidden)


def backwards(blocks, hidden):
    return plain_loop(list(blocks)[::-1], hidden)


@pytest.mark.parametrize(
    ("loop", "output", "message"),
    [
        (changing_hidden_states, as_it_is, "h.1: its input is not the unchanged output of the previous block"),
        (with_other_keywords, as_it_is, "h.1: its argument mask differs from the argument of h.0"),
        (with_other_positions, as_it_is, "h.1: its argument 1 differs from the argument of h.0"),
        (with_an_argument_for_the_first_only, as_it_is, "h.1: its argument mask differs from the argument of h.0"),
        (backwards, as_it_is, "h.2: it ran before h.0"),
        (skipping, as_it_is, "h.1: it did not run after h.0"),
        (twice, as_it_is, "h.1: it ran more than once"),
        (loop_over_firsts, lambda hidden: (hidden, hidden * 2), "h.0: it returns more than one tensor"),
        (plain_loop, lambda hidden: {"hidden": hidden}, "h.0: it returns dict"),
    ],
)
def test_a_loop_that_a_segment_would_make_wrong_is_told(loop, output, message):
    path, _, why = message.partition(": ")
    whole = f"{path} cannot be recomputed together with the blocks around it: {why}; {ADVICE}"
    model = Model(loop, output)
    with ExitStack() as stack:
        segmented(stack, model)
        with pytest.raises(ConfigError, match=f"^{re.escape(whole)}$"):
            model(torch.ones(2, 4))


def test_a_loop_that_ends_within_a_segment_is_an_error_at_its_end_and_restart():
    model = Model(lambda blocks, hidden: plain_loop(blocks[:2], hidden))
    segment = Segment(repeated_blocks(model)[0], run_again)
    message = f"h.2 cannot be recomputed together with the blocks around it: it did not run after h.1; {ADVICE}"
    with ExitStack() as stack:
        for block, forward in zip(model.h, segment.forwards(), strict=True):
            stack.enter_context(mock.patch.object(block, "forward", forward))
        segment.check_ended()
        model(torch.ones(2, 4))
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            segment.check_ended()
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            model(torch.ones(2, 4))
