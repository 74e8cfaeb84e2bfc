"""Collect facts for ``gpumem doctor`` from files, from NVML, and from separate processes with torch.

Collecting writes only the compiled stand-ins for CUDA's libraries, into the user's cache.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem import __version__
from pytest_gpumem.base import command_name
from pytest_gpumem.emulating.emulation.torch_build import missing_for_compiling
from pytest_gpumem.facts.values.plain import from_plain
from pytest_gpumem.measuring.devices.nvml import NvmlGpu
from pytest_gpumem.tools.doctor.facts import DeviceFacts, ProbeResult, StoredFacts, TorchFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpumem.base.command_name import OtherCommand
    from pytest_gpumem.reporting.reports.stored import StoredBaseline

_PATIENCE = 180.0
"""Seconds after which the process with torch is killed. The process may need time to compile stand-ins for CUDA's libraries."""
_RUN_MODULE = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)
"""Python code to run a module as ``-m`` does, but without the current folder on ``sys.path``.

A stranger may have put a ``torch.py`` into the current folder, and importing torch must not run it.
"""


def releases() -> dict[str, str]:
    """Return the releases of Python, pytest and this plugin."""
    return {"Python": platform.python_version(), "pytest": pytest.__version__, "pytest-gpumem": __version__}


def driver() -> str:
    """Return the driver's release from NVML, or ``"unknown"`` followed by NVML's error in parentheses."""
    return NvmlGpu("").driver_version()


def compiling(environment: Mapping[str, str]) -> str | None:
    """Return what torch.compile lacks on an emulated GPU, and how to install it; ``None`` if torch.compile works."""
    return missing_for_compiling(environment)


def other_command() -> OtherCommand | None:
    """Return the first command ``gpumem`` on the ``PATH``, if the command belongs to another package."""
    return command_name.other_command()


def probe(words: Sequence[str], environment: Mapping[str, str]) -> ProbeResult:
    """Import torch and open devices in a new process, and return the facts from the output of this process.

    If the process crashes, or takes longer than 180 s, the ``trouble`` of torch and of each device in the result says so.

    Args:
        words: The devices, as values of ``--gpumem-device``: built-in devices, or a single emulated GPU.
        environment: The environment variables for the new process, which runs the same Python as this process.

    Example:
        ``probe(["cuda", "cpu"], os.environ).devices`` has two `DeviceFacts`.
    """
    command = [sys.executable, "-c", _RUN_MODULE, "pytest_gpumem.tools.doctor.probe", *words]
    try:
        process = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failure(
            words, f"the process that imports torch and opens the device did not end within {_PATIENCE:g} s"
        )
    last_line = process.stdout.strip().rpartition("\n")[2]
    if process.returncode == 0 and last_line.startswith("{"):
        result = from_plain(ProbeResult, json.loads(last_line))
        return result if result.torch.trouble is None else _with_release(result)
    error = next((line for line in reversed(process.stderr.splitlines()) if line.strip()), "no error was printed")
    return _failure(words, f"its process ended with status {process.returncode}: {error.strip()}")


def _with_release(result: ProbeResult) -> ProbeResult:
    """Add torch's release from the metadata of the installed package, because torch cannot be imported."""
    try:
        release = version("torch")
    except PackageNotFoundError:
        return result
    return ProbeResult(TorchFacts(release, result.torch.cuda, result.torch.trouble), result.devices)


def _failure(words: Sequence[str], trouble: str) -> ProbeResult:
    torch = TorchFacts(trouble=trouble)
    return _with_release(ProbeResult(torch, tuple(DeviceFacts(word, trouble=trouble) for word in words)))


def stored_facts(baselines: Iterable[StoredBaseline]) -> tuple[StoredFacts, ...]:
    """Count the baselines from each device and environment, sorted by the device's slug.

    For example, a store has three baselines from a CPU, two recorded with torch 2.12 and one with torch 2.13. The result is two
    `StoredFacts`, with 2 baselines and with 1 baseline.
    """
    by_environment: dict[str, StoredFacts] = {}
    for baseline in baselines:
        environment, metrics = baseline.entry.environment, frozenset(baseline.entry.metrics)
        key = f"{environment.slug} {sorted(environment.details.items())}"
        previous = by_environment.get(key, StoredFacts(environment, 0))
        by_environment[key] = StoredFacts(
            environment,
            previous.baselines + 1,
            previous.metrics | metrics,
            previous.has_times or baseline.entry.runs is not None,
        )
    return tuple(by_environment[key] for key in sorted(by_environment))
