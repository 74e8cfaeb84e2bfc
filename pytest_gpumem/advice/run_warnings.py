"""Warnings from the measured code: Python's warnings, and log records from its libraries."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOISE = ("torch", "torchao")
"""Packages whose log records are about themselves: torchao logs each of its kernels that does not fit this machine."""


@contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """Yield a list that gets each warning within the context once, as a line.

    For example ``"transformers: `causal_conv1d_fn` is falling back to its reference PyTorch implementation because ..."``, or
    ``"UserWarning: None of the inputs have requires_grad=True. Gradients will be None"``. The warnings are still printed. A
    warning that a filter or `quietly` hides is not kept.
    """
    kept: list[str] = []

    def keep(source: str, text: str) -> None:
        line = f"{source}: {' '.join(text.split())}"
        if line not in kept:
            kept.append(line)

    show, make_record = warnings.showwarning, logging.getLogRecordFactory()

    def show_and_keep(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        keep(category.__name__, str(message))
        show(message, category, *where, **more)

    # Libraries switch the propagation of their records off (transformers, diffusers), so the root logger's handlers lack them.
    def make_and_keep(name: Any, level: Any, *parts: Any, **more: Any) -> logging.LogRecord:
        record = make_record(name, level, *parts, **more)
        package = str(name).partition(".")[0]
        if isinstance(level, int) and level >= logging.WARNING and package not in _NOISE:
            with suppress(Exception):  # `logging` reports wrong arguments where it prints the record
                keep(package, record.getMessage())
        return record

    warnings.showwarning = show_and_keep
    logging.setLogRecordFactory(make_and_keep)
    try:
        yield kept
    finally:
        warnings.showwarning = show
        logging.setLogRecordFactory(make_record)
