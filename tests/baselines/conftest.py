"""Places for baselines: a server that speaks S3, on this machine, and buckets in it."""

from __future__ import annotations

import logging
import uuid

import pytest


@pytest.fixture(scope="module")
def s3_server():
    """The address of an object store, with nothing in it."""
    import s3fs
    from moto.server import ThreadedMotoServer

    # fsspec keeps what it has made for as long as the process lives, and the server that it was made for.
    s3fs.S3FileSystem.clear_instance_cache()
    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
    log.setLevel(level)


@pytest.fixture
def s3(s3_server, monkeypatch):
    """What opens S3, as a user would set it up."""
    import s3fs

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return s3fs.S3FileSystem()


@pytest.fixture
def s3_url(s3):
    """A URL into a bucket of its own, with nothing in it."""
    bucket = f"bucket-{uuid.uuid4().hex}"
    s3.mkdir(bucket)
    return f"s3://{bucket}/the baselines"


@pytest.fixture
def memory_url():
    """A URL into fsspec's memory, which is one for the whole process, with nothing in it."""
    import fsspec

    name = uuid.uuid4().hex
    yield f"memory://{name}/baselines"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)
