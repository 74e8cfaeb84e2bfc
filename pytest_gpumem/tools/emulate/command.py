"""``gpumem emulate``: runs any program on an emulated GPU, and prints its memory peaks at the end."""

from __future__ import annotations

import os

import click

from pytest_gpumem.base.errors import EmulationError
from pytest_gpumem.emulating.emulated_process.before_torch import PEAKS, QUIET
from pytest_gpumem.emulating.emulated_process.start import environment_for
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.emulating.emulation.load import prepare
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.project import own_gpus_around


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--quiet",
    "-q",
    is_flag=True,
    help="Print no peaks. The program then also runs faster, because the allocator's history is not recorded. Warnings about "
    "wrong figures are still printed.",
)
@click.argument("gpu", shell_complete=completion.cards)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def emulate(*, quiet: bool, gpu: str, command: tuple[str, ...]) -> None:
    """Run a program on an emulated GPU and print its memory peaks.

    GPU is the name of a GPU such as `h100`, `a100-40gb` or `l4`. `h100x8` are eight GPUs, `h100-80gb-mig-1g.10gb` is a MIG
    slice, and `24GB` is an H100 with 24 GB of memory. The project's settings can define more names (`[tool.gpumem.gpus]`). The
    prefix `emulated:` is allowed.

    The CUDA build of torch runs unchanged, but stand-ins replace CUDA's libraries. PyTorch's own allocator manages the memory,
    as on a real GPU. Values in large tensors are not computed, and the program's times are not a GPU's times. COMMAND may be
    any program. Each Python process that the program starts sees the GPU.

    \b
    Examples:
      gpumem emulate l4 -- python train.py --batch 8
      gpumem emulate --quiet h100x8 -- python -m pytest tests/models

    Exit status: 0 if the program ends with 0, 1 if a GPU cannot be emulated here or the program cannot be started, 2 for wrong
    usage. Any other exit status comes from the program itself.
    \f
    ## Output

    When a Python process ends, the process prints these figures to standard error, for each GPU that it used:

    - the peaks of allocated and reserved memory;
    - the allocated memory at the peak, in bytes and blocks, by the program's source lines.

    If the program replaces PyTorch's allocator, the history is missing, so only the peaks are printed. An allocator without
    statistics (`torch.cuda.memory.CUDAPluggableAllocator`) has no peaks either.

    The process also prints a warning if figures may be wrong: cuDNN is missing and a convolution could have raised the peak, or
    the program read a value that an emulated GPU does not compute.

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
