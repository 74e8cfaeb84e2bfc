"""The store: what is found in it, what a change leaves of it, and what becomes of files that nobody understands."""

from __future__ import annotations

import re
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import StoreError
from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.judging.baselines.bucket import Bucket
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.store import Store, path_of
from pytest_gpumem.judging.gate.baseline import Baseline, Key, NoBaseline
from tests.baselines.racing import check_that_nothing_is_lost

if TYPE_CHECKING:
    from pathlib import Path

unhurried = settings(deadline=None)
FILE = "tests/test_gpt.py"
CPU = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})
H100 = Environment("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", {"torch": "2.11.0"})
A100 = Environment("nvidia-a100", "NVIDIA A100", {"torch": "2.11.0"})


def entry(peak: int, environment: Environment = CPU) -> Baseline:
    return Baseline(Workload("call"), environment, {"peak_allocated": peak}, "2026-11-02")


def key(test: str = "test_a", file: str = FILE, name: str = "call") -> Key:
    return Key(file, test, name)


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


def stored_tests(root: Path) -> list[str]:
    """The tests that a session reading the store finds in it."""
    listed = Store(Folder(root)).keys()
    return [one.test for _, one in listed]


def toml_files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.toml"))}


# Finding


def test_what_was_stored_is_found_by_the_same_session(root):
    store = Store(Folder(root))
    assert store.find(key(), CPU.slug) == NoBaseline()
    store.change({key(): entry(5)})
    assert store.find(key(), CPU.slug) == entry(5)


def test_what_was_stored_is_listed_by_the_same_session_that_had_looked_before(root):
    store = Store(Folder(root))
    assert store.keys() == []
    store.change({key(): entry(5, H100)})
    assert store.keys() == [(H100.slug, key())]
    assert store.find(key(), CPU.slug) == NoBaseline(("NVIDIA H100 80GB HBM3",))
    store.change({}, removals=[(H100.slug, key())])
    assert store.keys() == []
    assert store.find(key(), CPU.slug) == NoBaseline()


def test_nothing_is_found_in_an_empty_store(root):
    assert Store(Folder(root)).find(key(), CPU.slug) == NoBaseline()
    assert not root.exists()


@pytest.mark.parametrize("other", [key("test_b"), key(file="tests/test_other.py"), key(name="call-2")])
def test_a_baseline_belongs_to_one_test_of_one_file_and_one_measurement(root, other):
    Store(Folder(root)).change({key(): entry(5)})
    assert Store(Folder(root)).find(other, CPU.slug) == NoBaseline()


def test_what_is_only_stored_for_other_devices_is_absent_and_names_them(root):
    Store(Folder(root)).change({key(): entry(5, H100)})
    Store(Folder(root)).change({key(): entry(6, A100), key("test_b"): entry(7, H100)})
    assert Store(Folder(root)).find(key(), CPU.slug) == NoBaseline(("NVIDIA A100", "NVIDIA H100 80GB HBM3"))
    assert Store(Folder(root)).find(key("test_b"), CPU.slug) == NoBaseline(("NVIDIA H100 80GB HBM3",))


def test_a_file_of_the_same_name_in_another_folder_is_not_elsewhere(root):
    Store(Folder(root)).change({key(file="sub/test_gpt.py"): entry(5, H100)})
    assert Store(Folder(root)).find(key(file="test_gpt.py"), CPU.slug) == NoBaseline()


@pytest.mark.parametrize("file", ["../outside/test_gpt.py", "../../test_gpt.py"])
def test_a_test_file_outside_of_the_root_directory_is_stored_inside_and_found_again(root, file):
    outside = key(file=file)
    Store(Folder(root)).change({outside: entry(5)})
    assert [path for path in toml_files(root.parent) if not path.startswith("store/")] == []
    assert Store(Folder(root)).find(outside, CPU.slug) == entry(5)
    Store(Folder(root)).change({outside: entry(6)})
    assert Store(Folder(root)).find(outside, CPU.slug) == entry(6)
    assert Store(Folder(root)).keys() == [(CPU.slug, outside)]


def test_every_baseline_is_listed_by_device_and_key(root):
    store = Store(Folder(root))
    store.change({key("test_b"): entry(5), key("test_a"): entry(6, H100), key(file="a.py"): entry(7)})
    assert store.keys() == [
        (CPU.slug, key(file="a.py")),
        (CPU.slug, key("test_b")),
        (H100.slug, key("test_a")),
    ]
    assert store.keys(H100.slug) == [(H100.slug, key("test_a"))]
    assert store.keys("nvidia-b200") == []


# Changing


def test_a_change_leaves_other_entries_as_they_were(root):
    Store(Folder(root)).change({key("test_a"): entry(5), key("test_b"): entry(6)})
    Store(Folder(root)).change({key("test_b"): entry(7), key("test_c"): entry(8)})
    store = Store(Folder(root))
    found = [store.find(key(test), CPU.slug) for test in ("test_a", "test_b", "test_c")]
    assert found == [entry(5), entry(7), entry(8)]


def test_a_change_for_one_device_leaves_the_files_of_others_as_they_were(root):
    Store(Folder(root)).change({key(): entry(5, H100)})
    before = toml_files(root)
    Store(Folder(root)).change({key(): entry(6, CPU)})
    after = toml_files(root)
    assert before.items() <= after.items()
    assert set(after) - set(before) == {"cpu-x86_64/tests/test_gpt.py.toml"}


def test_an_empty_change_writes_nothing(root):
    Store(Folder(root)).change({})
    assert toml_files(root) == {}


def test_entries_that_are_gone_are_taken_out(root):
    Store(Folder(root)).change({key("test_a"): entry(5), key("test_b"): entry(6)})
    store = Store(Folder(root))
    store.change({}, removals=[(CPU.slug, key("test_a"))])
    assert store.find(key("test_a"), CPU.slug) == NoBaseline()
    assert store.find(key("test_b"), CPU.slug) == entry(6)


def test_an_entry_that_is_gone_for_one_device_stays_for_others(root):
    Store(Folder(root)).change({key(): entry(5)})
    Store(Folder(root)).change({key(): entry(6, H100)})
    Store(Folder(root)).change({}, removals=[(CPU.slug, key())])
    assert Store(Folder(root)).keys() == [(H100.slug, key())]


def test_the_file_goes_with_its_last_entry(root):
    Store(Folder(root)).change({key(): entry(5)})
    Store(Folder(root)).change({}, removals=[(CPU.slug, key())])
    assert toml_files(root) == {}
    assert not (root / "cpu-x86_64").exists()


def test_taking_out_what_is_not_there_changes_nothing(root):
    Store(Folder(root)).change({key(): entry(5)})
    before = toml_files(root)
    Store(Folder(root)).change({}, removals=[(CPU.slug, key("test_b")), (H100.slug, key())])
    assert toml_files(root) == before


def test_a_change_merges_with_what_another_session_wrote_since_it_was_read(root):
    Store(Folder(root)).change({key("test_a"): entry(5)})
    mine, theirs = Store(Folder(root)), Store(Folder(root))
    mine.check()
    theirs.check()
    theirs.change({key("test_b"): entry(6)})
    mine.change({key("test_c"): entry(7)})
    assert stored_tests(root) == ["test_a", "test_b", "test_c"]
    assert mine.find(key("test_b"), CPU.slug) == entry(6)


def test_sessions_that_write_at_the_same_time_lose_nothing(root):
    check_that_nothing_is_lost(str(root), processes=3, entries=8)


def test_files_are_read_at_once_where_many_are_needed(root):
    class Counting(Folder):
        def read_many(self, paths):
            asked.append(list(paths))
            return super().read_many(paths)

    files = [f"tests/test_{name}.py" for name in "abc"]
    Store(Folder(root)).change({key(file=file): entry(5) for file in files})
    asked: list[list[str]] = []
    store = Store(Counting(root))
    store.check()
    assert asked == [[f"cpu-x86_64/{file}.toml" for file in files]]
    assert [store.find(key(file=file), CPU.slug) for file in files] == [entry(5)] * 3
    assert len(store.keys()) == 3
    assert len(asked) == 1
    store.change({key(file=file): entry(6) for file in files})
    assert len(asked) == 2


def test_a_broken_file_among_those_that_change_leaves_the_others_as_they_were(root):
    files = ["tests/test_a.py", "tests/test_b.py"]
    Store(Folder(root)).change({key(file=file): entry(5) for file in files})
    (root / "cpu-x86_64/tests/test_b.py.toml").write_text("broken", encoding="utf-8")
    before = toml_files(root)
    with pytest.raises(StoreError):
        Store(Folder(root)).change({key(file=file): entry(6) for file in files})
    assert toml_files(root) == before


# Paths


@pytest.mark.parametrize("slug", ["", ".", "..", "/tmp/x", "a/b", "..\\x", "C:", "a/../../x", "x\x00", ".lock"])
def test_a_device_whose_slug_is_no_name_of_a_folder_is_refused(slug):
    with pytest.raises(StoreError, match="slug"):
        path_of(slug, FILE)


@pytest.mark.parametrize(
    "action",
    [
        lambda store, where: store.find(key(), where.slug),
        lambda store, where: store.change({key(): entry(5, where)}),
        lambda store, where: store.change({}, removals=[(where.slug, key())]),
    ],
    ids=["finding", "changing", "taking out"],
)
def test_nothing_is_looked_for_or_written_at_such_a_slug(root, action):
    with pytest.raises(StoreError, match="slug"):
        action(Store(Folder(root)), Environment("../../x", "a device"))
    assert list(root.parent.rglob("*.toml")) == []


@pytest.mark.parametrize(
    "file", ["", ".", "/tmp/test_x.py", "tests//x.py", "./x.py", "a/..\\..\\x.py", "C:/x.py", "C:x.py", "x\x00.py"]
)
def test_a_test_file_that_leads_out_of_the_store_is_refused(file):
    with pytest.raises(StoreError, match="test file"):
        path_of(CPU.slug, file)


@pytest.mark.parametrize("store_of", [Folder, lambda _root: Bucket("s3://paths")], ids=["folder", "bucket"])
def test_nothing_is_looked_for_or_written_for_such_a_test_file(root, store_of):
    outside = key(file="a/..\\..\\x.py")
    for action in (
        lambda store: store.find(outside, CPU.slug),
        lambda store: store.change({outside: entry(5)}),
        lambda store: store.change({}, removals=[(CPU.slug, outside)]),
    ):
        with pytest.raises(StoreError, match="test file"):
            action(Store(store_of(root)))
    assert list(root.parent.rglob("*.toml")) == []


@unhurried
@given(
    st.lists(st.text("ab./\\:C~", min_size=1, max_size=6), min_size=1, max_size=4).map("/".join), st.text("ab./\\:C-")
)
def test_whatever_the_names_no_path_leaves_the_store_on_any_system(file, slug):
    try:
        path = path_of(slug, file)
    except StoreError:
        return
    for flavour, root in ((PurePosixPath, "/the/store"), (PureWindowsPath, "D:\\the\\store")):
        inside = flavour(root) / path
        assert flavour(root) in inside.parents
        assert ".." not in inside.parts


@pytest.mark.parametrize(
    "listed", ["../x/test_a.py.toml", "cpu-x86_64/../../test_a.py.toml", "cpu-x86_64//test_a.py.toml"]
)
def test_a_listing_that_leads_out_of_the_store_is_refused_before_anything_is_read(root, listed):
    class Lying(Folder):
        def paths(self):
            return [listed]

        def read_many(self, paths):
            assert listed not in paths
            return dict.fromkeys(paths)

    for action in (Store.check, Store.keys, lambda store: store.find(key(), H100.slug)):
        with pytest.raises(StoreError, match="this path cannot contain baselines"):
            action(Store(Lying(root)))


# Broken files

BROKEN = {
    "truncated": lambda text: text[: text.index("recorded") + 12],
    "of another format": lambda text: text.replace("format = 1", "format = 99"),
    "with a wrong type": lambda text: text.replace("peak_allocated = 5", "peak_allocated = '5'"),
    "with a negative size": lambda text: text.replace("peak_allocated = 5", "peak_allocated = -5"),
    "with an unknown key": lambda text: text.replace("peak_allocated = 5", "peak_alocated = 5"),
    "with a merge conflict": lambda text: f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> feature\n",
    "empty": lambda _text: "",
    "of another device": lambda text: text.replace('slug = "cpu-x86_64"', 'slug = "cpu-aarch64"'),
    "of a device that leads out of the store": lambda text: text.replace('"cpu-x86_64"', '"../../cpu-x86_64"'),
    "of another device in an environment that no test has": lambda text: text + ELSEWHERE,
    "with a number of 5,000 digits": lambda text: text.replace("= 5", f"= {'5' * 5000}"),
    "with a hexadecimal number of 5,000 digits": lambda text: text.replace("= 5", f"= 0x{'5' * 5000}"),
    "with a number of 65 bits": lambda text: text.replace("= 5", f"= 5\nparameters = {2**64}"),
    "nested 100,000 deep": lambda text: f"{text}x = {'[' * 100_000}{']' * 100_000}\n",
    "with a format nested 200 deep": lambda text: text.replace("= 1", f"= {'[' * 200}{']' * 200}", 1),
}
ELSEWHERE = '[environments.other]\ndevice = "CPU"\nslug = "cpu-aarch64"\n'


def broken(root: Path, how: str) -> Path:
    """A file of the store that was fine once."""
    Store(Folder(root)).change({key(): entry(5)})
    path = root / "cpu-x86_64/tests/test_gpt.py.toml"
    path.write_text(BROKEN[how](path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


ACTIONS = {
    "checking": lambda store: store.check(),
    "finding": lambda store: store.find(key(), CPU.slug),
    "finding on another device": lambda store: store.find(key(), H100.slug),
    "listing": lambda store: store.keys(),
    "changing": lambda store: store.change({key("test_b"): entry(6)}),
    "taking out": lambda store: store.change({}, removals=[(CPU.slug, key())]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_cannot_be_understood_is_named(root, how):
    path = broken(root, how)
    with pytest.raises(StoreError) as caught:
        Store(Folder(root)).check()
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) > len(f"{path}: ")


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_nothing_reads_or_writes_a_file_that_cannot_be_understood(root, action):
    path = broken(root, "truncated")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=re.escape(f"{path}: ")):
        action(Store(Folder(root)))
    assert path.read_bytes() == before
    assert toml_files(root).keys() == {"cpu-x86_64/tests/test_gpt.py.toml"}


def test_a_broken_file_of_another_test_file_does_not_stand_in_the_way(root):
    path = broken(root, "truncated")
    other = key(file="tests/test_other.py")
    Store(Folder(root)).change({other: entry(6)})
    assert Store(Folder(root)).find(other, CPU.slug) == entry(6)
    assert path.exists()


def test_other_toml_files_beside_the_devices_folders_are_not_baselines(root):
    Store(Folder(root)).change({key(): entry(5)})
    (root / "notes.toml").write_text("anything = 'else'\n", encoding="utf-8")
    store = Store(Folder(root))
    store.check()
    assert store.keys() == [(CPU.slug, key())]
