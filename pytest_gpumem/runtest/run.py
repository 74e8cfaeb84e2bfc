"""One measured test while it runs: its device, what belongs to it, and what has been measured."""

from __future__ import annotations

import itertools
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.first_use import TensorsMadeBy, left_by_run
from pytest_gpumem.explain.recording import Expected, Left, Subject, gpu_that_ran_out
from pytest_gpumem.gate.baseline import Baseline
from pytest_gpumem.measure.random_numbers import RandomNumbers
from pytest_gpumem.measure.reading import largest_of, live_everywhere, notes_on_missing, read_once
from pytest_gpumem.measurement import HELD_NOTHING, Measurement, MeasuringError, Workload, check_name
from pytest_gpumem.reports.explanation import holder_lines
from pytest_gpumem.requirements.installed import needed_by_torch, versions
from pytest_gpumem.runtest.explaining import call_again
from pytest_gpumem.runtest.judging import NOT_TIMED
from pytest_gpumem.torch_support.garbage_collector import everything_in_sight
from pytest_gpumem.torch_support.reachability import alive, blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import instance_dict
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP, clear_frames
from pytest_gpumem.values.rank import name_on, rank_in, without_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pytest_gpumem.devices.contract import BlockIds, Device
    from pytest_gpumem.explain.first_use import LeftByRun
    from pytest_gpumem.explain.owners import TensorOwners
    from pytest_gpumem.explain.sites import Sites
    from pytest_gpumem.gate.verdict import TestVerdict
    from pytest_gpumem.measure.context import MeasuringContext
    from pytest_gpumem.measure.prepared import MeasuredStep, PreparedStep
    from pytest_gpumem.measure.reading import ByDevice
    from pytest_gpumem.measurement import Environment
    from pytest_gpumem.runtest.explaining import ExplainPolicy
    from pytest_gpumem.runtest.judging import Judged, Judging
    from pytest_gpumem.runtest.ownership import Ownership
    from pytest_gpumem.values.composition import Explanation
    from pytest_gpumem.values.option_words import Routing
    from pytest_gpumem.values.unknown_reads import UnknownReads


@dataclass(eq=False, repr=False)
class TestRun:
    """A measured test from its set-up to the end of its call: measured, judged, and explained where that is wanted."""

    __test__ = False

    judging: Judging
    _policy: ExplainPolicy
    context: MeasuringContext
    _ownership: Ownership
    _environment: Environment
    _reads: Callable[[], UnknownReads]
    """Returns the uncomputed values that the test has read so far, its fixtures included."""
    judged: list[Judged] = field(default_factory=list)
    """The measurements with their verdicts."""
    relations: int = 0
    """The number of relations that the test asserted with the fixture, and that held."""
    lost: str | None = None
    """The reason why its figures are not valid, as a clause."""
    is_called: bool = False
    """True while pytest calls the test."""
    has_failed_subtest: bool = False
    """True if a subtest failed, so that the test may have left out measurements."""
    _errors: list[BaseException] = field(default_factory=list)
    """The test's errors. Their tracebacks keep its tensors alive until `release`."""
    _at_call: tuple[list[int], list[int]] | None = None
    """The test's own bytes, and all that were live, on each of `Device.everywhere` when the call began."""
    _random: RandomNumbers | None = None
    """The random numbers as the call began with them."""
    _known_at_call: BlockIds = frozenset()
    _made_by_call: TensorsMadeBy | None = None
    _attributes: frozenset[str] = frozenset()
    """The attributes of the test's instance when its call began."""
    _under_way: list[str] = field(default_factory=list)
    """The measurements that have begun and not ended, each as its call; more than one only of nested regions."""
    _nested: MeasuringError | None = None
    """The error of a nested measurement within the one that is under way."""

    def __post_init__(self) -> None:
        self.item, self.device = self.judging.item, self.context.device
        self.measures_itself = self.judging.measured.has_fixture
        """True if the test has the ``gpumem`` fixture, so that its call as a whole is not measured."""

    @property
    def measurements(self) -> list[Measurement]:
        return [one.measurement for one in self.judged]

    def verdict(self) -> TestVerdict:
        """Return the verdict on the test, which has come to the end of its call."""
        if self.lost is not None:
            verdict, judged = self.judging.measured.not_measured(self.lost), []
        else:
            verdict, judged = self.judging.verdict(self.judged, self.relations), self.judged
        missing = () if self.has_failed_subtest else self.judging.missing(judged, self._environment.slug)
        return replace(verdict, missing=missing)

    def refused(self, why: str) -> TestVerdict:
        """Return the verdict on the test, which cannot be measured as the clause ``why`` says."""
        missing = self.judging.missing([], self._environment.slug)
        return replace(self.judging.measured.not_measured(why), missing=missing)

    def begin_call(self) -> None:
        """Prepare for the call: what is allocated from here on is the test's."""
        self.is_called = True
        self.device.quiesce()
        self._random = RandomNumbers.now(self.device)
        own = self._held()
        existing = self._ownership.storages(self.item)
        with self.device.one_moment():
            self.device.register_existing(existing)
            self._at_call = own, live_everywhere(self.device)
            self._known_at_call = self.device.known()
        self._made_by_call = None if self.measures_itself else self._tensors_made()
        self._attributes = frozenset(self._instance_dict())

    @property
    def not_own(self) -> tuple[int, ...]:
        """The bytes that were live when the call began, and are neither the test's nor its fixtures', on each device."""
        if self._at_call is None:
            raise RuntimeError("the test's call has not begun")
        return tuple(live - held for held, live in zip(*self._at_call, strict=True))

    def _held(self) -> list[int]:
        """Return the bytes that belong to the test now, on each of `Device.everywhere`."""
        return [one.own(self.item).total if one.device.is_used else 0 for one in self._ownership.everywhere]

    def reached(self, values: Sequence[object]) -> list[int]:
        """Return the bytes that can be reached from ``values`` or belong to the test, on each of `Device.everywhere`."""
        tensors = list(reachable_tensors([*self._ownership.values(self.item), *values]))
        return [
            sum(blocks_of(tensors, one.torch_device).values()) if one.is_used else 0 for one in self.device.everywhere
        ]

    def blocks_not_own(self) -> frozenset[int]:
        """Return the addresses of live tensors that are neither the test's nor its fixtures', as far as can be told."""
        import torch

        if self.context.time_budget is not None:
            # A device may keep tensors for this, from the first time on.
            with self.device.unrecorded():
                self.device.pace()
        with everything_in_sight():
            tensors = alive(torch.Tensor)
        there = {address for one in self.device.everywhere for address in blocks_of(tensors, one.torch_device)}
        own = {storage.data_ptr() for one in self._ownership.everywhere for storage in one.storages(self.item)}
        return frozenset(there - own - {address for address, _ in self.device.known() - self._known_at_call})

    @contextmanager
    def alone(self, method: str, name: str | None = None) -> Iterator[None]:
        """Measure within, and nothing else besides: ``method`` is what the test called of the fixture.

        Raises `MeasuringError` within another measurement, which would run this one with each of its steps, and has what
        measuring takes in its own figures. A region may be within a region. The outer measurement raises it, too, where what
        it measures catches it. ``TypeError`` or ``ValueError`` for what cannot be the name of a measurement.
        """
        if name is not None:
            check_name(name)
        what = f"gpumem.{method}({'' if name is None else repr(name)})"
        around = self._under_way[-1] if self._under_way else None
        if around is not None and not (method == "track" and around.startswith("gpumem.track(")):
            self._nested = MeasuringError(
                f"{what} is called within {around}: figures would be of both, as measuring runs code several times; measure "
                "one after the other, with each call outside of what the other one measures"
            )
            raise self._nested
        self._under_way.append(what)
        try:
            yield
            if around is None and self._nested is not None:
                raise self._nested
        finally:
            self._under_way.pop()
            self._nested = self._nested if self._under_way else None

    @contextmanager
    def tracked(self) -> Iterator[Callable[[], ByDevice]]:
        """Measure the call. Its figures are there, by calling what is yielded, when it has ended.

        It begins right after `begin_call`, whose readings are its own.
        """
        with read_once(self.device, self.not_own, self._held, self._at_call) as figures:
            yield figures
            if self._made_by_call is not None:
                self._made_by_call.ended()

    @contextmanager
    def region(self, name: str | None) -> Iterator[Callable[[], Measurement]]:
        """Measure what runs within, once. Calling what is yielded keeps its measurement, when it has ended."""
        self.device.settle()
        made = self._tensors_made()
        with read_once(self.device, self.not_own, self._held) as figures:
            yield lambda: self.keep(self._judged_region(figures(), name, made))
            if made is not None:
                made.ended()

    def _tensors_made(self) -> TensorsMadeBy | None:
        """Return the tensors that are made from here on; ``None`` if nothing is explained, so no holders are looked for."""
        return None if self.context.sites is None else TensorsMadeBy()

    def _judged_region(self, figures: ByDevice, name: str | None, made: TensorsMadeBy | None) -> Judged:
        """Return what was measured of a region with its verdict. If it fails by what it left, the notes name the holders."""
        judged = self.judge_figures(Workload("region"), figures, name)
        if self.context.sites is None or not self._policy.should_find_holders(judged):
            return judged
        device = self.context.named(self._policy.device_to_explain(judged))
        return self._noted(judged, self._left_by(made, device))

    def _noted(self, judged: Judged, left: LeftByRun | None) -> Judged:
        """Return what was measured with the holders of what it ``left`` as notes, where no explanation names them."""
        measurement, holders = judged.measurement, () if left is None else left.holders(is_once=True)
        notes = (*measurement.notes, *holder_lines(holders, self.judging.settings.units))
        return judged.explained(replace(measurement, notes=notes))

    def measure(self, prepared: PreparedStep) -> MeasuredStep:
        """Measure a step. If memory runs out, report where it went."""
        try:
            return prepared.measure()
        except Exception as error:
            self.explain_out_of_memory(error, prepared.subject)
            raise

    def judge(
        self, prepared: PreparedStep, step: MeasuredStep, name: str | None, *, explain: bool | None = None
    ) -> Judged:
        """Judge a step that was measured, explain it if its memory or counts ask for that, and judge it with its times.

        ``explain`` says whether it is explained; ``None`` where the verdict and the settings decide.
        """
        consensus, sites = self.device.consensus, self.context.sites
        judged = self.judging.judge(self._measurement_of(step, name))
        explanation = None
        if sites is not None:
            sites.packages.clear()
            step, explanation = self._explain_step(prepared, step, judged, explain)
        if self.context.time_budget is not None and consensus.all(step.may_be_timed):
            step = prepared.time(step)
            judged = self.judging.judge(self._measurement_of(step, name))
        while consensus.all(step.may_be_timed_again) and consensus.any(self._should_time_again(judged)):
            step = prepared.time_again(step)
            judged = self.judging.judge(self._measurement_of(step, name))
        if sites is None:
            return judged
        by_operator = step.figures.counted.by_operator
        if by_operator != judged.measurement.by_operator:
            judged = judged.explained(replace(judged.measurement, by_operator=by_operator))
        if explanation is not None:
            judged = self._explained(judged, explanation, explain)
        judged = self._with_packages(judged, sites)
        consensus.release()  # what the step holds is freed next
        return judged

    def _explain_step(
        self, prepared: PreparedStep, step: MeasuredStep, judged: Judged, asked: bool | None
    ) -> tuple[MeasuredStep, Explanation | str | None]:
        """Return a step with the lines of its counts, and its explanation, if its memory and counts ask for these.

        Its times do not decide, because they are taken later.
        """
        consensus, policy = self.device.consensus, self._policy
        if asked is not False and consensus.any(policy.should_locate_counts(judged)):
            step = prepared.locate(step)
        if not consensus.any(policy.should_explain(judged) if asked is None else asked):
            return step, None
        return step, prepared.explain(step, policy.device_to_explain(judged))

    def _should_time_again(self, judged: Judged) -> bool:
        time_budget = self.context.time_budget
        decides_only = time_budget is not None and not time_budget.may_sample_again
        return self.judging.should_time_again(judged, decides_only=decides_only)

    def keep(self, judged: Judged) -> Measurement:
        """Keep a measurement of this test."""
        measurement = judged.measurement
        if measurement.peak_allocated <= 0:
            here = f"{self.device.torch_device}{' or another GPU' if self.device.others else ''}"
            self.lost = f"{measurement.name} held no tensor on {here}: {HELD_NOTHING}"
        self.judged.append(judged)
        self.item.config.hook.pytest_gpumem_measurement(item=self.item, measurement=measurement)
        return measurement

    def judge_figures(self, workload: Workload, figures: ByDevice, name: str | None = None) -> Judged:
        """Judge what was measured once."""
        metrics = {device: one.memory_metrics() for device, one in figures.items()}
        measurement = self._new_measurement(
            workload,
            largest_of(metrics.values()),
            name,
            workspaces=max(one.workspaces for one in figures.values()),
            unused_before=max(one.unused_before for one in figures.values()),
            by_device=self._by_device(metrics),
            notes=notes_on_missing(figures.values()),
        )
        return self.judging.judge(measurement)

    def _by_device(self, metrics: Mapping[str, Mapping[str, int]]) -> Mapping[str, Mapping[str, int]]:
        """Return the metrics of the devices on which a region had bytes of its own; none where only one can be used."""
        return {on: one for on, one in metrics.items() if self.device.others and one["peak_allocated"] > 0}

    def _measurement_of(self, step: MeasuredStep, name: str | None) -> Measurement:
        figures, devices = step.figures, step.figures.devices
        by_device = (
            self._by_device({name: one.metrics() for name, one in devices.items()}) if self.device.others else {}
        )
        return self._new_measurement(
            step.workload,
            step.metrics(),
            name,
            settled=figures.settled,
            notes=(*step.notes, *([NOT_TIMED] if self._leaves_times_out else [])),
            recomputed=step.recomputed,
            times=figures.times,
            work=step.work,
            step_peaks=figures.step_peaks,
            by_operator=figures.counted.by_operator,
            lowest_counts=figures.counted.lowest,
            workspaces=max(one.memory.workspaces for one in devices.values()),
            unused_before=max(one.memory.unused_before for one in devices.values()),
            by_device=by_device,
            step_peaks_by_device={name: devices[name].step_peaks for name in by_device},
        )

    @property
    def _leaves_times_out(self) -> bool:
        """True if times could be taken, and there is no use for them."""
        settings = self.judging.settings
        return self.context.time_budget is None and settings.time is None and self.device.tells_time

    def _new_measurement(
        self, workload: Workload, metrics: Mapping[str, float], name: str | None, notes: Sequence[str] = (), **more: Any
    ) -> Measurement:
        """Return a measurement of this test. Raises ``ValueError`` when it already has one of that name."""
        rank = self.judging.ranks.rank
        taken = {one.measurement.name for one in self.judged}
        if rank is not None:
            taken = {without_rank(name_taken) for name_taken in taken}
        if name in taken:
            raise ValueError(f"this test already has a measurement called {name!r}; names tell its baselines apart")
        if name is not None and rank_in(name) is not None:
            raise ValueError(
                f"{name!r} is how the measurement {without_rank(name)!r} of a rank is called; give it another name"
            )
        name = name or _numbered(workload.step, taken)
        self._check_parts({*taken, name})
        environment = self._environment
        environment = replace(environment, details={**environment.details, **self.device.libraries()})
        name = name if rank is None else name_on(rank, name)
        reads = self._reads()
        workload = _under_routing(workload, self.judging.settings.routing, reads)
        return Measurement(name, workload, environment, metrics, notes=(*notes, *reads.notes()), **more)

    def _check_parts(self, names: Collection[str]) -> None:
        """Raise ``ValueError`` where a measurement is called as the part of another on one GPU is in the store."""
        parts = {f"{name} on {one.torch_device}" for name in names for one in self.device.everywhere}
        for name in parts.intersection(names) if self.device.others else ():
            raise ValueError(
                f"{name!r} is how the store calls the part of a measurement on one GPU; give it another name"
            )

    def explain_call(self) -> None:
        """Run the call of a test that only has the marker once more, recorded, where it is to be explained."""
        if not self.measures_itself:
            self.judged[-1] = self.explain_once(self.judged[-1], self._call_subject, made=self._made_by_call)

    def explain_once(
        self,
        judged: Judged,
        subject: Callable[[Device], Subject],
        *,
        explain: bool | None = None,
        made: TensorsMadeBy | None = None,
    ) -> Judged:
        """Return what was measured once with its explanation, where it is to be explained: it is run once more, recorded.

        Args:
            judged: The measurement, with its verdict.
            subject: Returns what to record on a device, one of `Device.everywhere`.
            explain: Whether it is explained; ``None`` where the verdict and the settings decide.
            made: The tensors that it made, if the holders of those that it left are looked for before it is run once more.
        """
        policy, sites = self._policy, self.context.sites
        if sites is None:
            return judged
        sites.packages.clear()
        if not self.device.consensus.any(policy.should_explain(judged) if explain is None else explain):
            return judged
        measurement, on = judged.measurement, policy.device_to_explain(judged)
        device = self.context.named(on)
        left = self._left_by(made, device) if policy.should_find_holders(judged) else None
        peak = measurement.peak_allocated if on is None else measurement.by_device[on]["peak_allocated"]
        explanation = self.context.explain(subject(device), Expected(peak, turnover=None), device)
        if isinstance(explanation, str):
            judged = self._noted(judged, left)
        elif left is not None:
            explanation = left.joined_to(explanation)
        return self._with_packages(self._explained(judged, explanation, explain), sites)

    def _left_by(self, made: TensorsMadeBy | None, device: Device) -> LeftByRun | None:
        """Return the tensors that a call or a region left on one of `Device.everywhere`; before anything else runs."""
        if made is None:
            return None
        own = self._ownership.everywhere[self.device.everywhere.index(device)].storages(self.item)
        new = {address for address, _ in device.known() - self._known_at_call} if made is self._made_by_call else set()
        others = {address: nbytes for address, nbytes in device.blocks().items() if address in new}
        with suppress(Exception):
            # Names of holders are beside the explanation, and must not cost it.
            return left_by_run(made, device.torch_device, {storage.data_ptr() for storage in own}, others)
        return None

    def _explained(self, judged: Judged, explanation: Explanation | str, asked: bool | None) -> Judged:
        """Return the measurement with its explanation, or with the clause that says why there is none."""
        measurement = judged.measurement
        whole_step = self.device.consensus.any(bool(asked) or self._policy.should_show_whole_step(judged))
        if isinstance(explanation, str):
            return judged.explained(replace(measurement, notes=(*measurement.notes, explanation)))
        if not whole_step:
            explanation = replace(explanation, over_time=None)
        return judged.explained(replace(measurement, explanation=explanation))

    def _with_packages(self, judged: Judged, sites: Sites) -> Judged:
        """Return the measurement with the releases of the packages whose code ran, as ``sites`` saw, and of the baseline's."""
        names = {package.name for package in sites.packages}
        if judged.measurement.explanation is not None:
            names.update(needed_by_torch())
        if isinstance(judged.baseline, Baseline):
            names.update(judged.baseline.environment.packages)
        if not names:
            return judged
        environment = replace(judged.measurement.environment, packages=versions(names))
        return judged.explained(replace(judged.measurement, environment=environment))

    def explain_call_out_of_memory(self, error: BaseException) -> None:
        """Run the call that ran out of memory once more, recorded, and report where it went."""
        if not self.measures_itself and self._at_call is not None:
            self.explain_out_of_memory(error, self._call_subject)

    def explain_out_of_memory(self, error: BaseException, subject: Callable[[Device], Subject]) -> None:
        """Report where memory went if ``error`` says that it ran out; the error stays as it is.

        ``subject`` is what to record on a device, one of `Device.everywhere`.
        """
        if self.context.sites is None or not self._policy.should_explain_error(error):
            return
        if self.judging.ranks.rank is not None:
            return  # the others, which have not failed, would not run it again
        # What the failed frames hold has to go, or memory would run out earlier this time.
        clear_frames(error)
        with suppress(*RAISED_BY_A_STEP):
            device = self.context.named(gpu_that_ran_out(error))
            explanation = self.context.explain_out_of_memory(subject(device), device)
            if explanation is not None:
                self._policy.report_out_of_memory(explanation)

    def _call_subject(self, device: Device) -> Subject:
        """Return the call as what is to be recorded on a device, one of `Device.everywhere`."""
        at = self.device.everywhere.index(device)
        ownership = self._ownership.everywhere[at]

        def prepare() -> None:
            # The call begins again as it did: what it left on its fixtures and its instance is the first run's.
            self._ownership.clear_left_gradients(self.item)
            if self._random is not None:
                self._random.restore()
            attributes = self._instance_dict()
            for name in [name for name in attributes if name not in self._attributes]:
                dict.pop(attributes, name)

        assert self._at_call is not None, "the call has begun"
        own_at_call, live_at_call = (readings[at] for readings in self._at_call)

        def left() -> Left:
            own_gained = ownership.own(self.item).total - own_at_call
            gained = device.live() - live_at_call - own_gained
            blocks = self.device.known() - self._known_at_call
            return Left(max(0, gained), frozenset(address for address, _ in blocks))

        def register(owners: TensorOwners) -> None:
            values = self._ownership.values(self.item)
            owners.within(values)
            owners.inputs(values)

        return Subject(
            lambda _: call_again(self.item),
            own=lambda: list(ownership.storages(self.item)),
            own_bytes=lambda: ownership.own(self.item).total,
            register=register,
            prepare=prepare,
            left=left,
            once=True,
        )

    def _instance_dict(self) -> dict[str, object]:
        return instance_dict(getattr(self.item, "instance", None)) or {}

    def failed(self, *errors: BaseException) -> None:
        """Note ``errors``: their tracebacks keep the test's tensors alive until `release`."""
        self._errors += errors

    def release(self) -> None:
        """Release everything that the test's errors and this run hold."""
        for error in self._errors:
            clear_frames(error)
        self._errors.clear()
        self._at_call = None
        self._made_by_call = None
        self.device.close()


def _under_routing(workload: Workload, routing: Routing | None, reads: UnknownReads) -> Workload:
    """Return the workload with the assumption of the settings in its config, if a figure may follow from it."""
    config = workload.config or ""
    if routing is None or routing not in reads.routed or "routing=" in config:
        return workload
    return replace(workload, config=",".join(filter(None, (config, f"routing={routing}"))))


def _numbered(name: str, taken: set[str]) -> str:
    """Return ``name``, or ``name-2``, ``name-3``, ...: the first that is not taken."""
    numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(candidate for candidate in numbered if candidate not in taken)
