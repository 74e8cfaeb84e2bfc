"""Operators of torch on an emulated GPU: on clean memory, on memory that others have used, and on the CPU.

``main("strided")`` writes a line for each operator that differs although nobody was told, and the number of operators. Each runs
in a fork, so that a crash ends one operator only. Kinds are ``strided`` and ``nested`` (torch's own lists of operators with
their samples) and ``sparse`` (the same for each layout, and operators that the lists lack).
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import sys
import time
import traceback
import types
import unittest
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from pytest_gpumem.emulating.host_values.host_operators import tensors_among
from pytest_gpumem.emulating.host_values.scope import HostValues, current
from pytest_gpumem.torch_support.reachability import sparse_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
SAMPLES = 2
"""Samples of an operator that are tried, evenly from all that torch has."""
SECONDS = 120
"""The limit of one operator."""
ATTEMPTS = 6
"""Attempts at peaks that were the same once: autograd's thread frees some of backward's tensors a moment earlier or later."""
OTHERWISE = {
    "add of torch.sparse_coo": "CUDA's kernel leaves equal indices apart",
    "sub of torch.sparse_coo": "CUDA's kernel leaves equal indices apart",
}
"""Operators that differ between devices, and why."""
NO_SAMPLES = 7
"""The status of a process that had nothing to try."""
DTYPES = (torch.float32, torch.int64, torch.float16, torch.bool, torch.complex64)

Run = dict[str, Any]


class Operator(NamedTuple):
    """An operator and what it is given in each sample: its arguments by position and by name."""

    name: str
    call: Callable[..., Any]
    samples: Callable[[], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]


def main(kind: str, pattern: str = "") -> None:
    """Try the operators of a kind whose names have a pattern."""
    operators = [one for one in OPERATORS[kind]() if re.search(pattern, one.name)]
    gc.collect()
    gc.freeze()
    tried = 0
    for operator in operators:
        lines = _in_a_fork(operator)
        tried += lines is not None
        for line in lines or ():
            sys.stdout.write(f"{operator.name}: {line}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{tried} operators\n")


def _lists_of_torch() -> tuple[list[Any], list[Any]]:
    """Return torch's lists of operators: of tensors, and of jagged ones. A fork must find CUDA untouched."""
    sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).__dict__.setdefault(
        "TestCase", unittest.TestCase
    )
    with mock.patch.multiple(torch.cuda, is_available=lambda: False, device_count=lambda: 0):
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo.definitions.nested import njt_op_db
    return op_db, njt_op_db


def _name(listed: Any) -> str:
    return ".".join(filter(None, (listed.name, listed.variant_test_name)))


def _given(listed: Any) -> tuple[torch.dtype, bool]:
    supported = listed.supported_dtypes("cuda") & listed.supported_dtypes("cpu")
    dtype = next((one for one in DTYPES if one in supported), None) or next(iter(supported))
    return dtype, listed.supports_autograd and (dtype.is_floating_point or dtype.is_complex)


def _of_list(listed: Any) -> Operator:
    def samples() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        dtype, differentiable = _given(listed)
        for sample in listed.sample_inputs("cpu", dtype, requires_grad=differentiable):
            yield (sample.input, *sample.args), sample.kwargs

    return Operator(_name(listed), listed.op, samples)


def _strided() -> Iterator[Operator]:
    return map(_of_list, _lists_of_torch()[0])


def _nested() -> Iterator[Operator]:
    return map(_of_list, _lists_of_torch()[1])


def _sparse() -> Iterator[Operator]:
    for listed in _lists_of_torch()[0]:
        for layout in LAYOUTS:
            kind = str(layout).removeprefix("torch.sparse_")
            if getattr(listed, "supports_sparse" if kind == "coo" else f"supports_sparse_{kind}"):
                yield Operator(f"{_name(listed)} of {layout}", listed.op, _made_sparse(listed, layout))
    for layout in LAYOUTS:
        for name, call in MORE.items():
            yield Operator(f"{name} of {layout}", call, lambda layout=layout: iter([((_example(layout),), {})]))


def _made_sparse(listed: Any, layout: torch.layout) -> Callable[[], Iterator[tuple[tuple[Any, ...], dict[str, Any]]]]:
    def samples() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        dtype, differentiable = _given(listed)
        try:
            for sample in [*listed.sample_inputs_sparse(layout, "cpu", dtype, requires_grad=differentiable)]:
                yield (sample.input, *sample.args), sample.kwargs
        except (NotImplementedError, unittest.SkipTest):  # it has none for sparse tensors
            for args, named in _of_list(listed).samples():
                if isinstance(args[0], torch.Tensor) and args[0].dim() == 2 and args[0].numel():
                    yield (_sparse_of(args[0].detach(), layout), *args[1:]), named

    return samples


def _sparse_of(dense: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    """Return a sparse tensor: a third of its elements is 0, and each index is there twice if it can be."""
    dense = dense.clone(memory_format=torch.contiguous_format)
    dense.view(-1)[::3] = 0
    if layout is torch.sparse_coo:
        indices, values = sparse_parts(dense.to_sparse())
        return torch.sparse_coo_tensor(indices.repeat(1, 2), values.repeat(2), dense.shape)
    blocks = tuple(2 - size % 2 for size in dense.shape[-2:]) if layout in LAYOUTS[3:] else None
    return dense.to_sparse(layout=layout, blocksize=blocks)


def _example(layout: torch.layout) -> torch.Tensor:
    return _sparse_of(torch.randn(4, 6), layout)


def _trained(given: torch.Tensor, kind: type[torch.optim.Optimizer]) -> torch.Tensor | None:
    table = torch.nn.Embedding(50, 4, sparse=True, device=given.device)
    optimizer = kind(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2, 2, 7], device=given.device)).sum().backward()
    optimizer.step()
    return table.weight.grad


MORE: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        name: lambda x, name=name: getattr(x, name)()
        for name in (
            "sum",
            "norm",
            "t",
            "coalesce",
            "to_dense",
            "clone",
            "cpu",
            "double",
            "mean",
            "any",
            "to_sparse_csr",
        )
    },
    "sparse.sum": lambda x: torch.sparse.sum(x, 0),
    "sparse.softmax": lambda x: torch.sparse.softmax(x, 1),
    "sparse.log_softmax": lambda x: torch.sparse.log_softmax(x, 1),
    "sparse.mm": lambda x: torch.sparse.mm(x, torch.ones(6, 3, device=x.device)),
    "sum of rows": lambda x: x.sum(0, keepdim=True),
    "add": lambda x: x + x,
    "sub": lambda x: x - x,
    "mul": lambda x: x * x,
    "mul by a number": lambda x: x * 2.5,
    "pow": lambda x: x.pow(2),
    "select": lambda x: x[1],
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2], device=x.device)),
    "cat": lambda x: torch.cat([x, x]),
    "sparse_mask": lambda x: torch.ones(4, 6, device=x.device).sparse_mask(x),
    "dense and": lambda x: torch.ones(4, 6, device=x.device) + x,
    "to_sparse": lambda x: x.to_dense().to_sparse(),
    "a table trained by SparseAdam": lambda x: _trained(x, torch.optim.SparseAdam),
    "a table trained by SGD": lambda x: _trained(x, torch.optim.SGD),
    "mode": lambda x: torch.mode(torch.ones(3, 5000, device=x.device)),
    "inverses": lambda x: torch.linalg.inv(torch.randn(64, 8, 8, device=x.device)),
    "solutions": lambda x: torch.linalg.solve(*torch.randn(2, 64, 8, 8, device=x.device)),
    "jagged from padded": lambda x: torch.ops.aten._padded_dense_to_jagged_forward(
        x.to_dense()[..., None], [torch.tensor([0, 2, 3, 5, 9], device=x.device)]
    ),
    "segments": lambda x: torch.segment_reduce(
        torch.ones(10, device=x.device), "sum", lengths=torch.tensor([3, 3, 4], device=x.device)
    ),
}
"""Operators of a sparse tensor that torch's list lacks, and others that read what they have computed."""

OPERATORS = {"strided": _strided, "nested": _nested, "sparse": _sparse}


def _in_a_fork(operator: Operator) -> list[str] | None:
    """Return what differs of an operator, or how its process ended; ``None`` if torch has no samples of it."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(writing, "w", encoding="utf-8") as file:
            signal.alarm(SECONDS)
            warnings.simplefilter("ignore")
            samples = _samples(operator)
            try:
                for at, (args, named) in enumerate(samples):
                    file.writelines(f"sample {at}, {problem}\n" for problem in _problems(operator, args, named))
            except Exception:  # noqa: BLE001 -- a fork must not go on with the other operators
                file.write(traceback.format_exc())
        os._exit(0 if samples else NO_SAMPLES)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        lines = file.read().splitlines()
    _, status = os.waitpid(process, 0)
    if os.waitstatus_to_exitcode(status) == NO_SAMPLES:
        return None
    return lines if status == 0 else [*lines, f"its process ended with status {status}"]


def _samples(operator: Operator) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    torch.manual_seed(0)
    try:
        samples = [*islice(operator.samples(), 200)]
    except Exception:  # noqa: BLE001 -- torch's list says so of operators that it has no samples of
        return []
    count = min(SAMPLES, len(samples))
    return [samples[at * len(samples) // count] for at in range(count)]


def _problems(operator: Operator, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[str]:
    on_cpu = _run(operator, args, named, lambda tensor: tensor.detach().clone())
    for knows in (True, False):
        problems: list[str] = []
        peaks: list[set[int]] = [set() for _ in MEMORIES]
        for _ in range(ATTEMPTS):
            runs = [_on_gpu(operator, args, named, knows, memory) for memory in (b"\0", *MEMORIES)][1:]
            for seen, run in zip(peaks, runs, strict=True):
                seen.add(run["peak"])
            problems = _differences(operator.name, runs, on_cpu)
            if not problems and set.intersection(*peaks):
                break
            time.sleep(0.01)
        if not set.intersection(*peaks):
            problems.append(f"peaks differ with memory: {peaks}")
        yield from (f"{'known' if knows else 'unknown'}: {problem}" for problem in problems)


def _random_integers(dtype: torch.dtype) -> bytes:
    return torch.randint(1, 8, (512,), dtype=dtype).numpy().tobytes()


MEMORIES = (b"\0", _random_integers(torch.int64), _random_integers(torch.int32))
"""What free memory is filled with before an operator runs. It runs once more before these, as some things happen once."""


def _differences(name: str, runs: list[Run], on_cpu: Run) -> list[str]:
    first = runs[0]
    told = [run["told"] for run in runs]
    if "error" in first or "error in backward" in first:
        # An error says by itself that there is no figure. It must not depend on memory, unless the read was told.
        alike = all(told) or len({(run.get("error"), run.get("error in backward")) for run in runs}) == 1
        return [] if alike else [f"errors differ: {runs}"]
    problems = [
        f"{what} differ with memory: {[run.get(what) for run in runs]}"
        for what in ("shapes", "gradients", "told")
        if len({repr(run.get(what)) for run in runs}) > 1
    ]
    if not any(told) and name not in OTHERWISE and "error" not in on_cpu:
        problems += [
            f"{what} are not the CPU's: {first.get(what)} and {on_cpu.get(what)}"
            for what in ("shapes", "gradients")
            if first.get(what) != on_cpu.get(what) and f"error in {what}" not in on_cpu
        ]
    return problems


def _on_gpu(operator: Operator, args: tuple[Any, ...], named: dict[str, Any], knows: bool, memory: bytes) -> Run:
    mode = current()
    assert mode is not None

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.detach().to("cuda")
        if not knows:
            for part in _parts(there):
                if part.is_floating_point() and part.numel():
                    _fill(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes(), memory)
                mode.note_unknown(part)
        return there

    gc.collect()
    torch.cuda.synchronize()
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                _fill(block["address"], min(block["size"], 1 << 21), memory)
    _was_told(mode)
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    torch.cuda.reset_peak_memory_stats()
    run = _run(operator, args, named, moved)
    run["peak"] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    return run | {"told": _was_told(mode)}


def _was_told(mode: HostValues) -> bool:
    """Return whether a measurement would be none now, or would have a note that fails in strict mode."""
    trouble, others = mode.reads.take_trouble(), mode.reads.take_others()
    return trouble is not None or bool(others.decided)


def _fill(address: int, nbytes: int, memory: bytes) -> None:
    ctypes.memmove(address, (memory * (nbytes // len(memory) + 1))[:nbytes], nbytes)


def _run(
    operator: Operator, args: tuple[Any, ...], named: dict[str, Any], moved: Callable[[torch.Tensor], torch.Tensor]
) -> Run:
    run: Run = {}
    torch.manual_seed(1)

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return moved(value).requires_grad_(value.requires_grad)
        if isinstance(value, dict):
            return {name: move(one) for name, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(move, value))
        is_device = isinstance(value, torch.device) or value == "cpu"
        return moved(torch.empty(0)).device.type if is_device else value

    try:
        args, named = move(args), move(named)
        result = operator.call(*args, **named)
        run["shapes"] = _shapes(result)
    except Exception as error:  # noqa: BLE001 -- whatever torch raises
        return {"error": _plain(error)}
    try:
        run["gradients"] = _shapes(_gradients(result, (*args, *named.values())))
    except Exception as error:  # noqa: BLE001 -- likewise
        run["error in backward"] = _plain(error)
    return run


def _plain(error: Exception) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "#", f"{type(error).__name__}: {error}")[:200]


def _gradients(result: Any, given: tuple[Any, ...]) -> tuple[torch.Tensor | None, ...]:
    made = result if isinstance(result, (list, tuple)) else [result]
    roots = [root for root in tensors_among(made) if root.requires_grad]
    leaves = [leaf for leaf in tensors_among(given) if leaf.requires_grad]
    if not roots or not leaves:
        return ()
    return torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.jagged:
        return tensor.values(), tensor.offsets()
    if tensor.is_nested:
        return (tensor.values(),)
    return sparse_parts(tensor) or (tensor,)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.layout), *((tuple(part.shape), str(part.dtype)) for part in _parts(value.detach()))]
    if isinstance(value, dict):
        return {name: _shapes(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_shapes, value)]
    return "a number" if isinstance(value, (float, complex)) else repr(value)
