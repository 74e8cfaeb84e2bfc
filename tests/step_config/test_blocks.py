"""The repeated blocks of a model: found by their lists, or named."""

from __future__ import annotations

import re

import pytest
from torch import nn

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.step_config.blocks import modules_matching, repeated_blocks


class Layer(nn.Module):
    """A block that has modules of its own."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Other(Layer):
    """A block of another type."""


def model_of(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def layers(count: int, kind: type[Layer] = Layer, width: int = 4) -> nn.ModuleList:
    return nn.ModuleList(kind(width) for _ in range(count))


def paths(blocks) -> list[list[str]]:
    return [[block.path for block in group] for group in blocks]


# Found


@pytest.mark.parametrize("holder", [nn.ModuleList, lambda modules: nn.Sequential(*modules)], ids=["list", "sequential"])
def test_the_blocks_are_the_members_of_a_list_in_order(holder):
    model = model_of(embedding=nn.Embedding(4, 4), h=holder([Layer(), Layer(), Layer()]))
    (blocks,) = repeated_blocks(model)
    assert [block.path for block in blocks] == ["h.0", "h.1", "h.2"]
    assert [block.module for block in blocks] == list(model.h)


def test_a_model_that_is_itself_the_list_has_blocks_by_number():
    assert paths(repeated_blocks(nn.Sequential(Layer(), Layer()))) == [["0", "1"]]


def test_of_several_lists_the_one_with_the_most_parameters_counts():
    model = model_of(small=layers(6), large=layers(2, Other, width=64))
    assert paths(repeated_blocks(model)) == [["large.0", "large.1"]]


def test_every_list_of_this_type_counts():
    model = model_of(encoder=layers(2), decoder=layers(3), head=layers(2, Other, width=2))
    assert paths(repeated_blocks(model)) == [["encoder.0", "encoder.1"], ["decoder.0", "decoder.1", "decoder.2"]]


def test_lists_of_leaves_count_only_where_there_is_no_other():
    leaves = nn.ModuleList(nn.Embedding(1000, 1000) for _ in range(3))
    assert paths(repeated_blocks(model_of(tables=leaves, h=layers(2)))) == [["h.0", "h.1"]]
    assert paths(repeated_blocks(model_of(tables=leaves))) == [["tables.0", "tables.1", "tables.2"]]


def test_blocks_within_a_block_are_part_of_it():
    class Nested(nn.Module):
        def __init__(self, inner: nn.ModuleList | None = None):
            super().__init__()
            self.inner = inner
            self.mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    model = model_of(h=nn.ModuleList([Nested(nn.ModuleList([Nested(), Nested()])), Nested()]))
    assert paths(repeated_blocks(model)) == [["h.0", "h.1"]]


def test_a_list_of_one_or_of_several_types_is_no_list_of_blocks():
    model = model_of(single=layers(1, width=64), mixed=nn.ModuleList([Layer(64), Other(64)]), h=layers(2))
    assert paths(repeated_blocks(model)) == [["h.0", "h.1"]]


def test_a_model_without_blocks_is_told_how_to_name_some():
    message = (
        "Linear has no repeated blocks (a ModuleList or Sequential whose modules have the same type); "
        "name the blocks with blocks=PATTERN, or use checkpoint=modules:PATTERN"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        repeated_blocks(nn.Linear(1, 1))


# Named


def test_a_name_of_a_list_means_its_members():
    model = model_of(h=layers(3), g=layers(3, width=64))
    assert paths(repeated_blocks(model, "h")) == [["h.0", "h.1", "h.2"]]


def test_a_pattern_may_name_several_lists():
    model = model_of(encoder=model_of(h=layers(2)), decoder=model_of(h=layers(1)), head=nn.Linear(1, 1))
    assert paths(repeated_blocks(model, "*.h")) == [["encoder.h.0", "encoder.h.1"], ["decoder.h.0"]]


def test_a_module_dict_may_hold_blocks():
    model = model_of(h=nn.ModuleDict({"first": Layer(), "second": Other()}))
    assert paths(repeated_blocks(model, "h")) == [["h.first", "h.second"]]


def test_a_pattern_may_name_the_blocks_themselves():
    model = model_of(first=Layer(), second=Layer(), head=nn.Linear(1, 1))
    assert paths(repeated_blocks(model, "*st")) == [["first"]]
    assert paths(repeated_blocks(model, "?????*")) == [["first", "second"]]


def test_a_named_list_without_members_is_told():
    with pytest.raises(ConfigError, match=r"^blocks=h: h contains no module$"):
        repeated_blocks(model_of(h=nn.ModuleList()), "h")


def test_a_pattern_that_matches_nothing_is_told_what_there_is():
    message = "no module of Module matches 'x*'; it has h, h.0, h.0.mlp, h.0.mlp.0, h.0.mlp.1, h.0.mlp.2, ..."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        repeated_blocks(model_of(h=layers(1)), "x*")


def test_of_modules_that_match_the_outer_ones_count():
    model = model_of(h=layers(2))
    assert [block.path for block in modules_matching(model, "h.*")] == ["h.0", "h.1"]
    assert [block.path for block in modules_matching(model, "*.mlp")] == ["h.0.mlp", "h.1.mlp"]


def test_a_bracket_in_a_pattern_is_a_bracket():
    with pytest.raises(ConfigError, match="matches"):
        modules_matching(model_of(h=layers(2)), "h.[01]")
