"""What of a profile is a kernel, over made-up profiles: without a GPU there is no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pytest_gpumem.devices.profiled import kernel_name, kernels_in, launches_of


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


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
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
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_nn_align4>(Params)", None),
        ("a_kernel(int, float)", "a_kernel"),
        ("", ""),
        ("x" * 300, "x" * 100),
    ],
)
def test_a_kernel_has_a_short_name_without_commas(signature, name):
    expected = "Kernel2<cutlass_80_tensorop_s1688gemm_128x64_nn_align4>" if name is None else name
    assert kernel_name(signature) == expected


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
