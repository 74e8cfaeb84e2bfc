"""Installing a set of requirements with uv or pip into an environment that lies on top of this one.

What this environment has stays as it is. A package that is named gets the newest release that fits, and what it requires is
used from here where that satisfies it, so that two environments differ in nothing that was not asked for. pip sees both layers
by itself. uv looks at the upper one only, so that it is asked what the whole would be, and installs what is another release.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from pytest_gpumem.processes import run
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.requirements.pip import pip_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_gpumem.processes import Stop
    from pytest_gpumem.requirements.requirement_set import RequirementSet

_NVIDIA = re.compile(r"^(Requires-Dist: (?:cuda|nvidia)-[^;\n]*).*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_AT_ADDRESS = re.compile(r"^(?:[A-Za-z0-9._-]+ @ \S+|-e .+|(?:/|file:|[A-Za-z]:[\\/]).+)", re.MULTILINE)
"""A line of uv's lock file of what comes from an address, or from a path where it has no name before it is built."""
_ERROR = re.compile(r"^(?:ERROR|error):\s*(.+)$", re.MULTILINE)
_CAUSE = re.compile(r"^\s*(?:\u2570\u2500\u25b6|\u00d7|\u251c\u2500\u25b6|cause:)\s*(.+)$", re.MULTILINE)
_NOT_REACHED = re.compile(r"Retrying \(Retry\(total=0\b.*after connection broken by ['\"]?(\w+)")
"""pip's last attempt to reach an index: it goes on as if the index had nothing."""
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
_MOST_LINES, _MOST_RELEASES = 3, 3
_PLUGIN = "pytest-gpumem"


@dataclass(frozen=True)
class Installer:
    """Installs into the environment in ``folder`` whose interpreter is ``python``."""

    python: Path
    folder: Path
    environment: Mapping[str, str]
    stop: Stop
    tick: Callable[[], None] = field(default=lambda: None)

    def install(self, wanted: RequirementSet, *, layered: bool, emulated: bool) -> None:
        """Install ``wanted``. Raises `NotInstalled` and `Stopped`.

        Args:
            wanted: The set.
            layered: Whether the packages of this environment are seen beneath.
            emulated: Whether torch is to be its CUDA build, without NVIDIA's libraries, which an emulated GPU stands in for.
        """
        lines = list(wanted.lines)
        torch = next((one for one in wanted.requirements if canonicalize_name(one.name) == "torch"), None)
        if emulated and torch is not None:
            self._install_torch_alone(f" @ {torch.url}" if torch.url else str(torch.specifier))
            lines = [line for line in lines if not re.match(r"torch\b(?!-)", line, re.IGNORECASE)]
        given = self.folder / "requirements.txt"
        given.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        limits = self.folder / "constraints.txt"
        limits.write_text("".join(f"{line}\n" for line in wanted.constraints), encoding="utf-8")
        limited = ["--constraint", str(limits)] if wanted.constraints else []
        uv = find_uv()
        # What is named is the newest release that fits, also where an older one that is here would fit.
        if emulated and torch is not None:
            if lines:
                self._run([*self._pip_install, "--upgrade", *limited, "--requirement", str(given)])
            self._run([*self._pip_install, *limited, "torch"])
        elif uv is None:
            self._run([*self._pip_install, "--upgrade", *limited, "--requirement", str(given)])
        elif layered:
            self._install_what_differs(uv, given, limited)
        else:
            self._run([uv, "pip", "install", "--python", str(self.python), *limited, "--requirement", str(given)])

    def install_plugin(self) -> None:
        """Install pytest-gpumem as it is installed here. Raises `NotInstalled` and `Stopped`."""
        distribution = importlib.metadata.distribution(_PLUGIN)
        url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
        self._run([*self._pip_install, f"{_PLUGIN} @ {url}" if url else f"{_PLUGIN}=={distribution.version}"])

    @cached_property
    def _pip_install(self) -> list[str]:
        # To look for conflicts, pip reads what every package beneath requires, which takes longer than the rest.
        return [*pip_command(self.python, self.environment), "install", "--no-warn-conflicts"]

    def _install_torch_alone(self, specifier: str) -> None:
        """Install torch's CUDA build without what it requires, and have its metadata require none of NVIDIA's libraries."""
        # Three signs take no local version, as of a build for the CPU.
        exact = re.fullmatch(r"={2,3}([^*,]+)", specifier)
        wanted = f"torch==={exact.group(1).partition('+')[0]}" if exact else f"torch{specifier}"
        self._run([*self._pip_install, "--upgrade", "--no-deps", wanted])
        for metadata in self.folder.rglob("torch-*.dist-info/METADATA"):
            text = metadata.read_text(encoding="utf-8")
            metadata.write_text(_NVIDIA.sub(r'\1; extra == "nvidia"', text), encoding="utf-8")

    def _install_what_differs(self, uv: str, given: Path, limited: Sequence[str]) -> None:
        """Install the releases that uv resolves and that are not those of this environment, which it prefers."""
        here = {canonicalize_name(one.metadata["Name"]): one for one in importlib.metadata.distributions()}
        lock, left_alone = self.folder / "lock.txt", self.folder / "left-alone.txt"
        lines = given.read_text(encoding="utf-8").splitlines()
        asked = {canonicalize_name(found.group()) for line in lines if (found := _NAME.match(line))}
        # What comes from no index, such as a build of torch for the CPU or the project itself, cannot be resolved there.
        local = {
            name: one
            for name, one in here.items()
            if name not in asked and ("+" in one.version or one.read_text("direct_url.json"))
        }
        left_alone.write_text("".join(f"{name}; python_version < '0'\n" for name in sorted(local)), encoding="utf-8")
        lock.write_text(
            "".join(f"{name}=={one.version}\n" for name, one in sorted(here.items()) if name not in local),
            encoding="utf-8",
        )
        named = [f"--upgrade-package={name}" for name in sorted(asked)]
        compile_ = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", str(self.python)]
        self._run([*compile_, *named, *limited, "--override", str(left_alone), "--output-file", str(lock), str(given)])
        resolved = {
            canonicalize_name(name): version for name, version in _PINNED.findall(lock.read_text(encoding="utf-8"))
        }
        others = [
            f"{name}=={version}"
            for name, version in sorted(resolved.items())
            if name not in here or here[name].version != version
        ]
        # What lies at an address is installed whatever its release is: that may be the one that is here.
        others += _AT_ADDRESS.findall(lock.read_text(encoding="utf-8"))
        if others:
            # With the options among the requirements: they may name the index that has these releases.
            chosen = self.folder / "chosen.txt"
            options = [line for line in lines if line.startswith("-") and not line.startswith(("-e", "--editable"))]
            chosen.write_text("".join(f"{line}\n" for line in [*options, *others]), encoding="utf-8")
            self._run([uv, "pip", "install", "--python", str(self.python), "--no-deps", "--requirement", str(chosen)])

    def _run(self, command: Sequence[str]) -> None:
        log = self.folder / "install.log"
        before = log.stat().st_size if log.exists() else 0
        status = run(
            command, folder=Path.cwd(), environment=self.environment, output=log, stop=self.stop, tick=self.tick
        )
        if status:
            with log.open(encoding="utf-8", errors="replace") as file:
                file.seek(before)
                raise NotInstalled(reason_in(file.read()) or f"{command[0]} ended with exit status {status}")


def find_uv() -> str | None:
    """Return the path of uv, if it is on the path."""
    return shutil.which("uv")


def reason_in(output: str) -> str:
    """Return why pip or uv could not install, in its words: its errors, or else its last lines."""
    found = list(dict.fromkeys(line.rstrip(":") for line in [*_ERROR.findall(output), *_CAUSE.findall(output)]))
    lines = found or [line.strip() for line in output.splitlines() if line.strip()]
    unreachable = [f"the package index cannot be reached ({error})" for error in _NOT_REACHED.findall(output)[:1]]
    return "; ".join(_VERSIONS.sub(_latest, line).rstrip(".") for line in [*unreachable, *lines[-_MOST_LINES:]])


def _latest(versions: re.Match[str]) -> str:
    """Return the latest few of the releases that pip lists all of."""
    listed = versions.group(1).split(", ")
    return (
        f"(from versions: {', '.join(['...', *listed[-_MOST_RELEASES:]] if len(listed) > _MOST_RELEASES else listed)})"
    )
