"""Growth per step: the bytes kept by every further step, as by a leak in a training loop.

Live bytes also change while a cache fills, or if batches have different sizes. These functions distinguish both from a leak.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pytest_gpumem.measuring.measure.reading import by_device, live_of_program
from pytest_gpumem.torch_support.garbage_collector import collect_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.measure.reading import ByDevice, Figures

    class RunStep(Protocol):
        """A function that runs a step once and returns its figures, like `run_one_step`."""

        def __call__(self, *, older_garbage: bool = True) -> ByDevice: ...


SETTLING_STEPS = 6
"""The number of steps before growth is measured. A cache, or a list with a maximum length, may fill in these steps. So its
filling does not count as growth."""
WINDOW = 12
"""The number of steps over which growth is measured.

12 is divisible by 2 and 3. So if only every second or third step keeps bytes, the measured growth is the same whether the
window begins with such a step or with another step. A buffer that is emptied at least once in these steps does not count as
growth.
"""


def grows(live: Sequence[int]) -> bool:
    """Return whether live bytes grow over consecutive steps.

    They grow if they never fall after their minimum and the last value is above the minimum. They also grow if the later half
    of the values has a higher minimum and a higher maximum than the earlier half.

    Example:
        100, 140, 180, 220 grows. 100, 180, 110, 190 grows, because 110 > 100 and 190 > 180. 100, 180, 100, 180 does not grow.
    """
    since_lowest = live[live.index(min(live)) :]
    if since_lowest[-1] > since_lowest[0] and list(since_lowest) == sorted(since_lowest):
        return True
    return _is_higher_later(live)


def growth_per_step(live: Sequence[int]) -> int:
    """Return the bytes kept by each step, or 0 if memory does not grow.

    Memory grows if both the minimum and the maximum of ``live`` are higher in the later half than in the earlier half. The
    first and the last value alone would prove nothing, because a buffer may be almost empty in the first and almost full in
    the last, although it is emptied from time to time.

    Args:
        live: The live bytes before the first step and after each step, after garbage collection.

    Example:
        ``growth_per_step([1000, 1040, 1080, 1120])`` is 40.
    """
    if len(live) < 2 or not _is_higher_later(live):
        return 0
    return max(0, round((live[-1] - live[0]) / (len(live) - 1)))


def _is_higher_later(live: Sequence[int]) -> bool:
    early, late = live[: len(live) // 2], live[len(live) // 2 :]
    return min(late) > min(early) and max(late) > max(early)


def measure_growth(run_step: RunStep, device: Device) -> dict[str, int]:
    """Run more steps to distinguish a leak from a cache that fills, and return the growth on each device.

    At first, only young garbage is collected after each step. Uncollected garbage can only add growth. So if memory does not
    grow in these steps, there is no leak. If memory grows and there was older garbage, the steps run again, and all garbage is
    collected after each step that changed the live bytes.

    Args:
        run_step: Runs the step.
        device: The step's device.

    Returns:
        The bytes kept by each step, by device name.
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
    if device.consensus.any(keeps_bytes_rarely(window)):
        window += [run_step() for _ in range(WINDOW)]
    return growth_by_device(window)


def keeps_bytes_rarely(window: Sequence[ByDevice]) -> bool:
    """Return whether consecutive steps kept bytes on a device, but too rarely to distinguish a leak from a cache.

    For example, a leak in every tenth step keeps bytes only once or twice in `WINDOW` steps. In this case, `WINDOW` more steps
    are measured.
    """
    return any(not growth_of(steps) and _never_falls(_live(steps)) for steps in by_device(window).values())


def growth_by_device(window: Sequence[ByDevice]) -> dict[str, int]:
    """Return the bytes kept by each step in the window, by device name."""
    return {name: growth_of(steps) for name, steps in by_device(window).items()}


def growth_of(window: Sequence[Figures]) -> int:
    """Return the bytes kept by each step in the window, on a single device.

    If the steps allocate different amounts, live bytes also go up and down with the size of the latest batch. Then growth
    counts only in one of three cases:

    - Live bytes never fall.
    - Live bytes rise and never fall among the steps that allocate equally many bytes.
    - Every value in the second half of the window is above every value in the first half.
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
    """Return whether live bytes rose more than once, and never fell, between steps with equal allocations."""
    latest: dict[int, int] = {}
    rises, rose_until = 0, -1
    for number, step in enumerate(window):
        previous = latest.get(step.turnover)
        latest[step.turnover] = number
        if previous is None or step.live_after == window[previous].live_after:
            continue
        if step.live_after < window[previous].live_after:
            return False
        # If two rises overlap, a single kept tensor may have caused both. So they count as a single rise.
        if previous >= rose_until:
            rises, rose_until = rises + 1, number
    return rises > 1
