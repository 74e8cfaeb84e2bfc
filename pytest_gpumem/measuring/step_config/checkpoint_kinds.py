"""The kinds of activation checkpointing. Each kind is a row in a table.

The functions in a row raise ``ValueError`` with a message for the test's author. Only these functions import torch.

For example, a model has a list with four blocks. ``blocks`` recomputes each block. ``every:2`` recomputes the second and the
fourth block. ``sequential:2`` and ``sqrt`` recompute the first two blocks as a group, and the last two as another group.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.base.units import number, whole_number
from pytest_gpumem.torch_support.private_api.compiler import activation_memory_budget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.measuring.step_config.blocks import Block

    Blocks = Sequence[Block]


@dataclass(frozen=True, slots=True)
class Argument:
    """The part after the colon in ``checkpoint=KIND:ARGUMENT``."""

    placeholder: str
    read: Callable[[str], Any]
    separator_in_ids: str = ""


@dataclass(frozen=True, slots=True)
class Snippet:
    """Python code for a kind, to paste into a training loop."""

    imports: tuple[str, ...] = ("import torch",)
    setup: Callable[[], Iterable[str]] = tuple
    """Returns the first lines of the code."""
    each_block: str = ""
    """A statement to run for each ``block`` of the model."""
    around_forward: str = ""
    """A context manager for forward."""


@dataclass(frozen=True, slots=True)
class CheckpointKind:
    """A kind of checkpointing. It may define ``recomputed``, ``around_forward``, ``setting``, or several of these.

    `Device.lacks` returns a reason if the device cannot run a kind.
    """

    name: str
    help: str
    """A text for the reference: the modules that backward recomputes, and the kind's requirements."""
    _: KW_ONLY
    argument: Argument | None = None
    on_blocks: bool = False
    """True if the kind acts on a model's repeated blocks (``blocks=PATTERN``)."""
    recomputed: Callable[[Iterable[Blocks], Any], Iterable[Blocks]] | None = None
    """Returns groups of modules, given lists of modules and the argument. Backward recomputes each group as a whole.

    With ``on_blocks``, the lists contain the model's blocks. Otherwise a single list contains the modules whose path matches
    the argument.
    """
    saved_ops: tuple[str, ...] = ()
    """ATen operators whose outputs are saved even inside the recomputed groups."""
    around_forward: Callable[[Any], AbstractContextManager[object]] = nullcontext
    """Returns a context manager for each forward pass, given the argument."""
    setting: Callable[[Any], AbstractContextManager[object]] = nullcontext
    """Returns a context manager that changes a global torch setting for all steps, given the argument."""
    part_of_compiler: str = ""
    """The torch.compile feature that implements this kind, which then needs a mode in ``compile=``; empty for other kinds."""
    cached_casts: bool = True
    """True if autocast may keep the cast copy of a weight that forward uses again."""
    search_order: int = 0
    """The kind's position in the order in which ``gpumem advise`` tries kinds; 0 if it does not try this kind."""
    snippet: Snippet = Snippet()

    @property
    def form(self) -> str:
        """The kind as it is written in a config, with a placeholder for the argument: ``"every:N"``."""
        return f"{self.name}:{self.argument.placeholder}" if self.argument else self.name


class Checkpointing(NamedTuple):
    """A parsed ``checkpoint=KIND:ARGUMENT``."""

    kind: CheckpointKind
    argument: Any = None


def _fraction(text: str) -> float:
    fraction = number(text)
    if not 0 <= fraction <= 1:
        raise ValueError(
            "the activation memory budget must be a number from 0 to 1, the fraction of activations to save"
        )
    return fraction


def each_alone(lists: Iterable[Blocks], _argument: object = None) -> list[Blocks]:
    """Return a separate group for each module."""
    return _last_of_every(lists, 1)


def _last_of_every(lists: Iterable[Blocks], every: int) -> list[Blocks]:
    # As in torchtitan's selective checkpointing, recompute the last of every N blocks.
    last_blocks = (block for blocks in lists for number, block in enumerate(blocks, 1) if number % every == 0)
    # A block may be in two lists, but is recomputed only once.
    return [[block] for block in {id(block.module): block for block in last_blocks}.values()]


def in_segments(lists: Iterable[Blocks], segments: int) -> Iterator[Blocks]:
    """Split each list into ``segments`` groups of nearly equal size, larger groups first.

    For example, 5 blocks are split into 2 segments with 3 and 2 blocks.
    """
    for blocks in lists:
        if segments > len(blocks):
            raise ValueError(f"{len(blocks)} blocks cannot be split into {segments} segments")
        size, larger = divmod(len(blocks), segments)
        remaining_blocks = iter(blocks)
        yield from (list(itertools.islice(remaining_blocks, size + (number < larger))) for number in range(segments))


def _in_root_segments(lists: Iterable[Blocks], _argument: object) -> Iterator[Blocks]:
    for blocks in lists:
        yield from in_segments([blocks], round(math.sqrt(len(blocks))))


def _on_host(_argument: object) -> AbstractContextManager[object]:
    import torch

    return torch.autograd.graph.save_on_cpu(pin_memory=True)


EXPENSIVE_OPS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""The ATen operators for matrix products, convolutions and attention."""


def _saving_expensive_ops() -> Iterator[str]:
    import torch

    yield "SAVED = {"
    yield from (f"    torch.ops.aten.{name}.default," for name in EXPENSIVE_OPS if hasattr(torch.ops.aten, name))
    yield from (
        "}",
        "",
        "",
        "def save_or_recompute(context, operator, *args, **kwargs):",
        "    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE",
        "",
        "",
        "save_expensive_ops = functools.partial(create_selective_checkpoint_contexts, save_or_recompute)",
    )


_SELECTIVE = "CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts"
KINDS = {
    kind.name: kind
    for kind in (
        CheckpointKind("none", "Backward recomputes nothing."),
        CheckpointKind(
            "blocks",
            "Backward recomputes every repeated block.",
            on_blocks=True,
            recomputed=each_alone,
            search_order=2,
            snippet=Snippet(
                imports=("import functools", "import torch", "from torch.utils.checkpoint import checkpoint"),
                each_block="block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
            ),
        ),
        CheckpointKind(
            "every",
            "Backward recomputes the last of every N blocks. The model needs a list with N or more blocks.",
            argument=Argument("N", whole_number),
            on_blocks=True,
            recomputed=_last_of_every,
        ),
        CheckpointKind(
            "sequential",
            "Each list of blocks is split into S segments, and backward recomputes each segment as a whole. A list needs S "
            "or more blocks. The model's loop must pass the output of each block to the next block, and the same other "
            "arguments to all blocks. Each step checks this, and raises `ConfigError` otherwise.",
            argument=Argument("S", whole_number),
            on_blocks=True,
            recomputed=in_segments,
        ),
        CheckpointKind(
            "sqrt", "Like `sequential:S`, with S = √n for n blocks.", on_blocks=True, recomputed=_in_root_segments
        ),
        CheckpointKind(
            "modules",
            "Backward recomputes the modules whose path matches (`*` and `?`; `*` also matches dots), except modules "
            "inside another match.",
            argument=Argument("PATTERN", str, separator_in_ids="-"),
            recomputed=each_alone,
        ),
        CheckpointKind(
            "ops",
            "Backward recomputes every repeated block. Forward saves the outputs of matrix products, convolutions and "
            "attention.",
            on_blocks=True,
            recomputed=each_alone,
            saved_ops=EXPENSIVE_OPS,
            # In backward, selective checkpointing must see the same casts as in forward, also for a weight that is used again.
            cached_casts=False,
            search_order=1,
            snippet=Snippet(
                imports=("import functools", "import torch", f"from torch.utils.checkpoint import {_SELECTIVE}"),
                setup=_saving_expensive_ops,
                each_block="block.forward = functools.partial("
                "checkpoint, block.forward, use_reentrant=False, context_fn=save_expensive_ops)",
            ),
        ),
        CheckpointKind(
            "offload",
            "Backward recomputes nothing. Saved tensors move to pinned host memory. This kind needs a GPU.",
            around_forward=_on_host,
            search_order=3,
            snippet=Snippet(around_forward="torch.autograd.graph.save_on_cpu(pin_memory=True)"),
        ),
        CheckpointKind(
            "budget",
            "torch.compile saves at most the fraction F (0 to 1) of the activations that it would save by default. This kind "
            "needs a mode in `compile=`.",
            argument=Argument("F", _fraction),
            setting=activation_memory_budget,
            part_of_compiler="the activation memory budget of torch.compile",
        ),
    )
}
"""All kinds by name, in the order in which messages list them."""
