"""Share small values between ranks through torch's key/value store, whose server is torchrun or rank 0."""

from __future__ import annotations

import base64
import json
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import BoardError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.measuring.ranks.launch import Launch

_MOST_BYTES = 4_000_000
"""The maximum size of an entry in bytes. A larger value is split, because the server accepts at most 8 MiB at once."""


class Board:
    """A rank's connection to the job's key/value store. Each thread needs a board of its own.

    For example, rank 1 calls ``board.put("beat/1", {"number": 7})``, and then rank 0's ``board.get("beat/1")`` returns
    ``{"number": 7}``.
    """

    def __init__(self, launch: Launch, seconds: float) -> None:
        """Connect to the store. If the launcher has not started a server, rank 0 starts it.

        Args:
            launch: This rank's launch, which has the server's address and port.
            seconds: The seconds after which the attempt to connect fails.

        Raises:
            BoardError: No server answered at this address within ``seconds``.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # documented, not in __all__

        try:
            # init_process_group passes the same arguments, so the measured code and this package use the same server.
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
                f"{seconds:g} s, and ranks need this store to exchange their figures: {_first_line(error)}"
            ) from None
        self._store = PrefixStore(f"gpumem/{launch.attempt}", store)

    def put(self, key: str, value: Any) -> None:
        """Store a value in the entry ``key``.

        Args:
            key: The entry's name.
            value: A value that JSON can represent.

        Raises:
            BoardError: The store cannot be reached. The other methods raise this error in the same case.
        """
        packed = base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()
        parts = [packed[start : start + _MOST_BYTES] for start in range(0, len(packed), _MOST_BYTES)]
        try:
            for number, part in enumerate(parts[1:], start=1):
                self._store.set(f"{key}#{number}", part)
            # Set the entry after its further parts, because another rank may read all parts as soon as the entry exists.
            self._store.set(key, f"{len(parts)}\n{parts[0]}")
        except RuntimeError as error:
            raise BoardError(_first_line(error)) from None

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all entries in ``keys`` exist."""
        try:
            return bool(self._store.check(list(keys)))
        except RuntimeError as error:
            raise BoardError(_first_line(error)) from None

    def get(self, key: str) -> Any:
        """Return the value in an existing entry."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """Return the values in existing entries. This takes one round trip unless a value was split."""
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
        """Return the value in an entry; ``None`` if the entry does not exist."""
        return self.get(key) if self.has([key]) else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
