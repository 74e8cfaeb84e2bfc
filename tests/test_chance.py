"""The suite's own command gives the same answer each time, and another one looks further."""

from __future__ import annotations

import json

import pytest

DRAWS = """
import json
from pathlib import Path

from hypothesis import given, strategies

SEEN = {"drawn": [], "order": []}


@given(strategies.integers())
def test_draws(number):
    SEEN["drawn"].append(number)


@pytest.mark.parametrize("number", range(20))
def test_order(number):
    SEEN["order"].append(number)


@pytest.fixture(scope="session", autouse=True)
def told():
    yield
    Path("seen.json").write_text(json.dumps(SEEN))
"""


@pytest.fixture
def seen(pytester):
    pytester.makepyfile("import pytest\n" + DRAWS)

    def run(*args: str) -> dict[str, list[int]]:
        left_out = ("gpumem", "cacheprovider", "anyio", "benchmark", "memray", "xdist")
        plugins = ("-ptests.chance", *(f"-pno:{name}" for name in left_out))
        pytester.runpytest_subprocess(*plugins, *args).assert_outcomes(passed=21)
        return json.loads((pytester.path / "seen.json").read_text())

    return run


def test_every_run_has_the_same_order_and_draws_the_same_examples(seen):
    first = seen()
    assert first["order"] != sorted(first["order"])
    assert seen() == first


@pytest.mark.thorough
def test_exploring_draws_more_examples_and_others_each_time_in_an_order_of_its_own(seen, monkeypatch):
    monkeypatch.setenv("CI", "true")
    explore = ("--hypothesis-profile=explore",)
    usual, first, second = seen(), seen(*explore, "--randomly-seed=2"), seen(*explore, "--randomly-seed=3")
    assert len(first["drawn"]) >= 10 * len(usual["drawn"])
    assert first["drawn"] != second["drawn"]
    assert len({tuple(run["order"]) for run in (usual, first, second)}) == 3
