"""Tensors that a measured run left, and their holders: what a cache got when it was used first, no recorded run shows."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.explain.holders import holders_of
from pytest_gpumem.torch_support.reachability import alive, blocks_of
from pytest_gpumem.torch_support.static_access import dense_bytes, dtype_and_shape, tensor_text
from pytest_gpumem.values.composition import Composition, Holder, Row, merged, ranked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import torch

    from pytest_gpumem.values.composition import Explanation


class TensorsMadeBy:
    """The tensors that a run makes and leaves: from when this is made until `ended`. It keeps none of them alive.

    Only objects outside of the frozen heap are looked at, which takes 1 ms for 20,000 of them: `ended` comes before anything
    freezes the heap anew.
    """

    def __init__(self) -> None:
        # An id is used again, so it counts only while its tensor lives.
        self._older = _references()
        self._newer: list[weakref.ref[torch.Tensor]] = []
        self._is_frozen = _is_torch_frozen()

    def ended(self) -> None:
        """Note the tensors that were made since then.

        There are none if other code has thawed the heap, because older tensors could not be told from them.
        """
        if self._is_frozen == _is_torch_frozen():
            older = {number for number, reference in self._older.items() if reference() is not None}
            self._newer = [reference for number, reference in _references().items() if number not in older]

    def left(self, device: torch.device) -> dict[int, list[torch.Tensor]]:
        """Return those that are still alive, by the address of their memory on a device that no older tensor has."""
        older = blocks_of(_alive(self._older.values()), device)
        by_address: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in _alive(self._newer):
            for address in blocks_of([tensor], device).keys() - older.keys():
                by_address[address].append(tensor)
        return by_address


def _is_torch_frozen() -> bool:
    """Return whether torch is in the frozen heap: to count the objects there takes 0.1 s."""
    import torch

    return not any(value is torch for value in gc.get_objects())


def _references() -> dict[int, weakref.ref[torch.Tensor]]:
    import torch

    return {id(tensor): weakref.ref(tensor) for tensor in alive(torch.Tensor)}


def _alive(references: Iterable[weakref.ref[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return (tensor for reference in references if (tensor := reference()) is not None)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that a run left, as a row of a composition, and the tensors that have its memory."""

    row: Row
    tensors: tuple[weakref.ref[torch.Tensor], ...]
    device: torch.device

    def is_alive(self, address: int) -> bool:
        return address in blocks_of(_alive(self.tensors), self.device)


@dataclass(frozen=True, slots=True)
class LeftByRun:
    """The blocks that a measured run left, and the path to the holder of each, by address. It keeps none of them alive."""

    blocks: Mapping[int, _Block]
    paths: Mapping[int, str]

    def holders(self, besides: Collection[str] = (), *, is_once: bool = False) -> tuple[Holder, ...]:
        """Return the holders, `ranked`. Those with a path in ``besides`` are left out.

        Args:
            besides: Paths to what the next run gave tensors to as well.
            is_once: Whether there was no next run, so that a cache cannot be told from a leak.
        """
        rows: dict[tuple[str, bool], list[Row]] = defaultdict(list)
        for address, path in self.paths.items():
            if path not in besides:
                block = self.blocks[address]
                # What the next run has replaced is no cache, although the holder keeps no more than before.
                rows[path, not is_once and block.is_alive(address)].append(block.row)
        return ranked(
            Holder(path, Composition(sum(row.nbytes for row in its_rows), merged(its_rows)), first_use=is_alive)
            for (path, is_alive), its_rows in rows.items()
        )

    def joined_to(self, explanation: Explanation) -> Explanation:
        """Return the explanation of the recorded run, with what the measured run left and the recorded one did not.

        What the recorded run retained elsewhere may be the same leak, whose path differs or was not found. So only the bytes
        beyond it are joined. A holder is a cache for certain only if all holders of the recorded run are known.
        """
        retained, recorded = explanation.retained, explanation.holders
        besides = {path for holder in recorded for path in (holder.path, *holder.alternatives)} - {""}
        is_known = all(holder.path for holder in recorded) and sum(map(_nbytes, recorded)) >= retained.total
        measured = {*self.paths.values()}
        left = sum(block.row.nbytes for address, block in self.blocks.items() if self.paths.get(address) not in besides)
        left -= retained.total - sum(
            holder.kept.total for holder in recorded if not measured.isdisjoint((holder.path, *holder.alternatives))
        )
        more = []
        for holder in self.holders(besides):
            nbytes = min(holder.kept.total, left)
            if nbytes <= 0:
                break
            kept = holder.kept if nbytes == holder.kept.total else Composition(nbytes, (Row("other", nbytes),))
            more.append(replace(holder, kept=kept, first_use=holder.first_use and is_known))
            left -= nbytes
        if not more:
            return explanation
        rows = merged((*retained.rows, *(row for holder in more for row in holder.kept.rows)))
        return replace(
            explanation,
            retained=replace(retained, total=retained.total + sum(map(_nbytes, more)), rows=rows),
            holders=ranked((*recorded, *more)),
        )


def _nbytes(holder: Holder) -> int:
    return holder.kept.total


def left_by_run(
    made: TensorsMadeBy, device: torch.device, own: Collection[int], others: Mapping[int, int]
) -> LeftByRun:
    """Return what a run left. Nothing may have run since then.

    Args:
        made: The tensors of the run, which has ended.
        device: The device of the blocks.
        own: Addresses of blocks that are kept on purpose.
        others: Blocks that the run left, as far as the device knows them: some are the memory of no tensor in Python.
    """
    blocks = {
        address: _Block(Row("other", nbytes), (), device) for address, nbytes in others.items() if address not in own
    }
    for address, tensors in made.left(device).items():
        if address not in own:
            nbytes = blocks_of(tensors, device)[address]
            row = Row("other", nbytes, tensor=_text_of(tensors, nbytes))
            blocks[address] = _Block(row, tuple(map(weakref.ref, tensors)), device)
        tensors.clear()
    return LeftByRun(blocks, holders_of({address: block.row.nbytes for address, block in blocks.items()}))


def _text_of(tensors: list[torch.Tensor], nbytes: int) -> str:
    """Return dtype and shape of a block, of which all tensors may be views; empty if none of them is as large as the block."""
    whole = (tensor for tensor in tensors if dense_bytes(tensor) == nbytes)
    return next((tensor_text(*dtype_and_shape(tensor)) for tensor in whole), "")
