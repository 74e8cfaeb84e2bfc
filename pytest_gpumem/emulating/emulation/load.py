"""Load the stand-ins into this process before torch is imported."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import EmulationError
from pytest_gpumem.emulating.emulation.build import FIRST, stand_ins
from pytest_gpumem.emulating.emulation.cudnn import Cudnn
from pytest_gpumem.emulating.emulation.gpus import Gpu
from pytest_gpumem.emulating.emulation.libraries import DRIVER, library_of
from pytest_gpumem.emulating.emulation.torch_build import compiler_variables, installed_torch

CONTEXT_BYTES = 520 * 2**20
"""The bytes of a CUDA context, which are not in the allocator. nvidia-smi shows about as many for torch on an H100."""
_NOT_LOADED = "cannot open shared object file"
"""A part of the loader's error message if a library is missing."""
_SIGNS_OF_A_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


_NUMBERS = tuple(field.name for field in fields(Gpu))[4:-2]
"""The fields of `Gpu` from ``multiprocessors`` to ``memory_khz``, in the same order as in ``native/emulated.h``."""
_TELL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)


class _Configuration(ctypes.Structure):
    """The C structure ``Gpu`` from ``native/emulated.h``."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        *((name, ctypes.c_int) for name in ("major", "minor", *_NUMBERS)),
        ("total_bytes", ctypes.c_size_t),
        ("context_bytes", ctypes.c_size_t),
        ("count", ctypes.c_int),
    )


@dataclass(frozen=True)
class Emulation:
    """The emulated GPU in this process."""

    gpu: Gpu
    runtime: ctypes.CDLL
    """The stand-in for libcudart, which counts kernel launches."""
    cudnn: Cudnn

    def launches(self) -> dict[str, int]:
        """Return the number of kernel launches since the last `forget_launches`.

        The key is the kernel's mangled C++ name, or a library function's name such as ``"cublasSgemm_v2"``.
        """
        counts: dict[str, int] = {}

        def enter(name: bytes, times: int) -> None:
            counts[name.decode()] = counts.get(name.decode(), 0) + times

        self.runtime.gpumem_tell_launches(_TELL(enter))
        return counts

    def was_told(self) -> bool:
        """Return whether code in this process has read the GPU's properties. Reading the number of GPUs does not count."""
        return bool(self.runtime.gpumem_has_told())

    def forget_launches(self) -> None:
        """Reset the counts of kernel launches to 0."""
        self.runtime.gpumem_forget_launches()


_loaded: list[Emulation] = []
"""This process's emulation, or an empty list. A process cannot emulate two GPUs, because loaded libraries stay loaded."""


def current_emulation() -> Emulation | None:
    """Return this process's emulated GPU; ``None`` if the process does not emulate a GPU."""
    return _loaded[0] if _loaded else None


def prepare() -> tuple[Path, ...]:
    """Compile the stand-ins if necessary, and return their paths in the order in which they must be loaded.

    Raises:
        EmulationError: No GPU can be emulated on this machine.
    """
    _refuse_other_machines()
    return stand_ins(installed_torch())


def load(gpu: Gpu) -> Emulation:
    """Load the stand-ins into this process. torch must not be imported yet.

    Args:
        gpu: The GPU to emulate.

    Returns:
        The emulated GPU. If the process emulates it already, nothing is loaded.

    Raises:
        EmulationError: No GPU can be emulated on this machine, torch is imported, or the process emulates another GPU.
    """
    current = current_emulation()
    if current is not None:
        if current.gpu != gpu:
            raise EmulationError(f"this process already emulates {current.gpu.word}, so it cannot emulate {gpu.word}")
        return current
    _refuse_other_machines()
    if "torch" in sys.modules:
        raise EmulationError(
            f"torch was imported before the GPU could be emulated, by {_who_imported_torch()}. Import torch later (within "
            f"functions, or in a conftest.py), or start the program with "
            f"`{command_name()} emulate {gpu.word} -- python -m pytest`"
        )
    libraries = prepare()
    loaded = {path.name: ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in libraries}
    runtime = next(library for name, library in loaded.items() if name.startswith(FIRST))
    runtime.gpumem_configure(ctypes.byref(_configuration(gpu)))
    cudnn = Cudnn(next(library for name, library in loaded.items() if name.startswith("libcudnn.")), installed_torch())
    driver = next(path for path in libraries if path.name == DRIVER)
    os.environ.update(compiler_variables(driver, os.environ))
    _loaded.append(Emulation(gpu, runtime, cudnn))
    return _loaded[0]


def become(gpu: Gpu) -> None:
    """Emulate another GPU in this process, which must already emulate a GPU and must not have used CUDA.

    Args:
        gpu: The GPU to emulate from now on.
    """
    _loaded[0].runtime.gpumem_configure(ctypes.byref(_configuration(gpu)))
    _loaded[0] = replace(_loaded[0], gpu=gpu)


def _configuration(gpu: Gpu) -> _Configuration:
    same = {name: getattr(gpu, name) for name in (*_NUMBERS, "total_bytes", "count")}
    major, minor = gpu.capability
    # Some programs search for a text such as "H100" in the GPU's name, so the name contains the real GPU's name.
    name = f"{gpu.name} (emulated)".encode()
    return _Configuration(name=name, major=major, minor=minor, context_bytes=CONTEXT_BYTES, **same)


def emulation_hint(error: str, option: str = "--gpumem-device=emulated:h100") -> str | None:
    """Return a hint that an emulated GPU would help, if torch's import failed because an NVIDIA library is missing.

    Args:
        error: The error, for example ``"libcudnn.so.9: cannot open shared object file: No such file or directory"``.
        option: The option for emulating a GPU, which the hint mentions.

    Returns:
        The hint. ``None`` if the import failed for another reason, if this process already emulates a GPU, or if no GPU can be
        emulated on this machine.
    """
    sonames = re.findall(rf"([\w.-]+): {_NOT_LOADED}", error)
    lacking = next((name for name in sonames if library_of(name) is not None), None)
    if lacking is None or current_emulation() is not None:
        return None
    try:
        _refuse_other_machines()
        installed_torch()
    except EmulationError:
        return None
    return (
        f"torch cannot load {lacking}, one of NVIDIA's libraries, which an emulated GPU replaces: add {option}, or start the "
        f"program with `{command_name()} emulate h100 -- COMMAND`"
    )


def _refuse_other_machines() -> None:
    machine = os.uname().machine if hasattr(os, "uname") else "?"
    if not sys.platform.startswith("linux") or machine != "x86_64":
        raise EmulationError(f"a GPU can be emulated on Linux on x86-64 only, and this is {sys.platform} on {machine}")
    for sign in _SIGNS_OF_A_DRIVER:
        if sign.exists():
            raise EmulationError(
                f"this machine has a GPU's driver ({sign}): a GPU is emulated only on machines without a driver. Measure on "
                "the real GPU with --gpumem-device=cuda"
            )


def _who_imported_torch() -> str:
    """Return the name of the module that probably imported torch.

    This is the first module after torch in ``sys.modules`` with torch as an attribute.
    """
    torch = sys.modules["torch"]
    names = list(sys.modules)
    for name in names[names.index("torch") + 1 :]:
        if not name.startswith("torch.") and getattr(sys.modules[name], "torch", None) is torch:
            return name
    return "something"
