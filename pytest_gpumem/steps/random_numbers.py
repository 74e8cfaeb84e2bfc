"""The state of the random numbers that a test draws, to be given back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpumem.devices.contract import Device


@dataclass(frozen=True)
class RandomNumbers:
    """Python's, torch's and those of the device's accelerators, at one moment.

    Kept as bytes: a tensor would be memory of the device that is measured.
    """

    python: Any
    torch: bytes
    accelerators: tuple[tuple[int, bytes], ...]

    @classmethod
    def now(cls, device: Device) -> RandomNumbers:
        """The state that they are in."""
        import torch

        return cls(
            random.getstate(),
            bytes(torch.get_rng_state().tolist()),
            tuple((index, bytes(torch.cuda.get_rng_state(index).tolist())) for index in device.random_devices()),
        )

    def restore(self) -> None:
        """Go on from here."""
        import torch

        random.setstate(self.python)
        torch.set_rng_state(_tensor(self.torch))
        for index, state in self.accelerators:
            torch.cuda.set_rng_state(_tensor(state), index)


def _tensor(state: bytes) -> Any:
    import torch

    return torch.tensor(list(state), dtype=torch.uint8, device="cpu")
