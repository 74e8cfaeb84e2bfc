"""Assert that memory does not grow if a step is repeated."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted, format_bytes
from pytest_gpumem.measuring.measure.growth import grows
from pytest_gpumem.measuring.measure.reading import live_everywhere
from pytest_gpumem.measuring.steps.batches import describe, number_of_steps
from pytest_gpumem.plugin.relations.growth_elsewhere import GrowthElsewhere
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.holders import holders_of
from pytest_gpumem.torch_support.reachability import alive, blocks_of, storages_of
from pytest_gpumem.torch_support.static_access import tensor_property
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from pytest_gpumem.measuring.devices.contract import Device

MOST_KINDS = 3


def assert_no_growth(
    device: Device, step: Callable[[], object], steps: int = 20, elsewhere: GrowthElsewhere | None = None
) -> bool:
    """Call a step repeatedly, and fail if memory still grows in the second half of the calls.

    If memory grows, ``step`` is called once more to find the kept tensors. A tensor that this further call replaces, such as a
    batch, does not count as kept. With several ranks there is no further call, because the other ranks may not make it.

    Example: a step that appends a ``float32[1024, 1024]`` output to a list fails with ``memory grows: 4.19 MB a step``.

    Args:
        device: The device whose memory is read after each call.
        step: The function to call.
        steps: The number of calls, at least 2.
        elsewhere: The other processes that the step uses.

    Returns:
        True if the step used memory, in this process or in another.

    Raises:
        AssertionError: Memory grows. The message names the kept tensors and their holders.
    """
    elsewhere = elsewhere or GrowthElsewhere(None)
    steps = number_of_steps(steps, 2, "growth is seen only over two steps or more")
    half = steps // 2
    with cyclic_collector_off():
        window = device.open_window()
        began = sum(live_everywhere(device))
        for _ in range(half):
            step()
        device.quiesce()
        live = [sum(live_everywhere(device))]
        # These references are weak, because a tensor that later steps replace must be freed.
        references = [weakref.ref(tensor) for tensor in _tensors(device).values()]
        kinds_before = _kinds(device)
        is_used_elsewhere = elsewhere.end_warm_up()
        for _ in range(half, steps):
            step()
            device.quiesce()
            live.append(sum(live_everywhere(device)))
            elsewhere.end()
        device.close_window(window)
        is_used = sum(peak.allocated for peak in window.everywhere) > began or {*live} != {began}
        own_text = _own_text(device, step, live, references, kinds_before) if grows(live) else ""
        text = "\n".join(filter(None, (own_text, elsewhere.text(step))))
    if text:
        raise AssertionError(text)
    return is_used or is_used_elsewhere or elsewhere.is_used


def _own_text(
    device: Device,
    step: Callable[[], object],
    live: Sequence[int],
    references: Sequence[weakref.ref[torch.Tensor]],
    kinds_before: Mapping[str, int],
) -> str:
    """Call the step once more to find the kept tensors, and return the message about memory that grows in this process.

    Args:
        device: The device whose memory grows.
        step: The function to call.
        live: The live bytes before and after each step.
        references: The tensors before these steps.
        kinds_before: The numbers of these tensors by dtype and shape.
    """
    # Read the ids of living tensors only, because Python may give a freed tensor's id to a new tensor.
    old = {id(reference()) for reference in references}
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
    return growth_text(live[-1] - min(live), len(live) - 1 - live.index(min(live)), survivors, holders)


def _of_more_kinds(device: Device, old: Collection[int], kinds_before: Mapping[str, int]) -> list[torch.Tensor]:
    """Return new tensors whose dtype and shape are now more frequent than before, for example entries in a growing cache."""
    kinds = _kinds(device)
    return [
        tensor
        for number, tensor in _tensors(device).items()
        if number not in old and kinds[describe(tensor)] > kinds_before[describe(tensor)]
    ]


def _kinds(device: Device) -> Counter[str]:
    """Count the living tensors by dtype and shape."""
    return Counter(map(describe, _tensors(device).values()))


def _by_bytes(blocks: Mapping[int, int], paths: Mapping[int, str]) -> list[str]:
    """Return the paths to the three holders that keep the most bytes, the largest first."""
    nbytes: Counter[str] = Counter()
    for address, path in paths.items():
        nbytes[path] += blocks[address] if path else 0
    return sorted(filter(None, nbytes), key=lambda path: (-nbytes[path], path))[:MOST_KINDS]


def growth_text(total: int, steps: int, tensors: list[torch.Tensor], holders: Sequence[str] = ()) -> str:
    """Return the message about growing memory: bytes per step, the kept tensors by dtype and shape, and their holders.

    Args:
        total: The bytes that all steps together keep.
        steps: The number of steps.
        tensors: The kept tensors. The message shows the three dtypes and shapes with the most bytes.
        holders: The paths to the objects that keep these tensors.
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
        f"memory grows: {format_bytes(round(total / steps))} a step, {format_bytes(total)} in {counted(steps, 'step')}"
    ]
    shown = sizes.most_common(MOST_KINDS)
    lines += [f"  kept: {counts[kind]} x {kind}, {format_bytes(size)}" for kind, size in shown]
    if len(sizes) > MOST_KINDS:
        lines.append(f"  kept: tensors of {counted(len(sizes) - len(shown), 'more kind')}")
    rest = total - sum(sizes.values())
    if rest > 0:
        lines.append(
            f"  kept: {format_bytes(rest)} more, in tensors that replace smaller tensors, or in tensors saved for backward"
        )
    lines += [f"  kept in: {holder}" for holder in holders]
    return "\n".join(lines)


def _tensors(device: Device) -> dict[int, torch.Tensor]:
    """Return the living tensors with memory on the device, by id.

    The garbage collector does not list frozen objects (``gc.freeze``), so tensors in them are not in the result.
    """
    import torch

    torch_devices = [part.torch_device for part in device.everywhere if part.is_used]
    return {
        id(value): value
        for value in alive(torch.Tensor)
        if any(True for torch_device in torch_devices for _ in storages_of([value], torch_device))
    }
