"""``gpumem fit``: runs a program on emulated GPUs to find the GPUs into which it fits."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.processes import StopSignal, recorded_signals
from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.emulating.emulation.errors import EmulationError
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
    help="Run the program on this GPU: `l4`, `24GB`, `h100x8`, `h100-80gb-mig-1g.10gb`, or a GPU that the project defines. "
    "May be repeated; the program must fit into each. Default: all known GPUs, beginning with `h100`.",
)
@click.option(
    "--steps",
    type=WholeNumber(min=1),
    metavar="N",
    help="End the program, with status 0, after N steps of one of its optimizers, for example `3`. An evaluation or a "
    "checkpoint that comes later does not run. Default: run the program to its end.",
)
@jobs_option("Runs at the same time must not write the same files.")
@format_option("json")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def fit(*, words: tuple[str, ...], steps: int | None, jobs: int, form: str, command: tuple[str, ...]) -> None:
    """Find the GPUs into which an unchanged program fits.

    The command runs the program on each GPU, which is emulated, so no GPU is needed. The CUDA build of torch runs on
    stand-ins for CUDA's libraries, so PyTorch's own allocator decides whether memory runs out. If it does, the program
    runs once more with `expandable_segments:True` in `PYTORCH_CUDA_ALLOC_CONF`, unless the environment sets expandable
    segments itself.

    COMMAND is a script (`train.py`) or a module (`-m my.train`) for this Python, or any other program. It runs in the
    current folder, several times, and writes its files each time. It has no standard input. Its output is shown only if
    it fails. Without --device, a program that fails for another reason than memory on the first GPU is not tried on the
    others. After Ctrl-C or another signal, the command stops the programs and prints the results so far.

    \b
    Examples:
      gpumem fit train.py --batch 8
      gpumem fit --device l4 --device a100-40gb --steps 3 -- python train.py

    Exit status: 0 if the program fits into each GPU of --device, or without --device into at least one GPU, 1 if
    memory ran out on a GPU, even if the program fits with expandable segments, 2 for wrong usage, or if no answer is
    possible because a GPU cannot be emulated here, the program fails by itself or it uses no GPU memory, 130 after
    Ctrl-C, 143 after SIGTERM.
    \f
    ## `--device`

    The words for GPUs are on the page [cards](cards.md), and a project's own GPUs in `[tool.gpumem.gpus]`.

    ## `--jobs`

    The first GPU is tried alone, then N others at a time.

    ## Example with output

    Three steps of GPT-2 small (transformers 5.23, torch 2.13.0, AMP in bfloat16, 8 sequences of 1,024 tokens, AdamW):

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

    - `reserved` and `allocated` are the highest values in PyTorch's allocator, even if the program resets its peaks.
      They differ between GPUs because kernels and cuBLAS workspaces differ. Expandable segments change
      `reserved`.
    - `left` is `memory` minus `reserved` and minus the CUDA context, which is assumed to take 545 MB in each process.
    - For several GPUs (`h100x8`) the figures are those of the GPU with the highest peak. Each process can use a
      device's whole memory. If several processes used one device at the same time, their peaks are added up, although
      the peaks may not have come at the same moment.

    ## Outcomes

    - `fits`: the program ended with status 0 and never ran out of memory.
    - `out of memory`: the program failed because memory ran out.
    - `out of memory together`: each process fits alone, but not together with the processes that use the same device.
    - `ran out of memory and went on`: the program caught the error and ended with status 0, for example with a smaller
      batch; this does not count as fitting.
    - `cannot run on it`: the installed torch has no kernels for the GPU (a V100 with CUDA 13), or the GPU lacks an
      operation (flash attention on a T4, `torch._scaled_mm` on an A100). The program would fail on a real GPU as well.
      bfloat16 on a T4 is no such case, because torch emulates it.
    - `failed by itself`: the program ended with another status than 0 for another reason; the end of its output is
      shown.

    ## Notes

    A line that begins with `note:` says that

    - the program fits only just, because PyTorch returned cached memory to the GPU before an allocation succeeded;
    - the program read a value that an emulated GPU does not compute, so later memory may differ from a GPU's;
    - cuDNN's memory on this GPU is not known;
    - a process was killed before it reported its memory;
    - autograd graphs may fill the GPU, as in an inference program without `torch.no_grad()`. The note appears if memory
      ran out before any backward in a program without an optimizer, gradients were recorded, and at least a quarter of
      the allocated bytes belonged to no tensor of the program. JSON has these bytes as `ran_out.without_tensor`.

    ## Shared imports

    - For a file or module, the runs share the imports: one process imports the packages that the first run imported,
      and each further run is a fork of it. The first run is repeated in a fork. If its result differs there, each run
      imports by itself.
    - Nothing is shared if sharing would not be faster, for other commands (`torchrun`), and for programs in which
      several processes use a GPU. To share nothing, start Python through another program:
      `gpumem fit -- env python train.py`.
    - A package whose import depends on the GPU, for example torchao, is imported in each fork.

    ## JSON

    `--format json` prints bytes. The keys are `format` (1), `emulated` (true), `exit_status`, `command`, `conclusion`
    and `gpus`, in the order of the `--device` options, or beginning with `h100`. Each GPU has these keys:

    - `gpu`, `count`, `name`, `total_bytes`: the GPU: `l4`, the number of GPUs, its name, its memory.
    - `outcome`: the outcome, as listed above.
    - `status`: the program's exit status; negative for the signal that killed it.
    - `allocated`, `reserved`: the highest values, in bytes.
    - `devices`, `together`: the number of devices that were used, and of processes that used one device at the same
      time.
    - `retries`: allocations that succeeded only after cached memory was returned.
    - `times_out_of_memory`: how often memory ran out.
    - `ran_out`: the moment when memory first ran out: `device`, `wanted`, `allocated`, `reserved`, `line`,
      `without_tensor`; or `null`.
    - `message`: PyTorch's error.
    - `last_lines`: the end of the output of a program that failed by itself.
    - `expandable`: whether segments were expandable.
    - `unknown`: the value that the program read and that an emulated GPU does not compute; or `null`.
    - `without_statistics`: whether the program has an allocator of its own, which keeps no statistics.
    - `lacking`: why the peaks may be too low; or `null`.
    - `cannot_run`: why the program cannot run on this GPU; or `null`.
    - `killed`: the number of processes that were killed before they reported their memory.
    - `with_expandable_segments`: the second run, with the keys from `outcome` on; or `null`.
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
            "the program's memory is unknown, because it uses its own allocator, which keeps no statistics"
        )
    if fits[0].plain.outcome is FitOutcome.UNUSED:
        raise InputError("the program uses no GPU memory: PyTorch allocated nothing on a CUDA device")
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
    """Return the requested GPUs, or all known GPUs with the default first."""
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

    If the user named the GPUs, ``every`` is true. Otherwise a failure on the first GPU ends the search.
    """
    expandable = with_expandable_segments(os.environ)

    def run_on(gpu: Gpu, extra_variables: dict[str, str]) -> RunResult:
        stop.check()
        segments = " with expandable segments" if extra_variables else ""
        begin = f"[{gpus.index(gpu) + 1}/{len(gpus)}] {name_of(gpu)} (emulated){segments} ... "
        line = WholeLines()
        # Simultaneous runs would mix their lines.
        if jobs == 1:
            line.write(begin)
        try:
            run = runs.on(gpu, extra_variables)
        except OSError as error:
            raise InputError(f"{program}: {error.strerror or error}") from None
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
            stop.record(signal.SIGTERM)  # This signal ends the other runs.
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
