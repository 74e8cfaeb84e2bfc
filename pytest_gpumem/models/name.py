"""Names of models, ``hf:ORG/NAME``, and sizes of their batches, ``4x4096``, parsed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.models.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model by its source, and the name that it has there."""

    source: str
    name: str
    base: Path = Path()
    """The folder that a name which is a relative path counts from."""

    @property
    def path(self) -> Path:
        """The name as a path: of a folder, or a file, where it is not one of the hub."""
        return self.base / Path(self.name).expanduser()

    @property
    def is_written_as_path(self) -> bool:
        """True if it can be no name in a library or on the hub: ``/folder``, ``./folder``, ``~/folder``, ``sizes.json``."""
        return Path(self.name).is_absolute() or self.name.startswith((".", "~")) or self.name.endswith(".json")

    @property
    def is_tiny(self) -> bool:
        """True if it is to have two layers of each kind only."""
        return self.source == "hf-tiny"

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A number of samples, and how long each is: tokens of a sequence, the side of an image or a latent."""

    samples: int
    length: int | None = None

    def __str__(self) -> str:
        return f"{self.samples}" if self.length is None else f"{self.samples}x{self.length}"


def batch_size(text: str) -> BatchSize:
    """Return the size that a text gives: ``"4x4096"``, ``"32"``.

    Raises:
        ModelError: It is none. The message is a sentence.
    """
    found = re.fullmatch(r"([0-9]{1,9})(?:x([0-9]{1,9}))?", text.strip())
    samples, length = (None if one is None else int(one) for one in found.groups()) if found else (0, None)
    if not samples or length == 0:
        raise ModelError(
            f"{text!r} is not the size of a batch: write SAMPLES like 32, SAMPLESxTOKENS like 4x4096, or for images and "
            "latents SAMPLESxSIDE like 8x512"
        )
    return BatchSize(samples, length)
