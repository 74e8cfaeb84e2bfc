"""The storage backend for a store behind a URL (``s3://bucket/baselines``, ``https://...``), which uses fsspec."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from pytest_gpumem.base.errors import BackendError, DistributedLockError
from pytest_gpumem.judging.baselines.backend import SUFFIX, Backend
from pytest_gpumem.judging.baselines.distributed_lock import DistributedLock, LockObjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""The extra of pytest-gpumem that installs the library for each URL scheme."""
_HIDDEN = "***"
_CREDENTIAL_ERRORS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError"}
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
}
_PERMISSIONS = {
    "s3": "s3:ListBucket and s3:GetObject to read, s3:PutObject and s3:DeleteObject to write",
    "gs": "storage.objects.list and get to read, create and delete to write",
}


def scheme_of(url: str) -> str:
    """Return the scheme: ``"s3"`` for ``"s3://bucket/baselines"`` and for ``"simplecache::s3://bucket/baselines"``."""
    return url.partition("://")[0].rpartition("::")[2].lower()


def without_credentials(url: str) -> str:
    """Return the URL with ``***`` instead of the user name, the password and the query, because a query may contain tokens.

    Example: ``https://ada:secret@host/x?token=1`` becomes ``https://***@host/x?***``.
    """
    for secret in _userinfo_and_query(url):
        url = url.replace(secret, _HIDDEN)
    return url


def has_credentials(url: str) -> bool:
    """Return whether the URL contains a user name or a password."""
    return "@" in _authority(url)


def reason_of(error: Exception, url: str) -> str:
    """Return why an operation on a URL failed, and the remedy if it is known, as a single line without secrets."""
    kind = EXTRAS.get(scheme_of(url))
    text = " ".join(str(error).split())
    for secret in _userinfo_and_query(url):
        for part in (secret, *secret.split(":")):
            if len(part) > 1:
                text = text.replace(part, _HIDDEN).replace(unquote(part), _HIDDEN)
    if isinstance(error, DistributedLockError):
        return text
    if isinstance(error, NotImplementedError):
        return "it can only be read"
    if isinstance(error, PermissionError) or text.startswith("Forbidden") or "Anonymous caller" in text:
        return f"access denied: {text}" + (f"; required permissions: {_PERMISSIONS[kind]}" if kind is not None else "")
    reason = f"{type(error).__name__}: {text}"
    if kind is not None and isinstance(error, ImportError):
        reason = f"another package is needed: pip install 'pytest-gpumem[{kind}]'"
    elif kind is not None and isinstance(error, FileNotFoundError):
        reason = f"there is no such bucket: {text}"
    elif kind is not None and type(error).__name__ in _CREDENTIAL_ERRORS:
        reason = f"there are no credentials: {_CREDENTIALS[kind]} ({text})"
    return reason


def _authority(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _userinfo_and_query(url: str) -> list[str]:
    """Return the parts of a URL that may be secret: the user name with the password, and the query."""
    # In a bucket, a question mark is a normal character in the name of an object. Only HTTP URLs have a query.
    query = url.partition("?")[2] if scheme_of(url) in _READ_ONLY_SCHEMES else ""
    return [secret for secret in (_authority(url).rpartition("@")[0], query) if secret]


_LOCK = ".lock"
_READ_ONLY_SCHEMES = frozenset({"http", "https"})
# With these schemes, files need no folders. A request to make a folder would make the bucket.
_SCHEMES_WITHOUT_FOLDERS = frozenset({*EXTRAS, "az", "abfs", "abfss", "memory"})
# fsspec's memory file system creates a file in two steps. So two threads in a process must not take the lock at once.
_THREAD_LOCK = threading.Lock()


class Url(Backend):
    """The storage backend for a folder behind a URL. Behind an HTTP URL, it can only be read."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._scheme = scheme_of(url)
        self.url = url if url.endswith("://") else url.rstrip("/")
        if self._scheme in EXTRAS and has_credentials(url):
            raise BackendError(
                f"{without_credentials(url)}: this URL contains credentials, which are never used and would appear in reports; "
                "set them in the environment"
            )
        with self._as_backend_errors("cannot be opened"):
            self._files, root = fsspec.core.url_to_fs(self.url)
        self._root = str(root).rstrip("/")
        self._lock: DistributedLock | None = None

    def paths(self) -> list[str]:
        with self._as_backend_errors("cannot be read"):
            # fsspec caches the list of files until the process ends, but other processes may write files.
            self._files.invalidate_cache()
            names = self._files.find(self._root) if self._scheme in EXTRAS else list(self._walk())
        return sorted(self._inside(name) for name in names if name.endswith(SUFFIX))

    def read(self, path: str) -> str | None:
        return self.read_many([path])[path]

    def read_many(self, paths: Sequence[str]) -> dict[str, str | None]:
        with self._as_backend_errors("cannot be read"):
            # Do not use cat(), because it expands brackets and stars in a path as a pattern.
            contents = self._files.cat_ranges([self._outside(path) for path in paths], None, None, on_error="return")
        return {path: self._text(path, content) for path, content in zip(paths, contents, strict=True)}

    def write(self, path: str, text: str) -> None:
        self._check_writable(path)
        with self._as_backend_errors("cannot be written", path):
            content = text.encode("utf-8")
            if self._scheme not in _SCHEMES_WITHOUT_FOLDERS:
                self._files.makedirs(self._outside(path).rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(self._outside(path), content)

    def remove(self, path: str) -> None:
        self._check_writable(path)
        with self._as_backend_errors("cannot be removed", path), suppress(FileNotFoundError):
            self._files.rm_file(self._outside(path))

    @contextmanager
    def locked(self) -> Iterator[str | None]:
        self._check_writable()
        folder = f"{self._root}/{_LOCK}"
        lock = DistributedLock(LockObjects(self._files, folder)) if _creates_once(self._files) else None
        with _THREAD_LOCK:
            with self._as_backend_errors("cannot be locked"):
                if lock is not None and self._scheme not in _SCHEMES_WITHOUT_FOLDERS:
                    self._files.makedirs(folder, exist_ok=True)
                held = lock is not None and lock.acquire()
            if lock is None or not held:
                yield f"{self._named()} has no lock, so other jobs can write at the same time: let a single job write it"
                return
            self._lock = lock
            try:
                yield None
            except BaseException:
                with suppress(Exception):
                    lock.release()
                raise
            finally:
                self._lock = None
            with self._as_backend_errors("cannot be written"):
                lock.release()

    def shown(self, path: str) -> str:
        return f"{without_credentials(self.url)}/{path}"

    def _walk(self) -> Iterator[str]:
        try:
            self._files.ls(self._root or "/", detail=False)
        except FileNotFoundError:
            if self._scheme in _READ_ONLY_SCHEMES:
                raise
            return
        for _, _, files in self._files.walk(self._root, detail=True, on_error="raise"):
            yield from (info["name"] for info in files.values())

    def _outside(self, path: str) -> str:
        """Return the path for fsspec from a path in the store."""
        return f"{self._root}/{quote(path) if self._scheme in _READ_ONLY_SCHEMES else path}"

    def _inside(self, name: str) -> str:
        path = name.removeprefix(self._root).lstrip("/")
        return unquote(path) if self._scheme in _READ_ONLY_SCHEMES else path

    def _text(self, path: str, content: object) -> str | None:
        if isinstance(content, FileNotFoundError):
            return None
        with self._as_backend_errors("cannot be read", path):
            if isinstance(content, Exception):
                raise content
            assert isinstance(content, bytes), "fsspec returns bytes or an error"
            return content.decode("utf-8")

    def _check_writable(self, path: str = "") -> None:
        if self._scheme in _READ_ONLY_SCHEMES:
            raise BackendError(f"{self._named(path)}: cannot be written: HTTP is read only")
        if self._lock is not None:
            with self._as_backend_errors("cannot be written", path):
                self._lock.renew()

    def _named(self, path: str = "") -> str:
        return self.shown(path) if path else without_credentials(self.url)

    @contextmanager
    def _as_backend_errors(self, failure: str, path: str = "") -> Iterator[None]:
        """Turn any exception into a `BackendError`. It has no cause, because the original exception may contain credentials."""
        try:
            yield
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001
            raise BackendError(f"{self._named(path)}: {failure}: {reason_of(error, self.url)}") from None


def _creates_once(files: Any) -> bool:
    """Return whether a file system can refuse to create an existing file.

    This needs a single request to the server. fsspec's default method first looks for the file and then writes, so another
    process can create the file in between.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    return isinstance(files, AsyncFileSystem) or type(files).pipe_file is not AbstractFileSystem.pipe_file
