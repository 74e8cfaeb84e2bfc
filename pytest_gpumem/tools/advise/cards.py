"""Try step configs on emulated GPUs. Each trial runs in a forked process, so torch and other libraries are imported only once.

A step first runs on an emulated GPU with 8.8 TB of memory, more than any real GPU has. With so much memory, PyTorch's allocator
reserves the same bytes as on every real GPU with enough memory. If a card has less memory than these reserved bytes, but enough
for the step's tensors, the step runs again with the card's own memory size. In this second run, the allocator frees cached
blocks when the card is full, so the step may fit.

For example, let a step's tensors need 38 GB, and let the allocator reserve 45 GB. For a card with 40 GB, the step runs twice.
For a card with 24 GB, it runs once, because the tensors alone do not fit.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import NotAStep, SubjectError, TrialFailed
from pytest_gpumem.base.processes import end_with_parent, signal_name
from pytest_gpumem.emulating.emulated_process.before_torch import install
from pytest_gpumem.emulating.emulated_process.start import emulate, environment_for
from pytest_gpumem.emulating.emulation.load import CONTEXT_BYTES, become, current_emulation
from pytest_gpumem.facts.values.composition import NOT_EXPLAINED
from pytest_gpumem.measuring.devices.emulated import why_no_kernels
from pytest_gpumem.measuring.devices.registry import make_cuda
from pytest_gpumem.tools.advise.search_order import Trial
from pytest_gpumem.tools.advise.trial import AdviceSubject, explain_config, try_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    import torch

    from pytest_gpumem.emulating.emulation.gpus import Gpu
    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.measuring.models.task import Task
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.snippet import BlockContainer

_ANY_MEMORY = 2**43
"""The memory size in bytes for a step's first run: 8.8 TB, more than any real GPU has."""


def begin(gpu: Gpu) -> None:
    """Import torch for an emulated GPU into this process.

    This process must not use CUDA itself, because each trial runs in a fork of it, and a fork cannot inherit CUDA's state.

    Raises:
        EmulationError: This machine cannot emulate a GPU.
    """
    emulate(gpu)
    install(gpu.device)
    import torch

    # Use a single thread. Forked processes do not inherit torch's worker threads, and would wait for them forever.
    torch.set_num_threads(1)


def capacity_of(gpu: Gpu) -> int:
    """Return the bytes that PyTorch's allocator can reserve on a GPU: the total memory without a CUDA context."""
    return gpu.total_bytes - CONTEXT_BYTES


def with_capacity(gpu: Gpu, nbytes: int) -> Gpu:
    """Return the GPU with less memory: ``nbytes`` for PyTorch's allocator, and a CUDA context."""
    return replace(gpu, total_bytes=min(gpu.total_bytes, nbytes + CONTEXT_BYTES))


def subject_in_forks(
    name: str, gpus: Sequence[Gpu], make: Callable[[torch.device, bool], AdviceSubject], task: Task
) -> AdviceSubject:
    """Return the subject for a project's function. Each trial calls ``make`` again in its own process, because the function
    may, for example, use CUDA, and a fork cannot inherit CUDA's state.

    Before the trials, a forked process makes the subject once to find its blocks, samples and attention implementation. This
    process emulates the first card for which torch has kernels.

    Args:
        name: The subject's name in messages.
        gpus: The GPUs to emulate.
        make: Makes the subject on a device, as described in `AdviceSubject.make`. It may raise `SubjectError`.
        task: The measured task, for example training.

    Raises:
        SubjectError: ``make`` raised this error.
        TrialFailed: ``make`` raised another error, and its traceback has been printed. Or the process ended without a result.
    """
    containers: tuple[BlockContainer, ...] = ()
    samples, attention = None, ""
    for gpu in map(_with_any_memory, gpus):
        try:
            seen = _in_fork(gpu, partial(_inspect, name, gpu, make))
        except _NoResultError as ended:
            raise TrialFailed(f"{name}: {ended}") from None
        if seen is not None:
            containers, samples, attention = seen
            break
    return AdviceSubject(_never, None, None, containers, task, seen_samples=samples, attention=attention, make=make)


def _never(_dtype: torch.dtype) -> torch.nn.Module:
    raise AssertionError("the model is made in the trial's process")


def _inspect(
    name: str, gpu: Gpu, make: Callable[[torch.device, bool], AdviceSubject]
) -> tuple[tuple[BlockContainer, ...], int | None, str] | None:
    """Return the paths to the subject's blocks, the number of samples in its batch, and its attention implementation.

    Return ``None`` if torch has no kernels for the GPU.
    """
    if why_no_kernels(gpu) is not None:
        return None
    try:
        subject = make(make_cuda().torch_device, False)
    except SubjectError:
        raise
    except Exception as error:  # noqa: BLE001, the project's own
        traceback.print_exc()
        raise TrialFailed(f"{name} fails: {type(error).__name__}: {' '.join(str(error).split())}") from None
    return subject.containers, subject.samples, subject.attention


def try_on(gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> tuple[Trial, str | None]:
    """Measure a step with a config on an emulated GPU.

    Args:
        gpu: The GPU. The step first runs with unlimited memory. If the step's tensors fit into this GPU but the allocator's
            reserved bytes do not, the step runs again with this GPU's memory size.
        subject: The model and its batch.
        config: The step config.

    Returns:
        The trial, and a clause with the reason why its peak may be too low. The clause is ``None`` if the peak is complete.

    Raises:
        NotAStep: The subject cannot run this step.
        TrialFailed: The model's own code raised an error with the first config.
    """

    def try_card(card: Gpu) -> tuple[Trial, str | None]:
        try:
            result: tuple[Trial, str | None] = _in_fork(card, lambda: _try(card, subject, config))
        except _NoResultError as ended:
            return Trial(config, why_not=str(ended)), None
        return result

    unlimited, lacking = try_card(_with_any_memory(gpu))
    if (
        unlimited.peak is None
        or unlimited.allocated is None
        or not unlimited.allocated <= capacity_of(gpu) < unlimited.peak
    ):
        return unlimited, lacking
    limited, _ = try_card(gpu)
    return (unlimited if limited.peak is None else limited), lacking


def explain_on(gpu: Gpu, subject: AdviceSubject, config: StepConfig, *, over_time: bool) -> Explanation | str:
    """Return the composition of a config's peak on a GPU, or the reason why the peak cannot be explained, as a clause."""
    try:
        explanation: Explanation | str = _in_fork(
            _with_any_memory(gpu), lambda: explain_config(make_cuda(), subject, config, over_time=over_time)
        )
    except (_NoResultError, NotAStep, SubjectError, TrialFailed) as error:
        return f"{NOT_EXPLAINED}: {error}"
    return explanation


def _with_any_memory(gpu: Gpu) -> Gpu:
    return replace(gpu, total_bytes=_ANY_MEMORY)


class _NoResultError(Exception):
    """Error if a forked process ended without a result. The message is a clause."""


def _in_fork(gpu: Gpu, work: Callable[[], Any]) -> Any:
    """Run ``work`` in a forked process with the emulated GPU, and return the result from ``work``.

    Raises:
        _NoResultError: The process ended without a result.
        NotAStep: ``work`` raised this error.
        SubjectError: ``work`` raised this error.
        TrialFailed: ``work`` raised this error, or an unexpected error.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sending, gpu, work), daemon=True)
    process.start()
    sending.close()
    try:
        kind, result = receiving.recv()
    except EOFError:
        process.join()
        raise _NoResultError(f"its process ended with {_ending(process.exitcode)}") from None
    except BaseException:
        process.kill()
        raise
    process.join(_SECONDS)
    process.kill()
    if kind is not None:
        raise kind(result)
    return result


_SECONDS = 10.0
"""Seconds to wait until a forked process exits after it has sent its result."""


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal_name(-code) + (", probably because this machine ran out of memory" if code == -9 else "")
    return f"exit code {code}"


def _send(sending: Connection, gpu: Gpu, work: Callable[[], Any]) -> None:
    """Run ``work`` on the emulated GPU, and send the result, or the error's class and message, to the parent process."""
    # Only the parent process handles Ctrl-C. This process ends when the parent ends, even if the parent is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    # Redirect the model's prints to standard error, because the parent writes its results to standard output.
    os.dup2(2, 1)
    become(gpu)
    # Child processes, for example compilers, emulate the same GPU.
    os.environ.update(environment_for(gpu, os.environ))
    message: tuple[type[Exception] | None, Any]
    try:
        message = None, work()
    except (NotAStep, SubjectError, TrialFailed) as error:
        message = type(error), str(error)
    except Exception as error:  # noqa: BLE001, the model's own
        traceback.print_exc()
        message = TrialFailed, f"the model fails by itself: {type(error).__name__}: {' '.join(str(error).split())}"
    sending.send(message)


def _try(gpu: Gpu, subject: AdviceSubject, config: StepConfig) -> tuple[Trial, str | None]:
    why_not = why_no_kernels(gpu)
    if why_not is not None:
        return Trial(config, why_not=why_not), None
    trial = try_config(make_cuda(), subject, config)
    emulation = current_emulation()
    return trial, None if emulation is None else emulation.cudnn.lacking()
