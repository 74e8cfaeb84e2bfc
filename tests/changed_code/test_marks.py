"""Which lines have changed between two variants: by the text of their statements, wherever they have moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.facts.values.composition import REST, Row
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.judging.changed_code.marks import ChangedCode, with_changed_code, without_callers
from pytest_gpumem.judging.changed_code.sources import Folders
from pytest_gpumem.judging.changed_code.statements import TwoVersions
from pytest_gpumem.judging.gate.difference import Change, Difference
from pytest_gpumem.judging.gate.verdict import Verdict

A_MEASUREMENT = Measurement("train_step", Workload("train_step"), Environment("cpu", "cpu"), {})

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
SCORES, WHERE, WITH, NORM, RETURN = 3, 4, 12, 13, 14


@pytest.fixture
def changed(tmp_path):
    """Two variants, each with a file of the project's and one of a package."""
    for side, text in (("old", OLD), ("new", NEW)):
        for file in (f"{side}/model.py", f"{side}/site-packages/lib/nn/model.py", f"{side}/site-packages/single.py"):
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    (tmp_path / "new" / "added.py").write_text("y = 1\n", encoding="utf-8")
    (tmp_path / "new" / "broken.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "old" / "outdated.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "new" / "unreadable_before.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "old" / "unreadable_before.py").write_bytes(b"\xff\xfe\x00")
    return ChangedCode(*(Folders(tmp_path / side, (tmp_path / side / "site-packages",)) for side in ("old", "new")))


@pytest.mark.parametrize("file", ["model.py", "lib 2.0: nn/model.py", "lib 2.0: single.py"])
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(SCORES, False, id="a line that moved"),
        pytest.param(WHERE, True, id="the first line of a statement whose argument is another"),
        pytest.param(WITH, True, id="the head of a block"),
        pytest.param(NORM, True, id="a line within a with block whose head is another"),
        pytest.param(RETURN, False, id="a line after that block"),
        pytest.param(1, True, id="a comment that was added"),
        pytest.param(99, True, id="a line after the end, which is in neither"),
    ],
)
def test_a_line_has_changed_where_its_statement_has(changed, file, number, expected):
    where = {"site": f"{file}:{number}"} if file == "model.py" else {"library": f"{file}:{number}"}
    assert bool(changed.lines(Row("activation", 8, **where))) is expected


def test_of_two_lines_either_counts(changed):
    assert changed.lines(Row("activation", 8, site=f"model.py:{WHERE}", library=f"lib 2.0: nn/model.py:{SCORES}"))
    assert not changed.lines(Row("activation", 8, site=f"model.py:{SCORES}", library=f"lib 2.0: nn/model.py:{SCORES}"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("added.py:1", True),
        ("outdated.py:1", False),
        ("unreadable_before.py:1", False),
        ("../old/outdated.py:1", False),
        ("broken.py:1", False),
        ("nowhere.py:1", False),
        ("model.py", False),
        ("", False),
    ],
)
def test_a_new_file_counts_as_changed_and_an_unreadable_file_says_nothing(changed, line, expected):
    assert bool(changed.lines(Row("activation", 8, site=line))) is expected


def versions(tmp_path, old, new, packages=()):
    """Two versions of a project whose files are given as texts by path."""
    for side, files in (("old", old), ("new", new)):
        for file, text in files.items():
            path = tmp_path / side / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    folders = (Folders(tmp_path / side, (tmp_path / side / "site-packages",)) for side in ("old", "new"))
    return ChangedCode(*folders, frozenset(packages))


HELPER, CALLER, TRAIN = "lib 2.0: helper.py:2", "lib 2.0: model.py:2", "train.py:2"
SAME = "def f(x):\n    return x.float()\n"
THROUGH = Row("activation", 8, site=TRAIN, library=HELPER, callers=((CALLER, TRAIN),))


def of_a_package(tmp_path, *changed, packages=()):
    """A helper, what calls it and a script, of which some files are others in the new version."""
    files = {"train.py": SAME, "site-packages/lib/helper.py": SAME, "site-packages/lib/model.py": SAME}
    new = {file: text.replace("float", "double") if file in changed else text for file, text in files.items()}
    return versions(tmp_path, files, new, packages)


def test_the_innermost_caller_that_changed_is_named(tmp_path):
    changed = of_a_package(tmp_path, "site-packages/lib/model.py", "train.py")
    assert changed.lines(THROUGH)
    assert changed.named(THROUGH) == (CALLER,)


def test_a_line_that_changed_itself_is_named_before_its_callers(tmp_path):
    changed = of_a_package(tmp_path, "site-packages/lib/helper.py", "site-packages/lib/model.py")
    assert changed.named(THROUGH) == (HELPER,)
    assert changed.is_own(THROUGH)


def test_a_caller_above_the_users_innermost_line_is_named(tmp_path):
    changed = versions(tmp_path, {"a.py": SAME, "b.py": SAME}, {"a.py": SAME.replace("float", "half"), "b.py": SAME})
    row = Row("activation", 8, site="b.py:2", callers=(("a.py:2",),))
    assert changed.named(row) == ("a.py:2",)
    assert not changed.is_own(row)


def test_of_two_ways_to_a_line_both_changed_callers_are_possible(tmp_path):
    changed = versions(
        tmp_path,
        dict.fromkeys(("a.py", "b.py", "c.py"), SAME),
        {"a.py": "\n" + SAME, "b.py": "y = 1\n", "c.py": SAME},
    )
    row = Row("activation", 8, site="c.py:2", callers=(("a.py:1",), ("b.py:1",)))
    assert changed.named(row) == ("a.py:1", "b.py:1")


def test_nothing_is_named_where_nothing_changed_and_no_package_is_compared(tmp_path):
    changed = of_a_package(tmp_path)
    assert not changed.lines(THROUGH)
    assert changed.named(THROUGH) == ()


def test_without_a_changed_line_the_compared_package_is_named_in_place_of_its_helper(tmp_path):
    helper = "einops 0.8.0: _backends.py:93"
    row = replace(THROUGH, library=helper, callers=((CALLER, TRAIN),))
    changed = of_a_package(tmp_path, packages={"lib"})
    assert changed.named(row) == (CALLER,)
    assert not changed.lines(row)
    assert of_a_package(tmp_path, packages={""}).named(row) == (TRAIN,)


def test_a_package_is_the_same_however_its_name_is_written(tmp_path):
    row = replace(THROUGH, library="einops 0.8.0: x.py:1", callers=(("Rotary_Embedding 1.0: r.py:5",),))
    assert of_a_package(tmp_path, packages={"rotary-embedding"}).named(row) == ("Rotary_Embedding 1.0: r.py:5",)


LONG = "".join(f"x{number} = {number}\n" for number in range(20))


@pytest.mark.parametrize(("before", "after"), [("model.py", "nn/model.py"), ("model.py", "nn/gpt.py")])
def test_a_file_that_moved_is_compared_with_what_it_was(tmp_path, before, after):
    others = {"other.py": "y = 1\n" * 20}
    changed = versions(tmp_path, {before: LONG, **others}, {after: LONG.replace("x7 = 7", "x7 = 8"), **others})
    assert [number for number in range(1, 21) if changed.lines(Row("other", 1, site=f"{after}:{number}"))] == [8]


def test_a_file_of_a_package_that_moved_is_compared_with_what_it_was(tmp_path):
    changed = versions(
        tmp_path, {"site-packages/lib/ops.py": LONG}, {"site-packages/lib/nn/ops.py": LONG.replace("x7 = 7", "x7 = 8")}
    )
    lines = (f"lib 3.0: nn/ops.py:{number}" for number in range(1, 21))
    assert [line for line in lines if changed.lines(Row("other", 1, library=line))] == ["lib 3.0: nn/ops.py:8"]


def test_a_copy_of_a_file_that_is_still_there_is_new(tmp_path):
    changed = versions(tmp_path, {"a.py": LONG}, {"a.py": LONG, "b.py": LONG})
    assert changed.lines(Row("other", 1, site="b.py:3"))


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_the_ends_of_lines_are_no_change(tmp_path, ends):
    changed = versions(tmp_path, {"a.py": LONG}, {"a.py": LONG.replace("\n", ends).replace("x7 = 7", "x7 = 8")})
    assert [number for number in range(1, 21) if changed.lines(Row("other", 1, site=f"a.py:{number}"))] == [8]


def test_a_form_feed_ends_no_line(tmp_path):
    old = "\f\ndef f(x):\n    return x.float()\n"
    changed = versions(tmp_path, {"a.py": old}, {"a.py": old.replace("float", "half")})
    assert changed.lines(Row("other", 1, site="a.py:3"))
    assert not changed.lines(Row("other", 1, site="a.py:2"))


WRAPPED = """\
@functools.wraps(g)
@torch.no_grad()
def f(
    x,
):
    with torch.autocast("cpu"):
        y = x.float()
        apply = lambda z: z.half()

        def inner(z):
            return z * 2

    return y
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("no_grad", "enable_grad", {6: 1, 7: 1, 8: 1, 13: 1}),
        ("@torch.no_grad()\n", "# Nothing.\n", {6: 1, 7: 1, 8: 1, 13: 1}),
        ("@functools.wraps(g)\n@torch.no_grad()\n", "\n\n", {6: 3, 7: 3, 8: 3, 13: 3}),
        ('autocast("cpu")', 'autocast("cpu", enabled=False)', {6: 6, 7: 6, 8: 6}),
        ("    x,\n", "    x: Tensor,\n", {}),
        ("z.half()", "z.bfloat16()", {8: 8}),
        ("z * 2", "z * 3", {11: 11}),
    ],
)
def test_a_line_runs_by_the_with_and_the_decorators_around_it(old, new, expected):
    file = TwoVersions(WRAPPED.split("\n"), WRAPPED.replace(old, new).split("\n"))
    found = {number: at.number for number in (6, 7, 8, 11, 13) if (at := file.changed_at(number)) is not None}
    assert found == expected


def test_a_removed_decorator_is_named():
    file = TwoVersions(WRAPPED.split("\n"), WRAPPED.replace("@torch.no_grad()\n", "# Nothing.\n").split("\n"))
    changed = file.changed_at(13)
    assert changed is not None
    assert changed.removed == "@torch.no_grad()"


LIVES = """\
class Net:
    def forward(self, x):
        hidden = self.up(x)
        self.seen = gate = self.gate(x)
        hidden = hidden * gate
        y = self.down(hidden)
        del hidden
        self.seen = None
        for step in range(3):
            outputs = self.next(y)
            y = outputs.last
            del outputs.cache, outputs
        return y
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param("        del hidden\n", "", {}, id="its first value is replaced all the same"),
        pytest.param("        self.seen = None\n", "", {4: "self.seen = None"}, id="an attribute"),
        pytest.param("            del outputs.cache, outputs\n", "", {10: "del outputs"}, id="a name in a loop"),
        pytest.param("outputs.cache, outputs", "outputs", {}, id="a part of what is deleted"),
        pytest.param("del hidden\n", "del hidden  # early\n", {}, id="a comment"),
        pytest.param("hidden = hidden * gate", "wide = hidden * gate", {4: None}, id="a name that is deleted later"),
    ],
)
def test_a_line_whose_result_lives_longer_has_changed(old, new, expected):
    file = TwoVersions(LIVES.split("\n"), LIVES.replace(old, new).split("\n"))
    unchanged = [number for number in range(1, len(file.new)) if number in file.common_lines]
    found = {number: at.removed for number in unchanged if (at := file.changed_at(number)) is not None}
    assert found == {number: text for number, text in expected.items() if text}


def test_a_name_that_is_no_longer_replaced_lives_longer():
    old = "def f(x):\n    h = a(x)\n    h = b(h)\n    return c(h)\n"
    file = TwoVersions(
        old.split("\n"), old.replace("h = b(h)\n    return c(h)", "y = b(h)\n    return c(y)").split("\n")
    )
    changed = file.changed_at(2)
    assert changed is not None
    assert (changed.number, changed.removed) == (2, "h = b(h)")


@pytest.mark.parametrize(
    "old",
    [
        pytest.param("def f(x):\n    h = None\n    h = a(x)\n    return h\n", id="set before it has a value"),
        pytest.param(
            "def g(x):\n    h = a(x)\n    del h\n\n\ndef f(x):\n    h = a(x)\n    return h\n", id="another function"
        ),
        pytest.param("def f(x):\n    h = a(x)\n    del h[0]\n    return h\n", id="an item"),
    ],
)
def test_a_statement_that_ended_no_value_is_not_missed(old):
    file = TwoVersions(old.split("\n"), ["def f(x):", "    h = a(x)", "    return h", ""])
    assert file.changed_at(2) is None


REFACTORED = {
    "a value is returned and not bound again": ("x = a(q)|x = b(x)|return x", "x = a(q)|return b(x)"),
    "nothing ran after it was deleted": ("x = a(q)|y = b(x)|del x|return y", "x = a(q)|y = b(x)|return y"),
    "nothing ran after it was set to None": ("x = a(q)|y = b(x)|x = None|return y", "x = a(q)|y = b(x)|return y"),
    "it is deleted later": (
        "x = a(q)|y = b(x)|del x|return c(y)",
        "x = a(q)|try:|    y = b(x)|finally:|    del x|return c(y)",
    ),
    "two are deleted at once": ("x = a(q)|z = b(x)|del x|del z|c()", "x = a(q)|z = b(x)|del (x, z)|c()"),
    "another branch": (
        "if k:|    x = a(q)|elif q:|    x = b(q)|return c(x)",
        "if k:|    x = a(q)|else:|    d()|return c(x)",
    ),
    "after a return": (
        "if k:|    x = a(q)|    return c(x)|x = b(q)|return c(x)",
        "if k:|    x = a(q)|    return c(x)|return c(b(q))",
    ),
    "a handler": (
        "try:|    x = a(q)|except E:|    x = b(q)|return c(x)",
        "try:|    x = a(q)|except E:|    raise|return c(x)",
    ),
    "in place": ("x = a(q)|x += 1|return c(x)", "x = a(q)|x.add_(1)|return c(x)"),
    "a nested function's name": (
        "x = a(q)|def f(z):|    x = b(z)|    return x|c(x, f)",
        "x = a(q)|def f(z):|    return b(z)|c(x, f)",
    ),
    "the variable of the last loop": ("x = a(q)|for x in x:|    c(x)", "x = a(q)|for y in x:|    c(y)"),
    "bound within an expression": ("x = a(q)|x = b(x)|c(x)", "x = a(q)|if (x := b(x)):|    c(x)"),
    "a method ends an attribute": ("self.x = a(q)|b()|self.x = None|c()", "self.x = a(q)|b()|self.reset()|c()"),
}
"""Refactorings by name: the body of a function before and after, its lines divided by ``|``."""


def body(lines):
    return ["def forward(self, q, k):", *(f"    {line}" for line in lines.split("|"))]


@pytest.mark.parametrize("name", REFACTORED)
def test_a_refactoring_that_keeps_no_value_longer_marks_no_line(name):
    file = TwoVersions(*map(body, REFACTORED[name]))
    assert [number for number in file.common_lines if file.changed_at(number)] == []


@pytest.mark.parametrize(
    ("old", "new", "removed"),
    [
        ("x = a(q)|y = b(x)|del x|return c(y)", "x = a(q)|y = b(x)|return c(y)", "del x"),
        ("x = a(q)|x = b(x)|x = c(x)|return d(x)", "x = a(q)|return d(c(b(x)))", "x = b(x)"),
        ("for p in q:|    x = a(p)|    b(x)|    del x", "for p in q:|    x = a(p)|    b(x)", "del x"),
    ],
    ids=["work follows", "work around the last use", "the next round of a loop"],
)
def test_a_value_that_is_still_there_while_others_are_made_lives_longer(old, new, removed):
    file = TwoVersions(body(old), body(new))
    assert [found.removed for number in file.common_lines if (found := file.changed_at(number))] == [removed]


def numbers_of(file, number):
    changed = file.changed_at(number)
    return None if changed is None else changed.number


REPLACED = """\
def f(self, x):
    y = self.embed(x)
    with torch.no_grad():
        y = self.encode(y)
        if y.any():
            y = y * 2
    return self.head(y)
"""


@pytest.mark.parametrize(
    "head",
    ["if True:", "for _ in range(1):", "while self.more():", "try:", "with nullcontext():", "async with other():"],
)
def test_another_block_in_place_of_a_with_decides_the_lines_within(head):
    new = REPLACED.replace("with torch.no_grad():", head)
    if head == "try:":
        new = new.replace("    return", "    finally:\n        pass\n    return")
    file = TwoVersions(REPLACED.split("\n"), new.split("\n"))
    assert [numbers_of(file, number) for number in range(1, 7)] == [None, None, 3, 3, 3, 3]


@pytest.mark.parametrize("first", ["y = self.encode(y)", "y = self.decode(y)"])
def test_a_changed_condition_that_replaces_no_with_decides_only_its_own_line(first):
    old = REPLACED.replace("with torch.no_grad():", "if self.training:")
    new = old.replace("if self.training:", "if x.any():").replace("y = self.encode(y)", first)
    file = TwoVersions(old.split("\n"), new.split("\n"))
    changed = [number for number in range(1, 8) if file.changed_at(number)]
    assert changed == [3, *([4] if "decode" in first else [])]


def test_a_replaced_with_block_marks_its_body_although_its_first_line_changed():
    new = REPLACED.replace("with torch.no_grad():", "if True:").replace("self.encode(y)", "self.decode(y)")
    file = TwoVersions(REPLACED.split("\n"), new.split("\n"))
    assert [numbers_of(file, number) for number in (3, 4, 5, 6, 7)] == [3, 4, 3, 3, None]


ENCODED = """\
def forward(self, x, y):
    hidden = self.up(x)
    other = self.side(y)
    scaled = hidden * 2
    {statement}
    return self.head({argument}, other)
"""


@pytest.mark.parametrize(
    ("old", "new", "removed"),
    [
        pytest.param(("scaled = scaled.detach()", "scaled"), ("", "scaled"), "scaled.detach()", id="rebound"),
        pytest.param(("scaled.detach_()", "scaled"), ("", "scaled"), "scaled.detach_()", id="in place"),
        pytest.param(("scaled = scaled.data", "scaled"), ("", "scaled"), "scaled.data", id="its data"),
        pytest.param(("", "scaled.detach()"), ("", "scaled"), "scaled.detach()", id="an argument"),
        pytest.param(("", "scaled[0].detach()"), ("", "scaled[0]"), "scaled[0].detach()", id="a part"),
        pytest.param(("free = scaled.detach()", "free"), ("", "scaled"), "scaled.detach()", id="another name"),
        pytest.param(("self.log(scaled.item())", "x"), ("self.log(scaled)", "x"), "scaled.item()", id="a number"),
    ],
)
def test_lines_whose_result_is_no_longer_detached_have_changed(old, new, removed):
    before, after = (
        ENCODED.format(statement=statement or "pass", argument=argument).split("\n")
        for statement, argument in (old, new)
    )
    versions = TwoVersions(before, after)
    assert [versions.changed_at(number) for number in (2, 3, 4)] == [
        (2, removed, "no_backward"),
        None,
        (4, removed, "no_backward"),
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(("print(scaled.item())", "scaled"), ("", "scaled"), id="a print that goes"),
        pytest.param(("shown = scaled.detach()", "scaled"), ("", "scaled"), id="a name that nothing used"),
        pytest.param(("scaled = scaled.detach()", "scaled"), ("", "scaled.detach()"), id="moved into an argument"),
        pytest.param(
            ("scaled = scaled.detach()", "scaled"), ("scaled = scaled.detach().clone()", "scaled"), id="cloned"
        ),
        pytest.param(("scaled = scaled.data", "scaled"), ("scaled = scaled.detach()", "scaled"), id="another spelling"),
        pytest.param(
            ("scaled = scaled.detach()", "scaled"), ("scaled = 2 * x.detach()", "scaled"), id="computed otherwise"
        ),
    ],
)
def test_a_result_that_is_still_detached_or_unused_has_not_changed(old, new):
    before, after = (
        ENCODED.format(statement=statement or "pass", argument=argument).split("\n")
        for statement, argument in (old, new)
    )
    versions = TwoVersions(before, after)
    assert [versions.changed_at(number) for number in (2, 3)] == [None, None]


def marks_after(old: str, new: str) -> dict[str, str]:
    """Return the statements whose results are no longer detached, each with the code that is gone. ``|`` separates lines."""
    before, after = (["def forward(self, x):", *(f"    {line}" for line in text.split("|"))] for text in (old, new))
    file = TwoVersions(before, after)
    changed = {line.strip(): file.changed_at(number) for number, line in enumerate(after, 1)}
    return {line: at.removed for line, at in changed.items() if at is not None and at.kind == "no_backward"}


LOST_DETACH = {
    "a sum over a loop": (
        "for b in x:|    loss = self.loss(b)|    loss.backward()|    total += loss.item()|return total",
        "for b in x:|    loss = self.loss(b)|    loss.backward()|    total += loss|return total",
        {"loss = self.loss(b)": "loss.item()"},
    ),
    "a list over a loop": (
        "for b in x:|    h = self.up(b)|    seen.append(h.detach())",
        "for b in x:|    h = self.up(b)|    seen.append(h)",
        {"h = self.up(b)": "h.detach()"},
    ),
    "a state in a loop": (
        "for b in x:|    h = cell(b, h)|    h = h.detach()|return h",
        "for b in x:|    h = cell(b, h)|return h",
        {"h = cell(b, h)": "h.detach()"},
    ),
    "a cache that outlives the call": (
        "h = self.up(x)|self.cache = h.detach()|return head(h)",
        "h = self.up(x)|self.cache = h|return head(h)",
        {"h = self.up(x)": "h.detach()"},
    ),
    "an attribute": (
        "self.h = cell(x)|self.h = self.h.detach()|return head(self.h)",
        "self.h = cell(x)|return head(self.h)",
        {"self.h = cell(x)": "self.h.detach()"},
    ),
    "two arguments": (
        "a = f(x)|b = g(x)|return head(a.detach(), b.detach())",
        "a = f(x)|b = g(x)|return head(a, b)",
        {"a = f(x)": "a.detach()", "b = g(x)": "b.detach()"},
    ),
    "an argument of a detached tensor": (
        "b = side(x.detach())|return mid(x) + b.detach()",
        "b = side(x.detach())|return mid(x) + b",
        {"b = side(x.detach())": "b.detach()"},
    ),
    "a shape that is read as well": (
        "h = self.up(x)|n = h.shape[0]|return head(h.detach(), n)",
        "h = self.up(x)|n = h.shape[0]|return head(h, n)",
        {"h = self.up(x)": "h.detach()"},
    ),
    "a list's own name": (
        "h = self.up(x)|n = [h for h in self.sizes]|return head(h.detach(), n)",
        "h = self.up(x)|n = [h for h in self.sizes]|return head(h, n)",
        {"h = self.up(x)": "h.detach()"},
    ),
    "one of two arguments": (
        "a = f(x)|b = g(x)|return head(a.detach(), b.detach())",
        "a = f(x)|b = g(x)|return head(a, b.detach())",
        {"a = f(x)": "a.detach()"},
    ),
    "an earlier result without gradients": (
        "with profile():|    a = f(x)|h = g(a)|return head(h.detach())",
        "with torch.no_grad():|    a = f(x)|h = g(a)|return head(h)",
        {"h = g(a)": "h.detach()"},
    ),
    "a use in another branch": (
        "if x:|    h = f(x)|    y = g(h.detach())|else:|    y = head(h)|return y",
        "if x:|    h = f(x)|    y = g(h)|else:|    y = head(h)|return y",
        {"h = f(x)": "h.detach()"},
    ),
    "a computation in another branch": (
        "if x:|    h = f(x)|else:|    if y:|        h = g(x)|    y = head(h.detach())|return y",
        "if x:|    h = f(x)|else:|    if y:|        h = g(x)|    y = head(h)|return y",
        {"h = g(x)": "h.detach()"},
    ),
    "inside autocast": (
        "with autocast():|    h = self.up(x)|    y = down(h.detach())|return y",
        "with autocast():|    h = self.up(x)|    y = down(h)|return y",
        {"h = self.up(x)": "h.detach()"},
    ),
}


@pytest.mark.parametrize(("old", "new", "expected"), LOST_DETACH.values(), ids=LOST_DETACH)
def test_a_lost_detach_marks_the_lines_of_its_tensor(old, new, expected):
    assert marks_after(old, new) == expected


REBOUND = "h = self.up(x)|h = h.detach()|y = down(h)|return y"
PASSED = "h = self.up(x)|m = metric(h.detach())|return m"
DETACHED_OTHERWISE = {
    "another callee": (REBOUND, "h = self.up(x)|y = down(self._stop(h))|return y"),
    "another callee of an argument": (PASSED, "h = self.up(x)|m = self.g(h)|return m"),
    "a callee that works in place": (REBOUND, "h = self.up(x)|stop(h)|y = down(h)|return y"),
    "bound again": (REBOUND, "h = self.up(x)|h = stop_gradient(h)|y = down(h)|return y"),
    "another name": (REBOUND, "h = self.up(x)|g = h|h = g.detach()|y = down(h)|return y"),
    "a renamed result": (REBOUND, "h = self.up(x)|g = h.detach()|y = down(g)|return y"),
    "a function": (REBOUND, "h = self.up(x)|h = torch.detach(h)|y = down(h)|return y"),
    "a clone": (REBOUND, "h = self.up(x)|h.requires_grad = False|h = h.clone().detach()|y = down(h)|return y"),
    "its flag": (REBOUND, "h = self.up(x)|h.requires_grad = False|y = down(h)|return y"),
    "its method": (PASSED, "h = self.up(x)|h.requires_grad_(False)|m = metric(h)|return m"),
    "at its computation": (REBOUND, "h = self.up(x).detach()|y = down(h)|return y"),
    "at its computation in both": (
        "h = self.up(x).detach()|h = h.detach()|return down(h)",
        "h = self.up(x).detach()|return down(h)",
    ),
    "an option": (REBOUND, "h = self.up(x, detach=True)|y = down(h)|return y"),
    "at its use in both": (
        "h = self.up(x)|h = h.detach()|return down(h.detach())",
        "h = self.up(x)|return down(h.detach())",
    ),
    "a nested function": (
        "h = self.up(x)|def inner():|    return down(h.detach())|return inner()",
        "h = self.up(x)|def inner():|    return g(h.detach())|return inner()",
    ),
    "a new no_grad": (PASSED, "h = self.up(x)|with torch.no_grad():|    m = metric(h)|return m"),
    "a no_grad around its computation": (REBOUND, "with torch.no_grad():|    h = self.up(x)|y = down(h)|return y"),
    "a no_grad around its computation in both": (
        "with torch.no_grad():|    h = self.up(x)|return metric(h.detach())",
        "with torch.no_grad():|    h = self.up(x)|return metric(h)",
    ),
    "a no_grad in both": (
        "h = self.up(x)|with torch.no_grad():|    m = metric(h.detach())|return m",
        "h = self.up(x)|with torch.no_grad():|    m = metric(h)|return m",
    ),
    "grad mode set by a call": (PASSED, "torch.set_grad_enabled(False)|h = self.up(x)|m = metric(h)|return m"),
    "grad mode set by a call in both": (
        f"torch.set_grad_enabled(False)|{PASSED}",
        "torch.set_grad_enabled(False)|h = self.up(x)|m = metric(h)|return m",
    ),
    "a no_grad in place of another with": (
        "h = self.up(x)|with profile():|    m = metric(h.detach())|return m",
        "h = self.up(x)|with torch.no_grad():|    m = metric(h)|return m",
    ),
}
KEPT_BEFORE = {
    "another use": (
        "h = self.up(x)|m = metric(h.detach())|return head(h), m",
        "h = self.up(x)|m = metric(h)|return head(h), m",
    ),
    "a use before": (
        "h = self.up(x)|y = head(h)|h = h.detach()|return y, metric(h)",
        "h = self.up(x)|y = head(h)|return y, metric(h)",
    ),
    "the same statement": ("h = self.up(x)|return head(h, h.detach())", "h = self.up(x)|return head(h, h)"),
    "another result of the line": (
        "h, y = self.up(x)|m = metric(h.detach())|return y, m",
        "h, y = self.up(x)|m = metric(h)|return y, m",
    ),
    "a lambda": (
        "h = self.up(x)|run = lambda z: head(h)|return metric(h.detach()), run",
        "h = self.up(x)|run = lambda z: head(h)|return metric(h), run",
    ),
    "a nested function": (
        "h = self.up(x)|def inner():|    return head(h)|return metric(h.detach()), inner",
        "h = self.up(x)|def inner():|    return head(h)|return metric(h), inner",
    ),
    "an attribute": (
        "self.h = self.up(x)|return metric(self.h.detach())",
        "self.h = self.up(x)|return metric(self.h)",
    ),
    "the next turn of a loop": (
        "for b in x:|    h = cell(b, h)|    y = metric(h.detach())|return y",
        "for b in x:|    h = cell(b, h)|    y = metric(h)|return y",
    ),
}
NO_TENSOR_IS_KEPT = {
    "a shape": ("h = self.up(x)|return f(h.data.shape[0])", "h = self.up(x)|return f(h.shape[0])"),
    "a detached shape": ("h = self.up(x)|return f(h.detach().size(0))", "h = self.up(x)|return f(h.size(0))"),
    "data with a name": ("c = load(x)|d = c.data|return f(d)", "c = load(x)|return f(c)"),
    "data of an object": ("c = load(x)|return f(c.data)", "c = load(x)|return f(c)"),
    "rows of a table": ("r = load(x)|for row in r.data:|    f(row)", "r = load(x)|for row in r:|    f(row)"),
    "an index": ("i = self.up(x)|return f(x[i.item()])", "i = self.up(x)|return f(x[i])"),
    "in place": ("w = self.up(x)|w.data.mul_(2)", "w = self.up(x)|with torch.no_grad():|    w.mul_(2)"),
    "a name in an index": ("i = self.up(x)|return f(x[i].detach())", "i = self.up(x)|return f(x[i])"),
    "a comparison": ("h = self.up(x)|return (h == x).sum().item()", "h = self.up(x)|return (h == x).sum()"),
    "the greatest": ("h = self.up(x)|return f(h.argmax(1).tolist())", "h = self.up(x)|return f(h.argmax(1))"),
    "a condition": ("h = self.up(x)|if h.item():|    f()", "h = self.up(x)|if h:|    f()"),
    "a text": ('h = self.up(x)|f(f"{h.item()}")', 'h = self.up(x)|f(f"{h}")'),
    "an output": ("h = self.up(x)|print(h.item())", "h = self.up(x)|print(h)"),
    "an array": ("h = self.up(x)|return f(h.numpy())", "h = self.up(x)|return f(h)"),
    "a number": ("h = self.up(x)|return float(h.item())", "h = self.up(x)|return float(h)"),
}
ANOTHER_BINDING = {
    "bound in between": ("h = a(x)|keep(h.detach())|h = b(x)", "h = a(x)|h = b(x)|keep(h)"),
    "bound after the name": ("h = a(x)|free = h.detach()|h = b(x)|keep(free)", "h = a(x)|h = b(x)|keep(h)"),
    "a lambda's own": (
        "h = a(x)|run = lambda h: f(h.detach())|return run",
        "h = a(x)|run = lambda h: f(h)|return run",
    ),
    "a list's own": ("h = a(x)|return [h.detach() for h in y]", "h = a(x)|return [h for h in y]"),
}
NOT_LOST = {
    f"{reason}: {case}": versions
    for reason, cases in (
        ("detached otherwise", DETACHED_OTHERWISE),
        ("kept before", KEPT_BEFORE),
        ("no tensor is kept", NO_TENSOR_IS_KEPT),
        ("another binding", ANOTHER_BINDING),
    )
    for case, versions in cases.items()
}


@pytest.mark.parametrize(("old", "new"), NOT_LOST.values(), ids=NOT_LOST)
def test_a_detach_that_may_not_matter_marks_no_line(old, new):
    assert marks_after(old, new) == {}


@pytest.mark.parametrize("decorated", [(0, 1), (1, 1), (1, 0)])
def test_under_a_decorator_without_gradients_no_detach_is_lost(decorated):
    file = TwoVersions(
        *(
            ("@torch.no_grad()\n" * count + f"def f(x):\n    h = up(x)\n    return head({h})").split("\n")
            for count, h in zip(decorated, ("h.detach()", "h"), strict=True)
        )
    )
    changed = file.changed_at(2 + decorated[1])
    assert changed is None or "h.detach()" not in changed.removed


@pytest.mark.parametrize(
    ("before", "after"),
    [("g(h)", "g(h.detach())"), ("g(h)", "g(h.item())"), ("nullcontext()(g)(h)", "torch.no_grad()(g)(h)")],
)
def test_a_detach_that_moved_into_the_called_function_is_not_lost(before, after):
    text = "def f(x):\n    h = up(x)\n    return head({})\n\n\ndef head(h):\n    return {}\n"
    old, new = text.format("h.detach()", before), text.format("h", after)
    assert TwoVersions(old.split("\n"), new.split("\n")).changed_at(2) is None


CAUSES = {
    "a detach for backward": ("h = up(x)|h = h.detach()|return head(h)", "h = up(x)|return head(h)", "h.detach()", ""),
    "a deletion": ("h = up(x)|y = head(h)|del h|return g(y)", "h = up(x)|y = head(h)|return g(y)", "", ""),
    "a grad mode and a detach": (
        "with torch.no_grad():|    h = up(x)|    y = head(h.detach())|return y",
        "with torch.enable_grad():|    h = up(x)|    y = head(h)|return y",
        "",
        "",
    ),
    "a decorator for grad mode": (
        "@torch.no_grad()|def g(x):|    h = up(x)",
        "def g(x):|    h = up(x)",
        "",
        "@torch.no_grad()",
    ),
    "another decorator": ("@timed|def g(x):|    h = up(x)", "def g(x):|    h = up(x)", "", ""),
}


@pytest.mark.parametrize(("old", "new", "no_backward", "no_grad"), CAUSES.values(), ids=CAUSES)
def test_the_cause_of_a_graph_change_is_code_with_this_effect(tmp_path, old, new, no_backward, no_grad):
    head = "def f(x):\n    "
    texts = [head + text.replace("|", "\n    ") + "\n" for text in (old, new)]
    changed = versions(tmp_path, {"a.py": texts[0]}, {"a.py": texts[1]})
    line = f"a.py:{next(number for number, text in enumerate(texts[1].splitlines(), 1) if 'h = up' in text)}"
    assert changed.removed_at([line], "no_backward") == no_backward
    assert changed.removed_at([line], "no_grad") == no_grad


def test_a_marker_of_pytest_changes_nothing_in_its_test():
    text = "@pytest.mark.gpumem(max_gb=1)\ndef test_it(x):\n    x.step()\n"
    assert TwoVersions(text.split("\n"), text.replace("=1", "=2").split("\n")).changed_at(3) is None


def test_an_argument_on_another_line_of_a_call_changes_each_line_of_the_call():
    text = "def f(x):\n    y = 1\n    return g(\n        x,\n        scale=2,\n    )\n"
    file = TwoVersions(text.split("\n"), text.replace("scale=2", "scale=4").split("\n"))
    assert [number for number in range(1, 7) if file.changed_at(number)] == [3, 4, 5, 6]


def test_counts_at_a_changed_line_say_so_and_name_the_caller(tmp_path):
    changed = of_a_package(tmp_path, "site-packages/lib/model.py")
    place = OperatorSite("h.*", TRAIN, HELPER, ((CALLER, TRAIN),))
    more, less = Tally("item", 3, place), Tally("item", -1, place)
    verdict = with_changed_code(Verdict(A_MEASUREMENT, (), count_changes={"syncs": (more, less)}), changed)
    marked, shrunk = verdict.count_changes["syncs"]
    assert (marked.place.named, marked.place.reason) == (CALLER, "changed line")
    assert marked.place.where == f"{CALLER}, which calls {HELPER} (from {TRAIN})"
    assert shrunk.place.reason == ""


def test_bytes_at_a_changed_caller_come_after_those_at_a_changed_line_of_their_own(tmp_path):
    changed = of_a_package(tmp_path, "site-packages/lib/model.py")
    own = Row("activation", 40, library=CALLER, operator="own")
    through, other = replace(THROUGH, nbytes=400), Row("activation", 1000, site="other.py:1")
    rows = tuple(Change(None, row) for row in (other, through, own))
    difference = Difference(0, 1440, rows)
    marked = with_changed_code(Verdict(A_MEASUREMENT, (), difference=difference), changed).difference
    # Less than a tenth of the increase is not named first.
    assert [one.row.nbytes for one in marked.changes] == [400, 1000, 40]
    more = with_changed_code(Verdict(A_MEASUREMENT, (), difference=replace(difference, after=400)), changed).difference
    assert [one.row.nbytes for one in more.changes] == [40, 400, 1000]
    assert [one.row.named for one in more.changes] == [CALLER, CALLER, ""]


def test_alternatives_name_the_caller_that_changed(tmp_path):
    changed = of_a_package(tmp_path, "site-packages/lib/model.py")
    before, after = (Row("activation", nbytes, operator=REST) for nbytes in (100, 500))
    alternatives = replace(THROUGH, nbytes=400), replace(THROUGH, nbytes=400, operator="other")
    difference = Difference(100, 500, (Change(before, after, alternatives=alternatives),))
    (change,) = with_changed_code(Verdict(A_MEASUREMENT, (), difference=difference), changed).difference.changes
    assert [row.named for row in change.alternatives] == [CALLER, CALLER]


def test_an_alternative_with_two_changed_callers_names_neither(tmp_path):
    changed = of_a_package(tmp_path, "site-packages/lib/model.py", "train.py")
    twice = replace(THROUGH, nbytes=400, callers=((CALLER,), (TRAIN,)))
    assert len(changed.named(twice)) == 2
    before, after = (Row("activation", nbytes, operator=REST) for nbytes in (100, 500))
    difference = Difference(100, 500, (Change(before, after, alternatives=(twice, twice)),))
    (change,) = with_changed_code(Verdict(A_MEASUREMENT, (), difference=difference), changed).difference.changes
    assert [row.named for row in change.alternatives] == ["", ""]


def test_no_row_of_a_change_has_callers_once_the_changed_lines_are_named():
    change = Change(THROUGH, replace(THROUGH, nbytes=16), alternatives=(THROUGH, THROUGH))
    verdict = Verdict(A_MEASUREMENT, (), difference=Difference(8, 16, (change, Change(THROUGH, None))))
    changes = without_callers(verdict).difference.changes
    rows = [row for each in changes for row in (each.before, each.after, *each.alternatives) if row is not None]
    assert [row.callers for row in rows] == [()] * 5
