"""A pytest plugin that writes measured tests into a file, line by line.

The file is copied into each run's folder and imported from there, because the code under test may contain another version
of this package, or none. So it imports nothing but pytest.
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
"""The environment variable with the arguments as JSON.

``file`` is the file to write. ``home`` is the folder with the code that should run. ``others`` are folders whose code must not
run. All folders are given without symbolic links. ``only`` lists the test ids to run; an empty list runs all.
"""
PROPERTY = "gpumem"
SWITCHED_OFF_OPTIONS = ("gpumem_baseline", "gpumem_strict", "gpumem_update")
"""Options that the collector switches off, because ``[tool.gpumem]`` may switch them on."""


class Collector:
    """Writes reports on measured tests, and at the end the modules from outside the revision."""

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
        for option in SWITCHED_OFF_OPTIONS:
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
                # The report on the teardown contains the same verdict as the report on the call.
                "verdict": payload if report.when != "teardown" else "",
            }
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {}).get("gpumem_ab", {})
        self._outside_modules.update(output.get("outside_modules", {}))
        self._imported.update(output.get("imported", ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._outside_modules.update(outside_modules(self._home, self._others))
        self._imported.update(name.partition(".")[0] for name in [*sys.modules])
        output = {"outside_modules": self._outside_modules, "imported": sorted(self._imported)}
        if self._is_worker:
            session.config.workeroutput["gpumem_ab"] = output  # type: ignore[attr-defined]
            return
        root = os.path.relpath(os.path.realpath(session.config.rootpath), self._home)
        self._write({"status": int(exitstatus), "root": root, **output})

    def _write(self, line: dict[str, object]) -> None:
        # The file is closed after each line, so a killed process leaves complete lines.
        with Path(self._file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def message_of(report: pytest.TestReport) -> str:
    """Return a failed test's exception message; empty if the test passed or the report has no message."""
    if report.outcome != "failed":
        return ""
    return str(getattr(getattr(report.longrepr, "reprcrash", None), "message", ""))


def outside_modules(home: str, checkouts: list[str]) -> dict[str, str]:
    """Return the files of modules that were loaded from ``checkouts``, by module name.

    Modules from ``home`` and from installed packages are left out.
    """
    # A `.pth` file in a layered virtual environment adds the packages from the environment below to the path.
    layers = (folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages"))
    site_folders = (*getattr(site, "getsitepackages", list)(), site.getusersitepackages(), *layers)
    installed = [os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix, *site_folders)]
    # Keep only environments inside a checkout, because they contain packages and not the project's code. An environment around
    # the checkout would exclude the project itself.
    installed = [folder for folder in installed if any(_is_inside(folder, checkout) for checkout in checkouts)]
    home_folders = (home, *installed, str(Path(__file__).resolve().parent))
    files = {}
    real_folder = functools.cache(os.path.realpath)  # torch has thousands of modules in few folders
    for name, module in sorted(sys.modules.copy().items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        folder, base = os.path.split(file)
        is_link = os.path.islink(file)  # noqa: PTH114 -- Path's raises for an invalid path
        path = os.path.realpath(file) if is_link else f"{real_folder(folder)}{os.sep}{base}"
        if not any(_is_inside(path, folder) for folder in home_folders) and any(
            _is_inside(path, checkout) for checkout in checkouts
        ):
            files[name] = path
    return files


def _is_inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # pytest calls this hook first, also in pytest-xdist's workers.
    if VARIABLE in os.environ:
        pluginmanager.register(Collector(**json.loads(os.environ[VARIABLE])), "gpumem-ab")
