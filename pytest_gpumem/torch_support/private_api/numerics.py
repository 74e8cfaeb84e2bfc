"""Settings for precision: autocast, TF32, bfloat16."""

from __future__ import annotations

import platform
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


R = TypeVar("R")


def bfloat16_instructions() -> str | None:
    """Return the instructions with which oneDNN computes bfloat16 on this CPU: ``AMX``, ``AVX512_BF16`` or ``none``.

    The result is ``None`` if the CPU is not an x86 CPU, or if torch cannot tell. oneDNN chooses its kernels by these
    instructions, and the kernels need different workspaces. Example: a bfloat16 training step of the example project's GPT with
    checkpointing allocates 27.74 MB with ``AMX``, 27.80 MB with ``AVX512_BF16``, and 29.29 MB with ``none`` on a CPU with
    AVX-512.
    """
    import torch

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if has_amx is None or has_bf16 is None or platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    return "AMX" if has_amx() else "AVX512_BF16" if has_bf16() else "none"


@contextmanager
def outside_autocast(device_type: str) -> Iterator[None]:
    """Switch autocast off within the context, as if no autocast context surrounded it.

    An autocast context caches the weights that it casts, and torch frees this cache when the outermost autocast context ends.
    If the program's autocast context surrounded a step, the step's cached weights would outlive its forward pass.
    """
    import torch

    enabled = torch.is_autocast_enabled(device_type)
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled(device_type, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for float32 matrix products, convolutions and recurrent layers on a GPU.

    Since torch 2.9 each backend has its own setting, and reading one of the older settings, which are common to all backends,
    raises an error if a backend's setting differs. For example, ``torch.backends.cudnn.flags``, which some models call, reads
    a common setting. So this context first sets the common settings to the same value.
    """
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    common = _read_setting(torch.get_float32_matmul_precision), _read_setting(lambda: cudnn.allow_tf32)
    backends: list[Any] = [matmul, cudnn.conv, cudnn.rnn] if hasattr(matmul, "fp32_precision") else []  # type: ignore[attr-defined]
    precisions = [backend.fp32_precision for backend in backends]
    try:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        cudnn.allow_tf32 = allowed
        for backend in backends:
            backend.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        products, convolutions = common
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if convolutions is not None:
            cudnn.allow_tf32 = convolutions
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


def _read_setting(setting: Callable[[], R]) -> R | None:
    """Return the value of a setting common to all backends; ``None`` if the backends' own settings differ."""
    try:
        return setting()
    except RuntimeError:
        return None
