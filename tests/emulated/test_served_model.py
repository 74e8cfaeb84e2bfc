"""A served model on an emulated GPU: requests repeat to the byte, and the gate finds each request's kept KV cache.

They belong to thorough runs, because `test_transformers_serve` gates a server by default.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import figures_of
from tests.emulated.processes import Processes
from tests.emulated.serving import PROGRAM, serve

LAYERS, HEADS, HEAD_SIZE, BYTES = 2, 2, 64, 2
PROMPT, TOKENS = 4, 16
REQUEST = {"prompt": list(range(PROMPT)), "tokens": TOKENS}
# The last token is generated, and never an input.
CACHE = LAYERS * 2 * HEADS * (PROMPT + TOKENS - 1) * HEAD_SIZE * BYTES
GATED = """
import json
import os
from pathlib import Path

import pytest

from tests.emulated.serving import serve


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with serve(os.environ, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def generate(server, request):
    yield lambda prompt, tokens: server.request("/generate", {"prompt": list(range(prompt)), "tokens": tokens})
    Path(f"{request.node.name}.json").write_text(json.dumps(server.request("/memory")), encoding="utf-8")


@pytest.mark.gpumem
def test_ten_requests(generate):
    for _ in range(10):
        generate(4, 16)


@pytest.mark.gpumem
def test_a_long_prompt(generate):
    generate(64, 4)
"""
TESTS = ("test_ten_requests", "test_a_long_prompt")
KEY = "call: served_model.py"

pytestmark = pytest.mark.thorough


def environment(folder, **variables):
    return Processes(folder).code("", **variables)["env"]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A healthy server without a leak, shared by the session's tests."""
    folder = tmp_path_factory.mktemp("server")
    with serve(environment(folder), folder) as started:
        yield started


def memory_after(server, requests):
    """Return the server's memory after so many further requests."""
    for _ in range(requests):
        assert server.request("/generate", REQUEST) == {"tokens": TOKENS}
    return server.request("/memory")


def test_live_memory_is_the_same_after_each_request(server):
    first = memory_after(server, 1)
    assert memory_after(server, 9) == first
    assert memory_after(server, 20) == first


def test_a_kept_kv_cache_grows_live_memory_by_its_bytes(server, tmp_path):
    clean = memory_after(server, 1)
    with serve(environment(tmp_path, LEAK=1), tmp_path) as leaking:
        leaked = [memory_after(leaking, requests)["requested"] for requests in (1, 9, 20)]
    assert leaked == [clean["requested"] + requests * CACHE for requests in (1, 10, 30)]


def test_a_server_ends_well_at_sigterm(tmp_path):
    with serve(environment(tmp_path), tmp_path) as started:
        process = started.process
    assert process.returncode == 0


@pytest.fixture
def session(processes, tmp_path):
    """Run the gate's tests, each of which sends requests to a server of a session fixture."""
    (tmp_path / "test_it.py").write_text(GATED, encoding="utf-8")

    def run(*arguments, tests=TESTS, **variables):
        names = [f"test_it.py::{test}" for test in tests]
        return processes.pytest("--junitxml=report.xml", *arguments, *names, **variables)

    return run


def recorded_peaks(session, folder):
    """Record baselines, and return each test's figures."""
    recorded = session("--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    return figures_of(folder / "report.xml")


def test_the_gate_has_the_servers_own_peaks_and_finds_its_kept_caches(session, tmp_path):
    figures = recorded_peaks(session, tmp_path)
    for test in TESTS:
        printed = json.loads((tmp_path / f"{test}.json").read_text(encoding="utf-8"))
        assert figures[test][f"{KEY}.peak_allocated"] == printed["peak_requested"]
        assert figures[test][f"{KEY}.retained"] == 0
    leaking = session("--gpumem-baseline", LEAK=1)
    assert leaking.returncode == 1, leaking.stdout
    assert figures_of(tmp_path / "report.xml")["test_ten_requests"][f"{KEY}.retained"] == 10 * CACHE
    assert f"In {KEY}: Emulated GPU memory regressed: retained 194.56 kB, baseline 0 B" in leaking.stdout
    generates = PROGRAM.read_text(encoding="utf-8").split("self.model.generate(")[0].count("\n") + 1
    rows = [line for line in leaking.stdout.splitlines() if f"served_model.py:{generates})" in line]
    assert len(rows) == 2, leaking.stdout
    assert all(re.search(r" cat +20 x bfloat16\[1, 2, 19, 64\]", row) for row in rows)
    for attribute in ("keys", "values"):
        holder = f"kept in: served_model.KEPT[...] -> DynamicCache.layers[...] -> DynamicLayer.{attribute}"
        # In the test's explanation and in the table of causes, which both tests share.
        assert f"  {holder} (97.28 kB)" in leaking.stdout
        assert re.search(rf"\d {re.escape(holder)} +2 of 2", leaking.stdout), leaking.stdout
    assert "holder not found" not in leaking.stdout


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        pytest.param((), TESTS[::-1], id="in another order"),
        pytest.param(("-n", "2"), TESTS, id="a server for each worker"),
        pytest.param((), TESTS[1:], id="alone"),
    ],
)
def test_a_servers_bytes_repeat(session, tmp_path, arguments, tests):
    figures = recorded_peaks(session, tmp_path)
    gated = session("--gpumem-baseline", *arguments, tests=tests)
    assert gated.returncode == 0, gated.stdout
    assert figures_of(tmp_path / "report.xml") == {test: figures[test] for test in tests}
