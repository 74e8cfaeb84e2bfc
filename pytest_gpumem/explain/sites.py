"""Source locations: the line of the user that runs, and that of the library that it called."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import types


_INSTALLED = ("site-packages", "dist-packages")
# pytest, and packages that call test functions.
_NOT_THE_USERS = ("_pytest", "pytest", "pluggy", "xdist", "anyio", "hypothesis", "torch", "torchgen", "functorch")

_ENGINE = "_engine_run_backward"


class Site(NamedTuple):
    """``file.py:line`` of the user's frame, and of the library's frame that it called; empty where there is none."""

    user: str = ""
    library: str = ""


class Sites:
    """Finder of source locations. Paths are relative to ``root``, or from the folder that a library is installed in."""

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
        self._files: dict[str, tuple[bool, str] | None] = {}

    def here(self, depth: int = 1) -> Site:
        """Return the site of the caller, ``depth`` frames up."""
        frame: types.FrameType | None = sys._getframe(depth)  # noqa: SLF001 - inspect.currentframe() under a public name, with a depth
        library = ""
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = self._file(name)
            file = self._files[name]
            if file is not None:
                theirs, shown = file
                if theirs:
                    return Site(f"{shown}:{frame.f_lineno}", library)
                library = library or f"{shown}:{frame.f_lineno}"
            elif frame.f_code.co_name == _ENGINE:
                # Code that runs in backward() was not called by its caller.
                break
            frame = frame.f_back
        return Site("", library)

    def _file(self, name: str) -> tuple[bool, str] | None:
        """Return whether a file is the user's and how it is shown; ``None`` for one whose frames are skipped."""
        if name.startswith("<"):
            return None
        path = Path(name).resolve()
        parts = path.parts
        for folder in _INSTALLED:
            if folder in parts:
                within = parts[len(parts) - parts[::-1].index(folder) :]
                if within[0] in _NOT_THE_USERS or str(path).startswith(self._skipped[:2]):
                    return None
                return False, "/".join(within)
        if str(path).startswith(self._skipped):
            return None
        if path.is_relative_to(self._root):
            return True, path.relative_to(self._root).as_posix()
        # Somewhere else on this machine: a name that is the same on the next one.
        return True, PurePath(*parts[-2:]).as_posix()
