"""Find memory that grows in other processes, for example in a server, while a step is called again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted, format_bytes
from pytest_gpumem.measuring.explain.child_process import retained_rows
from pytest_gpumem.measuring.jobs.figures import ALL
from pytest_gpumem.measuring.measure.growth import grows
from pytest_gpumem.measuring.measure.other_processes import StepProcesses, figures_in, names_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pytest_gpumem.facts.values.composition import Row
    from pytest_gpumem.measuring.explain.sites import Sites
    from pytest_gpumem.measuring.jobs.figures import ProcessFigures
    from pytest_gpumem.measuring.measure.other_processes import EndStep
    from pytest_gpumem.measuring.measure.reading import ByDevice

    Record = Callable[[Callable[[], object], Collection[str]], Sequence[ProcessFigures]]
    """Runs a step while its processes record their allocations, until the named processes keep bytes."""

MOST_ROWS = 3


@dataclass(eq=False)
class GrowthElsewhere:
    """The other processes in the steps of `assert_no_growth`."""

    end_step: EndStep | None
    """Ends a step; ``None`` to leave other processes alone."""
    record: Record | None = None
    """Finds the kept tensors; ``None`` to leave them out of the message."""
    sites: Sites | None = None
    _processes: StepProcesses = field(init=False)
    _steps: list[ByDevice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._processes = StepProcesses(self.end_step)

    def end_warm_up(self) -> bool:
        """End the steps in which memory may grow. Return whether they used another process."""
        return bool(self._processes.beside({}))

    def end(self) -> None:
        """End a step in which memory may not grow."""
        self._steps.append(self._processes.beside({}))

    @property
    def is_used(self) -> bool:
        """True if a step used another process."""
        return any(self._steps)

    def text(self, step: Callable[[], object]) -> str:
        """Return a text about the processes whose memory grows; empty if there are none.

        Args:
            step: The function to call. It is called again to find the kept tensors.
        """
        live = {name: live_in(name, self._steps) for name in names_in(self._steps)}
        growing = [name for name, on_process in live.items() if name != ALL and grows(on_process)]
        # If each step leaves a process running, only their sum grows.
        if not growing and ALL in live and grows(live[ALL]):
            growing = [ALL]
        rows = self._kept(step, growing) if growing != [ALL] else {}
        return "\n".join(line for name in growing for line in _lines(name, live[name], rows.get(name, ())))

    def _kept(self, step: Callable[[], object], growing: Collection[str]) -> Mapping[str, Sequence[Row]]:
        """Return rows of the tensors that a step keeps, by process."""
        sites = self.sites
        if not growing or self.record is None or sites is None:
            return {}
        return {
            process.name: [
                row for recorded in process.recorded.values() for row in retained_rows(recorded, sites.site_of)
            ]
            for process in self.record(step, growing)
        }


def live_in(process: str, steps: Sequence[ByDevice]) -> list[int]:
    """Return a process's live bytes before the first step and after each step with this process, summed over GPUs.

    A process has bytes from the end of the step in which it began.

    Example:
        ``[100, 140, 180]`` for a server with 100 bytes that keeps 40 bytes in each of two steps.
    """
    figures = [on_gpus.values() for step in steps if (on_gpus := figures_in(step, process))]
    return [
        sum(on_gpu.live_before for on_gpu in figures[0]),
        *(sum(on_gpu.live_after for on_gpu in step) for step in figures),
    ]


def _lines(process: str, live: Sequence[int], rows: Sequence[Row]) -> Iterator[str]:
    total, steps = live[-1] - min(live), len(live) - 1 - list(live).index(min(live))
    yield (
        f"memory grows in {process}: {format_bytes(round(total / steps))} a step, {format_bytes(total)} in "
        f"{counted(steps, 'step')}"
    )
    for row in sorted(rows, key=lambda row: -row.nbytes)[:MOST_ROWS]:
        place = " in ".join(filter(None, (row.site, row.module)))
        yield f"  kept by a step: {row.count} x {row.tensor or 'memory'}, {format_bytes(row.nbytes)}{place and f', {place}'}"
