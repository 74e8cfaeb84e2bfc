"""``gpumem doctor`` and ``gpumem init`` where a GPU can be emulated."""

from __future__ import annotations

import re


def test_doctor_checks_the_emulated_gpu_in_the_settings_and_sees_no_driver(processes, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "emulated:l4"\n')
    done = processes.gpumem("doctor", new=True)  # where no stand-in is loaded
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^ok +emulated:l4 +NVIDIA L4 \(emulated\), 2\d\.\d+ GB: bytes and counts, no times$", done.stdout, re.MULTILINE
    )
    assert re.search(r"^no +driver +NVML reports no driver", done.stdout, re.MULTILINE)
    assert re.search(r"^\w+ +convolutions ", done.stdout, re.MULTILINE)


def test_a_repository_whose_tests_use_a_gpu_is_gated_on_an_emulated_one(processes, tmp_path):
    (tmp_path / "test_gpu.py").write_text(
        "import torch\n\n\ndef test_it():\n    torch.nn.Linear(512, 512).to('cuda')(torch.ones(64, 512, device='cuda'))\n"
    )
    done = processes.gpumem("init", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the workflow is for --runner=emulated, because " in done.stdout
    assert list((tmp_path / "gpumem-baselines").glob("emulated-h100-80gb/test_gpu.py.toml"))
    gate = processes.pytest("--gpumem-baseline")
    assert gate.returncode == 0, gate.stdout
