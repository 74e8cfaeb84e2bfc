"""Releases of small packages as wheels in a folder, from which pip and uv install without an index."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def only_from(folder: Path) -> dict[str, str]:
    """Return the variables with which pip and uv look in a folder of wheels, and nowhere else."""
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
        "UV_OFFLINE": "1",
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(folder),
    }


def make_wheel(folder: Path, name: str, release: str, files: Mapping[str, str], requires: str | None = None) -> Path:
    """Write the wheel of a release, whose ``files`` are texts by path, and return its path."""
    info = f"{name}-{release}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    texts = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in texts.items())
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as wheel:
        for path, text in {**texts, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(path, text)
    return made


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
