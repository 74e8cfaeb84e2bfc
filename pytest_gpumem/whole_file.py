"""Atomic replacement of a text file: a reader sees the old text or the new one, also after a crash."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

DRAFT = ".draft"
"""Suffix of a file that is being written; its name begins with a dot."""


def write_whole(path: Path, text: str, *, errors: str = "backslashreplace") -> None:
    """Write ``text`` as UTF-8, line ends as they are; the folder is made, and a link's target is what is replaced.

    ``errors`` is what becomes of a lone surrogate, which UTF-8 does not have: it is written as Python writes it, or with
    ``strict`` refused. Raises ``OSError``, and ``UnicodeEncodeError`` for what is refused.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=DRAFT)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=errors, newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read.
        Path(draft).chmod(0o666 & ~_umask())
        Path(draft).replace(target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
