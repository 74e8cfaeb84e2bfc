"""Find the C compiler, run it, and fill a folder in the cache with the libraries that it makes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import EmulationError
from pytest_gpumem.base.variables import CACHE, COMPILER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

C_OPTIONS = ("-std=gnu11", "-O2", "-w")
SHARED_OPTIONS = (*C_OPTIONS, "-fPIC", "-shared", "-fvisibility=default", "-fexceptions")


def find_compiler(need: str) -> tuple[str, ...]:
    """Return the C compiler's command: the words in the variable ``CC``, or an installed compiler if ``CC`` is not set.

    Example: for ``CC="ccache gcc -m64"``, the result is ``("ccache", "gcc", "-m64")``.

    Args:
        need: A clause for the message if there is no compiler: ``an emulated GPU needs a compiler``.

    Raises:
        EmulationError: A quote in ``CC`` is not closed, or no compiler is installed.
    """
    variable = os.environ.get(COMPILER, "")
    try:
        words = shlex.split(variable)
    except ValueError as error:
        raise EmulationError(
            f"the variable CC is {variable!r}, which is not quoted as for a shell ({error}); set CC like CC='ccache gcc'"
        ) from None
    if words:
        return tuple(words)
    installed = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if installed is None:
        raise EmulationError(
            f"no C compiler was found, and {need}: install one (Debian and Ubuntu: apt-get install gcc libc6-dev) or set CC"
        )
    return (installed,)


def run_compiler(compiler: Sequence[str], command: Sequence[str], product: str) -> None:
    """Run the compiler's command.

    Args:
        compiler: The compiler without arguments.
        command: The compiler with all arguments.
        product: The name of the result in messages: ``the emulated GPU's libcuda.so.1``.

    Raises:
        EmulationError: The compiler cannot be run, or fails.
    """
    name = shlex.join(compiler)
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", check=False)
    except OSError as error:
        missing = "" if shutil.which(compiler[0]) else f"; install {compiler[0]}, or set CC to another compiler"
        raise EmulationError(f"the C compiler {name} cannot be run: {error.strerror}{missing}") from None
    if process.returncode != 0:
        raise EmulationError(f"the C compiler {name} failed on {product}:\n{process.stderr.strip()[-2000:]}")


def fill(folder: Path, products: str, make: Callable[[Path], None]) -> None:
    """Let ``make`` write files into a temporary folder, and rename it to ``folder``.

    So another session, which may compile at the same time, never sees an incomplete folder.

    Args:
        folder: The new folder in the cache.
        products: The name of the files in messages: ``the emulated GPU's libraries``.
        make: Writes the files.

    Raises:
        EmulationError: The folder cannot be written.
    """
    try:
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    except OSError as error:
        raise EmulationError(
            f"{products} cannot be cached in {folder.parent}: {error.strerror}. Set {CACHE} to a folder that can be written to"
        ) from None
    try:
        make(draft)
        try:
            draft.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # otherwise another session has compiled the same files in the meantime
                raise EmulationError(f"{products} cannot be moved to {folder}: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
