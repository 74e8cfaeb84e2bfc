"""Texts of `gpumem fit`: a line for each run, a table, and which GPUs the program fits into. Pure."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pytest_gpumem.fit.outcome import NOT_ENOUGH, FitOutcome
from pytest_gpumem.reports.layout import Column, Span, Table
from pytest_gpumem.units import agreeing, format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.emulation.gpus import Gpu
    from pytest_gpumem.fit.outcome import Fit, Found
    from pytest_gpumem.reports.layout import Style

_STYLES: dict[FitOutcome, Style] = {
    FitOutcome.FITS: "good",
    FitOutcome.OUT_OF_MEMORY: "bad",
    FitOutcome.TOO_MUCH_TOGETHER: "bad",
}


def name_of(gpu: Gpu) -> str:
    """Return a GPU's name for people: ``"A100 40GB"``, ``"H100 80GB x8"``."""
    return gpu.title if gpu.count == 1 else f"{gpu.title} x{gpu.count}"


def progress(one: Found, cwd: str) -> str:
    """Return a phrase on the outcome of a run."""
    if one.outcome is FitOutcome.FITS:
        return f"fits, {_needed(one)}"
    if one.outcome is FitOutcome.TOO_MUCH_TOGETHER:
        return f"{one.outcome.value}, {_needed(one)} by {one.together} processes"
    if one.outcome is FitOutcome.WENT_ON:
        return f"{one.outcome.value}, {_needed(one)}; {_first_time(one, cwd)}"
    if one.outcome is FitOutcome.OUT_OF_MEMORY:
        return f"{one.outcome.value}{_where(one, cwd)}"
    if one.outcome is FitOutcome.CANNOT_RUN:
        return f"{one.outcome.value}: {one.cannot_run}"
    return f"{one.outcome.value} ({_status(one)})" if one.outcome is FitOutcome.FAILED else one.outcome.value


def table(fits: Sequence[Fit], context_bytes: int) -> Table:
    """Return a row for each GPU, the smallest first: its memory, the peaks where the program ended, and the outcome."""
    columns = [
        Column("GPU", left=True),
        *map(Column, ("memory", "reserved", "allocated", "left")),
        Column("", left=True),
    ]
    rows = []
    for fit in _by_memory(fits):
        one = fit.plain
        ended = one.outcome in (FitOutcome.FITS, FitOutcome.WENT_ON, FitOutcome.TOO_MUCH_TOGETHER)
        left = fit.gpu.total_bytes - one.together * context_bytes - one.reserved
        figures = [
            format_bytes(one.reserved) if ended else "-",
            format_bytes(one.allocated) if ended else "-",
            format_bytes(left) if fit.fits else "-",
        ]
        outcome = one.outcome.value
        if fit.fits_expanded and fit.expanded is not None:
            outcome += f"; with expandable segments fits, {_needed(fit.expanded)}"
        cells = [name_of(fit.gpu), format_bytes(fit.gpu.total_bytes), *figures]
        rows.append((*map(Span, cells), Span(outcome, _STYLES.get(one.outcome, "doubtful"))))
    return Table(tuple(columns), tuple(rows))


def details(fits: Sequence[Fit], cwd: str) -> list[str]:
    """Return lines: where memory ran out and with which message, how the program failed, and notes.

    Args:
        fits: The outcomes by GPU.
        cwd: The folder that paths are relative to.
    """
    lines: list[str] = []
    for fit in _by_memory(fits):
        one, name = fit.plain, name_of(fit.gpu)
        if one.outcome is FitOutcome.WENT_ON:
            lines.append(f"{name}: {one.outcome.value}, {_first_time(one, cwd)}")
        elif one.outcome in (FitOutcome.OUT_OF_MEMORY, FitOutcome.CANNOT_RUN, FitOutcome.FAILED):
            lines.append(f"{name}: {progress(one, cwd)}")
        if one.outcome is FitOutcome.OUT_OF_MEMORY and one.message:
            lines.append(f"  {one.message}")
        lines += [f"  {line}" for line in one.last_lines]
    for notes in zip(*map(_notes, _by_memory(fits)), strict=True):
        named: dict[str, list[str]] = {}
        for fit, note in zip(_by_memory(fits), notes, strict=True):
            named.setdefault(note, []).append(name_of(fit.gpu))
        every = [name_of(fit.gpu) for fit in _by_memory(fits)]
        lines += [f"note: {_all_but(names, every)}: {note}" for note, names in named.items() if note]
    return lines


def conclusion(fits: Sequence[Fit]) -> str:
    """Return one line: the memory needed, the GPUs that the program fits into and the others, and with expandable segments."""
    fitting, expanded = _of(fits, FitOutcome.FITS), [fit for fit in fits if fit.fits_expanded]
    needs = f"needs {_span([fit.plain for fit in fitting])} reserved (emulated): " if fitting else ""
    span = _span([fit.expanded for fit in expanded if fit.expanded is not None]) if expanded else ""
    others = (
        ("not", _of(fits, FitOutcome.OUT_OF_MEMORY, FitOutcome.TOO_MUCH_TOGETHER)),
        ("ran out of memory and went on:", _of(fits, FitOutcome.WENT_ON)),
        (f"with expandable segments {span}: fits", expanded),
        ("cannot run on", _of(fits, FitOutcome.CANNOT_RUN)),
        ("failed by itself:", _of(fits, FitOutcome.FAILED)),
    )
    first = f"fits {_names(fitting, len(fits))}" if fitting else "fits none (emulated)"
    return needs + "; ".join([first, *(f"{what} {_names(some, len(fits))}" for what, some in others if some)])


def to_json(fits: Sequence[Fit], command: Sequence[str], status: int) -> str:
    """Return everything as JSON: bytes, in the order of the GPUs."""
    plain = {
        "format": 1,
        "emulated": True,
        "exit_status": status,
        "command": list(command),
        "conclusion": conclusion(fits),
        "gpus": [
            {
                "gpu": fit.gpu.word,
                "count": fit.gpu.count,
                "name": name_of(fit.gpu),
                "total_bytes": fit.gpu.total_bytes,
                **_plain(fit.plain),
                "with_expandable_segments": None if fit.expanded is None else _plain(fit.expanded),
            }
            for fit in fits
        ],
    }
    return json.dumps(plain, indent=2) + "\n"


def _plain(one: Found) -> dict[str, Any]:
    return {**asdict(one), "outcome": one.outcome.value}


def _of(fits: Sequence[Fit], *outcomes: FitOutcome) -> list[Fit]:
    return [fit for fit in fits if fit.plain.outcome in outcomes]


def _by_memory(fits: Sequence[Fit]) -> list[Fit]:
    return sorted(fits, key=lambda fit: (fit.gpu.total_bytes, fit.gpu.word))


_MOST_NAMED = 6
"""GPUs that a sentence names. The table has all of them."""


def _names(fits: Sequence[Fit], tried: int) -> str:
    """Return the names of GPUs, or of many their number: ``"22 of 24 GPUs"``."""
    if len(fits) <= _MOST_NAMED:
        return ", ".join(name_of(fit.gpu) for fit in _by_memory(fits))
    return f"all {tried} GPUs" if len(fits) == tried else f"{len(fits)} of {tried} GPUs"


def _all_but(names: Sequence[str], every: Sequence[str]) -> str:
    """Return names, or of many which ones are not among them: ``"all but T4, V100"``."""
    others = [name for name in every if name not in names]
    if len(names) <= _MOST_NAMED or len(others) > _MOST_NAMED:
        return ", ".join(names)
    return f"all but {', '.join(others)}" if others else f"all {len(every)} GPUs"


def _span(found: Sequence[Found]) -> str:
    """Return the reserved memory: one figure, or from the least to the most where GPUs differ."""
    least, most = (format_bytes(bound(one.reserved for one in found)) for bound in (min, max))
    return least if least == most else f"{least} to {most}"


def _needed(one: Found) -> str:
    return f"{format_bytes(one.reserved)} reserved"


def _first_time(one: Found, cwd: str) -> str:
    times = "once" if one.times_out_of_memory == 1 else f"{one.times_out_of_memory} times, first"
    return f"{times}{_where(one, cwd)}"


def _where(one: Found, cwd: str) -> str:
    if one.ran_out is None:
        return ""
    file, _, rest = one.ran_out.line.rpartition(":")
    path = PurePath(file)
    at = f" at {path.relative_to(cwd) if path.is_relative_to(cwd) else path}:{rest}" if rest else ""
    return (
        f"{at}: {format_bytes(one.ran_out.wanted)} wanted, {format_bytes(one.ran_out.allocated)} allocated and "
        f"{format_bytes(one.ran_out.reserved)} reserved"
    )


def _status(one: Found) -> str:
    if one.status >= 0:
        return f"exit status {one.status}"
    try:
        return f"killed by {signal.Signals(-one.status).name}"
    except ValueError:
        return f"killed by signal {-one.status}"


_GRAPHS = (
    "autograd graphs may fill the GPU: at least a quarter of the bytes belonged to no tensor of the program, no backward had "
    "run and there was no optimizer. If the program only infers, run it under torch.no_grad()"
)


def _graphs_fill_it(one: Found) -> bool:
    """Return whether graphs of gradients can hold a large part of the memory in a program that does not train."""
    ran_out = one.ran_out
    return bool(ran_out and ran_out.without_tensor and 4 * ran_out.without_tensor >= ran_out.allocated)


def _notes(fit: Fit) -> tuple[str, ...]:
    """Return the notes on a GPU, in a fixed order; empty where one does not apply."""
    one = fit.plain
    killed = agreeing(one.killed, "a process that used CUDA was", f"{one.killed} processes that used CUDA were")
    expandable = ""
    if one.outcome in NOT_ENOUGH and one.expandable:
        expandable = "segments were expandable already"
    elif (
        one.outcome in NOT_ENOUGH and fit.expanded is not None and not fit.expanded.expandable and fit.expanded.devices
    ):
        expandable = "expandable segments were not tried: the program has settings of its own for PyTorch's allocator"
    return (
        f"only just: cached memory was given back to the GPU before an allocation succeeded ({one.retries} x), which is slow"
        if fit.fits and one.retries
        else "",
        f"{one.unknown}: later memory may differ on a real GPU" if one.unknown else "",
        _GRAPHS if _graphs_fill_it(one) else "",
        f"it may take more: {one.lacking}" if one.lacking else "",
        f"{one.together} processes used one device at the same time; their peaks are added up"
        if one.together > 1
        else "",
        f"{one.devices} devices were used; figures are those of the device with the highest peak"
        if one.devices > 1
        else "",
        f"{killed} killed before reporting its memory, which is not counted" if one.killed else "",
        expandable,
    )
