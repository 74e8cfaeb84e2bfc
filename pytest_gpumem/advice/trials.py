"""Trials on one device, one after the other: configs until one fits, then sizes of the batch. Ctrl-C keeps what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.advice.largest import OPTIONS, Largest, SizeTrial, largest_of, next_size
from pytest_gpumem.advice.results import DeviceTrials
from pytest_gpumem.advice.search_order import OUT_OF_MEMORY, Tried, recommended
from pytest_gpumem.advice.trial import SubjectError, TrialFailed
from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.step_config.errors import NotAStep
from pytest_gpumem.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.advice.largest import Sought
    from pytest_gpumem.advice.search_order import Search
    from pytest_gpumem.advice.trial import AdviceSubject
    from pytest_gpumem.step_config.config import StepConfig

    TryOne = Callable[[AdviceSubject, StepConfig], tuple[Tried, str | None]]
    """Returns the figures of a config, and why its peak may be too low, if it may."""


@dataclass
class Trials:
    """The trials of one device, as far as they have come."""

    limit: int | None
    """Bytes that a step may take; ``None`` where nothing has to fit."""
    subject: AdviceSubject
    search: Search
    try_one: TryOne
    say: Callable[[str], object]
    """Is given the progress in pieces of lines."""
    where: str = ""
    """A prefix of each line of progress, where there are several devices."""
    goes_on: bool = False
    """True if an error of the model's own does not end it: there are results of other devices to lose."""
    elsewhere: dict[StepConfig, list[SizeTrial]] = field(default_factory=dict)
    """The sizes that were tried on other devices, where a step takes nearly the same; those of this one are added."""
    _tried: list[Tried] = field(default_factory=list)
    _largest: dict[StepConfig, Largest] = field(default_factory=dict)
    _lacking: list[str] = field(default_factory=list)
    _warnings: list[str] = field(default_factory=list)

    def run(self, name: str) -> DeviceTrials:
        """Try configs, and then sizes of the batch if they are sought, and return what was found until Ctrl-C.

        Args:
            name: The device's.

        Raises:
            SubjectError: The subject gives no such step, or its batch has no such size.
            TrialFailed: The model's own code raised in the first step that was tried.
        """
        finished = True
        self._tried += self.search.refused
        self._warnings += self.subject.warnings
        try:
            self._try_configs(self.search.over(self._tried, self.limit, self.subject.samples))
            if self.limit is not None and self.search.sought is not None:
                self._find_largest(self.search.sought, self.limit)
        except KeyboardInterrupt:
            self.say("interrupted\n")
            finished = False
        lacking = "; ".join([*self._lacking[:1], *dict.fromkeys(one.doubt for one in self._tried if one.doubt)]) or None
        chosen = recommended(self._tried, self.limit)
        warnings = tuple(dict.fromkeys(self._warnings))
        return DeviceTrials(
            name, self.limit, tuple(self._tried), chosen, lacking, self._largest, finished=finished, warnings=warnings
        )

    def _try_configs(self, configs: Iterator[StepConfig]) -> None:
        for number, config in enumerate(configs, start=1):
            self.say(f"[{number}] {self.where}{config} ... ")
            try:
                one = self._try(self.subject, config)
            except NotAStep as error:
                # What steps say for tests, where the loss is an argument.
                problem, no_loss, _ = str(error).partition("; pass loss=")
                mend = "; return (model, batch, loss) from the factory, where loss(output, batch) gives one number"
                raise SubjectError(problem + mend if no_loss else problem) from None
            except TrialFailed as error:
                if not self.goes_on and not self._tried:
                    self.say("failed\n")
                    raise
                one = Tried(config, why_not=str(error))
            self._tried.append(one)
            self._say_figure(one.peak, one.why_not)

    def _find_largest(self, sought: Sought, limit: int) -> None:
        """Find the largest batch of each config that it is sought for."""
        start = self.subject.number(sought)
        if start is None:
            model = self.subject.title.partition(",")[0]
            raise SubjectError(f"{OPTIONS[sought]}: the samples of {model} have no length")
        known = {one.config: one for one in self._tried}
        for config in self.search.sought_for(self._tried, limit):
            first = known[config]
            trials = [SizeTrial(start, first.fits(limit), first.peak)]
            unit = config.accumulate if sought == "samples" else 1
            hints = self.elsewhere.get(config, [])
            # What is known so far stands there after Ctrl-C, too.
            self._largest[config] = largest_of(trials, finished=False)
            while (number := next_size(trials, limit, start, unit, hints)) is not None:
                self.say(f"{self.where}{config}, {number:,} {sought} ... ")
                trials.append(one := self._at_size(config, sought, number, limit))
                self._largest[config] = largest_of(trials, finished=False)
                self._say_figure(one.peak, one.why_not)
            self._largest[config] = largest_of(trials)
            self.elsewhere[config] = trials

    def _at_size(self, config: StepConfig, sought: Sought, number: int, limit: int) -> SizeTrial:
        try:
            one = self._try(self.subject.with_number(sought, number), config)
        except (ModelError, NotAStep, TrialFailed) as error:
            return SizeTrial(number, fits=False, why_not=str(error))
        return SizeTrial(number, one.fits(limit), one.peak, "" if one.why_not == OUT_OF_MEMORY else one.why_not)

    def _try(self, subject: AdviceSubject, config: StepConfig) -> Tried:
        one, lacking = self.try_one(subject, config)
        self._lacking += [] if lacking is None else [lacking]
        self._warnings += one.warnings
        return one

    def _say_figure(self, peak: int | None, why_not: str) -> None:
        self.say(f"{why_not if peak is None else format_bytes(peak)}\n")
