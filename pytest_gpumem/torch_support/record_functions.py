"""Spans of ``torch.profiler.record_function``, switched off where a recording may end within one of them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_record_functions() -> Iterator[None]:
    """Let ``record_function`` mark nothing within the context.

    A span writes its end into the recording that it began in, whose memory is gone if another recording has begun meanwhile.
    """
    from torch.autograd.profiler import record_function

    enter, leave = record_function.__enter__, record_function.__exit__

    def marks_nothing(self: Any) -> Any:
        return self

    def leaves(self: Any, *error: Any) -> Any:
        # One that was entered before has a record to end.
        return None if self.record is None else leave(self, *error)

    anything: Any = record_function
    anything.__enter__, anything.__exit__ = marks_nothing, leaves
    try:
        yield
    finally:
        anything.__enter__, anything.__exit__ = enter, leave
