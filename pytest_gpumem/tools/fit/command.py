"""``gpumem fit``: runs a program on emulated GPUs to find out which GPUs have enough memory for the program."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.errors import EmulationError, StopSignal
from pytest_gpumem.base.processes import recorded_signals
from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.emulating.emulated_process.usage import InvalidReport
from pytest_gpumem.emulating.emulation.gpus import DEFAULT, Gpu, emulated_gpu, known_gpus
from pytest_gpumem.emulating.emulation.load import CONTEXT_BYTES, prepare
from pytest_gpumem.reporting.reports.layout import laid_out
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.jobs import jobs_option, most_jobs
from pytest_gpumem.tools.console.project import own_gpus_around
from pytest_gpumem.tools.console.streams import (
    InputError,
    WholeLines,
    WholeNumber,
    format_option,
    input_errors,
    screen,
    write_lines,
)
from pytest_gpumem.tools.fit.forks import ProgramRuns
from pytest_gpumem.tools.fit.outcome import NOT_ENOUGH, Fit, FitOutcome, RunResult, ends_it, exit_status, result_of
from pytest_gpumem.tools.fit.run import with_expandable_segments
from pytest_gpumem.tools.fit.summary import conclusion, details, name_of, progress, table, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.base.processes import Stop


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--device",
    "words",
    multiple=True,
    metavar="GPU",
    shell_complete=completion.cards,
    help="Run the program on this emulated GPU: `l4`, `24GB` (an H100 with 24 GB), `h100x8` (8 GPUs), "
    "`h100-80gb-mig-1g.10gb` (a MIG slice), or a GPU that the project defines. May be repeated. Default: all known GPUs, "
    "beginning with `h100`.",
)
@click.option(
    "--steps",
    type=WholeNumber(min=1),
    metavar="N",
    help="Stop the program after N calls of `step()` on one of its optimizers, for example `3`, and treat this as success. The "
    "program's later code, such as an evaluation, does not run, so its memory is not measured. Default: run the program to its "
    "end.",
)
@jobs_option("The runs share the current folder, so they must not write the same files.")
@format_option("json")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def fit(*, words: tuple[str, ...], steps: int | None, jobs: int, form: str, command: tuple[str, ...]) -> None:
    """Find the GPUs into which an unchanged program fits.

    The command runs the program once for each GPU, and prints the memory that the program needs on the GPU. It needs no
    real GPU, because every GPU is emulated: the CUDA build of torch runs, but stand-ins replace CUDA's libraries.
    PyTorch's own allocator decides whether memory runs out.

    If memory runs out on a GPU, the command runs the program there once more with a setting of the allocator that reduces
    fragmentation: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

    COMMAND is a script (`train.py`) or a module (`-m my.train`) for this Python, or any other program. Each run starts in
    the current folder, without standard input, and writes the program's files again. The program's output is shown only
    if the program fails.

    \b
    Examples:
      gpumem fit train.py --batch 8
      gpumem fit --device l4 --device a100-40gb --steps 3 -- python train.py

    Exit status: 0 if the program fits into each --device, or without --device into at least one GPU, 1 if memory ran out,
    2 for wrong usage, or if there is no answer because a GPU cannot be emulated here, the program fails by itself
    or it uses no GPU memory, 130 after Ctrl-C, 143 after SIGTERM.
    \f
    The status is also 1 if the program fits only with expandable segments.

    If no `--device` is given, the command first runs the program on an H100. If the program fails there for another reason
    than memory, the command does not try other GPUs. After Ctrl-C or SIGTERM, the command stops the programs and prints
    the results so far.

    If the environment already sets expandable segments, on or off, there is no second run.

    ## `--device`

    The names of all GPUs are on the page [cards](cards.md). A project defines its own GPUs in `[tool.gpumem.gpus]`.

    ## `--jobs`

    The command first runs the program on a single GPU, and then on N other GPUs at the same time.

    ## Example with output

    This program trains GPT-2 small for three steps with AdamW, AMP in bfloat16 and 8 sequences of 1,024 tokens
    (transformers 5.23, torch 2.13.0):

    ```console
    $ gpumem fit --device t4 --device rtx4090 --device l4 --device a100-40gb --device h100 --steps 3 train.py --batch 8
    GPU          memory  reserved  allocated      left
    T4         15.83 GB         -          -         -  out of memory
    L4         23.66 GB  15.25 GB   13.57 GB   7.87 GB  fits
    RTX 4090   25.25 GB  15.25 GB   13.57 GB   9.45 GB  fits
    A100 40GB  42.30 GB  15.25 GB   13.57 GB  26.50 GB  fits
    H100 80GB  85.03 GB  15.28 GB   13.61 GB  69.20 GB  fits

    T4: out of memory at train.py:15 train: 402.65 MB wanted, 14.95 GB allocated and 15.05 GB reserved
      CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which 225.06 MiB is free. ...

    needs 15.25 GB to 15.28 GB reserved (emulated): fits L4, RTX 4090, A100 40GB, H100 80GB; not T4
    ```

    With `--device 14.5GB` the same program ends with
    `fits none (emulated); not H100 with 14.5GB; with expandable segments 13.74 GB: fits H100 with 14.5GB`.

    ## Columns

    - `reserved` and `allocated` are the highest values in PyTorch's allocator, even if the program calls
      `torch.cuda.reset_peak_memory_stats()`. They differ between GPUs because kernels and cuBLAS workspaces differ.
      Expandable segments change `reserved`.
    - `left` is the free memory: `memory` minus `reserved`, and minus 545 MB for the CUDA context in each process.
    - For several GPUs (`h100x8`), the row shows the GPU with the highest peak.
    - In the emulation, each process can use a GPU's whole memory. If several processes used the same GPU at the same time,
      their peaks are added. The sum is an upper bound, because the peaks may come at different times.

    ## Outcomes

    - `fits`: the program ended with status 0 and never ran out of memory.
    - `out of memory`: the program failed because memory ran out.
    - `out of memory together`: each process fits alone, but the processes on the same GPU need too much together.
    - `ran out of memory and went on`: the program caught the error and ended with status 0, for example after it chose a
      smaller batch. The program does not count as fitting.
    - `cannot run on it`: the installed torch has no kernels for the GPU (a V100 with CUDA 13), or the GPU lacks an
      operation (flash attention on a T4, `torch._scaled_mm` on an A100). The program would also fail on a real GPU of this
      kind. bfloat16 on a T4 works, because torch emulates bfloat16.
    - `failed by itself`: the program ended with a status other than 0, but memory did not run out. The last lines of its
      output are shown.

    ## Notes

    A line with `note:` contains one of these remarks:

    - The program only just fits. PyTorch had to return cached memory to the GPU before an allocation succeeded.
    - The program read a value that an emulated GPU does not compute. From then on, its memory may differ from the memory on a
      real GPU.
    - cuDNN's workspace memory on this GPU is not known.
    - A process was killed before it reported its memory.
    - Autograd graphs may fill the GPU, as in an inference program without `torch.no_grad()`. This note appears if all of
      these conditions hold: memory ran out before the first backward, the program made no optimizer, operations were
      recorded for autograd, and at least a quarter of the allocated bytes belonged to no tensor of the program. In JSON,
      these bytes are `ran_out.without_tensor`.

    ## Shared imports

    - Imports take most of a short run's time, so the runs of a script or module share them. A server process imports the same
      packages as the first run, and each further run is a fork of the server. To check that a fork gives the same figures, the
      first run is repeated in a fork. If the results differ, every run imports its packages itself.
    - Runs do not share imports for other commands (`torchrun`), for programs in which several processes use a GPU, or if
      sharing would not be faster. To switch sharing off, start Python through another program:
      `gpumem fit -- env python train.py`.
    - A package that looks at the GPU during its import, for example torchao, is imported in each fork.

    ## JSON

    `--format json` prints an object with `format` (1), `emulated` (true), `exit_status`, `command`, `conclusion` and `gpus`.
    The list `gpus` follows the order of the `--device` options, or begins with `h100`. Each GPU has these keys:

    - `gpu`, `count`, `name`, `total_bytes`: the word for `--device` (`l4`), the number of GPUs, the GPU's name, and the
      memory in bytes of a single GPU.
    - `outcome`: the outcome, as listed above.
    - `status`: the program's exit status, or a negative signal number if a signal killed the program.
    - `allocated`, `reserved`: the highest values in PyTorch's allocator, in bytes.
    - `devices`: the number of used GPUs.
    - `together`: the largest number of processes that used the same GPU at the same time.
    - `retries`: the number of allocations that succeeded only after PyTorch returned cached memory to the GPU.
    - `times_out_of_memory`: the number of failed allocations.
    - `ran_out`: the first failed allocation, with `device`, `wanted`, `allocated`, `reserved`, `line` and `without_tensor`,
      or `null`.
    - `message`: PyTorch's out-of-memory error.
    - `last_lines`: the last lines of the program's output, if it failed by itself.
    - `expandable`: whether the allocator used expandable segments.
    - `unknown`: the value that the program read although an emulated GPU does not compute it, or `null`.
    - `without_statistics`: whether the program uses an allocator without statistics.
    - `lacking`: the reason why the peaks may be too low, or `null`.
    - `cannot_run`: the reason why the program cannot run on this GPU, or `null`.
    - `killed`: the number of processes that were killed before they reported their memory.
    - `with_expandable_segments`: the second run, with `outcome` and the keys below it, or `null`.
    """
    gpus = _gpus(words)
    arguments = _with_python(command)
    jobs = most_jobs(min(jobs, max(1, len(gpus) - 1)))
    by_gpu: dict[Gpu, Fit] = {}
    interrupted = None
    with recorded_signals() as stop:
        try:
            with closing(ProgramRuns(arguments, os.environ, steps, jobs, stop)) as runs:
                _try_all(by_gpu, gpus, runs, jobs, stop, arguments[0], every=bool(words))
        except StopSignal as stopped:
            interrupted = stopped.exit_status
            were = word_form(len(by_gpu), "was", "were")
            click.echo(f"\ninterrupted: {len(by_gpu)} of {counted(len(gpus), 'GPU')} {were} tried", err=True)
    fits = [by_gpu[gpu] for gpu in gpus if gpu in by_gpu]
    if interrupted is not None:
        if fits:
            _print(fits, arguments, interrupted, as_json=form == "json")
        sys.exit(interrupted)
    if fits[0].plain.without_statistics:
        raise InputError(
            "the program's memory is unknown, because its allocator has no statistics; run it with PyTorch's allocator, and "
            "without PYTORCH_NO_CUDA_MEMORY_CACHING"
        )
    if fits[0].plain.outcome is FitOutcome.UNUSED:
        raise InputError(
            "the program uses no GPU memory: PyTorch allocated nothing on a CUDA device; check that the program moves its "
            "model to cuda"
        )
    status = exit_status(fits, every=bool(words))
    _print(fits, arguments, status, as_json=form == "json")
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
    """Return the GPUs in ``words``. If the user named no GPU, return all known GPUs, beginning with the H100."""
    own = own_gpus_around()
    with input_errors(EmulationError, ValueError):
        requested = [emulated_gpu(word, own) for word in words]
        gpus = requested or sorted(known_gpus(own), key=lambda gpu: gpu.word != DEFAULT)
        prepare()
    return list(dict.fromkeys(gpus))


def _try_all(
    fits: dict[Gpu, Fit],
    gpus: Sequence[Gpu],
    runs: ProgramRuns,
    jobs: int,
    stop: Stop,
    program: str,
    *,
    every: bool,
) -> None:
    """Run the program on the first GPU, then on ``jobs`` GPUs at a time, and add the results to ``fits``.

    If the user named the GPUs (``every``), all are tried. Otherwise a failure on the first GPU ends the search.
    """
    expandable = with_expandable_segments(os.environ)

    def run_on(gpu: Gpu, extra_variables: dict[str, str]) -> RunResult:
        stop.check()
        segments = " with expandable segments" if extra_variables else ""
        begin = f"[{gpus.index(gpu) + 1}/{len(gpus)}] {name_of(gpu)} (emulated){segments} ... "
        line = WholeLines()
        # With several jobs, print the line only when it is complete, because simultaneous runs would mix their lines.
        if jobs == 1:
            line.write(begin)
        try:
            run = runs.on(gpu, extra_variables)
        except OSError as error:
            raise InputError(f"{program}: {error.strerror or error}") from None
        except InvalidReport as error:
            raise InputError(str(error)) from None
        result = result_of(run, gpu, CONTEXT_BYTES)
        line.write(f"{'' if jobs == 1 else begin}{progress(result, str(Path.cwd()))}\n")
        return result

    def complete(gpu: Gpu, plain: RunResult) -> None:
        is_repeated = plain.outcome in NOT_ENOUGH and not plain.expandable and expandable is not None
        fits[gpu] = Fit(gpu, plain, run_on(gpu, expandable or {}) if is_repeated else None)

    first_gpu, *other_gpus = gpus
    plain = run_on(first_gpu, {})
    if ends_it(plain, every=every):
        complete(first_gpu, plain)
        return
    runs.prepare(other_gpus)
    complete(first_gpu, plain)
    with ThreadPoolExecutor(jobs) as threads:
        futures = [threads.submit(lambda gpu: complete(gpu, run_on(gpu, {})), gpu) for gpu in other_gpus]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.record(signal.SIGTERM)  # End the running programs on other GPUs.
            raise
        finally:
            threads.shutdown(cancel_futures=True)


def _print(fits: Sequence[Fit], command: Sequence[str], status: int, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(fits, command, status), nl=False)
        return
    click.echo(err=True)
    write_lines([*laid_out(table(fits, CONTEXT_BYTES), screen()), ""])
    detail_lines = details(fits, str(Path.cwd()))
    write_lines([*detail_lines, ""] if detail_lines else [])
    write_lines([conclusion(fits)])
