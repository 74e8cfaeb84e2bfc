"""Find source locations: the user's line, and the library line called from the user's line."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.requirements.installed import installed_file

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Iterator

    from pytest_gpumem.base.requirements.installed import Package
    from pytest_gpumem.facts.values.source_lines import Chain


# Torch's packages, pytest, and packages that call test functions.
_NOT_THE_USERS = ("_pytest", "pytest", "pluggy", "xdist", "anyio", "hypothesis", "torch", "torchgen", "functorch")

_GENERATED = re.compile(r"([a-z2-7]{2})/c\1[a-z2-7]{40,}\.py")
"""The folder and name of a file that torch.compile writes, with the hash of its content: ``5x/c5x2dqdf...norma.py``."""
_OVERRIDING = "handle_torch_function"
"""The name of the torch function through which other torch functions call ``__torch_function__``."""
_OUTERMOST = ("_engine_run_backward", "pytest_pyfunc_call")
"""The functions that call a backward pass or a test. A search for callers ends there."""


MOST_CALLERS = 16
"""The maximum number of callers to store between the allocating line and the user's line. The same limit applies to callers
above the user's line."""


class Site(NamedTuple):
    """The user's line, and the library line called from there, as ``file.py:line``. A line is empty if there is no such frame.

    Example:
        A user's model calls an attention layer in transformers: ``user`` is ``"model.py:38"`` and ``library`` is
        ``"transformers 4.38.2: models/llama/modeling_llama.py:402"``.
    """

    user: str = ""
    library: str = ""
    callers: Chain = ()
    """The calling lines, innermost first. They include ``user`` if there is a library line."""


class Function(NamedTuple):
    """A function that directly calls a torch function. ``name`` is empty if torch's own code calls the torch function."""

    name: str = ""
    caller: str = ""
    """The line that calls the function."""
    caller_function: str = ""
    """The function that contains ``caller``. Empty if a module was called between ``caller`` and the function."""


class _File(NamedTuple):
    """A file and its displayed name."""

    shown: str
    is_users: bool = True
    package: Package | None = None


class Sites:
    """Finds source locations. User paths are relative to ``root``. Library paths begin with package and version."""

    def __init__(self, root: Path) -> None:
        import torch

        self._root = root.resolve()
        self._skipped = tuple(
            str(Path(folder).resolve()) + "/"
            for folder in (
                Path(__file__).parents[2],
                Path(torch.__file__).parent,
                *(Path(str(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib")),
            )
        )
        self._files: dict[str, _File | None] = {}
        self.packages: set[Package] = set()
        """The installed packages whose code a user's line called. To get only a step's packages, clear this set before the
        step."""

    def caller_site(self, depth: int = 1) -> Site:
        """Return the site of the caller, ``depth`` frames up."""
        return self.site_of(_outwards(sys._getframe(depth)))  # noqa: SLF001 - like the public inspect.currentframe(), but with a depth

    def site_of(self, frames: Iterable[tuple[str, int, str]]) -> Site:
        """Return the site of a call stack.

        Args:
            frames: The file's path, the line and the function's name of each frame, innermost first.
        """
        user = ""
        # Dict keys, so a recursive function appears once.
        beneath: dict[str, None] = {}
        above: dict[str, None] = {}
        for name, number, function in frames:
            if name not in self._files:
                self._files[name] = self._file(name)
            file = self._files[name]
            if file is not None:
                line = f"{file.shown}:{number}"
                if user:
                    above[line] = None
                elif file.is_users:
                    user = line
                else:
                    beneath[line] = None
                    if file.package is not None:
                        self.packages.add(file.package)
            elif function in _OUTERMOST:
                break
            if len(above) == MOST_CALLERS:
                break
        library, *between = beneath or [""]
        callers = [*between[:MOST_CALLERS], *([user] if user and library else []), *above]
        return Site(user, library, tuple(callers))

    def function(self, called: str, depth: int = 1, outermost: int = 0) -> Function:
        """Find the function that directly calls the torch function ``called``, and the line that calls this function.

        The search goes through the current call stack, from the torch function outwards. The result is empty if torch's own
        code calls the torch function, as when an optimizer or ``clip_grad_norm_`` switches grad mode. Lambdas and
        comprehensions belong to the surrounding function.

        Example: ``forward`` in ``model.py`` calls ``rescale`` at line 12, and ``rescale`` calls ``torch.addmm``. For
        ``"addmm"``, the result is ``Function("rescale", "model.py:12", "forward")``.

        Args:
            called: The torch function's name.
            depth: The number of frames up to the torch function's caller.
            outermost: The ``id`` of the frame that calls the current module.
        """
        frame: types.FrameType | None = sys._getframe(depth)  # noqa: SLF001 - as in caller_site
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
        """Return the name of the innermost user or library function.

        ``outermost`` is the ``id`` of a frame at which the search ends. If there is no such function below this frame, the name
        is empty.
        """
        frame: types.FrameType | None = sys._getframe(depth)  # noqa: SLF001 - as in caller_site
        while frame is not None and id(frame) != outermost:
            code = frame.f_code
            if code.co_filename not in self._files:
                self._files[code.co_filename] = self._file(code.co_filename)
            if self._files[code.co_filename] is not None and not code.co_name.startswith("<"):
                return code.co_name
            frame = frame.f_back
        return ""

    def _file(self, name: str) -> _File | None:
        """Return the file named ``name``; ``None`` if frames in this file are skipped."""
        path = Path(name).resolve()
        if name.startswith("<") or _GENERATED.fullmatch(f"{path.parent.name}/{path.name}"):
            return None
        installed = installed_file(path)
        if installed is not None:
            if installed.parts[0] in _NOT_THE_USERS or str(path).startswith(self._skipped[:2]):
                return None
            return _File(installed.shown, is_users=False, package=installed.package)
        if str(path).startswith(self._skipped):
            return None
        if path.is_relative_to(self._root):
            return _File(path.relative_to(self._root).as_posix())
        # The file is outside the root. The last two parts of its path are probably the same on another machine.
        return _File(PurePath(*path.parts[-2:]).as_posix())


def _outwards(frame: types.FrameType | None) -> Iterator[tuple[str, int, str]]:
    """Yield a frame and its callers for `Sites.site_of`."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
