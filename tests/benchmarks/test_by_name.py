"""Formulas of ``benchmarks/by_name.py`` give the numbers of parameters that are published, from the configurations beside it."""

from __future__ import annotations

import by_name
import pytest

PUBLISHED = {
    "Llama 3 8B": 8_030_261_248,
    "Llama 3 70B": 70_553_706_496,
    "Qwen3 30B-A3B": 30_532_122_624,
    "Mixtral 8x7B": 46_702_792_704,
    "Gemma 2 9B": 9_241_705_984,
    "Whisper large v3": 1_543_490_560,
    "ViT-L/16": 304_326_632,
    "SDXL's UNet": 2_567_463_684,
    "Mamba 2.8B": 2_768_345_600,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_formula_gives_the_published_number_of_parameters(name):
    case = by_name.CASES[name]
    assert case.parameters(by_name.configuration_of(case)) == PUBLISHED[name]


def test_a_byte_too_many_and_a_model_that_was_not_measured_miss_a_claim():
    found = {"parameter_bytes": 16_060_522_496, "state_bytes": 32_121_044_992, "seconds": 1.0, "resident_bytes": 10**9}
    measured = by_name.row_of("Llama 3 8B", {**found, "reserved": 10, "why_not": ""})
    assert not any(claim.missed for claim in by_name.claims_of([measured]))
    wrong = by_name.row_of(
        "Llama 3 8B", {**found, "parameter_bytes": 1, "reserved": None, "why_not": "it reads values"}
    )
    assert [claim.missed for claim in by_name.claims_of([measured, wrong])] == [True, True, False]
    assert "it reads values" in by_name.cells_of(wrong)
