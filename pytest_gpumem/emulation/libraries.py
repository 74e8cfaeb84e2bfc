"""Libraries above NVIDIA's driver and their stand-ins: the sources of each, and the status of its stubs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOTHING = re.compile(r"(?!)")
# Names are read from the files of packages, and become C code, a linker's script and paths.
_SONAME = re.compile(r"([A-Za-z0-9_-]+)\.so(\.[0-9]+)*")
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VERSION_NODE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


@dataclass(frozen=True)
class Library:
    """One of NVIDIA's libraries, by its soname without version, and how it is stood in for."""

    stem: str
    symbols: re.Pattern[str]
    """The names that belong to it, for symbols without a library in torch's tables."""
    error: int
    """Its status "not supported", which stubs return."""
    sources: tuple[str, ...] = ()
    """Files in ``native``."""
    launched: re.Pattern[str] = _NOTHING
    """Functions that only launch kernels: they succeed, and are counted."""
    by_name: tuple[str, ...] = ()
    """Functions that are asked for while torch runs, all at once, by which torch 2.6 asserts that each is there."""
    quiet: bool = False
    """True if its stubs are called normally, and print nothing."""
    why: str = ""
    """Reason for having no stubs and what to do, for the error of a call from torch; empty where torch goes on without them."""


_INSTEAD = (
    "measure this on a GPU or on the CPU (--gpumem-device=cpu), or skip it where the variable GPUMEM_EMULATED is set"
)
_NEEDS_A_GPU = f"how much memory {{}} take is known to the real library alone, which needs a GPU for it; {_INSTEAD}"
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
"""Opened by name while torch runs, and not in its tables."""


def library_of(soname: str) -> Library | None:
    """Return the library with this soname (``"libcudart.so.13"``); ``None`` if it is not NVIDIA's, or no soname."""
    match = _SONAME.fullmatch(soname)
    return None if match is None else BY_STEM.get(match[1])


def version_script(nodes: Iterable[str]) -> str:
    """Return the linker's script that exports everything, under each of the version nodes. Other texts are left out."""
    names = sorted(filter(_VERSION_NODE.fullmatch, nodes))
    return "".join(f"{name} {{ global: *; }};\n" for name in names) or "{ global: *; };\n"


def stubs(library: Library, names: set[str]) -> str:
    """Return C code of a weak stub for each of ``names``: a function in the sources takes its place.

    A name that is no identifier of C is left out: code in C cannot call it.

    A stub that does more than launch a kernel says its name and fails: success would leave its outputs unset.
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
            # Destructors must not throw.
            if library.why and "Destroy" not in name:
                says = f'gpumem_refuses("{library.stem}", "{name}", WHY, __builtin_return_address(0))'
            lines.append(f"WEAK int {name}(void) {{ {says}; return {library.error}; }}")
    return "\n".join(lines) + "\n"
