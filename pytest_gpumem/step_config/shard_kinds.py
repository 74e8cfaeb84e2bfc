"""The kinds of sharding of a job over many ranks, a row each, and how ``shard=`` and ``offload=`` are read."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLICAS = 2
"""Copies of the model that ``hsdp`` keeps where it says no number."""
MOST_RANKS = 131_072
"""Ranks whose mesh and shards torch makes within seconds; no job has as many."""
OFFLOADS = {
    "params": "FSDP2's `CPUOffloadPolicy`. It has the optimizer's state in the host's memory as well.",
    "optimizer": "torchao's `CPUOffloadOptimizer`.",
    "activations": "`torch.autograd.graph.save_on_cpu`, as `checkpoint=offload`.",
}
"""The parts that a step may keep in the host's memory (``offload=params+activations``), with their meaning."""


@dataclass(frozen=True, slots=True)
class ShardKind:
    """One kind of sharding.

    A kind without ``degree`` shares the batch among all ranks that the others leave it (data parallelism), and there is at
    most one such kind. One with a degree splits the model or the sequence in so many parts.
    """

    name: str
    help: str
    """torch's part in it, and the conditions."""
    _: KW_ONLY
    wrapped: bool = False
    """True if the model is called through ``DistributedDataParallel``."""
    shards_optimizer: bool = False
    """True if the optimizer is a ``ZeroRedundancyOptimizer``."""
    fully: bool = False
    """True if parameters are sharded by ``fully_shard``, the model's repeated blocks one by one."""
    reshard_after_forward: bool | None = None
    """With ``fully``: whether parameters are sharded again after forward; ``None`` is torch's default, all but the root's."""
    replicas: bool = False
    """True if a number behind the colon says how many copies of the model there are."""
    degree: bool = False
    """True if a number behind the colon says how many parts there are."""

    @property
    def form(self) -> str:
        """The word as it is written: ``"tp:N"``."""
        return f"{self.name}:N" if self.degree else self.name


NONE = "none"
SHARD_KINDS = {
    kind.name: kind
    for kind in (
        ShardKind(
            "ddp",
            "`DistributedDataParallel`, with `no_sync` in all micro-batches but the last. It needs `world=`, and "
            "a gradient for each parameter that is not frozen.",
            wrapped=True,
        ),
        ShardKind(
            "zero1",
            "As `ddp`, with the optimizer within a `ZeroRedundancyOptimizer`. It needs `world=`.",
            wrapped=True,
            shards_optimizer=True,
        ),
        ShardKind(
            "zero2",
            "`fully_shard` on each repeated block and on the model, with parameters kept whole from forward to "
            "backward (`reshard_after_forward=False`). It needs `world=`.",
            fully=True,
            reshard_after_forward=False,
        ),
        ShardKind(
            "zero3",
            "As `zero2`, with parameters sharded again after forward (`reshard_after_forward=True`).",
            fully=True,
            reshard_after_forward=True,
        ),
        ShardKind(
            "fsdp",
            "As `zero2`, with torch's default: all parameters but the root module's own are sharded again after "
            "forward.",
            fully=True,
        ),
        ShardKind(
            "hsdp",
            "`fsdp` within each of 2 copies of the model; `hsdp:R` has R copies. `world=` is a multiple of the copies.",
            fully=True,
            replicas=True,
        ),
        ShardKind(
            "pp",
            "A stage of a pipeline with N stages, split between repeated blocks, under `Schedule1F1B` with "
            "`accumulate` micro-batches. It needs `accumulate=N` or more, and a model that `torch.export` traces "
            "and whose inputs only the first stage takes.",
            degree=True,
        ),
        ShardKind(
            "cp",
            "`context_parallel`: the rank has a part of the batch's second dimension, the first part in size and "
            "place, and attention runs in a ring. It needs CUDA, and a model that calls "
            "`scaled_dot_product_attention`.",
            degree=True,
        ),
        ShardKind(
            "tp",
            "`parallelize_module` by the model's own plan. The model's `tp_plan` maps patterns of modules to "
            '`"colwise"`, `"rowwise"`, `"colwise_gather_output"`, `"embedding_rowwise"`, `"sequence_parallel"` or'
            " a `ParallelStyle`.",
            degree=True,
        ),
    )
}
"""All kinds by name, in the order in which messages list them."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The kinds of sharding that ``shard=`` names: ``Sharding.parse("fsdp+tp:2")``."""

    text: str
    data: ShardKind | None = None
    """The kind of data parallelism, if any."""
    replicas: int = 1
    parts: tuple[tuple[str, int], ...] = ()
    """The kinds with a degree, and their degrees."""

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Return what a text names. Raises ``ValueError`` that says what would be right."""
        data: ShardKind | None = None
        replicas = 1
        parts: dict[str, int] = {}
        for word in text.split("+"):
            kind, number = _read(word)
            if kind.degree:
                if kind.name in parts:
                    raise ValueError(f"shard={text}: {kind.name} is given twice")
                parts[kind.name] = number or 1
            elif data is not None:
                raise ValueError(f"shard={text}: {data.name} and {kind.name} both share the batch; choose one of them")
            else:
                data = kind
                replicas = (number or REPLICAS) if kind.replicas else 1
        if data is not None and data.wrapped and parts:
            raise ValueError(f"shard={text}: DistributedDataParallel takes no split parameters; write shard=fsdp+...")
        for name in ("tp", "cp"):
            if name in parts and "pp" in parts:
                raise ValueError(f"shard={text}: {name} does not go with pp, whose stages are traced with whole layers")
        # The ranks of a node, which talk most, come last in a mesh.
        ordered = tuple((name, parts[name]) for name in SHARD_KINDS if name in parts)
        return cls(text, data, replicas, ordered)

    @property
    def fully(self) -> bool:
        """True if parameters are sharded by ``fully_shard``."""
        return self.data is not None and self.data.fully

    @property
    def staged(self) -> bool:
        """True if a rank runs one stage of a pipeline."""
        return self.degree("pp") > 1

    @property
    def in_place(self) -> bool:
        """True if the model's own parameters are replaced by shards."""
        return self.fully or self.staged or self.degree("tp") > 1

    def degree(self, name: str) -> int:
        """Return in how many parts ``name`` (``"tp"``) splits, 1 where it is not given."""
        return dict(self.parts).get(name, 1)

    def over(self, world: int | None, rank: int = 0) -> Layout:
        """Return the layout of the ranks of a job.

        Args:
            world: The number of ranks. ``None`` for as many as there are parts.
            rank: The rank whose step it is, from 0.

        Raises:
            ValueError: The ranks cannot be shared out so; the message says what would be right.
        """
        made = math.prod(degree for _, degree in self.parts)
        if world is None:
            if self.data is not None:
                raise ValueError(f"shard={self.text} needs the number of ranks; add world=N")
            world = made
        if world > MOST_RANKS:
            raise ValueError(
                f"shard={self.text}: {world} ranks are more than the {MOST_RANKS} of which one can be measured"
            )
        if world % (made * self.replicas):
            counts = [f"{name}:{degree}" for name, degree in self.parts]
            counts += [f"{self.replicas} copies"] if self.replicas > 1 else []
            raise ValueError(f"shard={self.text}: {world} ranks cannot be shared out among {' and '.join(counts)}")
        if self.data is None and world != made:
            raise ValueError(
                f"shard={self.text} has {made} ranks, and world={world}; say what the others share, as in "
                f"shard=fsdp+{self.text}"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank}: of {world} ranks the first is 0 and the last {world - 1}")
        return Layout(self, world, rank)


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of a job, and the one whose step is measured."""

    sharding: Sharding
    world: int
    rank: int

    @property
    def data_ranks(self) -> int:
        """The number of ranks that share the batch."""
        return self.world // math.prod(degree for _, degree in self.sharding.parts)

    @property
    def shards(self) -> int:
        """The number of shards of a parameter that ``fully_shard`` makes."""
        return self.data_ranks // self.sharding.replicas if self.sharding.fully else 1


def forms() -> Iterator[str]:
    """Return the words of ``shard=``."""
    return (kind.form for kind in SHARD_KINDS.values())


def read_offload(text: str) -> frozenset[str]:
    """Return what ``offload=`` names. Raises ``ValueError`` for another word."""
    words = text.split("+")
    for word in words:
        if word not in OFFLOADS:
            raise ValueError(f"unknown offload {word!r}; choose {', '.join(OFFLOADS)}, or several: params+activations")
    if len(set(words)) < len(words):
        raise ValueError(f"offload={text} says something twice")
    return frozenset(words)


def _read(word: str) -> tuple[ShardKind, int | None]:
    name, colon, argument = word.partition(":")
    kind = SHARD_KINDS.get(name)
    if kind is None:
        raise ValueError(f"unknown sharding {word!r}; choose {', '.join(forms())}, or several: fsdp+tp:2")
    if kind.degree and not argument:
        raise ValueError(f"{word!r}: write {kind.form}, with the number of parts")
    if colon and not (kind.degree or kind.replicas):
        raise ValueError(f"{word!r}: {name} takes no number")
    try:
        return kind, whole_number(argument) if colon else None
    except ValueError as error:
        raise ValueError(f"{word!r}: {error}") from None
