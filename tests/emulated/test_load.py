"""Loading of models on an emulated GPU: what is allocated, what is reserved, and what is left beyond the model."""

from __future__ import annotations

import importlib.util
import re

import pytest

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
LOADED = "path, device_map='cuda')" if HAS_ACCELERATE else "path).to('cuda')"
"""Installed accelerate, which transformers needs to load onto a GPU itself."""
SOURCE = f"""
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
PLANTED = False
KEPT = []


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=4000, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return tmp_path


def bytes_of(model):
    return sum(one.nbytes for one in [*model.parameters(), *model.buffers()])


def load(path):
    model = GPT2LMHeadModel.from_pretrained({LOADED}
    if PLANTED:
        state = {{name: tensor.clone() for name, tensor in model.state_dict().items()}}
        model.load_state_dict(state)
        KEPT.append(torch.ones(1_000_000, device="cuda"))
    return model


def test_model(gpumem, path):
    loading = gpumem.load(lambda: load(path))
    measured, model = loading.measurement, loading.value
    assert next(model.parameters()).device.type == "cuda"
    assert measured.loaded == bytes_of(model)
    assert PLANTED or (measured.retained, measured.peak_allocated) == (0, measured.loaded)
    assert measured.peak_reserved >= measured.peak_allocated
    gpumem.infer_step(model, {{"input_ids": torch.ones(1, 8, dtype=torch.int64)}})


def test_state_dict(gpumem, tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loading = gpumem.load(lambda: torch.load(tmp_path / "model.pt", map_location="cuda"), explain=True)
    measured = loading.measurement
    assert {{tensor.device.type for tensor in loading.value.values()}} == {{"cuda"}}
    assert (measured.loaded, measured.peak_allocated, measured.retained) == (bytes_of(model), bytes_of(model), 0)
    assert measured.composition.total == bytes_of(model)


def test_threads(gpumem):
    # As transformers loads with a device_map since 5.0.
    def load():
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda _: torch.ones(250_000, device="cuda"), range(4)))
        return [*parts, parts[0].clone()]

    measured = gpumem.load(load, explain=True).measurement
    assert measured.loaded == measured.peak_allocated == measured.composition.total == 5_000_000
    ours = [row for row in measured.composition.rows if row.operator == "clone"]
    assert [row.nbytes for row in ours] == [1_000_000]
    assert {{(row.operator, row.site) for row in measured.composition.rows if row not in ours}} == {{("", "")}}


@pytest.mark.parametrize("warms_up", [False, True])
def test_reserved(gpumem, warms_up):
    before = [torch.ones(30_000_000, device="cuda") for _ in range(2)]
    before.clear()  # cached, but for its being emptied before anything is loaded

    def load():
        if warms_up:  # as transformers does: a block as large as all weights, freed at once
            torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
        return [torch.ones(2**20, device="cuda") for _ in range(4)]

    measured = gpumem.load(load).measurement
    assert measured.loaded == 16 * 2**20
    assert measured.peak_reserved == (64 if warms_up else 20) * 2**20
"""


def test_what_is_loaded_is_measured_and_what_is_planted_is_red_with_its_line(processes, tmp_path):
    pytest.importorskip("transformers", "5.0")
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    file = tmp_path / "test_it.py"
    file.write_text(SOURCE, encoding="utf-8")
    done = processes.pytest("--gpumem-update=new", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 recorded, new" in done.stdout
    done = processes.pytest(
        "--gpumem-baseline", "test_it.py::test_model", "test_it.py::test_reserved", HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file.write_text(SOURCE.replace("PLANTED = False", "PLANTED = True"), encoding="utf-8")
    done = processes.pytest("--gpumem-baseline", "-k", "test_model", HF_HUB_OFFLINE="1")
    assert done.returncode == 1, done.stdout + done.stderr
    line = 1 + SOURCE[: SOURCE.index("tensor.clone()")].count("\n")
    assert f"test_it.py:{line}" in done.stdout
    assert re.search(r"^  retained +0 B +4\.00 MB .*regressed$", done.stdout, re.MULTILINE)
    assert "kept in: test_it.KEPT[...]" in done.stdout
