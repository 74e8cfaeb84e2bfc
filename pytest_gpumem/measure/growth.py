"""Growth: bytes that every further step keeps, told from a cache that fills and from batches of different sizes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pytest_gpumem.measure.reading import live_of_program, on_each
from pytest_gpumem.torch_support.garbage_collector import collect_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.measure.reading import ByDevice, Figures

    class RunStep(Protocol):
        """Runs a step once, as `run_one_step` does."""

        def __call__(self, *, older_garbage: bool = True) -> ByDevice: ...


SETTLING_STEPS = 6
"""Steps in which a cache, or a list that forgets its oldest entries, may fill before growth is read."""
WINDOW = 12
"""Steps over which growth is read: a multiple of 2 and 3, so that a step that keeps bytes every second or third time has
the same growth wherever the window begins. What is emptied at least once within them is no growth."""


def grows(live: Sequence[int]) -> bool:
    """Return whether live bytes grow over some steps: they never fall after their lowest and end higher.

    Or they go up and down, but both their lowest and their highest are higher in the later half than in the earlier one.
    """
    since_lowest = live[live.index(min(live)) :]
    if since_lowest[-1] > since_lowest[0] and list(since_lowest) == sorted(since_lowest):
        return True
    return _is_higher_later(live)


def growth_per_step(live: Sequence[int]) -> int:
    """Return the bytes that each step keeps, 0 where memory does not grow.

    It grows where both the lowest and the highest of ``live`` are higher in the later half than in the earlier one: what is
    emptied now and then may be at any point of its course.

    Args:
        live: The bytes that are live before the first step and after each one, garbage collected.
    """
    if len(live) < 2 or not _is_higher_later(live):
        return 0
    return max(0, round((live[-1] - live[0]) / (len(live) - 1)))


def _is_higher_later(live: Sequence[int]) -> bool:
    early, late = live[: len(live) // 2], live[len(live) // 2 :]
    return min(late) > min(early) and max(late) > max(early)


def measure_growth(run_step: RunStep, device: Device) -> dict[str, int]:
    """Run more steps to distinguish a leak from a cache that fills, and return the bytes that each keeps, by device.

    Args:
        run_step: Runs the step.
        device: Where it runs.

    Garbage among all objects is collected once, at the end: there can only have been less before, so that what does not grow
    with it does not grow without it. Only if there is some is it collected after each step.
    """
    growth = _growth_over(partial(run_step, older_garbage=False), device)
    if not device.consensus.any(any(growth.values()) and _has_older_garbage(device)):
        return growth
    return _growth_over(run_step, device)


def _has_older_garbage(device: Device) -> bool:
    live = live_of_program(device)
    collect_everything()
    return live_of_program(device) != live


def _growth_over(run_step: Callable[[], ByDevice], device: Device) -> dict[str, int]:
    window = [run_step() for _ in range(SETTLING_STEPS + WINDOW)][SETTLING_STEPS:]
    if device.consensus.any(keeps_now_and_then(window)):
        window += [run_step() for _ in range(WINDOW)]
    return growth_by_device(window)


def keeps_now_and_then(window: Sequence[ByDevice]) -> bool:
    """Return whether some steps in a row kept bytes on a device, and too seldom to tell a leak from a cache.

    As many more tell whether others keep as much: a leak of every tenth step has kept bytes once or twice in `WINDOW` steps.
    """
    return any(not growth_of(steps) and _never_falls(_live(steps)) for steps in on_each(window).values())


def growth_by_device(window: Sequence[ByDevice]) -> dict[str, int]:
    """Return the bytes that each of some steps in a row keeps on each device, by its name."""
    return {name: growth_of(steps) for name, steps in on_each(window).items()}


def growth_of(window: Sequence[Figures]) -> int:
    """Return the bytes that each of some steps in a row keeps on their device.

    Of steps that do not all allocate as much, live bytes go up and down with what the latest one holds, such as its batch.
    """
    live = _live(window)
    growth = growth_per_step(live)
    if not growth or _never_falls(live) or len({step.turnover for step in window}) == 1:
        return growth
    return growth if _has_only_risen(window) or max(live[: len(live) // 2]) < min(live[len(live) // 2 :]) else 0


def _live(window: Sequence[Figures]) -> list[int]:
    return [window[0].live_before, *(step.live_after for step in window)]


def _never_falls(live: Sequence[int]) -> bool:
    return live[-1] > live[0] and list(live) == sorted(live)


def _has_only_risen(window: Sequence[Figures]) -> bool:
    """Return whether live bytes rose more than once, and never fell, from a step to the next one that allocates as much."""
    latest: dict[int, int] = {}
    rises, rose_until = 0, -1
    for number, step in enumerate(window):
        before = latest.get(step.turnover)
        latest[step.turnover] = number
        if before is None or step.live_after == window[before].live_after:
            continue
        if step.live_after < window[before].live_after:
            return False
        # What is kept once is in all rises across it.
        if before >= rose_until:
            rises, rose_until = rises + 1, number
    return rises > 1
