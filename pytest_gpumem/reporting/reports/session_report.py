"""The data in a session's report, or in the merged report from all shards. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pytest_gpumem.base.units import UnitSystem, counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.annotations import ADDED, KEY, Count, Form, Range
from pytest_gpumem.facts.values.option_words import UpdateMode
from pytest_gpumem.facts.values.selection import Selection
from pytest_gpumem.judging.baselines.selecting import unused_baselines
from pytest_gpumem.judging.baselines.update import ACCEPTS
from pytest_gpumem.judging.gate.baseline import Key
from pytest_gpumem.judging.gate.causes import Causes, causes_of
from pytest_gpumem.judging.gate.verdict import SKIPPED, MetricVerdict
from pytest_gpumem.reporting.reports.results import TestResult, accounting, nothing_gated, nothing_recorded
from pytest_gpumem.reporting.reports.values import change, shown

_MOST_NAMED = 3
STORE = "store: "
"""The beginning of each line about the store."""


def _growth(grown: MetricVerdict, units: UnitSystem) -> str:
    """Return a clause: ``"peak allocated went from 4.2 MB to 16.8 MB (+300.0 %)"``."""
    old, new = (shown(grown.metric, value, units) for value in (grown.baseline, grown.value))
    return f"{METRICS[grown.metric].title} went from {old} to {new} ({change(grown, units)})"


def _renamed_and_grown(result: TestResult, units: UnitSystem) -> str:
    """Return a sentence on a new test with worse figures than its likely former name."""
    renamed, verdict = result.renamed, result.verdict
    assert renamed is not None, "it was renamed"
    assert renamed.grown is not None, "it has grown"
    return (
        f"{verdict.nodeid}: renamed? It has no baseline, and an unused baseline ({renamed.nodeid}) has the same step, batch "
        f"and device: {_growth(renamed.grown, units)}. Accept it with `{renamed.accept}`; if they are "
        f"different tests, remove the unused baseline with `{renamed.prune}`"
    )


@dataclass(frozen=True, slots=True)
class Terms:
    """The session's options."""

    baseline: bool = False
    """True with ``--gpumem-baseline``."""
    strict: bool = False
    """True with ``--gpumem-strict``."""
    update: UpdateMode | None = None
    """The mode from ``--gpumem-update``, such as ``new`` or ``all``; ``None`` without the option."""
    units: UnitSystem = "si"
    """The unit system of texts for people: ``si`` or ``iec``."""
    against: str | None = field(default=None, metadata=ADDED)
    """The slug of the real GPU whose baselines an emulated GPU was compared with (``--gpumem-against``); otherwise ``None``.
    """

    @property
    def asked_for(self) -> str:
        """The session's options that gate or record, or ``measuring only`` without such options."""
        options = [
            *(["--gpumem-baseline"] if self.baseline else []),
            *(["--gpumem-strict"] if self.strict else []),
            *([f"--gpumem-update={self.update}"] if self.update else []),
        ]
        return " ".join(options) or "measuring only"


_StoredKey = Annotated[
    tuple[str, Key],
    Form(
        tuple[str, str, str, str],
        lambda stored: (stored[0], stored[1].file, stored[1].test, stored[1].name),
        lambda read: (read[0], Key(*read[1:])),
    ),
]


@dataclass(frozen=True, slots=True)
class StoreState:
    """The store's baselines on the session's devices, as they are after the session."""

    baselines: tuple[_StoredKey, ...] = ()
    """The baselines, each as ``[device's slug, file, test, measurement]``."""
    gone: frozenset[str] = frozenset()
    """Test files that have baselines but no longer exist."""
    functions: tuple[str, ...] = ("test",)
    """pytest's setting ``python_functions``. A baseline whose function has another name belongs to a script."""


@dataclass(frozen=True)
class SessionReport:
    """A session's report, or the merged report from all its shards."""

    ended: str
    """When the session ended, in UTC: ``2026-11-21T16:20:05Z``."""
    version: str
    """The version of pytest-gpumem."""
    commit: str | None = None
    """The abbreviated hash of the commit; ``None`` outside of a git repository."""
    terms: Terms = Terms()
    """The session's options."""
    results: tuple[TestResult, ...] = ()
    """The measured tests with a result, sorted by file and test."""
    not_run: tuple[tuple[str, str], ...] = ()
    """The selected tests without a result, each as ``[file, test]``, sorted."""
    selection: Selection = field(default_factory=Selection)
    """The collected and the selected tests, which ``gpumem merge`` needs to find unused baselines."""
    stored: StoreState = StoreState()
    """The store's state after the session."""
    closing_lines: tuple[str, ...] = field(default=(), metadata={KEY: "said"})
    """Lines about the store, which begin with ``store: ``, and notes on several measurements at once."""
    errors: tuple[str, ...] = ()
    """Problems other than those in the results and in the following keys. If nothing was gated, only ``problems`` says so."""
    ended_early: str | None = None
    """The reason why not all selected tests were run, as a clause, for example Ctrl-C or ``--maxfail``."""
    not_collected: tuple[str, ...] = ()
    """The files with collection errors, sorted."""
    shards: Annotated[int, Range(1, 1_000_000)] = 1
    """The number of merged reports."""
    unmeasured_failures: Count = field(default=0, metadata={KEY: "others_failed"})
    """The number of failed tests that are not measured, including failures in set-up or tear-down. If a plugin reruns a test,
    the last run counts.
    """
    merged: bool = False
    """True if ``gpumem merge`` made the report, so no further shard can run missing tests."""
    unmeasured_shards: tuple[tuple[tuple[str, str], ...], ...] = ()
    """The tests in each shard without any measurement, each as ``[file, test]``, sorted."""

    @property
    def accounting(self) -> str:
        """The line that accounts for every measured test."""
        return accounting(self.results, len(self.not_run), self.terms.update)

    @property
    def not_accepted(self) -> list[TestResult]:
        """The results without the tests whose figures became the new baseline."""
        return [result for result in self.results if not result.is_accepted_by(self.terms.update)]

    @cached_property
    def causes(self) -> Causes:
        """The causes of growth in the tests. Growth is ignored if an update made it the new baseline."""
        return causes_of(
            (result.verdict for result in self.not_accepted),
            measured=len({result.verdict.nodeid for result in self.results if not result.verdict.unmeasured}),
        )

    @property
    def of_store(self) -> tuple[str, ...]:
        """The lines about changes to the store."""
        return tuple(line for line in self.closing_lines if line.startswith(STORE))

    @property
    def of_measuring(self) -> tuple[str, ...]:
        """The notes on several measurements at once, for example on convolutions, or on tests with a shared GPU."""
        return tuple(line for line in self.closing_lines if not line.startswith(STORE))

    @property
    def problems(self) -> tuple[str, ...]:
        """The sentences that say why the session is red, even if no test failed.

        With ``--gpumem-baseline``:

        - measured tests ran, and none was compared with a baseline: ``nothing was gated: ...``. If budgets or relations were
          checked, the sentence is ``no baseline was compared: ...``. A skipped test counts as ``unmeasured``. This also holds
          for a skipped test that has baselines but lost its marker
        - no measured test was selected, and a test in the session has baselines, but only for other devices. For example,
          the markers were removed, and the machine has no GPU
        - the store does not exist, but git has it. The sentence names the command that restores the store
        - a test that may be [renamed](../concepts/verdicts.md#renamed-tests) has grown

        With ``--gpumem-strict``:

        - no measured test was selected, and the session also has ``--gpumem-baseline``
        - the settings leave out tests that have baselines on this device. See
          [tests that settings leave out](../concepts/verdicts.md#tests-that-settings-leave-out)

        With ``--gpumem-update`` and no gate:

        - measured tests ran, and none was measured, for example without a GPU (``nothing was recorded: ...``). Tests that skip
          themselves do not count

        In any session:

        - baselines or a report could not be written
        - the gate failed a test, and a plugin or a ``conftest.py`` reported another result. With ``--gpumem-baseline`` or
          ``--gpumem-strict`` also: a measured test failed by itself, and was reported as passed. An expected failure
          (``xfail``) does not count
        """
        problems = list(self.errors)
        if self.ended_early is not None:
            problems.append(f"the session ended early: {self.ended_early}")
        problems += [f"{file} could not be collected" for file in self.not_collected]
        if self.unmeasured_failures:
            count = counted(self.unmeasured_failures, "test that is", "tests that are")
            problems.append(f"{count} not measured failed")
        problems += self.renamed_and_grown if self.terms.baseline and self.terms.update != "all" else []
        return (*problems, *([self.nothing_done] if self.nothing_done is not None else self.idle_parts))

    @property
    def renamed_and_grown(self) -> list[str]:
        """A sentence for each new test with worse figures than the baseline of its likely former name."""
        return [_renamed_and_grown(result, self.terms.units) for result in self.results if result.has_grown_renamed]

    @property
    def renamed_alike(self) -> str | None:
        """A sentence on new tests whose figures are no worse than their former name's baseline; ``None`` without such tests."""
        alike = [
            f"{result.verdict.nodeid} (was {result.renamed.nodeid})"
            for result in self.results
            if result.renamed is not None and result.renamed.grown is None
        ]
        if not alike:
            return None
        count = counted(len(alike), "new test has", "new tests have")
        named = ", ".join([*alike[:_MOST_NAMED], *(["..."] if len(alike) > _MOST_NAMED else [])])
        return f"renamed? {count} figures no worse than an unused baseline for the same step, batch and device: {named}"

    @property
    def warnings(self) -> list[str]:
        """Sentences on settings without an effect, left-out tests and renamed tests, which do not change the exit status."""
        grown = [sentence for sentence in self.renamed_and_grown if sentence not in self.problems]
        return [*self.selection.warnings, *grown, *([self.renamed_alike] if self.renamed_alike is not None else [])]

    @property
    def idle_parts(self) -> list[str]:
        """For a merged report: a sentence for each device or shard on which no figure was compared.

        `problems` has these sentences if other devices or shards did compare figures. So a single device or shard without a
        comparison makes the report red. Tests that skip themselves do not count, because they would skip on every machine.
        """
        if not (self.merged and self.terms.baseline):
            return []
        sentences = []
        by_device: dict[str, list[TestResult]] = {}
        for result in self.results:
            for device in {verdict.measurement.environment.device for verdict in result.verdict.verdicts}:
                by_device.setdefault(device, []).append(result)
        for device, results in sorted(by_device.items()):
            sentence = nothing_gated(results, ACCEPTS[self.terms.update])
            if sentence is not None:
                sentences.append(f"on {device} {sentence}")
        unmeasured = {
            (result.verdict.file, result.verdict.test): result
            for result in self.results
            if result.verdict.unmeasured not in (None, SKIPPED)
        }
        for tests in self.unmeasured_shards:
            sentence = nothing_gated([unmeasured[test] for test in tests if test in unmeasured])
            if sentence is not None:
                sentences.append(f"in one shard {sentence}")
        return sentences

    @property
    def nothing_gated(self) -> str | None:
        """A sentence if the session should have compared baselines but compared none; ``None`` otherwise."""
        if not self.terms.baseline:
            return None
        if self.terms.strict and not self.results:
            return "nothing was gated: no measured test was selected"
        if self.merged and not self.results and self.selection.collected:
            count = len(self.selection.collected)
            return (
                f"nothing was gated: {counted(count, 'measured test was', 'measured tests were')} collected, and none was run "
                "in any shard"
            )
        return nothing_gated(self.results, ACCEPTS[self.terms.update])

    @property
    def nothing_done(self) -> str | None:
        """A sentence if the session should have gated or recorded something but did not; ``None`` otherwise."""
        if self.terms.update is None or self.terms.baseline:
            return self.nothing_gated
        return nothing_recorded(self.results)

    @property
    def passed(self) -> bool:
        """True if the gate is green: all selected tests ran, no test failed (measured or not), and no other problem exists."""
        return self.why_red is None

    @property
    def why_red(self) -> str | None:
        """The reasons why the session did not pass, as clauses on a single line; ``None`` if it passed."""
        failed = sum(result.failed for result in self.results)
        clauses = list(self.problems)
        if failed:
            clauses.append(f"{counted(failed, 'measured test')} failed")
        if self.not_run:
            clauses.append(f"{counted(len(self.not_run), 'measured test')} did not finish")
        return "; ".join(clauses) or None

    @property
    def unused(self) -> list[tuple[str, Key]]:
        """The baselines whose tests no longer exist or are no longer measured, as (slug, key)."""
        return unused_baselines(
            self.stored.baselines,
            measured=self.selection.collected | self.selection.uncollected,
            whole_files=self.selection.collected_files,
            exists=lambda file: file not in self.stored.gone,
        )
