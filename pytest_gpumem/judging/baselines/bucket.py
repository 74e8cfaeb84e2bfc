"""The storage backend for a store in a bucket (``s3://bucket/baselines``), which uses obstore.

A bucket has no lock. Each write has a condition instead: the file still has the version that this process read, or still does
not exist. The server checks the condition and writes in a single step, so no write replaces an entry that this process has not
read. For example, processes A and B read a file's version 1. A writes version 2. The server refuses B's write, so B reads
version 2, adds its entries and writes version 3.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import BackendError, WriteConflictError
from pytest_gpumem.judging.baselines.backend import SUFFIX, Backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from obstore import UpdateVersion
    from obstore.store import ObjectStore, RetryConfig


EXTRA = "bucket"
"""The extra for ``pip install`` with obstore."""
_SERVICES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The storage service for each URL scheme."""
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role (AWS_PROFILE is not read)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or give the machine an identity",
}
_PERMISSIONS = {
    "s3": "s3:ListBucket and s3:GetObject to read, s3:PutObject to write",
    "gs": "storage.objects.list and get to read, create and delete to write",
    "az": "Storage Blob Data Reader to read, Storage Blob Data Contributor to write",
}
_NAME = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]*")
"""A bucket's name. Other characters could change the host that a request reaches."""
_ACCOUNT = re.compile(r"([a-z0-9]+)(\.(blob|dfs)\.core\.windows\.net)?")
# If the environment has no credentials, obstore asks the cloud's metadata server. An error with such a URL shows that
# credentials are missing.
_METADATA_REQUEST = re.compile(r"/latest/(api/token|meta-data)|/computeMetadata/|/metadata/identity/")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound")
_DENIED = re.compile(r"\b(401 Unauthorized|403 Forbidden)\b")
_HIDDEN = "***"
_RETRIES: RetryConfig = {"max_retries": 5}
_SIMULTANEOUS_READS = 16


class Bucket(Backend):
    """The storage backend for a folder in a bucket on S3, Google Cloud Storage or Azure Blob Storage.

    obstore can write on a condition, but cannot delete on a condition. So a file is removed by writing an empty file, which
    counts as absent.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0].lower()
        if scheme not in _SERVICES:
            schemes = ", ".join(f"{name}://" for name in _SERVICES)
            raise BackendError(
                f"{self.shown()}: a store is a folder or a bucket, and a bucket's URL begins with {schemes}"
            )
        self._service = _SERVICES[scheme]
        if self._service != "az" and "@" in _authority(url):
            raise BackendError(
                f"{self.shown()}: this URL contains credentials, which are never used and would appear in reports; "
                "set them in the environment"
            )
        with self._as_backend_errors("cannot be opened"):
            self._bucket = _opened(self._service, self.url)
        self._versions: dict[str, UpdateVersion | None] = {}
        self._checked: set[bool] = set()
        """The conditions that the server honoured: True for "does not exist", False for "still has this version"."""

    def paths(self) -> list[str]:
        import obstore

        with self._as_backend_errors("cannot be read"):
            files = [file for batch in obstore.list(self._bucket) for file in batch]
        return sorted(file["path"] for file in files if file["path"].endswith(SUFFIX) and file["size"])

    def read(self, path: str) -> str | None:
        import obstore

        with self._as_backend_errors("cannot be read", path):
            try:
                file = obstore.get(self._bucket, path)
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                self._versions[path] = None
                return None
            text = bytes(file.bytes()).decode("utf-8")
            self._versions[path] = _version(file.meta)
        return text or None

    def read_many(self, paths: Sequence[str]) -> dict[str, str | None]:
        with ThreadPoolExecutor(_SIMULTANEOUS_READS) as threads:
            return dict(zip(paths, threads.map(self.read, paths), strict=True))

    def write(self, path: str, text: str) -> None:
        self._replace(path, text, "cannot be written")

    def remove(self, path: str) -> None:
        self._replace(path, "", "cannot be removed")

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def shown(self, path: str = "") -> str:
        return "/".join(filter(None, (without_credentials(self.url), path)))

    def _replace(self, path: str, text: str, failure: str) -> None:
        """Write a file if it still has the version that this process last read. A file that was never read is read first."""
        if path not in self._versions:
            self.read(path)
        version = self._versions[path]
        if version is None and not text:
            return
        with self._as_backend_errors(failure, path):
            content = text.encode("utf-8")
            written = self._put(path, content, version)
            if written is None:
                raise WriteConflictError(f"{self.shown(path)}: {failure}: another process has changed the file")
            self._versions[path] = written
            # On S3, an unchanged text has an unchanged e_tag. The condition then still holds, so a check would prove nothing.
            if (version is None) not in self._checked and (version is None or written["e_tag"] != version["e_tag"]):
                self._check_refused(path, content, version)

    def _check_refused(self, path: str, content: bytes, version: UpdateVersion | None) -> None:
        """Repeat a write whose condition no longer holds. Raise `BackendError` if the server accepts it, as some servers do."""
        if self._put(path, content, version) is not None:
            raise BackendError(
                f"{self.shown(path)}: the server ignores the conditions If-Match and If-None-Match, so entries that other "
                "jobs write at the same time can be lost; use another server or a folder"
            )
        self._checked.add(version is None)

    def _put(self, path: str, content: bytes, version: UpdateVersion | None) -> UpdateVersion | None:
        """Write a file if it still has this version. Return the new version; ``None`` if the server refused the write."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            # An upload in several parts cannot have a condition, so upload the file in a single part.
            written = obstore.put(self._bucket, path, content, mode=version or "create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return None
        return _version(written)

    @contextmanager
    def _as_backend_errors(self, failure: str, path: str = "") -> Iterator[None]:
        """Turn any exception into a `BackendError` without a cause, because the original text may contain credentials."""
        try:
            yield
        except BackendError:
            raise
        except Exception as error:  # noqa: BLE001
            raise BackendError(f"{self.shown(path)}: {failure}: {reason_of(error, self._service)}") from None


def _opened(service: str, url: str) -> ObjectStore:
    """Return obstore's object for a URL. obstore reads the host and the credentials from the environment.

    Raises:
        BackendError: The URL does not name a bucket or an Azure storage account.
    """
    from obstore.store import AzureStore, GCSStore, S3Store

    authority, _, path = url.partition("://")[2].partition("/")
    prefix = path.strip("/") or None
    name, at, account = authority.partition("@")
    if _NAME.fullmatch(name) is None:
        raise BackendError(f"{without_credentials(url)}: the part after :// is not the name of a bucket")
    if service == "s3":
        return S3Store(name, prefix=prefix, retry_config=_RETRIES)
    if service == "gs":
        return GCSStore(name, prefix=prefix, retry_config=_RETRIES)
    if not at:
        return AzureStore(name, prefix=prefix, retry_config=_RETRIES)
    match = _ACCOUNT.fullmatch(account)
    if match is None:
        raise BackendError(
            f"{without_credentials(url)}: the part after @ is not an Azure storage account, like account.dfs.core.windows.net"
        )
    return AzureStore(name, prefix=prefix, account_name=match[1], retry_config=_RETRIES)


def _version(file: Mapping[str, Any]) -> UpdateVersion:
    """Return a file's version, as a condition for a write.

    S3 and Azure compare the ``e_tag``, and Google Cloud Storage compares the ``version``.
    """
    return {name: file[name] for name in ("e_tag", "version") if file[name] is not None}  # type: ignore[return-value]


def without_credentials(url: str) -> str:
    """Return the URL with ``***`` instead of the user name, the password and the query, because a query may contain tokens.

    Example: ``https://ada:secret@host/x?token=1`` becomes ``https://***@host/x?***``.
    """
    scheme = url.partition("://")[0].rpartition("::")[2].lower()
    # In a bucket, a question mark is a normal character in an object's name. Only HTTP URLs have a query.
    query = url.partition("?")[2] if scheme in ("http", "https") else ""
    for secret in filter(None, (_authority(url).rpartition("@")[0], query)):
        url = url.replace(secret, _HIDDEN)
    return url


def _authority(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def reason_of(error: Exception, service: str) -> str:
    """Return why a request failed, and the remedy if it is known, as a single line without secrets.

    Args:
        error: The exception from obstore.
        service: ``"s3"``, ``"gs"`` or ``"az"``.
    """
    from_obstore = str(error).partition("Debug source:")[0]
    text = _without_secrets(from_obstore)
    if isinstance(error, ImportError):
        return f"another package is needed: pip install 'pytest-gpumem[{EXTRA}]'"
    if _METADATA_REQUEST.search(from_obstore):
        return f"there are no credentials: {_CREDENTIALS[service]} ({text})"
    if _NO_BUCKET.search(from_obstore):
        return f"there is no such bucket: {text}"
    if _DENIED.search(from_obstore):
        return f"access denied: {text}; required permissions: {_PERMISSIONS[service]}"
    if service == "s3" and "builder error" in from_obstore:
        return f"a server with http:// needs AWS_ALLOW_HTTP=true ({text})"
    return f"{type(error).__name__}: {text}"


def _without_secrets(text: str) -> str:
    """Return an error's text as a single line. From a server's XML answer, only the message and the code are kept.

    In URLs, ``***`` replaces user names, passwords and queries.
    """
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text, re.DOTALL)
    if answer is not None:
        text = f"{answer[2]} ({answer[1]})"
    text = re.sub(r"(?<=//)[^/\s]*@", f"{_HIDDEN}@", " ".join(text.split()))
    return re.sub(r"\?\S*", f"?{_HIDDEN}", text)
