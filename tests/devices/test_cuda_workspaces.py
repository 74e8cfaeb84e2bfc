"""Workspaces of cuBLAS over a made-up allocator: counted, and made again for the threads and streams that had them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.measuring.devices.cuda import CudaDevice
from pytest_gpumem.measuring.devices.cuda_history import HistoryEntry
from pytest_gpumem.measuring.devices.cuda_workspaces import transient_in_peak
from tests.silent_cuda import SilentCuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 33_554_432
THIS, BACKWARD, ANOTHER = "this thread", "autograd's", "another"


class Blas(SilentCuda):
    """Keeps a workspace for each thread and stream that ran a product, beside one block of ``tensors`` bytes."""

    def __init__(self, *kept: tuple[str, int]) -> None:
        self.kept = dict.fromkeys(kept)
        self.tensors = 4096
        self.peak = 0
        self.cleared = 0

    def statistics(self):
        live = self.tensors + SIZE * len(self.kept)
        self.peak = max(self.peak, live)
        return {
            "requested_bytes.all.current": live,
            "requested_bytes.all.peak": self.peak,
            "reserved_bytes.all.peak": 0,
        }

    def allocate(self, nbytes):
        self.tensors += nbytes

    def reset_peaks(self):
        self.peak = 0

    def torch_device(self):
        import torch

        return torch.device("cuda", 0)

    def clear_workspaces(self):
        self.cleared += 1
        self.kept.clear()

    def make_workspace(self, stream=0, *, in_backward=False):
        self.kept[BACKWARD if in_backward else THIS, stream] = None

    def segments(self):
        blocks = [(0, self.tensors, 0), *((n, SIZE, stream) for n, (_, stream) in enumerate(self.kept, 1))]
        return [
            {"address": n * 2**30, "stream": stream, "blocks": [{"state": "active_allocated", "size": nbytes}]}
            for n, nbytes, stream in blocks
        ]


@pytest.fixture
def opened() -> Iterator[Callable[[Blas], CudaDevice]]:
    """Opens a device, which is closed at the end."""
    with ExitStack() as stack:

        def opened(blas: Blas) -> CudaDevice:
            device = CudaDevice(blas)
            device.open()
            stack.callback(device.close)
            return device

        yield opened


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param([], id="none"),
        pytest.param([(BACKWARD, 0)], id="backward"),
        pytest.param([(THIS, 0), (BACKWARD, 0)], id="both"),
        pytest.param([(BACKWARD, 7), (THIS, 0), (THIS, 7)], id="streams"),
    ],
)
def test_those_that_are_counted_are_there_afterwards(opened, kept):
    device = opened(blas := Blas(*kept))
    window = device.open_window()
    live = device.live()
    assert device.workspaces() == (SIZE * len(kept),)
    assert {*blas.kept} == {*kept}
    assert (device.live(), device.close_window(window).allocated) == (live, live)


def test_they_are_counted_again_only_where_live_bytes_have_changed(opened):
    device = opened(blas := Blas((THIS, 0)))
    assert device.workspaces() == (SIZE,)
    cleared = blas.cleared
    assert device.workspaces() == (SIZE,)
    assert blas.cleared == cleared
    blas.tensors += 4
    assert device.workspaces() == (SIZE,)
    assert blas.cleared == cleared + 1


def test_one_of_another_thread_stays_once_a_step_has_made_it_again(opened):
    device = opened(blas := Blas((THIS, 0), (ANOTHER, 0)))
    assert device.workspaces() == (2 * SIZE,)
    # Backward's is made for it, as nobody can tell them apart; the step makes its own.
    blas.kept = dict.fromkeys([(THIS, 0), (ANOTHER, 0)])
    cleared = blas.cleared
    assert device.workspaces() == (2 * SIZE,)
    assert blas.cleared == cleared


def test_those_that_were_released_are_made_again_as_they_were_counted(opened):
    device = opened(blas := Blas((THIS, 0), (BACKWARD, 0)))
    device.workspaces()
    device.release_workspaces()
    assert device.workspaces() == (0,)
    device = opened(blas := Blas((THIS, 0), (BACKWARD, 0)))
    device.workspaces()
    device.release_workspaces()
    device.restore_workspaces()
    assert {*blas.kept} == {(THIS, 0), (BACKWARD, 0)}


# Those of one product


def history(*events: tuple[str, int, int]) -> list[HistoryEntry]:
    """Entries ``(action, address, bytes)`` in their order; a ``free`` is asked for and done at once."""
    entries = []
    for action, address, nbytes in events:
        words = ("free_requested", "free_completed") if action == "free" else (action,)
        entries += [HistoryEntry(len(entries), word, address, nbytes) for word in words]
    return entries


PRODUCT = (("alloc", 9, SIZE), ("free", 9, SIZE))


@pytest.mark.parametrize(
    ("events", "nbytes"),
    [
        pytest.param([("alloc", 1, 100), *PRODUCT, ("free", 1, 100)], SIZE, id="at the peak"),
        pytest.param([*PRODUCT, ("alloc", 1, SIZE + 100)], 0, id="below the peak"),
        pytest.param([*PRODUCT, ("alloc", 1, SIZE - 100)], 100, id="just above the rest"),
        pytest.param([("alloc", 9, SIZE), ("alloc", 1, 8), ("free", 9, SIZE)], 0, id="a tensor of that size"),
        pytest.param([("alloc", 9, SIZE - 1), ("free", 9, SIZE - 1)], 0, id="another size"),
        pytest.param([*PRODUCT, ("alloc", 9, SIZE), ("alloc", 1, 8), ("free", 9, SIZE)], 0, id="a tensor in its place"),
        pytest.param([("free", 1, SIZE), ("alloc", 2, 100), *PRODUCT], 100, id="below what was live before"),
    ],
)
def test_how_much_lower_the_peak_would_be_without_the_workspaces_of_products(events, nbytes):
    assert transient_in_peak(history(*events), {SIZE, 1_048_576}) == nbytes
