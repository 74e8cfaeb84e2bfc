"""The ``--gpumem-*`` options, the marker and the fixture by name.

Every pytest run loads this module, so it imports little, and rows are named tuples: a dataclass takes 0.4 ms to create.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import pytest

from pytest_gpumem.config import kinds, renamed
from pytest_gpumem.reports.formats import FORMATS
from pytest_gpumem.values.option_words import UPDATE_MODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.gate.verdict import Cell


class Command(NamedTuple):
    """A command that runs one item again: options are put between ``words`` and ``rest``."""

    words: tuple[str, ...]
    rest: tuple[str, ...] = ()


COMMAND: pytest.StashKey[Command] = pytest.StashKey()
"""The command that runs an item again, where that is not pytest and its id."""
ARGUMENT: pytest.StashKey[str] = pytest.StashKey()
"""The argument of pytest without which there is no such item: the option of a model that is not in the settings."""
CELL: pytest.StashKey[Cell] = pytest.StashKey()
"""The cell of an item in its matrix, where no marker makes that."""
PARSER: pytest.StashKey[pytest.Parser] = pytest.StashKey()
"""pytest's parser of options, which knows the options of all plugins."""
MARKER = FIXTURE = "gpumem"
CONFIG_MARKER, CONFIG_FIXTURE = "gpumem_configs", "gpumem_config"
ExplainMode = Literal["on-failure", "always", "never"]
EXPLAIN_MODES: tuple[ExplainMode, ...] = get_args(ExplainMode)


class Option(NamedTuple):
    """The option ``--gpumem-NAME``. Its field of `Settings`, and its key in ``[tool.gpumem]``, have the same ``name``."""

    name: str
    kind: kinds.Kind
    help: str
    metavar: str | None = None
    """The name of the value in help; flags and choices need none."""
    is_key: bool = True
    """True if it may stand in ``[tool.gpumem]``; others are for one session."""
    in_accept: bool = False
    """True if the command that accepts a result repeats it as it was typed, since it decides what is measured.

    For options that take one value: neither flags nor those that may be repeated.
    """
    for_tests: bool = False
    """True if it says which tests there are, and so is none of `gpumem run`."""
    wants_result: bool = False
    """True if a session in which it is typed has to say something also where nothing is measured."""

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--gpumem-{self.name.replace('_', '-')}"

    @property
    def is_flag(self) -> bool:
        """True if it is switched on and off, and takes no value."""
        return self.kind is kinds.FLAG

    @property
    def negated(self) -> str:
        """A flag as it is typed to switch it off."""
        return f"--no-{self.flag[2:]}"

    @property
    def dest(self) -> str:
        """The name of its value among pytest's."""
        return f"gpumem_{self.name}"


OPTIONS = (
    Option("baseline", kinds.FLAG, "compare with the stored baselines and fail on regressions", wants_result=True),
    Option(
        "update",
        kinds.one_of(UPDATE_MODES),
        "write measurements into the store: add what is missing (new), lower what got better (improved), or accept everything "
        "(all)",
        wants_result=True,
    ),
    Option(
        "reason",
        kinds.LINE,
        "why the changes that --gpumem-update accepts are accepted; kept with each baseline that changes, and shown by "
        "failures and `gpumem history`",
        "TEXT",
        is_key=False,
    ),
    Option(
        "device",
        kinds.TEXT,
        "where steps run: cuda (default), cpu, auto for CUDA where there is one and the CPU otherwise, a GPU that is "
        "emulated (emulated:h100, emulated:24GB), or a device that a plugin adds",
        "DEVICE",
        in_accept=True,
    ),
    Option(
        "against",
        kinds.TEXT,
        "on an emulated GPU: compare with the baselines of a real one, by the name of their folder in the store",
        "SLUG",
        is_key=False,
    ),
    Option(
        "store",
        kinds.STORE,
        "where the baselines lie (default: gpumem-baselines in the root directory)",
        "PATH|URL",
        in_accept=True,
    ),
    Option(
        "strict",
        kinds.FLAG,
        "fail every measured test whose verdict is not ok or improved, also what could not be measured",
        wants_result=True,
    ),
    Option(
        "explain",
        kinds.one_of(EXPLAIN_MODES),
        "tell what a peak is made of, with one more step: when a test fails or a baseline is written (on-failure, "
        "the default), for every test (always), or never",
        in_accept=True,
    ),
    Option(
        "artifacts",
        kinds.FOLDER,
        "write the timeline of each step that is explained here (JSON), and on CUDA its snapshot for "
        "pytorch.org/memory_viz",
        "DIR",
    ),
    Option(
        "report",
        kinds.REPORTS,
        "write a report, in the format that the suffix says: "
        f"{', '.join(f'{one.suffix} {one.title}' for one in FORMATS)}; may be repeated",
        "FILE",
        wants_result=True,
    ),
    Option(
        "model",
        kinds.MODELS,
        "measure a model of transformers, without a test file: hf:ORG/NAME, by its configuration and with random weights, or "
        "hf-tiny:ORG/NAME, two layers of it; as [[tool.gpumem.models]] says, or else one sample in fp32; may be repeated",
        "NAME",
        is_key=False,
        for_tests=True,
    ),
    Option(
        "time",
        kinds.FLAG,
        "time every step, or none (fewer runs of each); by default a gate leaves those out whose baselines have no times",
    ),
    Option(
        "rank_timeout",
        kinds.SECONDS,
        "under torchrun: how long ranks may come no further while others wait for them, before the session ends and names "
        "them (default: 600)",
        "SECONDS",
    ),
    Option(
        "pack",
        kinds.FLAG,
        "with pytest-xdist: tests whose peaks are known, by a baseline or a budget, share a GPU as far as they fit, the "
        "largest first; others, and those that are timed, have it alone",
    ),
)
"""All options, in the order of help."""


def is_measured(item: pytest.Item) -> bool:
    """Return whether a test has the marker or the fixture."""
    return FIXTURE in getattr(item, "fixturenames", ()) or item.get_closest_marker(MARKER) is not None


def check_words(parser: pytest.Parser, words: list[str]) -> None:
    """Raise ``pytest.UsageError`` for a word like an option of this plugin which no plugin has, with the one that is near.

    ``parser`` has the options of all plugins and of the first conftests. It is asked only where there is such a word.
    """
    flags = [
        flag for option in OPTIONS for flag in ((option.flag, option.negated) if option.is_flag else (option.flag,))
    ]
    doubtful = [word for word in words if word.partition("=")[0].startswith(("--gpumem-", "--no-gpumem-"))]
    if all(word.partition("=")[0] in flags for word in doubtful):
        return
    from pytest_gpumem.units import nearest

    _, unknown = parser.parse_known_and_unknown_args(words)
    for word in doubtful:
        name = word.partition("=")[0]
        if word in unknown:
            negated = f"--no-gpumem-{name.removeprefix('--gpumem-no-')}"
            raise pytest.UsageError(f"no such option: {name}; {nearest(negated if negated in flags else name, flags)}")


def arguments_of(option: Option) -> dict[str, Any]:
    """Return the arguments for `argparse` that say how an option is typed."""
    if option.is_flag:
        return {"action": argparse.BooleanOptionalAction}
    if option.kind.choices is not None:
        return {"choices": option.kind.choices}
    return {"action": "append" if option.kind.is_array else "store", "metavar": option.metavar}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpumem", "GPU memory and throughput (pytest-gpumem)")
    for option in OPTIONS:
        # Without a default, what [tool.gpumem] says can apply.
        group.addoption(option.flag, default=None, help=option.help, **arguments_of(option))
    for old, now in renamed.OPTIONS.items():
        group.addoption(old, action=_Renamed, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS, metavar=now)


class _Renamed(argparse.Action):
    """An option that is called otherwise now: its metavar."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        raise argparse.ArgumentError(None, f"{option_string} is called {self.metavar} now")
