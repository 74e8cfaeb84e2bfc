"""Compile stand-ins for the NVIDIA libraries needed by the installed torch, and cache them."""

from __future__ import annotations

import hashlib
import shutil
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.errors import CacheError, EmulationError, NotElf
from pytest_gpumem.base.user_cache import cache_root, check_private_folder, make_private_folder
from pytest_gpumem.emulating.emulation.compiler import C_OPTIONS, SHARED_OPTIONS, fill, find_compiler, run_compiler
from pytest_gpumem.emulating.emulation.elf import read_needs
from pytest_gpumem.emulating.emulation.libraries import ALWAYS, DRIVER, LIBRARIES, library_of, stubs, version_script
from pytest_gpumem.emulating.emulation.neighbours import Needs, needed_beside
from pytest_gpumem.emulating.emulation.torch_build import needs_of_triton

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pytest_gpumem.emulating.emulation.libraries import Library
    from pytest_gpumem.emulating.emulation.torch_build import TorchBuild

FIRST = "libcudart"
"""The stand-in to load first. It contains the emulated GPU, and the other stand-ins link to it."""
LINKED = "libcuda.so"
"""A second file name for the driver's stand-in, under which older releases of Triton link to it."""
PLANNER = "cudnn_planner"
"""The name of the program in which the real cuDNN plans convolutions."""


class _LibraryFunctions(NamedTuple):
    """The functions that a library's stand-in must have, and their version nodes."""

    library: Library
    names: set[str]
    versions: set[str]


def stand_ins(torch: TorchBuild) -> tuple[Path, ...]:
    """Return the paths of the stand-ins, in the order in which they must be loaded.

    If the stand-ins are not in the cache, they are compiled, which takes some seconds.

    Raises:
        EmulationError: The stand-ins cannot be compiled or cached.
    """
    try:
        cache = cache_root() / "emulation"
        make_private_folder(cache)
        beside = needed_beside(torch.libraries.parents[1], cache)
        folder = cache / f"torch-{torch.version}-{_key(torch, beside)}"
        if not folder.is_dir():
            compiler = find_compiler("an emulated GPU needs a compiler once for each release of torch")
            fill(folder, "the emulated GPU's libraries", lambda draft: _compile_all(compiler, torch, beside, draft))
        check_private_folder(folder)
    except CacheError as error:
        raise EmulationError(f"the emulated GPU's libraries cannot be cached: {error}") from None
    libraries = (path for path in folder.glob("*.so*") if not path.is_symlink())
    return tuple(sorted(libraries, key=lambda path: (not path.name.startswith(FIRST), path.name)))


def _sources() -> dict[str, str]:
    native = files(__package__) / "native"
    return {
        file.name: file.read_text(encoding="utf-8") for file in native.iterdir() if file.name.endswith((".c", ".h"))
    }


def _key(torch: TorchBuild, beside: Needs) -> str:
    """Return a hash with 16 digits, which changes if the stand-ins must be compiled again.

    It depends on torch's libraries (their sizes and modification times), on the functions needed by other packages, and on the
    stand-ins' C files.
    """
    digest = hashlib.sha256()
    for path in sorted(torch.libraries.glob("*.so*")):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for name, text in sorted(_sources().items()):
        digest.update(f"{name}\n{text}".encode())
    digest.update(repr((torch, beside, LIBRARIES, LINKED, sorted(needs_of_triton()))).encode())
    return digest.hexdigest()[:16]


def _compile_all(compiler: Sequence[str], torch: TorchBuild, beside: Needs, draft: Path) -> None:
    needed = _needed(torch)
    for soname, functions in needed.items():  # ignore libraries of other CUDA releases, which torch does not need
        also = [*beside.get(soname, ()), *beside.get(functions.library.stem, ())]
        functions.names.update(name for name, _ in also)
        functions.versions.update(version for _, version in also if version is not None)
    sources = draft / "source"
    sources.mkdir()
    for name, text in _sources().items():
        (sources / name).write_text(text, encoding="utf-8")
    first = next((soname for soname in needed if soname.startswith(FIRST)), None)
    if first is None:
        raise EmulationError(f"torch {torch.version} does not need {FIRST}: this build of torch is not known")
    for soname in sorted(needed, key=lambda soname: soname != first):
        link = () if soname == first else (str(draft / first),)
        _compile(compiler, torch, soname, needed[soname], sources, (*link, "-ldl", "-lpthread"))
    _compile_planner(compiler, sources)
    shutil.rmtree(sources)
    (draft / LINKED).symlink_to(DRIVER)


def _compile(
    compiler: Sequence[str],
    torch: TorchBuild,
    soname: str,
    needed: _LibraryFunctions,
    sources: Path,
    link: Iterable[str],
) -> None:
    """Compile a stand-in for a library.

    The stand-in defines every symbol version that torch asks for (``libcudart.so.13``). The dynamic loader would warn about a
    missing version.
    """
    library = needed.library
    rest = sources / f"{library.stem}_rest.c"
    rest.write_text(stubs(library, needed.names), encoding="utf-8")
    script = sources / f"{library.stem}.map"
    script.write_text(version_script(needed.versions), encoding="utf-8")
    (major, minor), (cudnn_major, cudnn_minor, cudnn_patch) = torch.cuda, torch.cudnn
    definitions = {
        "CUDA_MAJOR": major,
        "CUDA_VERSION": major * 1000 + minor * 10,
        "CUDNN_VERSION": cudnn_major * 10000 + cudnn_minor * 100 + cudnn_patch,
    }
    command = [
        *compiler,
        *SHARED_OPTIONS,
        f"-I{sources}",
        *(f"-D{name}={value}" for name, value in definitions.items()),
    ]
    command += [f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}", "-o", str(sources.parent / soname)]
    command += [*(str(sources / name) for name in library.sources), str(rest), *link]
    run_compiler(compiler, command, f"the emulated GPU's {soname}")


def _compile_planner(compiler: Sequence[str], sources: Path) -> None:
    """Compile the program in which the real cuDNN plans convolutions, into the stand-ins' folder."""
    program = sources.parent / PLANNER
    command = [*compiler, *C_OPTIONS, f"-I{sources}", "-o", str(program), str(sources / f"{PLANNER}.c"), "-ldl"]
    run_compiler(compiler, command, f"the emulated GPU's {PLANNER}")


def _needed(torch: TorchBuild) -> dict[str, _LibraryFunctions]:
    """Return the functions needed by torch and Triton from each of NVIDIA's libraries, by the library's soname."""
    needed: dict[str, _LibraryFunctions] = {}
    unversioned: set[str] = set()

    def needed_of(soname: str) -> _LibraryFunctions | None:
        library = library_of(soname)
        return (
            None
            if library is None
            else needed.setdefault(soname, _LibraryFunctions(library, {*library.by_name}, set()))
        )

    for soname in ALWAYS:
        needed_of(soname)
    for path in sorted(torch.libraries.glob("*.so*")):
        try:
            needs = read_needs(path)
        except NotElf as error:
            raise EmulationError(f"torch {torch.version} cannot be read: {error}") from None
        for soname in needs.libraries:
            needed_of(soname)
        for symbol in needs.symbols:
            if symbol.library is None:
                unversioned.add(symbol.name)
            elif (library_needs := needed_of(symbol.library)) is not None:
                library_needs.names.add(symbol.name)
                library_needs.versions.update(() if symbol.version is None else (symbol.version,))
    needed[DRIVER].names.update(needs_of_triton())
    for library_needs in needed.values():
        library_needs.names.update(name for name in unversioned if library_needs.library.symbols.match(name))
    return needed
