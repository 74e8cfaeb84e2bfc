"""Run of a script in this process, as ``python script.py`` would run it."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING

from pytest_gpumem.measure.loop import EndOfLoop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import NoReturn


class ScriptFailed(Exception):
    """Error of a script that ended by itself with another status than 0; the message is a sentence."""


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run a script to its end as ``__main__``, with these arguments and with its folder first on ``sys.path``.

    Processes that it forks end where it ends in them, and do not come back.

    Raises:
        ScriptFailed: It left by ``sys.exit`` with something else than 0.
        BaseException: What it raised.
    """
    process = os.getpid()
    try:
        _run_as_main(path, arguments)
    except BaseException as error:
        if os.getpid() != process:
            _leave_fork(path, error)
        if not isinstance(error, SystemExit):
            raise
        if error.code not in (None, 0):
            raise ScriptFailed(f"{path.name} left by sys.exit({error.code!r})") from error
    if os.getpid() != process:
        _leave_fork(path, None)


def failure_of_script(path: Path, error: BaseException) -> str:
    """Return the traceback of an exception that a script did not catch, from the script's own frame on."""
    lines = traceback.TracebackException.from_exception(error)
    begins = next((n for n, frame in enumerate(lines.stack) if frame.filename == str(path)), 0)
    lines.stack = traceback.StackSummary.from_list(lines.stack[begins:])
    return "".join(lines.format()).rstrip()


def _leave_fork(path: Path, error: BaseException | None) -> NoReturn:
    """End a process that the script has forked as the interpreter would, since the session is its parent's."""
    code = error.code if isinstance(error, SystemExit) else None
    if error is not None and not isinstance(error, (SystemExit, EndOfLoop)):
        sys.stderr.write(f"{failure_of_script(path, error)}\n")
        code = 1
    elif code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _run_as_main(path: Path, arguments: Sequence[str]) -> None:
    # Not by runpy, which ends with an IndexError where a script has cleared sys.argv.
    loader = SourceFileLoader("__main__", str(path))
    main = ModuleType("__main__")
    vars(main).update(__file__=str(path), __loader__=loader, __builtins__=__builtins__)
    code = loader.source_to_code(loader.get_data(str(path)), str(path))
    with _in_place_of_this_program(main, path, arguments):
        exec(code, vars(main))  # noqa: S102 - what the command is for


@contextmanager
def _in_place_of_this_program(main: ModuleType, path: Path, arguments: Sequence[str]) -> Iterator[None]:
    words, folders, ours = list(sys.argv), list(sys.path), sys.modules["__main__"]
    sys.argv[:] = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = words, folders, ours
