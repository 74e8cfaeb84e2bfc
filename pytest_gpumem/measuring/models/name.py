"""Parse model names such as ``hf:ORG/NAME``, and batch sizes such as ``4x4096``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.base.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model's source, such as ``hf`` or ``timm``, and the model's name in this source."""

    source: str
    name: str
    base: Path = Path()
    """The base folder for names that are relative paths."""

    @property
    def path(self) -> Path:
        """The name as a path. If no file or folder exists at this path, the name refers to the hub."""
        return self.base / Path(self.name).expanduser()

    @property
    def is_written_as_path(self) -> bool:
        """True if the name can only be a path: ``/folder``, ``./folder``, ``~/folder``, ``sizes.json``."""
        return Path(self.name).is_absolute() or self.name.startswith((".", "~")) or self.name.endswith(".json")

    @property
    def is_tiny(self) -> bool:
        """True if the model keeps only its first two layers, and the first layer of each further kind."""
        return self.source == "hf-tiny"

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The number of samples, and their length: the tokens in a sequence, or the side of images and latents."""

    samples: int
    length: int | None = None

    def __str__(self) -> str:
        return f"{self.samples}" if self.length is None else f"{self.samples}x{self.length}"


def batch_size(text: str) -> BatchSize:
    """Parse a batch size in a text such as ``"4x4096"`` or ``"32"``.

    Raises:
        ModelError: The text is not a batch size. The message is a sentence.
    """
    match = re.fullmatch(r"([0-9]{1,9})(?:x([0-9]{1,9}))?", text.strip())
    samples, length = (None if group is None else int(group) for group in match.groups()) if match else (0, None)
    if not samples or length == 0:
        raise ModelError(
            f"{text!r} is not a batch size: write SAMPLES like 32, SAMPLESxTOKENS like 4x4096, or for images and "
            "latents SAMPLESxSIDE like 8x512"
        )
    return BatchSize(samples, length)
