"""Places for baselines: a server that speaks S3, on this machine, and buckets in it."""

from __future__ import annotations

import http.server
import json
import logging
import threading
import uuid

import pytest


@pytest.fixture(scope="module")
def s3_server():
    """The address of an object store, with nothing in it."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(environ, start_response):
        # moto checks a condition and writes in two steps, so it may only answer a single request at a time.
        with lock:
            return app(environ, start_response)

    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()
    thread.join()
    server.server_close()
    log.setLevel(level)


@pytest.fixture
def s3(s3_server, monkeypatch):
    """Another client of the server, for which the environment is set up as a user would."""
    import boto3

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return boto3.client("s3")


@pytest.fixture
def s3_bucket(s3):
    """The name of a bucket with nothing in it."""
    bucket = f"bucket-{uuid.uuid4().hex}"
    s3.create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture
def s3_url(s3_bucket):
    """A URL into a bucket of its own, with nothing in it."""
    return f"s3://{s3_bucket}/the baselines"


class Objects(http.server.BaseHTTPRequestHandler):
    """Objects that may only be written on a condition, with the headers of Google Cloud Storage and Azure."""

    objects: dict[str, tuple[int, bytes]]

    def do_GET(self):
        number, content = self.objects.get(self.path, (0, b"<Code>NoSuchKey</Code><Message>absent</Message>"))
        self._answer(200 if number else 404, number, content)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        number, _ = self.objects.get(self.path, (0, b""))
        wanted = (self.headers["x-goog-if-generation-match"], self.headers["If-Match"], self.headers["If-None-Match"])
        holds = {(str(number), None, None), (None, f'"{number}"', None), *([(None, None, "*")] if not number else [])}
        if wanted in holds:
            self.objects[self.path] = (number + 1, content)
            self._answer(201, number + 1, b"")
        else:
            self._answer(400 if wanted == (None, None, None) else 412, number, b"")

    def _answer(self, status, number, content):
        self.send_response(status)
        for name, value in (("ETag", f'"{number}"'), ("x-goog-generation", str(number))):
            self.send_header(name, value)
        self.send_header("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args):
        pass


@pytest.fixture
def conditional_server():
    """The address of a server with `Objects`."""
    handler = type("Handler", (Objects,), {"objects": {}})
    server = http.server.HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def gs_url(conditional_server, monkeypatch):
    """A URL into a bucket, for which Google Cloud Storage is this machine."""
    account = {"gcs_base_url": conditional_server, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    return "gs://bucket/the baselines"


@pytest.fixture
def az_url(conditional_server, monkeypatch):
    """A URL into a container, for which Azure is this machine."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", conditional_server)
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    return "abfs://container@account/the baselines"
