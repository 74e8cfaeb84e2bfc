"""Reports that a command is given: files, or patterns of them, each read once."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.cli.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.reports.session_report import SessionReport


def read_report(path: Path) -> SessionReport:
    """The report in a JSON file. Raises `InputError`, which names the file."""
    from pytest_gpumem.reports.json_report import ReportError, from_json

    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; name the files in it: {path}/*.json") from None
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; `pytest --gpumem-report={path}` writes one") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8, and so no JSON report of pytest-gpumem") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return from_json(text, str(path))
    except ReportError as error:
        raise InputError(str(error)) from None


def files_of(given: Sequence[str]) -> list[Path]:
    """The files that are named, patterns taken apart where no shell did. Raises `InputError`.

    A file that is given twice is a mistake: it would count for two shards.
    """
    found: dict[Path, str] = {}
    for name in given:
        if Path(name).exists() or not glob.has_magic(name):
            paths = [name]
        else:
            paths = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - a pattern may be absolute
            if not paths:
                raise InputError(f"{name} matches no file")
        for path in paths:
            real = Path(path).resolve()
            if real in found:
                raise InputError(f"{path} is given twice{'' if found[real] == path else f', also as {found[real]}'}")
            found[real] = path
    return [Path(path) for path in found.values()]
