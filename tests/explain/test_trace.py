"""Texts of traces: folded module paths."""

from __future__ import annotations

import pytest

from pytest_gpumem.explain.trace import folded


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("layers.10.experts.3", "layers.*.experts.*"),
        ("0.1.2.3", "*.*.*.*"),
        ("layer1.0.conv2", "layer1.*.conv2"),
        ("blocks.12a", "blocks.12a"),
        ("", ""),
    ],
)
def test_layer_numbers_of_a_path_are_folded_and_nothing_else_is(path, shown):
    assert folded(path) == shown
    assert folded(shown) == shown
