"""``gpumem emulate``: any program on an emulated GPU, with its peaks at the end."""

from __future__ import annotations

import os

import click

from pytest_gpumem.cli import completion
from pytest_gpumem.cli.project import own_gpus_around
from pytest_gpumem.emulated_process.before_torch import PEAKS, QUIET
from pytest_gpumem.emulated_process.start import environment_for
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.gpus import emulated_gpu
from pytest_gpumem.emulation.load import prepare


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--quiet",
    "-q",
    is_flag=True,
    help="Print no peaks and record no allocator history. Reasons why the program's own figures are wrong are still printed.",
)
@click.argument("gpu", shell_complete=completion.cards)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def emulate(*, quiet: bool, gpu: str, command: tuple[str, ...]) -> None:
    """Run a program on an emulated GPU, and tell the peaks of its memory and what they are made of.

    GPU is one of h100, a100, l4 and so on, several of them (h100x8), a MIG slice (h100-80gb-mig-1g.10gb), one of the project's
    own ([tool.gpumem.gpus]), or a size: 24GB is an H100 with so much memory. The CUDA build of torch runs as it is, over
    stand-ins for CUDA's libraries: memory is torch's own allocator's, values of large tensors are not computed, and nothing
    takes the time that it takes on a GPU. Programs that are not Python are run, too: what counts is each Python that they
    start.

    \b
    Examples:
      gpumem emulate l4 -- python train.py --batch 8
      gpumem emulate --quiet h100x8 -- python -m pytest tests/models

    Exit status: 0 when the program ends with 0, its own where it ends with another, 1 when a GPU cannot be emulated here or the
    program not be started, 2 for wrong usage.
    """
    own = own_gpus_around()
    try:
        emulated = emulated_gpu(gpu, own)
        prepare()
    except (EmulationError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise click.UsageError("there is no command after --")
    environment = {**os.environ, **environment_for(emulated, os.environ), PEAKS: QUIET if quiet else "1"}
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 -- it takes this process's place, signals and status
    except OSError as error:
        raise click.ClickException(f"{command[0]}: {error.strerror}") from None
