"""``--gpumem-pack`` without a GPU: what is known of a test's peak, in which order tests run, and what is told where none share."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, Key
from pytest_gpumem.plugin.config.selection import MeasuredTest
from pytest_gpumem.plugin.session import packing
from pytest_gpumem.plugin.session.packing import GpuShare, Packed, Planner, largest_first, needed_bytes

GB, MIB = 10**9, 2**20


def baseline(**metrics):
    return Baseline(Workload("measure"), Environment("nvidia", "NVIDIA"), metrics, "2026-11-23")


@pytest.mark.parametrize(
    ("limits", "stored", "wanted"),
    [
        ({}, [], None),
        ({"retained": 5}, [], None),
        # 2 %, or two segments of 20 MiB.
        ({}, [baseline(peak_allocated=3 * GB, peak_reserved=4 * GB)], 4.08 * GB),
        ({}, [baseline(peak_allocated=90 * MIB, peak_reserved=100 * MIB)], 140 * MIB),
        ({}, [baseline(peak_allocated=3 * GB)], 3.06 * GB),
        ({}, [baseline(peak_reserved=2 * GB), baseline(peak_reserved=4 * GB), baseline(peak_reserved=GB)], 4.08 * GB),
        ({"peak_allocated": 5 * GB}, [], 5.1 * GB),
        ({"peak_allocated": 5 * GB, "peak_reserved": 6 * GB}, [], 6.12 * GB),
        # A baseline was measured, a budget may be generous.
        ({"peak_allocated": 50 * GB}, [baseline(peak_reserved=4 * GB)], 4.08 * GB),
    ],
)
def test_what_a_test_takes_is_its_largest_baseline_or_its_budget_with_the_tolerance(limits, stored, wanted):
    assert needed_bytes(Budget(limits=limits), stored) == wanted


@given(st.lists(st.one_of(st.just("needs none"), st.none(), st.integers(0, 5)), max_size=12))
def test_those_that_share_come_largest_first_and_those_that_take_all_last(wants):
    items = [object() for _ in wants]
    shares = {
        item: GpuShare(None, want, largest_need=want)
        for item, want in zip(items, wants, strict=True)
        if want != "needs none"
    }
    ordered = largest_first(items, shares)
    assert sorted(map(id, ordered)) == sorted(map(id, items))

    def kind(item):
        return "needs none" if item not in shares else "all" if shares[item].needed is None else "shares"

    assert [name for name, _ in itertools.groupby(ordered, kind)] == [
        name for name in ("shares", "needs none", "all") if name in map(kind, items)
    ]
    sizes = [shares[item].needed for item in ordered if kind(item) == "shares"]
    assert sizes == sorted(sizes, reverse=True)
    for group in ("needs none", "all", *set(sizes)):
        same = [item for item in ordered if group in (kind(item), getattr(shares.get(item), "needed", None))]
        assert same == [item for item in items if item in same]


def test_workers_with_gpus_of_two_models_have_one_order(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "environment_of", lambda device, _: SimpleNamespace(slug=device.name))
    store = Store(Folder(tmp_path))
    sizes = {("a", "small"): 1, ("a", "large"): 8, ("b", "small"): 4, ("c", "large"): 6}
    for (test, slug), size in sizes.items():
        entry = Baseline(
            Workload("measure"), Environment(slug, slug.upper()), {"peak_reserved": size * GB}, "2026-11-23"
        )
        store.change({Key("test_it.py", test, "measure"): entry})
    measured = {test: MeasuredTest("test_it.py", test, Budget(), has_fixture=False) for test in "dcba"}

    def order(slug):
        memory = SimpleNamespace(ledger=SimpleNamespace(enter=lambda _: None), now=lambda: SimpleNamespace(held=0))
        devices = SimpleNamespace(get=lambda _: SimpleNamespace(name=slug, shared_memory=memory))
        settings = SimpleNamespace(device="cuda", compared_slug=lambda slug: slug)
        return largest_first(list(measured), Planner(None, settings, devices, store).shares(measured))

    assert order("small") == order("large") == ["a", "c", "b", "d"]


def test_workers_of_a_session_tell_one_line():
    alone = (("timed", "test_a.py::test_a"), ("with unknown peak", "test_a.py::test_b"))
    first, second = Packed(38, alone, frozenset({"test_c"})), Packed(38, alone, frozenset({"test_d"}))
    assert first.merged(second) == second.merged(first)
    assert first.merged(second).line() == (
        "packing: 38 measured tests shared the GPU; 2 had the whole GPU (1 timed, 1 with unknown peak; the first is "
        "test_a.py::test_a); 2 ran again with the whole GPU, because they exceeded their known peak: test_c, test_d"
    )


SUITE = """
@pytest.mark.gpumem
@pytest.mark.parametrize("size", [1, 2])
def test_it(size):
    torch.ones(size * 1000)
"""


def test_on_the_cpu_the_option_is_an_error(project):
    project.write(SUITE)
    result = project.run("--gpumem-pack")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--gpumem-pack lets tests share the memory of a GPU, and this session measures on the CPU: leave it out*"]
    )


@pytest.mark.parametrize(
    "workers", [pytest.param([], id="alone"), pytest.param(["-n1"], id="workers", marks=pytest.mark.thorough)]
)
def test_in_the_settings_it_is_for_sessions_on_a_gpu_and_others_say_so(project, workers):
    project.settings("[tool.gpumem]\npack = true\n")
    project.write(SUITE)
    result = project.run(*workers)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*packing: tests on the cpu device do not share a GPU"])
