"""A recorder of steps on the CPU, as a measured test has one."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.explain.sites import Sites
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from tests.explain.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def opened() -> Iterator[Recorder]:
    """A recorder on an open device, with Python's collector off as in every step that is measured."""
    device = CpuDevice()
    device.open()
    try:
        with cyclic_collector_off():
            yield Recorder(device, Sites(Path(__file__).parent))
    finally:
        device.close()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    torch.manual_seed(0)
    with opened() as recorder:
        yield recorder
