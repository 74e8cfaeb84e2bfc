"""``gpumem emulate``: runs any program on an emulated GPU, and prints its memory peaks at the end."""

from __future__ import annotations

import os

import click

from pytest_gpumem.emulating.emulated_process.before_torch import PEAKS, QUIET
from pytest_gpumem.emulating.emulated_process.start import environment_for
from pytest_gpumem.emulating.emulation.errors import EmulationError
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.emulating.emulation.load import prepare
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.project import own_gpus_around


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--quiet",
    "-q",
    is_flag=True,
    help="Print no peaks and do not record the allocator's history, which takes time. Warnings about wrong figures are still "
    "printed.",
)
@click.argument("gpu", shell_complete=completion.cards)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def emulate(*, quiet: bool, gpu: str, command: tuple[str, ...]) -> None:
    """Run a program on an emulated GPU and print its memory peaks.

    GPU is a card such as `h100`, `a100-40gb` or `l4`, several of them (`h100x8`), a MIG slice (`h100-80gb-mig-1g.10gb`), a
    card in the project's settings (`[tool.gpumem.gpus]`), or a size: `24GB` is an H100 with this much memory. The prefix
    `emulated:` is allowed.

    The CUDA build of torch runs unchanged on stand-ins for CUDA's libraries. PyTorch's own allocator manages the memory. Values
    in large tensors are not computed, and durations differ from a GPU's. COMMAND may be any program: every Python that it
    starts sees the GPU.

    \b
    Examples:
      gpumem emulate l4 -- python train.py --batch 8
      gpumem emulate --quiet h100x8 -- python -m pytest tests/models

    Exit status: 0 if the program ends with 0, 1 if a GPU cannot be emulated here or the program cannot be started, 2 for wrong
    usage. Any other exit status is the program's own.
    \f
    ## Output

    When a Python process ends, it prints on standard error, for each device that it used:

    - the peaks of allocated and reserved memory;
    - the memory that was live at the peak: bytes, blocks, and the line of the program that allocated them.

    An allocator other than PyTorch's has no history, so only the peaks are printed. One without statistics
    (`torch.cuda.memory.CUDAPluggableAllocator`) has no peaks either.

    A process also warns if the figures that the program prints may be wrong: if cuDNN is missing and a convolution could have
    raised the peak, or if the program read a value that is not computed.
    See [emulated GPUs](../concepts/emulated-gpu.md) and [all cards](cards.md).
    """
    own = own_gpus_around()
    try:
        emulated = emulated_gpu(gpu, own)
        prepare()
    except (EmulationError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise click.UsageError("there is no command after --; give one, for example: -- python train.py")
    environment = {**os.environ, **environment_for(emulated, os.environ), PEAKS: QUIET if quiet else "1"}
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606 -- it takes this process's place, signals and status
    except OSError as error:
        raise click.ClickException(f"{command[0]}: {error.strerror}") from None
