"""Atomic replacement of a file: a reader sees the old content or the new one, also after a crash."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAFT = ".draft"
"""Suffix of a file that is being written; its name begins with a dot."""


def write_whole(path: Path, text: str, *, errors: str = "backslashreplace") -> None:
    """Write ``text`` as UTF-8, line ends as they are; the folder is made, and a link's target is what is replaced.

    ``errors`` is what becomes of a lone surrogate, which UTF-8 does not have: it is written as Python writes it, or with
    ``strict`` refused. Raises ``OSError``, and ``UnicodeEncodeError`` for what is refused.
    """
    with replacing(path) as draft, draft.open("w", encoding="utf-8", errors=errors, newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty draft that replaces ``path`` when the context ends, unless it raises.

    The folder is made. If ``path`` is a link, its target is replaced. Raises ``OSError``.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=DRAFT)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        # mkstemp makes files that only their owner may read.
        draft.chmod(0o666 & ~_umask())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
