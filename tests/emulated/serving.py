"""A server in a process of its own, as a test's fixture starts it: the program, its address, and requests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROGRAM = Path(__file__).with_name("served_model.py")
HEALTH_SECONDS = 120.0


@dataclass(frozen=True)
class Server:
    """A running server. ``url`` is such as ``http://127.0.0.1:8000``."""

    process: subprocess.Popen[str]
    url: str

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a GET request, or a POST request with a ``body``, and return the JSON answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as answer:
            return json.load(answer)

    def wait_for_health(self) -> None:
        """Wait until ``/health`` answers. Raises if the server ends before."""
        until = time.monotonic() + HEALTH_SECONDS
        while True:
            try:
                self.request("/health")
            except OSError:
                assert self.process.poll() is None, f"the server ended with exit status {self.process.returncode}"
                assert time.monotonic() < until, f"the server was not healthy after {HEALTH_SECONDS:g} seconds"
                time.sleep(0.1)
            else:
                return


@contextmanager
def serve(environment: Mapping[str, str], folder: Path) -> Iterator[Server]:
    """Start `PROGRAM` with an environment, wait until it is healthy, and end it by SIGTERM. Its log is in ``folder``."""
    command = [sys.executable, str(PROGRAM), "0"]
    with (
        (folder / "server.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(command, env={**environment}, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        server = Server(process, process.stdout.readline().strip())
        try:
            server.wait_for_health()
            yield server
        finally:
            process.terminate()
            process.wait(30)
