"""Parse Python source, and resolve defined and imported names. No code is run."""

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
"""A name, or a base class, is followed through at most this many modules.

Without a limit, the search would not end if modules import a name from each other in a circle.
"""


@dataclass(frozen=True)
class SourceFile:
    """A parsed file. ``path`` is relative to the root directory, with forward slashes."""

    path: str
    tree: ast.Module

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """The functions at module level, by name."""
        return {
            statement.name: statement for statement in statements(self.tree.body) if isinstance(statement, Function)
        }

    @cached_property
    def classes(self) -> Mapping[str, ast.ClassDef]:
        """The classes at module level, by name."""
        return {
            statement.name: statement for statement in statements(self.tree.body) if isinstance(statement, ast.ClassDef)
        }

    @cached_property
    def owners(self) -> Mapping[Function, ast.ClassDef]:
        """The class of each method."""
        classes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))
        return {
            method: definition for definition in classes for method in definition.body if isinstance(method, Function)
        }

    @cached_property
    def imports(self) -> Mapping[str, str]:
        """The full name behind each imported name, such as ``{"nn": "torch.nn"}``. This includes imports inside functions.

        A relative import is resolved from its folder: ``from .model import Net`` in ``src/net/a.py`` is ``src.net.model.Net``.
        """
        full_names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    full_names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    full_names[alias.asname or alias.name] = ".".join(filter(None, (self._module_of(node), alias.name)))
        return full_names

    @cached_property
    def modules_with_all_names(self) -> Sequence[str]:
        """The modules from which the file imports ``*``."""
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
        """Return an expression's full name after imports: ``torch.nn.Linear`` for ``nn.Linear``. Return ``None`` for a call."""
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
    """A project's parsed files by path, and the error messages for all other files by path."""

    files: Mapping[str, SourceFile] = field(default_factory=dict)
    not_parsed: Mapping[str, str] = field(default_factory=dict)

    def conftests_of(self, path: str) -> list[SourceFile]:
        """Return the conftest.py files whose fixtures a test file can use, the nearest first."""
        folders = PurePosixPath(path).parents
        conftests = (self.files.get((folder / "conftest.py").as_posix()) for folder in folders)
        return [conftest for conftest in conftests if conftest is not None]

    def definition(
        self, dotted: str, file: SourceFile, steps: int = _MOST_IMPORTS
    ) -> tuple[Function | ast.ClassDef, SourceFile] | None:
        """Return the function or class behind a full name, and its file.

        Args:
            dotted: The name as ``file`` sees it, from `SourceFile.dotted`.
            file: The file that uses the name.
            steps: The maximum number of modules to follow, for example through re-exports in a package's ``__init__``.

        Returns:
            The definition and its file, or ``None`` if the project does not define the name.
        """
        own = file.functions.get(dotted) or file.classes.get(dotted)
        if own is not None or not steps:
            return None if own is None else (own, file)
        module, _, name = dotted.rpartition(".")
        for module_name in [module] if module else file.modules_with_all_names:
            source = self.module(module_name, file.path)
            if source is not None:
                is_own = name in source.functions or name in source.classes
                definition = self.definition(name if is_own else source.imports.get(name, name), source, steps - 1)
                if definition is not None:
                    return definition
        return None

    def lineage(
        self, definition: ast.ClassDef, file: SourceFile, steps: int = _MOST_IMPORTS
    ) -> list[tuple[ast.ClassDef, SourceFile]]:
        """Return a class and its base classes in the project, each with its file, in depth-first order."""
        classes = [(definition, file)]
        for base in definition.bases if steps else ():
            inherited = self.definition(file.dotted(base) or "", file)
            if inherited is not None and isinstance(inherited[0], ast.ClassDef) and inherited[0] is not definition:
                classes += self.lineage(inherited[0], inherited[1], steps - 1)
        return list(dict.fromkeys(classes))

    def module(self, dotted: str, beside: str) -> SourceFile | None:
        """Return the file of a module for an import in the file at ``beside``. Return ``None`` for a module outside the
        project.

        The search begins in the importing file's folder and then in the root directory. After that, a file in any folder may
        match, because ``src`` or another folder may be on Python's import path. The shortest path wins.
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
        """Paths of module files, by the module name's last part."""
        paths: dict[str, list[str]] = {}
        for path in self.files:
            module = path.removesuffix(".py").removesuffix("/__init__")
            paths.setdefault(module.rpartition("/")[2], []).append(path)
        return paths


@functools.cache
def nodes_in(root: ast.AST) -> tuple[ast.AST, ...]:
    """Return a syntax node and all nodes below, like `ast.walk`. Results are cached."""
    return tuple(ast.walk(root))


def sources_of(texts: Mapping[str, str]) -> Sources:
    """Parse a project's files. ``texts`` contains the text of each file by path."""
    parsed, not_parsed = {}, {}
    for path, text in texts.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # do not warn about invalid escapes in the project
                parsed[path] = SourceFile(path, ast.parse(text))
        except SyntaxError as error:
            not_parsed[path] = f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            not_parsed[path] = str(error) or type(error).__name__
    return Sources(parsed, not_parsed)


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements in a body, including statements inside ``if``, ``try`` and ``with``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from statements(statement.body)
            yield from statements(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from statements(handler.body)
