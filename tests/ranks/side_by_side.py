"""Ranks as threads of one process, which exchange values through a dictionary in place of the launcher's store."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pytest_gpumem.facts.values.rank import Rank
from pytest_gpumem.measuring.ranks.consensus import Consensus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pytest_gpumem.measuring.ranks.board import Board

MOST_SECONDS = 30
T = TypeVar("T")


class Entries:
    """What ranks have put so far; a `Board` without a server."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self._broken = threading.Event()

    def put(self, key: str, value: Any) -> None:
        self._entries[key] = copy.deepcopy(value)

    def has(self, keys: Iterable[str]) -> bool:
        if self._broken.is_set():
            raise RuntimeError("another rank has failed, or did not come in time")
        return all(key in self._entries for key in keys)

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        return [copy.deepcopy(self._entries[key]) for key in keys]

    def get(self, key: str) -> Any:
        return self.get_all([key])[0]

    def end_all(self) -> None:
        """Let those that wait raise."""
        self._broken.set()


def side_by_side(world: int, run: Callable[[Consensus], T]) -> list[T]:
    """Run so many ranks, and return what each returned. Raises what one raised, or an error where one waits for ever."""
    entries = Entries()

    def rank(number: int) -> T:
        consensus = Consensus(cast("Board", entries), Rank(number, world))
        consensus.begin_test()
        try:
            return run(consensus)
        except BaseException:
            entries.end_all()
            raise

    late = threading.Timer(MOST_SECONDS, entries.end_all)
    late.start()
    try:
        with ThreadPoolExecutor(world) as ranks:
            running = [ranks.submit(rank, number) for number in range(world)]
        return [one.result() for one in running]
    finally:
        late.cancel()
