"""``gpumem fit``: which GPUs a program fits into, by running it on emulated ones."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.project import own_gpus_around
from pytest_gpumem.cli.streams import (
    INTERRUPTED,
    InputError,
    WholeNumber,
    format_option,
    input_errors,
    renamed,
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
from pytest_gpumem.reports.layout import laid_out
from pytest_gpumem.values.option_words import EMULATED

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--device",
    "words",
    multiple=True,
    metavar="DEVICE",
    help="One that it has to fit into, as `gpumem emulate` has them: l4, 24GB, h100x8. May be repeated; all if not given.",
)
@click.option(
    "--steps",
    type=WholeNumber(min=1),
    metavar="N",
    help="End the program when one of its optimizers has made N steps and begins another.",
)
@format_option("json")
@renamed("--gpu", "--device")
@renamed("--json", "--format json", is_flag=True)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def fit(*, words: tuple[str, ...], steps: int | None, form: str, command: tuple[str, ...]) -> None:
    """Find the GPUs that a program, as it is, fits into, by running it on emulated ones.

    COMMAND is run once on each GPU, to its end, one after the other. The CUDA build of torch runs as it is, over stand-ins for
    CUDA's libraries: PyTorch's own allocator runs out of memory, or does not. Where it does, the program is run once more
    with expandable segments. A COMMAND that begins with a file (train.py) or with -m is run with this Python.

    \b
    Examples:
      gpumem fit train.py --batch 8
      gpumem fit --device l4 --device a100-40gb --steps 3 -- python train.py

    Exit status: 0 when the program fits into all GPUs that were asked for, or into one where none was, 1 when memory ran out, 2
    for wrong usage, and when it cannot be told: a GPU cannot be emulated here, or the program fails by itself or uses no GPU
    memory, 130 when interrupted.
    """
    arguments = _with_python(command)
    gpus = _gpus(words)
    found: list[Fit] = []
    try:
        _try_all(found, gpus, arguments, steps, every=bool(words))
    except KeyboardInterrupt:
        click.echo(f"interrupted: {len(found)} of {len(gpus)} GPUs were tried", err=True)
        if found:
            _print(found, arguments, INTERRUPTED, as_json=form == "json")
        sys.exit(INTERRUPTED)
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
    if first == "-m" or (first.endswith(".py") and not first.startswith("-")):
        return (sys.executable, *command)
    if first.startswith("-"):
        raise click.UsageError(f"no such option: {first}")
    return command


def _gpus(words: Sequence[str]) -> list[Gpu]:
    """Return the GPUs to emulate: those that were asked for, or all, the default one first."""
    own = own_gpus_around()
    with input_errors(EmulationError, ValueError):
        asked = [emulated_gpu(word if word.startswith(EMULATED) else EMULATED + word, own) for word in words]
        gpus = asked or sorted(known_gpus(own), key=lambda gpu: gpu.word != DEFAULT)
        prepare()
    return list(dict.fromkeys(gpus))


def _try_all(found: list[Fit], gpus: Sequence[Gpu], command: Sequence[str], steps: int | None, *, every: bool) -> None:
    """Append the result of the program on each GPU to ``found``."""

    def tried(gpu: Gpu, more: dict[str, str]) -> Found:
        how = " with expandable segments" if more else ""
        click.echo(f"[{len(found) + 1}/{len(gpus)}] {name_of(gpu)} (emulated){how} ... ", nl=False, err=True)
        try:
            run = runs.on(gpu, more)
        except OSError as error:
            raise InputError(f"{command[0]}: {error.strerror}") from None
        one = found_of(run, gpu, CONTEXT_BYTES)
        click.echo(progress(one, str(Path.cwd())), err=True)
        return one

    expandable = with_expandable_segments(os.environ)
    with closing(ProgramRuns(command, os.environ, steps, len(gpus))) as runs:
        for gpu in gpus:
            plain = tried(gpu, {})
            again = plain.outcome in NOT_ENOUGH and not plain.expandable and expandable is not None
            found.append(Fit(gpu, plain, tried(gpu, expandable or {}) if again else None))
            if ends_it(found[0], every=every):
                return


def _print(found: Sequence[Fit], command: Sequence[str], status: int, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(found, command, status), nl=False)
        return
    click.echo(err=True)
    write_lines([*laid_out(table(found, CONTEXT_BYTES), screen()), ""])
    more = details(found, str(Path.cwd()))
    write_lines([*more, ""] if more else [])
    write_lines([conclusion(found)])
