"""Any program on an emulated GPU, with its peaks at the end."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.emulated.conftest import REPOSITORY


def test_any_program_runs_on_one_and_its_peaks_are_told(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n\n\ndef work():\n    kept = torch.empty(10**9, dtype=torch.uint8, device='cuda')\n"
        "    del kept\n\n\nwork()\nprint(torch.cuda.get_device_name())\nraise SystemExit(3)\n",
        encoding="utf-8",
    )
    emulate = [sys.executable, "-m", "pytest_gpumem.cli.main", "emulate", "l4", "--", sys.executable, "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        emulate, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "NVIDIA L4 (emulated)\n"
    assert "gpumem: NVIDIA L4 (emulated), cuda:0: peak 1.00 GB allocated, " in done.stderr
    assert "1.00 GB      1 x  " in done.stderr
    assert "train.py:5 work" in done.stderr
