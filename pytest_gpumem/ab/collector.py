"""A pytest plugin that writes the results of a run's measured tests into a file, line by line.

It is copied next to each run and imported from there: the code under test may be another version of this package, or
have none of it. So it needs nothing but pytest.
"""

from __future__ import annotations

import functools
import json
import os
import site
import sys
from pathlib import Path

import pytest

VARIABLE = "GPUMEM_AB_RUN"
"""The environment variable that says, as JSON, where to write (``file``), whose code is to run (``home``) and whose is not
(``others``): folders without symbolic links. ``only`` are the ids of the tests that run, all where it is empty."""
PROPERTY = "gpumem"
SWITCHED_OFF = ("gpumem_baseline", "gpumem_strict", "gpumem_update")
"""Options of the plugin that are set to off, since ``[tool.gpumem]`` could switch them on."""


class Collector:
    """Keeps the reports of measured tests, and at the end the modules that are not the revision's."""

    def __init__(self, file: str, home: str, others: list[str], only: list[str]) -> None:
        self._file = file
        self._home = home
        self._others = others
        self._only = frozenset(only)
        self._outside_modules: dict[str, str] = {}
        self._imported: set[str] = set()
        self._is_worker = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        for option in SWITCHED_OFF:
            if hasattr(config.option, option):
                setattr(config.option, option, False)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._only:
            return
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._only])
        items[:] = [item for item in items if item.nodeid in self._only]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        payload = next((value for name, value in report.user_properties if name == PROPERTY), None)
        if payload is None or self._is_worker:
            return
        self._write(
            {
                "nodeid": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "xfail": hasattr(report, "wasxfail"),
                "why": message_of(report),
                # At teardown it is the same as in the call.
                "verdict": payload if report.when != "teardown" else "",
            }
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        told = getattr(node, "workeroutput", {}).get("gpumem_ab", {})
        self._outside_modules.update(told.get("outside_modules", {}))
        self._imported.update(told.get("imported", ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._outside_modules.update(outside_modules(self._home, self._others))
        self._imported.update(name.partition(".")[0] for name in [*sys.modules])
        told = {"outside_modules": self._outside_modules, "imported": sorted(self._imported)}
        if self._is_worker:
            session.config.workeroutput["gpumem_ab"] = told  # type: ignore[attr-defined]
            return
        root = os.path.relpath(os.path.realpath(session.config.rootpath), self._home)
        self._write({"status": int(exitstatus), "root": root, **told})

    def _write(self, line: dict[str, object]) -> None:
        # A line at a time: a process that is killed leaves what it had.
        with Path(self._file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def message_of(report: pytest.TestReport) -> str:
    """Return the message of the exception that failed a test; empty where it has passed, or its report is of another form."""
    if report.outcome != "failed":
        return ""
    return str(getattr(getattr(report.longrepr, "reprcrash", None), "message", ""))


def outside_modules(home: str, others: list[str]) -> dict[str, str]:
    """Return the modules loaded from ``others`` and not from ``home``, with their files, but for installed packages."""
    # Those that lie beneath a virtual environment are on the path by a file of its own.
    layers = (folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages"))
    site_folders = (*getattr(site, "getsitepackages", list)(), site.getusersitepackages(), *layers)
    installed = [os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix, *site_folders)]
    # A virtual environment inside of the checkout is no part of it; one that contains the checkout says nothing of it.
    installed = [folder for folder in installed if any(_lies_in(folder, other) for other in others)]
    home_folders = (home, *installed, str(Path(__file__).resolve().parent))
    found = {}
    real_folder = functools.cache(os.path.realpath)  # torch has thousands of modules in few folders
    for name, module in sorted(sys.modules.copy().items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        folder, base = os.path.split(file)
        is_link = os.path.islink(file)  # noqa: PTH114 -- Path's raises where this is no path
        path = os.path.realpath(file) if is_link else f"{real_folder(folder)}{os.sep}{base}"
        if not any(_lies_in(path, folder) for folder in home_folders) and any(
            _lies_in(path, other) for other in others
        ):
            found[name] = path
    return found


def _lies_in(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # The first hook of all, in pytest-xdist's workers, too.
    if VARIABLE in os.environ:
        pluginmanager.register(Collector(**json.loads(os.environ[VARIABLE])), "gpumem-ab")
