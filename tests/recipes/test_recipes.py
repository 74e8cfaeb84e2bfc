"""Blocks of recipes that have no place of their own are refused. That the others find theirs, each recipe shows."""

from __future__ import annotations

import pytest

from tests.recipes.recipes import Edit, recipe

FILE = "one = 1\ntwo = 2\n"


def test_a_new_file_is_written_and_none_is_replaced(tmp_path):
    edit = Edit("folder/new.py", "a new file", None, "new\n")
    edit.apply(tmp_path)
    assert (tmp_path / "folder/new.py").read_text() == "new\n"
    with pytest.raises(ValueError, match="there already"):
        edit.apply(tmp_path)


@pytest.mark.parametrize(("anchor", "lines"), [("three", 0), ("=", 2)])
def test_an_anchor_that_is_not_in_just_one_line_is_refused(tmp_path, anchor, lines):
    (tmp_path / "numbers.py").write_text(FILE)
    with pytest.raises(ValueError, match=f"{lines} lines with"):
        Edit("numbers.py", "after", anchor, "new\n").apply(tmp_path)
    assert (tmp_path / "numbers.py").read_text() == FILE


def test_an_unknown_heading_and_a_block_that_nothing_introduces_are_refused(tmp_path):
    file = tmp_path / "recipes.md"
    file.write_text("# Add\n\nSomewhere:\n\n```python\nx = 1\n```\n")
    for heading, said in (("Remove", "no section"), ("Add", "nothing says where")):
        with pytest.raises(ValueError, match=said):
            recipe(heading, file)
