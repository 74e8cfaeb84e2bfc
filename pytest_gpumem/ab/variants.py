"""Variants to run: a revision, or the checkout as it is, with the packages that are here or a set of requirements."""

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

from pytest_gpumem.ab.checkout import worktrees
from pytest_gpumem.reports.comparison import ChangedPackage
from pytest_gpumem.requirements.environments import site_folders_here
from pytest_gpumem.requirements.errors import NotInstalled
from pytest_gpumem.requirements.installed import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pytest_gpumem.ab.checkout import Checkout
    from pytest_gpumem.git import Revision
    from pytest_gpumem.processes import Stop
    from pytest_gpumem.requirements.environments import Environments, VirtualEnvironment
    from pytest_gpumem.requirements.requirement_set import RequirementSet


AS_IT_IS = "what is here"
"""The name of the checkout as it is with the packages that are installed."""
_PATH = re.compile(r"(?<![\w:/.~])(?:(?:git\+)?file://)?(/[^\s,;\[\]]+)")
"""An absolute path in a requirement, or in a file's URL."""
_MOST_TOLD = 8
"""Packages of a new environment that are told one by one."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things to compare. ``revision`` is ``None`` for the checkout as it is, with what is not committed."""

    revision: Revision | None = None
    requirements: RequirementSet | None = None
    requirements_name: str = ""
    """Name for the requirements in reports; empty to use the set's own."""

    @property
    def short(self) -> str:
        """A few words that tell it from others of its kind."""
        return self._named(self.revision.short if self.revision else "")

    @property
    def title(self) -> str | Revision:
        """The name in reports: a revision where it is nothing else."""
        return self.revision if self.revision is not None and self.requirements is None else str(self)

    def __str__(self) -> str:
        return self._named(str(self.revision) if self.revision else "")

    def _named(self, revision: str) -> str:
        return (
            " with ".join(filter(None, [revision, self.requirements_name or str(self.requirements or "")])) or AS_IT_IS
        )


def without_folders(variants: Sequence[Variant]) -> list[Variant]:
    """Return variants with shortened absolute paths in their names. Different paths stay different.

    Example: ``/home/ada/old/gpt`` and ``/home/ada/new/gpt`` become ``old/gpt`` and ``new/gpt``. People read reports on other
    machines, and the rest of a path says nothing there.
    """
    names = [str(one.requirements or "") for one in variants]
    paths = {PurePosixPath(path) for name in names for path in _PATH.findall(name)}

    def short(found: re.Match[str]) -> str:
        path = PurePosixPath(found.group(1))
        for count in range(1, len(path.parts)):
            tail = path.parts[-count:]
            if sum(one.parts[-count:] == tail for one in paths) == 1:
                return "/".join(tail)
        return found.group()

    return [replace(one, requirements_name=_PATH.sub(short, name)) for one, name in zip(variants, names, strict=True)]


@dataclass(frozen=True, slots=True)
class ProvisionedVariant:
    """A variant that can be run: its checkout, and its interpreter with the packages that are not those of this one."""

    variant: Variant
    top: Path
    python: Path = field(default_factory=lambda: Path(sys.executable))
    packages: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    """The modules of these packages, by their first names."""
    site_folders: tuple[Path, ...] = field(default_factory=lambda: tuple(site_folders_here()))
    """The folders of installed packages that it sees, its own first."""


@dataclass(frozen=True)
class Provisioner:
    """Provides what variants need to be run: environments of requirements, and worktrees of revisions in ``folder``."""

    checkout: Checkout
    environments: Environments
    folder: Path
    stop: Stop
    say: Callable[[str], None]
    emulated: bool = False
    """True if the runs are on an emulated GPU, so that torch is installed without NVIDIA's libraries."""

    def environment_of(self, wanted: RequirementSet) -> VirtualEnvironment:
        """Return the environment of a set of requirements. Raises `NotInstalled` and `Stopped`."""
        began = time.monotonic()
        known = self.environments.find(wanted, emulated=self.emulated)
        if known is not None:
            return known
        self.say(f"installing {wanted} ...")
        try:
            made = self.environments.make(wanted, self.stop, emulated=self.emulated)
        except NotInstalled as error:
            raise NotInstalled(f"{wanted} cannot be installed: {error}") from None
        packages = [f"{name} {version}" for name, version in made.packages.items()]
        more = [f"{len(packages) - _MOST_TOLD} more"] if len(packages) > _MOST_TOLD else []
        told = ", ".join([*packages[:_MOST_TOLD], *more]) or "nothing that is not here"
        self.say(f"installed {wanted} in {time.monotonic() - began:.0f} s: {told}")
        return made

    @contextmanager
    def provide(self, variants: Mapping[str, Variant]) -> Iterator[dict[str, ProvisionedVariant]]:
        """Provide variants, with environments made in parallel, for as long as the context lasts.

        Raises `NotInstalled`, `GitError` and `Stopped`.
        """
        wanted = {one.requirements for one in variants.values() if one.requirements is not None}
        with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as threads:
            making = {threads.submit(self.environment_of, one): one for one in wanted}
            made = {making[done]: done.result() for done in as_completed(making)}
        revisions = {name: one.revision for name, one in variants.items() if one.revision is not None}
        with worktrees(self.checkout, revisions, self.folder, self.stop) as (tops, notes):
            for note in notes:
                self.say(note)
            yield {
                name: _provisioned(
                    one, tops.get(name, self.checkout.top), made[one.requirements] if one.requirements else None
                )
                for name, one in variants.items()
            }


def _provisioned(variant: Variant, top: Path, environment: VirtualEnvironment | None) -> ProvisionedVariant:
    if environment is None:
        return ProvisionedVariant(variant, top)
    return ProvisionedVariant(
        variant, top, environment.python, environment.packages, environment.modules, environment.site_folders
    )


def differing_packages(base: ProvisionedVariant, head: ProvisionedVariant) -> tuple[str, ...]:
    """Return a clause for each package that is not the same in both: ``"six 1.16.0 and 1.17.0"``."""
    names = sorted(base.packages.keys() | head.packages.keys())
    pairs = ((name, base.packages.get(name, "as here"), head.packages.get(name, "as here")) for name in names)
    return tuple(f"{name} {then} and {now}" for name, then, now in pairs if then != now)


def changed_packages(base: ProvisionedVariant, head: ProvisionedVariant) -> tuple[ChangedPackage, ...]:
    """Return the packages that are another release in ``head``, by normalized name; what neither set installed is the same."""
    sides = [{str(canonicalize_name(name)): release for name, release in one.packages.items()} for one in (base, head)]
    names = sorted(sides[0].keys() | sides[1].keys())
    beneath = versions(names)
    old, new = (
        side if one.variant.requirements is not None and one.variant.requirements.python else {**beneath, **side}
        for one, side in zip((base, head), sides, strict=True)
    )
    wanted = head.variant.requirements.requirements if head.variant.requirements is not None else ()
    urls = {str(canonicalize_name(one.name)): one.url for one in wanted}
    return tuple(
        ChangedPackage(name, old.get(name), new.get(name), name in urls, urls.get(name))
        for name in names
        if old.get(name) != new.get(name) or urls.get(name)
    )


def why_unused(base: ProvisionedVariant, head: ProvisionedVariant, imported: frozenset[str]) -> str | None:
    """Return why the runs cannot differ, as a sentence: none of the packages that differ was imported; or ``None``.

    ``imported`` are the first names of the modules that either run had loaded.
    """
    differ = differing_packages(base, head)
    if base.variant.revision != head.variant.revision or not differ or imported & (base.modules | head.modules):
        return None
    return f"the tests import nothing that differs ({', '.join(differ)}), so that there is nothing to compare"
