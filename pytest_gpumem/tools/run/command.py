"""``gpumem run``: measures and gates the training steps of an ordinary script."""

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
"""This command's exit status for each replaced exit code of pytest."""
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
        raise click.BadParameter(f"{value!r} becomes part of a test's id: use only letters, digits and . _ = + -")
    return value


def _check_option(word: str) -> None:
    """Raise ``click.UsageError`` for an unknown option that begins with ``--gpumem-``; it names the nearest known option."""
    if word.startswith("--gpumem-"):
        flags = [option.flag for option in OPTIONS if not option.for_tests]
        raise click.UsageError(f"no such option: {word}; {nearest(word.partition('=')[0], flags)}")


class _ScriptPath(click.Path):
    """The path of a script. An unknown option before the script arrives here as the path."""

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
    help=f"Measure the memory of the first N steps (at least {FEWEST_STEPS}). The script ends some steps later.",
)
@click.option(
    "--as",
    "name",
    default="run",
    show_default=True,
    metavar="NAME",
    callback=_name,
    help="Call the run `train.py::NAME` in the store and in reports. Give each set of arguments its own name, for example "
    "`small`.",
)
@click.argument("script", type=_ScriptPath(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGUMENTS]...")
def run(*, steps: int, name: str, script: Path, arguments: tuple[str, ...], **options: Any) -> None:
    """Measure and gate the training steps of a script.

    The unchanged SCRIPT runs in this process, as `python SCRIPT ARGUMENTS` would run it. A step ends with each `step()`
    of its first optimizer. After enough steps, an exception ends the script, so its `finally` and `with` blocks still
    run. The verdict, the store, the reports and all settings work as for a test with the id `SCRIPT::run`.

    The script must move its model to the GPU itself; the device to measure is --gpumem-device. Options may follow
    SCRIPT. An unknown option, and everything after `--`, goes to the script.

    \b
    Examples:
      gpumem run train.py --gpumem-device=emulated:h100 --gpumem-update=new
      gpumem run train.py --gpumem-device=emulated:h100 --gpumem-baseline
      gpumem run --as small --steps 30 train.py -- --width 64

    Exit status: 0 if the script was measured and nothing failed, 1 if a metric regressed or is over budget, the
    script failed by itself, or it was not measured, for example because the device is not available, 2 for wrong usage
    or a wrong setting, 130 after Ctrl-C.
    \f
    ## How the script runs

    - The steps are measured as those of [`gpumem.loop`](fixture.md#gpumemloop). The script is the only item of a pytest
      session, so settings, budgets by pattern (`tests = "train.py"`), hooks in a `conftest.py`, devices and reports are
      the project's.
    - `addopts` that select, order or distribute tests have no effect, nor do `filterwarnings`, pytest's cache and
      pytest-randomly.
    - The script runs as `__main__`, with its folder first on `sys.path`.
    - An emulated GPU exists before torch is imported. The script sees it as `cuda`.
    - If a script puts nothing on the device, it is `unmeasured`.

    ## How the script ends

    - `sys.exit()` ends a script like its last line. Another exit status, or an exception, fails the run with the
      script's own traceback, and the measurements so far are shown.
    - `os._exit(0)` and `os.exec*` fail the run, because they would end the process unmeasured.
    - The script may clear `sys.argv`. A child that it forks ends with the script's code in the child, and is not
      measured.
    - Only this process is measured. Processes that the script starts (`torchrun`, workers of a `DataLoader`) are not.
    - If memory runs out, no composition is recorded, because the script cannot be run again from that point.
      `gpumem fit` names the line.
    """
    for word in arguments:
        _check_option(word)
    path = script.resolve()
    typed_options = _as_typed(options)
    own_options = [*([f"--steps={steps}"] if steps != STEPS else []), *([f"--as={name}"] if name != "run" else [])]
    repeat = Command(("gpumem", "run", os.path.relpath(path), *own_options), ("--", *arguments) if arguments else ())
    session = ScriptSession(Script(path, arguments, steps, name, repeat))
    status = run_pytest([str(path), "-s", "-rs", "-p", "no:warnings", *typed_options], session)
    # A skipped test is not a failure, but a script that was not measured is a failure.
    status = 1 if session.skipped and status == 0 else _STATUS.get(status, status)
    session.has_ended(passed=status == 0)
    sys.exit(status)


run.params += [_as_click_option(option) for option in OPTIONS if not option.for_tests]


def _as_typed(options: dict[str, Any]) -> list[str]:
    """Return the plugin's options as arguments for pytest."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif value:
            words += [f"{option}={text}" for text in (value if isinstance(value, tuple) else (value,))]
    return words
