"""One measured test while it runs: its device, what belongs to it, and what has been measured."""

from __future__ import annotations

import itertools
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.devices.windows import Windows
from pytest_gpumem.explain.recording import Expected, Left, Subject, not_explained_note
from pytest_gpumem.measurement import Environment, Measurement, MeasuringError, Workload
from pytest_gpumem.steps.figures import Figures
from pytest_gpumem.steps.measuring_context import MeasuringContext
from pytest_gpumem.steps.random_numbers import RandomNumbers
from pytest_gpumem.steps.runner import live_at_rest, released_workspaces
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.static_access import instance_dict
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP, clear_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pytest

    from pytest_gpumem.devices.contract import Device, Known
    from pytest_gpumem.explain.tracker import Tracker
    from pytest_gpumem.session.ownership import OwnBytes, Residency
    from pytest_gpumem.steps.measuring_context import Explaining
    from pytest_gpumem.timing.time_budget import TimeBudget
    from pytest_gpumem.values.composition import Explanation
    from pytest_gpumem.values.operator_counts import Tally
    from pytest_gpumem.values.times import Times


def never(_: Measurement) -> bool:
    """Nothing is explained, or taken again."""
    return False


class TestRun:
    """A measured test from its set-up to the end of its call.

    ``time_budget`` is what timing its steps may take, ``None`` where none is timed; ``seen`` is told every measurement;
    ``wants`` tells which of them are explained, by means of ``explaining``, and ``doubts`` of which the time is taken again.
    """

    __test__ = False

    def __init__(
        self,
        item: pytest.Item,
        device: Device,
        residency: Residency,
        environment: Environment,
        *,
        time_budget: TimeBudget | None,
        seen: Callable[[Measurement], None],
        explaining: Explaining | None = None,
        wants: Callable[[Measurement], bool] = never,
        doubts: Callable[[Measurement], bool] = never,
        wants_places: Callable[[Measurement], bool] = never,
    ) -> None:
        self.item = item
        self.device = device
        self.windows = Windows(device)
        self.bench = MeasuringContext(device, self.windows, time_budget, explaining)
        self.wants = wants
        """Whether a measurement of this test is to be explained."""
        self.wants_places = wants_places
        """Whether it is to be told at which lines the counts of a measurement come about."""
        self.doubts = doubts
        """Whether the time of a measurement of this test is to be taken again."""
        self.measurements: list[Measurement] = []
        self.measures_itself = False
        """Whether the test has the ``gpumem`` fixture, so that its call as a whole is not measured."""
        self.relations = 0
        """How many relations the test asserted with the fixture, and saw hold."""
        self.lost: str | None = None
        """Why its figures cannot be believed, as a clause."""
        self._residency = residency
        self._environment = environment
        self._seen = seen
        self._failure: BaseException | None = None
        self._at_call: tuple[OwnBytes, int] | None = None
        self._random: RandomNumbers | None = None
        """The random numbers as the call began with them."""
        self._known_at_call: Known = frozenset()
        self._attributes: frozenset[str] = frozenset()
        """What the test's instance had when its call began."""

    def begin_call(self) -> None:
        """The call is about to begin: from here on, what is allocated is the test's."""
        self.device.quiesce()
        self._random = RandomNumbers.now(self.device)
        own = self._residency.own(self.item)
        self.device.register_existing(self._residency.storages(self.item))
        self._at_call = own, self.device.live()
        self._known_at_call = self.device.known()
        self._attributes = frozenset(self._instance_dict())

    @contextmanager
    def tracked(self, *, whole_call: bool = False) -> Iterator[Callable[[], Figures]]:
        """Measure what runs within, once. Its figures are there, by calling what is yielded, when it has ended.

        The ``whole_call`` begins right after `begin_call`, whose readings are its own.
        """
        if self._at_call is None:
            raise RuntimeError("the test's call has not begun")
        at_call, live_at_call = self._at_call
        device = self.device
        live_before, held_before = live_at_call, at_call.total
        if not whole_call:
            device.quiesce()
            live_before, held_before = device.live(), self._residency.own(self.item).total
        reserved_before = device.reserved()
        ended: list[Figures] = []
        turnover = device.turnover()
        window = self.windows.open()
        with cyclic_collector_off():
            try:
                yield lambda: ended[0]
            except BaseException:
                # What went wrong in the test matters more than what then could not be measured.
                with suppress(MeasuringError):
                    self.windows.close(window)
                raise
            peak = self.windows.close(window)
            turnover = device.turnover() - turnover
            workspaces = released_workspaces(device)
            live_run = device.live()
            held_change = self._residency.own(self.item).total - held_before
            live_after = live_at_rest(device, live_before + held_change)
        ended.append(
            Figures(
                own=at_call.total + live_before - live_at_call,
                live_before=live_before,
                reserved_before=reserved_before,
                peak=peak,
                live_run=live_run,
                live_after=live_after,
                turnover=turnover,
                held_change=held_change,
                workspaces=workspaces,
            )
        )

    def keep(self, measurement: Measurement) -> Measurement:
        """Keep a measurement of this test, which `draft` made."""
        if measurement.peak_allocated <= 0:
            self.lost = (
                f"{measurement.name} held no tensor on {self.device.torch_device}: it runs elsewhere, or not at all"
            )
        self.measurements.append(measurement)
        self._seen(measurement)
        return measurement

    def draft(
        self,
        workload: Workload,
        metrics: dict[str, float] | dict[str, int],
        *,
        name: str | None = None,
        settled: bool = True,
        notes: tuple[str, ...] = (),
        recomputed: int | None = None,
        explanation: Explanation | None = None,
        times: Times | None = None,
        work: Mapping[str, float] | None = None,
        lowest_peak: int | None = None,
        by_operator: Mapping[str, tuple[Tally, ...]] | None = None,
        workspaces: int = 0,
    ) -> Measurement:
        """A measurement of this test. Raises ``ValueError`` when it already has one of that name."""
        taken = {measurement.name for measurement in self.measurements}
        if name in taken:
            raise ValueError(f"this test already has a measurement called {name!r}; names tell its baselines apart")
        environment = self._environment
        return Measurement(
            name or _numbered(workload.step, taken),
            workload,
            replace(environment, details={**environment.details, **self.device.libraries()}),
            metrics,
            settled,
            notes,
            recomputed,
            explanation,
            times,
            work or {},
            lowest_peak,
            by_operator or {},
            workspaces,
        )

    def explain_call(self, call: Callable[[], object]) -> None:
        """Run the test's call once more, recorded, and put its explanation into the measurement of the call.

        What goes wrong this time is no failure of the test, which has passed; it is noted.
        """
        measurement = self.measurements[-1]
        try:
            explanation = self.bench.explain(
                self._call_subject(call), Expected(measurement.peak_allocated, turnover=None)
            )
        except RAISED_BY_A_STEP as error:
            self.measurements[-1] = replace(measurement, notes=(*measurement.notes, not_explained_note(error)))
        else:
            self.measurements[-1] = replace(measurement, explanation=explanation)

    def explain_call_out_of_memory(self, call: Callable[[], object]) -> None:
        """Run the call that ran out of memory once more, recorded, and tell where it went if it runs out again."""
        if self._at_call is not None:
            self.bench.explain_out_of_memory(self._call_subject(call))

    def _call_subject(self, call: Callable[[], object]) -> Subject:
        def prepare() -> None:
            # The call begins again as it did: what it left on its fixtures and its instance is the first run's.
            self._residency.clear_left_gradients(self.item)
            if self._random is not None:
                self._random.restore()
            attributes = self._instance_dict()
            for name in [name for name in attributes if name not in self._attributes]:
                dict.pop(attributes, name)

        assert self._at_call is not None, "the call has begun"
        at_call, live_at_call = self._at_call

        def left() -> Left:
            own_now = self._residency.own(self.item).total
            gained = self.device.live() - live_at_call - (own_now - at_call.total)
            blocks = self.device.known() - self._known_at_call
            return Left(max(0, gained), frozenset(address for address, _ in blocks))

        def know(tracker: Tracker) -> None:
            values = self._residency.values(self.item)
            tracker.known.within(values)
            tracker.know(inputs=values)

        return Subject(
            lambda _: call(),
            own=lambda: list(self._residency.storages(self.item)),
            own_bytes=lambda: self._residency.own(self.item).total,
            know=know,
            prepare=prepare,
            left=left,
            once=True,
        )

    def _instance_dict(self) -> dict[str, object]:
        return instance_dict(getattr(self.item, "instance", None)) or {}

    def failed(self, error: BaseException) -> None:
        """The test raised ``error``, whose traceback keeps its tensors alive until `release`."""
        self._failure = error

    def release(self) -> None:
        """Let go of everything that the test's failure and this run hold."""
        if self._failure is not None:
            clear_frames(self._failure)
        self._failure = None
        self._at_call = None
        self.device.close()


def _numbered(name: str, taken: set[str]) -> str:
    """``name``, or ``name-2``, ``name-3``, ...: the first that is not taken."""
    numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(candidate for candidate in numbered if candidate not in taken)
