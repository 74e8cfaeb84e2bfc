"""Note the running module at each allocation, by hooks around each module.

Example: while ``blocks.0.attn`` runs, the history shows the note ``gpumem 7`` at each allocation. `RunningModules.path` returns
``blocks.0.attn`` for this note.

torch.compile would compile the hooks into the program's graphs. So the hooks are removed when a program begins to compile, and
later allocations have no module.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pytest_gpumem.torch_support.private_api.allocator import note_on_allocations
from pytest_gpumem.torch_support.private_api.compiler import before_compiling, may_have_compiled
from pytest_gpumem.torch_support.static_access import displayed_path, is_a, named_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class _Module(NamedTuple):
    note: str
    path: str
    """The path within the outermost module that ran."""
    reference: weakref.ref[torch.nn.Module]
    is_inner: bool
    """True if the module ran within another module."""


class _Running(NamedTuple):
    module_id: int
    note: str
    paths: dict[int, str]
    """The path for each module in the outermost running module, by id."""


class RunningModules:
    """Notes the running module at each allocation, in each thread."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        """Begin without modules.

        Args:
            note: Lets the allocator's history show a text at each further allocation in this thread; by default, that of CUDA.
        """
        self._note_on_allocations = note or note_on_allocations
        self._numbers = itertools.count()
        self._watching = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._stacks: dict[int, list[_Running]] = {}
        """The running modules by thread, outermost first."""
        self._by_id: dict[int, _Module] = {}
        self._by_note: dict[str, _Module] = {}
        self._models: dict[tuple[str, ...], list[weakref.ref[torch.nn.Module]]] = {}
        """The outermost modules that ran, by the paths of all modules in them."""

    def watch(self) -> None:
        """Begin to note modules, unless the program has compiled something."""
        self.unwatch()
        self._forget()
        if may_have_compiled():
            return
        with ExitStack() as stack:
            stack.enter_context(before_compiling(self._before_compiling))
            stack.callback(register_module_forward_pre_hook(self._begins).remove)
            stack.callback(register_module_forward_hook(self._ends, always_call=True).remove)
            self._watching = stack.pop_all()

    def unwatch(self) -> None:
        """Stop noting modules."""
        self._watching.close()

    def path(self, note: str, paths: Mapping[int, str]) -> str:
        """Return a noted module's path; empty if the note is not from this recording.

        Args:
            note: The note in the history.
            paths: The live modules' paths by id.
        """
        noted = self._by_note.get(note)
        if noted is None:
            return ""
        module = noted.reference()
        return noted.path if module is None else paths.get(id(module), noted.path)

    def paths_in_dead_models(self) -> list[str]:
        """Return the paths of all modules in models that ran and are gone."""
        models = list(self._models.items())
        return [path for paths, modules in models if any(module() is None for module in modules) for path in paths]

    def _before_compiling(self) -> None:
        self.unwatch()
        self._note_on_allocations("")
        caller = threading.get_ident()
        if any(stack for thread, stack in list(self._stacks.items()) if thread != caller):
            # The other threads keep their last note, which would be wrong when their modules end.
            self._forget()

    def _begins(self, module: torch.nn.Module, _inputs: object) -> None:
        with suppress(Exception):
            stack = self._stacks.setdefault(threading.get_ident(), [])
            paths = stack[-1].paths if stack else {}
            is_inner = id(module) in paths
            if not is_inner:
                paths = self._paths_in(module)
            note = self._note(module, paths[id(module)], is_inner=is_inner)
            stack.append(_Running(id(module), note, paths))
            self._note_on_allocations(note)

    def _ends(self, module: torch.nn.Module, _inputs: object, _result: object) -> None:
        with suppress(Exception):
            stack = self._stacks.get(threading.get_ident(), [])
            if any(running.module_id == id(module) for running in stack):
                while stack.pop().module_id != id(module):
                    pass
            self._note_on_allocations(stack[-1].note if stack else "")

    def _paths_in(self, module: torch.nn.Module) -> dict[int, str]:
        """Return the paths of an outermost running module and of the modules in it, by id.

        In backward, a checkpointed module runs again without the model around it. It keeps its path in the model.
        """
        noted = self._by_id.get(id(module))
        if noted is not None and noted.is_inner and noted.reference() is module:
            return {id(inner): f"{noted.path}.{path}" if path else noted.path for path, inner in named_modules(module)}
        paths = module_paths([module])
        modules = self._models.setdefault(tuple(paths.values()), [])
        if not any(reference() is module for reference in modules):
            modules.append(weakref.ref(module))
        return paths

    def _note(self, module: torch.nn.Module, path: str, *, is_inner: bool) -> str:
        noted = self._by_id.get(id(module))
        if noted is None or noted.reference() is not module or noted.path != path:
            # A weak reference calls neither the module's `__hash__` nor its `__eq__`.
            noted = _Module(f"gpumem {next(self._numbers)}", path, weakref.ref(module), is_inner)
            self._by_id[id(module)] = self._by_note[noted.note] = noted
        return noted.note


def module_paths(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Return each module's path by id, as explanations show it. If two classes' models share a path, both paths begin with the
    class.

    Example: ``fc``, or ``Generator.fc`` and ``Discriminator.fc``.

    Args:
        models: Outermost modules. `DistributedDataParallel` and `DataParallel` do not change the paths within them.
    """
    triples: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    paths: dict[int, str] = {}
    for model in models:
        inner = dict(named_modules(model))
        if is_a(model, torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel) and "module" in inner:
            paths[id(model)] = type(model).__name__
            model = inner["module"]  # noqa: PLW2901
        triples += [(model, path, module) for path, module in named_modules(model)]
    classes: defaultdict[str, set[int]] = defaultdict(set)  # ids, because a metaclass may compute a class's hash
    for model, path, _ in triples:
        classes[displayed_path(model, "", path)].add(id(type(model)))
    for model, path, module in triples:
        is_shared = len(classes[displayed_path(model, "", path)]) > 1
        prefix = f"{type(model).__name__}." if is_shared else ""
        paths.setdefault(id(module), displayed_path(model, prefix, path))
    return paths
