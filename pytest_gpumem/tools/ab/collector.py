"""A pytest plugin that writes the results of measured tests into a file, as a line of JSON for each result.

`gpumem ab` and `gpumem bisect` copy this module into each run's folder, and pytest imports the copy. The tested environment
may contain another version of pytest-gpumem, or none. So this module imports only pytest and Python's own modules.
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
"""The environment variable with the arguments for `Collector`, as JSON.

``file`` is the file to write. ``home`` is the checkout whose code the tests should import. ``others`` are checkouts whose code
the tests must not import. These paths contain no symbolic links. ``only`` lists the ids of the tests to run. If the list is
empty, all tests run.
"""
PROPERTY = "gpumem"
SWITCHED_OFF_OPTIONS = ("gpumem_baseline", "gpumem_strict", "gpumem_update")
"""Options of pytest-gpumem to switch off, because the project's ``[tool.gpumem]`` may switch them on."""


class Collector:
    """Writes a line for each report on a measured test, and a last line with the modules imported from other checkouts."""

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
                # The verdict is not written twice: the teardown's report repeats the verdict from the call's report.
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
        # The file is closed after each line, so earlier lines stay complete if the process is killed.
        with Path(self._file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def message_of(report: pytest.TestReport) -> str:
    """Return a failed test's exception message. The result is empty if the test did not fail or has no message."""
    if report.outcome != "failed":
        return ""
    return str(getattr(getattr(report.longrepr, "reprcrash", None), "message", ""))


def outside_modules(home: str, checkouts: list[str]) -> dict[str, str]:
    """Return the files of imported modules from the folders ``checkouts``, by module name.

    Modules in the checkout ``home`` and modules in installed packages are left out.
    """
    # In a virtual environment on top of another, a `.pth` file adds the other's site-packages folder to `sys.path`.
    layers = (folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages"))
    site_folders = (*getattr(site, "getsitepackages", list)(), site.getusersitepackages(), *layers)
    installed = [os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix, *site_folders)]
    # Keep only environments inside a checkout. Their files are packages, and not the project's code. An environment that
    # contains the whole checkout is dropped, because otherwise all files in the project would count as packages.
    installed = [folder for folder in installed if any(_is_inside(folder, checkout) for checkout in checkouts)]
    home_folders = (home, *installed, str(Path(__file__).resolve().parent))
    files = {}
    real_folder = functools.cache(os.path.realpath)  # thousands of torch's modules share a few folders
    for name, module in sorted(sys.modules.copy().items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            continue
        folder, base = os.path.split(file)
        is_link = os.path.islink(file)  # noqa: PTH114 -- Path.is_symlink() raises for an invalid path
        path = os.path.realpath(file) if is_link else f"{real_folder(folder)}{os.sep}{base}"
        if not any(_is_inside(path, folder) for folder in home_folders) and any(
            _is_inside(path, checkout) for checkout in checkouts
        ):
            files[name] = path
    return files


def _is_inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # Register the collector in this hook, because pytest calls this hook before all hooks of the collector, and also in
    # pytest-xdist's workers.
    if VARIABLE in os.environ:
        pluginmanager.register(Collector(**json.loads(os.environ[VARIABLE])), "gpumem-ab")
