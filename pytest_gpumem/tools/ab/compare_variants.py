"""Compare two variants by runs in turns, in temporary worktrees and cached environments.

The runs alternate: base, head, head, base, base, head, ..., and two neighbours make a pair. If the machine drifts (heat,
load, clocks), both sides are affected equally.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.git import GitError
from pytest_gpumem.base.processes import StopSignal
from pytest_gpumem.base.requirements.errors import InstallationError
from pytest_gpumem.base.terminals import can_redraw
from pytest_gpumem.base.units import counted
from pytest_gpumem.judging.changed_code.marks import ChangedCode
from pytest_gpumem.judging.changed_code.sources import Folders
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.measuring.timing.comparison import FEWEST_PAIRS
from pytest_gpumem.plugin.config.errors import SettingsError
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES, Settings, read_table, settings_from_table
from pytest_gpumem.reporting.reports.comparison import NOTHING_COMPARED
from pytest_gpumem.tools.ab.errors import RunFailed
from pytest_gpumem.tools.ab.runs import Runner
from pytest_gpumem.tools.ab.variants import Provisioner, Variant, changed_packages, why_no_difference
from pytest_gpumem.tools.ab.verdicts import compare_runs, with_marked_lines
from pytest_gpumem.tools.checkout import BASE, HEAD, clear_leftovers, temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import TextIO

    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.base.requirements.environments import Environments
    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.reporting.reports.comparison import ComparedChange, ComparisonReport
    from pytest_gpumem.tools.ab.runs import Run
    from pytest_gpumem.tools.ab.variants import ProvisionedVariant
    from pytest_gpumem.tools.checkout import Checkout, Side


_START_OF_LINE = "\r\x1b[K"


class Progress:
    """Writes a line for each run: ``3/16 base 1f3c9ab  12.3 s, 9 measured``. On a terminal, the line also counts seconds.

    Args:
        stream: The stream for the lines.
        most: The largest number of runs.
    """

    def __init__(self, stream: TextIO, most: int) -> None:
        self._stream = stream
        self._most = most
        self._live = can_redraw(stream)
        self._run = ""
        self._began = 0.0
        self._shown = ""

    def begin(self, number: int, side: Side, variant: Variant) -> None:
        self._run = f"{number}/{self._most} {side} {variant.short}"
        self._began = time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Update the live line."""
        text = f"{self._run}  {time.monotonic() - self._began:.0f} s ..."
        if self._live and text != self._shown:
            self._write(f"{_START_OF_LINE}{text}")
            self._shown = text

    def end(self, run: Run) -> None:
        """Print a successful run's line."""
        self.say(f"{self._run}  {time.monotonic() - self._began:.1f} s, {run.measured} measured")

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        if self._shown:
            self._write(_START_OF_LINE)
            self._shown = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


PAIRS_WITHOUT_TIME = 1
"""A single pair is enough without times, because each step runs until its bytes and counts repeat exactly."""


def reports_in_turns(
    take: Callable[[Side, int], Run], compare: Callable[[Sequence[tuple[Run, Run]]], ComparisonReport], most_pairs: int
) -> Iterator[ComparisonReport]:
    """Yield a report after each pair of runs, until more pairs would not change it.

    Args:
        take: Runs a side once. The arguments are the side and the run's number, from 1.
        compare: Returns the report on pairs (base, head).
        most_pairs: The largest number of pairs.
    """
    pairs: list[tuple[Run, Run]] = []
    previous = None
    for number in range(most_pairs):
        runs = {side: take(side, 2 * number + turn) for turn, side in enumerate(order_of_pair(number), 1)}
        pairs.append((runs[BASE], runs[HEAD]))
        report = compare(pairs)
        yield report
        if is_settled(report, previous):
            return
        previous = report


def order_of_pair(number: int) -> tuple[Side, Side]:
    """Return the order of the runs in a pair; pairs count from 0.

    Example: pair 0 is base, head, and pair 1 is head, base.
    """
    return (BASE, HEAD) if number % 2 == 0 else (HEAD, BASE)


def is_settled(report: ComparisonReport, previous: ComparisonReport | None) -> bool:
    """Return whether all tests are decided. ``previous`` is the report without the last pair.

    Without times, a single pair settles a report. With times, each test needs the fewest pairs that `compare_pairs` accepts,
    and an interval below the tolerance or the same outcome in two reports.
    """
    assert report.pairs is not None, "the report comes from runs in turns"
    if not report.rows:
        return True
    if not report.speeds:
        return report.pairs >= PAIRS_WITHOUT_TIME
    earlier = previous.speeds if previous is not None else {}
    return report.pairs >= FEWEST_PAIRS and all(
        _is_decided(speed, earlier.get(key), report.tolerance) for key, speed in report.speeds.items()
    )


def _is_decided(speed: ComparedChange, previous: ComparedChange | None, tolerance: float) -> bool:
    if speed.outcome is Outcome.OK:
        return speed.interval is not None and speed.interval.high <= 1 + tolerance
    # With a judgement after every pair, one may be wrong by chance. So two judgements in a row have to agree.
    return speed.outcome is not Outcome.UNCERTAIN and previous is not None and speed.outcome is previous.outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of a comparison. ``tolerance`` is the tolerated slowdown, as a ratio, for example 0.015."""

    checkout: Checkout
    base: Variant
    head: Variant
    arguments: Sequence[str]
    setup: str | None
    most_pairs: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The end of a comparison: the last report, the command's exit status, and ``why`` it ended early."""

    report: ComparisonReport | None
    units: UnitSystem
    exit_status: int
    why: str | None = None


@contextmanager
def set_up(
    checkout: Checkout,
    arguments: Sequence[str],
    setup: str | None,
    environments: Environments,
    stop: Stop,
    say: Callable[[str], None],
    only: Sequence[str] = (),
) -> Iterator[tuple[Runner, Provisioner]]:
    """Within the context, provide a runner and a provisioner that work in a temporary folder.

    Args:
        checkout: The checkout.
        arguments: pytest's arguments.
        setup: A shell command to run before each run; ``None`` for no command.
        environments: The cached environments.
        stop: Ends the command on a signal.
        say: Prints a line for the user.
        only: The test ids to run; empty to run all.

    Raises:
        GitError: The worktrees cannot be listed.
    """
    count = clear_leftovers(checkout)
    if count:
        say(f"removed {counted(count, 'worktree')} of a comparison that was killed")
    folders = checkout.checkouts()
    with temporary_folder() as folder:
        runner = Runner(checkout, arguments, setup, folder, stop, [*folders, folder], only)
        yield runner, Provisioner(checkout, environments, folder, stop, say, is_emulated(arguments, checkout))


def is_emulated(arguments: Sequence[str], checkout: Checkout) -> bool:
    """Return whether pytest's arguments choose an emulated GPU, or the settings if no argument names a device."""
    words = " ".join(arguments).replace("=", " ").split()
    named = [word for option, word in itertools.pairwise(words) if option == "--gpumem-device"]
    device = named[-1] if named else settings_in(checkout.top / checkout.folder).device
    return device is not None and device.startswith("emulated")


def settings_in(root: Path) -> Settings:
    """Return the settings in a project's ``pyproject.toml``, or the defaults if they cannot be read."""
    try:
        table = read_table(root / "pyproject.toml")
        return settings_from_table(table, "[tool.gpumem]") if table is not None else Settings()
    except SettingsError:
        # pytest accepts these settings, so they belong to another version of pytest-gpumem.
        return Settings()


def changed_code(base: ProvisionedVariant, base_run: Run, head: ProvisionedVariant, head_run: Run) -> ChangedCode:
    """Return the changed lines between two variants that have run."""
    old, new = (
        Folders(variant.top / run.root, variant.site_folders) for variant, run in ((base, base_run), (head, head_run))
    )
    compared = {package.name for package in changed_packages(base, head)}
    # The empty name stands for the project's own code.
    return ChangedCode(old, new, compared | ({""} if base.variant.revision != head.variant.revision else set()))


def compare_variants(plan: Plan, environments: Environments, stop: Stop, progress: Progress) -> ComparisonResult:
    """Run both variants in turns until all tests are decided, a run fails, or a signal is noted in ``stop``."""
    settings = Settings()
    variants: dict[str, Variant] = {BASE: plan.base, HEAD: plan.head}
    report: ComparisonReport | None = None
    changed: ChangedCode | None = None

    def take(side: Side, number: int) -> Run:
        progress.begin(number, side, variants[side])
        try:
            _, run = runner.take(provided[side], progress.tick, explained=number <= len(variants))
        except RunFailed as failure:
            raise RunFailed(f"{side} {variants[side]}: {failure}") from None
        progress.end(run)
        return run

    def compare(pairs: Sequence[tuple[Run, Run]]) -> ComparisonReport:
        nonlocal settings, changed
        base, head = pairs[0]
        if len(pairs) == 1:
            settings = settings_in(provided[HEAD].top / head.root)
            unused = why_no_difference(provided[BASE], provided[HEAD], base.imported | head.imported)
            if unused is not None:
                raise RunFailed(unused)
            changed = changed_code(provided[BASE], base, provided[HEAD], head)
        assert changed is not None, "the first pair has been compared"
        tolerances = {**DEFAULT_TOLERANCES, **settings.tolerances}
        compared = compare_runs(pairs, plan.base.title, plan.head.title, plan.tolerance, tolerances)
        compared = replace(compared, packages=changed_packages(provided[BASE], provided[HEAD]))
        return with_marked_lines(compared, changed)

    try:
        with ExitStack() as stack:
            runner, provisioner = stack.enter_context(
                set_up(plan.checkout, plan.arguments, plan.setup, environments, stop, progress.say)
            )
            provided = stack.enter_context(provisioner.provide(variants))
            for latest in reports_in_turns(take, compare, plan.most_pairs):
                report = latest
    except (RunFailed, InstallationError, GitError) as failure:
        return ComparisonResult(report, settings.units, NOTHING_COMPARED, str(failure))
    except StopSignal as stopped:
        return ComparisonResult(report, settings.units, stopped.exit_status, "interrupted")
    finally:
        progress.clear()
    assert report is not None, "a pair has run"
    return ComparisonResult(report, settings.units, report.exit_status)
