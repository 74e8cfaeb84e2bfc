"""Counts what a step does, in one run of its own: work that repeats exactly, so that no clock is needed to judge it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.measure.syncs import HostTensors, Syncs, is_of_higher_order, name_of, title_of
from pytest_gpumem.torch_support.private_api import flop_counter, watched_operators
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP, clear_frames
from pytest_gpumem.values.layers import layers_of
from pytest_gpumem.values.operator_counts import (
    NOWHERE,
    OperatorSite,
    Tally,
    of_layers,
    summed,
    total,
    varied_clause,
    without_places,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.explain.call_sites import OperatorSites

TALLIED = ("flops", "operators", "syncs")
"""Counts that are taken on the host, operator by operator, so that their lines can be found."""
_NOT_ATEN = ("profiler", "prim")
_MOVES_NOTHING = frozenset(
    (
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
"""Operators that are no views by their schema, and neither compute nor copy."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one step; ``None`` is not counted.

    ``flops``: floating-point operations of matrix products, convolutions and attention as ``torch.utils.flop_counter``
    counts them: a multiply-add is two. Attention counts alike in every kernel: 2 products forward, 5 backward (whose
    scores are computed again), and causal attention in full.

    ``operators``: calls of operators, ATen's and custom ones, below autograd and with composite ones taken apart, that
    compute or copy. Views and mere allocations do neither, and releases of torch differ in how many of them they make. One
    of a tensor subclass (int8 weights) is one.

    ``syncs``: how often the host waits for the device: reads of values (``.item()``, ``nonzero``, boolean masks) and copies
    between host and device, unless ``non_blocking``.

    ``launches``: kernels that CUDA launched.
    """

    flops: int | None = None
    operators: int | None = None
    syncs: int | None = None
    launches: int | None = None

    def metrics(self) -> dict[str, int]:
        """Return what was counted, by the name of the metric."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of a step, and the tallies of each by metric; ``trouble`` is a clause when it could not be counted.

    Of several steps that were counted, each count is the largest.
    """

    counts: Counts
    trouble: str | None = None
    by_operator: Mapping[str, tuple[Tally, ...]] = field(default_factory=dict)
    lowest: Mapping[str, int] = field(default_factory=dict)
    """The smallest value of each count that was not the same in all of them."""

    def notes(self) -> tuple[str, ...]:
        """Return notes on the counts, as clauses."""
        varied = (varied_clause(name, lowest, self.counts.metrics()[name]) for name, lowest in self.lowest.items())
        return (*varied, *(() if self.trouble is None else (self.trouble,)))


NOTHING_COUNTED = Counted(Counts())


MORE_COUNTED = 5
"""Further steps that are counted if steps differ: operators, and then kernels, of what happens every second to sixth time."""


def count_step(step: Callable[[], object], device: Device, *, compiled: bool = False, alike: bool = True) -> Counted:
    """Run ``step`` once to count its operators, where it is not ``compiled``, and where there are kernels once more for those.

    The tallies have no lines. Where modes watch operators, torch.compile does not run what it has compiled. An exception of the
    step becomes ``trouble``: it ran well before, and its figures stand.

    Args:
        step: Runs the step.
        device: Where it runs.
        compiled: Whether torch.compile has compiled it.
        alike: Whether it is known to repeat. If not, `MORE_COUNTED` more are counted; one that raises ends that.
    """
    modules = len(sys.modules)

    operators = dict[str, tuple[Tally, ...]] if compiled else partial(_count_operators, step, device.torch_device)

    def launches() -> dict[str, tuple[Tally, ...]]:
        kernels = device.launches(step)
        return {} if kernels is None else {"launches": summed(Tally(*kernel) for kernel in kernels.items())}

    try:
        first = operators()
        if len(sys.modules) != modules:
            # Modes import more of torch when first used, and frames of imports, in cycles, hold the step's tensors.
            gc.collect()
        counted = [{**first, **launches()}]
    except RAISED_BY_A_STEP as error:
        clear_frames(error)
        message = str(error).strip().partition("\n")[0]
        return Counted(Counts(), f"not counted: {type(error).__name__}{f': {message}' if message else ''}")
    if not alike:
        # Kernels after all operators: one of each in turn would see every second step only.
        for count in (operators, launches):
            try:
                counted += [count() for _ in range(MORE_COUNTED)]
            except RAISED_BY_A_STEP as error:
                clear_frames(error)
    return _largest(counted)


def _largest(counted: Sequence[Mapping[str, tuple[Tally, ...]]]) -> Counted:
    """Return the largest of each count of some steps, with its tallies. Not all steps have each count."""
    found: dict[str, tuple[Tally, ...]] = {}
    lowest: dict[str, int] = {}
    for name in counted[0]:
        each = [one[name] for one in counted if name in one]
        found[name] = max(each, key=total)
        least = min(map(total, each))
        if least != total(found[name]):
            lowest[name] = least
    return Counted(Counts(**{name: total(tallies) for name, tallies in found.items()}), None, found, lowest)


def located(step: Callable[[], object], device: Device, counted: Counted, places: OperatorSites) -> Counted:
    """Return ``counted`` with the lines of its tallies: ``step`` is run once more for that.

    What is not counted alike this time is left as it was, and so is everything if the step raises now.
    """
    try:
        found = _count_operators(step, device.torch_device, places)
    except RAISED_BY_A_STEP as error:
        clear_frames(error)
        return counted
    known = {
        name: found.get(name, ()) if without_places(found.get(name, ())) == tallies else tallies
        for name, tallies in counted.by_operator.items()
    }
    return replace(counted, by_operator=known)


class _Tallies:
    """Sums of what is counted, by operator and current place."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[tuple[str, OperatorSite]]] = {name: Counter() for name in TALLIED}
        self.place = NOWHERE

    def add(self, metric: str, operator: str, amount: int = 1) -> None:
        self._found[metric][operator, self.place] += amount

    def by_operator(self) -> dict[str, tuple[Tally, ...]]:
        return {
            metric: summed(Tally(operator, amount, place) for (operator, place), amount in found.items())
            for metric, found in self._found.items()
        }


def _count_operators(
    step: Callable[[], object], device: torch.device, places: OperatorSites | None = None
) -> dict[str, tuple[Tally, ...]]:
    """Return the tallies of FLOPs, operators and syncs; with their lines where ``places`` finds them."""
    import torch

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - an operator's name
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - same
    host = HostTensors(device)
    flops = flop_counter({attention: _attention_flops, backward: _attention_backward_flops})
    tallies = _Tallies()
    latest, counted = "", 0

    def count_flops() -> None:
        """Add what the latest operator added to the FLOPs, which are counted when it has run."""
        nonlocal counted
        now = flops.get_total_flops()
        if now > counted:
            tallies.add("flops", latest, now - counted)
            counted = now

    def waited(name: str) -> None:
        tallies.add("syncs", name)

    def called(name: str) -> None:
        """Add a sync of a function that is no operator."""
        count_flops()
        tallies.place = places.here() if places is not None else NOWHERE
        tallies.add("syncs", name)

    syncs = Syncs(host, waited, called)

    def ran(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        nonlocal latest
        count_flops()
        latest = title_of(operator)
        tallies.place = places.here() if places is not None else NOWHERE
        if _works(operator):
            tallies.add("operators", latest)
        syncs.see(operator, args, kwargs)
        result = run()
        host.follow((args, kwargs), result)
        return result

    with ExitStack() as stack:
        stack.enter_context(_uncompiled())
        stack.enter_context(host.remembered())
        if places is not None:
            stack.enter_context(places.watching())
        # The latest sees an operator first: flops takes composite ones apart, and what is counted is what is really run.
        stack.enter_context(watched_operators(ran))
        stack.enter_context(flops)
        stack.enter_context(syncs.of_functions())
        step()
    count_flops()
    found = tallies.by_operator()
    return (
        found if places is None else {name: of_layers(some, layers_of(places.modules)) for name, some in found.items()}
    )


def _uncompiled() -> AbstractContextManager[object]:
    """Have functions that the step itself compiles run as they were written.

    Within a mode they do so anyway, but torch then marks their code as never to be compiled, for the rest of the process.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes seconds
        return nullcontext()
    import torch

    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _works(func: Any) -> bool:
    """Return whether an operator computes or copies."""
    import torch

    if is_of_higher_order(func):
        return True
    if func.namespace in _NOT_ATEN or func.is_view or torch.Tag.inplace_view in func.tags:
        return False
    return name_of(func) not in _MOVES_NOTHING


# torch.utils.flop_counter knows the attention kernels of GPUs only.


def _attention_flops(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Return the FLOPs of scores and their product with values: query [B, H, S, D], key [B, H, L, D], value [B, H, L, E]."""
    products = _attention_products(query, key, value)
    return products["scores"] + products["values"]


def _attention_backward_flops(_gradient: Any, query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Return the FLOPs of backward: the scores again; two gradients of their size, and two of the size of the product."""
    products = _attention_products(query, key, value)
    return 3 * products["scores"] + 2 * products["values"]


def _attention_products(query: Any, key: Any, value: Any) -> dict[str, int]:
    batch, heads, length, width = query
    pairs = batch * heads * length * key[-2]
    return {"scores": 2 * pairs * width, "values": 2 * pairs * value[-1]}
