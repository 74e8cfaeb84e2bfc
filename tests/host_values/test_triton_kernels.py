"""Arguments of kernels that Triton compiled, told by its intermediate representation."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulating.host_values.triton_kernels import written_arguments

ARGUMENTS = (
    "tt.func public @it(%a: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %n: i32, %index: !tt.ptr<i64>, "
    "%out: !tt.ptr<f32>) attributes {noinline = false} {"
)
OFFSETS = "%0 = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>"
STORED_THROUGH_AN_INDEX = """
%1 = tt.splat %index : !tt.ptr<i64> -> tensor<64x!tt.ptr<i64>>
%2 = tt.addptr %1, %0 : tensor<64x!tt.ptr<i64>>, tensor<64xi32>
%3 = tt.load %2 : tensor<64x!tt.ptr<i64>>
%4 = tt.splat %out : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
%5 = tt.addptr %4, %3 : tensor<64x!tt.ptr<f32>>, tensor<64xi64>
%6 = tt.load %a : !tt.ptr<f32>
%7 = tt.splat %6 : f32 -> tensor<64xf32>
tt.store %5, %7 : tensor<64x!tt.ptr<f32>>
"""
STORED_IN_A_LOOP = """
%1:2 = scf.for %i = %c0 to %n step %c1 iter_args(%from = %a, %to = %out) -> (!tt.ptr<f32>, !tt.ptr<f32>)  : i32 {
  %2 = tt.load %from : !tt.ptr<f32>
  tt.store %to, %2 : !tt.ptr<f32>
  %3 = tt.addptr %from, %c1 : !tt.ptr<f32>, i32
  %4 = tt.addptr %to, %c1 : !tt.ptr<f32>, i32
  scf.yield %3, %4 : !tt.ptr<f32>, !tt.ptr<f32>
}
"""
STORED_AFTER_A_LOOP = (
    STORED_IN_A_LOOP.replace("tt.store %to, %2 : !tt.ptr<f32>", "") + "tt.store %1#1, %x : !tt.ptr<f32>\n"
)
STORED_BY_A_BRANCH = """
%1 = scf.if %x -> (!tt.ptr<f32>) {
  scf.yield %a : !tt.ptr<f32>
} else {
  scf.yield %out : !tt.ptr<f32>
}
tt.store %1, %x : !tt.ptr<f32>
"""
ADDED = "%1 = tt.atomic_rmw fadd, acq_rel, gpu, %out, %x, %true : (!tt.ptr<f32>, f32, i1) -> f32\n"
CALLED = "tt.call @inner(%a, %out) : (!tt.ptr<f32>, !tt.ptr<f32>) -> ()\n"


@pytest.mark.parametrize(
    ("body", "written"),
    [
        (STORED_THROUGH_AN_INDEX, (3,)),
        (STORED_IN_A_LOOP, (3,)),
        (STORED_AFTER_A_LOOP, (3,)),
        (STORED_BY_A_BRANCH, (0, 3)),
        (ADDED, (3,)),
        (CALLED, (0, 3)),
        ("%1 = tt.load %a : !tt.ptr<f32>\n", ()),
    ],
)
def test_a_kernel_writes_to_the_arguments_that_its_stores_are_an_offset_from(body, written):
    assert written_arguments(f"module {{\n{ARGUMENTS}\n{OFFSETS}\n{body}tt.return\n}}\n}}\n") == written


def test_nothing_is_told_of_a_text_without_a_kernel():
    assert written_arguments("") == ()
    assert written_arguments("tt.func public @it(%a: !tt.tensordesc<tensor<8x8xf16>>) {\ntt.store %a, %b\n}") == ()
