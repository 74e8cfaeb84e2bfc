"""Install packages with uv or pip into a new environment, a layer on top of the current environment.

The current environment does not change, and its packages can also be imported in the new environment. For each requirement,
the newest fitting release is installed. The dependencies of this release are installed only if their current releases do not
fit. So two such environments differ only in the requested packages.

pip sees the packages in both environments. uv sees only the packages in the new environment. So uv first chooses a release for
each package, and prefers the current release. Then uv installs only the releases that differ from the current releases. For
example, the current environment has transformers 4.45.0 and numpy 1.26.4. The requirement ``transformers==4.38.2`` then
installs transformers and a matching tokenizers release, but not numpy.
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

from pytest_gpumem.base.errors import InstallationError
from pytest_gpumem.base.processes import run
from pytest_gpumem.base.requirements.pip import pip_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.base.requirements.requirement_set import RequirementSet

_NVIDIA = re.compile(r"^(Requires-Dist: (?:cuda|nvidia)-[^;\n]*).*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_AT_ADDRESS = re.compile(r"^(?:[A-Za-z0-9._-]+ @ \S+|-e .+|(?:/|file:|[A-Za-z]:[\\/]).+)", re.MULTILINE)
"""A line in uv's lock file for a package from an address or a path. A package from a path may have no known name before its
build."""
_ERROR = re.compile(r"^(?:ERROR|error):\s*(.+)$", re.MULTILINE)
_CAUSE = re.compile(r"^\s*(?:\u2570\u2500\u25b6|\u00d7|\u251c\u2500\u25b6|cause:)\s*(.+)$", re.MULTILINE)
_NOT_REACHED = re.compile(r"Retrying \(Retry\(total=0\b.*after connection broken by ['\"]?(\w+)")
"""pip's message after its last attempt to reach a package index. Then pip continues as if the index were empty."""
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
_MOST_LINES, _MOST_RELEASES = 3, 3
_PLUGIN = "pytest-gpumem"


@dataclass(frozen=True)
class Installer:
    """Installs packages into the virtual environment in ``folder``, whose interpreter is ``python``."""

    python: Path
    folder: Path
    environment: Mapping[str, str]
    stop: Stop
    tick: Callable[[], None] = field(default=lambda: None)

    def install(self, requirements: RequirementSet, *, layered: bool, emulated: bool) -> None:
        """Install a set of requirements.

        Args:
            requirements: The requirements to install.
            layered: True if the new environment also sees the packages in the current environment.
            emulated: True to install torch's CUDA build without NVIDIA's libraries, which an emulated GPU replaces.

        Raises:
            InstallationError: A package cannot be installed.
            StopSignal: The process received a signal.
        """
        lines = list(requirements.lines)
        torch = next(
            (
                requirement
                for requirement in requirements.requirements
                if canonicalize_name(requirement.name) == "torch"
            ),
            None,
        )
        if emulated and torch is not None:
            self._install_torch(f" @ {torch.url}" if torch.url else str(torch.specifier))
            lines = [line for line in lines if not re.match(r"torch\b(?!-)", line, re.IGNORECASE)]
        requested = self.folder / "requirements.txt"
        requested.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        limits = self.folder / "constraints.txt"
        limits.write_text("".join(f"{line}\n" for line in requirements.constraints), encoding="utf-8")
        limited = ["--constraint", str(limits)] if requirements.constraints else []
        uv = find_uv()
        # With --upgrade, pip installs the newest fitting release, even if the current environment has an older fitting release.
        if emulated and torch is not None:
            if lines:
                self._run([*self._pip_install, "--upgrade", *limited, "--requirement", str(requested)])
            self._run([*self._pip_install, *limited, "torch"])
        elif uv is None:
            self._run([*self._pip_install, "--upgrade", *limited, "--requirement", str(requested)])
        elif layered:
            self._install_differences(uv, requested, limited)
        else:
            self._run([uv, "pip", "install", "--python", str(self.python), *limited, "--requirement", str(requested)])

    def install_plugin(self) -> None:
        """Install pytest-gpumem from the same source as in the current environment.

        Raises:
            InstallationError: The package cannot be installed.
            StopSignal: The process received a signal.
        """
        distribution = importlib.metadata.distribution(_PLUGIN)
        url = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "")
        self._run([*self._pip_install, f"{_PLUGIN} @ {url}" if url else f"{_PLUGIN}=={distribution.version}"])

    @cached_property
    def _pip_install(self) -> list[str]:
        # To warn of conflicts, pip would read all packages' requirements in both environments. This takes longer than the
        # installation.
        return [*pip_command(self.python, self.environment), "install", "--no-warn-conflicts"]

    def _install_torch(self, specifier: str) -> None:
        """Install torch's CUDA build without its dependencies, and make NVIDIA's libraries optional in its metadata.

        If NVIDIA's libraries stayed required, the next installation would add them.
        """
        # Unlike `==`, the operator `===` does not match a release with a local part. So a CPU build (2.13.0+cpu) does not count
        # as the required release.
        exact = re.fullmatch(r"={2,3}([^*,]+)", specifier)
        requirement = f"torch==={exact.group(1).partition('+')[0]}" if exact else f"torch{specifier}"
        self._run([*self._pip_install, "--upgrade", "--no-deps", requirement])
        for metadata in self.folder.rglob("torch-*.dist-info/METADATA"):
            text = metadata.read_text(encoding="utf-8")
            metadata.write_text(_NVIDIA.sub(r'\1; extra == "nvidia"', text), encoding="utf-8")

    def _install_differences(self, uv: str, requested: Path, limited: Sequence[str]) -> None:
        """Let uv choose a release for each package, and install the chosen releases that differ from the current releases.

        uv prefers a package's current release, except for the requested packages.
        """
        current = {
            canonicalize_name(distribution.metadata["Name"]): distribution
            for distribution in importlib.metadata.distributions()
        }
        lock, left_alone = self.folder / "lock.txt", self.folder / "left-alone.txt"
        lines = requested.read_text(encoding="utf-8").splitlines()
        named = {canonicalize_name(match.group()) for line in lines if (match := _NAME.match(line))}
        # No index has torch's CPU build or the project itself, so uv cannot find such packages. Leave them out.
        local = {
            name: distribution
            for name, distribution in current.items()
            if name not in named and ("+" in distribution.version or distribution.read_text("direct_url.json"))
        }
        left_alone.write_text("".join(f"{name}; python_version < '0'\n" for name in sorted(local)), encoding="utf-8")
        lock.write_text(
            "".join(
                f"{name}=={distribution.version}\n"
                for name, distribution in sorted(current.items())
                if name not in local
            ),
            encoding="utf-8",
        )
        upgrades = [f"--upgrade-package={name}" for name in sorted(named)]
        compile_ = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", str(self.python)]
        self._run(
            [*compile_, *upgrades, *limited, "--override", str(left_alone), "--output-file", str(lock), str(requested)]
        )
        resolved = {
            canonicalize_name(name): version for name, version in _PINNED.findall(lock.read_text(encoding="utf-8"))
        }
        differing = [
            f"{name}=={version}"
            for name, version in sorted(resolved.items())
            if name not in current or current[name].version != version
        ]
        # Always install a package from an address, because its code may differ from the same release in the current
        # environment.
        differing += _AT_ADDRESS.findall(lock.read_text(encoding="utf-8"))
        if differing:
            # Pass the options from the requirements file as well, because they may name the index with these releases.
            chosen = self.folder / "chosen.txt"
            options = [line for line in lines if line.startswith("-") and not line.startswith(("-e", "--editable"))]
            chosen.write_text("".join(f"{line}\n" for line in [*options, *differing]), encoding="utf-8")
            self._run([uv, "pip", "install", "--python", str(self.python), "--no-deps", "--requirement", str(chosen)])

    def _run(self, command: Sequence[str]) -> None:
        log = self.folder / "install.log"
        offset = log.stat().st_size if log.exists() else 0
        status = run(
            command, folder=Path.cwd(), environment=self.environment, output=log, stop=self.stop, tick=self.tick
        )
        if status:
            with log.open(encoding="utf-8", errors="replace") as file:
                file.seek(offset)
                raise InstallationError(reason_in(file.read()) or f"{command[0]} ended with exit status {status}")


def find_uv() -> str | None:
    """Return the path to uv; ``None`` if uv is not installed."""
    return shutil.which("uv")


def reason_in(output: str) -> str:
    """Return why pip or uv failed: the last three error messages in its output, or its last three lines if there are none."""
    errors = list(dict.fromkeys(line.rstrip(":") for line in [*_ERROR.findall(output), *_CAUSE.findall(output)]))
    lines = errors or [line.strip() for line in output.splitlines() if line.strip()]
    unreachable = [f"the package index cannot be reached ({error})" for error in _NOT_REACHED.findall(output)[:1]]
    return "; ".join(_VERSIONS.sub(_latest, line).rstrip(".") for line in [*unreachable, *lines[-_MOST_LINES:]])


def _latest(versions: re.Match[str]) -> str:
    """Shorten pip's list with all available releases to the last three releases."""
    listed = versions.group(1).split(", ")
    return (
        f"(from versions: {', '.join(['...', *listed[-_MOST_RELEASES:]] if len(listed) > _MOST_RELEASES else listed)})"
    )
