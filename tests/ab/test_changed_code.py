"""Which lines have changed between two variants: by the text of their statements, wherever they have moved."""

from __future__ import annotations

import pytest

from pytest_gpumem.ab.changed_code import ChangedCode, Code
from pytest_gpumem.values.composition import Row

OLD = """\
def attend(q, k, mask):
    scores = q @ k
    return torch.where(
        mask,
        scores,
        0,
    )


def forward(self, x):
    with torch.no_grad():
        y = self.norm(x)
    return attend(y, y, self.mask)
"""
NEW = """\
# A line more.
def attend(q, k, mask):
    scores = q @ k
    return torch.where(
        mask,
        scores.float(),
        0,
    )


def forward(self, x):
    with torch.enable_grad():
        y = self.norm(x)
    return attend(y, y, self.mask)
"""
SCORES, WHERE, WITH, NORM = 3, 4, 12, 13


@pytest.fixture
def changed(tmp_path):
    """Two variants, each with a file of the project's and one of a package."""
    for side, text in (("old", OLD), ("new", NEW)):
        for file in (f"{side}/model.py", f"{side}/site-packages/lib/nn/model.py", f"{side}/site-packages/single.py"):
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    (tmp_path / "new" / "added.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "new" / "broken.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "old" / "outdated.py").write_text("x = 1\n", encoding="utf-8")
    return ChangedCode(*(Code(tmp_path / side, (tmp_path / side / "site-packages",)) for side in ("old", "new")))


@pytest.mark.parametrize("file", ["model.py", "lib 2.0: nn/model.py", "lib 2.0: single.py"])
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(SCORES, False, id="a line that moved"),
        pytest.param(WHERE, True, id="the first line of a statement whose argument is another"),
        pytest.param(WITH, True, id="the head of a block"),
        pytest.param(NORM, False, id="a line within that block"),
        pytest.param(1, True, id="a comment that was added"),
        pytest.param(99, True, id="a line after the end, which is in neither"),
    ],
)
def test_a_line_has_changed_where_its_statement_has(changed, file, number, expected):
    where = {"site": f"{file}:{number}"} if file == "model.py" else {"library": f"{file}:{number}"}
    assert changed.has(Row("activation", 8, **where)) is expected


def test_of_two_lines_either_counts(changed):
    assert changed.has(Row("activation", 8, site=f"model.py:{WHERE}", library=f"lib 2.0: nn/model.py:{SCORES}"))
    assert not changed.has(Row("activation", 8, site=f"model.py:{SCORES}", library=f"lib 2.0: nn/model.py:{SCORES}"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("added.py:1", True),
        ("outdated.py:1", False),
        ("broken.py:1", False),
        ("nowhere.py:1", False),
        ("model.py", False),
        ("", False),
    ],
)
def test_a_file_that_is_new_has_changed_and_of_one_that_cannot_be_read_nothing_is_said(changed, line, expected):
    assert changed.has(Row("activation", 8, site=line)) is expected
