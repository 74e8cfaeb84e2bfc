"""What is wrong behind a URL, in words that help, and never with a password in them."""

from __future__ import annotations

import pytest

from pytest_gpumem.judging.baselines.url_backend import has_credentials, reason_of, scheme_of, without_credentials


class NoCredentialsError(Exception):
    """Called as botocore calls its own."""


class DefaultCredentialsError(Exception):
    """Called as google-auth calls its own."""


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
    assert has_credentials(url) == ("***@" in shown)


def test_the_kind_of_a_url_is_that_of_the_innermost():
    assert scheme_of("simplecache::S3://bucket/x") == "s3"


@pytest.mark.parametrize(
    ("url", "error", "reason"),
    [
        ("s3://b", ImportError("Install s3fs"), "another package is needed: pip install 'pytest-gpumem[s3]'"),
        ("sftp://h", ImportError("requires paramiko"), "ImportError: requires paramiko"),
        ("s3://b", FileNotFoundError("The bucket"), "there is no such bucket: The bucket"),
        ("https://h", NotImplementedError(), "it can only be read"),
        ("ftp://h", PermissionError("no"), "access denied: no"),
        ("ftp://h", OSError("two\nlines"), "OSError: two lines"),
    ],
)
def test_an_error_is_told_in_one_line_with_what_mends_it(url, error, reason):
    assert reason_of(error, url) == reason


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        (
            "s3://b",
            PermissionError("Access Denied"),
            ["access denied: Access Denied", "s3:ListBucket", "s3:DeleteObject"],
        ),
        ("gs://b", OSError("Forbidden: b\nnot yours"), ["access denied", "not yours", "storage.objects.list"]),
        ("gs://b", OSError("Anonymous caller does not have access"), ["access denied", "storage.objects.list"]),
        ("s3://b", NoCredentialsError("Unable to locate"), ["no credentials", "AWS_PROFILE", "Unable to locate"]),
        ("gs://b", DefaultCredentialsError(), ["no credentials", "GOOGLE_APPLICATION_CREDENTIALS"]),
    ],
)
def test_what_is_not_allowed_names_what_is_needed(url, error, words):
    reason = reason_of(error, url)
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://user:p%40ss@host/x", "530 login of user with p@ss, given as user:p%40ss, failed"),
        ("https://host/x?sig=abcdef", "404 for https://host/x?sig=abcdef"),
    ],
)
def test_an_error_that_repeats_the_url_does_not_tell_its_secrets(url, text):
    reason = reason_of(OSError(text), url)
    assert "***" in reason
    assert not any(secret in reason for secret in ("user", "p@ss", "p%40ss", "abcdef"))
