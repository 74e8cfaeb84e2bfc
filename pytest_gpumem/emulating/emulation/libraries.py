"""Describe how each of NVIDIA's libraries is replaced on an emulated GPU.

A stand-in has the same functions as NVIDIA's library. Some are written in C, and the others are stubs, which only return an
error code. Example: all functions of ``libcufft`` are stubs. If torch calls the stub for ``cufftPlan1d``, torch raises an error
with this function's name and the reason in `Library.why`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOTHING = re.compile(r"(?!)")
# Names from installed packages are written into C code, linker scripts and paths, so they must be valid there.
_SONAME = re.compile(r"([A-Za-z0-9_-]+)\.so(\.[0-9]+)*")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERSION_NODE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


@dataclass(frozen=True)
class Library:
    """A library from NVIDIA, and how its stand-in is made."""

    stem: str
    """The library's soname without its version, for example ``"libcudart"``."""
    symbols: re.Pattern[str]
    """Matches the names of the library's functions. Used for functions whose library torch's ELF files do not name."""
    error: int
    """The library's error code for "not supported", which stubs return."""
    sources: tuple[str, ...] = ()
    """The C files of the stand-in, in the folder ``native``."""
    launched: re.Pattern[str] = _NOTHING
    """Matches functions whose only effect is to launch kernels. Their stubs succeed and count the call."""
    by_name: tuple[str, ...] = ()
    """Functions that torch looks up by name while it runs. torch 2.6 requires all of them to exist."""
    quiet: bool = False
    """True if stubs print no message, because ordinary programs call them."""
    why: str = ""
    """The reason and the remedy in torch's error if torch calls a stub. If empty, torch continues without the function."""


_INSTEAD = (
    "measure this on a GPU or on the CPU (--gpumem-device=cpu), or skip the test if the variable GPUMEM_EMULATED is set"
)
_NEEDS_A_GPU = f"only NVIDIA's library knows how much memory {{}} need, and this library needs a GPU; {_INSTEAD}"
LIBRARIES = (
    Library(
        "libcudart",
        re.compile(r"(__)?cuda"),
        801,
        ("device.c", "card.c", "addresses.c", "memory.c", "streams.c", "kernels.c", "errors.c", "modes.c"),
    ),
    Library("libcublasLt", re.compile("cublasLt"), 15, ("cublaslt.c",)),
    Library(
        "libcublas",
        re.compile("cublas(?!Lt)"),
        15,
        ("cublas.c",),
        re.compile(r"cublas([SDCZ](gemm|gemv|dot|trsm)|S?[gG]emm|DotEx)"),
        why=_INSTEAD,
    ),
    Library(
        "libcudnn",
        re.compile("cudnn"),
        3000,
        ("cudnn.c", "cudnn_real.c", "rnn.c"),
        why=f"set torch.backends.cudnn.enabled = False, so torch uses its own kernels; or {_INSTEAD}",
    ),
    Library("libnccl", re.compile("nccl"), 3, ("nccl.c",)),
    Library(
        "libcuda",
        re.compile("cu[A-EG-Z]|cuF(?!ile)"),
        801,
        ("driver.c",),
        by_name=(
            "cuMemExportToShareableHandle",
            "cuMemImportFromShareableHandle",
            "cuMulticastAddDevice",
            "cuMulticastBindMem",
            "cuMulticastCreate",
        ),
    ),
    Library("libnvidia-ml", re.compile("nvml"), 3, ("nvml.c",)),
    Library("libcupti", re.compile("cupti"), 15, ("cupti.c",), quiet=True),
    Library("libcufft", re.compile("cufft"), 16, why=_NEEDS_A_GPU.format("FFTs")),
    Library("libcurand", re.compile("curand"), 204),
    Library(
        "libcusparseLt", re.compile("cusparseLt"), 10, why=_NEEDS_A_GPU.format("products of semi-structured matrices")
    ),
    Library("libcusparse", re.compile("cusparse(?!Lt)"), 10, why=_NEEDS_A_GPU.format("products of sparse matrices")),
    Library(
        "libcusolver", re.compile("cusolver"), 9, why=_NEEDS_A_GPU.format("decompositions of matrices (torch.linalg)")
    ),
    Library("libcufile", re.compile("cuFile"), 5011),
    Library("libnvrtc", re.compile("nvrtc"), 11, ("nvrtc.c",)),
    Library("libnvJitLink", re.compile("nvJitLink"), 1),
    Library("libnvToolsExt", re.compile("nvtx"), 1, quiet=True),
    Library("libnvshmem_host", re.compile("nvshmem"), 1),
)
BY_STEM = {library.stem: library for library in LIBRARIES}
DRIVER = "libcuda.so.1"
ALWAYS = (DRIVER, "libnvidia-ml.so.1")
"""Libraries that torch opens by name while it runs. The ELF files of torch do not list them."""


def library_of(soname: str) -> Library | None:
    """Return NVIDIA's library for a soname such as ``"libcudart.so.13"``; ``None`` for other sonames."""
    match = _SONAME.fullmatch(soname)
    return None if match is None else BY_STEM.get(match[1])


def version_script(nodes: Iterable[str]) -> str:
    """Return a linker script with all version nodes, which exports all functions. Invalid node names are skipped."""
    names = sorted(filter(_VERSION_NODE.fullmatch, nodes))
    return "".join(f"{name} {{ global: *; }};\n" for name in names) or "{ global: *; };\n"


def stubs(library: Library, names: set[str]) -> str:
    """Return C code with a stub for each function in ``names``.

    The stubs are weak symbols, so a function in `Library.sources` replaces the stub with the same name. A stub succeeds if its
    function only launches a kernel. Any other stub reports its name and fails, because it does not set the function's outputs.

    Args:
        library: The library.
        names: The functions needed by torch or other packages. A name is skipped if it is not a C identifier.
    """
    lines = [
        "extern void gpumem_lacks(const char *, const char *);",
        "extern void gpumem_refuses(const char *, const char *, const char *, const void *);",
        "extern void gpumem_launched(const char *);",
        "#define WEAK __attribute__((weak))",
        f"static const char WHY[] = {json.dumps(library.why)};",
    ]
    for name in sorted(filter(_FUNCTION.fullmatch, names)):
        if library.launched.match(name):
            lines.append(f'WEAK int {name}(void) {{ gpumem_launched("{name}"); return 0; }}')
        elif re.search(r"(Error|Status)(String|Name)$", name):
            lines.append(f'WEAK const char *{name}(void) {{ return "the emulated GPU lacks this"; }}')
        elif library.quiet:
            lines.append(f"WEAK int {name}(void) {{ return {library.error}; }}")
        else:
            says = f'gpumem_lacks("{library.stem}", "{name}")'
            # `gpumem_refuses` throws a C++ exception. C++ destructors call functions such as cufftDestroy, and must not throw.
            if library.why and "Destroy" not in name:
                says = f'gpumem_refuses("{library.stem}", "{name}", WHY, __builtin_return_address(0))'
            lines.append(f"WEAK int {name}(void) {{ {says}; return {library.error}; }}")
    return "\n".join(lines) + "\n"
