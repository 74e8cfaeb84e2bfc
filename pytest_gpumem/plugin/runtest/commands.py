"""The commands that a test's failure shows: accept figures, remove baselines, or find the package behind a regression."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.plugin.config.command_line import COMMAND, Command
from pytest_gpumem.plugin.config.options import ARGUMENT
from pytest_gpumem.plugin.config.settings import options_to_repeat
from pytest_gpumem.reporting.reports.failure import accept_command, bisect_command, prune_command, update_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from pytest_gpumem.judging.gate.verdict import Outcome, TestVerdict


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands for a test. The user can type them in the folder in which pytest was started."""

    config: pytest.Config
    item: pytest.Item
    nodeid: str
    """The test's id, relative to the root directory."""
    program: Sequence[str]
    """The words with which this session was started, for example ``pytest``."""

    def accept(self, verdict: TestVerdict, failing: frozenset[Outcome]) -> str | None:
        """Return the command for accepting a failed test's figures; ``None`` if no baseline would fix the failure."""
        words, rest = self._again
        return accept_command(verdict, failing, words=words, options=self._options, rest=rest)

    def accept_all(self) -> str:
        """Return the command for accepting all the test's figures under its current name."""
        words, rest = self._again
        return update_command("all", words, self._options, rest)

    def prune_test(self) -> str:
        """Return the command for removing the test's unused baselines."""
        return prune_command(self._path_from_here(self.nodeid), options=self._options)

    def prune_file(self, file: str | None) -> str:
        """Return the command for removing a test file's unused baselines. Without ``file``, it checks all test files."""
        names = [] if file is None else [self._path_from_here(file)]
        return prune_command(*names, options=self._options)

    def bisect(self, verdict: TestVerdict, failing: frozenset[Outcome]) -> str | None:
        """Return the command for finding the package behind a regression; ``None`` if no package has changed."""
        argument = self.item.stash.get(ARGUMENT, None)
        options = [*self._options, *([argument] if argument else [])]
        return bisect_command(verdict, failing, self._path_from_here(self.nodeid), options)

    @property
    def _again(self) -> Command:
        """The command that runs the test again."""
        argument = self.item.stash.get(ARGUMENT, None) or self._path_from_here(self.nodeid)
        return self.item.stash.get(COMMAND, None) or Command((*self.program, argument))

    @property
    def _options(self) -> list[str]:
        return options_to_repeat(self.config)

    def _path_from_here(self, nodeid: str) -> str:
        """Return a test's id relative to the folder in which pytest was started."""
        file, colons, test = nodeid.partition("::")
        path = os.path.relpath(self.config.rootpath / file, self.config.invocation_params.dir)
        return f"{path}{colons}{test}"
