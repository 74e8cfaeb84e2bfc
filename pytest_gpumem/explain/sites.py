"""Source locations of calls, of tensors as they are made, and of operators, in backward too."""

from __future__ import annotations

import sys
import sysconfig
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.explain.tracker import Tracker, function_mode
from pytest_gpumem.torch_support.private_api import next_node_number, running_node_number
from pytest_gpumem.torch_support.reachability import storage_of, tensors_in
from pytest_gpumem.values.layers import folded
from pytest_gpumem.values.operator_counts import NOWHERE, Place

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch


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


@contextmanager
def creation_sites(sites: Sites, found: dict[int, Site]) -> Iterator[None]:
    """Enter the tensors that torch functions make within the context in ``found``: the line of the call, by address."""
    import torch

    def addresses(value: object) -> set[int]:
        tensors = (one for one in tensors_in(value) if type(one) in (torch.Tensor, torch.nn.Parameter))
        return {storage.data_ptr() for one in tensors if (storage := storage_of(one)) is not None}

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        # Functions that work in place return an argument.
        made = addresses(result) if getattr(func, "__name__", "") != "__get__" else ()
        for address in made and made - addresses((args, kwargs)):
            found[address] = sites.here(2)
        return result

    with function_mode(call):
        yield


class Places:
    """Finder of the places of operators during one run of a step."""

    def __init__(self, sites: Sites, device: torch.device) -> None:
        self._sites = sites
        self._tracker = Tracker(device, sites, "modules", snapshots=False)
        self._first_number = next_node_number()
        self._made: dict[int, tuple[int, Place]] = {}
        """Thread and place of each node's creation, by autograd's number, which each thread counts."""
        self._at_line: dict[Site, Place] = {}
        """Place of the first operator of forward at each line."""
        self.modules: set[str] = set()
        """Paths of the modules in which operators ran."""
        self._in_module: dict[tuple[str, str], Place] = {}
        """Place of the first one at each module's line of a library."""

    def watching(self) -> AbstractContextManager[None]:
        """Follow the modules' calls within the context."""
        return self._tracker.watching()

    def here(self) -> Place:
        """Return the place of the operator that is about to run. To be called for each operator: views make nodes, too."""
        module, site = self._tracker.module, self._sites.here(2)
        self.modules.add(module)
        number = running_node_number()
        if number is None:
            place = Place(module, *site)
            # Of any layer: what is recomputed there does not tell of which it is.
            self._at_line.setdefault(site, replace(place, module=folded(module)))
            self._in_module.setdefault((module, site.library), place)
        elif site.user or site.library:
            # What a node runs in Python: a part that is computed again, or a function's own backward.
            place = Place(module, *site)
            if not module:
                place = self._at_line.get(site, place)
            elif not site.user:
                place = self._in_module.get((module, site.library), place)
        else:
            return self._made.get(number, (0, NOWHERE))[1]
        self._remember(place)
        return place

    def _remember(self, place: Place) -> None:
        # Autograd has made the operator's node, if it makes one, before the operator runs.
        number, thread = next_node_number() - 1, threading.get_ident()
        if threading.current_thread() is threading.main_thread() and number < self._first_number:
            return
        made_in, _ = self._made.setdefault(number, (thread, place))
        if made_in != thread:
            self._made[number] = made_in, NOWHERE
