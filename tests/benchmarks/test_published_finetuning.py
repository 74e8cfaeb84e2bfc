"""``benchmarks/published_finetuning.py``: the workers of FakeGPU for the published rows, and their arguments."""

from __future__ import annotations

import csv

import fakegpu_workers
import published_finetuning
import pytest
from fakegpu_workers import Worker

ONE_RANK = "qwen_sft_memory_worker"


@pytest.mark.parametrize(
    ("config", "worker"),
    [
        (
            "full s16 accumulation=2",
            Worker(ONE_RANK, ("--training-method=full", "--sequence-length=16", "--gradient-accumulation-steps=2")),
        ),
        (
            "QLoRA nested s128 checkpointing",
            Worker(
                ONE_RANK,
                (
                    *("--training-method=qlora", "--quantization-double-quantization"),
                    *("--sequence-length=128", "--gradient-checkpointing"),
                ),
            ),
        ),
        ("FSDP x2 s16", Worker("qwen_fsdp_sft_memory_worker", ("--sequence-length=16",), 2)),
        ("FSDP2 LoRA x4 s64", Worker("qwen_fsdp2_lora_sft_memory_worker", ("--sequence-length=64",), 4)),
    ],
)
def test_the_words_of_a_row_are_arguments_of_its_worker(config, worker):
    assert Worker.parse(config) == worker


def test_a_word_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match=r"'LoRA s16 fp8': 'fp8' is no word of a row"):
        Worker.parse("LoRA s16 fp8")


def test_each_published_row_has_a_worker_a_model_and_a_gpu():
    with published_finetuning.PUBLISHED.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if "FakeGPU" in row["source"]]
    cases = {(row["model"], row["config"], row["gpu"]) for row in rows}
    assert (len(cases), len(rows)) == (38, 42)
    for model, config, gpu in cases:
        assert Worker.parse(config).arguments
        assert (fakegpu_workers.MODELS / f"{fakegpu_workers.SIZES[model]}.json").exists()
        assert gpu in fakegpu_workers.GPUS
    assert {row["metric"] for row in rows} == {"peak_allocated", "graph_peak_allocated"}
