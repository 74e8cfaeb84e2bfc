"""Names of layers: as few as tell them apart, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.values.composition import Row, join_layers, row_from_text
from pytest_gpumem.facts.values.layers import fewest_combinations, folded, numbers_in, split_layers, with_layers

EXPERTS = {(layer, expert) for layer in range(3) for expert in range(4)}
FOUND = st.sets(st.sampled_from(sorted(EXPERTS)), min_size=1)


@pytest.mark.parametrize(
    ("path", "key", "layers"),
    [
        ("h.3.attn", "h.*.attn", ((3,),)),
        ("h.{2,3}", "h.*", ((2, 3),)),
        ("h.{0-2,7}", "h.*", ((0, 1, 2, 7),)),
        ("layers.*.experts.3", "layers.*.experts.*", ((), (3,))),
        ("h.*.attn", "h.*.attn", ()),
        ("0.1.2", "*.*.*", ((0,), (1,), (2,))),
        ("conv1.2d", "conv1.2d", ()),
        ("h.{2-1}", "h.{2-1}", ()),
        ("h.007", "h.*", ()),
    ],
)
def test_a_path_has_a_key_and_its_layers(path, key, layers):
    assert split_layers(path) == (key, layers)
    assert folded(path) == key
    if path != "h.007":
        assert with_layers(key, layers) == path


@given(FOUND)
def test_layers_are_named_exactly_with_those_left_out_of_which_all_occur(found):
    told = fewest_combinations(found, EXPERTS)
    meant = [
        {one for one in EXPERTS if all(not some or n in some for n, some in zip(one, layers, strict=False))}
        for layers in told
    ]
    assert set().union(*meant) == found
    assert sum(map(len, meant)) == len(found)
    assert all(
        split_layers(with_layers("layers.*.experts.*", layers)) == ("layers.*.experts.*", layers) for layers in told
    )


def test_all_are_a_star():
    assert fewest_combinations(EXPERTS, EXPERTS) == [()]
    assert fewest_combinations({(layer, 3) for layer in range(3)}, EXPERTS) == [((), (3,))]
    assert numbers_in(((0, 1), (3,))) == {(0, 3), (1, 3)}


@given(st.dictionaries(st.sampled_from(sorted(EXPERTS)), st.tuples(st.integers(1, 2), st.integers(1, 2)), min_size=1))
def test_rows_of_single_layers_are_joined_without_losing_any(amounts):
    rows = [
        Row("activation", 100 * size, f"layers.{a}.experts.{b}", count=count)
        for (a, b), (size, count) in amounts.items()
    ]
    found = join_layers(rows, {"layers.*.experts.*": EXPERTS})
    assert sum(row.nbytes for row in found) == sum(row.nbytes for row in rows)
    assert sum(row.count for row in found) == sum(row.count for row in rows)
    assert all(row_from_text(row.text()) == row for row in found)
    if len(set(amounts.values())) == 1 and len(amounts) == len(EXPERTS):
        assert [row.path for row in found] == ["layers.*.experts.*"]
