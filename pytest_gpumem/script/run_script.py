"""Run of a script in this process, as ``python script.py`` would run it."""

from __future__ import annotations

import runpy
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class ScriptFailed(Exception):
    """Error of a script that ended by itself with another status than 0; the message is a sentence."""


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a script to its end as ``__main__``, with these arguments and with its folder first on ``sys.path``.

    Raises:
        ScriptFailed: It left by ``sys.exit`` with something else than 0.
        BaseException: What it raised.
    """
    with _as_main(path, arguments):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ScriptFailed(f"{path.name} left by sys.exit({end.code!r})") from end


def failure_of_script(path: Path, error: BaseException) -> str:
    """Return the traceback of an exception that a script did not catch, from the script's own frame on."""
    lines = traceback.TracebackException.from_exception(error)
    begins = next((n for n, frame in enumerate(lines.stack) if frame.filename == str(path)), 0)
    lines.stack = traceback.StackSummary.from_list(lines.stack[begins:])
    return "".join(lines.format()).rstrip()


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    words, folders = list(sys.argv), list(sys.path)
    sys.argv[:] = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = words, folders
