"""The GPUs that can be emulated, and the words for them."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.resources import files

import pytest

from pytest_gpumem.emulation.gpus import Gpu, emulated_gpu, known_gpus

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORDS = (
    "t4 v100 v100-32gb a10 a10g a100 a100-40gb l4 l40s rtx3090 rtx4090 rtx5090 rtxpro6000 h100 h200 b200".split()  # noqa: SIM905
)


def test_these_can_be_emulated():
    assert [gpu.word for gpu in known_gpus()] == WORDS


def test_every_figure_has_a_source():
    text = (files("pytest_gpumem.emulation") / "gpus.toml").read_text(encoding="utf-8")
    for word, entry in tomllib.loads(text).items():
        sourced = {name.strip() for key in entry["sources"] for name in key.split(",")}
        figures = {field.name for field in fields(Gpu)} - {"word", "title", "count"}
        assert figures <= sourced, word
        assert all(entry["sources"].values()), word


def test_figures_are_those_of_one_gpu():
    for word in WORDS:
        gpu = emulated_gpu(f"emulated:{word}")
        assert gpu.word == word
        assert 14e9 < gpu.total_bytes < 200e9, word
        assert gpu.shared_per_block <= gpu.shared_per_block_optin <= gpu.shared_per_multiprocessor, word
        assert gpu.threads_per_multiprocessor % 32 == 0, word
        assert gpu.count == 1


def test_several_are_so_many_of_one():
    eight = emulated_gpu("emulated:h100x8")
    assert (eight.word, eight.count) == ("h100", 8)
    assert eight.total_bytes == emulated_gpu("emulated:h100").total_bytes


@pytest.mark.parametrize(
    ("size", "total"), [("24GB", 24_000_000_000), ("80GiB", 80 * 2**30), ("24GBx2", 24_000_000_000)]
)
def test_a_size_is_an_h100_with_so_much_memory(size, total):
    gpu = emulated_gpu(f"emulated:{size}")
    assert gpu.total_bytes == total
    assert gpu.capability == (9, 0)
    assert gpu.count == (2 if size.endswith("x2") else 1)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("emulated:h10", "did you mean 'emulated:h100'?"),
        ("emulated:", "is no GPU that can be emulated"),
        ("emulated:h100x0", "from 1 to 64 GPUs can be emulated, not 0"),
        ("emulated:h100x65", "not 65"),
    ],
)
def test_another_word_is_refused_with_the_nearest(word, said):
    with pytest.raises(ValueError, match="emulated") as refused:
        emulated_gpu(word)
    assert said in str(refused.value)
