"""Trials on emulated GPUs, each in a process that is forked from one in which torch and the model's library are loaded.

A step is run on a GPU with more memory than any has: PyTorch's allocator takes there what it would take on one where that is
enough. Where a GPU has less than it takes, but not less than tensors hold, the step is run with the GPU's own memory: the
allocator gives back what it keeps, then, and may get along. So memory runs out at most once for each config.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.advice.search_order import Tried
from pytest_gpumem.advice.trial import try_config
from pytest_gpumem.devices.emulated import why_no_kernels
from pytest_gpumem.devices.registry import make_cuda
from pytest_gpumem.emulated_process.before_torch import install
from pytest_gpumem.emulated_process.start import emulate
from pytest_gpumem.emulation.load import CONTEXT_BYTES, become, current_emulation
from pytest_gpumem.step_config.errors import NotAStep

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pytest_gpumem.advice.trial import AdviceSubject
    from pytest_gpumem.emulation.gpus import Gpu
    from pytest_gpumem.step_config.config import StepConfig

_ANY_MEMORY = 2**43
"""Bytes that no GPU has."""


class TrialFailed(Exception):
    """The model's own code raised in the first step that was tried. The message is a sentence."""


def begin(gpu: Gpu) -> None:
    """Load torch into this process, with the stand-ins of an emulated GPU that nothing here must begin to use.

    Raises:
        EmulationError: There can be no emulated GPU here.
    """
    emulate(gpu)
    install(gpu.device)
    import torch

    # A process that is forked must not wait for threads that are not in it.
    torch.set_num_threads(1)


def capacity_of(gpu: Gpu) -> int:
    """Return the bytes that an allocator can take from a GPU, beside a CUDA context."""
    return gpu.total_bytes - CONTEXT_BYTES


def with_capacity(gpu: Gpu, nbytes: int) -> Gpu:
    """Return the GPU with so much memory beside a CUDA context, but with no more than it has."""
    return replace(gpu, total_bytes=min(gpu.total_bytes, nbytes + CONTEXT_BYTES))


def try_on(gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> tuple[Tried, str | None]:
    """Return the figures of a config on a GPU, or why there are none, and why peaks may be too low, if they may.

    Raises:
        NotAStep: The subject gives no such step.
        TrialFailed: The model's own code raised, under the config that all others are tried after.
    """
    roomy, lacking = _in_fork(replace(gpu, total_bytes=_ANY_MEMORY), subject, config)
    if roomy.peak is None or roomy.allocated is None or not roomy.allocated <= capacity_of(gpu) < roomy.peak:
        return roomy, lacking
    own, _ = _in_fork(gpu, subject, config)
    return (roomy if own.peak is None else own), lacking


def _in_fork(gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> tuple[Tried, str | None]:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(sending, gpu, subject, config), daemon=True)
    process.start()
    sending.close()
    try:
        kind, told = receiving.recv()
    except EOFError:
        process.join()
        return Tried(config, why_not=f"its process ended with {_ending(process.exitcode)}"), None
    except BaseException:
        process.kill()
        raise
    process.join(_SECONDS)
    process.kill()
    if kind is NotAStep.__name__:
        raise NotAStep(told)
    if kind is not None:
        raise TrialFailed(told)
    tried, lacking = told
    return tried, lacking


_SECONDS = 10.0
"""Seconds in which a process that has sent its result ends."""


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (", as of too little memory here" if code == -9 else "")
    return f"exit code {code}"


def _try(sending: Connection, gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> None:
    """Send the figures of a config on a GPU, or the kind of an error and its message."""
    # Ctrl-C is the parent's, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become(gpu)
    told: tuple[str | None, Any]
    try:
        told = None, _tried(gpu, subject, config)
    except NotAStep as error:
        told = NotAStep.__name__, str(error)
    except Exception as error:  # noqa: BLE001, the model's own
        traceback.print_exc()
        told = "Exception", f"the model fails by itself: {type(error).__name__}: {' '.join(str(error).split())}"
    sending.send(told)


def _tried(gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> tuple[Tried, str | None]:
    why = why_no_kernels(gpu)
    if why is not None:
        return Tried(config, why_not=why), None
    tried = try_config(make_cuda(), subject, config)
    emulation = current_emulation()
    return tried, None if emulation is None else emulation.cudnn.lacking()
