"""Messages on errors behind a URL, with the remedy and without credentials. Pure."""

from __future__ import annotations

from urllib.parse import unquote

from pytest_gpumem.baselines.distributed_lock import DistributedLockError

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""The extra of this package that installs what opens a kind of URL."""
_HIDDEN = "***"
_NO_CREDENTIALS = frozenset(
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
    """Return the scheme: ``"s3"`` of ``"s3://bucket/baselines"`` and of ``"simplecache::s3://bucket/baselines"``."""
    return url.partition("://")[0].rpartition("::")[2].lower()


def without_credentials(url: str) -> str:
    """Return the URL with ``***`` for a user's name and password, and for a query, which may have signatures and tokens."""
    shown = url
    for secret in _userinfo_and_query(url):
        shown = shown.replace(secret, _HIDDEN)
    return shown


def has_credentials(url: str) -> bool:
    """Return whether the URL contains a user's name or a password."""
    return "@" in _authority(url)


def reason_of(error: Exception, url: str) -> str:
    """Return why an operation on ``url`` failed, in one line, with the remedy where that is known."""
    kind = EXTRAS.get(scheme_of(url))
    text = _said(error, url)
    if isinstance(error, DistributedLockError):
        return text
    if isinstance(error, NotImplementedError):
        return "it can only be read"
    if isinstance(error, PermissionError) or text.startswith("Forbidden") or "Anonymous caller" in text:
        return f"access denied: {text}" + (f"; needed are {_PERMISSIONS[kind]}" if kind is not None else "")
    return (_of_object_stores(error, kind, text) if kind is not None else None) or f"{type(error).__name__}: {text}"


def _of_object_stores(error: Exception, kind: str, text: str) -> str | None:
    if isinstance(error, ImportError):
        return f"another package is needed: pip install 'pytest-gpumem[{kind}]'"
    if isinstance(error, FileNotFoundError):
        return f"there is no such bucket: {text}"
    if type(error).__name__ in _NO_CREDENTIALS:
        return f"there are no credentials: {_CREDENTIALS[kind]} ({text})"
    return None


def _said(error: Exception, url: str) -> str:
    text = " ".join(str(error).split())
    for secret in _userinfo_and_query(url):
        for part in (secret, *secret.split(":")):
            if len(part) > 1:
                text = text.replace(part, _HIDDEN).replace(unquote(part), _HIDDEN)
    return text


def _authority(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _userinfo_and_query(url: str) -> list[str]:
    """Return the secret parts of a URL."""
    found = []
    if has_credentials(url):
        found.append(_authority(url).rpartition("@")[0])
    scheme = scheme_of(url)
    query = url.partition("?")[2]
    # In the names of objects a question mark is a character like others.
    if query and scheme in ("http", "https"):
        found.append(query)
    return found
