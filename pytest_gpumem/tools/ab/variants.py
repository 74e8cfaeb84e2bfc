"""Variants to run. A variant is a revision or the current checkout, with the installed packages or with requirements."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from pytest_gpumem.base.errors import InstallationError
from pytest_gpumem.base.requirements.environments import site_folders_here
from pytest_gpumem.base.requirements.installed import versions
from pytest_gpumem.reporting.reports.comparison import ChangedPackage
from pytest_gpumem.tools.checkout import worktrees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_gpumem.base.git import Revision
    from pytest_gpumem.base.processes import Stop
    from pytest_gpumem.base.requirements.environments import Environments, VirtualEnvironment
    from pytest_gpumem.base.requirements.requirement_set import RequirementSet
    from pytest_gpumem.tools.checkout import Checkout


AS_IT_IS = "what is here"
"""The displayed name for the current checkout with the installed packages."""
_PATH = re.compile(r"(?<![\w:/.~])(?:(?:git\+)?file://)?(/[^\s,;\[\]]+)")
"""Pattern for an absolute path in a requirement, possibly in a ``file://`` URL."""
_MOST_NAMED = 8
"""The maximum number of packages to name after an installation."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant to compare. ``revision`` is ``None`` for the current checkout with its uncommitted changes.

    Example: ``Variant(None, requirement_set(["transformers==4.38.2"]))`` runs the current code with another transformers.
    """

    revision: Revision | None = None
    requirements: RequirementSet | None = None
    requirements_name: str = ""
    """The requirements' name in reports. If empty, reports show ``str(requirements)``."""

    @property
    def short(self) -> str:
        """A short name, for example ``1f3c9ab``."""
        return self._named(self.revision.short if self.revision else "")

    @property
    def title(self) -> str | Revision:
        """The variant's name in reports. For a revision without requirements, this is the `Revision` object."""
        return self.revision if self.revision is not None and self.requirements is None else str(self)

    def __str__(self) -> str:
        return self._named(str(self.revision) if self.revision else "")

    def _named(self, revision: str) -> str:
        return (
            " with ".join(filter(None, [revision, self.requirements_name or str(self.requirements or "")])) or AS_IT_IS
        )


def without_folders(variants: Sequence[Variant]) -> list[Variant]:
    """Shorten absolute paths in the variants' names, and return the renamed variants. Different paths stay different.

    Example: ``/home/ada/old/gpt`` and ``/home/ada/new/gpt`` become ``old/gpt`` and ``new/gpt``. People read a report on another
    machine, so they do not need ``/home/ada``.
    """
    names = [str(variant.requirements or "") for variant in variants]
    paths = {PurePosixPath(path) for name in names for path in _PATH.findall(name)}

    def short(match: re.Match[str]) -> str:
        path = PurePosixPath(match.group(1))
        for count in range(1, len(path.parts)):
            tail = path.parts[-count:]
            if sum(other.parts[-count:] == tail for other in paths) == 1:
                return "/".join(tail)
        return match.group()

    return [
        replace(variant, requirements_name=_PATH.sub(short, name))
        for variant, name in zip(variants, names, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ProvisionedVariant:
    """A variant that is ready to run.

    ``top`` is the checkout's root folder, and ``python`` is the interpreter. ``packages`` contains the releases installed for
    this variant, by package name.
    """

    variant: Variant
    top: Path
    python: Path = field(default_factory=lambda: Path(sys.executable))
    packages: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    """The top-level modules in ``packages``."""
    site_folders: tuple[Path, ...] = field(default_factory=lambda: tuple(site_folders_here()))
    """The folders with installed packages on the variant's ``sys.path``, in this order."""


@dataclass(frozen=True)
class Provisioner:
    """Creates virtual environments for requirements, and worktrees in ``folder`` for revisions."""

    checkout: Checkout
    environments: Environments
    folder: Path
    stop: Stop
    say: Callable[[str], None]
    emulated: bool = False
    """True if the runs use an emulated GPU. torch is then installed without NVIDIA's libraries."""

    def environment_of(self, requirements: RequirementSet) -> VirtualEnvironment:
        """Return the cached environment for a set of requirements, or install the requirements into a new environment.

        Raises `InstallationError` and `StopSignal`.
        """
        began = time.monotonic()
        cached = self.environments.find(requirements, emulated=self.emulated)
        if cached is not None:
            return cached
        self.say(f"installing {requirements} ...")
        try:
            environment = self.environments.make(requirements, self.stop, emulated=self.emulated)
        except InstallationError as error:
            raise InstallationError(f"{requirements} cannot be installed: {error}") from None
        packages = [f"{name} {version}" for name, version in environment.packages.items()]
        more = [f"{len(packages) - _MOST_NAMED} more"] if len(packages) > _MOST_NAMED else []
        names = ", ".join([*packages[:_MOST_NAMED], *more]) or "nothing new"
        self.say(f"installed {requirements} in {time.monotonic() - began:.0f} s: {names}")
        return environment

    @contextmanager
    def provide(self, variants: Mapping[str, Variant]) -> Iterator[dict[str, ProvisionedVariant]]:
        """Make variants ready to run, until the context ends. Environments are installed in parallel.

        Raises `InstallationError`, `GitError` and `StopSignal`.
        """
        sets = {variant.requirements for variant in variants.values() if variant.requirements is not None}
        with ThreadPoolExecutor(max_workers=max(1, len(sets))) as threads:
            futures = {threads.submit(self.environment_of, requirements): requirements for requirements in sets}
            environments = {futures[future]: future.result() for future in as_completed(futures)}
        revisions = {name: variant.revision for name, variant in variants.items() if variant.revision is not None}
        with worktrees(self.checkout, revisions, self.folder, self.stop) as (tops, notes):
            for note in notes:
                self.say(note)
            yield {
                name: _provisioned(
                    variant,
                    tops.get(name, self.checkout.top),
                    environments[variant.requirements] if variant.requirements else None,
                )
                for name, variant in variants.items()
            }


def _provisioned(variant: Variant, top: Path, environment: VirtualEnvironment | None) -> ProvisionedVariant:
    if environment is None:
        return ProvisionedVariant(variant, top)
    return ProvisionedVariant(
        variant, top, environment.python, environment.packages, environment.modules, environment.site_folders
    )


def differing_packages(base: ProvisionedVariant, head: ProvisionedVariant) -> tuple[str, ...]:
    """Return a clause for each package whose release differs between base and head: ``"six 1.16.0 and 1.17.0"``."""
    names = sorted(base.packages.keys() | head.packages.keys())
    pairs = ((name, base.packages.get(name, "as installed"), head.packages.get(name, "as installed")) for name in names)
    return tuple(f"{name} {old} and {new}" for name, old, new in pairs if old != new)


def changed_packages(base: ProvisionedVariant, head: ProvisionedVariant) -> tuple[ChangedPackage, ...]:
    """Return the packages whose release differs between ``base`` and ``head``, sorted by normalized name.

    Only packages that were installed specially for ``base`` or ``head`` are compared. A package for which head's requirements
    name an address (URL) is always returned, because its code may have changed without its release number.
    """
    sides = [
        {str(canonicalize_name(name)): release for name, release in provisioned.packages.items()}
        for provisioned in (base, head)
    ]
    names = sorted(sides[0].keys() | sides[1].keys())
    beneath = versions(names)
    old, new = (
        side
        if provisioned.variant.requirements is not None and provisioned.variant.requirements.python
        else {**beneath, **side}
        for provisioned, side in zip((base, head), sides, strict=True)
    )
    requirements = head.variant.requirements.requirements if head.variant.requirements is not None else ()
    urls = {str(canonicalize_name(requirement.name)): requirement.url for requirement in requirements}
    return tuple(
        ChangedPackage(name, old.get(name), new.get(name), name in urls, urls.get(name))
        for name in names
        if old.get(name) != new.get(name) or urls.get(name)
    )


def why_no_difference(base: ProvisionedVariant, head: ProvisionedVariant, imported: frozenset[str]) -> str | None:
    """Return the reason why the runs of base and head cannot differ, or ``None`` if they can.

    The runs cannot differ if base and head have the same code, and the tests imported none of the packages that differ.

    Args:
        base: The base variant.
        head: The head variant.
        imported: The top-level modules that the runs imported.
    """
    differ = differing_packages(base, head)
    if base.variant.revision != head.variant.revision or not differ or imported & (base.modules | head.modules):
        return None
    return f"the tests import no package that differs ({', '.join(differ)}), so there is nothing to compare"
