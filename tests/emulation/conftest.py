"""A torch that is made for the test: a library that takes a few functions from CUDA's, compiled here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

TAKES = ("cudaMalloc", "cudaFree", "cudaEventQuery", "cudaUnheardOf")


@dataclass(frozen=True)
class FakeTorch:
    """A folder of site-packages with a ``torch`` that says that it is a CUDA build."""

    site: Path
    compiler: Path
    """Optimizes nothing, which takes as long again and more."""

    @property
    def package(self) -> Path:
        return self.site / "torch"

    def says(self, version: str, cuda: str | None) -> None:
        (self.package / "version.py").write_text(f"__version__ = '{version}'\ncuda: str = {cuda!r}\n", encoding="utf-8")


def compile_library(library: Path, source: str, *linked: Path | str) -> None:
    """Compile C to a library that needs those in ``linked``."""
    compiler = shutil.which("cc")
    assert compiler is not None, "the suite needs a C compiler"
    library.parent.mkdir(parents=True, exist_ok=True)
    file = library.with_name(f"{library.name}.c")
    file.write_text(source, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, file, *linked], check=True)
    file.unlink()


def calling(*functions: str) -> str:
    """C whose ``use`` calls functions of another library."""
    declared = "".join(f"extern int {name}(void);\n" for name in functions)
    return declared + f"int use(void) {{ return {' + '.join(f'{name}()' for name in functions)}; }}\n"


def compile_runtime(library: Path, *functions: str) -> None:
    """Compile a library whose functions have its name as their version, as those of CUDA's runtime do."""
    script = library.with_name(f"{library.name}.map")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f"{library.name} {{ global: *; }};\n", encoding="utf-8")
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in functions)
    compile_library(library, source, f"-Wl,-soname,{library.name}", f"-Wl,--version-script={script}")


@pytest.fixture(scope="session")
def compiled_torch(tmp_path_factory) -> FakeTorch:
    """One that is copied for each test."""
    folder = tmp_path_factory.mktemp("torch")
    torch = FakeTorch(folder / "site", folder / "cc")
    torch.compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n', encoding="utf-8")
    torch.compiler.chmod(0o755)
    compile_runtime(folder / "libcudart.so.13", *TAKES)
    compile_library(torch.package / "lib" / "libtorch_cuda.so", calling(*TAKES), folder / "libcudart.so.13")
    (torch.package / "__init__.py").write_text("", encoding="utf-8")
    torch.says("2.13.0+cu130", "13.0")
    return torch


@pytest.fixture
def fake_torch(compiled_torch, tmp_path, monkeypatch) -> FakeTorch:
    torch = FakeTorch(
        shutil.copytree(compiled_torch.site, tmp_path / "site", ignore=shutil.ignore_patterns("__pycache__")),
        compiled_torch.compiler,
    )
    # What is imported already would be found first.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(torch.site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(torch.compiler))
    return torch
