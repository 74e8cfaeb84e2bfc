"""Choose which measurements of a test are explained, and run a test's call once more to record it."""

from __future__ import annotations

import unittest
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.judging.baselines.update import entries_to_write
from pytest_gpumem.judging.gate.baseline import Baseline, baseline_of
from pytest_gpumem.judging.gate.failing import failing_metrics
from pytest_gpumem.measuring.explain.recording import is_out_of_memory
from pytest_gpumem.reporting.reports.explanation import out_of_memory_lines
from pytest_gpumem.torch_support.static_access import reads_any

if TYPE_CHECKING:
    from pytest_gpumem.facts.metrics import Kind
    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.facts.values.option_words import UpdateMode
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.runtest.judging import JudgedMeasurement, Judging


COMPOSITION = frozenset({"composition", "explanation"})
"""The `Measurement` attributes that exist only if a step is explained.

A step is explained if the test function reads such an attribute. If another module reads it, the test has to pass
``explain=True``.
"""


@dataclass(eq=False, repr=False)
class ExplainPolicy:
    """The rules by which one test's measurements are explained, from ``--gpumem-explain``.

    Example:
        Under ``on-failure``, a test that needs 4 MB more has its peak's composition recorded, because the failure lists the
        tensors. A test without growth is not explained, unless its figures become a baseline or it reads
        ``measurement.composition``.
    """

    config: pytest.Config
    settings: Settings
    judging: Judging

    def should_explain(self, judged: JudgedMeasurement) -> bool:
        """Return whether the test reads the composition, fails because of bytes, or may become a baseline."""
        return self._is_read or self._is_needed(judged, "memory")

    def should_show_whole_step(self, judged: JudgedMeasurement) -> bool:
        """Return whether the explanation includes the step's bytes over time.

        A report for a later `gpumem accept` does not need these bytes, because no baseline stores them, and they take three
        quarters of a step's data in a report.
        """
        only_later = self.settings.may_be_accepted_later and self.settings.update is None
        return not only_later or self._is_read or self._is_shown(judged, "memory")

    @property
    def _is_read(self) -> bool:
        # A test that only has the marker has no measurement to read.
        judging = self.judging
        return judging.measured.has_fixture and reads_any(getattr(judging.item, "function", None), COMPOSITION)

    def device_to_explain(self, judged: JudgedMeasurement) -> str | None:
        """Return the GPU whose peak is explained: the GPU with a failing metric, or with the largest peak."""
        failing = self.judging.failing(self.judging.verdict([judged]))
        metrics = judged.verdict.metrics
        failed_on = (metric.gpu for metric in metrics if metric.outcome in failing and metric.gpu is not None)
        return next(failed_on, judged.measurement.largest_device)

    def should_find_holders(self, judged: JudgedMeasurement) -> bool:
        """Return whether to search for holders, because `retained` fails the test."""
        failing = self.judging.failing(self.judging.verdict([judged]))
        return "retained" in failing_metrics(judged.verdict, failing)

    def should_locate_counts(self, judged: JudgedMeasurement) -> bool:
        """Return whether to find the counts' lines, because the counts fail the test or may become a baseline."""
        return self._is_needed(judged, "work")

    def _is_shown(self, judged: JudgedMeasurement, kind: Kind) -> bool:
        """Return whether this session prints the explanation, because metrics of a kind fail or every step is explained."""
        if self.settings.explain != "on-failure":
            return self.settings.explain == "always"
        failing = self.judging.failing(self.judging.verdict([judged]))
        return bool(failing_metrics(judged.verdict, failing, kind))

    def _is_needed(self, judged: JudgedMeasurement, kind: Kind) -> bool:
        """Return whether this session prints the explanation, or a baseline would store it."""
        if self._is_shown(judged, kind):
            return True
        if self.settings.explain != "on-failure":
            return False
        # `gpumem accept` writes baselines from a report, so the report needs the same data as an update with `all`.
        mode: UpdateMode | None = "all" if self.settings.may_be_accepted_later else self.settings.update
        baseline = judged.baseline
        if mode is None or baseline is None:
            return False
        if self.settings.update == "all" and isinstance(baseline, Baseline):
            lacks_explanation = baseline.composition is None if kind == "memory" else not baseline.has_lines
            if lacks_explanation:
                return True
        key = self.judging.measured.key(judged.measurement.name)
        # If only the time is new, no explanation is needed, because the bytes are the same.
        entry = replace(baseline_of(judged.measurement, "", None), runs=None)
        return bool(entries_to_write(mode, {key: (judged.verdict, entry)}, {key: baseline}))

    def should_explain_error(self, error: BaseException) -> bool:
        """Return whether memory ran out and no debugger needs the error's frames. An explanation clears these frames."""
        return not self.config.getoption("usepdb", False) and is_out_of_memory(error)

    def report_out_of_memory(self, explanation: Explanation) -> None:
        """Add the largest rows of memory at an out-of-memory error to the test's report."""
        lines = out_of_memory_lines(explanation, self.settings.units)
        self.judging.item.add_report_section("call", "gpumem out of memory", "\n".join(lines))


def call_again(item: pytest.Item) -> None:
    """Run the call of a test once more, with the same arguments, and without a report from pytest."""
    kind = item.cls if isinstance(item, pytest.Function) else None
    if isinstance(item, pytest.Function) and kind is not None and issubclass(kind, unittest.TestCase):
        # `debug` is unittest's way to run a test without collecting its result. An instance with an event loop runs only
        # once, so a second instance gets the attributes that fixtures set on the first.
        instance: Any = item.instance
        second_instance = type(instance)(item.originalname)
        own_attributes = vars(second_instance)
        own_attributes.update({name: value for name, value in vars(instance).items() if name not in own_attributes})
        second_instance.debug()
    else:
        item.runtest()
