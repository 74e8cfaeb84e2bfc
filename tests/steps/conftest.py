"""Tests of single steps, many of which measure without a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.heap import own_objects_out_of_sight

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def _own_objects_out_of_sight() -> Iterator[None]:
    with own_objects_out_of_sight():
        yield
