"""Which tests are explained, and their calls run once more for it."""

from __future__ import annotations

import unittest
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.explain.artifacts import Artifacts
from pytest_gpumem.explain.asking import asks_for_composition
from pytest_gpumem.explain.recording import is_out_of_memory
from pytest_gpumem.explain.sites import Sites
from pytest_gpumem.reports.explanation import out_of_memory_lines
from pytest_gpumem.steps.measuring_context import Explaining
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP, clear_frames

if TYPE_CHECKING:
    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.session.judging import Judging
    from pytest_gpumem.session.selection import Measured
    from pytest_gpumem.session.settings import Settings
    from pytest_gpumem.session.test_run import TestRun
    from pytest_gpumem.values.composition import Explanation


class ExplainingTests:
    """What ``--gpumem-explain`` asks for, of the tests of a session."""

    def __init__(self, config: pytest.Config, settings: Settings, judging: Judging) -> None:
        self._config = config
        self._settings = settings
        self._judging = judging
        self._sites: Sites | None = None

    def of(self, item: pytest.Item, device: Device) -> Explaining | None:
        """How steps of a test are explained; ``None`` under ``--gpumem-explain=never``."""
        if self._settings.explain == "never":
            return None
        if self._sites is None:
            self._sites = Sites(self._config.rootpath)
        artifacts = Artifacts(self._settings.artifacts_folder, item.nodeid, device)

        def ran_out(explanation: Explanation) -> None:
            lines = out_of_memory_lines(explanation, self._settings.units)
            item.add_report_section("call", "gpumem out of memory", "\n".join(lines))

        debugger = bool(self._config.getoption("usepdb", False))
        return Explaining(
            self._sites, artifacts.keep, None if debugger else ran_out, over_time=bool(self._settings.report)
        )

    def wants(self, item: pytest.Item, measured: Measured, measurement: Measurement) -> bool:
        """Whether a measurement is to be explained: its test reads that, it fails by its bytes, or becomes a baseline."""
        if self._settings.explain == "never":
            return False
        # A test that only has the marker has no measurement to read.
        asked = measured.has_fixture and asks_for_composition(getattr(item, "function", None))
        return asked or self._judging.wants_explanation(item, measured, measurement)

    def explain_call(self, item: pytest.Item, measured: Measured, run: TestRun) -> None:
        """The call of a test that only has the marker is run again, recorded, when it is to be explained."""
        if run.measures_itself or run.bench.explaining is None:
            return
        if self.wants(item, measured, run.measurements[-1]):
            run.explain_call(lambda: call_again(item))

    def explain_out_of_memory(self, item: pytest.Item, run: TestRun, error: BaseException) -> None:
        """The call that ran out of memory is run again, recorded; the error stays what it is."""
        explaining = run.bench.explaining
        if run.measures_itself or explaining is None or explaining.ran_out is None or not is_out_of_memory(error):
            return
        clear_frames(error)
        with suppress(*RAISED_BY_A_STEP):
            run.explain_call_out_of_memory(lambda: call_again(item))


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
