"""A table with the kinds of sharding across a job's ranks, and the functions that parse ``shard=`` and ``offload=``."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLICAS = 2
"""The default number of model copies in ``hsdp``."""
MOST_RANKS = 131_072
"""The maximum number of ranks, more than any job has. torch still creates a mesh and shards for them within seconds."""
OFFLOADS = {
    "params": "FSDP2's `CPUOffloadPolicy`. The optimizer's state is in the host's memory as well.",
    "optimizer": "torchao's `CPUOffloadOptimizer`.",
    "activations": "`torch.autograd.graph.save_on_cpu`, like `checkpoint=offload`.",
}
"""The parts that a step can keep in the host's memory (``offload=params+activations``), and how torch does this."""


@dataclass(frozen=True, slots=True)
class ShardKind:
    """A kind of sharding.

    A kind with a ``degree`` splits the model or the sequence into this many parts. A kind without a degree is data-parallel: it
    divides the batch among the remaining ranks. A config has at most one data-parallel kind.

    For example, ``shard=fsdp+tp:8,world=64`` splits matrices into 8 parts (``tp``), and divides the batch among 64 / 8 = 8
    ranks (``fsdp``).
    """

    name: str
    help: str
    """A text for the reference: the torch feature that implements the kind, and the kind's requirements."""
    _: KW_ONLY
    wrapped: bool = False
    """True if the model is called through ``DistributedDataParallel``."""
    shards_optimizer: bool = False
    """True if the optimizer is a ``ZeroRedundancyOptimizer``."""
    fully: bool = False
    """True if ``fully_shard`` shards the parameters, block by block."""
    reshard_after_forward: bool | None = None
    """True if ``fully_shard`` shards parameters again after forward; ``None`` for all parameters except the root module's."""
    replicas: bool = False
    """True if a number of model copies may follow after a colon, as in ``hsdp:4``."""
    degree: bool = False
    """True if a number of parts follows after a colon, as in ``tp:8``."""

    @property
    def form(self) -> str:
        """The kind as it is written in a config, with a placeholder for the number: ``"tp:N"``."""
        return f"{self.name}:N" if self.degree else self.name


NONE = "none"
SHARD_KINDS = {
    kind.name: kind
    for kind in (
        ShardKind(
            "ddp",
            "`DistributedDataParallel`, with `no_sync` in all micro-batches except the last. It needs `world=`, and "
            "a gradient for each trainable parameter.",
            wrapped=True,
        ),
        ShardKind(
            "zero1",
            "Like `ddp`, with the optimizer inside a `ZeroRedundancyOptimizer`. It needs `world=`.",
            wrapped=True,
            shards_optimizer=True,
        ),
        ShardKind(
            "zero2",
            "`fully_shard` on each repeated block and on the model. Gathered parameters stay whole from forward to "
            "backward (`reshard_after_forward=False`). It needs `world=`.",
            fully=True,
            reshard_after_forward=False,
        ),
        ShardKind(
            "zero3",
            "Like `zero2`, with parameters sharded again after forward (`reshard_after_forward=True`).",
            fully=True,
            reshard_after_forward=True,
        ),
        ShardKind(
            "fsdp",
            "Like `zero2`, with torch's default: all parameters except the root module's own are sharded again after "
            "forward.",
            fully=True,
        ),
        ShardKind(
            "hsdp",
            "`fsdp` within each of 2 model copies. `hsdp:R` has R copies. `world=` must be a multiple of R.",
            fully=True,
            replicas=True,
        ),
        ShardKind(
            "pp",
            "A stage of an N-stage pipeline, split between repeated blocks, under `Schedule1F1B` with `accumulate` "
            "micro-batches. It needs `accumulate=N` or more, and a model that `torch.export` can trace. Only the first "
            "stage may take the model's inputs.",
            degree=True,
        ),
        ShardKind(
            "cp",
            "`context_parallel` with N parts of each sequence, the batch's second dimension. The rank runs the first part, "
            "which has the same size as the other parts. Attention runs in a ring. It needs CUDA, and a model that calls "
            "`scaled_dot_product_attention`.",
            degree=True,
        ),
        ShardKind(
            "tp",
            "`parallelize_module` with the model's own plan. The model's `tp_plan` maps patterns of modules to "
            '`"colwise"`, `"rowwise"`, `"colwise_gather_output"`, `"embedding_rowwise"`, `"sequence_parallel"` or'
            " a `ParallelStyle`.",
            degree=True,
        ),
    )
}
"""All kinds by name, in the order in which messages list them."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The kinds of sharding in ``shard=``: ``Sharding.parse("fsdp+tp:2")``."""

    text: str
    data: ShardKind | None = None
    """The data-parallel kind; ``None`` without data parallelism."""
    replicas: int = 1
    parts: tuple[tuple[str, int], ...] = ()
    """The names and degrees of all kinds that have a degree."""

    @classmethod
    def parse(cls, text: str) -> Sharding:
        """Return the sharding for a text. Raises ``ValueError`` with a correction if the text is not valid."""
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
                raise ValueError(
                    f"shard={text}: {data.name} and {kind.name} are both data-parallel; choose one of them"
                )
            else:
                data = kind
                replicas = (number or REPLICAS) if kind.replicas else 1
        if data is not None and data.wrapped and parts:
            raise ValueError(
                f"shard={text}: DistributedDataParallel does not accept split parameters; write shard=fsdp+..."
            )
        for name in ("tp", "cp"):
            if name in parts and "pp" in parts:
                raise ValueError(
                    f"shard={text}: {name} cannot be combined with pp, because torch.export traces the stages with unsplit "
                    "layers; leave one out"
                )
        # The kinds with the most communication come last in a mesh, because neighbouring ranks are in the same node.
        ordered = tuple((name, parts[name]) for name in SHARD_KINDS if name in parts)
        return cls(text, data, replicas, ordered)

    @property
    def fully(self) -> bool:
        """True if ``fully_shard`` shards the parameters."""
        return self.data is not None and self.data.fully

    @property
    def staged(self) -> bool:
        """True if a rank runs a pipeline stage."""
        return self.degree("pp") > 1

    @property
    def in_place(self) -> bool:
        """True if sharding replaces the model's own parameters."""
        return self.fully or self.staged or self.degree("tp") > 1

    def degree(self, name: str) -> int:
        """Return the degree of a kind (``"tp"``); 1 if the sharding does not include it."""
        return dict(self.parts).get(name, 1)

    def over(self, world: int | None, rank: int = 0) -> Layout:
        """Return the layout of a job's ranks.

        For example, ``Sharding.parse("fsdp+tp:8").over(64)`` has 8 ``data_ranks`` and 8 ``shards``.

        Args:
            world: The number of ranks; ``None`` for the product of all degrees.
            rank: The measured rank, counted from 0.

        Raises:
            ValueError: The sharding does not fit this number of ranks. The message has a correction.
        """
        part_ranks = math.prod(degree for _, degree in self.parts)
        if world is None:
            if self.data is not None:
                raise ValueError(f"shard={self.text} needs the number of ranks; add world=N")
            world = part_ranks
        if world > MOST_RANKS:
            raise ValueError(f"shard={self.text}: {world} ranks are more than the maximum of {MOST_RANKS}")
        if world % (part_ranks * self.replicas):
            counts = [f"{name}:{degree}" for name, degree in self.parts]
            counts += [f"{self.replicas} copies"] if self.replicas > 1 else []
            raise ValueError(f"shard={self.text}: {world} ranks cannot be divided equally among {' and '.join(counts)}")
        if self.data is None and world != part_ranks:
            raise ValueError(
                f"shard={self.text} has {part_ranks} ranks, but world={world}; add a data-parallel kind, as in "
                f"shard=fsdp+{self.text}"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank}: the ranks of a job with world={world} are 0 to {world - 1}")
        return Layout(self, world, rank)


@dataclass(frozen=True, slots=True)
class Layout:
    """A job's ranks, and the measured rank."""

    sharding: Sharding
    world: int
    rank: int

    @property
    def data_ranks(self) -> int:
        """The number of ranks among which the batch is divided."""
        return self.world // math.prod(degree for _, degree in self.sharding.parts)

    @property
    def shards(self) -> int:
        """The number of shards that ``fully_shard`` creates from a parameter."""
        return self.data_ranks // self.sharding.replicas if self.sharding.fully else 1


def forms() -> Iterator[str]:
    """Return all kinds as they are written in a config."""
    return (kind.form for kind in SHARD_KINDS.values())


def read_offload(text: str) -> frozenset[str]:
    """Return the words in ``offload=``. Raises ``ValueError`` for an unknown or repeated word."""
    words = text.split("+")
    for word in words:
        if word not in OFFLOADS:
            raise ValueError(f"unknown offload {word!r}; choose {', '.join(OFFLOADS)}, or several: params+activations")
    if len(set(words)) < len(words):
        raise ValueError(f"offload={text} repeats a word")
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
