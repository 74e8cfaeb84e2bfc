"""Blocks of recipes go where their introductions say."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.recipes.recipes import Edit, recipe

FILE = "one = 1\ntwo = 2\n"


def written(tmp_path, text):
    file = tmp_path / "recipes.md"
    file.write_text(dedent(text))
    return file


@pytest.mark.parametrize(
    ("where", "anchor", "left"),
    [
        ("after", "one =", "one = 1\nnew\ntwo = 2\n"),
        ("before", "two", "one = 1\nnew\ntwo = 2\n"),
        ("instead of", "one", "new\ntwo = 2\n"),
        ("at the end", None, "one = 1\ntwo = 2\nnew\n"),
    ],
)
def test_an_edit_goes_where_it_says(tmp_path, where, anchor, left):
    (tmp_path / "numbers.py").write_text(FILE)
    Edit("numbers.py", where, anchor, "new\n").apply(tmp_path)
    assert (tmp_path / "numbers.py").read_text() == left


def test_a_block_is_indented_as_the_line_that_it_stands_at(tmp_path):
    (tmp_path / "loops.py").write_text("for x in y:\n    go(x)\n")
    Edit("loops.py", "after", "go(", "if x:\n    stop()\n\nreturn\n").apply(tmp_path)
    assert (tmp_path / "loops.py").read_text() == "for x in y:\n    go(x)\n    if x:\n        stop()\n\n    return\n"


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


def test_a_recipe_is_the_blocks_of_its_section(tmp_path):
    file = written(
        tmp_path,
        """
        # Contributing

        ## Another

        In `a.py`, at the end:

        ```python
        another = True
        ```

        ## Add a thing

        1. First it needs a row. In
           `a.py`, after
           `row("one"`:

           ```python
               row("two"),

           # not a heading
           ```

        2. Then say so:

           ```console
           $ pytest
           ```

        3. In `b.toml`, instead of `x = 1`:

           ```toml
           x = 2
           ```

        ### More of it

        In `c.py`, a new file:

        ```python
        # also not a heading
        c = 3
        ```

        ## The next

        In `a.py`, at the end:

        ```python
        next = True
        ```
        """,
    )
    assert recipe("Add a thing", file) == [
        Edit("a.py", "after", 'row("one"', '    row("two"),\n\n# not a heading\n'),
        Edit("b.toml", "instead of", "x = 1", "x = 2\n"),
        Edit("c.py", "a new file", None, "# also not a heading\nc = 3\n"),
    ]


def test_a_block_that_nothing_introduces_is_refused(tmp_path):
    file = written(tmp_path, "# Add\n\nSomewhere:\n\n```python\nx = 1\n```\n")
    with pytest.raises(ValueError, match="nothing says where"):
        recipe("Add", file)


def test_an_unknown_heading_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no section"):
        recipe("Remove", written(tmp_path, "# Add\n"))
