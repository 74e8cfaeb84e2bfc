"""Update the store at the end of a session, and report unused baselines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import BackendError, IncompleteChangeError, StoreError
from pytest_gpumem.base.git import commit_of, restoring_command
from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.judging.baselines.changes import Source, changes_of
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.location import backend_of
from pytest_gpumem.judging.baselines.selecting import unused_baselines, unused_line
from pytest_gpumem.judging.gate.speed import not_compared_with
from pytest_gpumem.judging.gate.verdict import NOT_MARKED
from pytest_gpumem.reporting.reports.session_report import STORE, StoreState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from pytest_gpumem.facts.values.option_words import UpdateMode
    from pytest_gpumem.facts.values.selection import Selection
    from pytest_gpumem.judging.baselines.store import Store
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.reporting.reports.results import TestResult


@dataclass(frozen=True, slots=True)
class StoreUpdate:
    """The result of writing into the store, even if some baselines could not be written."""

    lines: list[str]
    """Lines about the update, which the session prints at its end."""
    results: list[TestResult]
    """The session's results. ``unwritten`` is set in results which could not be written."""
    error: str | None = None
    """The reason why not everything was written, as a sentence."""


@dataclass(frozen=True, slots=True)
class StoreAtEnd:
    """The store at a session's end. The methods raise `StoreError` or `BackendError` if the store cannot be read."""

    store: Store
    settings: Settings
    root: Path

    def restorable(self) -> str | None:
        """Return a sentence if the store's folder was deleted and git can restore it; otherwise ``None``."""
        settings = self.settings
        backend = backend_of(settings.store, settings.store_base)
        restore = restoring_command(backend.root) if isinstance(backend, Folder) else None
        return None if restore is None else f"{settings.store} is gone, and git has it: `{restore}` restores it"

    def write(self, results: list[TestResult], mode: UpdateMode) -> StoreUpdate:
        """Write the results which ``mode`` accepts. If writing fails, the returned value contains the error."""
        try:
            return StoreUpdate(self._write(results, mode), results)
        except IncompleteChangeError as error:
            line = f"{STORE}{counted(error.written, 'baseline')} written ({mode}), the others were not"
            marked = [
                replace(result, unwritten=(result.verdict.file, result.verdict.test) in error.unwritten_tests)
                for result in results
            ]
            return StoreUpdate([line], marked, f"baselines were not written: {error}")
        except (StoreError, BackendError) as error:
            marked = [replace(result, unwritten=True) for result in results]
            return StoreUpdate([], marked, f"baselines were not written: {error}")

    def _write(self, results: list[TestResult], mode: UpdateMode) -> list[str]:
        held_back = [result for result in results if result.passed and result.is_held_back_by(mode)]
        passed = [result.verdict for result in results if result.passed and result not in held_back]
        reason = self.settings.reason
        source = Source(datetime.now(timezone.utc).date().isoformat(), commit_of(self.root), reason)
        changes = changes_of(self.store, mode, passed, source)
        if changes.any:
            self.store.change(changes.entries, changes.removals)
        not_passed = len(results) - len(passed) - len(held_back)
        note = f"; {not_passed} not written, because the test failed or was skipped" if not_passed else ""
        note += (
            f"; {len(held_back)} not written, because it may be a renamed test whose memory grew" if held_back else ""
        )
        left_out = changes.times_left_out
        if left_out:
            note += f"; {not_compared_with(len(left_out), left_out[0])}"
        if reason is not None:
            note += f"; the reason is kept with {sum(entry.reason == reason for entry in changes.entries.values())}"
        unchanged = len(changes.measured) - len(changes.entries)
        line = (
            f"store: {counted(len(changes.entries), 'baseline')} written ({mode}), "
            f"{counted(unchanged, 'left as it was', 'left as they were')}{note}"
        )
        return [line, *_no_longer_measured(results)]

    def unused(self, results: list[TestResult], selection: Selection) -> tuple[str, ...]:
        """Return a line about baselines whose tests no longer exist, after a session has run all its tests.

        Args:
            results: The session's results.
            selection: The tests whose baselines are in use.

        Returns:
            A tuple with one line, or an empty tuple if no baseline is unused.
        """
        if not (self.settings.baseline or self.settings.update):
            return ()
        unused_keys = unused_baselines(
            [entry for slug in sorted(self._compared_slugs(results)) for entry in self.store.keys(slug)],
            # Count all tests with a result as measured. If such a test is no longer measured, a separate line says so
            # (`_no_longer_measured`).
            measured=selection.measured
            | selection.uncollected
            | {(result.verdict.file, result.verdict.test) for result in results},
            whole_files=selection.files,
            exists=self._exists,
        )
        return (unused_line(unused_keys),) if unused_keys else ()

    def stored(self, results: list[TestResult], functions: Sequence[str]) -> StoreState:
        """Return the store's keys for the report, from which `gpumem merge` finds unused baselines.

        A single shard cannot find them, because it does not know the tests in the other shards.

        Args:
            results: The session's results.
            functions: pytest's setting ``python_functions``.
        """
        if not (self.settings.baseline or self.settings.update):
            return StoreState()
        slugs = self._compared_slugs(results)
        keys = [entry for slug in sorted(slugs) for entry in self.store.keys(slug)]
        missing_files = frozenset(key.file for _, key in keys if not self._exists(key.file))
        return StoreState(tuple(keys), missing_files, tuple(functions))

    def of_other_devices(self, unmeasured: Collection[tuple[str, str]]) -> list[str]:
        """Return a sentence if a session measured nothing, but ran tests which have baselines on other devices.

        Args:
            unmeasured: The tests without a measurement, as pairs (file, test).
        """
        stored = self.store.keys(files={file for file, _ in unmeasured}) if unmeasured else ()
        slugs = {(key.file, key.test): slug for slug, key in stored if (key.file, key.test) in unmeasured}
        if not slugs:
            return []
        (file, test), *more = sorted(slugs)
        count = counted(len(slugs), "test has", "tests have")
        return [
            (
                f"nothing was gated: no measured test was selected, and {count} baselines of other devices "
                f"({', '.join(sorted({*slugs.values()}))}): {file}::{test}{', ...' if more else ''}"
            )
        ]

    def _compared_slugs(self, results: list[TestResult]) -> set[str]:
        """Return the slugs of the devices whose baselines the results were compared with."""
        measured = {verdict.measurement.environment.slug for result in results for verdict in result.verdict.verdicts}
        return {self.settings.compared_slug(slug) for slug in measured}

    def _exists(self, file: str) -> bool:
        return (self.root / file).exists()


def _no_longer_measured(results: Iterable[TestResult]) -> list[str]:
    """Return a line about tests with baselines which are no longer measured. An update does not change these baselines."""
    tests = [result.verdict for result in results if result.verdict.missing and not result.verdict.verdicts]
    if not tests:
        return []
    first = tests[0]
    count = counted(len(tests), "test has", "tests have")
    mend = f"mark the test again, or remove its baselines with `{command_name()} prune {first.nodeid}`"
    return [
        (
            f"store: {count} baselines here and {word_form(len(tests), 'is', 'are')} not measured any more "
            f"({first.nodeid}{', ...' if len(tests) > 1 else ''}); no update changes them: "
            f"{mend if first.unmeasured == NOT_MARKED else first.unmeasured}"
        )
    ]
