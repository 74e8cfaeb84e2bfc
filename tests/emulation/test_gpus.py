"""The GPUs that can be emulated, and the words for them."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from importlib.resources import files

import pytest

from pytest_gpumem.emulating.emulation.gpus import (
    Gpu,
    described,
    emulated_gpu,
    from_description,
    known_capabilities,
    known_gpus,
)
from pytest_gpumem.measuring.devices.cuda import cuda_slug

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORDS = """
    t4 v100 v100-32gb a10 a10g rtxa6000 a100 a100-40gb l4 l40s rtx6000ada rtx3090 rtx4090 rtx5080 rtx5090 rtxpro6000 gb10
    h100 h200 gh200 b200 gb200 b300 gb300
""".split()  # noqa: SIM905
TABLE = tomllib.loads((files("pytest_gpumem.emulating.emulation") / "gpus.toml").read_text(encoding="utf-8"))
SLICES = [(word, profile) for word, entry in TABLE["gpu"].items() for profile in entry.get("mig", {})]


def test_these_can_be_emulated():
    assert [gpu.word for gpu in known_gpus()] == WORDS


def names_in(sources: dict[str, str]) -> set[str]:
    assert all(sources.values())
    return {name.strip() for key in sources for name in key.split(",")}


def test_every_figure_has_a_source():
    limits = names_in(TABLE["capability"]["sources"])
    for word, entry in TABLE["gpu"].items():
        sourced = names_in(entry["sources"])
        assert {field.name for field in fields(Gpu)} - {"word", "title", "count"} <= sourced | limits, word
        assert ("mig" in entry) == ("mig" in sourced), word
        assert set(entry) <= {field.name for field in fields(Gpu)} | {"sources", "mig", "also"}, word
    for version, entry in TABLE["capability"].items():
        assert version == "sources" or set(entry) == limits, version


def test_figures_are_those_of_one_gpu():
    for word in WORDS:
        gpu = emulated_gpu(f"emulated:{word}")
        assert (gpu.word, gpu.device) == (word, f"emulated:{word}")
        assert 14e9 < gpu.total_bytes < 300e9, word
        assert gpu.shared_per_block <= gpu.shared_per_block_optin <= gpu.shared_per_multiprocessor, word
        assert gpu.threads_per_multiprocessor % 32 == 0, word
        assert 40 <= gpu.multiprocessors <= 192, word
        assert 2**22 <= gpu.l2_bytes <= 2**27, word
        assert 1e6 < gpu.sm_khz < 3e6, word
        assert 8e5 < gpu.memory_khz < 2e7, word
        assert gpu.bus_bits % 64 == 0, word
        assert gpu.capability in known_capabilities()
        assert gpu.count == 1
        # The title has the memory as it is sold, which is more than CUDA has of it.
        sold = re.search(r"([0-9]+)GB", gpu.title)
        assert sold is None or 0.95 < gpu.total_bytes / (int(sold[1]) * 2**30) < 1.0, word


def test_titles_and_so_the_folders_of_baselines_are_different():
    every = [*known_gpus(), *(emulated_gpu(f"{word}-mig-{profile}") for word, profile in SLICES)]
    assert len({cuda_slug(gpu.title) for gpu in every}) == len(every) == len({gpu.word for gpu in every})


@pytest.mark.parametrize(("word", "profile"), SLICES)
def test_a_slice_is_within_its_card_and_has_the_memory_of_its_name(word, profile):
    card, gpu = emulated_gpu(word), emulated_gpu(f"emulated:{word}-mig-{profile}")
    sevenths, gigabytes = (int(number) for number in re.fullmatch(r"([0-9])g\.([0-9]+)gb", profile).groups())
    assert emulated_gpu(gpu.device) == gpu
    assert (gpu.name, gpu.title) == (f"{card.name} MIG {profile}", f"{card.title} MIG {profile}")
    assert 0.87 < gpu.total_bytes / (gigabytes * 2**30) <= 1.0
    assert gpu.total_bytes <= card.total_bytes
    assert gpu.multiprocessors <= card.multiprocessors
    assert gpu.l2_bytes <= card.l2_bytes
    assert gpu.bus_bits <= card.bus_bits
    whole = max(int(other.partition("g.")[0]) for of, other in SLICES if of == word)
    assert (gpu.multiprocessors * whole) // card.multiprocessors in (sevenths - 1, sevenths)
    assert (gpu.l2_bytes == card.l2_bytes) == (gpu.bus_bits == card.bus_bits) == (sevenths == whole)
    assert gpu.capability == card.capability
    assert gpu.sm_khz == card.sm_khz


def test_a_slice_is_called_by_what_its_card_is_called():
    gpu = emulated_gpu("emulated:a100-80gb-mig-3g.40gb")
    assert gpu.device == "emulated:a100-80gb-mig-3g.40gb" == emulated_gpu("a100-mig-3g.40gb").device
    assert gpu.name == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert (gpu.total_bytes, gpu.multiprocessors, gpu.l2_bytes) == (int(39.25 * 2**30), 42, 20 * 2**20)
    assert emulated_gpu("emulated:a100-80gb") == emulated_gpu("emulated:a100")


def test_a_description_makes_a_gpu_of_ones_own_known_and_changes_no_other():
    own = replace(emulated_gpu("l4"), word="mine", title="mine", total_bytes=10**10)
    told = from_description(described(replace(own, count=2)))
    assert emulated_gpu("emulated:minex2", told) == replace(own, count=2)
    assert known_gpus(told)[-1] == own
    for nothing in (
        None,
        "",
        "{}",
        "[]",
        "no",
        described(replace(own, word="l4")),
        described(replace(own, word="24gb")),
    ):
        assert from_description(nothing) == {}


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
        ("emulated:rtx5091", "did you mean 'emulated:rtx5090'?"),
        ("emulated:a100-80gb-mig-3g.41gb", "A100 80GB has no MIG profile '3g.41gb'; did you mean '3g.40gb'?"),
        ("emulated:h100-mig-", "H100 80GB has no MIG profile ''; valid: 1g.10gb, "),
        ("emulated:l4-mig-1g.6gb", "is not a MIG slice; there are slices of a100, a100-40gb, "),
        ("emulated:h200-mig-1g.18gbx2", "a process sees at most one MIG slice; remove x2"),
    ],
)
def test_another_word_is_refused_with_the_nearest(word, said):
    with pytest.raises(ValueError, match="emulated") as refused:
        emulated_gpu(word)
    assert said in str(refused.value)
