"""Source locations: the line of the user that runs, and that of the library that it called."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.requirements.installed import installed_file

if TYPE_CHECKING:
    import types

    from pytest_gpumem.requirements.installed import Package
    from pytest_gpumem.values.source_lines import Chain


# pytest, and packages that call test functions.
_NOT_THE_USERS = ("_pytest", "pytest", "pluggy", "xdist", "anyio", "hypothesis", "torch", "torchgen", "functorch")

_OVERRIDING = "handle_torch_function"
"""The function of torch between a function of Python that can be overridden and what overrides it."""
_OUTERMOST = ("_engine_run_backward", "pytest_pyfunc_call")
"""Functions that call what their own callers know nothing of: the code of a backward pass, a test."""


MOST_CALLERS = 16
"""The most callers that are kept between the allocating line and the user's line, and again above the user's line."""


class Site(NamedTuple):
    """``file.py:line`` of the user's frame, and of the library's frame that it called; empty where there is none."""

    user: str = ""
    library: str = ""
    callers: Chain = ()
    """The frames that led there, innermost first. ``user`` is among them if there is a library's frame."""


class Function(NamedTuple):
    """A function that calls torch functions itself. Its name is empty if there is none."""

    name: str = ""
    caller: str = ""
    """The line that calls it."""
    caller_function: str = ""
    """The function with this line; empty if a module is called in between."""


class _File(NamedTuple):
    """A file as it is shown."""

    shown: str
    is_users: bool = True
    package: Package | None = None


class Sites:
    """Finder of source locations. Paths are relative to ``root``; a library's begin with its package and version."""

    def __init__(self, root: Path) -> None:
        import torch

        self._root = root.resolve()
        self._skipped = tuple(
            str(Path(folder).resolve()) + "/"
            for folder in (
                Path(__file__).parents[1],
                Path(torch.__file__).parent,
                *(Path(str(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib")),
            )
        )
        self._files: dict[str, _File | None] = {}
        self.packages: set[Package] = set()
        """The installed packages whose code was on the way to a site. Whoever wants those of one step clears it before."""

    def here(self, depth: int = 1) -> Site:
        """Return the site of the caller, ``depth`` frames up."""
        frame: types.FrameType | None = sys._getframe(depth)  # noqa: SLF001 - inspect.currentframe() under a public name, with a depth
        user = ""
        # As keys: a function that calls itself is told once.
        beneath: dict[str, None] = {}
        above: dict[str, None] = {}
        while frame is not None and len(above) < MOST_CALLERS:
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = self._file(name)
            file = self._files[name]
            if file is not None:
                line = f"{file.shown}:{frame.f_lineno}"
                if user:
                    above[line] = None
                elif file.is_users:
                    user = line
                else:
                    beneath[line] = None
                    if file.package is not None:
                        self.packages.add(file.package)
            elif frame.f_code.co_name in _OUTERMOST:
                break
            frame = frame.f_back
        library, *between = beneath or [""]
        callers = [*between[:MOST_CALLERS], *([user] if user and library else []), *above]
        return Site(user, library, tuple(callers))

    def function(self, called: str, depth: int = 1, outermost: int = 0) -> Function:
        """Return the function that calls a torch function itself, and its caller.

        All is empty if torch's own code calls it: an optimizer or ``clip_grad_norm_`` changes grad mode by itself. Lambdas and
        comprehensions belong to the function around them.

        Args:
            called: The name of the torch function.
            depth: Frames up to its caller.
            outermost: The ``id`` of a frame around the function: that of a module's call.
        """
        frame: types.FrameType | None = sys._getframe(depth)  # noqa: SLF001 - as in `here`
        name = ""
        is_within = True
        while frame is not None and (name or id(frame) != outermost):
            is_within &= id(frame) != outermost
            code = frame.f_code
            if code.co_filename not in self._files:
                self._files[code.co_filename] = self._file(code.co_filename)
            file = self._files[code.co_filename]
            if file is None and (code.co_name in _OUTERMOST if name else code.co_name not in (called, _OVERRIDING)):
                break
            if file is not None and not code.co_name.startswith("<"):
                if name:
                    return Function(name, f"{file.shown}:{frame.f_lineno}", code.co_name if is_within else "")
                name = code.co_name
            frame = frame.f_back
        return Function(name)

    def around(self, depth: int = 1, outermost: int = 0) -> str:
        """Return the name of the innermost function of the user or a library.

        ``outermost`` is the ``id`` of a frame. The name is empty if the function is this frame or beyond it.
        """
        frame: types.FrameType | None = sys._getframe(depth)  # noqa: SLF001 - as in `here`
        while frame is not None and id(frame) != outermost:
            code = frame.f_code
            if code.co_filename not in self._files:
                self._files[code.co_filename] = self._file(code.co_filename)
            if self._files[code.co_filename] is not None and not code.co_name.startswith("<"):
                return code.co_name
            frame = frame.f_back
        return ""

    def _file(self, name: str) -> _File | None:
        """Return what is known of a file; ``None`` for one whose frames are skipped."""
        if name.startswith("<"):
            return None
        path = Path(name).resolve()
        installed = installed_file(path)
        if installed is not None:
            if installed.parts[0] in _NOT_THE_USERS or str(path).startswith(self._skipped[:2]):
                return None
            return _File(installed.shown, is_users=False, package=installed.package)
        if str(path).startswith(self._skipped):
            return None
        if path.is_relative_to(self._root):
            return _File(path.relative_to(self._root).as_posix())
        # Somewhere else on this machine: a name that is the same on the next one.
        return _File(PurePath(*path.parts[-2:]).as_posix())
