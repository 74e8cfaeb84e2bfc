"""Trials on emulated GPUs, each in a process that is forked from one in which torch and the model's library are loaded.

A step is run on a GPU with more memory than any has: PyTorch's allocator takes there what it would take on one where that is
enough. Where a GPU has less than it takes, but not less than tensors hold, the step is run with the GPU's own memory: the
allocator gives back what it keeps, then, and may get along. So memory runs out at most once for each config.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.advice.search_order import Tried
from pytest_gpumem.advice.trial import AdviceSubject, SubjectError, TrialFailed, explain_config, try_config
from pytest_gpumem.devices.emulated import why_no_kernels
from pytest_gpumem.devices.registry import make_cuda
from pytest_gpumem.emulated_process.before_torch import install
from pytest_gpumem.emulated_process.start import emulate, environment_for
from pytest_gpumem.emulation.load import CONTEXT_BYTES, become, current_emulation
from pytest_gpumem.processes import end_with_parent
from pytest_gpumem.step_config.errors import NotAStep
from pytest_gpumem.values.composition import NOT_EXPLAINED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    import torch

    from pytest_gpumem.advice.snippet import BlockContainer
    from pytest_gpumem.emulation.gpus import Gpu
    from pytest_gpumem.models.task import Task
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.values.composition import Explanation

_ANY_MEMORY = 2**43
"""Bytes that no GPU has."""


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


def subject_in_forks(
    name: str, gpus: Sequence[Gpu], make: Callable[[torch.device, bool], AdviceSubject], task: Task
) -> AdviceSubject:
    """Return the subject that ``make`` makes in each process that measures it: a function of a project's own may do anything.

    It is looked at in a process of its own, on the first card that torch has kernels for.

    Args:
        name: The name of it in messages.
        gpus: The cards.
        make: What `AdviceSubject.make` is. It may raise `SubjectError`.
        task: The task of the model in the step that is measured.

    Raises:
        SubjectError: ``make`` raised it.
        TrialFailed: ``make`` raised another error, which has been shown, or its process ended.
    """
    containers: tuple[BlockContainer, ...] = ()
    samples, attention = None, ""
    for gpu in map(_with_any_memory, gpus):
        try:
            seen = _in_fork(gpu, partial(_seen, name, gpu, make))
        except _Ended as ended:
            raise TrialFailed(f"{name}: {ended}") from None
        if seen is not None:
            containers, samples, attention = seen
            break
    return AdviceSubject(_never, None, None, containers, task, seen_samples=samples, attention=attention, make=make)


def _never(_dtype: torch.dtype) -> torch.nn.Module:
    raise AssertionError("it is made where it is measured")


def _seen(
    name: str, gpu: Gpu, make: Callable[[torch.device, bool], AdviceSubject]
) -> tuple[tuple[BlockContainer, ...], int | None, str] | None:
    """Return what is known of a subject before it is measured; ``None`` on a card without kernels."""
    if why_no_kernels(gpu) is not None:
        return None
    try:
        made = make(make_cuda().torch_device, False)
    except SubjectError:
        raise
    except Exception as error:  # noqa: BLE001, the project's own
        traceback.print_exc()
        raise TrialFailed(f"{name} fails: {type(error).__name__}: {' '.join(str(error).split())}") from None
    return made.containers, made.samples, made.attention


def try_on(gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> tuple[Tried, str | None]:
    """Return the figures of a config on a GPU, or why there are none, and why peaks may be too low, if they may.

    Raises:
        NotAStep: The subject gives no such step.
        TrialFailed: The model's own code raised, under the config that all others are tried after.
    """

    def tried_on(card: Gpu) -> tuple[Tried, str | None]:
        try:
            found: tuple[Tried, str | None] = _in_fork(card, lambda: _tried(card, subject, config))
        except _Ended as ended:
            return Tried(config, why_not=str(ended)), None
        return found

    roomy, lacking = tried_on(_with_any_memory(gpu))
    if roomy.peak is None or roomy.allocated is None or not roomy.allocated <= capacity_of(gpu) < roomy.peak:
        return roomy, lacking
    own, _ = tried_on(gpu)
    return (roomy if own.peak is None else own), lacking


def explain_on(gpu: Gpu, subject: AdviceSubject, config: StepConfig, *, over_time: bool) -> Explanation | str:
    """Return what the peak of a config on a GPU is made of, or a clause that says why that is not known."""
    try:
        found: Explanation | str = _in_fork(
            _with_any_memory(gpu), lambda: explain_config(make_cuda(), subject, config, over_time=over_time)
        )
    except (_Ended, NotAStep, SubjectError, TrialFailed) as error:
        return f"{NOT_EXPLAINED}: {error}"
    return found


def _with_any_memory(gpu: Gpu) -> Gpu:
    return replace(gpu, total_bytes=_ANY_MEMORY)


class _Ended(Exception):
    """A process ended without a result. The message is a clause."""


def _in_fork(gpu: Gpu, work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a forked process with that GPU.

    Raises:
        _Ended: The process ended before.
        NotAStep: ``work`` raised it.
        SubjectError: Likewise.
        TrialFailed: ``work`` raised it, or another error.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sending, gpu, work), daemon=True)
    process.start()
    sending.close()
    try:
        kind, told = receiving.recv()
    except EOFError:
        process.join()
        raise _Ended(f"its process ended with {_ending(process.exitcode)}") from None
    except BaseException:
        process.kill()
        raise
    process.join(_SECONDS)
    process.kill()
    if kind is not None:
        raise kind(told)
    return told


_SECONDS = 10.0
"""Seconds in which a process that has sent its result ends."""


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" + (", as of too little memory here" if code == -9 else "")
    return f"exit code {code}"


def _send(sending: Connection, gpu: Gpu, work: Callable[[], Any]) -> None:
    """Send what ``work`` returns with that GPU, or the class of an error and its message."""
    # Ctrl-C is the parent's, which ends this process, also when it is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    # Standard output is the parent's, for results.
    os.dup2(2, 1)
    become(gpu)
    # Processes that this one starts, as to compile, have the same card.
    os.environ.update(environment_for(gpu, os.environ))
    told: tuple[type[Exception] | None, Any]
    try:
        told = None, work()
    except (NotAStep, SubjectError, TrialFailed) as error:
        told = type(error), str(error)
    except Exception as error:  # noqa: BLE001, the model's own
        traceback.print_exc()
        told = TrialFailed, f"the model fails by itself: {type(error).__name__}: {' '.join(str(error).split())}"
    sending.send(told)


def _tried(gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> tuple[Tried, str | None]:
    why = why_no_kernels(gpu)
    if why is not None:
        return Tried(config, why_not=why), None
    tried = try_config(make_cuda(), subject, config)
    emulation = current_emulation()
    return tried, None if emulation is None else emulation.cudnn.lacking()
