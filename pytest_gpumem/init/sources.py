"""Python source as trees: what each file defines and imports. Nothing is run."""

from __future__ import annotations

import ast
import functools
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_IMPORTS = 8
"""Modules that a name is followed through: those that import it from each other have no end."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the project, by its path from the root directory, with ``/``."""

    path: str
    tree: ast.Module

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """The functions of the module, by name."""
        return {one.name: one for one in statements(self.tree.body) if isinstance(one, Function)}

    @cached_property
    def classes(self) -> Mapping[str, ast.ClassDef]:
        """The classes of the module, by name."""
        return {one.name: one for one in statements(self.tree.body) if isinstance(one, ast.ClassDef)}

    @cached_property
    def owners(self) -> Mapping[Function, ast.ClassDef]:
        """The class that each method is in."""
        classes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))
        return {one: definition for definition in classes for one in definition.body if isinstance(one, Function)}

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """The full name of each imported one, those of functions included: ``{"nn": "torch.nn"}``.

        That of a relative import begins with the folder that it is from: ``src.net.model.Net``.
        """
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = ".".join(filter(None, (self._module_of(node), alias.name)))
        return found

    @cached_property
    def modules_with_all_names(self) -> Sequence[str]:
        """The modules of ``from module import *``."""
        return [
            self._module_of(node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        ]

    def _module_of(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        folders = PurePosixPath(self.path).parts[: -node.level]
        return ".".join(filter(None, (*folders, node.module)))

    def dotted(self, node: ast.expr) -> str | None:
        """Return the full name that an expression is, with imports resolved: ``torch.nn.Linear`` of ``nn.Linear``."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])

    def __hash__(self) -> int:
        return hash(self.path)


@dataclass(frozen=True)
class Sources:
    """The files of a project that can be parsed, and why others cannot, by path."""

    files: Mapping[str, SourceFile] = field(default_factory=dict)
    not_parsed: Mapping[str, str] = field(default_factory=dict)

    def conftests_of(self, path: str) -> list[SourceFile]:
        """Return the conftest.py files whose fixtures a test file has, the nearest first."""
        folders = PurePosixPath(path).parents
        found = (self.files.get((folder / "conftest.py").as_posix()) for folder in folders)
        return [one for one in found if one is not None]

    def definition(
        self, dotted: str, file: SourceFile, steps: int = _MOST_IMPORTS
    ) -> tuple[Function | ast.ClassDef, SourceFile] | None:
        """Return the function or class of a full name as it is in ``file``, and the file that it is in.

        Names that a module imports from another one are followed, such as those that the ``__init__`` of a package gives on.
        """
        own = file.functions.get(dotted) or file.classes.get(dotted)
        if own is not None or not steps:
            return None if own is None else (own, file)
        module, _, name = dotted.rpartition(".")
        for one in [module] if module else file.modules_with_all_names:
            where = self.module(one, file.path)
            if where is not None:
                is_own = name in where.functions or name in where.classes
                found = self.definition(name if is_own else where.imports.get(name, name), where, steps - 1)
                if found is not None:
                    return found
        return None

    def lineage(
        self, definition: ast.ClassDef, file: SourceFile, steps: int = _MOST_IMPORTS
    ) -> list[tuple[ast.ClassDef, SourceFile]]:
        """Return a class and those of the project that it inherits from, the nearest first, each with its file."""
        found = [(definition, file)]
        for base in definition.bases if steps else ():
            inherited = self.definition(file.dotted(base) or "", file)
            if inherited is not None and isinstance(inherited[0], ast.ClassDef) and inherited[0] is not definition:
                found += self.lineage(inherited[0], inherited[1], steps - 1)
        return list(dict.fromkeys(found))

    def module(self, dotted: str, beside: str) -> SourceFile | None:
        """Return the file of a module, as it may be imported from the file at ``beside``.

        It lies beside that file, in the root directory, in ``src`` or in a folder that is on the path: where several files
        match, the one with the shortest path.
        """
        tail = dotted.replace(".", "/")
        ends = (f"{tail}.py", f"{tail}/__init__.py")
        near = [f"{PurePosixPath(beside).parent.as_posix()}/{end}".removeprefix("./") for end in ends]
        for path in (*near, *ends):
            if path in self.files:
                return self.files[path]
        last = dotted.rpartition(".")[2]
        matching = [path for path in self._by_name.get(last, ()) if path.endswith(tuple(f"/{end}" for end in ends))]
        return self.files[min(matching, key=len)] if matching else None

    @cached_property
    def _by_name(self) -> Mapping[str, Sequence[str]]:
        """The paths of the files of modules, by the last part of a module's name."""
        found: dict[str, list[str]] = {}
        for path in self.files:
            module = path.removesuffix(".py").removesuffix("/__init__")
            found.setdefault(module.rpartition("/")[2], []).append(path)
        return found


@functools.cache
def nodes_in(within: ast.AST) -> tuple[ast.AST, ...]:
    """Return a node and all below it: `ast.walk`, once."""
    return tuple(ast.walk(within))


def sources_of(texts: Mapping[str, str]) -> Sources:
    """Return the files that are Python, by path, and why others are not."""
    found, not_parsed = {}, {}
    for path, text in texts.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes are the project's
                found[path] = SourceFile(path, ast.parse(text))
        except SyntaxError as error:
            not_parsed[path] = f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            not_parsed[path] = str(error) or type(error).__name__
    return Sources(found, not_parsed)


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, those behind ``if`` and ``try`` included."""
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.Try | ast.With):
            yield from statements(one.body)
            yield from statements(getattr(one, "orelse", []))
            for handler in getattr(one, "handlers", []):
                yield from statements(handler.body)
