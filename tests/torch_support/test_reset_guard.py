"""Resets of peak statistics by measured code are noticed before they happen, in whatever way torch is asked for them."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch

from pytest_gpumem.torch_support.reset_guard import before_each_reset


@pytest.fixture
def resets(monkeypatch):
    """What the statistics are told, in place of torch's own functions, which need a GPU."""
    told: list[str] = []
    monkeypatch.setattr(
        "torch._C._cuda_resetPeakMemoryStats", lambda device: told.append(f"reset cuda:{device}"), raising=False
    )
    monkeypatch.setattr(
        "torch._C._accelerator_resetPeakStats", lambda device: told.append(f"reset accelerator:{device}"), raising=False
    )
    monkeypatch.setattr("torch._C._accelerator_isAllocatorInitialized", lambda: True, raising=False)
    monkeypatch.setattr("torch.cuda.memory._get_device_index", lambda _device, **_more: 0)
    if ACCELERATOR is not None:
        monkeypatch.setattr("torch.accelerator.memory._get_device_index", lambda _device, **_more: 0)
    return told


def looked_up(name: str):
    """A call of what torch has under this name at the time of the call."""

    def reset():
        attrgetter(name)(torch)()

    return reset


WAYS = {
    "torch.cuda": looked_up("cuda.reset_peak_memory_stats"),
    "torch._C": lambda: torch._C._cuda_resetPeakMemoryStats(0),
    "a reference from before": torch.cuda.reset_peak_memory_stats,
}
ACCELERATOR = getattr(getattr(torch, "accelerator", None), "reset_peak_memory_stats", None)
if ACCELERATOR is not None:
    WAYS["torch.accelerator"] = looked_up("accelerator.reset_peak_memory_stats")
    WAYS["a reference to that of torch.accelerator from before"] = ACCELERATOR


@pytest.mark.parametrize("reset", WAYS.values(), ids=WAYS)
def test_a_reset_is_seen_before_it_happens(resets, reset):
    with before_each_reset(lambda: resets.append("seen"), "cuda"):
        reset()
    *seen, really = resets
    assert really.startswith("reset ")
    assert seen
    assert set(seen) == {"seen"}


@pytest.mark.parametrize("name", ["reset_max_memory_allocated", "reset_max_memory_cached"])
def test_the_older_names_of_a_reset_are_seen_too(resets, name):
    with before_each_reset(lambda: resets.append("seen"), "cuda"), pytest.warns(FutureWarning):
        getattr(torch.cuda, name)()
    assert resets[0] == "seen"
    assert "reset cuda:0" in resets


def test_the_resets_of_another_type_of_device_are_seen_and_those_of_cuda_are_not(monkeypatch):
    told = []
    monkeypatch.setattr("torch.xpu.reset_peak_memory_stats", lambda: told.append("reset xpu"), raising=False)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: told.append("reset cuda"))
    with before_each_reset(lambda: told.append("seen"), "xpu"):
        torch.cuda.reset_peak_memory_stats()
        torch.xpu.reset_peak_memory_stats()
    assert told == ["reset cuda", "seen", "reset xpu"]


def test_a_reset_outside_is_not_seen(resets):
    with before_each_reset(lambda: resets.append("seen"), "cuda"):
        pass
    torch.cuda.reset_peak_memory_stats()
    assert resets == ["reset cuda:0"]


def places() -> list[object]:
    return [
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.memory.reset_peak_memory_stats,
        getattr(getattr(torch, "accelerator", None), "reset_peak_memory_stats", None),
        *(getattr(torch._C, name, None) for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")),
    ]


def test_torch_is_put_back_as_it_was_after_an_error():
    before = places()
    with pytest.raises(ZeroDivisionError), before_each_reset(lambda: None, "cuda"):
        raise ZeroDivisionError
    assert places() == before


def test_one_guard_within_another_is_put_back_in_turn(resets):
    before = places()
    with before_each_reset(lambda: resets.append("outer"), "cuda"):
        with before_each_reset(lambda: resets.append("inner"), "cuda"):
            torch._C._cuda_resetPeakMemoryStats(0)
        assert resets == ["inner", "outer", "reset cuda:0"]
        resets.clear()
        torch._C._cuda_resetPeakMemoryStats(0)
        assert resets == ["outer", "reset cuda:0"]
    assert places() == before


def test_a_guarded_function_keeps_its_name_and_its_result(monkeypatch):
    def reset_peak_memory_stats(device=None):
        """Reset the peak."""
        return f"done with {device}"

    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset_peak_memory_stats)
    with before_each_reset(lambda: None, "cuda"):
        assert torch.cuda.reset_peak_memory_stats.__name__ == "reset_peak_memory_stats"
        assert torch.cuda.reset_peak_memory_stats.__doc__ == "Reset the peak."
        assert torch.cuda.reset_peak_memory_stats(device=3) == "done with 3"


def test_a_module_that_is_not_loaded_is_not_loaded_for_this(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "torch.accelerator.memory", raising=False)
    with before_each_reset(lambda: None, "cuda"):
        assert "torch.accelerator.memory" not in sys.modules
