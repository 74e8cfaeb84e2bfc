"""Stores in buckets: no entry is lost to another writer, and errors name their cause without secrets."""

from __future__ import annotations

import sys
from pathlib import Path

import obstore
import pytest

from pytest_gpumem.base.errors import BackendError, IncompleteChangeError, WriteConflictError
from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.judging.baselines import store as store_module
from pytest_gpumem.judging.baselines.bucket import Bucket, reason_of, without_credentials
from pytest_gpumem.judging.baselines.location import backend_of
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.judging.gate.baseline import Baseline, Key
from tests.baselines.racing import check_that_nothing_is_lost

PATH = "cpu-x86_64/tests/test_gpt.py.toml"
CPU = Environment("cpu-x86_64", "CPU (x86_64)", {"torch": "2.13.0"})


def entry(peak: int = 5) -> Baseline:
    return Baseline(Workload("call"), CPU, {"peak_allocated": peak}, "2026-11-02")


def key(test: str = "test_a", file: str = "tests/test_gpt.py") -> Key:
    return Key(file, test, "call")


def keys(url: str) -> list[Key]:
    stored = Store(Bucket(url)).keys()
    return [one for _, one in stored]


class Interrupted(Bucket):
    """A bucket in which another process does something after each read of several files."""

    def __init__(self, url, interrupt):
        super().__init__(url)
        self._interrupt = interrupt

    def read_many(self, paths):
        texts = super().read_many(paths)
        self._interrupt()
        return texts


# Which URLs


def test_a_file_in_a_bucket_is_shown_as_a_url(s3_url):
    assert Bucket(f"{s3_url}/").shown(PATH) == f"{s3_url}/{PATH}"


@pytest.mark.parametrize(
    "url",
    [
        "nonsense://bucket", "https://s3.amazonaws.com/bucket", "memory://bucket", "simplecache::s3://bucket/x", "gcs://bucket",
        "dir::file:///srv/baselines", "sftp://host/x",
    ],
)  # fmt: skip
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(BackendError, match=r"a store is a folder or a bucket, .* s3://, ") as caught:
        backend_of(url, Path())
    assert str(caught.value).startswith(f"{url}: ")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://evil.example?/x", "s3://evil.example:80/x", "gs://../x", "gs://.a"]
)
def test_a_name_that_could_change_the_host_is_refused(url):
    with pytest.raises(BackendError, match="is not the name of a bucket"):
        Bucket(url)


def test_an_azure_url_may_name_the_account_and_no_other_host(monkeypatch):
    for host in ("theirs", "theirs.dfs.core.windows.net"):
        bucket = Bucket(f"abfss://box@{host}/a b")._bucket
        assert str(bucket) == 'AzureStore(container_name="box", account_name="theirs", prefix="a b")'
    with pytest.raises(BackendError, match=r"^abfss://\*\*\*@evil\.example/x: .* not an Azure storage account"):
        Bucket("abfss://box@evil.example/x")
    with pytest.raises(BackendError, match="Account must be specified"):
        Bucket("az://box/a b")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    assert Bucket("az://box/a b")._bucket.prefix == "a b"


def test_a_google_url_opens_a_bucket():
    assert str(Bucket("gs://box/a b")._bucket) == 'GCSStore(bucket="box", prefix="a b")'


@pytest.mark.parametrize("service", ["s3", "gs", "az"])
def test_the_extra_that_is_missing_is_named(monkeypatch, service):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(BackendError, match=rf"^{service}://bucket/x: .* pip install 'pytest-gpumem\[bucket\]'$"):
        Bucket(f"{service}://bucket/x")


def test_credentials_in_a_url_are_refused_and_not_shown():
    with pytest.raises(BackendError, match=r"^s3://\*\*\*@bucket/x: .* environment$"):
        Bucket("s3://key:secret@bucket/x")
    with pytest.raises(BackendError, match=r"^az://\*\*\*@x: .* not the name of a bucket$"):
        Bucket("az://key:secret@x")


# Conditions


@pytest.fixture(params=["s3", "gs", "az"])
def url(request):
    return request.getfixturevalue(f"{request.param}_url")


@pytest.mark.parametrize("before", [None, "old\n"])
@pytest.mark.parametrize("theirs", ["theirs\n", None])
def test_a_file_that_another_process_changed_is_not_written(url, before, theirs):
    mine, other = Bucket(url), Bucket(url)
    if before is not None:
        other.write(PATH, before)
    assert mine.read(PATH) == before
    other.write(PATH, "theirs\n")
    if theirs is None:
        other.remove(PATH)
    for action in (lambda: mine.write(PATH, "mine\n"), lambda: mine.remove(PATH) if before else mine.write(PATH, "x")):
        with pytest.raises(WriteConflictError, match="another process has changed the file") as caught:
            action()
        assert str(caught.value).startswith(f"{mine.shown(PATH)}: cannot be ")
    assert other.read(PATH) == theirs
    assert mine.read(PATH) == theirs
    mine.write(PATH, "mine\n")
    assert other.read(PATH) == "mine\n"


def test_a_removed_file_becomes_an_empty_file_that_counts_as_absent(s3, s3_bucket, s3_url):
    backend = Bucket(s3_url)
    backend.write(PATH, "old\n")
    backend.remove(PATH)
    assert s3.get_object(Bucket=s3_bucket, Key=f"the baselines/{PATH}")["Body"].read() == b""
    assert Bucket(s3_url).paths() == []
    assert Bucket(s3_url).read(PATH) is None
    Bucket(s3_url).write(PATH, "new\n")
    assert Bucket(s3_url).read(PATH) == "new\n"


def test_to_remove_an_absent_file_writes_nothing(s3, s3_bucket, s3_url):
    Bucket(s3_url).remove(PATH)
    assert "Contents" not in s3.list_objects_v2(Bucket=s3_bucket)


@pytest.mark.parametrize("before", [None, "old\n"])
def test_a_server_that_ignores_conditions_is_named(s3_url, monkeypatch, before):
    if before is not None:
        Bucket(s3_url).write(PATH, before)
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda *args, mode, **more: put(*args, mode="overwrite", **more))
    with pytest.raises(BackendError, match="the server ignores the conditions If-Match and If-None-Match"):
        Bucket(s3_url).write(PATH, "new\n")


@pytest.mark.parametrize("versioning", ["Enabled", "Suspended"])
def test_a_text_that_is_written_again_is_no_sign_of_ignored_conditions(s3, s3_bucket, s3_url, versioning):
    s3.put_bucket_versioning(Bucket=s3_bucket, VersioningConfiguration={"Status": versioning})
    for text in ("same\n", "same\n", "other\n"):
        Bucket(s3_url).write(PATH, text)
    assert Bucket(s3_url).read(PATH) == "other\n"


def test_a_large_file_is_written_on_a_condition_as_well(s3_url):
    mine, other = Bucket(s3_url), Bucket(s3_url)
    large = "x" * 6_000_000
    assert mine.read(PATH) is None
    other.write(PATH, large)
    with pytest.raises(WriteConflictError):
        mine.write(PATH, large + "mine")
    assert len(mine.read(PATH)) == 6_000_000


# Changes


def test_a_store_in_a_bucket_works_like_a_folder(s3_url):
    Store(Bucket(s3_url)).change({key("test_a"): entry(5), key("test_b", "b.py"): entry(6)})
    Store(Bucket(s3_url)).change({key("test_a"): entry(7)}, removals=[(CPU.slug, key("test_b", "b.py"))])
    store = Store(Bucket(s3_url))
    store.check()
    assert store.keys() == [(CPU.slug, key("test_a"))]
    assert store.find(key("test_a"), CPU.slug) == entry(7)


@pytest.mark.parametrize("before", [{}, {key("test_old"): entry()}], ids=["created", "changed"])
def test_a_change_is_applied_again_to_what_another_process_wrote_in_between(url, before):
    Store(Bucket(url)).change(before)
    names = iter(["test_x", "test_y"])

    def interrupt():
        for name in [*names][:2]:
            Store(Bucket(url)).change({key(name): entry()})

    store = Store(Interrupted(url, interrupt))
    store.change({key("test_mine"): entry()}, [(CPU.slug, key("test_old"))])
    for stored in (store, Store(Bucket(url))):
        assert stored.names(CPU.slug, "tests/test_gpt.py", "test_old") == []
        for name in ("test_mine", "test_x", "test_y"):
            assert stored.find(key(name), CPU.slug) == entry()


def test_the_last_entry_is_removed_without_losing_what_another_process_adds(s3_url):
    Store(Bucket(s3_url)).change({key("test_old"): entry()})
    others = iter([lambda: Store(Bucket(s3_url)).change({key("test_new"): entry()})])
    Store(Interrupted(s3_url, lambda: [act() for act in others])).change({}, [(CPU.slug, key("test_old"))])
    assert keys(s3_url) == [key("test_new")]


def test_a_file_that_never_stops_changing_ends_the_change_and_is_named(s3_url, monkeypatch):
    monkeypatch.setattr(store_module, "_FIRST_PAUSE", 0)
    other = Bucket(s3_url)
    rounds = []

    def interrupt():
        rounds.append(1)
        Store(other).change({key(f"test_{len(rounds)}", "tests/test_z.py"): entry()})

    with pytest.raises(
        IncompleteChangeError, match="other jobs changed this file during each of 30 attempts"
    ) as caught:
        Store(Interrupted(s3_url, interrupt)).change({key(): entry(), key("test_z", "tests/test_z.py"): entry()})
    assert str(caught.value).startswith(f"{s3_url}/cpu-x86_64/tests/test_z.py.toml: ")
    assert (caught.value.written, caught.value.unwritten_tests) == (1, {("tests/test_z.py", "test_z")})
    assert key() in keys(s3_url)
    assert key("test_z", "tests/test_z.py") not in keys(s3_url)


def test_a_file_that_another_process_breaks_during_a_change_is_named_and_left(s3_url):
    breaks = iter([lambda: Bucket(s3_url).write(PATH, "format = 99\n")])
    with pytest.raises(IncompleteChangeError, match="format is 99") as caught:
        Store(Interrupted(s3_url, lambda: [act() for act in breaks])).change({key(): entry()})
    assert (caught.value.written, caught.value.unwritten_tests) == (0, {("tests/test_gpt.py", "test_a")})
    assert Bucket(s3_url).read(PATH) == "format = 99\n"


def test_a_failure_in_the_middle_of_a_change_says_what_was_written(s3_url, monkeypatch):
    Store(Bucket(s3_url)).change({key(file=f"{name}.py"): entry(1) for name in "abc"})
    put = obstore.put

    def full(store, path, *args, **more):
        if "b.py" in path:
            raise obstore.exceptions.GenericError("Server returned non-2xx status code: 507 Insufficient Storage: full")
        return put(store, path, *args, **more)

    monkeypatch.setattr(obstore, "put", full)
    with pytest.raises(IncompleteChangeError, match="507 Insufficient Storage") as caught:
        Store(Bucket(s3_url)).change({key(file=f"{name}.py"): entry(2) for name in "abc"})
    assert str(caught.value).startswith(f"{s3_url}/cpu-x86_64/b.py.toml: cannot be written: ")
    assert (caught.value.written, caught.value.unwritten_tests) == (1, {("b.py", "test_a"), ("c.py", "test_a")})
    store = Store(Bucket(s3_url))
    peaks = [store.find(key(file=f"{name}.py"), CPU.slug).metrics["peak_allocated"] for name in "abc"]
    assert peaks == [2, 1, 1]


def test_processes_that_write_one_bucket_at_the_same_time_lose_nothing(s3_url):
    check_that_nothing_is_lost(s3_url, processes=2, entries=20)


# Errors


def test_a_file_that_is_no_text_is_named_and_left(s3, s3_bucket, s3_url):
    name = f"the baselines/{PATH}"
    s3.put_object(Bucket=s3_bucket, Key=name, Body=b"\xff\xfe")
    for action in (Bucket(s3_url).read, lambda path: Bucket(s3_url).write(path, "new\n")):
        with pytest.raises(BackendError, match="cannot be read: UnicodeDecodeError"):
            action(PATH)
    assert s3.get_object(Bucket=s3_bucket, Key=name)["Body"].read() == b"\xff\xfe"


def test_a_bucket_that_does_not_exist_is_named_and_not_made(s3):
    backend = Bucket("s3://no-such-bucket/baselines")
    for action in (backend.paths, lambda: backend.read(PATH), lambda: backend.write(PATH, "text\n")):
        with pytest.raises(BackendError, match="there is no such bucket") as caught:
            action()
        assert str(caught.value).startswith("s3://no-such-bucket/baselines")
    assert "no-such-bucket" not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]


def test_wrong_credentials_are_named_with_the_needed_permissions_and_no_secret(s3_url):
    from moto.core.authorization import enable_iam_authentication

    backend = Bucket(s3_url)
    with enable_iam_authentication():
        for action in (backend.paths, lambda: backend.read(PATH), lambda: backend.write(PATH, "text\n")):
            with pytest.raises(
                BackendError, match=r"access denied: .* \(InvalidAccessKeyId\); required .* s3:ListBucket"
            ) as caught:
                action()
            assert "testing" not in str(caught.value)
            assert "\n" not in str(caught.value)
    assert backend.read(PATH) is None


@pytest.mark.usefixtures("s3")
def test_without_credentials_it_is_said_how_to_give_them(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(BackendError, match=r"cannot be read: there are no credentials: set AWS_ACCESS_KEY_ID"):
        Bucket("s3://bucket/x").paths()


@pytest.mark.usefixtures("s3")
def test_a_server_that_is_not_there_is_no_empty_store(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@127.0.0.1:1")
    for action in (Bucket.paths, lambda bucket: bucket.read(PATH)):
        with pytest.raises(
            BackendError, match=r"^s3://bucket/x.*: cannot be read: GenericError: .*127\.0\.0\.1:1/"
        ) as caught:
            action(Bucket("s3://bucket/x"))
        assert "hunter2" not in str(caught.value)


def test_a_server_without_encryption_has_to_be_allowed(s3_url, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(BackendError, match="a server with http:// needs AWS_ALLOW_HTTP=true"):
        Bucket(s3_url).paths()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a@b?c", "s3://bucket/a@b?c"),
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        ("ftp://user:p@ss@host", "ftp://***@host"),
        ("https://host/x?sig=abc", "https://host/x?***"),
        ("simplecache::https://user:pw@host/x?sig=abc", "simplecache::https://***@host/x?***"),
        ("me@home/it?", "me@home/it?"),
    ],
)
def test_a_url_is_shown_without_what_only_its_owner_may_know(url, shown):
    assert without_credentials(url) == shown


@pytest.mark.parametrize(
    ("service", "text", "reason"),
    [
        ("az", "GET https://a.blob.core.windows.net/c/x?sv=1&sig=SECRET in 1ms\n\nDebug source:\nSECRET", "https://a.blob.core.windows.net/c/x?*** in"),
        ("s3", "GET https://user:SECRET@host/x failed", "https://***@host/x failed"),
        ("gs", "GET http://169.254.169.254/computeMetadata/v1/token - 403 Forbidden", "there are no credentials: set GOOGLE_"),
        ("az", "GET http://169.254.169.254/metadata/identity/oauth2/token", "there are no credentials: set AZURE_"),
        ("az", "404 Not Found: <Code>ContainerNotFound</Code>", "there is no such bucket: "),
        ("gs", "403 Forbidden: <Code>AccessDenied</Code><Message>not\nyours</Message><Token>SECRET</Token>", "access denied: not yours (AccessDenied); required permissions: storage.objects.list"),
        ("az", "status code: 401 Unauthorized: no", "access denied: status code: 401 Unauthorized: no; required permissions: Storage Blob"),
    ],
)  # fmt: skip
def test_a_reason_is_one_line_with_the_remedy_and_without_secrets(service, text, reason):
    told = reason_of(obstore.exceptions.GenericError(text), service)
    assert reason in told
    assert "SECRET" not in told
    assert "\n" not in told
