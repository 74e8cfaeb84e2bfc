"""``gpumem run``: measures the training steps of an ordinary script, and judges them as a test's."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from pytest_gpumem.cli.project import run_pytest
from pytest_gpumem.cli.streams import INTERRUPTED, WholeNumber
from pytest_gpumem.config.kinds import FLAG
from pytest_gpumem.config.options import OPTIONS, Command, Option
from pytest_gpumem.measure.looped import FEWEST_STEPS, STEPS
from pytest_gpumem.script import Script, ScriptSession
from pytest_gpumem.units import nearest

_STATUS: dict[int, int] = {
    pytest.ExitCode.INTERRUPTED: INTERRUPTED,
    pytest.ExitCode.USAGE_ERROR: 2,
    pytest.ExitCode.INTERNAL_ERROR: 1,
    pytest.ExitCode.NO_TESTS_COLLECTED: 1,
}
"""Exit statuses of this command, by those of pytest that it does not share."""
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
        raise click.BadParameter(f"{value!r} is a part of a test's id: letters, digits and . _ = + - only")
    return value


def _check_option(word: str) -> None:
    """Raise the error for an option of the plugin that there is not, with the one that it may be."""
    if word.startswith("--gpumem-"):
        known = [option.flag for option in OPTIONS if not option.for_tests]
        raise click.UsageError(f"no such option: {word}; {nearest(word.partition('=')[0], known)}")


class _ScriptPath(click.Path):
    """The path of a script; an unknown option stands in its place where one is typed before it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _check_option(str(value))
        return super().convert(value, param, ctx)


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.option(
    "--steps",
    type=WholeNumber(min=FEWEST_STEPS),
    default=STEPS,
    show_default=True,
    help="How many steps memory is read from. The script is ended some steps later.",
)
@click.option(
    "--as",
    "name",
    default="run",
    show_default=True,
    callback=_name,
    help="What the run is called: train.py::run in the store. Runs with other arguments need names of their own.",
)
@click.argument("script", type=_ScriptPath(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGUMENTS]...")
def run(*, steps: int, name: str, script: Path, arguments: tuple[str, ...], **options: Any) -> None:
    """Measure the training steps of an ordinary script, and judge them as those of a test.

    SCRIPT runs in this process as `python SCRIPT ARGUMENTS` would, unchanged: a step ends with each step of its first
    optimizer. When enough steps have been measured, the script is ended by an exception, through its own finally and with
    blocks. Settings are those of the project, and the device is one of --gpumem-device. Options may stand after SCRIPT;
    what stands after -- is the script's.

    \b
    Examples:
      gpumem run train.py --steps 20 --gpumem-device=emulated:h100
      gpumem run --gpumem-baseline --as small train.py -- --width 64

    Exit status: 0 when it was measured and is not worse than it should be, 1 when it is, or the script fails, or cannot be
    measured, 2 for wrong usage, 130 when interrupted.
    """
    for word in arguments:
        _check_option(word)
    path = script.resolve()
    given = _as_typed(options)
    chosen = [*([f"--steps={steps}"] if steps != STEPS else []), *([f"--as={name}"] if name != "run" else [])]
    again = Command(("gpumem", "run", os.path.relpath(path), *chosen), ("--", *arguments) if arguments else ())
    session = ScriptSession(Script(path, arguments, steps, name, again))
    status = run_pytest([str(path), "-s", "-rs", "-p", "no:warnings", *given], session)
    # A test may be skipped; who runs a script wants it measured.
    status = 1 if session.skipped and status == 0 else _STATUS.get(status, status)
    session.has_ended(passed=status == 0)
    sys.exit(status)


run.params += [_as_click_option(option) for option in OPTIONS if not option.for_tests]


def _as_typed(options: dict[str, Any]) -> list[str]:
    """Return the plugin's options as pytest takes them."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif value:
            words += [f"{option}={one}" for one in (value if isinstance(value, tuple) else (value,))]
    return words
