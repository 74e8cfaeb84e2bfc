"""Recurrent layers on an emulated GPU: what cuDNN keeps of them for backward is a lower bound, which is said."""

from __future__ import annotations

import json

import pytest

KEPT = """
from torch import nn
from pytest_gpumem.emulating.emulation.load import current_emulation
cudnn = current_emulation().cudnn

def kept(layer, x):
    # Bytes that forward leaves in training, beside its outputs. The first pass makes the state of dropout.
    layer = layer.cuda()
    layer(x)
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y, state = layer(x)
    left = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    outputs = [y.data if hasattr(y, "batch_sizes") else y, *(state if isinstance(state, tuple) else [state])]
    loss = outputs[0].sum()
    loss.backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in layer.parameters())
    return left - sum(one.nbytes for one in outputs)
"""
UNITS, TOKENS, F32 = 16, 7 * 3, 4


@pytest.mark.parametrize(
    ("layer", "values"),
    [
        ("nn.LSTM(12, 16, num_layers=3, dropout=0.1)", (3 * 5 + 2) * UNITS),
        ("nn.LSTM(12, 16, num_layers=2, bidirectional=True)", 2 * (2 * 5 + 1) * UNITS),
        ("nn.LSTM(12, 16, num_layers=2, proj_size=5, bias=False)", 2 * 5 * UNITS + 5),
        ("nn.GRU(12, 16, num_layers=2, bias=False)", (2 * 6 + 1) * UNITS),
        ("nn.GRU(12, 16, batch_first=True)", 6 * UNITS),
        ("nn.RNN(12, 16, num_layers=2)", (2 + 1) * UNITS),
    ],
)
def test_what_is_kept_for_backward_is_gates_cells_and_the_outputs_of_lower_layers(on_gpu, layer, values):
    state = 3 if "batch_first" not in layer else 7
    # The first states, which torch makes: one an output and one a cell.
    told = on_gpu(KEPT + f"layer = {layer}\nx = torch.randn(7, 3, 12, device='cuda')\nprint(kept(layer, x))\n")
    directions = 2 if "bidirectional" in layer else 1
    layers = next((n for n in (2, 3) if f"num_layers={n}" in layer), 1)
    output = 5 if "proj_size" in layer else UNITS
    first_states = layers * directions * state * F32 * (output + (UNITS if "LSTM" in layer else 0))
    assert int(told) - first_states == TOKENS * values * F32 + 256


def test_published_sizes_are_met(on_gpu):
    # github.com/pytorch/pytorch/issues/2895: 4 layers of 320 units, 123 features, 25,000 tokens.
    told = on_gpu(
        KEPT + "x = torch.empty(500, 50, 123, device='cuda')\n"
        "for layer in (nn.LSTM, nn.GRU):\n"
        "    y, state = layer(123, 320, 4).cuda()(x)\n"
        "    print(cudnn.lacking().rpartition(' at most ')[2])\n"
    )
    assert told.split() == ["736.00", "MB", "864.00", "MB"]


RECORDED = [
    ("RNN(128, 64)", (1, 1, 128), "float32", 8_444_192, 512),
    ("RNN(256, 256, 2, bidirectional=True)", (32, 16, 256), "float16", 41_124_224, 1_573_120),
    ("RNN(128, 512, 2)", (128, 64, 128), "float32", 83_362_560, 50_331_904),
    ("GRU(128, 64, 2)", (1, 1, 128), "float16", 16_904_992, 1_920),
    ("GRU(256, 256, 2, bidirectional=True)", (128, 16, 256), "float16", 52_396_416, 27_263_232),
    ("GRU(128, 512, bidirectional=True)", (128, 64, 128), "float32", 231_998_208, 201_326_848),
    ("LSTM(128, 64, 2, bidirectional=True)", (1, 1, 128), "float16", 33_958_688, 3_072),
    ("LSTM(256, 256)", (1, 1, 256), "float32", 10_503_456, 5_376),
]
"""On an H100 with cuDNN 9.19: a layer, its input, the bytes of its workspace and of what is kept."""


def test_what_a_gpu_kept_is_met_and_its_workspace_is_not_exceeded(on_gpu):
    source = f"""
from torch import nn
for layer, size, dtype, *_ in {RECORDED!r}:
    layer = eval(f"nn.{{layer}}").cuda().to(getattr(torch, dtype))
    x = torch.empty(size, device="cuda", dtype=getattr(torch, dtype))
    result = None
    torch.cuda.memory._record_memory_history(context=None)
    result = layer(x)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    allocated = [one["size"] for one in trace if one["action"] == "alloc"]
    workspace = max(one["size"] for one in trace if one["action"] == "free_completed")
    print(workspace, allocated[allocated.index(workspace) + 1])
"""
    for line, (*_, workspace, kept) in zip(on_gpu(source).splitlines(), RECORDED, strict=True):
        told_workspace, told = map(int, line.split())
        assert told == kept
        assert 0.5 * workspace < told_workspace <= workspace


def test_they_train_in_every_precision_packed_and_not(on_gpu):
    told = on_gpu(
        KEPT + "for layer in (nn.LSTM, nn.GRU, nn.RNN):\n"
        "    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):\n"
        "        model = layer(12, 16, 2, bidirectional=True, dropout=0.1).cuda().to(dtype)\n"
        "        model(torch.randn(7, 3, 12, device='cuda', dtype=dtype))[0].sum().backward()\n"
        "        with torch.no_grad():\n"
        "            model.eval()(torch.randn(7, 3, 12, device='cuda', dtype=dtype))\n"
        "    model = layer(12, 16, 2).cuda()\n"
        "    with torch.autocast('cuda', torch.bfloat16):\n"
        "        model(torch.randn(7, 3, 12, device='cuda'))[0].float().sum().backward()\n"
        "    padded = torch.randn(3, 7, 12, device='cuda')\n"
        "    packed = nn.utils.rnn.pack_padded_sequence(padded, [7, 5, 2], batch_first=True)\n"
        "    print(kept(layer(12, 16), packed) - kept(layer(12, 16), padded))\n"
    )
    lstm, gru, _ = map(int, told.split())
    # 14 tokens of 21; unpacked, padded's first dimension is time: states of 7 samples instead of 3.
    assert lstm == -(7 * 5 * UNITS * F32) - (7 - 3) * 2 * UNITS * F32
    assert gru == -(7 * 6 * UNITS * F32) - (7 - 3) * UNITS * F32


def test_inference_keeps_nothing(on_gpu):
    told = on_gpu(
        KEPT + "layer = nn.LSTM(12, 16).cuda()\nx = torch.randn(7, 3, 12, device='cuda')\n"
        "with torch.no_grad():\n"
        "    before = torch.cuda.memory_stats()['requested_bytes.all.current']\n"
        "    y, (h, c) = layer(x)\n"
        "    print(torch.cuda.memory_stats()['requested_bytes.all.current'] - before - y.nbytes - h.nbytes - c.nbytes)\n"
        "print(cudnn.lacking())\n"
    )
    assert told.splitlines()[0] == "0"
    assert told.splitlines()[1].startswith(
        "recurrent layers keep as many bytes for backward as on an H100 with cuDNN 9.19, "
    )


PROJECT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, 2), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][-1])

def loss(out, _):
    return out.square().mean()

def test_lstm(gpumem):
    gpumem.train_step(Net, lambda: torch.randn(50, 8, 64), loss=loss)

def test_linear(gpumem):
    gpumem.train_step(lambda: nn.Linear(64, 64), lambda: torch.randn(8, 64), loss=loss)
"""


def test_a_session_gates_them_and_says_which_peaks_may_be_too_low(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(PROJECT, encoding="utf-8")
    recorded = processes.pytest("--gpumem-update=new", "--gpumem-report=report.json")
    assert recorded.returncode == 0, recorded.stdout
    assert (
        "gpumem recurrent layers: the peaks of 1 measurement may be too low: recurrent layers keep as many bytes"
        in recorded.stdout
    )
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    told = {
        result["verdict"]["test"]: result["verdict"]["verdicts"][0]["measurement"]["environment"]["details"].get(
            "emulated_rnn"
        )
        for result in report["results"]
    }
    assert told == {"test_lstm": "lower bound", "test_linear": None}
    again = processes.pytest("--gpumem-baseline", "--gpumem-strict")
    assert again.returncode == 0, again.stdout
    model = (tmp_path / "test_it.py").read_text(encoding="utf-8").replace("128, 2)", "128, 3)")
    (tmp_path / "test_it.py").write_text(model, encoding="utf-8")
    larger = processes.pytest("--gpumem-baseline")
    assert larger.returncode == 1, larger.stdout
