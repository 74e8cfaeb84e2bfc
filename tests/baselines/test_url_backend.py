"""Stores behind URLs: what an object store guarantees, what HTTP only reads, and what is said when nothing works."""

from __future__ import annotations

import errno
import functools
import http.server
import json
import os
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from pytest_gpumem.base.errors import BackendError
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.location import backend_of
from pytest_gpumem.judging.baselines.url_backend import Url
from tests.baselines.racing import check_that_nothing_is_lost

PATH = "cpu-x86_64/tests/test_gpt.py.toml"


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=["memory", "s3"])
def url(request):
    return request.getfixturevalue(f"{request.param}_url")


def test_a_url_shows_a_file_as_a_url(memory_url):
    assert Url(f"{memory_url}/").shown(PATH) == f"{memory_url}/{PATH}"


def test_an_unknown_kind_of_url_is_named():
    with pytest.raises(BackendError, match=r"^nonsense://bucket: .*nonsense"):
        Url("nonsense://bucket")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(BackendError, match=r"^gs://bucket/x: .* pip install 'pytest-gpumem\[gs\]'$"):
        Url("gs://bucket/x")


def test_credentials_in_the_url_of_an_object_store_are_refused_and_not_shown():
    with pytest.raises(BackendError, match=r"^s3://\*\*\*@bucket/x: .* environment$"):
        Url("s3://key:secret@bucket/x")


def test_what_cannot_be_written_behind_a_url_is_named_and_the_old_text_stays(memory_url, monkeypatch):
    backend = Url(memory_url)
    backend.write(PATH, "old\n")
    with monkeypatch.context() as patch:
        patch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", full_disk)
        with pytest.raises(BackendError, match="No space left on device") as caught:
            backend.write(PATH, "new\n")
    assert str(caught.value).startswith(f"{memory_url}/{PATH}: cannot be written: ")
    assert backend.read(PATH) == "old\n"


def test_a_url_that_can_only_be_read_says_so(memory_url, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise NotImplementedError

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", refuse)
    with pytest.raises(BackendError, match="cannot be written: it can only be read"):
        Url(memory_url).write(PATH, "new\n")


def test_what_cannot_be_read_behind_a_url_is_named(memory_url, monkeypatch):
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", full_disk)
    with pytest.raises(BackendError, match="cannot be read") as caught:
        Url(memory_url).read(PATH)
    assert f"{memory_url}/{PATH}" in str(caught.value)


def test_a_file_that_is_no_text_is_named_and_left(memory_url):
    Url(memory_url).write(PATH, "old\n")
    files = fsspec.filesystem("memory")
    files.pipe_file(f"{memory_url}/{PATH}", b"\xff\xfe")
    with pytest.raises(BackendError, match="cannot be read: UnicodeDecodeError"):
        Url(memory_url).read(PATH)
    assert files.cat_file(f"{memory_url}/{PATH}") == b"\xff\xfe"


# The lock


def lock_of(url: str) -> dict[str, object]:
    """What the one object of a store's lock says."""
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    (name,) = files.find(f"{root}/.lock")
    return json.loads(files.cat_file(name))


def test_a_lock_says_who_holds_it_and_that_it_was_released(url):
    with Url(url).locked():
        held = lock_of(url)
    assert str(os.getpid()) in held["holder"]
    assert [held["released"], lock_of(url)["released"]] == [False, True]


def test_the_lock_of_a_holder_that_died_is_taken_over(url, monkeypatch):
    backend = Url(url)
    backend.write(PATH, "old\n")
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/.lock/00000041", b'{"holder": "runner-7, process 12", "released": false}\n')
    monkeypatch.setattr("pytest_gpumem.judging.baselines.distributed_lock.LOCK_SECONDS", 0.1)
    with backend.locked() as unlocked:
        assert unlocked is None
        backend.write(PATH, "new\n")
    assert backend.read(PATH) == "new\n"


def test_a_holder_that_was_taken_for_dead_is_told_before_it_writes(url, monkeypatch):
    backend = Url(url)
    backend.write(PATH, "old\n")
    monkeypatch.setattr("pytest_gpumem.judging.baselines.distributed_lock._RENEWED_AFTER", 0.0)
    with backend.locked():
        backend._files.pipe_file(f"{backend._root}/.lock/00000041", b"{}")
        with pytest.raises(BackendError, match="the lock was lost") as caught:
            backend.write(PATH, "new\n")
        backend._files.rm_file(f"{backend._root}/.lock/00000041")
    assert str(caught.value).startswith(f"{url}/{PATH}: cannot be written: ")
    assert backend.read(PATH) == "old\n"


def test_a_place_that_cannot_be_locked_says_so_and_is_written(memory_url, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem
    from fsspec.spec import AbstractFileSystem

    backend = Url(memory_url)
    # One that overwrites what was to be created, and one that has no way of its own to create.
    for method in (lambda self, path, value, **_: self.open(path, "wb", data=value), AbstractFileSystem.pipe_file):
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", method)
        with backend.locked() as unlocked:
            backend.write(PATH, "text\n")
        assert (
            unlocked == f"{memory_url} has no lock, so other jobs can write at the same time: let a single job write it"
        )
        assert [str(name) for name in backend._files.find(backend._root)] == [f"{backend._root}/{PATH}"]


# S3


def test_processes_that_write_one_bucket_at_the_same_time_lose_nothing(s3_url):
    check_that_nothing_is_lost(s3_url, processes=2, entries=5)


def test_a_bucket_that_does_not_exist_is_named_and_not_made(s3):
    backend = Url("s3://no-such-bucket/baselines")
    for action in (backend.paths, lambda: backend.write(PATH, "text\n"), lambda: backend.locked().__enter__()):
        with pytest.raises(BackendError, match="there is no such bucket") as caught:
            action()
        assert str(caught.value).startswith("s3://no-such-bucket/baselines")
    assert not s3.exists("no-such-bucket")


def test_a_server_that_refuses_the_credentials_is_told_with_what_is_needed(s3_url, monkeypatch):
    from botocore.exceptions import ClientError

    async def denied(*_args, **_kwargs):
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}, "PutObject")

    backend = Url(s3_url)
    backend.paths()
    monkeypatch.setattr("aiobotocore.client.AioBaseClient._make_api_call", denied)
    with pytest.raises(BackendError, match=r"access denied: Access Denied; required permissions: s3:ListBucket"):
        backend.write(PATH, "text\n")


def test_without_credentials_it_is_said_how_to_give_them(s3, monkeypatch, tmp_path):
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(BackendError, match=r"cannot be read: there are no credentials: set AWS_ACCESS_KEY_ID"):
            Url("s3://bucket/x").paths()
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_two_that_create_at_once_are_told_apart(s3_url, monkeypatch):
    from botocore.exceptions import ClientError

    from pytest_gpumem.judging.baselines.distributed_lock import LockObjects

    backend = Url(s3_url)
    lock = LockObjects(backend._files, f"{backend._root}/.lock")
    assert lock.create(1, "mine")
    assert not lock.create(1, "theirs")
    create = type(backend._files)._call_s3

    async def conflict(self, method, *args, **kwargs):
        if method == "put_object" and "IfNoneMatch" in kwargs:
            code = codes.pop()
            error = ClientError({"Error": {"Code": code, "Message": "a condition"}}, "PutObject")
            raise OSError(errno.EIO, str(error)) from error
        return await create(self, method, *args, **kwargs)

    monkeypatch.setattr(type(backend._files), "_call_s3", conflict)
    codes = ["InternalError", "PreconditionFailed", "ConditionalRequestConflict"]
    # S3 says so while it is not decided yet; servers like it do not say which condition failed.
    assert not lock.create(2, "mine")
    assert not lock.create(1, "theirs")
    with pytest.raises(OSError, match="InternalError"):
        lock.create(2, "mine")


# HTTP


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args):
        pass


@pytest.fixture
def served(tmp_path):
    """A folder, and the URL that it is served under."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield tmp_path / "the store", f"http://127.0.0.1:{server.server_port}/the%20store"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_http_lists_is_read(served):
    folder, url = served
    paths = [PATH, "cpu-x86_64/a b/100%25 é#?.py.toml"]
    for path in paths:
        Folder(folder).write(path, f"{path}\n")
    backend = backend_of(url, Path())
    assert backend.paths() == sorted(paths)
    assert backend.read_many(paths) == {path: f"{path}\n" for path in paths}
    assert backend.read("cpu-x86_64/other.py.toml") is None


def test_over_http_nothing_is_written(served):
    folder, url = served
    Folder(folder).write(PATH, "old\n")
    backend = Url(url)
    for action in (
        lambda: backend.write(PATH, "new\n"),
        lambda: backend.remove(PATH),
        lambda: backend.locked().__enter__(),
    ):
        with pytest.raises(BackendError, match="HTTP is read only"):
            action()
    assert Folder(folder).read(PATH) == "old\n"


def test_a_page_that_is_not_there_is_no_empty_store(served):
    _, url = served
    with pytest.raises(BackendError, match="FileNotFoundError") as caught:
        Url(f"{url}/elsewhere").paths()
    assert str(caught.value).startswith(f"{url}/elsewhere: cannot be read: ")


def test_a_server_that_is_not_there_is_no_empty_store():
    with pytest.raises(BackendError, match=r"^http://127\.0\.0\.1:1/x: cannot be read: "):
        Url("http://127.0.0.1:1/x").paths()
