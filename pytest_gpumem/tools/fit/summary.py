"""Write the output of `gpumem fit`: a line for each run, a table, and a conclusion. Pure functions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.processes import signal_name
from pytest_gpumem.base.units import format_bytes, word_form
from pytest_gpumem.reporting.reports.layout import Column, Span, Table
from pytest_gpumem.tools.fit.outcome import NOT_ENOUGH, FitOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.emulating.emulation.gpus import Gpu
    from pytest_gpumem.reporting.reports.layout import Style
    from pytest_gpumem.tools.fit.outcome import Fit, RunResult

_STYLES: dict[FitOutcome, Style] = {
    FitOutcome.FITS: "good",
    FitOutcome.OUT_OF_MEMORY: "bad",
    FitOutcome.TOO_MUCH_TOGETHER: "bad",
}


def name_of(gpu: Gpu) -> str:
    """Return a GPU's name for people, such as ``"A100 40GB"`` or ``"H100 80GB x8"``."""
    return gpu.title if gpu.count == 1 else f"{gpu.title} x{gpu.count}"


def progress(result: RunResult, cwd: str) -> str:
    """Return a phrase with a run's outcome, such as ``"fits, 15.25 GB reserved"``."""
    if result.outcome is FitOutcome.FITS:
        return f"fits, {_needed(result)}"
    if result.outcome is FitOutcome.TOO_MUCH_TOGETHER:
        return f"{result.outcome.value}, {_needed(result)} by {result.together} processes"
    if result.outcome is FitOutcome.WENT_ON:
        return f"{result.outcome.value}, {_needed(result)}; {_first_time(result, cwd)}"
    if result.outcome is FitOutcome.OUT_OF_MEMORY:
        return f"{result.outcome.value}{_where(result, cwd)}"
    if result.outcome is FitOutcome.CANNOT_RUN:
        return f"{result.outcome.value}: {result.cannot_run}"
    return (
        f"{result.outcome.value} ({_status(result)})" if result.outcome is FitOutcome.FAILED else result.outcome.value
    )


def table(fits: Sequence[Fit], context_bytes: int) -> Table:
    """Return a table with a row for each GPU, the smallest GPU first. A row contains the GPU's memory, the program's peaks if
    the program ended, and the outcome.
    """
    columns = [
        Column("GPU", left=True),
        *map(Column, ("memory", "reserved", "allocated", "left")),
        Column("", left=True),
    ]
    rows = []
    for fit in _by_memory(fits):
        result = fit.plain
        ended = result.outcome in (FitOutcome.FITS, FitOutcome.WENT_ON, FitOutcome.TOO_MUCH_TOGETHER)
        left = fit.gpu.total_bytes - result.together * context_bytes - result.reserved
        figures = [
            format_bytes(result.reserved) if ended else "-",
            format_bytes(result.allocated) if ended else "-",
            format_bytes(left) if fit.fits else "-",
        ]
        outcome = result.outcome.value
        if fit.fits_expanded and fit.expanded is not None:
            outcome += f"; with expandable segments fits, {_needed(fit.expanded)}"
        cells = [name_of(fit.gpu), format_bytes(fit.gpu.total_bytes), *figures]
        rows.append((*map(Span, cells), Span(outcome, _STYLES.get(result.outcome, "doubtful"))))
    return Table(tuple(columns), tuple(rows))


def details(fits: Sequence[Fit], cwd: str) -> list[str]:
    """Return lines about out-of-memory errors with their source lines, about other failures, and with notes.

    Args:
        fits: The results on all GPUs.
        cwd: The current folder. Paths below this folder are shown relative to the folder.
    """
    lines: list[str] = []
    for fit in _by_memory(fits):
        result, name = fit.plain, name_of(fit.gpu)
        if result.outcome is FitOutcome.WENT_ON:
            lines.append(f"{name}: {result.outcome.value}, {_first_time(result, cwd)}")
        elif result.outcome in (FitOutcome.OUT_OF_MEMORY, FitOutcome.CANNOT_RUN, FitOutcome.FAILED):
            lines.append(f"{name}: {progress(result, cwd)}")
        if result.outcome is FitOutcome.OUT_OF_MEMORY and result.message:
            lines.append(f"  {result.message}")
        lines += [f"  {line}" for line in result.last_lines]
    for notes in zip(*map(_notes, _by_memory(fits)), strict=True):
        named: dict[str, list[str]] = {}
        for fit, note in zip(_by_memory(fits), notes, strict=True):
            named.setdefault(note, []).append(name_of(fit.gpu))
        every = [name_of(fit.gpu) for fit in _by_memory(fits)]
        lines += [f"note: {_all_but(names, every)}: {note}" for note, names in named.items() if note]
    return lines


def conclusion(fits: Sequence[Fit]) -> str:
    """Return a line with the memory needed by the program, the GPUs with enough memory, and the other GPUs.

    Example: ``"needs 15.25 GB to 15.28 GB reserved (emulated): fits L4, RTX 4090; not T4"``.
    """
    fitting, expanded = _with_outcome(fits, FitOutcome.FITS), [fit for fit in fits if fit.fits_expanded]
    needs = f"needs {_span([fit.plain for fit in fitting])} reserved (emulated): " if fitting else ""
    span = _span([fit.expanded for fit in expanded if fit.expanded is not None]) if expanded else ""
    groups = (
        ("not", _with_outcome(fits, FitOutcome.OUT_OF_MEMORY, FitOutcome.TOO_MUCH_TOGETHER)),
        ("ran out of memory and went on:", _with_outcome(fits, FitOutcome.WENT_ON)),
        (f"with expandable segments {span}: fits", expanded),
        ("cannot run on", _with_outcome(fits, FitOutcome.CANNOT_RUN)),
        ("failed by itself:", _with_outcome(fits, FitOutcome.FAILED)),
    )
    first = f"fits {_names(fitting, len(fits))}" if fitting else "fits none (emulated)"
    return needs + "; ".join([first, *(f"{words} {_names(group, len(fits))}" for words, group in groups if group)])


def to_json(fits: Sequence[Fit], command: Sequence[str], status: int) -> str:
    """Return the results as JSON, in the order of ``fits``. Memory sizes are in bytes."""
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


def _plain(result: RunResult) -> dict[str, Any]:
    return {**asdict(result), "outcome": result.outcome.value}


def _with_outcome(fits: Sequence[Fit], *outcomes: FitOutcome) -> list[Fit]:
    return [fit for fit in fits if fit.plain.outcome in outcomes]


def _by_memory(fits: Sequence[Fit]) -> list[Fit]:
    return sorted(fits, key=lambda fit: (fit.gpu.total_bytes, fit.gpu.word))


_MOST_NAMED = 6
"""A sentence names at most this many GPUs. The table names all GPUs."""


def _names(fits: Sequence[Fit], gpu_count: int) -> str:
    """Return the GPUs' names. For more than 6 GPUs, return only a number, such as ``"22 of 24 GPUs"``."""
    if len(fits) <= _MOST_NAMED:
        return ", ".join(name_of(fit.gpu) for fit in _by_memory(fits))
    return f"all {gpu_count} GPUs" if len(fits) == gpu_count else f"{len(fits)} of {gpu_count} GPUs"


def _all_but(names: Sequence[str], every: Sequence[str]) -> str:
    """Return the GPUs' names. For more than 6 GPUs, name the other GPUs if they are few, such as ``"all but T4, V100"``."""
    missing = [name for name in every if name not in names]
    if len(names) <= _MOST_NAMED or len(missing) > _MOST_NAMED:
        return ", ".join(names)
    return f"all but {', '.join(missing)}" if missing else f"all {len(every)} GPUs"


def _span(results: Sequence[RunResult]) -> str:
    """Return the reserved memory as a number, or as a range if the GPUs have different results."""
    least, most = (format_bytes(bound(result.reserved for result in results)) for bound in (min, max))
    return least if least == most else f"{least} to {most}"


def _needed(result: RunResult) -> str:
    return f"{format_bytes(result.reserved)} reserved"


def _first_time(result: RunResult, cwd: str) -> str:
    times = "once" if result.times_out_of_memory == 1 else f"{result.times_out_of_memory} times, first"
    return f"{times}{_where(result, cwd)}"


def _where(result: RunResult, cwd: str) -> str:
    if result.ran_out is None:
        return ""
    file, _, rest = result.ran_out.line.rpartition(":")
    path = PurePath(file)
    at = f" at {path.relative_to(cwd) if path.is_relative_to(cwd) else path}:{rest}" if rest else ""
    return (
        f"{at}: {format_bytes(result.ran_out.wanted)} wanted, {format_bytes(result.ran_out.allocated)} allocated and "
        f"{format_bytes(result.ran_out.reserved)} reserved"
    )


def _status(result: RunResult) -> str:
    if result.status >= 0:
        return f"exit status {result.status}"
    return f"killed by {signal_name(-result.status)}"


_GRAPHS = (
    "autograd graphs may fill the GPU: at least a quarter of the bytes belonged to no tensor of the program, no backward had "
    "run and there was no optimizer. If the program only infers, run it under torch.no_grad()"
)


def _graphs_fill_it(result: RunResult) -> bool:
    """Return whether autograd graphs may fill at least a quarter of the memory in a program that does not train."""
    ran_out = result.ran_out
    return bool(ran_out and ran_out.without_tensor and 4 * ran_out.without_tensor >= ran_out.allocated)


def _notes(fit: Fit) -> tuple[str, ...]:
    """Return the notes about the result on a GPU, in a fixed order. A note is an empty text if it does not apply."""
    result = fit.plain
    killed = word_form(result.killed, "a process that used CUDA was", f"{result.killed} processes that used CUDA were")
    expandable = ""
    if result.outcome in NOT_ENOUGH and result.expandable:
        expandable = "the allocator's segments were expandable already"
    elif (
        result.outcome in NOT_ENOUGH
        and fit.expanded is not None
        and not fit.expanded.expandable
        and fit.expanded.devices
    ):
        expandable = "expandable segments were not tried: the program has settings of its own for PyTorch's allocator"
    return (
        f"fits only just: the allocator freed its cache before an allocation succeeded ({result.retries} x), which is slow"
        if fit.fits and result.retries
        else "",
        f"{result.unknown}: later memory may differ on a real GPU" if result.unknown else "",
        _GRAPHS if _graphs_fill_it(result) else "",
        f"the program may take more: {result.lacking}" if result.lacking else "",
        f"{result.together} processes used one device at the same time; their peaks are added up"
        if result.together > 1
        else "",
        f"{result.devices} devices were used; the figures belong to the device with the highest peak"
        if result.devices > 1
        else "",
        f"{killed} killed before reporting its memory, which is not counted" if result.killed else "",
        expandable,
    )
