"""``gpumem run``: measures the training steps of an ordinary script, and compares them with a baseline."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from pytest_gpumem.base.units import nearest
from pytest_gpumem.measuring.measure.looped import FEWEST_STEPS, STEPS
from pytest_gpumem.plugin.config.command_line import Command
from pytest_gpumem.plugin.config.kinds import FLAG
from pytest_gpumem.plugin.config.options import OPTIONS, Option
from pytest_gpumem.tools.console.project import run_pytest
from pytest_gpumem.tools.console.streams import INTERRUPTED, WholeNumber
from pytest_gpumem.tools.run.script import Script, ScriptSession

_STATUS: dict[int, int] = {
    pytest.ExitCode.INTERRUPTED: INTERRUPTED,
    pytest.ExitCode.USAGE_ERROR: 2,
    pytest.ExitCode.INTERNAL_ERROR: 1,
    pytest.ExitCode.NO_TESTS_COLLECTED: 1,
}
"""The exit status of ``gpumem run`` for some exit codes of pytest. Other exit codes are passed on."""
_NAME = re.compile(r"[\w.=+-]+")


def _as_click_option(option: Option) -> click.Option:
    kind: dict[str, Any] = {"metavar": option.metavar, "multiple": option.kind.is_array}
    if option.kind is FLAG:
        return click.Option([f"{option.flag}/{option.negated}"], help=option.help_with_default, default=None)
    if option.kind.choices is not None:
        kind = {"type": click.Choice(option.kind.choices)}
    return click.Option([option.flag], help=option.help_with_default, default=None, **kind)


def _name(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r} would be part of a test's id: use only letters, digits and . _ = + -")
    return value


def _check_option(word: str) -> None:
    """Raise ``click.UsageError`` if a word begins with ``--gpumem-``.

    Such a word is no known option, because click has already parsed the known options. The message suggests the option with
    the most similar name.
    """
    if word.startswith("--gpumem-"):
        flags = [option.flag for option in OPTIONS if not option.for_tests]
        raise click.UsageError(f"no such option: {word}; {nearest(word.partition('=')[0], flags)}")


class _ScriptPath(click.Path):
    """The click type of the argument SCRIPT. It refuses an unknown option before the script, which click takes for the path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _check_option(str(value))
        return super().convert(value, param, ctx)


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.option(
    "--steps",
    type=WholeNumber(min=FEWEST_STEPS),
    default=STEPS,
    show_default=True,
    metavar="N",
    help=f"Measure the memory of the first N steps, at least {FEWEST_STEPS}. The script ends some steps later.",
)
@click.option(
    "--as",
    "name",
    default="run",
    show_default=True,
    metavar="NAME",
    callback=_name,
    help="Store the baseline as `train.py::NAME`. Give each set of ARGUMENTS its own name, for example `small`, so each has "
    "its own baseline.",
)
@click.argument("script", type=_ScriptPath(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGUMENTS]...")
def run(*, steps: int, name: str, script: Path, arguments: tuple[str, ...], **options: Any) -> None:
    """Measure and gate the training steps of a script.

    The unchanged SCRIPT runs in this process, as `python SCRIPT ARGUMENTS` would run it. A training step ends when the
    script calls `step()` on the first optimizer that it made. After enough steps, the command ends the script by an
    exception, so `finally` and `with` blocks in the script still run. Verdicts, baselines, reports and settings work as for
    a test with the id `SCRIPT::run`. The report also has processes started by the script.

    The script must move its model to the GPU itself. --gpumem-device names the device to measure. This command's options may
    follow SCRIPT. The script gets options that this command does not know, and everything after `--`.

    \b
    Examples:
      gpumem run train.py --gpumem-device=emulated:h100 --gpumem-update=new
      gpumem run train.py --gpumem-device=emulated:h100 --gpumem-baseline
      gpumem run --as small --steps 30 train.py -- --width 64

    Exit status: 0 if the script was measured and did not fail, 1 if a metric regressed or is over budget, the script
    failed by itself, or the script was not measured, for example because the device is not available, 2 for wrong usage
    or a wrong setting, 130 after Ctrl-C.
    \f
    ## How the script runs

    - Steps are measured as in [`gpumem.loop`](fixture.md#gpumemloop).
    - pytest runs in the project, with the script as the only item. So the project's settings, budgets by pattern
      (`tests = "train.py"`), hooks in a `conftest.py`, devices and reports apply to the script.
    - Options in `addopts` that select, order or distribute tests have no effect. `filterwarnings`, pytest's cache and
      pytest-randomly have no effect either.
    - The script runs as the module `__main__`, and its folder is the first on `sys.path`.
    - An emulated GPU exists before torch is imported. The script uses it as `cuda`.
    - If the script puts nothing on the device, the script is `unmeasured`.

    ## How the script ends

    - `sys.exit()` ends the script normally. If the script ends with an exit status other than 0 or with an exception, the run
      fails with the script's own traceback. The measurements so far are shown.
    - `os._exit(0)` and `os.exec*` fail the run, because they would end the process before the measurement is complete.
    - The script may change `sys.argv`. If the script forks, the child process runs the script's code to its end.
    - If memory runs out, the peak's composition is not recorded, because the step cannot run again. `gpumem fit` names the
      line at which memory ran out.

    ## Processes started by the script

    Each process with torch that inherits the environment reports its memory on the device. Examples are processes from
    `subprocess`, `torch.multiprocessing.spawn` and `torchrun`. A process counts from the script's start to the end of step
    `--steps`, or to the script's end if the script makes fewer steps.

    - The report has the measurement `loop: all processes`, and a measurement for each process on the device, such as
      `loop: train.py rank 0`. The names are those of [`gpumem.launch`](fixture.md#gpumemlaunch). Budgets and baselines apply
      to each measurement.
    - The figure for all processes is the sum of their peaks on a GPU or on the CPU, including the script's own peak. Two
      processes are added only if they ran at the same time. The sum is an upper bound, because the peaks may be at different
      times. A budget limits the most bytes that they held at the same time, if they are known.
    - If the script makes no step itself, as with `torch.multiprocessing.spawn`, the names begin with `script`, for example
      `script: all processes`. The script's own process has a measurement only if it used the device.
    - `--steps` ends only the script. Other processes run to their own end, so let them train for few steps.
    - The run fails if a process is killed by SIGKILL or another signal that ends it at once, or does not answer within 10
      seconds. The message and the JSON report have the reason, and a lower bound for a killed process's peak.
    - A note names a process with torch or CUDA and without a report: `not seen`. The last line counts it, and
      `--gpumem-strict` fails the run. Only Linux shows such processes.
    - On a CPU, other processes are measured on Linux if a C compiler is installed. Otherwise a note names each process that
      loads torch: `not counted`. `DataLoader` workers count only if they use a GPU.
    - To measure the steps of each rank, start this command by torchrun:
      `torchrun --nproc-per-node=2 --no-python gpumem run train.py`.
    """
    for word in arguments:
        _check_option(word)
    path = script.resolve()
    typed_options = _as_typed(options)
    own_options = [*([f"--steps={steps}"] if steps != STEPS else []), *([f"--as={name}"] if name != "run" else [])]
    repeat = Command(("gpumem", "run", os.path.relpath(path), *own_options), ("--", *arguments) if arguments else ())
    session = ScriptSession(Script(path, arguments, steps, name, repeat))
    status = run_pytest([str(path), "-s", "-rs", "-p", "no:warnings", *typed_options], session)
    # pytest exits with 0 after a skipped or unmeasured test. For this command, an unmeasured script is a failure.
    status = 1 if session.unmeasured and status == 0 else _STATUS.get(status, status)
    session.has_ended(passed=status == 0)
    sys.exit(status)


run.params += [_as_click_option(option) for option in OPTIONS if not option.for_tests]


def _as_typed(options: dict[str, Any]) -> list[str]:
    """Turn the plugin's options, as click parsed them, into arguments for pytest."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif value:
            words += [f"{option}={text}" for text in (value if isinstance(value, tuple) else (value,))]
    return words
