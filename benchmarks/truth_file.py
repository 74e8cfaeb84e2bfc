"""The file that the table of truth is kept in: JSON of the same text for the same figures, a few lines for each case."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = 1


class TruthFile:
    """Results by case, of one environment. Each is on the disk as soon as it is there.

    What another environment gave is not mixed in, and not lost: its file is kept beside this one as ``before``.
    Raises ``ValueError`` for a file that holds something else.
    """

    def __init__(self, path: Path, environment: Mapping[str, str | int]) -> None:
        self.path = path
        self.before: Path | None = None
        self._environment = dict(environment)
        self.cases: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._read()

    def has(self, case: str) -> bool:
        """Whether the case has a result that another run would give, too. A failure is tried again."""
        return case in self.cases and "failed" not in self.cases[case]

    def put(self, case: str, result: dict[str, Any]) -> None:
        """Keep a result, and write the file: whole, or not at all."""
        self.cases[case] = result
        if self.before is not None and not self.before.exists():
            self.path.replace(self.before)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(self.text(), encoding="utf-8")
        beside.replace(self.path)

    def text(self) -> str:
        document = {"format": FORMAT, "environment": self._environment, "cases": self.cases}
        return _lines(document) + "\n"

    def _read(self) -> None:
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            environment, self.cases = document["environment"], document["cases"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is no table of truth ({error!r}); move it away") from None
        if (document.get("format"), environment) != (FORMAT, self._environment):
            names = (self.path.with_suffix(f".before-{number}.json") for number in itertools.count(1))
            self.before = next(name for name in names if not name.exists())
            self.cases = {}


def _lines(value: object, indent: str = "") -> str:
    """JSON with sorted keys, in which a mapping or list of plain values is one line."""
    if not isinstance(value, dict) or not any(isinstance(inner, (dict, list)) for inner in value.values()):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    deeper = indent + "  "
    entries = [f"{deeper}{json.dumps(key)}: {_lines(value[key], deeper)}" for key in sorted(value)]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
