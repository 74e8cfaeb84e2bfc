"""Read a set of requirements from a command line: requirements, requirements files, constraints files and an interpreter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pytest_gpumem.base.errors import PathNotFound, RequirementError
from pytest_gpumem.base.requirements.paths import is_path, named_path, option_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FILE = re.compile(r"(?:-r|--requirement)(?:\s+|=)?(.+)")
_CONSTRAINTS = re.compile(r"(?:-c|--constraint)(?:\s+|=)?(.+)")
_PATH_OPTIONS = ("-e", "--editable", "-c", "--constraint")
"""Options with a path or an address. Because the content there may change, requirements with such options are not exact."""
_COMMENT = re.compile(r"(^|\s)#.*$")
_CONTINUED = re.compile(r"\\\r?\n")


@dataclass(frozen=True, slots=True)
class RequirementSet:
    """The packages to install in a new environment, a layer on top of the current environment.

    ``lines`` are requirements, and pip's options from requirements files. ``constraints`` are lines from constraints files.
    ``python`` is another interpreter, for an environment without the current packages; ``None`` for the current interpreter.

    Example: ``requirement_set(["transformers==4.38.2"])`` has the single line ``transformers==4.38.2`` and is exact.
    ``transformers>=4.38`` is not exact.
    """

    lines: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    python: str | None = None
    name: str = ""
    """The requirements as the user wrote them: ``transformers==4.37.2``, or ``-r old.txt``."""

    def __str__(self) -> str:
        return " on ".join(filter(None, [self.name, self.python]))

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """The parsed requirements among the lines. Options and paths are left out."""
        return tuple(Requirement(_bare(line)) for line in self.lines if not line.startswith("-") and not is_path(line))

    @property
    def names(self) -> frozenset[str]:
        """The required packages' normalized names."""
        return frozenset(canonicalize_name(requirement.name) for requirement in self.requirements)

    @property
    def is_exact(self) -> bool:
        """True if each requirement names a single release, so a later installation installs the same packages.

        A set with an address or a path is never exact, because the code at this address or path may change.
        """
        has_path = any(line.startswith(_PATH_OPTIONS) or is_path(line) for line in self.lines)
        return not has_path and all(
            len(requirement.specifier) == 1
            and next(iter(requirement.specifier)).operator in ("==", "===")
            and not next(iter(requirement.specifier)).version.endswith("*")
            for requirement in self.requirements
        )


class _Line(NamedTuple):
    """A requirement or an option. ``limits`` is true for a line from a constraints file."""

    text: str
    limits: bool = False


def requirement_set(
    texts: Iterable[str], constraints: Iterable[Path] = (), python: str | None = None
) -> RequirementSet:
    """Return the requirements from a command line's words.

    Example: ``requirement_set(["-r old.txt"])`` reads ``old.txt``, and the files that it names with ``-r`` and ``-c``.

    Args:
        texts: Requirements, or ``-r`` with the path to a requirements file.
        constraints: The paths to constraints files.
        python: The path to an interpreter; ``None`` for the current interpreter.

    Raises:
        RequirementError: A requirement is not valid, or a file cannot be read.
    """
    texts = tuple(texts)
    read = [line for text in texts for line in _lines_of(text)]
    read += [line for path in constraints for line in _lines_in(path, (), limits=True)]
    lines, limits = (tuple(line.text for line in read if line.limits is is_limit) for is_limit in (False, True))
    return RequirementSet(lines, limits, python, ", ".join(texts))


def _lines_of(text: str) -> Iterator[_Line]:
    file = _FILE.fullmatch(text.strip())
    if file:
        yield from _lines_in(Path(file.group(1).strip()), ())
    elif text.strip().startswith("-"):
        raise RequirementError(
            f"{text!r} is neither a requirement, like 'transformers==4.38.2', nor a file, like '-r old.txt'"
        )
    else:
        yield _Line(_checked(text.strip()))


def _lines_in(path: Path, within: tuple[Path, ...], *, limits: bool = False) -> Iterator[_Line]:
    """Yield the lines in a requirements or constraints file, and in the files that it includes with ``-r`` and ``-c``."""
    if path in within:
        raise RequirementError(f"{path} includes itself (-r or -c); remove this line")
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


def _checked(line: str, place: str = "") -> str:
    try:
        line = named_path(line)
        if not is_path(line):
            Requirement(_bare(line))
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise RequirementError(
            f"{line!r}{place} is not a valid requirement, like 'transformers==4.38.2': {reason}"
        ) from None
    except PathNotFound as error:
        raise RequirementError(f"{line!r}{place} is a path, but {error} does not exist") from None
    return line


def _bare(line: str) -> str:
    """Return a requirement without the options after it, such as ``--hash``."""
    return line.partition(" --")[0].strip()
