"""Find the tensors left behind by a measured run, and their holders.

A cache is filled at its first use, in the measured run. The recorded run comes later and finds a full cache. So the recording
does not contain the allocations that filled the cache.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.composition import Composition, Holder, Row, merge_rows, sort_holders
from pytest_gpumem.torch_support.holders import holders_of
from pytest_gpumem.torch_support.reachability import alive, blocks_of
from pytest_gpumem.torch_support.static_access import dense_bytes, dtype_and_shape, tensor_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import torch

    from pytest_gpumem.facts.values.composition import Explanation


class NewTensors:
    """The tensors made between the creation of this object and `record`. This object keeps no tensor alive.

    Only objects not frozen by ``gc.freeze`` are examined, which takes 1 ms for 20,000 objects. Call `record` before new objects
    are frozen.
    """

    def __init__(self) -> None:
        # Python reuses ids, so an id identifies a tensor only while the tensor is alive.
        self._older = _references()
        self._newer: list[weakref.ref[torch.Tensor]] = []
        self._is_frozen = _is_torch_frozen()

    def record(self) -> None:
        """Record the new tensors.

        If other code has called ``gc.unfreeze``, nothing is recorded, because older tensors would look new.
        """
        if self._is_frozen == _is_torch_frozen():
            older = {number for number, reference in self._older.items() if reference() is not None}
            self._newer = [reference for number, reference in _references().items() if number not in older]

    def alive_by_address(self, device: torch.device) -> dict[int, list[torch.Tensor]]:
        """Return the new tensors still alive, by block address. Blocks shared with an older tensor are left out."""
        older = blocks_of(_alive(self._older.values()), device)
        by_address: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in _alive(self._newer):
            for address in blocks_of([tensor], device).keys() - older.keys():
                by_address[address].append(tensor)
        return by_address


def _is_torch_frozen() -> bool:
    """Return whether objects are frozen, with the torch module as a sample. Counting frozen objects would take 0.1 s."""
    import torch

    return not any(value is torch for value in gc.get_objects())


def _references() -> dict[int, weakref.ref[torch.Tensor]]:
    import torch

    return {id(tensor): weakref.ref(tensor) for tensor in alive(torch.Tensor)}


def _alive(references: Iterable[weakref.ref[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return (tensor for reference in references if (tensor := reference()) is not None)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block left behind by a run: its row for a composition, and the tensors in its memory."""

    row: Row
    tensors: tuple[weakref.ref[torch.Tensor], ...]
    device: torch.device

    def is_alive(self, address: int) -> bool:
        return address in blocks_of(_alive(self.tensors), self.device)


@dataclass(frozen=True, slots=True)
class RetainedBlocks:
    """The blocks left behind by a measured run, and the path to each block's holder. This object keeps no block alive."""

    blocks: Mapping[int, _Block]
    paths: Mapping[int, str]

    def holders(self, besides: Collection[str] = (), *, is_once: bool = False) -> tuple[Holder, ...]:
        """Return the blocks' holders, the holder with most bytes first.

        Args:
            besides: Paths of holders to leave out, because these holders also keep tensors from the next run.
            is_once: True if there was no next run, so it is unknown whether a holder is a cache.
        """
        rows: dict[tuple[str, bool], list[Row]] = defaultdict(list)
        for address, path in self.paths.items():
            if path not in besides:
                block = self.blocks[address]
                # If the next run has replaced the block, the holder is not a cache, even if its bytes do not grow.
                rows[path, not is_once and block.is_alive(address)].append(block.row)
        return sort_holders(
            Holder(path, Composition(sum(row.nbytes for row in held_rows), merge_rows(held_rows)), first_use=is_alive)
            for (path, is_alive), held_rows in rows.items()
        )

    def extend_explanation(self, explanation: Explanation) -> Explanation:
        """Return the recorded run's explanation, with the bytes that only the measured run left behind added.

        The recorded run may have retained the same bytes again, under another path or an unknown path. These bytes are not
        added a second time. An added holder is called a cache only if all holders in the recorded run are known.

        Example:
            The measured run left 100 kB in ``Cache.tables`` and 40 kB in ``Net.seen``. The recorded run retained only 40 kB in
            ``Net.seen``. So the 100 kB in ``Cache.tables`` are added.
        """
        retained, recorded = explanation.retained, explanation.holders
        besides = {path for holder in recorded for path in (holder.path, *holder.alternatives)} - {""}
        is_known = all(holder.path for holder in recorded) and sum(map(_nbytes, recorded)) >= retained.total
        measured = {*self.paths.values()}
        unexplained = sum(
            block.row.nbytes for address, block in self.blocks.items() if self.paths.get(address) not in besides
        )
        unexplained -= retained.total - sum(
            holder.kept.total for holder in recorded if not measured.isdisjoint((holder.path, *holder.alternatives))
        )
        added = []
        for holder in self.holders(besides):
            nbytes = min(holder.kept.total, unexplained)
            if nbytes <= 0:
                break
            composition = holder.kept if nbytes == holder.kept.total else Composition(nbytes, (Row("other", nbytes),))
            added.append(replace(holder, kept=composition, first_use=holder.first_use and is_known))
            unexplained -= nbytes
        if not added:
            return explanation
        rows = merge_rows((*retained.rows, *(row for holder in added for row in holder.kept.rows)))
        return replace(
            explanation,
            retained=replace(retained, total=retained.total + sum(map(_nbytes, added)), rows=rows),
            holders=sort_holders((*recorded, *added)),
        )


def _nbytes(holder: Holder) -> int:
    return holder.kept.total


def blocks_retained_by_run(
    new_tensors: NewTensors, device: torch.device, own: Collection[int], known_blocks: Mapping[int, int]
) -> RetainedBlocks:
    """Return the blocks left behind by a run. Call this right after the run.

    Args:
        new_tensors: The run's tensors, after `NewTensors.record`.
        device: The device of the blocks.
        own: The addresses of the test's own blocks, for example from its fixtures.
        known_blocks: The size of each new block known to the device, by address. Some blocks have no Python tensor.
    """
    blocks = {
        address: _Block(Row("other", nbytes), (), device)
        for address, nbytes in known_blocks.items()
        if address not in own
    }
    for address, tensors in new_tensors.alive_by_address(device).items():
        if address not in own:
            nbytes = blocks_of(tensors, device)[address]
            row = Row("other", nbytes, tensor=_text_of(tensors, nbytes))
            blocks[address] = _Block(row, tuple(map(weakref.ref, tensors)), device)
        tensors.clear()
    return RetainedBlocks(blocks, holders_of({address: block.row.nbytes for address, block in blocks.items()}))


def _text_of(tensors: list[torch.Tensor], nbytes: int) -> str:
    """Return dtype and shape from a tensor as large as the block. If all tensors are smaller views, return no text."""
    full_size = (tensor for tensor in tensors if dense_bytes(tensor) == nbytes)
    return next((tensor_text(*dtype_and_shape(tensor)) for tensor in full_size), "")
