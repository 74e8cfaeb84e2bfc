"""Select the measurements of a test that are explained, run its call once more, and see if it reads a composition."""

from __future__ import annotations

import unittest
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.baselines.update import entries_to_write
from pytest_gpumem.explain.recording import is_out_of_memory
from pytest_gpumem.gate.baseline import Baseline, baseline_of
from pytest_gpumem.gate.judge import failing_metrics
from pytest_gpumem.reports.explanation import out_of_memory_lines
from pytest_gpumem.torch_support.static_access import reads_any

if TYPE_CHECKING:
    from pytest_gpumem.config.settings import Settings
    from pytest_gpumem.metrics import Kind
    from pytest_gpumem.runtest.judging import Judged, Judging
    from pytest_gpumem.values.composition import Explanation
    from pytest_gpumem.values.option_words import UpdateMode


COMPOSITION = frozenset({"composition", "explanation"})
"""Attributes of a `Measurement` that are there if its step is explained; where other modules read them, by ``explain=True``."""


@dataclass(eq=False, repr=False)
class ExplainPolicy:
    """The choice of one test's measurements that are explained, by ``--gpumem-explain``."""

    config: pytest.Config
    settings: Settings
    judging: Judging

    def should_explain(self, judged: Judged) -> bool:
        """Return whether to explain a measurement: its test reads that, it fails by its bytes, or may become a baseline."""
        return self._is_read or self._should(judged, "memory")

    def should_show_whole_step(self, judged: Judged) -> bool:
        """Return whether its explanation has the step's bytes over time: not where it only may be accepted later.

        No baseline keeps them, and they are three quarters of what a report has of a step.
        """
        only_later = self.settings.may_be_accepted_later and self.settings.update is None
        return not only_later or self._is_read or self._is_told(judged, "memory")

    @property
    def _is_read(self) -> bool:
        # A test that only has the marker has no measurement to read.
        judging = self.judging
        return judging.measured.has_fixture and reads_any(getattr(judging.item, "function", None), COMPOSITION)

    def device_to_explain(self, judged: Judged) -> str | None:
        """Return the GPU whose peak is explained: that by which the test fails, or else that with the largest peak."""
        failing = self.judging.failing(self.judging.verdict([judged]))
        metrics = judged.verdict.metrics
        failed_on = (one.gpu for one in metrics if one.outcome in failing and one.gpu is not None)
        return next(failed_on, judged.measurement.largest_device)

    def should_find_holders(self, judged: Judged) -> bool:
        """Return whether to look for what keeps the tensors that a measurement left: its test fails by them."""
        failing = self.judging.failing(self.judging.verdict([judged]))
        return "retained" in failing_metrics(judged.verdict, failing)

    def should_locate_counts(self, judged: Judged) -> bool:
        """Return whether to find the lines of its counts: it fails by them, or may become a baseline."""
        return self._should(judged, "work")

    def _is_told(self, judged: Judged, kind: Kind) -> bool:
        """Return whether a person is told what it is made of: it fails by it, or all is explained."""
        if self.settings.explain != "on-failure":
            return self.settings.explain == "always"
        failing = self.judging.failing(self.judging.verdict([judged]))
        return bool(failing_metrics(judged.verdict, failing, kind))

    def _should(self, judged: Judged, kind: Kind) -> bool:
        if self._is_told(judged, kind):
            return True
        if self.settings.explain != "on-failure":
            return False
        # What a report is to be accepted from is explained as what is accepted at once.
        mode: UpdateMode | None = "all" if self.settings.may_be_accepted_later else self.settings.update
        earlier = judged.baseline
        if mode is None or earlier is None:
            return False
        if self.settings.update == "all" and isinstance(earlier, Baseline):
            lacks = earlier.composition is None if kind == "memory" else not earlier.tells_lines
            if lacks:
                return True
        key = self.judging.measured.key(judged.measurement.name)
        # Another run's time is no reason: the bytes that would be explained are the same.
        entry = replace(baseline_of(judged.measurement, "", None), runs=None)
        return bool(entries_to_write(mode, {key: (judged.verdict, entry)}, {key: earlier}))

    def should_explain_error(self, error: BaseException) -> bool:
        """Return whether to explain an error: memory ran out, and no debugger is about to show the error's frames."""
        return not self.config.getoption("usepdb", False) and is_out_of_memory(error)

    def report_out_of_memory(self, explanation: Explanation) -> None:
        """Add where memory went when it ran out to the test's report."""
        lines = out_of_memory_lines(explanation, self.settings.units)
        self.judging.item.add_report_section("call", "gpumem out of memory", "\n".join(lines))


def call_again(item: pytest.Item) -> None:
    """Run the call of a test once more, with the same arguments. Not as pytest does it: nothing of it is reported."""
    kind = item.cls if isinstance(item, pytest.Function) else None
    if isinstance(item, pytest.Function) and kind is not None and issubclass(kind, unittest.TestCase):
        # unittest's own way to run a test without collecting its result. An instance with an event loop runs once; what
        # fixtures gave to it goes along.
        instance: Any = item.instance
        again = type(instance)(item.originalname)
        vars(again).update({name: value for name, value in vars(instance).items() if name not in vars(again)})
        again.debug()
    else:
        item.runtest()
