"""The store in a folder or a bucket: a file is written whole or not at all, and a message names a broken file."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

from pytest_gpumem.base.errors import BackendError
from pytest_gpumem.judging.baselines.bucket import Bucket
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.location import backend_of

PATH = "cpu-x86_64/tests/test_gpt.py.toml"


@pytest.fixture(params=["folder", "file", "s3"])
def location(request, tmp_path):
    """Where a store may be, with nothing there yet."""
    if request.param == "folder":
        return str(tmp_path / "the store")
    if request.param == "file":
        return f"file://{quote(str(tmp_path / 'the store'))}"
    return request.getfixturevalue("s3_url")


@pytest.fixture
def backend(location, tmp_path):
    return backend_of(location, tmp_path)


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# Every place


def test_a_place_that_does_not_exist_yet_is_empty(backend):
    assert backend.paths() == []
    assert backend.read(PATH) is None


def test_what_was_written_is_read_back(backend):
    backend.write(PATH, "text = 'é日本'\n")
    assert backend.read(PATH) == "text = 'é日本'\n"
    assert backend.paths() == [PATH]


def test_the_second_text_replaces_the_first_whole(backend):
    backend.write(PATH, "a long first text\n")
    backend.write(PATH, "second\n")
    assert backend.read(PATH) == "second\n"
    assert backend.paths() == [PATH]


def test_files_that_are_no_baselines_are_not_listed(backend):
    backend.write(PATH, "one\n")
    backend.write("README.md", "two\n")
    assert backend.paths() == [PATH]


def test_the_store_is_listed_where_its_place_is_the_top_of_what_there_is(s3_bucket):
    for url in (f"s3://{s3_bucket}", f"s3://{s3_bucket}/"):
        backend_of(url, Path()).write(PATH, "one\n")
        assert backend_of(url, Path()).paths() == [PATH]


HOSTILE = [
    "cpu-x86_64/a test/test it.py.toml",
    "cpu-x86_64/tests/test_é日本.py.toml",
    "cpu-x86_64/100%25/%20.py.toml",
    "cpu-x86_64/#1/a?b=c&d.py.toml",
    "cpu-x86_64/[x]*/{a,b}.py.toml",
    "cpu-x86_64/__up__/__up__/test_gpt.py.toml",
    "cpu-x86_64/\u202e'\"<b>;~/$HOME.py.toml",
    "cpu-x86_64/.hidden/..toml",
]


@pytest.mark.skipif(os.name == "nt", reason="files have no such names on this system")
def test_any_name_is_written_listed_read_and_removed(backend):
    for number, path in enumerate(HOSTILE):
        backend.write(path, f"{number}\n")
    assert backend.paths() == sorted(HOSTILE)
    assert list(backend.read_many(HOSTILE).items()) == [(path, f"{number}\n") for number, path in enumerate(HOSTILE)]
    for path in HOSTILE[:-1]:
        backend.remove(path)
    assert backend.paths() == [HOSTILE[-1]]


def test_many_files_are_read_with_those_that_are_not_there(backend):
    backend.write(PATH, "one\n")
    missing = "cpu-x86_64/tests/test_missing.py.toml"
    assert backend.read_many([missing, PATH]) == {missing: None, PATH: "one\n"}
    assert backend.read_many([]) == {}


def test_what_another_session_of_this_process_wrote_is_seen(location, tmp_path):
    mine, theirs = backend_of(location, tmp_path), backend_of(location, tmp_path)
    assert mine.paths() == theirs.paths() == []
    with theirs.locked():
        theirs.write(PATH, "theirs\n")
    assert mine.paths() == [PATH]
    assert mine.read(PATH) == "theirs\n"
    with mine.locked():
        mine.remove(PATH)
    assert theirs.paths() == []
    assert theirs.read(PATH) is None


@pytest.mark.parametrize("location", ["folder", "file"], indirect=True)
def test_nobody_is_let_in_beside_another(backend, location, tmp_path):
    def add():
        mine = backend_of(location, tmp_path)
        for _ in range(3):
            with mine.locked():
                mine.write(PATH, f"{int(mine.read(PATH)) + 1}\n")

    backend.write(PATH, "0\n")
    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.read(PATH) == "9\n"


def test_the_lock_of_every_place_is_given_back_after_an_error(backend):
    with pytest.raises(ZeroDivisionError), backend.locked():
        raise ZeroDivisionError
    with backend.locked():
        backend.write(PATH, "one\n")


def test_text_that_no_file_can_hold_is_named_and_the_old_text_stays(backend):
    backend.write(PATH, "old\n")
    with pytest.raises(BackendError, match="cannot be written") as caught:
        backend.write(PATH, "test_it[\udcff]\n")
    assert str(caught.value).startswith(backend.shown(PATH))
    assert backend.read(PATH) == "old\n"


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


def test_writing_a_file_leaves_the_process_umask_alone(tmp_path, monkeypatch):
    """While it was 0, files of other threads could be written by everybody."""
    monkeypatch.setattr("os.umask", lambda mask: pytest.fail("the umask is the whole process's"))
    Folder(tmp_path).write(PATH, "text\n")
    assert (tmp_path / PATH).read_text(encoding="utf-8") == "text\n"


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"),
    [("os", "fsync"), ("os", "replace")],
)
def test_a_write_that_fails_leaves_the_old_text_and_no_draft(tmp_path, monkeypatch, owner, name):
    folder = Folder(tmp_path)
    folder.write(PATH, "old\n")
    with monkeypatch.context() as patch:
        patch.setattr(f"{owner}.{name}", full_disk)
        with pytest.raises(BackendError, match="No space left on device") as caught:
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
    with pytest.raises(BackendError, match="cannot be written") as caught:
        folder.write(PATH, "text\n")
    assert str(tmp_path / PATH) in str(caught.value)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.write_bytes(b"\xff\xfe")], ids=["a folder", "no text"])
def test_what_is_no_file_of_text_is_named_and_left(tmp_path, make):
    path = tmp_path / PATH
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.raises(BackendError, match="cannot be read") as caught:
        Folder(tmp_path).read(PATH)
    assert str(path) in str(caught.value)
    assert path.is_dir() or path.read_bytes() == b"\xff\xfe"


def test_a_file_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    folder = Folder(tmp_path)
    folder.write(PATH, "text\n")
    monkeypatch.setattr("os.unlink", refuse)
    with pytest.raises(BackendError, match="Permission denied") as caught:
        folder.remove(PATH)
    assert str(tmp_path / PATH) in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named_when_it_is_locked(tmp_path):
    (tmp_path / "store").write_text("a file", encoding="utf-8")
    folder = Folder(tmp_path / "store")
    with pytest.raises(BackendError, match="cannot be written"), folder.locked():
        pytest.fail("a file cannot be locked as a folder")


IGNORED = {"/.lock", "/.gitignore", ".*.draft"}


@pytest.mark.parametrize(
    "before", [None, "/.lock\n/.gitignore\n", "/.gitignore\n*.bak\n"], ids=["none", "older", "longer"]
)
def test_version_control_is_told_to_leave_lock_and_drafts_out(tmp_path, before):
    ignored = tmp_path / ".gitignore"
    if before is not None:
        ignored.write_text(before, encoding="utf-8")
    for _ in range(2):
        with Folder(tmp_path).locked():
            pass
        lines = ignored.read_text(encoding="utf-8").splitlines()
        assert sorted(lines) == sorted({*IGNORED, *(before or "").splitlines()})


KILLED_WHILE_IT_WRITES = """
import os
import signal
import sys
from pathlib import Path

from pytest_gpumem.judging.baselines.folder import Folder

os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
with Folder(Path(sys.argv[1])).locked():
    Folder(Path(sys.argv[1])).write("cpu-x86_64/tests/test_gpt.py.toml", "half of it")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_draft_of_a_killed_writer_is_not_committed_and_goes_with_the_next_one(tmp_path):
    # Its .gitignore is there: the killed writer must not be the one to make it.
    with Folder(tmp_path).locked():
        pass
    command = [sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (draft,) = [path for path in tmp_path.rglob("*") if path.parent.name == "tests"]
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.run(status, cwd=tmp_path, check=True, capture_output=True).stdout == b""
    with Folder(tmp_path).locked():
        assert not draft.exists()


def test_drafts_are_removed_only_by_who_holds_the_lock(tmp_path, monkeypatch):
    from filelock import FileLock

    acquire, there = FileLock.acquire, []
    draft = tmp_path / "cpu-x86_64" / ".test_gpt.py.toml.abc.draft"
    draft.parent.mkdir()
    draft.touch()

    def acquired(self):
        # Until now it may be that of a writer who has the lock.
        held = acquire(self)
        there.append(draft.exists())
        return held

    monkeypatch.setattr(FileLock, "acquire", acquired)
    with Folder(tmp_path).locked():
        assert not draft.exists()
    assert there == [True]


def test_what_only_looks_like_a_draft_stays(tmp_path):
    others = [tmp_path / "notes.draft", tmp_path / ".notes", tmp_path / "cpu" / "test_gpt.py.toml"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.touch()
    with Folder(tmp_path).locked():
        pass
    assert all(other.exists() for other in others)


def test_a_gitignore_of_ones_own_is_left_alone(tmp_path):
    (tmp_path / ".gitignore").write_text("*.bak\n", encoding="utf-8")
    with Folder(tmp_path).locked():
        pass
    assert (tmp_path / ".gitignore").read_text(encoding="utf-8") == "*.bak\n"


# Which place


def test_a_location_with_a_scheme_is_a_url(tmp_path):
    backend = backend_of("s3://somewhere/baselines", tmp_path)
    assert isinstance(backend, Bucket)
    assert backend.url == "s3://somewhere/baselines"


@pytest.mark.parametrize(
    ("location", "folder"),
    [
        ("gpumem-baselines", "/base/gpumem-baselines"),
        ("/elsewhere/it", "/elsewhere/it"),
        ("~/it", "/home/somebody/it"),
        ("C://it", "/base/C:/it"),
        ("C:\\it", "/base/C:\\it"),
        ("a:b@c", "/base/a:b@c"),
        ("file:///elsewhere/it", "/elsewhere/it"),
        ("FILE://localhost/elsewhere/a%20b", "/elsewhere/a b"),
        ("local:///elsewhere/é?#", "/elsewhere/é?#"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="paths of POSIX")
def test_other_locations_are_folders(monkeypatch, location, folder):
    monkeypatch.setenv("HOME", "/home/somebody")
    backend = backend_of(location, Path("/base"))
    assert isinstance(backend, Folder)
    assert Path("/base") / backend.root == Path(folder)


@pytest.mark.parametrize("location", ["file://relative/it", "file://", "file://~/it"])
def test_a_folder_whose_url_is_not_whole_is_refused(location):
    with pytest.raises(BackendError, match=r"file:///srv/gpumem-baselines") as caught:
        backend_of(location, Path("/base"))
    assert str(caught.value).startswith(f"{location}: ")


def test_a_home_that_nobody_has_is_named():
    with pytest.raises(BackendError, match=r"^~nobody-is-called-this/it: "):
        backend_of("~nobody-is-called-this/it", Path("/base"))
