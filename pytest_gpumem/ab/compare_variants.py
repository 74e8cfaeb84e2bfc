"""Compare two variants: worktrees, environments, runs in turns until enough has been seen, a report, and nothing left behind.

Runs are base, head, head, base, base, head, ...: what drifts on a machine (heat, load, clocks) then meets both sides alike,
and neighbours make a pair.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpumem.ab.checkout import BASE, HEAD, clear_leftovers, temporary_folder
from pytest_gpumem.ab.errors import RunFailed
from pytest_gpumem.ab.runs import Runner
from pytest_gpumem.ab.variants import Provisioner, Variant, changed_packages, why_unused
from pytest_gpumem.ab.verdicts import compare_runs, with_marked_lines
from pytest_gpumem.changed_code.marks import ChangedCode
from pytest_gpumem.changed_code.sources import Folders
from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.config.settings import DEFAULT_TOLERANCES, Settings, read_table, settings_from_table
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.git import GitError
from pytest_gpumem.processes import Stopped
from pytest_gpumem.reports.comparison import NOTHING_COMPARED
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.terminals import can_redraw
from pytest_gpumem.timing.comparison import FEWEST_PAIRS
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import TextIO

    from pytest_gpumem.ab.checkout import Checkout, Side
    from pytest_gpumem.ab.runs import Run
    from pytest_gpumem.ab.variants import ProvisionedVariant
    from pytest_gpumem.processes import Stop
    from pytest_gpumem.reports.comparison import Compared, ComparedChange
    from pytest_gpumem.requirements.environments import Environments
    from pytest_gpumem.units import UnitSystem


_START_OF_LINE = "\r\x1b[K"


class Progress:
    """Writes a line for each run to ``stream``: ``3/16 base 1f3c9ab  12.3 s, 9 measured``; on a terminal while it runs, too.

    ``most`` is the largest number of runs.
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
        """End a run that has given its figures."""
        self.say(f"{self._run}  {time.monotonic() - self._began:.1f} s, {run.measured} measured")

    def say(self, text: str) -> None:
        """Write a line that stays."""
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
"""Bytes and counts repeat exactly: a step is run until they do."""


def reports_in_turns(
    take: Callable[[Side, int], Run], compare: Callable[[Sequence[tuple[Run, Run]]], Compared], most_pairs: int
) -> Iterator[Compared]:
    """Yield a report after each pair of runs, until no more are needed.

    ``take`` makes a run of a side, which is given its number; ``compare`` makes the report on pairs (base, head).
    """
    pairs: list[tuple[Run, Run]] = []
    before = None
    for number in range(most_pairs):
        runs = {side: take(side, 2 * number + turn) for turn, side in enumerate(order_of_pair(number), 1)}
        pairs.append((runs[BASE], runs[HEAD]))
        report = compare(pairs)
        yield report
        if is_settled(report, before):
            return
        before = report


def order_of_pair(number: int) -> tuple[Side, Side]:
    """Return the sides of a pair in the order in which they run; pairs count from 0."""
    return (BASE, HEAD) if number % 2 == 0 else (HEAD, BASE)


def is_settled(now: Compared, before: Compared | None) -> bool:
    """Return whether more pairs would change nothing; ``before`` is the report without the last pair."""
    assert now.pairs is not None, "it is of runs in turns"
    if not now.rows:
        return True
    if not now.speeds:
        return now.pairs >= PAIRS_WITHOUT_TIME
    earlier = before.speeds if before is not None else {}
    return now.pairs >= FEWEST_PAIRS and all(
        _is_decided(speed, earlier.get(key), now.tolerance) for key, speed in now.speeds.items()
    )


def _is_decided(now: ComparedChange, before: ComparedChange | None, tolerance: float) -> bool:
    if now.outcome is Outcome.OK:
        return now.interval is not None and now.interval.high <= 1 + tolerance
    # Judging after every pair gives chance several tries, so that two judgements in a row have to agree.
    return now.outcome is not Outcome.UNCERTAIN and before is not None and now.outcome is before.outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """A comparison that was asked for. ``tolerance`` is the tolerated slowdown, as a ratio."""

    checkout: Checkout
    base: Variant
    head: Variant
    arguments: Sequence[str]
    setup: str | None
    most_pairs: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The result. ``why`` says why it ended early; ``exit_status`` is the command's."""

    report: Compared | None
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
    """Set up what runs variants and what provides them, in a temporary folder. Raises `GitError`."""
    left = clear_leftovers(checkout)
    if left:
        say(f"removed {counted(left, 'worktree')} of a comparison that was killed")
    others = checkout.checkouts()
    with temporary_folder() as folder:
        runner = Runner(checkout, arguments, setup, folder, stop, [*others, folder], only)
        yield runner, Provisioner(checkout, environments, folder, stop, say, is_emulated(arguments, checkout))


def is_emulated(arguments: Sequence[str], checkout: Checkout) -> bool:
    """Return whether pytest's arguments, or else the settings of the checkout, name an emulated GPU."""
    words = " ".join(arguments).replace("=", " ").split()
    named = [word for option, word in itertools.pairwise(words) if option == "--gpumem-device"]
    device = named[-1] if named else settings_in(checkout.top / checkout.folder).device
    return device is not None and device.startswith("emulated")


def settings_in(root: Path) -> Settings:
    """Return the settings of the project in head, by which bytes are judged and shown."""
    try:
        table = read_table(root / "pyproject.toml")
        return settings_from_table(table, "[tool.gpumem]") if table is not None else Settings()
    except SettingsError:
        # pytest has read them: they are those of another version of this package.
        return Settings()


def changed_code(base: ProvisionedVariant, base_run: Run, head: ProvisionedVariant, head_run: Run) -> ChangedCode:
    """Return the lines that differ between two variants that have run."""
    old, new = (Folders(one.top / run.root, one.site_folders) for one, run in ((base, base_run), (head, head_run)))
    compared = {one.name for one in changed_packages(base, head)}
    # The project's own code belongs to no package.
    return ChangedCode(old, new, compared | ({""} if base.variant.revision != head.variant.revision else set()))


def compare_variants(plan: Plan, environments: Environments, stop: Stop, progress: Progress) -> Ended:
    """Compare until all tests are decided, a run fails, or a signal is noted in ``stop``."""
    settings = Settings()
    variants: dict[str, Variant] = {BASE: plan.base, HEAD: plan.head}
    report: Compared | None = None
    changed: ChangedCode | None = None

    def take(side: Side, number: int) -> Run:
        progress.begin(number, side, variants[side])
        try:
            _, run = runner.take(provided[side], progress.tick, explained=number <= len(variants))
        except RunFailed as failure:
            raise RunFailed(f"{side} {variants[side]}: {failure}") from None
        progress.end(run)
        return run

    def compare(pairs: Sequence[tuple[Run, Run]]) -> Compared:
        nonlocal settings, changed
        base, head = pairs[0]
        if len(pairs) == 1:
            settings = settings_in(provided[HEAD].top / head.root)
            unused = why_unused(provided[BASE], provided[HEAD], base.imported | head.imported)
            if unused is not None:
                raise RunFailed(unused)
            changed = changed_code(provided[BASE], base, provided[HEAD], head)
        assert changed is not None, "the first pair has been compared"
        tolerances = {**DEFAULT_TOLERANCES, **settings.tolerances}
        found = compare_runs(pairs, plan.base.title, plan.head.title, plan.tolerance, tolerances)
        found = replace(found, packages=changed_packages(provided[BASE], provided[HEAD]))
        return with_marked_lines(found, changed)

    try:
        with ExitStack() as stack:
            runner, provisioner = stack.enter_context(
                set_up(plan.checkout, plan.arguments, plan.setup, environments, stop, progress.say)
            )
            provided = stack.enter_context(provisioner.provide(variants))
            for so_far in reports_in_turns(take, compare, plan.most_pairs):
                report = so_far
    except (RunFailed, NotInstalled, GitError) as failure:
        return Ended(report, settings.units, NOTHING_COMPARED, str(failure))
    except Stopped as stopped:
        return Ended(report, settings.units, stopped.exit_status, "interrupted")
    finally:
        progress.clear()
    assert report is not None, "it ended after a pair"
    return Ended(report, settings.units, report.exit_status)
