"""Assertion that the memory of a repeated step does not grow."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.explain.holders import holders_of
from pytest_gpumem.measure.growth import grows
from pytest_gpumem.measure.reading import live_everywhere
from pytest_gpumem.measurement import HELD_NOTHING, MeasuringError
from pytest_gpumem.steps.batches import describe, number_of_steps
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.reachability import alive, blocks_of, storages_of
from pytest_gpumem.torch_support.static_access import tensor_property
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP
from pytest_gpumem.units import counted, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device

MOST_KINDS = 3


def assert_no_growth(device: Device, step: Callable[[], object], steps: int = 20) -> None:
    """Call ``step`` ``steps`` times. Raises ``AssertionError`` when memory still grows in the second half of them.

    Raises `MeasuringError` when the steps held nothing on the device, and as `number_of_steps`. If memory grows, ``step`` is
    called once more: tensors replaced by this call, such as a batch, are not kept. With several ranks this call is left out:
    others may not make it.
    """
    steps = number_of_steps(steps, 2, "growth is seen over two steps or more")
    half = steps // 2
    with cyclic_collector_off():
        window = device.open_window()
        began = sum(live_everywhere(device))
        for _ in range(half):
            step()
        device.quiesce()
        live = [sum(live_everywhere(device))]
        # Weakly: a tensor that the steps replace must go.
        before = [weakref.ref(tensor) for tensor in _tensors(device).values()]
        kinds_before = _kinds(device)
        for _ in range(half, steps):
            step()
            device.quiesce()
            live.append(sum(live_everywhere(device)))
        device.close_window(window)
        if sum(peak.allocated for peak in window.everywhere) <= began and {*live} == {began}:
            raise MeasuringError(f"the step held no tensor on {device.torch_device}: {HELD_NOTHING}")
        if not grows(live):
            return
        # Only of tensors that live: an id is used again.
        old = {id(reference()) for reference in before}
        fresh = [weakref.ref(tensor) for number, tensor in _tensors(device).items() if number not in old]
        survivors: list[torch.Tensor] = []
        if not device.consensus.several:
            with suppress(*RAISED_BY_A_STEP):
                step()
            device.quiesce()
            survivors = [tensor for reference in fresh if (tensor := reference()) is not None]
        survivors = survivors or _of_more_kinds(device, old, kinds_before)
        blocks = blocks_of(survivors)
        holders = _by_bytes(blocks, holders_of(blocks))
    raise AssertionError(growth_text(live[-1] - min(live), len(live) - 1 - live.index(min(live)), survivors, holders))


def _of_more_kinds(device: Device, old: Collection[int], kinds_before: Mapping[str, int]) -> list[torch.Tensor]:
    """Return new tensors with a more frequent dtype and shape than before, for example a cache that became longer."""
    kinds = _kinds(device)
    return [
        tensor
        for number, tensor in _tensors(device).items()
        if number not in old and kinds[describe(tensor)] > kinds_before[describe(tensor)]
    ]


def _kinds(device: Device) -> Counter[str]:
    """Return the number of tensors with each dtype and shape."""
    return Counter(map(describe, _tensors(device).values()))


def _by_bytes(blocks: Mapping[int, int], paths: Mapping[int, str]) -> list[str]:
    """Return the paths to the holders that keep the most bytes, the most first."""
    kept: Counter[str] = Counter()
    for address, path in paths.items():
        kept[path] += blocks[address] if path else 0
    return sorted(filter(None, kept), key=lambda path: (-kept[path], path))[:MOST_KINDS]


def growth_text(kept: int, steps: int, tensors: list[torch.Tensor], holders: Sequence[str] = ()) -> str:
    """Return lines on the memory that ``steps`` steps kept: bytes of each, the kinds of tensors, and what keeps them.

    Args:
        kept: Bytes that they kept.
        steps: The number of steps.
        tensors: What they kept. The kinds of the most bytes are shown.
        holders: What keeps the tensors.
    """
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    storages: set[int] = set()
    for tensor in tensors:
        graph = "" if tensor_property(tensor, "grad_fn") is None else ", with the graph of its gradient"
        kind = f"{describe(tensor)}{graph}"
        counts[kind] += 1
        for address, nbytes in blocks_of([tensor]).items():
            if address not in storages:
                storages.add(address)
                sizes[kind] += nbytes
    lines = [
        f"memory grows: {format_bytes(round(kept / steps))} a step, {format_bytes(kept)} in {counted(steps, 'step')}"
    ]
    shown = sizes.most_common(MOST_KINDS)
    lines += [f"  kept: {counts[kind]} x {kind}, {format_bytes(size)}" for kind, size in shown]
    if len(sizes) > MOST_KINDS:
        lines.append(f"  kept: tensors of {counted(len(sizes) - len(shown), 'more kind')}")
    rest = kept - sum(sizes.values())
    if rest > 0:
        lines.append(
            f"  kept: {format_bytes(rest)} more: in tensors that replace smaller ones, or saved in graphs of gradients"
        )
    lines += [f"  kept in: {holder}" for holder in holders]
    return "\n".join(lines)


def _tensors(device: Device) -> dict[int, torch.Tensor]:
    """Return the tensors with memory on the device by id, as the collector sees them: without the frozen heap's."""
    import torch

    torch_devices = [one.torch_device for one in device.everywhere if one.is_used]
    return {
        id(value): value
        for value in alive(torch.Tensor)
        if any(True for one in torch_devices for _ in storages_of([value], one))
    }
