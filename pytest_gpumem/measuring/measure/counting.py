"""Counts FLOPs, operators, syncs and kernel launches in a separate run.

A gate can compare these counts without a clock, because they repeat exactly.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_gpumem.facts.values.layers import layers_of
from pytest_gpumem.facts.values.operator_counts import (
    NOWHERE,
    OperatorSite,
    Tally,
    of_layers,
    sum_tallies,
    total,
    varied_clause,
    without_places,
)
from pytest_gpumem.measuring.measure.syncs import HostTensors, Syncs, is_of_higher_order, name_of, title_of
from pytest_gpumem.torch_support.private_api.dispatch import flop_counter, watched_operators
from pytest_gpumem.torch_support.tracebacks import RAISED_BY_A_STEP, clear_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.call_sites import OperatorSites

TALLIED = ("flops", "operators", "syncs")
"""The counts taken on the host, operator by operator, so the source line of each operator can be found."""
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
"""Operators that neither compute nor copy, although their schema does not call them views."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts for a single step. ``None`` means not counted.

    ``flops``: floating-point operations in matrix products, convolutions and attention, as ``torch.utils.flop_counter`` counts
    them. A multiply-add counts as 2. Whichever kernel computes attention, it counts as 2 matrix products in forward, and as 5
    in backward, which recomputes the scores. Causal attention counts like attention without a mask.

    ``operators``: calls to ATen and custom operators that compute or copy, below autograd and with composite operators
    decomposed. Views and plain allocations do not count, because their number differs between torch releases. A call with a
    tensor subclass, such as int8 weights, counts once, even if it runs several operators.

    ``syncs``: how often the host waits for the device, to read a value (``.item()``, ``nonzero``, boolean masks) or
    to copy between host and device without ``non_blocking``.

    ``launches``: kernels launched by CUDA.

    Example:
        A training step with AdamW, ``Linear(256, 1024)``, relu, ``Linear(1024, 256)`` and a batch of 64 counts 167,772,160
        FLOPs: five products with 2 x 64 x 256 x 1024 = 33,554,432 each, 2 in forward and 3 in backward. Backward needs no
        gradient for the batch. The step calls 56 operators and has no syncs.
    """

    flops: int | None = None
    operators: int | None = None
    syncs: int | None = None
    launches: int | None = None

    def metrics(self) -> dict[str, int]:
        """Return the counts by metric name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class CountResult:
    """A step's counts. If several steps were counted, each count is the largest among these steps.

    ``by_operator`` has the tallies for each metric: the count in each operator. ``failure`` is a clause with the reason if
    counting failed.
    """

    counts: Counts
    failure: str | None = None
    by_operator: Mapping[str, tuple[Tally, ...]] = field(default_factory=dict)
    lowest: Mapping[str, int] = field(default_factory=dict)
    """For each metric whose value differs between the counted steps, the smallest value."""

    def notes(self) -> tuple[str, ...]:
        """Return a clause for each count that varies from step to step, and a clause if counting failed."""
        varied = (varied_clause(name, lowest, self.counts.metrics()[name]) for name, lowest in self.lowest.items())
        return (*varied, *(() if self.failure is None else (self.failure,)))


NO_COUNTS = CountResult(Counts())


FURTHER_COUNTED_STEPS = 5
"""The number of further counted steps if steps may differ. With six counted steps, even work in every sixth step is seen."""


def count_step(
    step: Callable[[], object], device: Device, *, is_compiled: bool = False, repeats: bool = True
) -> CountResult:
    """Count a step's operators in one run, and its kernel launches in another run.

    The tallies have no source lines (`with_lines` finds these). Operators are counted within a dispatch mode. Because torch
    does not use compiled code within such a mode, the operators in a compiled step are not counted. If the device launches no
    kernels, there is no second run.

    Args:
        step: Runs the step.
        device: The step's device.
        is_compiled: True if torch.compile has compiled the step.
        repeats: True if all steps are known to be equal. Otherwise `FURTHER_COUNTED_STEPS` more steps are counted, or fewer
            if a step raises.

    Returns:
        The counts. If the first counted step raises, ``failure`` names the exception. The memory figures stay valid, because
        the step did not raise when they were measured.
    """
    modules = len(sys.modules)

    operators = dict[str, tuple[Tally, ...]] if is_compiled else partial(_count_operators, step, device.torch_device)

    def launches() -> dict[str, tuple[Tally, ...]]:
        kernels = device.launches(step)
        return {} if kernels is None else {"launches": sum_tallies(Tally(*kernel) for kernel in kernels.items())}

    try:
        first = operators()
        if len(sys.modules) != modules:
            # The first use of a mode imports torch modules. The imports leave frames in reference cycles, which keep tensors
            # alive.
            gc.collect()
        counted = [{**first, **launches()}]
    except RAISED_BY_A_STEP as error:
        clear_frames(error)
        first_line = str(error).strip().partition("\n")[0]
        return CountResult(Counts(), f"not counted: {type(error).__name__}{f': {first_line}' if first_line else ''}")
    if not repeats:
        # Count operators in several consecutive steps first, then kernels. If the two alternated, each would see only every
        # second step.
        for count in (operators, launches):
            try:
                counted += [count() for _ in range(FURTHER_COUNTED_STEPS)]
            except RAISED_BY_A_STEP as error:
                clear_frames(error)
    return _largest(counted)


def _largest(counted: Sequence[Mapping[str, tuple[Tally, ...]]]) -> CountResult:
    """Return the largest value of each count, with the tallies from the step with this value.

    A count may be missing in some steps, because counting stops if a step raises.
    """
    largest: dict[str, tuple[Tally, ...]] = {}
    lowest: dict[str, int] = {}
    for name in counted[0]:
        by_step = [tallies[name] for tallies in counted if name in tallies]
        largest[name] = max(by_step, key=total)
        least = min(map(total, by_step))
        if least != total(largest[name]):
            lowest[name] = least
    return CountResult(Counts(**{name: total(tallies) for name, tallies in largest.items()}), None, largest, lowest)


def with_lines(step: Callable[[], object], device: Device, counted: CountResult, places: OperatorSites) -> CountResult:
    """Run ``step`` once more, and return ``counted`` with source lines in its tallies.

    If a metric's tallies differ in this run, they stay without lines. If the step raises, all tallies stay without lines.
    """
    try:
        located_tallies = _count_operators(step, device.torch_device, places)
    except RAISED_BY_A_STEP as error:
        clear_frames(error)
        return counted
    by_operator = {
        name: located_tallies.get(name, ()) if without_places(located_tallies.get(name, ())) == tallies else tallies
        for name, tallies in counted.by_operator.items()
    }
    return replace(counted, by_operator=by_operator)


class _Tallies:
    """Running totals for each metric, by operator and source line. ``place`` is the source line of the latest operator."""

    def __init__(self) -> None:
        self._totals: dict[str, Counter[tuple[str, OperatorSite]]] = {name: Counter() for name in TALLIED}
        self.place = NOWHERE

    def add(self, metric: str, operator: str, amount: int = 1) -> None:
        self._totals[metric][operator, self.place] += amount

    def by_operator(self) -> dict[str, tuple[Tally, ...]]:
        return {
            metric: sum_tallies(Tally(operator, amount, place) for (operator, place), amount in totals.items())
            for metric, totals in self._totals.items()
        }


def _count_operators(
    step: Callable[[], object], device: torch.device, places: OperatorSites | None = None
) -> dict[str, tuple[Tally, ...]]:
    """Run the step, and return the tallies for FLOPs, operators and syncs. ``places`` finds each operator's source line."""
    import torch

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - an operator's name
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001 - same
    host = HostTensors(device)
    flops = flop_counter({attention: _attention_flops, backward: _attention_backward_flops})
    tallies = _Tallies()
    latest, counted_flops = "", 0

    def count_flops() -> None:
        """Add the latest operator's FLOPs. torch's counter includes them only after the operator has run."""
        nonlocal counted_flops
        total_flops = flops.get_total_flops()
        if total_flops > counted_flops:
            tallies.add("flops", latest, total_flops - counted_flops)
            counted_flops = total_flops

    def add_sync_in_operator(name: str) -> None:
        tallies.add("syncs", name)

    def add_sync_in_function(name: str) -> None:
        """Add a sync in a function without operator calls."""
        count_flops()
        tallies.place = places.operator_site() if places is not None else NOWHERE
        tallies.add("syncs", name)

    syncs = Syncs(host, add_sync_in_operator, add_sync_in_function)

    def run_operator(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        nonlocal latest
        count_flops()
        latest = title_of(operator)
        tallies.place = places.operator_site() if places is not None else NOWHERE
        if _works(operator):
            tallies.add("operators", latest)
        syncs.check_operator(operator, args, kwargs)
        result = run()
        host.follow((args, kwargs), result)
        return result

    with ExitStack() as stack:
        stack.enter_context(_uncompiled())
        stack.enter_context(host.tracking_counters())
        if places is not None:
            stack.enter_context(places.watching())
        # The last entered mode handles an operator first. `flops` decomposes composite operators, so it is entered after
        # `watched_operators`, which then counts the decomposed operators.
        stack.enter_context(watched_operators(run_operator))
        stack.enter_context(flops)
        stack.enter_context(syncs.watching_functions())
        step()
    count_flops()
    by_metric = tallies.by_operator()
    return (
        by_metric
        if places is None
        else {name: of_layers(operators, layers_of(places.modules)) for name, operators in by_metric.items()}
    )


def _uncompiled() -> AbstractContextManager[object]:
    """Return a context in which functions that the step itself compiles run eagerly.

    Within a dispatch mode, torch runs such functions eagerly anyway. But without this context, torch would also stop compiling
    them for the rest of the process.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing this module takes seconds
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


# torch.utils.flop_counter has formulas only for the attention kernels on GPUs. These are the formulas for the CPU's kernel.


def _attention_flops(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Return the FLOPs in attention's forward: the scores, and their product with the values.

    The shapes are query ``[B, H, S, D]``, key ``[B, H, L, D]``, and value ``[B, H, L, E]``.
    """
    products = _attention_products(query, key, value)
    return products["scores"] + products["values"]


def _attention_backward_flops(_gradient: Any, query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Return the FLOPs in attention's backward, which computes five matrix products.

    Three products cost as much as the scores in forward: the recomputed scores, and the gradients for query and key. Two
    products cost as much as the product with the values: the gradients for the scores and the values.
    """
    products = _attention_products(query, key, value)
    return 3 * products["scores"] + 2 * products["values"]


def _attention_products(query: Any, key: Any, value: Any) -> dict[str, int]:
    batch, heads, query_length, width = query
    pairs = batch * heads * query_length * key[-2]
    return {"scores": 2 * pairs * width, "values": 2 * pairs * value[-1]}
