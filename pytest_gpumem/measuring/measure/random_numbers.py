"""The state of random number generators, saved before measuring and restored afterwards."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api.dispatch import beneath_modes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpumem.measuring.devices.contract import Device


@dataclass(frozen=True)
class RandomNumbers:
    """States of Python's, NumPy's, torch's and the device's random number generators.

    torch's states are stored as bytes, because tensors would need memory on the measured device.
    """

    device: Device | None
    python: Any
    numpy: Any
    torch: bytes
    accelerators: tuple[tuple[int, bytes], ...]

    @classmethod
    def current(cls, device: Device | None) -> RandomNumbers:
        """Return the current states. Without a device, only the states of the host's generators are included."""
        import torch

        # If NumPy is not loaded, no code has used its generator.
        numpy = sys.modules.get("numpy")
        with beneath_modes():  # the test may have entered a dispatch mode, which would see these operators
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
def restored_random_numbers(device: Device) -> Iterator[None]:
    """Restore the generators at the end, so the test's random numbers do not depend on how many steps were measured."""
    state = RandomNumbers.current(device)
    try:
        yield
    finally:
        state.restore()


def _tensor(state: bytes) -> Any:
    import torch

    return torch.tensor(list(state), dtype=torch.uint8, device="cpu")
