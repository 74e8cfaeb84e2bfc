"""A set of requirements as a command line gives it: requirements, files of them, constraints and a Python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pytest_gpumem.requirements.errors import RequirementError
from pytest_gpumem.requirements.paths import NoSuchPath, is_path, named_path, option_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FILE = re.compile(r"(?:-r|--requirement)(?:\s+|=)?(.+)")
_CONSTRAINTS = re.compile(r"(?:-c|--constraint)(?:\s+|=)?(.+)")
_ELSEWHERE = ("-e", "--editable", "-c", "--constraint")
"""Options whose value is read when it is installed."""
_COMMENT = re.compile(r"(^|\s)#.*$")
_CONTINUED = re.compile(r"\\\r?\n")


@dataclass(frozen=True, slots=True)
class RequirementSet:
    """Packages that an environment is to hold beside what is installed here.

    ``lines`` are requirements, and options of pip that a file has among them; ``constraints`` are the lines of files of
    constraints, and ``python`` the interpreter, ``None`` for this one.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    python: str | None = None
    name: str = ""
    """The set as it was given: ``transformers==4.37.2``, ``-r old.txt``."""

    def __str__(self) -> str:
        return " on ".join(filter(None, [self.name, self.python]))

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The requirements among its lines."""
        return tuple(Requirement(_bare(line)) for line in self.lines if not line.startswith("-") and not is_path(line))

    @property
    def names(self) -> frozenset[str]:
        """The normalized names of the packages that it requires."""
        return frozenset(canonicalize_name(one.name) for one in self.requirements)

    @property
    def is_exact(self) -> bool:
        """True if each requirement is of one release, so that the same packages are installed next year.

        What lies at an address or a path may be another thing by then.
        """
        elsewhere = any(line.startswith(_ELSEWHERE) or is_path(line) for line in self.lines)
        return not elsewhere and all(
            len(one.specifier) == 1
            and next(iter(one.specifier)).operator in ("==", "===")
            and not next(iter(one.specifier)).version.endswith("*")
            for one in self.requirements
        )


class _Line(NamedTuple):
    """A line of a file, and whether it is of a file of constraints."""

    text: str
    limits: bool = False


def requirement_set(
    given: Iterable[str], constraints: Iterable[Path] = (), python: str | None = None
) -> RequirementSet:
    """Return the set that is ``given``: requirements, or ``-r`` and the path of a file of them.

    Files of constraints that these files name are read as those of ``constraints``. Raises `RequirementError`.
    """
    given = tuple(given)
    found = [line for text in given for line in _lines_of(text)]
    found += [line for path in constraints for line in _lines_in(path, (), limits=True)]
    lines, limits = (tuple(line.text for line in found if line.limits is which) for which in (False, True))
    return RequirementSet(lines, limits, python, ", ".join(given))


def _lines_of(text: str) -> Iterator[_Line]:
    found = _FILE.fullmatch(text.strip())
    if found:
        yield from _lines_in(Path(found.group(1).strip()), ())
    elif text.strip().startswith("-"):
        raise RequirementError(
            f"{text!r} is neither a requirement, like 'transformers==4.38.2', nor a file, like '-r old.txt'"
        )
    else:
        yield _Line(_checked(text.strip()))


def _lines_in(path: Path, within: tuple[Path, ...], *, limits: bool = False) -> Iterator[_Line]:
    """Yield the lines of a file of requirements or constraints, and of those that it names."""
    if path in within:
        raise RequirementError(f"{path} names itself")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequirementError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for line in _CONTINUED.sub("", text).splitlines():
        bare = _COMMENT.sub("", line).strip()
        named = _FILE.fullmatch(bare)
        constrained = _CONSTRAINTS.fullmatch(bare)
        if named:
            yield from _lines_in(path.parent / named.group(1).strip(), (*within, path), limits=limits)
        elif constrained and "://" not in bare:
            yield from _lines_in(path.parent / constrained.group(1).strip(), (*within, path), limits=True)
        elif bare.startswith("-"):
            yield _Line(option_from(bare, path.parent), limits)
        elif bare:
            yield _Line(_checked(bare, f" in {path}"), limits)


def _checked(line: str, where: str = "") -> str:
    try:
        line = named_path(line)
        if not is_path(line):
            Requirement(_bare(line))
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise RequirementError(f"{line!r}{where} is no requirement, like 'transformers==4.38.2': {reason}") from None
    except NoSuchPath as error:
        raise RequirementError(f"{line!r}{where} leads nowhere: there is no {error}") from None
    return line


def _bare(line: str) -> str:
    """Return a line without options of its own, such as hashes."""
    return line.partition(" --")[0].strip()
