"""The kinds of files that this package writes, and the commands that read them, for error messages about a wrong file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.command_name import command_name

if TYPE_CHECKING:
    from pathlib import Path


class FileKind(NamedTuple):
    """A kind of file. The keys in a JSON file show the file's kind."""

    title: str
    keys: frozenset[str]
    """The keys at the top level of the JSON that distinguish this kind from all other kinds."""
    takers: tuple[str, ...] = ()
    """The commands that read such a file, without the word ``gpumem``."""

    def __str__(self) -> str:
        """Return the kind with its commands: ``"the result of gpumem ab (for `gpumem bisect --from`)"``."""
        commands = " and ".join(f"`{command_name()} {taker}`" for taker in self.takers)
        return f"{self.title} (for {commands})" if commands else self.title


SESSION = FileKind("the report of a session", frozenset({"terms", "results"}), ("why --report", "accept"))
STORED = FileKind("a file of the store", frozenset(), ("show --store FOLDER",))
"""A file with baselines in the store, which is TOML and therefore has no JSON keys."""
KINDS = (
    SESSION,
    FileKind("the result of gpumem ab", frozenset({"not_compared", "packages"}), ("bisect --from",)),
    FileKind("the result of gpumem compare", frozenset({"added", "gone", "tests"})),
    FileKind("the result of gpumem bisect", frozenset({"found", "culprit"})),
    FileKind("the result of gpumem advise", frozenset({"subject", "recommended"})),
    FileKind("the result of gpumem fit", frozenset({"gpus", "conclusion"})),
    FileKind("the result of gpumem doctor", frozenset({"findings", "exit_status"})),
    FileKind("the result of gpumem show", frozenset({"store", "baselines"})),
    FileKind("a report in SARIF", frozenset({"$schema", "runs"})),
)
"""All kinds of JSON files."""


def kind_of_file(path: Path) -> FileKind | None:
    """Return the kind of the file at ``path``; ``None`` if the file cannot be read, or another program wrote it."""
    try:
        return kind_of(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return None


def kind_of(text: str) -> FileKind | None:
    """Return the kind of a file with this text; ``None`` if another program wrote the text."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return STORED if _is_stored(text) else None
    return kind_of_json(plain)


def kind_of_json(plain: object) -> FileKind | None:
    """Return the kind of a file with this parsed JSON; ``None`` if the keys match no kind."""
    keys = plain.keys() if isinstance(plain, dict) else frozenset()
    return next((kind for kind in KINDS if kind.keys <= keys), None)


def _is_stored(text: str) -> bool:
    # The names of the TOML tables are enough to recognize the file, so the file is not parsed.
    lines = text.splitlines()
    heads = ("format = ", "[environments.", "[tests.")
    return all(any(line.startswith(head) for line in lines) for head in heads)
