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

    @property
    def package(self) -> Path:
        return self.site / "torch"

    def says(self, version: str, cuda: str | None) -> None:
        (self.package / "version.py").write_text(f"__version__ = '{version}'\ncuda: str = {cuda!r}\n", encoding="utf-8")


@pytest.fixture
def fake_torch(tmp_path, monkeypatch) -> FakeTorch:
    compiler = shutil.which("cc")
    assert compiler is not None, "the suite needs a C compiler"
    torch = FakeTorch(tmp_path / "site")
    libraries = torch.package / "lib"
    libraries.mkdir(parents=True)
    (torch.package / "__init__.py").write_text("", encoding="utf-8")
    torch.says("2.13.0+cu130", "13.0")
    runtime, user = tmp_path / "runtime.c", tmp_path / "user.c"
    runtime.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in TAKES), encoding="utf-8")
    user.write_text(
        "".join(f"extern int {name}(void);\n" for name in TAKES)
        + f"int use(void) {{ return {' + '.join(f'{name}()' for name in TAKES)}; }}\n",
        encoding="utf-8",
    )
    real, script = tmp_path / "libcudart.so.13", tmp_path / "script"
    script.write_text("libcudart.so.13 { global: *; };\n", encoding="utf-8")
    shared = [compiler, "-shared", "-fPIC"]
    named = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}"]
    subprocess.run([*shared, *named, "-o", str(real), str(runtime)], check=True)
    subprocess.run([*shared, "-o", str(libraries / "libtorch_cuda.so"), str(user), str(real)], check=True)
    # What is imported already would be found first.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(torch.site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return torch
