"""Runs of `gpumem ab`, `bisect` and `init` that are forks of a process with pytest loaded, not interpreters of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.processes import POLL_SECONDS, run
from pytest_gpumem.tools.ab import runs
from tests import preloaded
from tests.heap import hide_what_is_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    import pytest

    from pytest_gpumem.base.processes import Stop


def fork_runs(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have what modules run be forks, pytest or a command of the package: what `gpumem ab` runs if no module is given."""
    preloaded.load()  # not in the threads that start them
    for module in modules or (runs,):
        patch.setattr(module, "run", _run)


def _packages(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


def _run(
    command: Sequence[str] | str,
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: Path,
    stop: Stop,
    tick: Callable[[], None] = lambda: None,
) -> int:
    if isinstance(command, str):
        return run(command, folder=folder, environment=environment, output=output, stop=stop, tick=tick)
    output.touch()
    python, *arguments = command
    assert arguments[0] == "-m"
    path = os.pathsep.join([environment["PYTHONPATH"], str(_packages(Path(python)))])
    process = preloaded.start(
        *arguments, cwd=folder, env={**environment, **preloaded.ALONE, "PYTHONPATH": path}, before=hide_what_is_loaded
    )
    try:
        while process.poll() is None:
            stop.check()
            tick()
            process.wait(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
        said = process.communicate()
    with output.open("a", encoding="utf-8") as file:
        file.writelines(said)
    assert process.returncode is not None
    return process.returncode
