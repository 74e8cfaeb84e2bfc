"""Small values that ranks share through torch's key/value store, which torchrun or rank 0 serves."""

from __future__ import annotations

import base64
import json
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measuring.ranks.errors import BoardError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.measuring.ranks.launch import Launch

_MOST_BYTES = 4_000_000
"""The most bytes in an entry. The store closes a connection if its client sends more than 8 MiB at once."""


class Board:
    """A connection from this rank to the store. Each thread needs a board of its own.

    For example, rank 1 calls ``board.put("beat/1", {"number": 7})``, and then rank 0's ``board.get("beat/1")`` returns
    ``{"number": 7}``.
    """

    def __init__(self, launch: Launch, seconds: float) -> None:
        """Connect to the store. Rank 0 serves the store if the launcher does not.

        Args:
            launch: The launch, with the store's address and port.
            seconds: The longest time to wait for the store.

        Raises:
            BoardError: No store answered at this address within ``seconds``.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # documented, not in __all__

        try:
            # These arguments match those of init_process_group, so the job and gpumem share a server.
            store = TCPStore(
                launch.address,
                launch.port,
                is_master=launch.rank.is_first and not launch.agent_store,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise BoardError(
                f"{launch.rank} found no store at {launch.address}:{launch.port} (MASTER_ADDR, MASTER_PORT) within "
                f"{seconds:g} s, and ranks exchange their figures through this store: {_first_line(error)}"
            ) from None
        self._store = PrefixStore(f"gpumem/{launch.attempt}", store)

    def put(self, key: str, value: Any) -> None:
        """Set an entry.

        Args:
            key: The entry's name.
            value: A value that JSON can express.

        Raises:
            BoardError: The store cannot be reached. The other methods raise it too.
        """
        packed = base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()
        parts = [packed[start : start + _MOST_BYTES] for start in range(0, len(packed), _MOST_BYTES)]
        try:
            for number, part in enumerate(parts[1:], start=1):
                self._store.set(f"{key}#{number}", part)
            # Written last, because readers may read all parts as soon as the entry exists.
            self._store.set(key, f"{len(parts)}\n{parts[0]}")
        except RuntimeError as error:
            raise BoardError(_first_line(error)) from None

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all of these entries exist."""
        try:
            return bool(self._store.check(list(keys)))
        except RuntimeError as error:
            raise BoardError(_first_line(error)) from None

    def get(self, key: str) -> Any:
        """Return an existing entry."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """Return existing entries, in a single round trip unless an entry exceeds `_MOST_BYTES`."""
        try:
            return [self._unpacked(key, bytes(entry)) for key, entry in self._entries(keys)]
        except RuntimeError as error:
            raise BoardError(_first_line(error)) from None

    def _entries(self, keys: Sequence[str]) -> Iterable[tuple[str, bytes]]:
        return zip(keys, self._store.multi_get(list(keys)), strict=True)

    def _unpacked(self, key: str, entry: bytes) -> Any:
        number, _, packed = entry.partition(b"\n")
        packed += b"".join(bytes(self._store.get(f"{key}#{part}")) for part in range(1, int(number)))
        return json.loads(zlib.decompress(base64.b64decode(packed)))

    def maybe(self, key: str) -> Any:
        """Return an entry; ``None`` if it does not exist."""
        return self.get(key) if self.has([key]) else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
