"""A recorder of steps on the CPU, as a measured test has one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpumem.devices.cpu import CpuDevice
from pytest_gpumem.explain.sites import Sites
from pytest_gpumem.steps.collector import cyclic_collector_off
from tests.explain.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """An open device, with Python's collector off as in every step that is measured."""
    torch.manual_seed(0)
    device = CpuDevice()
    device.open()
    with cyclic_collector_off():
        yield Recorder(device, Sites(Path(__file__).parent))
    device.close()
