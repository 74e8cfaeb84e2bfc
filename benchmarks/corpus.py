"""How often the first row of a difference names what a person changed: regressions planted in real models, and refactorings.

Each case is an edit of a model's source, or of the script that trains it. The step is recorded before and after, on the CPU;
before is what a baseline keeps. The first row is right when it names the module and a line that the edit has to answer for.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import corpus_attention
import corpus_heads
import corpus_layers
import corpus_loops
import corpus_refactorings
from corpus_judge import BrokenCase, Case, Refactoring, Shown, refactoring_shown, regression_shown
from corpus_project import EditError

from pytest_gpumem.devices.cpu import CpuDevice
from pytest_gpumem.reports.explanation import growth_table, part_lines
from pytest_gpumem.reports.layout import columns
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap
from pytest_gpumem.units import format_bytes_change

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEAST_RIGHT = 0.9
"""Of the regressions: how many first rows have to be right."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that were asked for, print the table and the score. Returns the exit status."""
    options = parser().parse_args(arguments)
    cases = [case for case in all_cases() if options.only.lower() in f"{case.name} {case.model}".lower()]
    if not cases:
        print(f"no case has {options.only} in its name", file=sys.stderr)
        return 2
    with _quiet_models(), open_device() as device:
        shown, broken = [], []
        for case in cases:
            try:
                one = shown_of(case, device)
            except (BrokenCase, EditError) as error:
                broken.append(f"{case.model}: {case.name} is broken: {error}")
                continue
            shown.append((case, one))
            if options.show:
                show(case, one)
            else:
                print(".", end="", flush=True)
    print("\n")
    status = conclude(shown)
    for line in broken:
        print(line)
    return 1 if broken else status


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", metavar="WORD", help="cases with this in their name or their model's")
    made.add_argument("--show", action="store_true", help="print the rows of each difference, and what would be right")
    return made


def all_cases() -> list[Case | Refactoring]:
    modules = (corpus_attention, corpus_layers, corpus_heads, corpus_loops)
    return [*(case for module in modules for case in module.CASES), *corpus_refactorings.REFACTORINGS]


def shown_of(case: Case | Refactoring, device: CpuDevice) -> Shown:
    return regression_shown(case, device) if isinstance(case, Case) else refactoring_shown(case, device)


def conclude(shown: Sequence[tuple[Case | Refactoring, Shown]]) -> int:
    """Print the table and the score. Returns the exit status."""
    for line in columns(
        ("case", "growth", "", "first row", "line", "reason"),
        [cells(case, one) for case, one in shown],
        left=(0, 2, 3, 4, 5),
    ):
        print(line.rstrip())
    print()
    regressions = [one for case, one in shown if isinstance(case, Case)]
    refactorings = [one for case, one in shown if isinstance(case, Refactoring)]
    right, empty = sum(one.right for one in regressions), sum(one.right for one in refactorings)
    if regressions:
        print(f"first row right: {right} of {len(regressions)} ({right / len(regressions):.0%})")
    if refactorings:
        print(f"empty: {empty} of {len(refactorings)}")
    return 0 if right >= LEAST_RIGHT * len(regressions) and empty == len(refactorings) else 1


def cells(case: Case | Refactoring, one: Shown) -> tuple[str, ...]:
    """A line of the table."""
    figure = "" if isinstance(case, Refactoring) or case.figure == "peak" else f" ({case.figure})"
    verdict = "right" if one.right else f"WRONG: {one.wrong}"
    head = (f"{case.model}: {case.name}", f"{one.growth:+.1%}{figure}", verdict)
    if not one.difference.changes:
        return (*head, "", "", "")
    first = one.difference.changes[0]
    return (*head, f"{first.row.category} {first.row.module}", first.row.where, first.reason)


def show(case: Case | Refactoring, one: Shown) -> None:
    """Print what a user would see."""
    print(f"{case.model}: {case.name}: {'right' if one.right else one.wrong}")
    for line in part_lines(growth_table(one.difference, "si")) if one.difference.growth > 0 else ():
        print(f"    {line}")
    if one.difference.growth <= 0:
        for change in one.difference.changes:
            print(f"    {format_bytes_change(change.nbytes, 'si')} {change.row.text()}")
    for note in one.notes:
        print(f"    note: {note}")
    if isinstance(case, Case):
        print(f"    right: {', '.join(case.modules) or '(no module)'} at {', '.join(sorted(one.culprits))}")


@contextmanager
def open_device() -> Iterator[CpuDevice]:
    """A device on which recordings do not take long."""
    device = CpuDevice()
    device.open()
    # Every recording ends with a collection, which would look at all that transformers imports.
    gc.collect()
    heap = FrozenHeap()
    heap.freeze()
    try:
        yield device
    finally:
        heap.thaw()
        device.close()


@contextmanager
def _quiet_models() -> Iterator[None]:
    """Without what transformers has to say about small models."""
    try:
        import transformers
    except ImportError:
        yield
        return
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.utils.logging.set_verbosity(before)


if __name__ == "__main__":
    sys.exit(main())
