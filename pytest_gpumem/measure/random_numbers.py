"""The state of the random numbers that a test draws, to be given back."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api import beneath_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.devices.contract import Device


@dataclass(frozen=True)
class RandomNumbers:
    """States of Python's, NumPy's, torch's and the device's own random numbers at one moment.

    Kept as bytes: a tensor would be memory of the device that is measured.
    """

    device: Device | None
    python: Any
    numpy: Any
    torch: bytes
    accelerators: tuple[tuple[int, bytes], ...]

    @classmethod
    def now(cls, device: Device | None) -> RandomNumbers:
        """Return the current states; those of the host alone without a device."""
        import torch

        # NumPy that is not loaded has drawn nothing.
        numpy = sys.modules.get("numpy")
        with beneath_modes():  # whatever mode the test is in
            return cls(
                device,
                random.getstate(),
                None if numpy is None else numpy.random.get_state(),
                bytes(torch.get_rng_state().tolist()),
                tuple((index, bytes(device.random_state(index).tolist())) for index in device.random_devices())
                if device is not None
                else (),
            )

    def restore(self) -> None:
        """Set the generators to these states."""
        import torch

        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        with beneath_modes():
            torch.set_rng_state(_tensor(self.torch))
            if self.device is not None:
                for index, state in self.accelerators:
                    self.device.set_random_state(_tensor(state), index)


@contextmanager
def random_numbers_given_back(device: Device) -> Iterator[None]:
    """Restore random numbers afterwards, so that what a test draws does not depend on how many steps were run."""
    state = RandomNumbers.now(device)
    try:
        yield
    finally:
        state.restore()


def _tensor(state: bytes) -> Any:
    import torch

    return torch.tensor(list(state), dtype=torch.uint8, device="cpu")
