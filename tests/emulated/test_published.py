"""Peaks that an emulated GPU gives are those that others have published, to the byte.

Published: csdiywithme/cs336-assignment2-systems@bb85bbf8d82808f9638481aad0fe9376f8cfdc1a, NVIDIA B200, torch 2.11.0+cu128,
``runs/cloud/20260914T084942Z-models-small-medium/20260914T085455Z-rpc``; figures only.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.workspaces import KEPT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = """
import json, sys
sys.path.insert(0, {benchmarks!r})
import published_peaks
print(json.dumps(published_peaks.run_case({{"run": {run}, "before": 15}})))
"""


BUILT_FOR_B200 = pytest.mark.skipif(
    tuple(map(int, version("torch").split(".")[:2])) < (2, 7),
    reason="torch is built for a B200 (CUDA 12.8) from 2.7 on",
)
GOES_BY_ADDRESS = pytest.mark.skipif(
    version("torch").split(".")[:2] != ["2", "11"],
    reason="published with torch 2.11, whose allocator takes the lower of two blocks of equal size; 2.13's does not",
)
KEEPS_WORKSPACES = pytest.mark.skipif(
    KEPT == 0, reason="published with torch 2.11, which keeps workspaces; 2.15 does not"
)


@BUILT_FOR_B200
@KEEPS_WORKSPACES
@pytest.mark.parametrize(
    ("size", "precision", "mode", "allocated", "reserved"),
    [
        # .../000-small-fp32-forward-w5/result.json
        ("small", "fp32", "forward", 4_105_227_264, 4_244_635_648),
        # .../001-small-fp32-backward-w5/result.json
        ("small", "fp32", "backward", 4_359_507_968, 4_546_625_536),
        # .../002-small-fp32-train-w5/result.json
        ("small", "fp32", "train", 5_408_614_400, 5_746_196_480),
        # .../005-small-bf16-train-w5/result.json
        ("small", "bf16", "train", 4_478_191_616, 4_777_312_256),
        # .../020-medium-bf16-train-w5/result.json
        pytest.param("medium", "bf16", "train", 12_394_189_824, 12_639_535_104, marks=GOES_BY_ADDRESS),
    ],
)
def test_the_model_peaks_where_it_was_published_to(on_gpu, size, precision, mode, allocated, reserved):
    run = {"size": size, "precision": precision, "mode": mode, "context": 512}
    # torch 2.11's workspace, which 2.13 made larger.
    told = on_gpu(RUN.format(benchmarks=str(BENCHMARKS), run=run), "b200", CUBLAS_WORKSPACE_CONFIG=":4096:2:16:8")
    figures = json.loads(told.splitlines()[-1])
    assert (figures["peak_allocated"], figures["peak_reserved"]) == (allocated, reserved)


KERNELS = """
import csv, sys
sys.path.insert(0, {benchmarks!r})
from liger_kernels import peak_of, warm_up
from published_figures import Figure

with open({rows!r}, encoding="utf-8", newline="") as file:
    rows = [row for row in csv.DictReader(file) if row["gpu"].startswith("NVIDIA H100")]
first = dict()
for row in rows:
    first.setdefault(row["kernel"], row)
for kernel, row in first.items():
    warm_up(row)
    peak = peak_of(row)
    print(kernel, "equal" if Figure.read(row).is_that_of(peak) else peak)
"""


def test_kernels_peak_where_they_were_published_to(on_gpu):
    rows = BENCHMARKS / "published" / "liger-memory.csv"
    told = on_gpu(KERNELS.format(benchmarks=str(BENCHMARKS), rows=str(rows)))
    kernels = dict(line.split() for line in told.splitlines())
    assert len(kernels) >= 8
    assert {*kernels.values()} == {"equal"}, told
