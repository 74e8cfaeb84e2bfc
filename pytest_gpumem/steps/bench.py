"""Where steps are measured: an open device, its windows, and whether time is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.reach import blocks_of, reachable_tensors, storages_of
from pytest_gpumem.steps.runner import measure_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.devices.windows import Windows
    from pytest_gpumem.steps.runner import Phase, StepFigures


@dataclass(frozen=True, slots=True)
class Start:
    """What was live before a step's model was built, and how much of that is the step's own. In bytes."""

    own: int
    live: int


@dataclass(frozen=True, slots=True)
class Bench:
    """``timed`` tells whether steps are timed as well."""

    device: Device
    windows: Windows
    timed: bool

    def begin(self, held: object) -> Start:
        """Come to rest, before anything of a step is made. ``held`` is what there is of it already."""
        self.device.settle()
        self.device.adopt(self.storages(held))
        blocks = blocks_of(reachable_tensors([held]), self.device.torch_device)
        return Start(sum(blocks.values()), self.device.live())

    def measure(
        self,
        phases: Sequence[Phase],
        start: Start,
        held: Callable[[], object],
        state: Callable[[], object] | None = None,
    ) -> StepFigures:
        """Measure a step. ``held()`` leads to everything that it holds between steps; ``state`` as in `measure_step`."""
        return measure_step(
            phases,
            self.device,
            self.windows,
            own=lambda: self.storages(held()),
            own_before=start.own,
            live_before=start.live,
            timed=self.timed,
            state=state,
        )

    def storages(self, held: object) -> Iterator[torch.UntypedStorage]:
        """The storages on the device that can be reached from ``held``."""
        return storages_of(reachable_tensors([held]), self.device.torch_device)
