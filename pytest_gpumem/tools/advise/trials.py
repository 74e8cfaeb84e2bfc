"""Run the trials on a device: first configs until one fits, and then batch sizes. After Ctrl-C, earlier results are still
reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import ModelError, NotAStep, SubjectError, TrialFailed
from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.tools.advise.largest import OPTIONS, Largest, SizeTrial, largest_of, next_size
from pytest_gpumem.tools.advise.results import DeviceTrials
from pytest_gpumem.tools.advise.search_order import OUT_OF_MEMORY, Trial, recommended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.largest import SizeAxis
    from pytest_gpumem.tools.advise.search_order import Search
    from pytest_gpumem.tools.advise.trial import AdviceSubject

    TryOne = Callable[[AdviceSubject, StepConfig], tuple[Trial, str | None]]
    """Measures a step with a config. Returns the trial, and a clause with the reason why its peak may be too low. The clause is
    ``None`` if the peak is complete."""


@dataclass
class Trials:
    """The trials on a device so far."""

    limit: int | None
    """The memory limit for a step in bytes, or ``None`` without a limit."""
    subject: AdviceSubject
    search: Search
    try_one: TryOne
    say: Callable[[str], object]
    """Prints a part of a progress line, such as ``"[1] fp32 ... "``."""
    where: str = ""
    """The device's name as a prefix for progress lines. Empty if there is only one device."""
    goes_on: bool = False
    """True if an error in the first trial does not end the command, because trials on other devices have results."""
    elsewhere: dict[StepConfig, list[SizeTrial]] = field(default_factory=dict)
    """Trials of batch sizes on other devices, by config. They help to predict sizes, because a step needs nearly the same
    memory on each device. Trials on this device are added."""
    _tried: list[Trial] = field(default_factory=list)
    _largest: dict[StepConfig, Largest] = field(default_factory=dict)
    _lacking: list[str] = field(default_factory=list)
    _warnings: list[str] = field(default_factory=list)

    def run(self, name: str) -> DeviceTrials:
        """Try configs, and then batch sizes if the user requested the largest batch. After Ctrl-C, return the results so far.

        Args:
            name: The device's name.

        Raises:
            SubjectError: The subject cannot run this step, or the search is for the longest sequence and samples have no
                length.
            TrialFailed: The model's own code raised an error in the first trial.
        """
        finished = True
        self._tried += self.search.refused
        self._warnings += self.subject.warnings
        try:
            self._try_configs(self.search.over(self._tried, self.limit, self.subject.samples))
            if self.limit is not None and self.search.size_axis is not None:
                self._find_largest(self.search.size_axis, self.limit)
        except KeyboardInterrupt:
            self.say("interrupted\n")
            finished = False
        lacking = (
            "; ".join([*self._lacking[:1], *dict.fromkeys(trial.doubt for trial in self._tried if trial.doubt)]) or None
        )
        chosen = recommended(self._tried, self.limit)
        warnings = tuple(dict.fromkeys(self._warnings))
        return DeviceTrials(
            name, self.limit, tuple(self._tried), chosen, lacking, self._largest, finished=finished, warnings=warnings
        )

    def _try_configs(self, configs: Iterator[StepConfig]) -> None:
        for number, config in enumerate(configs, start=1):
            self.say(f"[{number}] {self.where}{config} ... ")
            try:
                trial = self._try(self.subject, config)
            except NotAStep as error:
                # The original message tells the author of a test to pass loss=. Here, a function returns the loss.
                problem, no_loss, _ = str(error).partition("; pass loss=")
                mend = "; return (model, batch, loss) from the factory, where loss(output, batch) returns one number"
                raise SubjectError(problem + mend if no_loss else problem) from None
            except TrialFailed as error:
                if not self.goes_on and not self._tried:
                    self.say("failed\n")
                    raise
                trial = Trial(config, why_not=str(error))
            self._tried.append(trial)
            self._say_figure(trial.peak, trial.why_not)

    def _find_largest(self, axis: SizeAxis, limit: int) -> None:
        """Find the largest batch, or the longest sequence, for each config from `Search.configs_for_largest`."""
        start = self.subject.number(axis)
        if start is None:
            model = self.subject.title.partition(",")[0]
            raise SubjectError(f"{OPTIONS[axis]}: the samples of {model} have no length")
        trials_by_config = {trial.config: trial for trial in self._tried}
        for config in self.search.configs_for_largest(self._tried, limit):
            first = trials_by_config[config]
            trials = [SizeTrial(start, first.fits(limit), first.peak)]
            unit = config.accumulate if axis == "samples" else 1
            hints = self.elsewhere.get(config, [])
            # If Ctrl-C interrupts the search, this result is reported.
            self._largest[config] = largest_of(trials, finished=False)
            while (number := next_size(trials, limit, start, unit, hints)) is not None:
                self.say(f"{self.where}{config}, {number:,} {axis} ... ")
                trials.append(size_trial := self._at_size(config, axis, number, limit))
                self._largest[config] = largest_of(trials, finished=False)
                self._say_figure(size_trial.peak, size_trial.why_not)
            self._largest[config] = largest_of(trials)
            self.elsewhere[config] = trials

    def _at_size(self, config: StepConfig, axis: SizeAxis, number: int, limit: int) -> SizeTrial:
        try:
            trial = self._try(self.subject.with_number(axis, number), config)
        except (ModelError, NotAStep, TrialFailed) as error:
            return SizeTrial(number, fits=False, why_not=str(error))
        return SizeTrial(number, trial.fits(limit), trial.peak, "" if trial.why_not == OUT_OF_MEMORY else trial.why_not)

    def _try(self, subject: AdviceSubject, config: StepConfig) -> Trial:
        trial, lacking = self.try_one(subject, config)
        self._lacking += [] if lacking is None else [lacking]
        self._warnings += trial.warnings
        return trial

    def _say_figure(self, peak: int | None, why_not: str) -> None:
        self.say(f"{why_not if peak is None else format_bytes(peak)}\n")
