"""The ``--gpumem-*`` options, and the names of the markers and fixtures.

Every pytest run loads this module, so the module imports little. `Option` is a plain class, because defining a named tuple
would take 0.3 ms, and defining a dataclass 0.4 ms.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytest

from pytest_gpumem.facts.values.option_words import DEFAULT_DEVICE, UPDATE_MODES
from pytest_gpumem.plugin.config import kinds
from pytest_gpumem.reporting.reports.formats import FORMATS

if TYPE_CHECKING:
    from pytest_gpumem.judging.gate.verdict import Cell


ARGUMENT: pytest.StashKey[str] = pytest.StashKey()
"""The stash key for the pytest argument that collects an item again, if the item's id cannot. For example, a model that is
not in the settings needs ``--gpumem-model=NAME``."""
CELL: pytest.StashKey[Cell] = pytest.StashKey()
"""The stash key for an item's `Cell`, if the item's matrix of step configs comes from the settings and not from a marker."""
PARSER: pytest.StashKey[pytest.Parser] = pytest.StashKey()
"""The stash key for pytest's command-line parser, which has the options of all plugins."""
MARKER = FIXTURE = "gpumem"
CONFIG_MARKER, CONFIG_FIXTURE = "gpumem_configs", "gpumem_config"
ExplainMode = Literal["on-failure", "always", "never"]
EXPLAIN_MODES: tuple[ExplainMode, ...] = get_args(ExplainMode)
DEFAULT_EXPLAIN: ExplainMode = "on-failure"
DEFAULT_STORE = "gpumem-baselines"
"""The default folder for baselines, in pytest's root directory."""
DEFAULT_RANK_TIMEOUT = 600.0
"""The default in seconds. NCCL has the same default timeout for collectives."""


class Option:
    """An option ``--gpumem-NAME``. The field in `Settings` and the key in ``[tool.gpumem]`` have the same name."""

    def __init__(
        self,
        name: str,
        kind: kinds.Kind,
        help: str,  # noqa: A002 - as argparse calls it
        metavar: str | None = None,
        *,
        default: str | None = None,
        details: str = "",
        is_key: bool = True,
        in_accept: bool = False,
        for_tests: bool = False,
        wants_result: bool = False,
    ) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        """One or two sentences for ``pytest --help`` and for the options' reference page."""
        self.metavar = metavar
        """A word that stands for the value in the help, such as ``DEVICE``. Flags and options with choices do not need it."""
        self.default = default
        """The text for the default value in the help."""
        self.details = details
        """Further Markdown for the options' reference page, which ``pytest --help`` does not show."""
        self.is_key = is_key
        """True if ``[tool.gpumem]`` may have a key of the same name. All other options can only be typed, for a single
        session."""
        self.in_accept = in_accept
        """True if the option affects measurements. The command that a failure prints for accepting new figures repeats such
        options.

        These options have a single value. They are neither flags nor repeatable.
        """
        self.for_tests = for_tests
        """True if the option selects tests, so it is not an option of `gpumem run`."""
        self.wants_result = wants_result
        """True if a session with this option must report a result, even if it measures nothing."""

    @property
    def flag(self) -> str:
        """The option as it is typed: ``--gpumem-rank-timeout``."""
        return f"--gpumem-{self.name.replace('_', '-')}"

    @property
    def help_with_default(self) -> str:
        """The help text, followed by the default if there is one."""
        return self.help if self.default is None else f"{self.help} Default: {self.default}."

    @property
    def is_flag(self) -> bool:
        """True if the option has no value. ``--no-gpumem-NAME`` switches such an option off."""
        return self.kind is kinds.FLAG

    @property
    def negated(self) -> str:
        """The typed form that switches the flag off: ``--no-gpumem-strict``."""
        return f"--no-{self.flag[2:]}"

    @property
    def dest(self) -> str:
        """The name under which pytest's configuration stores the value: ``gpumem_rank_timeout``."""
        return f"gpumem_{self.name}"


_RELATIVE = (
    "A relative path on the command line starts in the folder in which pytest was started. In `pyproject.toml` it "
    "starts in pytest's root directory."
)
_EXPLAIN = """ `on-failure`: a step is explained if its test fails because of a figure in bytes, if memory runs out, or if its
baseline is written. With `--gpumem-baseline` and a JSON report, a step is also explained if
[`gpumem accept`](command-accept.md) would write its baseline from the report.

`always`: every step is explained. At its end, the session prints the largest rows of each peak for ten tests. With `-v` it
prints them for all tests.

`never`: no step is explained, and new baselines have no composition.

With `on-failure` and `always`, a step is also explained if the test's code reads the measurement's
[composition](../concepts/composition.md).
"""
_STORE = f"""
{_RELATIVE} `~` is the home folder.

A [URL](../concepts/store.md#a-store-behind-a-url) names a store in a bucket, for example `s3://bucket/baselines`. A path with a
host, such as `//host/share`, is not allowed in `pyproject.toml` and `addopts`, because a pull request can change these files.
"""
_AGAINST = """
The option needs `--gpumem-baseline` and an [emulated GPU](cards.md). The session writes no baselines, because baselines
for a real GPU have to be measured on that GPU. [`gpumem compare`](command-compare.md) shows the figures of two sessions
side by side.

For this comparison, each [metric](metrics.md) has a minimum tolerance, because peaks on an emulated GPU differ slightly
from [published peaks](../trust.md#published-peaks). `launches` is not compared, because a cuBLAS product can be two kernels
on a real GPU.
"""
_MODES = """
### Modes

A verdict that the mode accepts does not fail its test in this session, even with `--gpumem-baseline` or
`--gpumem-strict`.

| [Verdict](verdicts.md) | ``new`` | ``improved`` | ``all`` |
|---|---|---|---|
| `new`, `foreign`: the test has no baseline on this device | adds it, unless the test may be a [renamed test](../concepts/verdicts.md#renamed-tests) that grew | - | adds it |
| `new` for a metric: the baseline lacks this metric | adds the metric, if no difference between the environments affects it | - | replaces the baseline |
| `new` for a time: the baseline has no `step_times` | adds all times, if the baseline has the same `machine` (or none) and nothing disturbed the runs | - | replaces the baseline |
| `improved` | - | lowers each improved metric, and all times together, if [one environment fits all figures](#environment-of-a-lowered-baseline) | replaces the baseline |
| `missing`: the test still takes other measurements, but no longer takes this one | - | - | removes the baseline |
| `missing`: the test is not measured any more | - | - | - |
| `regressed`, `uncertain`, `stale` | - | - | replaces the baseline, but an `uncertain` time is added to the stored runs |
| `ok` for times | - | - | adds this run, and drops the oldest of more than ten runs |
| `ok` for all other metrics | - | - | replaces the baseline if a number of bytes, a count, the workload or a relevant detail of the environment differs, or if only this session has a composition |
| `over_budget`, and tests that failed by themselves or were skipped | - | - | - |

If only `peak_reserved` differs, the baseline is not replaced. A detail of the environment is relevant if it affects one of
the [metrics](metrics.md). If a test with baselines is not measured any more, the session names the test, and
[`gpumem prune`](command-prune.md) removes its baselines.

### Times that `all` writes

A baseline stores the times of up to ten runs. `--gpumem-update=all` adds this run with all its times, or no time at all.
This run replaces the stored runs instead if the step became slower or faster, if it does other work, if it runs on another
`machine`, or if this is the first run in which the device's clock rate can be read. The times of this run are not stored if
something disturbed it, if the machine was slower than in the stored runs, or if the clock rate cannot be read although the
stored runs have it. The session prints how many runs were left out for such a reason, and the reason for the first.

### Environment of a lowered baseline

A baseline has one environment for all its figures. ``improved`` replaces it with this session's environment if all figures
that are not lowered are valid there. A figure is valid if this session measured the same value, or if no difference between
the environments affects it. Otherwise the baseline keeps its environment and its times, if the lowered figures are valid in
that environment. If the figures do not fit either environment, nothing is written.

For example, a new release of torch needs fewer FLOPs and more operators. With the new release in the baseline,
`operators` would be `regressed` instead of `uncertain`, although no code changed. So ``improved`` does not change this
baseline. `--gpumem-update=all` accepts both figures.
"""  # noqa: E501 - a row of a Markdown table is a line
OPTIONS = (
    Option(
        "baseline",
        kinds.FLAG,
        "Compare every measured test with its stored baseline, and fail the tests that regressed.",
        wants_result=True,
    ),
    Option(
        "update",
        kinds.one_of(UPDATE_MODES),
        "Write measurements into the store when the session ends: new adds missing baselines, improved lowers those "
        "whose figures got better, all accepts every change.",
        details=_MODES,
        wants_result=True,
    ),
    Option(
        "reason",
        kinds.LINE,
        "Reason for the changes that --gpumem-update accepts, in one line. Each baseline that is added or changed "
        "keeps it, and failures and `gpumem history` show it.",
        "TEXT",
        is_key=False,
        details="The option needs `--gpumem-update`.",
    ),
    Option(
        "device",
        kinds.TEXT,
        "Device that runs the steps: cuda, cpu, auto (cuda if there is a GPU, otherwise cpu), an emulated GPU such as "
        "emulated:h100 or emulated:24GB, or a device from another plugin.",
        "DEVICE",
        default=DEFAULT_DEVICE,
        details="[Cards](cards.md) lists the emulated GPUs. Another plugin adds a device by the hook `pytest_gpumem_devices`.",
        in_accept=True,
    ),
    Option(
        "against",
        kinds.TEXT,
        "Compare the figures of an emulated GPU with the baselines of a real GPU. SLUG is the name of that GPU's "
        "folder in the store, for example nvidia-h100-80gb-hbm3.",
        "SLUG",
        is_key=False,
        details=_AGAINST,
    ),
    Option(
        "store",
        kinds.STORE,
        "Folder or URL of the stored baselines.",
        "PATH|URL",
        default=DEFAULT_STORE,
        details=_STORE,
        in_accept=True,
    ),
    Option(
        "strict",
        kinds.FLAG,
        "Fail every measured test whose verdict is neither ok nor improved, including tests that could not be measured.",
        details="[Verdicts](verdicts.md) lists the verdicts that fail a test with this option.",
        wants_result=True,
    ),
    Option(
        "explain",
        kinds.one_of(EXPLAIN_MODES),
        "Record one more step, to explain which tensors its peak consists of: on-failure for a test that fails or "
        "whose baseline is written, always for every test, never for none.",
        default=DEFAULT_EXPLAIN,
        details=_EXPLAIN,
        in_accept=True,
    ),
    Option(
        "artifacts",
        kinds.FOLDER,
        "Write the timeline of each explained step into this folder (JSON), and on CUDA a snapshot for "
        "pytorch.org/memory_viz.",
        "DIR",
        details=f"{_RELATIVE} [Reports](reports.md) describes the timeline.",
    ),
    Option(
        "report",
        kinds.REPORTS,
        "Write a report, in the format of the file's suffix: "
        f"{', '.join(f'{form.suffix} {form.title}' for form in FORMATS)}. May be repeated.",
        "FILE",
        details=f"{_RELATIVE} [Reports](reports.md) describes the formats.",
        wants_result=True,
    ),
    Option(
        "model",
        kinds.MODELS,
        "Measure a model by its name, without a test file: hf:ORG/NAME with random weights, hf-tiny:ORG/NAME with two"
        " of its layers, or a model from timm, torchvision or diffusers. May be repeated.",
        "NAME",
        is_key=False,
        details="See [Models by name](models-by-name.md#models-on-the-command-line).",
        for_tests=True,
    ),
    Option(
        "time",
        kinds.FLAG,
        "Time every step, or with --no-gpumem-time none, which needs fewer runs. By default --gpumem-baseline times "
        "only tests whose times are compared, recorded or shown.",
        details="[Step time](../concepts/step-time.md#which-steps-are-timed) says which steps are timed.",
    ),
    Option(
        "rank_timeout",
        kinds.SECONDS,
        "Under torchrun: end the session, and name the stuck ranks, if ranks make no progress for this long while "
        "others wait for them.",
        "SECONDS",
        default=f"{DEFAULT_RANK_TIMEOUT:g} s",
        details="The value is a number of seconds, or a duration such as `5 min`. See [ranks](../concepts/processes.md#ranks).",
    ),
    Option(
        "processes",
        kinds.FLAG,
        "Also measure other processes that a test or its fixtures start, such as servers.",
        default="on",
        details="`--no-gpumem-processes` sets no variables in the environment, and leaves these processes alone. Then their "
        "baselines count as missing. `gpumem.launch` does not need the option. See "
        "[servers and jobs](../guide/servers-and-launched-jobs.md).",
    ),
    Option(
        "pack",
        kinds.FLAG,
        "With pytest-xdist: run several tests on a GPU at the same time if their known peaks fit into its memory, the "
        "largest first. A peak is known from a baseline or a budget. A timed test, or a test without a known peak, runs alone.",
        details="With `--gpumem-device=cpu` the option is an error. The key is allowed, and the session prints that nothing is "
        "shared. See [packing](../concepts/processes.md#packing).",
    ),
)
"""All options, in the order in which the help lists them."""


def is_measured(item: pytest.Item) -> bool:
    """Return whether a test is measured, because it has the marker or the fixture."""
    return FIXTURE in getattr(item, "fixturenames", ()) or item.get_closest_marker(MARKER) is not None


def check_words(parser: pytest.Parser, words: list[str]) -> None:
    """Check that every typed option with the prefix ``--gpumem-`` or ``--no-gpumem-`` exists.

    Args:
        parser: pytest's parser, with the options from all plugins and from the conftest.py files loaded at the start.
        words: The command line.

    Raises:
        pytest.UsageError: An option does not exist. The message names the most similar option.
    """
    flags = [
        flag for option in OPTIONS for flag in ((option.flag, option.negated) if option.is_flag else (option.flag,))
    ]
    doubtful = [word for word in words if word.partition("=")[0].startswith(("--gpumem-", "--no-gpumem-"))]
    if all(word.partition("=")[0] in flags for word in doubtful):
        return
    from pytest_gpumem.base.units import nearest

    _, unknown = parser.parse_known_and_unknown_args(words)
    for word in doubtful:
        name = word.partition("=")[0]
        if word in unknown:
            negated = f"--no-gpumem-{name.removeprefix('--gpumem-no-')}"
            raise pytest.UsageError(f"no such option: {name}; {nearest(negated if negated in flags else name, flags)}")


def arguments_of(option: Option) -> dict[str, Any]:
    """Return the arguments with which `argparse.ArgumentParser.add_argument` defines an option."""
    if option.is_flag:
        return {"action": argparse.BooleanOptionalAction}
    if option.kind.choices is not None:
        return {"choices": option.kind.choices}
    return {"action": "append" if option.kind.is_array else "store", "metavar": option.metavar}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpumem", "GPU memory and throughput (pytest-gpumem)")
    for option in OPTIONS:
        # With the default None, a key in [tool.gpumem] applies if the option is not typed. Pass `dest`, because otherwise
        # pytest searches all options for a free name.
        group.addoption(
            option.flag, dest=option.dest, default=None, help=option.help_with_default, **arguments_of(option)
        )
