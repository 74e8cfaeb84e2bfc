"""Loading of the stand-ins into this process, before torch."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pytest_gpumem.command_name import command_name
from pytest_gpumem.emulation.build import FIRST, stand_ins
from pytest_gpumem.emulation.cudnn import Cudnn
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.gpus import Gpu
from pytest_gpumem.emulation.libraries import DRIVER, library_of
from pytest_gpumem.emulation.torch_build import compiler_variables, installed_torch

CONTEXT_BYTES = 520 * 2**20
"""Bytes that a CUDA context takes from a GPU outside of any allocator: about what nvidia-smi shows for torch on an H100."""
_NOT_LOADED = "cannot open shared object file"
"""Words of the system's error for a library that is not there."""
_SIGNS_OF_A_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


_NUMBERS = tuple(field.name for field in fields(Gpu))[4:-2]
"""The fields of `Gpu` behind its capability, but for its memory and count: ``int`` in ``native/emulated.h``, in this order."""
_TELL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)


class _Configuration(ctypes.Structure):
    """``Gpu`` of ``native/emulated.h``."""

    _fields_ = (
        ("name", ctypes.c_char * 256),
        *((name, ctypes.c_int) for name in ("major", "minor", *_NUMBERS)),
        ("total_bytes", ctypes.c_size_t),
        ("context_bytes", ctypes.c_size_t),
        ("count", ctypes.c_int),
    )


@dataclass(frozen=True)
class Emulation:
    """The emulated GPU of this process."""

    gpu: Gpu
    runtime: ctypes.CDLL
    """The stand-in of libcudart, which counts launches."""
    cudnn: Cudnn

    def launches(self) -> dict[str, int]:
        """Return the kernels that were launched since `forget_launches`, by their mangled name or the library's function."""
        found: dict[str, int] = {}

        def enter(name: bytes, times: int) -> None:
            found[name.decode()] = found.get(name.decode(), 0) + times

        self.runtime.gpumem_tell_launches(_TELL(enter))
        return found

    def was_told(self) -> bool:
        """Return whether anything in this process has asked what the GPU is, beside how many of them there are."""
        return bool(self.runtime.gpumem_has_told())

    def forget_launches(self) -> None:
        """Reset the counts of launches."""
        self.runtime.gpumem_forget_launches()


_loaded: list[Emulation] = []
"""At most one: what is loaded stays for as long as the process."""


def current_emulation() -> Emulation | None:
    """Return the GPU that is emulated in this process; ``None`` where none is."""
    return _loaded[0] if _loaded else None


def prepare() -> tuple[Path, ...]:
    """Return the stand-ins to load, in their order, compiled if they are not there.

    Raises:
        EmulationError: There can be no emulated GPU here.
    """
    _refuse_other_machines()
    return stand_ins(installed_torch())


def load(gpu: Gpu) -> Emulation:
    """Load the stand-ins into this process, which has not imported torch yet.

    Raises:
        EmulationError: It cannot be done here, or is too late.
    """
    there = current_emulation()
    if there is not None:
        if there.gpu != gpu:
            raise EmulationError(
                f"this process emulates {there.gpu.word} already, and cannot emulate {gpu.word} as well"
            )
        return there
    _refuse_other_machines()
    if "torch" in sys.modules:
        raise EmulationError(
            f"torch was imported before the GPU could be emulated, by {_who_imported_torch()}. Have it imported later "
            f"(within functions, or in a conftest.py), or start the whole with "
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
    """Emulate another GPU in this process, which emulates one and has not begun to use it.

    Args:
        gpu: The GPU, with any amount of memory.
    """
    _loaded[0].runtime.gpumem_configure(ctypes.byref(_configuration(gpu)))
    _loaded[0] = replace(_loaded[0], gpu=gpu)


def _configuration(gpu: Gpu) -> _Configuration:
    same = {name: getattr(gpu, name) for name in (*_NUMBERS, "total_bytes", "count")}
    major, minor = gpu.capability
    # Programs search the name for "H100".
    name = f"{gpu.name} (emulated)".encode()
    return _Configuration(name=name, major=major, minor=minor, context_bytes=CONTEXT_BYTES, **same)


def emulation_hint(error: str, option: str = "--gpumem-device=emulated:h100") -> str | None:
    """Return a sentence on how to import torch, if its import failed because NVIDIA's libraries are not installed.

    Args:
        error: The error, for example ``"libcudnn.so.9: cannot open shared object file: No such file or directory"``.
        option: The option that emulates a GPU.

    Returns:
        ``None`` for another error, and if a GPU is emulated already or cannot be emulated here.
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
                f"this machine has a GPU's driver ({sign}): a GPU is emulated only where there is none. Measure on the "
                "real one with --gpumem-device=cuda"
            )


def _who_imported_torch() -> str:
    """Return the module that imported torch: of those that have it, the first that was loaded after torch was."""
    torch = sys.modules["torch"]
    names = list(sys.modules)
    for name in names[names.index("torch") + 1 :]:
        if not name.startswith("torch.") and getattr(sys.modules[name], "torch", None) is torch:
            return name
    return "something"
