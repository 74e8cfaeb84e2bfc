"""A program with torch's library in its memory, without the time of an import."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def maps_torch(then: str) -> str:
    """Return Python code that maps torch's library, and then runs ``then``."""
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
    return f"import mmap; f = open({str(library)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); {then}"
