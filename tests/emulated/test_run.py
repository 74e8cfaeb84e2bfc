"""``gpumem run`` on an emulated GPU: a plain script gated, and faults that are planted in it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.emulated.conftest import REPOSITORY
from tests.test_run import HELPERS, SCRIPT, line_of


def script_on_cuda() -> str:
    moved = SCRIPT.replace("in sys.argv else 64)\n", 'in sys.argv else 64).to("cuda")\n')
    return moved.replace("model[0].in_features)", 'model[0].in_features, device="cuda")')


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text(script_on_cuda(), encoding="utf-8")
    (tmp_path / "helpers.py").write_text(HELPERS, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.gpumem]\n", encoding="utf-8")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        words = ["run", "train.py", "--gpumem-device=emulated:h100", *arguments]
        return subprocess.run(
            [sys.executable, "-m", "pytest_gpumem.cli.main", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    return command


def test_planted_faults_are_red_with_module_and_line_and_their_twin_is_green(run):
    assert run("--gpumem-update=new").returncode == 0
    green = run("--gpumem-baseline")
    assert (green.returncode, "gpumem: 1 gated" in green.stdout) == (0, True), green.stdout

    leak = run("--gpumem-baseline", "--", "leak")
    assert leak.returncode == 1
    assert f"growth per step {4 * 256 * (64 + 256 + 64) / 1000:.2f} kB, baseline 0 B" in leak.stdout
    kept = leak.stdout.partition("kept by each step")[2].partition("what grew")[0]
    assert f"train.py:{line_of('history.append')}" in kept

    for word, category, tensors in (
        ("wide", "optimizer state", "was float32[256, 64], now float32[384, 96]"),
        ("copy", "parameters", "1 -> 2 tensors"),
    ):
        red = run("--gpumem-baseline", "--", word)
        assert red.returncode == 1, red.stdout
        grew = [line for line in red.stdout.partition("what grew")[2].splitlines() if tensors in line]
        # The modules of the nn.Sequential are one row.
        assert any(line.split("  ")[1] == category and " * " in line for line in grew), red.stdout
