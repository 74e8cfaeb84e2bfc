"""A card of the project's own, from its settings to the processes that a session or a program starts."""

from __future__ import annotations

import json

SETTINGS = '[tool.gpumem.gpus.mine]\nlike = "l4"\nmemory = "9GB"\nsms = 50\n'
CHILD = "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory, p.multi_processor_count)"
SESSION = f"""
import subprocess, sys
import torch


def test_it(gpumem, tmp_path):
    gpumem.measure(lambda: torch.empty(10**6, dtype=torch.uint8, device="cuda"))
    child = subprocess.run([sys.executable, "-c", {CHILD!r}], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert child.stdout == "mine (emulated) 9000000000 50\\n"
"""
TAKES_EIGHT_GB = "import torch\ntorch.empty(8 * 10**9, dtype=torch.uint8, device='cuda')\n"


def test_a_session_measures_on_the_projects_own_card_and_so_do_its_children(processes):
    (processes.folder / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    (processes.folder / "test_it.py").write_text(SESSION, encoding="utf-8")
    done = processes.pytest(
        "--gpumem-update=new", "--gpumem-report=it.json", "--gpumem-explain=never", gpu="mine", new=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (processes.folder / "gpumem-baselines").iterdir() if path.is_dir()] == [
        "emulated-mine"
    ]
    report = json.loads((processes.folder / "it.json").read_text(encoding="utf-8"))
    assert "mine (emulated)" in json.dumps(report)


def test_a_program_fits_into_a_card_of_ones_own_and_not_into_a_small_slice(processes):
    (processes.folder / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    (processes.folder / "t.py").write_text(TAKES_EIGHT_GB, encoding="utf-8")
    devices = ["--device", "mine", "--device", "a100-40gb-mig-1g.5gb"]
    done = processes.gpumem("fit", *devices, "--format", "json", "t.py")
    assert done.returncode == 1, done.stdout + done.stderr
    mine, part = json.loads(done.stdout)["gpus"]
    assert (mine["gpu"], mine["name"], mine["total_bytes"], mine["outcome"]) == ("mine", "mine", 9 * 10**9, "fits")
    assert (part["gpu"], part["name"]) == ("a100-40gb-mig-1g.5gb", "A100 40GB MIG 1g.5gb")
    assert "total capacity of 4.75 GiB" in part["message"]
