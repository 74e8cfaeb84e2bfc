"""Compares two revisions: worktrees, runs in turn, a report; and leaves nothing behind, however it ends."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.ab.checkout import clear_leftovers, temporary_folder, worktrees
from pytest_gpumem.ab.experiment import reports_in_turns
from pytest_gpumem.ab.processes import Stopped
from pytest_gpumem.ab.running import Runner
from pytest_gpumem.ab.runs import BASE, HEAD, RunFailed
from pytest_gpumem.ab.verdicts import compare_runs
from pytest_gpumem.git import GitError
from pytest_gpumem.reports.comparison import NOTHING_COMPARED
from pytest_gpumem.session.settings import DEFAULT_TOLERANCES, Settings, SettingsError, read_table, settings_from_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.ab.checkout import Checkout
    from pytest_gpumem.ab.processes import Stop
    from pytest_gpumem.ab.progress import Progress
    from pytest_gpumem.ab.runs import Run, Side
    from pytest_gpumem.git import Revision
    from pytest_gpumem.reports.comparison import Compared
    from pytest_gpumem.units import UnitSystem

SIGNALLED = 128
"""The exit status of a command that a signal ended is this and the signal's number, as shells have it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be compared. ``tolerance`` is the slowdown that is tolerated, as a ratio."""

    checkout: Checkout
    base: Revision
    head: Revision
    arguments: Sequence[str]
    setup: str | None
    most_pairs: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known at the end. ``why`` says why it ended early, and ``exit_status`` is that of the command."""

    report: Compared | None
    units: UnitSystem
    exit_status: int
    why: str | None = None


def _settings_in(root: Path) -> Settings:
    """The settings of the project in head, which say how bytes are judged and shown."""
    try:
        table = read_table(root / "pyproject.toml")
        return settings_from_table(table, "[tool.gpumem]") if table is not None else Settings()
    except SettingsError:
        # pytest has read them: they are those of another version of this package.
        return Settings()


def compare_revisions(plan: Plan, stop: Stop, progress: Progress) -> Ended:
    """Compare until enough has been seen, a run fails, or ``stop`` says so."""
    settings = Settings()
    revisions = {BASE: plan.base, HEAD: plan.head}
    report: Compared | None = None

    def take(side: Side, number: int) -> Run:
        progress.begin(number, side, revisions[side])
        try:
            run = runner.take(side, number, progress.tick)
        except RunFailed as failure:
            raise RunFailed(f"{side} {revisions[side]}: {failure}") from None
        progress.end(run)
        return run

    def compare(pairs: Sequence[tuple[Run, Run]]) -> Compared:
        nonlocal settings
        if len(pairs) == 1:
            settings = _settings_in(Path(pairs[0][1].root))
        return compare_runs(pairs, plan.base, plan.head, plan.tolerance, {**DEFAULT_TOLERANCES, **settings.tolerances})

    try:
        with ExitStack() as stack:
            left = clear_leftovers(plan.checkout)
            if left:
                progress.say(f"removed {left} worktree{'' if left == 1 else 's'} of a comparison that was killed")
            others = plan.checkout.checkouts()
            folder = stack.enter_context(temporary_folder())
            made, notes = stack.enter_context(worktrees(plan.checkout, revisions, folder, stop))
            for note in notes:
                progress.say(note)
            runner = Runner(plan.checkout, made, plan.arguments, plan.setup, folder, stop, others)
            for so_far in reports_in_turns(take, compare, plan.most_pairs):
                report = so_far
    except (RunFailed, GitError) as failure:
        return Ended(report, settings.units, NOTHING_COMPARED, str(failure))
    except Stopped as stopped:
        return Ended(report, settings.units, SIGNALLED + stopped.signum, "interrupted")
    finally:
        progress.clear()
    assert report is not None, "it ended after a pair"
    return Ended(report, settings.units, report.exit_status)
