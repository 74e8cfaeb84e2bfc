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


@dataclass(frozen=True)
class SourceFile:
    """A file of the project, by its path from the root directory, with ``/``."""

    path: str
    tree: ast.Module

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """The functions of the module, by name."""
        return {one.name: one for one in _statements(self.tree.body) if isinstance(one, Function)}

    @cached_property
    def classes(self) -> Mapping[str, ast.ClassDef]:
        """The classes of the module, by name."""
        return {one.name: one for one in _statements(self.tree.body) if isinstance(one, ast.ClassDef)}

    @cached_property
    def owners(self) -> Mapping[Function, ast.ClassDef]:
        """The class that each method is in."""
        classes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))
        return {one: definition for definition in classes for one in definition.body if isinstance(one, Function)}

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """The full name of each imported one, those of functions included: ``{"nn": "torch.nn"}``."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    found[alias.asname or alias.name] = ".".join(filter(None, (node.module, alias.name)))
        return found

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
    """The files of a project that can be parsed."""

    files: Mapping[str, SourceFile] = field(default_factory=dict)

    def conftests_of(self, path: str) -> list[SourceFile]:
        """Return the conftest.py files whose fixtures a test file has, the nearest first."""
        folders = PurePosixPath(path).parents
        found = (self.files.get((folder / "conftest.py").as_posix()) for folder in folders)
        return [one for one in found if one is not None]

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
    """Return the files that are Python, by path; what is not is left out."""
    found = {}
    for path, text in texts.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes are the project's
                found[path] = SourceFile(path, ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return Sources(found)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those behind ``if`` and ``try`` included."""
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.Try | ast.With):
            yield from _statements(one.body)
            yield from _statements(getattr(one, "orelse", []))
            for handler in getattr(one, "handlers", []):
                yield from _statements(handler.body)
