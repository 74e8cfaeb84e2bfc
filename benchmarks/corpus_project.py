"""A project as a user has it: the model's source and a training script in a folder of their own, before and after an edit."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

CULPRIT = "# culprit"
"""Ends the lines that an edit has to answer for. It is of no other use: nothing that explains a step reads sources."""

WRITTEN_FOR = "5.23"
"""The version of transformers whose sources the edits fit."""

_EXAMPLE = Path(__file__).resolve().parent.parent / "example_project"
_FAMILIES = ("gpt2", "llama", "bert", "vit")
_PARENT = re.compile(r"^from \.\.\.(\S*) import", re.MULTILINE)
_SIBLING = re.compile(r"^from \.(\w+) import", re.MULTILINE)
_numbers = itertools.count()


class EditError(ValueError):
    """An edit that does not fit the source that it is for."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one place in a file of the project, as a person makes it: ``old`` is there once and becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with source files. ``library`` says whether the model's file is an installed library's, and not the user's."""

    root: Path
    library: bool = False

    def write(self, edits: Sequence[Edit]) -> None:
        """Write its files, edited. Raises `EditError`."""
        sources = {name: source_of(name) for name in FILES}
        for edit in edits:
            found = sources[edit.file].count(edit.old)
            if found != 1:
                raise EditError(f"{edit.file} has {found} places like {edit.old!r}, expected 1")
            sources[edit.file] = sources[edit.file].replace(edit.old, edit.new)
        for name, text in sources.items():
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def path(self, name: str) -> Path:
        if self.library and name in _FAMILIES:
            return self.root / "site-packages" / "transformers" / "models" / name / f"modeling_{name}.py"
        return self.root / f"{name}.py"

    def shown(self, name: str) -> str:
        """How a composition names the file."""
        path = self.path(name).relative_to(self.root).as_posix()
        return path.removeprefix("site-packages/")

    @contextmanager
    def imported(self, name: str) -> Iterator[Any]:
        """Within, one of its files is a module."""
        title = f"corpus_{next(_numbers)}_{name}"
        spec = importlib.util.spec_from_file_location(title, self.path(name))
        assert spec is not None, "a path that ends in .py"
        assert spec.loader is not None, "a path that ends in .py"
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[title] = module
        try:
            spec.loader.exec_module(module)
            yield module
        finally:
            del sys.modules[title]

    def culprits(self) -> frozenset[str]:
        """The lines that are marked, as a composition names them: ``gpt.py:31``."""
        return frozenset(
            f"{self.shown(name)}:{number}"
            for name in FILES
            for number, line in enumerate(self.path(name).read_text(encoding="utf-8").splitlines(), 1)
            if line.rstrip().endswith(CULPRIT)
        )


FILES = (*_FAMILIES, "gpt", "convnet", "train")
"""The models of transformers, those of the example project, and the training script."""


def source_of(name: str) -> str:
    """A file before any edit. That of a model of transformers is a copy whose imports work from anywhere."""
    if name == "train":
        return Path(__file__).with_name("corpus_train.py").read_text(encoding="utf-8")
    if name in _FAMILIES:
        spec = importlib.util.find_spec("transformers")
        if spec is None or spec.origin is None:
            return ""
        text = (Path(spec.origin).parent / "models" / name / f"modeling_{name}.py").read_text(encoding="utf-8")
        text = _PARENT.sub(lambda found: f"from transformers{'.' * bool(found[1])}{found[1]} import", text)
        return _SIBLING.sub(rf"from transformers.models.{name}.\1 import", text)
    return (_EXAMPLE / "tiny_models" / f"{name}.py").read_text(encoding="utf-8")
