"""The ``--gpumem-*`` options, the marker and the fixture by name.

Every option's default is ``None``, so that what ``[tool.gpumem]`` says can apply.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import pytest

from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.formats import FORMATS
from pytest_gpumem.values.option_words import UPDATE_MODES


class Command(NamedTuple):
    """A command that runs one item again: options are put between ``words`` and ``rest``."""

    words: tuple[str, ...]
    rest: tuple[str, ...] = ()


COMMAND: pytest.StashKey[Command] = pytest.StashKey()
"""How to run an item again, where that is not by pytest and its id."""
MARKER = FIXTURE = "gpumem"
CONFIG_MARKER, CONFIG_FIXTURE = "gpumem_configs", "gpumem_config"
MARKER_ARGUMENTS = (
    "max_gb",
    *(metric.budget for metric in METRICS.values() if metric.budget is not None),
    "max_growth",
    "max_slowdown",
    "min_throughput",
    "device",
)
MARKER_HELP = (
    f"{MARKER}({', '.join(f'{name}=...' for name in MARKER_ARGUMENTS)}): measure the GPU memory of the test, and the speed of "
    "its steps, and fail when it is over budget or regresses"
)
CONFIG_MARKER_HELP = (
    "gpumem_configs(precision=None, checkpoint=None, ..., skip=()): run the test once for each combination of step configs, "
    "which it gets as gpumem_config"
)
ExplainMode = Literal["on-failure", "always", "never"]
EXPLAIN_MODES: tuple[ExplainMode, ...] = get_args(ExplainMode)
OPTIONS = tuple(
    f"gpumem_{name}"
    for name in (
        "baseline",
        "update",
        "reason",
        "store",
        "device",
        "against",
        "strict",
        "no_time",
        "rank_timeout",
        "pack",
        "explain",
        "artifacts",
        "report",
    )
)
GATE_OPTIONS = ("gpumem_baseline", "gpumem_update", "gpumem_strict", "gpumem_report")
"""The options that ask for a result also where nothing is measured."""


def is_measured(item: pytest.Item) -> bool:
    """Return whether a test has the marker or the fixture."""
    return FIXTURE in getattr(item, "fixturenames", ()) or item.get_closest_marker(MARKER) is not None


def add_options(parser: pytest.Parser) -> None:
    """Add the options to pytest's command line."""
    group = parser.getgroup("gpumem", "GPU memory and throughput (pytest-gpumem)")
    group.addoption(
        "--gpumem-baseline",
        action="store_true",
        default=None,
        help="compare with the stored baselines and fail on regressions",
    )
    group.addoption(
        "--gpumem-update",
        choices=UPDATE_MODES,
        default=None,
        help="write measurements into the store: add what is missing (new), lower what got better (improved), "
        "or accept everything (all)",
    )
    group.addoption(
        "--gpumem-reason",
        metavar="TEXT",
        default=None,
        help="why the changes that --gpumem-update accepts are accepted; kept with each baseline that changes, and shown by "
        "failures and `gpumem history`",
    )
    group.addoption(
        "--gpumem-store",
        metavar="PATH|URL",
        default=None,
        help="where the baselines lie (default: gpumem-baselines in the root directory)",
    )
    group.addoption(
        "--gpumem-device",
        metavar="DEVICE",
        default=None,
        help="where steps run: cuda (default), cpu, auto for CUDA where there is one and the CPU otherwise, a GPU that is "
        "emulated (emulated:h100, emulated:24GB), or a device that a plugin adds",
    )
    group.addoption(
        "--gpumem-against",
        metavar="SLUG",
        default=None,
        help="on an emulated GPU: compare with the baselines of a real one, by the name of their folder in the store",
    )
    group.addoption(
        "--gpumem-strict",
        action="store_true",
        default=None,
        help="fail every measured test whose verdict is not ok or improved, also what could not be measured",
    )
    group.addoption(
        "--gpumem-explain",
        choices=EXPLAIN_MODES,
        default=None,
        help="tell what a peak is made of, with one more step: when a test fails or a baseline is written (on-failure, "
        "the default), for every test (always), or never",
    )
    group.addoption(
        "--gpumem-artifacts",
        metavar="DIR",
        default=None,
        help="write the timeline of each step that is explained here (JSON), and on CUDA its snapshot for "
        "pytorch.org/memory_viz",
    )
    group.addoption(
        "--gpumem-report",
        action="append",
        metavar="FILE",
        default=None,
        help="write a report, in the format that the suffix says: "
        f"{', '.join(f'{one.suffix} {one.title}' for one in FORMATS)}; may be repeated",
    )
    group.addoption(
        "--gpumem-no-time",
        action="store_true",
        default=None,
        help="take no times: measure memory and count work only; steps run fewer times",
    )
    group.addoption(
        "--gpumem-rank-timeout",
        metavar="SECONDS",
        default=None,
        help="under torchrun: how long ranks may come no further while others wait for them, before the session ends and names "
        "them (default: 600)",
    )
    group.addoption(
        "--gpumem-pack",
        action="store_true",
        default=None,
        help="with pytest-xdist: tests whose peaks are known, by a baseline or a budget, share a GPU as far as they fit, the "
        "largest first; others, and those that are timed, have it alone",
    )
