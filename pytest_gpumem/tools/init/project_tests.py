"""The tests in a project, as frozen values read from the lines that `observer` wrote while the tests ran. Pure functions."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Outcome = Literal["passed", "failed", "skipped", "not run"]
_BEST_FIRST: tuple[Outcome, ...] = ("passed", "failed", "skipped", "not run")
"""The outcome of a parametrized test function is the best outcome among its items."""


@dataclass(frozen=True, slots=True)
class ProjectTest:
    """A test function or method. If it is parametrized, pytest runs it as several items.

    Example:
        ``tests/test_net.py::TestNet::test_forward`` runs a model, and ``tests/test_cli.py::test_help`` does not.
    """

    nodeid: str
    runs_model: bool = False
    """True if a module was called, a backward pass ran or an optimizer stepped, in the test or in one of its fixtures."""
    is_measured: bool = False
    """True if the test already has pytest-gpumem's marker, or requests its fixture. Such a test was not run."""
    has_parameters: bool = False
    can_be_marked: bool = True
    """False for an item that patterns in the settings never match, for example a linter's check of a file."""
    outcome: Outcome = "passed"
    seconds: float = 0.0
    nbytes: int | None = None
    """The largest number of bytes that the test allocated on a device; ``None`` if unknown."""

    @property
    def file(self) -> str:
        """The test file's path."""
        return self.nodeid.partition("::")[0]

    @property
    def is_proposed(self) -> bool:
        """True if the test should be measured from now on. A test without any bytes would have no figures."""
        return (
            self.runs_model
            and not self.is_measured
            and self.can_be_marked
            and self.outcome == "passed"
            and self.nbytes != 0
        )


@dataclass(frozen=True, slots=True)
class ProjectTests:
    """All tests in a project."""

    tests: tuple[ProjectTest, ...] = ()
    on_gpu: bool = False
    """True if a test allocated GPU memory or is measured already, or if a file beside tests of models asked for a GPU."""
    imports_torch: bool = True
    not_collected: tuple[tuple[str, str], ...] = ()
    """Files whose tests could not be collected, each with the last line of the error."""
    crashed: tuple[str, ...] = ()
    """Tests that began and never ended."""
    session_ended: bool = True
    """False if pytest could not end its session."""
    were_run: bool = True
    """False if the user did not want the tests to run, so nothing is known about them."""

    @property
    def proposed(self) -> list[ProjectTest]:
        """The tests that should be measured from now on."""
        return [test for test in self.tests if test.is_proposed]

    def with_outcome(self, outcome: Outcome) -> list[ProjectTest]:
        """Return the tests with this outcome that are not measured already."""
        return [test for test in self.tests if test.outcome == outcome and not test.is_measured]


NOT_RUN = ProjectTests(on_gpu=True, were_run=False)
"""The value if the tests are not run. The device and the runner then follow from the machine alone."""


def read_tests(lines: Iterable[str]) -> ProjectTests:
    """Return the tests in the lines from `observer`. A last line without its end is left out.

    If several processes observed the same session, such as workers of pytest-xdist, the lines come in any order.
    """
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line.endswith("\n"):
            plain = json.loads(line)
            by_kind[plain["kind"]].append(plain)
    collected = {item["id"]: item for line in by_kind["collected"] for item in line["items"]}
    ended = {line["id"]: line for line in by_kind["ended"]}
    functions: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for nodeid, item in collected.items():
        functions[item["function"]].append({"outcome": "not run", **item, **ended.get(nodeid, {})})
    tests = tuple(_test(nodeid, items) for nodeid, items in functions.items())
    model_files = {test.file for test in tests if test.runs_model}
    used_gpu = any(
        name != "cpu" and nbytes for line in ended.values() for name, nbytes in (line["bytes"] or {}).items()
    )
    return ProjectTests(
        tests,
        on_gpu=used_gpu
        or any(test.is_measured for test in tests)
        or any(_is_beside(line["file"], model_files) for line in by_kind["asked for a GPU"]),
        imports_torch=any(line["torch"] for line in [*by_kind["ended session"], *ended.values()]),
        session_ended=bool(by_kind["ended session"]),
        not_collected=tuple(dict.fromkeys((line["id"], line["why"]) for line in by_kind["not collected"])),
        crashed=tuple(dict.fromkeys(line["id"] for line in by_kind["began"] if line["id"] not in ended)),
    )


def _test(nodeid: str, items: Sequence[Mapping[str, Any]]) -> ProjectTest:
    outcome = min((item["outcome"] for item in items), key=_BEST_FIRST.index)
    sizes = [nbytes for item in items for nbytes in (item.get("bytes") or {}).values()]
    return ProjectTest(
        nodeid,
        runs_model=any(item.get("ran") for item in items),
        is_measured=any(item["measured"] for item in items),
        has_parameters=any(item["parametrized"] for item in items),
        can_be_marked=all(item["markable"] for item in items),
        outcome=outcome,
        seconds=sum(item.get("seconds", 0.0) for item in items),
        nbytes=max(sizes, default=None),
    )


def _is_beside(file: str, model_files: Iterable[str]) -> bool:
    """Return whether a file is in the folder of a test file, or is a ``conftest.py`` above the test file."""
    folder, name = PurePosixPath(file).parent, PurePosixPath(file).name
    return any(
        folder == parent or (name == "conftest.py" and parent.is_relative_to(folder))
        for parent in (PurePosixPath(path).parent for path in model_files)
    )
