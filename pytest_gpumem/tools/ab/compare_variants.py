"""Compare two variants, base and head, by alternating runs in temporary worktrees and cached environments.

The runs come in pairs: base and head, then head and base, then base and head, and so on. If the machine becomes slower, for
example by heat or by other programs, this order affects base and head equally.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import GitError, InstallationError, RunFailed, SettingsError, StopSignal
from pytest_gpumem.base.terminals import can_redraw
from pytest_gpumem.base.units import counted
from pytest_gpumem.judging.changed_code.marks import ChangedCode
from pytest_gpumem.judging.changed_code.sources import Folders
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.judging.times.comparison import FEWEST_PAIRS
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES, Settings, read_table, settings_from_table
from pytest_gpumem.reporting.reports.comparison import NOTHING_COMPARED
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
    """Writes a line for each run, for example ``3/16 base 1f3c9ab  12.3 s, 9 measured``.

    On a terminal, the line also shows the elapsed seconds while the run lasts.

    Args:
        stream: The text stream to write to.
        most: The maximum number of runs, for example 16.
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
        """Update the current run's line, if the stream is a terminal."""
        text = f"{self._run}  {time.monotonic() - self._began:.0f} s ..."
        if self._live and text != self._shown:
            self._write(f"{_START_OF_LINE}{text}")
            self._shown = text

    def end(self, run: Run) -> None:
        """Print the final line of a successful run."""
        self.say(f"{self._run}  {time.monotonic() - self._began:.1f} s, {run.measured} measured")

    def say(self, text: str) -> None:
        """Print a line that stays on the terminal."""
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
"""The number of pairs if no test is timed. A single pair is enough, because each step runs until its bytes and counts
repeat exactly."""


def reports_in_turns(
    take: Callable[[Side, int], Run], compare: Callable[[Sequence[tuple[Run, Run]]], ComparisonReport], most_pairs: int
) -> Iterator[ComparisonReport]:
    """Run base and head in pairs, and yield a report after each pair. Stop if `is_settled` or after ``most_pairs`` pairs.

    Args:
        take: Runs base or head once. Its arguments are the side, ``"base"`` or ``"head"``, and the run's number, from 1.
        compare: Returns the report for all pairs so far. Each pair is (base's run, head's run).
        most_pairs: The maximum number of pairs.
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
    """Return which variant runs first in a pair, and which second. ``number`` is the pair's number, from 0.

    Example: in pair 0 base runs before head, and in pair 1 head runs before base.
    """
    return (BASE, HEAD) if number % 2 == 0 else (HEAD, BASE)


def is_settled(report: ComparisonReport, previous: ComparisonReport | None) -> bool:
    """Return whether all tests are decided, so no more pairs are needed. ``previous`` is the report before the last pair.

    If no test is timed, a single pair decides all tests. Otherwise there must be at least `FEWEST_PAIRS` pairs. In addition,
    each test must certainly be no slower than the tolerance allows, or have the same outcome in the last two reports.
    """
    assert report.pairs is not None, "the report was made from pairs of runs"
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
    # A test is judged after every pair, so a single judgement may be wrong by chance. Two consecutive judgements must agree.
    return speed.outcome is not Outcome.UNCERTAIN and previous is not None and speed.outcome is previous.outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of a comparison. ``tolerance`` is the tolerated slowdown as a ratio: 0.015 means 1.5 %."""

    checkout: Checkout
    base: Variant
    head: Variant
    arguments: Sequence[str]
    setup: str | None
    most_pairs: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """The last report of a comparison, and the command's exit status. ``why`` is the reason if the comparison ended early."""

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
    """Create a runner and a provisioner. Both write into a temporary folder, which is removed when the context ends.

    Args:
        checkout: The project's checkout.
        arguments: pytest's arguments.
        setup: A shell command to run before each run; ``None`` for no command.
        environments: The cache of virtual environments.
        stop: Records a signal to end the command, such as Ctrl-C.
        say: Prints a line for the user.
        only: The ids of the tests to run. If empty, all tests run.

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
    """Return whether the tests run on an emulated GPU, by ``--gpumem-device`` or otherwise by the project's settings."""
    words = " ".join(arguments).replace("=", " ").split()
    named = [word for option, word in itertools.pairwise(words) if option == "--gpumem-device"]
    device = named[-1] if named else settings_in(checkout.top / checkout.folder).device
    return device is not None and device.startswith("emulated")


def settings_in(root: Path) -> Settings:
    """Return the settings in a project's ``pyproject.toml``, or the default settings if these cannot be read."""
    try:
        table = read_table(root / "pyproject.toml")
        return settings_from_table(table, "[tool.gpumem]") if table is not None else Settings()
    except SettingsError:
        # The runs may use another version of pytest-gpumem, which accepts these settings.
        return Settings()


def changed_code(base: ProvisionedVariant, base_run: Run, head: ProvisionedVariant, head_run: Run) -> ChangedCode:
    """Return the lines that differ between base's and head's code, as paths from pytest's root directory in each run."""
    old, new = (
        Folders(variant.top / run.root, variant.site_folders) for variant, run in ((base, base_run), (head, head_run))
    )
    compared = {package.name for package in changed_packages(base, head)}
    # The empty name stands for the project's own code.
    return ChangedCode(old, new, compared | ({""} if base.variant.revision != head.variant.revision else set()))


def compare_variants(plan: Plan, environments: Environments, stop: Stop, progress: Progress) -> ComparisonResult:
    """Run pairs of base and head until all tests are decided, ``plan.most_pairs`` have run, a run fails, or a signal comes."""
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
