"""This plugin's session in a pytest process: its settings, its measured tests, and its plugins."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.base.errors import BudgetError, LaunchError, SettingsError
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.plugin.config.marker import remember_markers
from pytest_gpumem.plugin.config.options import OPTIONS, is_measured
from pytest_gpumem.plugin.config.selection import (
    MeasuredTest,
    add_markers,
    idle_patterns,
    measured_test_of,
    whole_files_of,
    without_group,
)
from pytest_gpumem.plugin.config.settings import check_device, settings_of
from pytest_gpumem.plugin.config.unread import unread_settings
from pytest_gpumem.plugin.runtest.one_process import OneProcess
from pytest_gpumem.plugin.session import BEGAN
from pytest_gpumem.plugin.session.exit_status import EndOfProcess, is_lost
from pytest_gpumem.plugin.session.rank_session import RankSession, ranks_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.judging.baselines.unused import UnusedBaselines
    from pytest_gpumem.measuring.devices.registry import DeviceFactory, Devices
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.session.controller import Controller
    from pytest_gpumem.plugin.session.rank_hooks import RankHooks
    from pytest_gpumem.plugin.session.session_baselines import SessionBaselines
    from pytest_gpumem.plugin.session.turns import Turns
    from pytest_gpumem.reporting.reports.session_report import SessionReport


class GpumemSession:
    """This plugin's session in a pytest process.

    The session reads the settings. After the collection, the session selects the measured tests and registers the plugins
    for measuring, gating and reporting. With pytest-xdist, the controller and each worker have their own session.
    """

    def __init__(self, config: pytest.Config, files: set[str], not_collected: set[str], skipped: set[str]) -> None:
        """Begin a session.

        Args:
            config: pytest's configuration.
            files: The files and folders that were collected without an error. This set and the next two grow during the
                collection.
            not_collected: The files and folders in which pytest had a collection error.
            skipped: The files that skipped themselves during their import.

        Raises:
            pytest.UsageError: A setting is wrong, or a file in the store has a mistake.
        """
        self._config = config
        self._files = files
        self._not_collected = not_collected
        self._skipped = skipped
        self._worker = os.environ.get("PYTEST_XDIST_WORKER") if hasattr(config, "workerinput") else None
        try:
            self.settings: Settings = settings_of(config)
        except SettingsError as error:
            raise pytest.UsageError(str(error)) from None
        self.selection = Selection()
        self._measured: dict[pytest.Item, MeasuredTest] = {}
        self._store: Store | None = None
        self._controller: Controller | None = None
        self._gate_typed = any(config.getoption(option.dest) for option in OPTIONS if option.wants_result)
        self._wrong_launch: str | None = None
        self._ranks = self._ranks_of(config)
        if self._ranks.rank is not None and config.getoption("gpumem_pack"):
            raise pytest.UsageError(
                "--gpumem-pack shares GPUs among the workers of pytest-xdist, and torchrun gives each rank a GPU of its own; "
                "leave the option out"
            )
        self._rank_hooks: RankHooks | None = None
        self._turns: Turns | None = None
        self._end: EndOfProcess | None = None
        if self._worker is not None:
            if self.settings.explicit:
                from pytest_gpumem.measuring.devices.sharing import give_worker_its_gpu

                give_worker_its_gpu(self._worker)
            return
        if self.settings.baseline or self.settings.update is not None:
            from pytest_gpumem.plugin.session.session_store import check_store

            check_store(self.store(), self.settings)
        if self.settings.pack and getattr(config.option, "maxschedchunk", 1) is None:
            # Let pytest-xdist send single tests to its workers. Otherwise the first worker would get all of the largest
            # tests.
            config.option.maxschedchunk = 1
        if self._asks_for_a_gate() or _distributes(config):
            self._register_controller()
        if self.settings.gates:
            self._end = EndOfProcess(partial(is_lost, self))

    def _ranks_of(self, config: pytest.Config) -> OneProcess:
        """Return a `RankSession` if this process is a rank, otherwise a `OneProcess`.

        If the launcher's environment variables are wrong, a session with a typed option such as ``--gpumem-baseline`` fails
        at once. Any other session fails only if it measures a test.
        """
        try:
            ranks = ranks_of(self.settings.rank_timeout, os.environ)
            if ranks.rank is None or (self._worker is None and not _distributes(config)):
                return ranks
            raise LaunchError(
                f"this is {ranks.rank}, started by torchrun, and pytest-xdist (-n, --tx) would give its tests to processes "
                "that are not ranks: leave -n out (-p no:xdist), or run pytest without torchrun"
            )
        except LaunchError as error:
            if self._gate_typed and self._worker is None:
                raise pytest.UsageError(str(error)) from None
            self._wrong_launch = str(error)
            return OneProcess()

    def _asks_for_a_gate(self) -> bool:
        settings = self.settings
        return settings.baseline or settings.strict or settings.update is not None or bool(settings.report)

    @property
    def root(self) -> Path:
        """The root directory, to which paths of test files are relative."""
        return self._config.rootpath

    def mark(self, items: list[pytest.Item]) -> None:
        """Add the marker to the tests named by the setting ``mark``."""
        add_markers(items, self.settings.mark)

    def keep_measured(self, items: list[pytest.Item]) -> None:
        """On an emulated GPU, deselect all tests without a measurement, because they may need values which are not computed
        there.
        """
        if not self.settings.device.startswith(EMULATED):
            return
        no_longer_measured = self._no_longer_measured(items)
        unmeasured = [item for item in items if not is_measured(item) and item not in no_longer_measured]
        if unmeasured:
            items[:] = [item for item in items if is_measured(item) or item in no_longer_measured]
            self._config.hook.pytest_deselected(items=unmeasured)

    def has_collected(self, node: pytest.Collector) -> None:
        """On an emulated GPU, store in ``node`` which uncomputed values were read while pytest collected ``node``."""
        if not self.settings.device.startswith(EMULATED) or "torch" not in sys.modules:
            return
        from pytest_gpumem.emulating.host_values.scope import current

        values = current()
        if values is not None:
            from pytest_gpumem.plugin.runtest.fixture_setup import note_import

            note_import(node, values.reads.take_trouble(), values.reads.take_others())

    def header(self) -> str | None:
        """Return the line for pytest's header on an emulated GPU; otherwise ``None``."""
        if not self.settings.device.startswith(EMULATED):
            return None
        return (
            f"gpumem: {self.settings.device}: bytes are those of torch's own allocator, values of large tensors are not "
            "computed, steps are not timed; tests that are not measured are deselected"
        )

    def collected(self, everything: list[pytest.Item], selected: list[pytest.Item]) -> None:
        """Find the measured tests and prepare their measurements, after pytest has collected and selected all tests.

        Args:
            everything: All collected tests.
            selected: The selected tests. If there is an error, a pytest-xdist worker empties this list instead of raising
                the error.

        Raises:
            pytest.UsageError: A marker has a mistake or names an unknown device. Markers on deselected tests are checked as
                well.
        """
        if self._has_found_measured(everything, selected):
            self._select(everything, selected)

    def _refuse(self, error: str, selected: list[pytest.Item]) -> None:
        """Raise ``pytest.UsageError``.

        In a pytest-xdist worker, deselect all tests instead, and let the controller raise the error.
        """
        if self._worker is None:
            raise pytest.UsageError(error) from None
        # In a worker, an exception would look like a crash. So store the error for the controller, where it ends the
        # session.
        self.selection = Selection(error=error)
        selected.clear()

    def _has_found_measured(self, items: list[pytest.Item], selected: list[pytest.Item]) -> bool:
        """Find the measured tests. Return False for a mistake in a marker, a setting or a device's name."""
        factories = self._device_factories()
        names = [*factories, "auto"]
        try:
            check_device(self.settings, names, typed=self._config.getoption("gpumem_device") is not None)
            pairs = ((item, measured_test_of(item, self.settings, names)) for item in items)
            self._measured = {item: measured for item, measured in pairs if measured is not None}
        except (BudgetError, SettingsError) as error:
            self._refuse(str(error), selected)
            return False
        for item in self._measured:
            remember_markers(item)
        return True

    def _select(self, everything: list[pytest.Item], items: list[pytest.Item]) -> None:
        whole_files = whole_files_of(self._config, self._files)
        selected = {item: self._measured[item] for item in items if item in self._measured}
        self.selection = Selection(
            measured=frozenset((measured.file, measured.test) for measured in selected.values()),
            files=whole_files if len(selected) == len(self._measured) else frozenset(),
            budgets_without_effect=self._settings_without_effect(everything, is_measured=bool(selected)),
            collected=frozenset((measured.file, measured.test) for measured in self._measured.values()),
            collected_files=whole_files,
        )
        no_longer_measured = self._no_longer_measured(items)
        self._look_for_left_out(everything, items)
        if not self._config.option.collectonly:
            if selected and self._wrong_launch is not None:
                self._refuse(self._wrong_launch, items)
                return
            # All ranks have the same options and must have the same tests, so all ranks decide in the same way here.
            if (selected or self._gate_typed) and isinstance(self._ranks, RankSession):
                unmeasured = {item: test for item, (test, _) in no_longer_measured.items()}
                self._join(self._ranks, items, {**selected, **unmeasured})
        self._register_no_longer_measured(no_longer_measured)
        if selected and not self._register_measuring(selected, items, self._unused(everything)):
            return
        if self._worker is None:
            if selected or self.selection.warnings or self.selection.skipped:
                self._register_controller()
            if self._controller is not None:
                self._controller.select(self.selection)
                if self._turns is not None:
                    self._controller.packs(self._turns.packed)
                elif selected and self.settings.pack and self._ranks.rank is not None:
                    from pytest_gpumem.plugin.session.packing import NOT_AMONG_RANKS

                    self._controller.packs(lambda: NOT_AMONG_RANKS)

    def _settings_without_effect(self, everything: list[pytest.Item], *, is_measured: bool) -> tuple[str, ...]:
        """Return warnings about patterns without effect in the settings, and about an unread settings table."""
        idle = idle_patterns(self.settings, everything, self._measured, self._config)
        unread = unread_settings(self._config) if is_measured or self._gate_typed else None
        return (*idle, *([] if unread is None else [unread]))

    def _no_longer_measured(
        self, items: list[pytest.Item]
    ) -> Mapping[pytest.Item, tuple[MeasuredTest, tuple[str, ...]]]:
        """Return the selected tests with baselines which are not measured any more, with the names of their measurements in
        the store.
        """
        if not (self.settings.baseline or self.settings.update) or self._config.option.collectonly:
            return {}
        from pytest_gpumem.base.errors import BackendError, StoreError
        from pytest_gpumem.plugin.session.no_longer_measured import no_longer_measured

        try:
            return no_longer_measured(items, self._store_here())
        except (StoreError, BackendError) as error:
            # The store was valid when the session began, so it has changed since then.
            self._refuse(str(error), items)
            return {}

    def _look_for_left_out(self, everything: list[pytest.Item], items: list[pytest.Item]) -> None:
        """Find tests with baselines whose file skipped itself, or which settings exclude from this run."""
        config = self._config
        if not (self.settings.baseline or self.settings.update) or config.option.collectonly:
            return
        from pytest_gpumem.base.errors import BackendError, StoreError
        from pytest_gpumem.plugin.config.command_line import is_whole_run, selects
        from pytest_gpumem.plugin.session.left_out import (
            CollectedFiles,
            deselected,
            files_left_out,
            tests_gone,
            tests_in,
            uncollected,
        )

        is_whole, stored, selection = is_whole_run(config), self._store_here(), self.selection
        files = CollectedFiles(self._files, self._skipped, self._not_collected)
        try:
            skipped = tests_in(self._skipped, stored) if is_whole or not selects(config) else frozenset()
            omitted: tuple[str, ...] = ()
            collected, selected = map(_tests, (everything, items))
            settings = self._left_out_by_name(collected)
            if is_whole:
                sentence = deselected(config, collected - selected, stored)
                omitted = files_left_out(config, files, stored) + (() if sentence is None else (sentence,))
                omitted += uncollected(settings, stored)
                living = collected | settings.keys()
                omitted += () if selection.measured else tests_gone(files, living, stored, self.root)
        except (StoreError, BackendError) as error:
            # The store was valid when the session began, so it has changed since then.
            self._refuse(str(error), items)
            return
        self.selection = replace(
            selection,
            measured=selection.measured | skipped,
            collected=selection.collected | skipped,
            skipped=skipped,
            uncollected=frozenset(settings),
            omitted=omitted,
        )

    def _left_out_by_name(self, tests: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
        """Return the tests in collected files which ``python_functions`` or ``python_classes`` exclude, each with the
        setting.

        Raises:
            StoreError: A file in the store has a mistake.
            BackendError: The store cannot be read.
        """
        from pytest_gpumem.plugin.session.left_out import left_out_by_name

        files = self.selection.collected_files
        return left_out_by_name(self._config, self.store().keys(files=files), tests, files)

    def living(self, everything: list[pytest.Item]) -> frozenset[tuple[str, str]]:
        """Return tests which still exist: the measured tests, and the tests which ``python_functions`` or
        ``python_classes`` exclude.

        Raises:
            StoreError: A file in the store has a mistake.
            BackendError: The store cannot be read.
        """
        return self.selection.measured | self._left_out_by_name(_tests(everything)).keys()

    def _store_here(self) -> SessionBaselines:
        from pytest_gpumem.plugin.session.session_baselines import SessionBaselines

        return SessionBaselines(self.store(), self._ranks.rank, self._compared_slug)

    def _compared_slug(self, device: str | None) -> str | None:
        """Return the slug of the baselines with which a device's figures are compared; ``None`` if the device is not
        available.

        If ``device`` is ``None``, use the session's device.
        """
        from pytest_gpumem.measuring.devices.registry import slugs_of

        slug = slugs_of(self._device_factories(), [device or self.settings.device])
        return self.settings.compared_slug(*slug) if slug else None

    def _join(self, ranks: RankSession, items: list[pytest.Item], measured: Mapping[pytest.Item, MeasuredTest]) -> None:
        """Connect to the other ranks. Raises ``pytest.UsageError`` if they do not run and measure the same tests."""
        from pytest_gpumem.base.errors import BoardError, RankLost
        from pytest_gpumem.plugin.session.rank_hooks import RankHooks

        try:
            ranks.join(self.root, self.lost)
            tests, gated = [item.nodeid for item in items], [item.nodeid for item in measured]
            wrong = ranks.differing(tests, gated, sorted(self._not_collected))
        except (BoardError, RankLost) as error:
            raise pytest.UsageError(str(error)) from None
        if wrong is not None:
            raise pytest.UsageError(wrong)
        self._rank_hooks = RankHooks(ranks, {**self._measured, **measured}, self._add_error)
        self._config.pluginmanager.register(self._rank_hooks, "gpumem-ranks")

    def _add_error(self, error: str) -> None:
        """Add an error from another rank to the report. It makes the session fail."""
        if self._controller is not None:
            self._controller.add_error(error)

    def lost(self, why: str) -> None:
        """Report an early end of the session.

        If a rank is lost, this method is called in another thread, because the main thread may wait forever for the lost
        rank.

        Args:
            why: The reason, in one or more lines.
        """
        current = None if self._rank_hooks is None else self._rank_hooks.current
        if self._controller is not None:
            clause = why.partition("\n")[0]
            verdict = None if current is None else current.not_measured(clause, failed_by_itself=True)
            self._controller.lost(None if verdict is None else replace(verdict, failure=why), why)
        else:
            sys.stderr.write(f"gpumem: {why}\n")

    def leave(self, *, passed: bool) -> None:
        """At the end of the process, wait until all ranks have finished their sessions.

        If the session has not ``passed``, the replacement of `os._exit` stays, because an `atexit` function may call
        `os._exit(0)`.
        """
        if self._end is not None:
            self._end.has_come(passed=passed)
        if isinstance(self._ranks, RankSession):
            sys.stdout.flush()
            sys.stderr.flush()
            self._ranks.leave()

    @property
    def reports(self) -> bool:
        """True if this process writes the store and the reports. With several ranks, only the first rank does."""
        return self._ranks.rank is None or self._ranks.rank.is_first

    def finished(self) -> None:
        """In a pytest-xdist worker, send the selection to the controller after all tests."""
        if self._worker is not None:
            output = self._config.workeroutput  # type: ignore[attr-defined]
            output["gpumem"] = to_plain(self.selection)
            if self._turns is not None:
                output["gpumem_packed"] = to_plain(self._turns.packed())

    @property
    def report(self) -> SessionReport | None:
        """The session's report; ``None`` if there is none yet, or if nothing is reported."""
        return self._controller.report if self._controller is not None else None

    def ended_red(self, status: int) -> None:
        """Let the report show failure, because the process ends with the exit status ``status``."""
        if self._controller is not None:
            self._controller.ended_red(status)

    def _device_factories(self) -> dict[str, DeviceFactory]:
        from pytest_gpumem.measuring.devices.registry import factories

        return factories(self.settings.device, self._config.hook.pytest_gpumem_devices(config=self._config))

    def measured_elsewhere(self) -> frozenset[str]:
        """Return the ids of measured tests whose device is not available on this machine."""
        devices = {item: test.budget.device for item, test in self._measured.items()}
        absent = {device for device in {*devices.values()} if self._compared_slug(device) is None}
        return frozenset(without_group(item) for item, device in devices.items() if device in absent)

    def present_devices(self) -> frozenset[str]:
        """Return the slugs of all available devices on this machine."""
        from pytest_gpumem.measuring.devices.registry import slugs_of

        device_factories = self._device_factories()
        return slugs_of(device_factories, device_factories)

    def _unused(self, everything: list[pytest.Item]) -> UnusedBaselines:
        from pytest_gpumem.judging.baselines.unused import UnusedBaselines

        def exists(file: str) -> bool:
            return (self.root / file).exists()

        tests = _tests(everything) | self.selection.uncollected
        return UnusedBaselines(self.store(), tests, self.selection.collected_files, exists)

    def _register_measuring(
        self, measured: dict[pytest.Item, MeasuredTest], items: list[pytest.Item], unused: UnusedBaselines
    ) -> bool:
        """Register the plugins for measuring, and sort ``items`` for packing.

        Return False if the GPU cannot be shared because of an error.
        """
        from pytest_gpumem.base.errors import BackendError, HookError, StoreError
        from pytest_gpumem.measuring.devices.registry import Devices, variables_of_processes
        from pytest_gpumem.plugin.runtest.child_processes import SessionProcesses
        from pytest_gpumem.plugin.runtest.fixture_setup import FixtureSetup
        from pytest_gpumem.plugin.runtest.hooks import Measuring

        devices = Devices(self._device_factories(), self.settings.routing)
        words = {test.budget.device or self.settings.device for test in measured.values()}
        fixtures = FixtureSetup(devices, self.settings.device, measured)
        self._config.pluginmanager.register(fixtures, "gpumem-fixtures")
        measuring = Measuring(
            self._config,
            self.settings,
            devices,
            self.store(),
            measured,
            fixtures,
            self._ranks,
            unused,
            SessionProcesses(variables_of_processes(devices, words), self._config.stash.get(BEGAN, None))
            if self.settings.processes
            else None,
        )
        self._config.pluginmanager.register(measuring, "gpumem-measuring")
        try:
            self._pack(measured, items, devices)
        except (StoreError, BackendError, HookError, OSError) as error:
            self._refuse(f"--gpumem-pack: {error}", items)
            return False
        return True

    def _register_no_longer_measured(self, tests: Mapping[pytest.Item, tuple[MeasuredTest, tuple[str, ...]]]) -> None:
        if not tests:
            return
        from pytest_gpumem.plugin.session.no_longer_measured import NoLongerMeasured

        plugin = NoLongerMeasured(self._config, self.settings, self.store(), tests, self._ranks)
        self._config.pluginmanager.register(plugin, "gpumem-no-longer-measured")

    def _pack(self, measured: dict[pytest.Item, MeasuredTest], items: list[pytest.Item], devices: Devices) -> None:
        # Ranks do not share GPUs. If a rank had to wait for memory before a test, the other ranks would wait for this rank
        # and keep their memory.
        if not self.settings.pack or self._ranks.rank is not None:
            return
        from pytest_gpumem.plugin.session.packing import Planner, largest_first
        from pytest_gpumem.plugin.session.turns import Repeating, Turns

        planner = Planner(self._config, self.settings, devices, self.store())
        shares = planner.shares(measured)
        self._turns = Turns(shares, frozenset(planner.not_shared))
        self._config.pluginmanager.register(self._turns, "gpumem-turns")
        self._config.pluginmanager.register(Repeating(self._turns), "gpumem-repeating")
        if self._worker is not None:
            items[:] = largest_first(items, shares)

    def _register_controller(self) -> None:
        if self._controller is None and self.reports:
            from pytest_gpumem.plugin.session.controller import Controller

            self._controller = Controller(self._config, self.settings, self.store())
            self._config.pluginmanager.register(self._controller, "gpumem-controller")

    def store(self) -> Store:
        """Return this session's store, which is opened only once.

        Raises ``pytest.UsageError`` if its folder or URL does not exist.
        """
        if self._store is None:
            from pytest_gpumem.plugin.session.session_store import open_store

            self._store = open_store(self.settings)
        return self._store


def _tests(items: list[pytest.Item]) -> frozenset[tuple[str, str]]:
    """Return the tests as pairs (file, test)."""
    return frozenset((file, test) for file, _, test in (without_group(item).partition("::") for item in items))


def _distributes(config: pytest.Config) -> bool:
    """Return whether this process is pytest-xdist's controller. A controller collects no tests itself."""
    return bool(config.getoption("numprocesses", None)) or bool(config.getoption("tx", None))
