"""From a profile to events: spans are open from their beginning to their end, and what of it is a kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin, SpanEnd, TensorRecord, Token
from pytest_gpumem.measuring.devices.profiled import MARK_PREFIX, kernel_name, kernels_in, launches_of, tokens_of
from pytest_gpumem.torch_support.private_api.profiler import allocation_events, span


class PassingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def recorded(run) -> tuple[list[Token], list[AllocationEvent]]:
    """The tokens of a run, and the allocations that the device counts by."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True)
    profiler.start()
    try:
        run()
    finally:
        profiler.stop()
    return tokens_of(profiler, torch.device("cpu")), allocation_events(profiler)


def spans_of(run) -> tuple[list[tuple[str, ...]], int]:
    """The names of the spans around each allocation, and how many spans were left open."""
    around: list[tuple[str, ...]] = []
    open_spans: list[str] = []
    for token in recorded(run)[0]:
        if isinstance(token, SpanBegin):
            open_spans.append(token.name or f"mark {token.mark}")
        elif isinstance(token, SpanEnd):
            open_spans.pop()
        elif isinstance(token, AllocationEvent) and token.nbytes > 0:
            around.append(tuple(open_spans))
    return around, len(open_spans)


def marked() -> None:
    with span(f"{MARK_PREFIX}0"):
        with span(f"{MARK_PREFIX}1"):
            torch.empty(100)
        torch.empty(100)
    torch.empty(100)


EXPECTED = [("mark 0", "mark 1", "aten::empty"), ("mark 0", "aten::empty"), ("aten::empty",)]


def test_an_allocation_is_within_the_marks_and_operators_around_it():
    assert spans_of(marked) == (EXPECTED, 0)


def test_a_dispatch_mode_is_no_span_and_ends_no_mark():
    def run() -> None:
        with PassingOn(), PassingOn():
            marked()

    around, left = spans_of(run)
    # A mode calls the operator once more.
    assert [tuple(dict.fromkeys(names)) for names in around] == EXPECTED
    assert left == 0


@pytest.mark.parametrize("hooked", [False, True])
def test_a_node_has_the_number_of_the_operator_that_made_it_hooked_or_not(hooked):
    weight = torch.ones(8, requires_grad=True)

    def run() -> None:
        product = (weight * weight).tanh()
        if hooked:
            product.register_hook(lambda gradient: gradient * 2)
        product.sum().backward()

    spans = [token for token in recorded(run)[0] if isinstance(token, SpanBegin)]
    made = {span.sequence: span.name for span in spans if span.kind == "operator" and span.sequence >= 0}
    nodes = [span for span in spans if span.kind == "node"]
    assert [(node.name, made.get(node.sequence)) for node in nodes] == [
        ("SumBackward0", "aten::sum"),
        ("TanhBackward0", "aten::tanh"),
        ("MulBackward0", "aten::mul"),
        ("AccumulateGrad", None),
    ]


# Events


def test_allocations_among_the_tokens_are_those_that_the_device_counts_in_order():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    tokens, counted = recorded(run)
    assert [token for token in tokens if isinstance(token, AllocationEvent)] == counted
    assert len(counted) > 100


def test_tokens_come_in_the_order_of_time_and_every_span_ends():
    weight = torch.ones(8, requires_grad=True)
    tokens, _ = recorded(lambda: (weight * weight).tanh().sum().backward())
    times = [token.time_ns for token in tokens if not isinstance(token, TensorRecord)]
    assert times == sorted(times)
    assert sum(isinstance(token, SpanBegin) for token in tokens) == sum(isinstance(token, SpanEnd) for token in tokens)


def test_what_a_node_runs_is_not_what_made_a_node():
    weight = torch.ones(8, requires_grad=True)
    tokens, _ = recorded(lambda: weight.tanh().sum().backward())
    open_spans: list[SpanBegin] = []
    for token in tokens:
        if isinstance(token, SpanBegin):
            if any(span.kind == "node" for span in open_spans) and token.kind == "operator":
                assert token.sequence == -1
            open_spans.append(token)
        elif isinstance(token, SpanEnd):
            open_spans.pop()


def test_the_tensors_that_an_operator_takes_are_seen_also_in_lists():
    one, two = torch.ones(2, 3), torch.ones(4, 3, dtype=torch.bfloat16).float()
    tokens, _ = recorded(lambda: torch.cat([one, two]))
    seen = {token for token in tokens if isinstance(token, TensorRecord)}
    assert {TensorRecord(one.data_ptr(), "float32", (2, 3)), TensorRecord(two.data_ptr(), "float32", (4, 3))} <= seen


def test_a_view_is_seen_at_the_address_of_the_block_that_it_is_in():
    base = torch.ones(10)
    tokens, _ = recorded(base[5:].tanh)
    assert TensorRecord(base.untyped_storage().data_ptr(), "float32", (5,)) in tokens


# Kernels


def nothing() -> None:
    """There is no GPU to wait for."""


def told(*events: tuple[str, str, str | None], annotation: bool = False):
    """A profiler that tells these: the name, the device's type and the activity, which older releases of torch leave out."""

    def one(name: str, device: str, activity: str | None) -> SimpleNamespace:
        known = {} if activity is None else {"activity_type": activity}
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotation, **known)

    return SimpleNamespace(events=lambda: [one(*event) for event in events])


LAUNCH = ("cudaLaunchKernel", "CPU", "cuda_runtime")
KERNEL = ("void gemm<float>(...)", "CUDA", "kernel")
OTHERS = (
    ("Memcpy DtoH (Device -> Pageable)", "CUDA", "gpu_memcpy"),
    ("Memset (Device)", "CUDA", "gpu_memset"),
    ("Activity Buffer Request", "CUDA", "overhead"),
)


def without_activity(event: tuple[str, str, str | None]) -> tuple[str, str, None]:
    return (*event[:2], None)


@pytest.mark.parametrize("said", [lambda event: event, without_activity], ids=["with activity", "older torch"])
def test_kernels_are_counted_and_copies_fills_and_calls_of_the_host_are_not(said):
    assert kernels_in(told(*map(said, (LAUNCH, KERNEL, *OTHERS, LAUNCH, KERNEL)))) == {"gemm": 2}
    assert kernels_in(told(*map(said, OTHERS))) == {}


AT = "at::native::"
CUTLASS = "Kernel2<cutlass_80_tensorop_s1688gemm_128x64_nn_align4>"


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        (
            f"void {AT}(anonymous namespace)::cunn_SoftMaxForward<8, float>(float*, float const*, int)",
            "cunn_SoftMaxForward",
        ),
        (
            f"void {AT}vectorized_elementwise_kernel<4, {AT}BinaryFunctor<float, {AT}binary_internal::MulFunctor<float> >, 3ul>(int)",
            "vectorized_elementwise_kernel<MulFunctor>",
        ),
        (
            f"void {AT}reduce_kernel<512, 1, {AT}ReduceOp<float, {AT}func_wrapper_t<float, {AT}sum_functor<float> > > >(int)",
            "reduce_kernel<sum_functor>",
        ),
        (f"void cutlass::{CUTLASS}(Params)", CUTLASS),
        ("a_kernel(int, float)", "a_kernel"),
        ("x" * 300, "x" * 100),
    ],
)
def test_a_kernel_has_a_short_name_without_commas(signature, name):
    assert kernel_name(signature) == name


def test_where_nothing_of_a_gpu_is_told_there_is_no_number():
    assert kernels_in(told(LAUNCH)) is None
    assert kernels_in(told()) is None
    assert kernels_in(told(("my region", "CUDA", None), annotation=True)) is None


def test_a_profiler_that_somebody_else_stopped_gives_no_number():
    def events():
        raise AssertionError("profiler was not started")

    assert kernels_in(SimpleNamespace(events=events)) is None


def test_without_cupti_nothing_is_run_for_it(monkeypatch):
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {ProfilerActivity.CPU})
    assert launches_of(lambda: pytest.fail("it was run"), nothing) is None


def test_what_a_run_raises_ends_its_profile_and_is_raised(monkeypatch):
    # As on a GPU, but with the only activity that there is here.
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: {ProfilerActivity.CUDA})
    monkeypatch.setattr(
        torch.profiler, "profile", lambda **more: profile(**more | {"activities": [ProfilerActivity.CPU]})
    )
    with pytest.raises(ZeroDivisionError):
        launches_of(lambda: 1 // 0, nothing)
    with profile(activities=[ProfilerActivity.CPU]) as another:
        torch.ones(8)
    assert another.events(), "another profiler can run"
