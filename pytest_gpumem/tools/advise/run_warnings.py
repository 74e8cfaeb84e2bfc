"""Collect warnings from the measured code: Python warnings, and log records from libraries."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOISE = ("torch", "torchao")
"""Packages whose log records are ignored, because they do not concern the measured code.

For example, torchao logs each kernel that this machine lacks.
"""


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect the distinct warnings within the context in the yielded list, each as a line of text.

    Examples are ``"transformers: `causal_conv1d_fn` is falling back to its reference PyTorch implementation because ..."``
    and ``"UserWarning: None of the inputs have requires_grad=True. Gradients will be None"``. The warnings are still printed.
    Warnings hidden by a filter or by `quietly` are not collected.
    """
    lines: list[str] = []

    def collect(source: str, text: str) -> None:
        line = f"{source}: {' '.join(text.split())}"
        if line not in lines:
            lines.append(line)

    show, make_record = warnings.showwarning, logging.getLogRecordFactory()

    def show_and_collect(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> None:
        collect(category.__name__, str(message))
        show(message, category, *location, **more)

    # Libraries such as transformers and diffusers do not propagate their log records, so a handler on the root logger would
    # miss these records. A record factory sees every record.
    def make_and_collect(name: Any, level: Any, *parts: Any, **more: Any) -> logging.LogRecord:
        record = make_record(name, level, *parts, **more)
        package = str(name).partition(".")[0]
        if isinstance(level, int) and level >= logging.WARNING and package not in _NOISE:
            with suppress(Exception):  # a record with wrong arguments: `logging` reports them when it prints the record
                collect(package, record.getMessage())
        return record

    warnings.showwarning = show_and_collect
    logging.setLogRecordFactory(make_and_collect)
    try:
        yield lines
    finally:
        warnings.showwarning = show
        logging.setLogRecordFactory(make_record)
