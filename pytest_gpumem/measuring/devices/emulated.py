"""An emulated GPU as a device. Bytes are counted as on CUDA, and steps are not timed.

Kernel launches are counted by the emulation's stand-ins for NVIDIA's libraries.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.base.variables import EMULATED_CARD
from pytest_gpumem.emulating.emulated_process.usage import no_kernels
from pytest_gpumem.facts.values.option_words import EMULATED_SLUG, LOWER_BOUND
from pytest_gpumem.facts.values.unknown_reads import NOTHING_READ
from pytest_gpumem.measuring.devices.cuda import CudaDevice, OtherGpu, cuda_slug
from pytest_gpumem.measuring.devices.cuda_runtime import TorchCuda, gpus_beside
from pytest_gpumem.measuring.devices.memory_ledger import MemoryLedger
from pytest_gpumem.measuring.devices.profiled import kernel_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulation.gpus import Gpu
    from pytest_gpumem.emulating.emulation.load import Emulation
    from pytest_gpumem.emulating.host_values.mode import HostValues
    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.facts.values.option_words import Routing
    from pytest_gpumem.facts.values.unknown_reads import UnknownReads
    from pytest_gpumem.measuring.devices.contract import Peak


class EmulatedDevice(CudaDevice):
    """An emulated GPU. torch's allocator and operators run, and torch chooses kernels as usual, but the kernels do nothing."""

    memory_title = "Emulated GPU memory"
    tells_time = False

    def __init__(self, emulation: Emulation) -> None:
        runtime = _EmulatedCuda(emulation)
        other_gpus = [OtherGpu(_EmulatedCuda(emulation, index)) for index in gpus_beside(runtime.torch_device())]
        super().__init__(runtime, ledger=_ledger(runtime), others=other_gpus)
        self._emulation = emulation
        self._convolutions_before = self._recurrent_before = 0

    def environment(self) -> Environment:
        """Return the GPU's environment with an emulated GPU's slug, because emulated and real GPUs have separate baselines."""
        real = super().environment()
        return replace(real, slug=EMULATED_SLUG + cuda_slug(self._emulation.gpu.title))

    def lacks(self, feature: str) -> str | None:
        if feature == "values":
            return "an emulated GPU computes the values of small tensors only"
        if feature.startswith("max-autotune"):
            return (
                f"compile={feature} times kernels to choose the fastest ones, and an emulated GPU cannot time kernels"
            )
        return super().lacks(feature)

    def libraries(self) -> dict[str, str]:
        """Return cuDNN's release if convolutions ran, and the emulation's kind if recurrent layers ran. Both affect peaks."""
        cudnn = self._emulation.cudnn
        planned = {"emulated_cudnn": cudnn.release()} if cudnn.convolutions() > self._convolutions_before else {}
        recurrent = {"emulated_rnn": LOWER_BOUND} if cudnn.recurrent() > self._recurrent_before else {}
        return {**planned, **recurrent}

    def forget_libraries(self) -> None:
        cudnn = self._emulation.cudnn
        self._convolutions_before, self._recurrent_before = cudnn.convolutions(), cudnn.recurrent()

    def open(self) -> None:
        super().open()
        self.forget_libraries()
        # Discard reads of unknown values that were noted before `open`, because code outside the measured tests made them.
        self.lost()
        self.take_reads()

    def peak(self) -> Peak:
        peak = super().peak()
        reaching = self._emulation.cudnn.reaching(self.torch_device.index, self._counter)
        return replace(peak, reaching=max(peak.allocated, reaching))

    def reset_peak(self) -> None:
        super().reset_peak()
        self._emulation.cudnn.forget_reaching(self.torch_device.index)

    def lost(self) -> str | None:
        values = _values()
        return None if values is None else values.reads.take_trouble()

    def take_reads(self) -> UnknownReads:
        values = _values()
        return NOTHING_READ if values is None else values.reads.take_others()

    def routed(self, routing: Routing | None) -> AbstractContextManager[None]:
        values = _values()
        return nullcontext() if values is None else values.notes.choosing.by(routing)

    def choices_assumed(self) -> int:
        values = _values()
        return 0 if values is None else values.notes.choosing.made


def _ledger(runtime: TorchCuda) -> MemoryLedger | None:
    """Return the memory ledger for an emulated card that several processes share; ``None`` if each process has its own card."""
    card = os.environ.get(EMULATED_CARD)
    if not card:
        return None
    digest = hashlib.sha256(os.path.realpath(card).encode()).hexdigest()[:16]
    return MemoryLedger(f"emulated-{digest}-{runtime.torch_device().index}")


class _EmulatedCuda(TorchCuda):
    """The calls to torch.cuda on an emulated GPU. The stand-ins count kernel launches, because CUPTI needs a real GPU."""

    def __init__(self, emulation: Emulation, index: int | None = None) -> None:
        super().__init__(index)
        self._emulation = emulation

    def bytes_by_pid(self) -> Mapping[int, int | None] | None:
        """Return ``None``, because the stand-in for NVML lists no processes, and the size of a CUDA context is assumed.

        If a test replaces NVML by a module that lists processes, return these processes.
        """
        return super().bytes_by_pid() or None

    def launches(self, run: Callable[[], object]) -> Mapping[str, int] | None:
        self._emulation.forget_launches()
        run()
        self.synchronize()
        counts: Counter[str] = Counter()
        for symbol, times in self._emulation.launches().items():
            counts[kernel_name(_demangled(symbol))] += times
        return counts


def why_no_kernels(gpu: Gpu) -> str | None:
    """Return the reason why none of torch's kernels runs on ``gpu``; ``None`` if they run."""
    import torch

    return no_kernels(torch.__version__, torch.cuda.get_arch_list(), gpu.capability)


def _values() -> HostValues | None:
    from pytest_gpumem.emulating.host_values.scope import current

    return current()


def _demangled(symbol: str) -> str:
    """Return the C++ name for a mangled symbol. Any other text is returned unchanged."""
    if not symbol.startswith("_Z"):
        return symbol
    status = ctypes.c_int()
    library = ctypes.CDLL("libstdc++.so.6")  # torch has loaded it
    demangle = getattr(library, "__cxa_demangle")
    demangle.restype = ctypes.c_void_p
    address = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not address:
        return symbol
    try:
        return ctypes.string_at(address).decode("utf-8", "replace")
    finally:
        library.free(ctypes.c_void_p(address))
