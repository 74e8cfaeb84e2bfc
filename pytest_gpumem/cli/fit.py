"""``gpumem fit``: which GPUs a program fits into, by running it on emulated ones."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli import completion
from pytest_gpumem.cli.jobs import jobs_option, most_jobs
from pytest_gpumem.cli.project import own_gpus_around
from pytest_gpumem.cli.streams import (
    InputError,
    WholeLines,
    WholeNumber,
    format_option,
    input_errors,
    screen,
    write_lines,
)
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.gpus import DEFAULT, Gpu, emulated_gpu, known_gpus
from pytest_gpumem.emulation.load import CONTEXT_BYTES, prepare
from pytest_gpumem.fit.forks import ProgramRuns
from pytest_gpumem.fit.outcome import NOT_ENOUGH, Fit, FitOutcome, Found, ends_it, exit_status
from pytest_gpumem.fit.outcome import found as found_of
from pytest_gpumem.fit.run import with_expandable_segments
from pytest_gpumem.fit.summary import conclusion, details, name_of, progress, table, to_json
from pytest_gpumem.processes import Stopped, noted_signals
from pytest_gpumem.reports.layout import laid_out
from pytest_gpumem.units import agreeing, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.processes import Stop


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--device",
    "words",
    multiple=True,
    metavar="DEVICE",
    shell_complete=completion.cards,
    help="One that it has to fit into, as `gpumem emulate` has them: l4, 24GB, h100x8. May be repeated; all if not given.",
)
@click.option(
    "--steps",
    type=WholeNumber(min=1),
    metavar="N",
    help="End the program when one of its optimizers has made N steps and begins another.",
)
@jobs_option("Runs at the same time must not write the same files.")
@format_option("json")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def fit(*, words: tuple[str, ...], steps: int | None, jobs: int, form: str, command: tuple[str, ...]) -> None:
    """Find the GPUs that a program, as it is, fits into, by running it on emulated ones.

    COMMAND is run once on each GPU, to its end, one after the other or, after the first, --jobs at a time. The CUDA build of
    torch runs as it is, over stand-ins for CUDA's libraries: PyTorch's own allocator runs out of memory, or does not. Where it
    does, the program is run once more with expandable segments. A COMMAND that begins with a file (train.py) or with -m is run
    with this Python.

    \b
    Examples:
      gpumem fit train.py --batch 8
      gpumem fit --device l4 --device a100-40gb --steps 3 -- python train.py

    Exit status: 0 when the program fits into all GPUs that were asked for, or into one where none was, 1 when memory ran out, 2
    for wrong usage, and when it cannot be told: a GPU cannot be emulated here, or the program fails by itself or uses no GPU
    memory, 130 when interrupted, 143 by SIGTERM.
    """
    gpus = _gpus(words)
    arguments = _with_python(command)
    jobs = most_jobs(min(jobs, max(1, len(gpus) - 1)))
    by_gpu: dict[Gpu, Fit] = {}
    interrupted = None
    with noted_signals() as stop:
        try:
            with closing(ProgramRuns(arguments, os.environ, steps, jobs, stop)) as runs:
                _try_all(by_gpu, gpus, runs, jobs, stop, arguments[0], every=bool(words))
        except Stopped as stopped:
            interrupted = stopped.exit_status
            were = agreeing(len(by_gpu), "was", "were")
            click.echo(f"\ninterrupted: {len(by_gpu)} of {counted(len(gpus), 'GPU')} {were} tried", err=True)
    found = [by_gpu[gpu] for gpu in gpus if gpu in by_gpu]
    if interrupted is not None:
        if found:
            _print(found, arguments, interrupted, as_json=form == "json")
        sys.exit(interrupted)
    if found[0].plain.without_statistics:
        raise InputError(
            "it cannot be told what the program takes: it has an allocator of its own, which keeps no statistics"
        )
    if found[0].plain.outcome is FitOutcome.UNUSED:
        raise InputError("the program uses no GPU memory: PyTorch allocated nothing on a CUDA device")
    status = exit_status(found, every=bool(words))
    _print(found, arguments, status, as_json=form == "json")
    sys.exit(status)


def _with_python(command: tuple[str, ...]) -> tuple[str, ...]:
    first = command[0]
    if first != "-m" and first.startswith("-"):
        raise click.UsageError(f"no such option: {first}")
    is_file = first.endswith(".py")
    if is_file and not Path(first).exists():
        raise InputError(f"there is no file {first}")
    return (sys.executable, *command) if is_file or first == "-m" else command


def _gpus(words: Sequence[str]) -> list[Gpu]:
    """Return the GPUs to emulate: those that were asked for, or all, the default one first."""
    own = own_gpus_around()
    with input_errors(EmulationError, ValueError):
        asked = [emulated_gpu(word, own) for word in words]
        gpus = asked or sorted(known_gpus(own), key=lambda gpu: gpu.word != DEFAULT)
        prepare()
    return list(dict.fromkeys(gpus))


def _try_all(
    found: dict[Gpu, Fit],
    gpus: Sequence[Gpu],
    runs: ProgramRuns,
    jobs: int,
    stop: Stop,
    program: str,
    *,
    every: bool,
) -> None:
    """Add the result of the program on each GPU to ``found``: on the first one, then on ``jobs`` of the others at a time."""
    expandable = with_expandable_segments(os.environ)

    def tried(gpu: Gpu, more: dict[str, str]) -> Found:
        stop.check()
        how = " with expandable segments" if more else ""
        begun = f"[{gpus.index(gpu) + 1}/{len(gpus)}] {name_of(gpu)} (emulated){how} ... "
        line = WholeLines()
        # Lines of several that run at the same time would be mixed.
        if jobs == 1:
            line.write(begun)
        try:
            run = runs.on(gpu, more)
        except OSError as error:
            raise InputError(f"{program}: {error.strerror or error}") from None
        one = found_of(run, gpu, CONTEXT_BYTES)
        line.write(f"{'' if jobs == 1 else begun}{progress(one, str(Path.cwd()))}\n")
        return one

    def complete(gpu: Gpu, plain: Found) -> None:
        again = plain.outcome in NOT_ENOUGH and not plain.expandable and expandable is not None
        found[gpu] = Fit(gpu, plain, tried(gpu, expandable or {}) if again else None)

    first, *others = gpus
    plain = tried(first, {})
    if ends_it(plain, every=every):
        complete(first, plain)
        return
    runs.prepare(others)
    complete(first, plain)
    with ThreadPoolExecutor(jobs) as threads:
        left = [threads.submit(lambda gpu: complete(gpu, tried(gpu, {})), gpu) for gpu in others]
        try:
            for one in as_completed(left):
                one.result()
        except BaseException:
            stop.note(signal.SIGTERM)  # the others end with it
            raise
        finally:
            threads.shutdown(cancel_futures=True)


def _print(found: Sequence[Fit], command: Sequence[str], status: int, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(found, command, status), nl=False)
        return
    click.echo(err=True)
    write_lines([*laid_out(table(found, CONTEXT_BYTES), screen()), ""])
    more = details(found, str(Path.cwd()))
    write_lines([*more, ""] if more else [])
    write_lines([conclusion(found)])
