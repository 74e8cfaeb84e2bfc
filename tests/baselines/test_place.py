"""Where the store's files lie: a folder, or what fsspec opens. Nothing is half written, and mistakes are told by file."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path

import pytest

from pytest_gpumem.baselines.place import Folder, PlaceError, Url, place_of

PATH = "cpu-x86_64/tests/test_gpt.py.toml"


@pytest.fixture
def memory_url():
    """A URL into fsspec's memory, which is one for the whole process, with nothing in it."""
    import fsspec

    name = uuid.uuid4().hex
    yield f"memory://{name}/baselines"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


@pytest.fixture(params=["folder", "url"])
def place(request, tmp_path, memory_url):
    return Folder(tmp_path / "store") if request.param == "folder" else Url(memory_url)


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# Every place


def test_a_place_that_does_not_exist_yet_is_empty(place):
    assert place.paths() == []
    assert place.read(PATH) is None


def test_what_was_written_is_read_back(place):
    place.write(PATH, "text = 'é日本'\n")
    assert place.read(PATH) == "text = 'é日本'\n"
    assert place.paths() == [PATH]


def test_the_second_text_replaces_the_first_whole(place):
    place.write(PATH, "a long first text\n")
    place.write(PATH, "second\n")
    assert place.read(PATH) == "second\n"
    assert place.paths() == [PATH]


def test_paths_are_sorted_and_relative(place):
    paths = ["gpu-b/tests/test_b.py.toml", "gpu-a/tests/deep/test_a.py.toml", "gpu-a/test_c.py.toml"]
    for path in paths:
        place.write(path, "format = 1\n")
    assert place.paths() == sorted(paths)


def test_a_removed_file_is_gone_and_others_stay(place):
    other = "cpu-x86_64/tests/test_other.py.toml"
    place.write(PATH, "one\n")
    place.write(other, "two\n")
    place.remove(PATH)
    assert place.read(PATH) is None
    assert place.paths() == [other]


def test_files_that_are_no_baselines_are_not_listed(place):
    place.write(PATH, "one\n")
    place.write("README.md", "two\n")
    assert place.paths() == [PATH]


def test_a_place_can_be_locked_again_after_it_was(place):
    for number in range(2):
        with place.locked():
            place.write(PATH, f"{number}\n")
    assert place.read(PATH) == "1\n"


# Folders


def test_a_folder_shows_a_file_as_it_can_be_opened(tmp_path):
    folder = Folder(tmp_path)
    folder.write(PATH, "text\n")
    assert Path(folder.shown(PATH)).read_text(encoding="utf-8") == "text\n"


def test_the_last_file_of_a_folder_takes_empty_folders_with_it(tmp_path):
    folder = Folder(tmp_path / "store")
    folder.write(PATH, "one\n")
    folder.write("cpu-x86_64/test_top.py.toml", "two\n")
    folder.remove(PATH)
    assert not (tmp_path / "store/cpu-x86_64/tests").exists()
    assert (tmp_path / "store/cpu-x86_64").exists()
    folder.remove("cpu-x86_64/test_top.py.toml")
    assert not (tmp_path / "store/cpu-x86_64").exists()
    assert (tmp_path / "store").exists()


def test_lines_end_alike_on_every_system(tmp_path):
    Folder(tmp_path).write(PATH, "one\ntwo\n")
    assert (tmp_path / PATH).read_bytes() == b"one\ntwo\n"


@pytest.mark.skipif(os.name != "posix", reason="files have no such permissions on this system")
def test_a_file_has_the_permissions_that_the_process_gives_to_new_files(tmp_path):
    by_hand = tmp_path / "by-hand"
    by_hand.touch()
    Folder(tmp_path).write(PATH, "text\n")
    assert stat.S_IMODE((tmp_path / PATH).stat().st_mode) == stat.S_IMODE(by_hand.stat().st_mode)


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"),
    [("os", "fsync"), ("tempfile", "mkstemp"), ("pathlib.Path", "replace"), ("pathlib.Path", "chmod")],
)
def test_a_write_that_fails_leaves_the_old_text_and_no_draft(tmp_path, monkeypatch, owner, name):
    folder = Folder(tmp_path)
    folder.write(PATH, "old\n")
    with monkeypatch.context() as patch:
        patch.setattr(f"{owner}.{name}", full_disk)
        with pytest.raises(PlaceError, match="No space left on device") as caught:
            folder.write(PATH, "new\n")
    assert str(caught.value).startswith(f"{tmp_path / PATH}: cannot be written: ")
    assert (tmp_path / PATH).read_bytes() == b"old\n"
    assert files_under(tmp_path) == [PATH]


def test_a_write_that_is_interrupted_leaves_the_old_text_and_no_draft(tmp_path, monkeypatch):
    def interrupt(_descriptor):
        raise KeyboardInterrupt

    folder = Folder(tmp_path)
    folder.write(PATH, "old\n")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            folder.write(PATH, "new\n")
    assert (tmp_path / PATH).read_bytes() == b"old\n"
    assert files_under(tmp_path) == [PATH]


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path):
    (tmp_path / "cpu-x86_64").write_text("a file", encoding="utf-8")
    folder = Folder(tmp_path)
    assert folder.read(PATH) is None
    with pytest.raises(PlaceError, match="cannot be written") as caught:
        folder.write(PATH, "text\n")
    assert str(tmp_path / PATH) in str(caught.value)


def test_a_folder_in_the_way_of_a_file_is_named(tmp_path):
    (tmp_path / PATH).mkdir(parents=True)
    with pytest.raises(PlaceError, match="cannot be read") as caught:
        Folder(tmp_path).read(PATH)
    assert str(tmp_path / PATH) in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / PATH
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlaceError, match="cannot be read") as caught:
        Folder(tmp_path).read(PATH)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"\xff\xfe"


def test_a_file_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    folder = Folder(tmp_path)
    folder.write(PATH, "text\n")
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(PlaceError, match="Permission denied") as caught:
        folder.remove(PATH)
    assert str(tmp_path / PATH) in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named_when_it_is_locked(tmp_path):
    (tmp_path / "store").write_text("a file", encoding="utf-8")
    folder = Folder(tmp_path / "store")
    with pytest.raises(PlaceError, match="cannot be written"), folder.locked():
        pytest.fail("a file cannot be locked as a folder")


def test_the_lock_of_a_folder_excludes_others(tmp_path):
    from filelock import FileLock, Timeout

    with Folder(tmp_path).locked(), pytest.raises(Timeout):
        FileLock(tmp_path / ".lock").acquire(timeout=0)
    with FileLock(tmp_path / ".lock").acquire(timeout=0) as lock:
        assert lock.lock_counter == 1


def test_the_lock_of_a_folder_is_given_back_after_an_error(tmp_path):
    from filelock import FileLock

    with pytest.raises(ZeroDivisionError), Folder(tmp_path).locked():
        raise ZeroDivisionError
    with FileLock(tmp_path / ".lock").acquire(timeout=0) as lock:
        assert lock.lock_counter == 1


def test_version_control_is_told_to_leave_the_lock_out(tmp_path):
    with Folder(tmp_path).locked():
        pass
    assert (tmp_path / ".gitignore").read_text(encoding="utf-8") == "/.lock\n/.gitignore\n"


def test_a_gitignore_of_ones_own_is_left_alone(tmp_path):
    (tmp_path / ".gitignore").write_text("*.bak\n", encoding="utf-8")
    with Folder(tmp_path).locked():
        pass
    assert (tmp_path / ".gitignore").read_text(encoding="utf-8") == "*.bak\n"


# URLs


def test_a_url_shows_a_file_as_a_url(memory_url):
    assert Url(f"{memory_url}/").shown(PATH) == f"{memory_url}/{PATH}"


def test_an_unknown_kind_of_url_is_named():
    with pytest.raises(PlaceError, match=r"^nonsense://bucket: .*nonsense"):
        Url("nonsense://bucket")


def test_what_cannot_be_written_behind_a_url_is_named(memory_url, monkeypatch):
    place = Url(memory_url)
    place.write(PATH, "old\n")
    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", full_disk)
        with pytest.raises(PlaceError, match="No space left on device") as caught:
            place.write(PATH, "new\n")
    assert memory_url in str(caught.value)
    assert PATH in str(caught.value)
    assert place.read(PATH) == "old\n"


def test_a_url_that_can_only_be_read_says_so(memory_url, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise NotImplementedError

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", refuse)
    with pytest.raises(PlaceError, match="NotImplementedError"):
        Url(memory_url).write(PATH, "new\n")


def test_what_cannot_be_read_behind_a_url_is_named(memory_url, monkeypatch):
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", full_disk)
    with pytest.raises(PlaceError, match="cannot be read") as caught:
        Url(memory_url).read(PATH)
    assert f"{memory_url}/{PATH}" in str(caught.value)


# Which place


def test_a_location_with_a_scheme_is_a_url(tmp_path, memory_url):
    place = place_of(memory_url, tmp_path)
    assert isinstance(place, Url)
    assert place.url == memory_url


def test_a_relative_location_counts_from_its_base(tmp_path):
    place = place_of("gpumem-baselines", tmp_path)
    assert isinstance(place, Folder)
    assert place.root == tmp_path / "gpumem-baselines"


def test_an_absolute_location_is_taken_as_it_is(tmp_path):
    place = place_of(str(tmp_path / "elsewhere"), Path("/base"))
    assert isinstance(place, Folder)
    assert place.root == tmp_path / "elsewhere"
