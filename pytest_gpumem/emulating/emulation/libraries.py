"""NVIDIA's libraries above the driver, with the sources of their stand-ins and the status codes of their stubs.

Example: ``libcufft`` has no sources, so each of its functions is a stub. If torch calls the stub of ``cufftPlan1d``, torch
raises an error with the function's name and the reason in `Library.why`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOTHING = re.compile(r"(?!)")
# Names from package files become C code, linker scripts and paths, so they must match these patterns.
_SONAME = re.compile(r"([A-Za-z0-9_-]+)\.so(\.[0-9]+)*")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERSION_NODE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


@dataclass(frozen=True)
class Library:
    """A library by NVIDIA, and how it is emulated."""

    stem: str
    """The soname without its version, for example ``"libcudart"``."""
    symbols: re.Pattern[str]
    """Pattern for the library's functions, for symbols without a library in torch's tables."""
    error: int
    """The library's status "not supported", which stubs return."""
    sources: tuple[str, ...] = ()
    """Files in ``native``."""
    launched: re.Pattern[str] = _NOTHING
    """Functions that only launch kernels. They succeed and are counted."""
    by_name: tuple[str, ...] = ()
    """Functions looked up by name while torch runs. torch 2.6 looks up all of them and asserts their existence."""
    quiet: bool = False
    """True if programs normally call the stubs, which then print nothing."""
    why: str = ""
    """The reason and remedy in the error when torch calls a stub. Empty if torch continues without the function."""


_INSTEAD = (
    "measure this on a GPU or on the CPU (--gpumem-device=cpu), or skip it where the variable GPUMEM_EMULATED is set"
)
_NEEDS_A_GPU = f"only the real library knows how much memory {{}} take, and it needs a GPU for this; {_INSTEAD}"
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
        why=f"torch.backends.cudnn.enabled = False has torch take kernels of its own; or {_INSTEAD}",
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
"""Libraries opened by name while torch runs. torch's tables do not list them."""


def library_of(soname: str) -> Library | None:
    """Return NVIDIA's library with a soname such as ``"libcudart.so.13"``; ``None`` for any other text."""
    match = _SONAME.fullmatch(soname)
    return None if match is None else BY_STEM.get(match[1])


def version_script(nodes: Iterable[str]) -> str:
    """Return a linker script that exports all functions under each version node. Invalid node names are skipped."""
    names = sorted(filter(_VERSION_NODE.fullmatch, nodes))
    return "".join(f"{name} {{ global: *; }};\n" for name in names) or "{ global: *; };\n"


def stubs(library: Library, names: set[str]) -> str:
    """Return C code with a weak stub for each function. A function with the same name in the sources replaces the stub.

    A stub for a function that only launches a kernel succeeds. Any other stub names its function and fails, because success
    would leave the outputs unset.

    Args:
        library: The library.
        names: The functions needed by torch. Names that are no C identifiers are skipped, because C code cannot call them.
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
            # The error would be thrown as a C++ exception, and destructors must not throw.
            if library.why and "Destroy" not in name:
                says = f'gpumem_refuses("{library.stem}", "{name}", WHY, __builtin_return_address(0))'
            lines.append(f"WEAK int {name}(void) {{ {says}; return {library.error}; }}")
    return "\n".join(lines) + "\n"
