"""The pictures of the HTML report in the docs, taken of the example project with a fault in it.

``SCREENSHOTS=docs/images`` keeps them (`make screenshots`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests import preloaded
from tests.browser.conftest import prefer

ROOT = Path(__file__).parents[2]
SECONDS = 240
TESTS = (
    "tests/test_gpt.py::test_train_step",
    "tests/test_gpt_configs.py::test_matrix[fp32]",
    "tests/test_gpt_configs.py::test_matrix[amp-bf16]",
    "tests/test_convnet.py::test_evaluation",
)
FUSED = "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
KEEPS_FLOAT32_SCORES = """\
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(mask, float("-inf"))
        y = scores.float().softmax(dim=-1).to(v.dtype) @ v
"""
MOST_BYTES = 200_000
"""Of a picture: the docs are read over networks, too."""
PICTURES = {
    "report-wide": (1400, 1300, "light"),
    "report-dark": (1400, 1300, "dark"),
    "report-narrow": (375, 1640, "light"),
}
"""How wide and high the window is, and what the system prefers."""


@pytest.fixture(scope="module")
def report(browser, tmp_path_factory) -> Path:
    """The report of a few tests of the example project, whose attention keeps float32 scores. Needs a browser: comes after it."""
    folder = tmp_path_factory.mktemp("screenshots")
    kept_out = shutil.ignore_patterns("__pycache__", ".pytest_cache", ".lock")
    project = Path(shutil.copytree(ROOT / "example_project", folder / "example_project", ignore=kept_out))
    model = project / "tiny_models" / "gpt.py"
    text = model.read_text(encoding="utf-8")
    assert text.count(FUSED) == 1
    model.write_text(text.replace(FUSED, KEEPS_FLOAT32_SCORES), encoding="utf-8")
    path = folder / "report.html"
    command = ["-m", "pytest", *TESTS, f"--gpumem-report={path}"]
    options = ["-p", "no:randomly", "--gpumem-device=cpu", "--gpumem-baseline", "--gpumem-explain=always"]
    settings = project / "pyproject.toml"
    quick = '[tool.gpumem]\ntime_budget = "300 ms"\n'
    settings.write_text(settings.read_text(encoding="utf-8").replace("[tool.gpumem]\n", quick), encoding="utf-8")
    ours = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = preloaded.run(*command, *options, cwd=project, env=environment, timeout=SECONDS)
    assert path.exists(), done.stdout + done.stderr
    return path


@pytest.mark.thorough
def test_the_report_of_the_example_project_in_pictures(opens, report, tmp_path):
    page = opens(report)
    assert page.locator(".accounting").inner_text() == "4 gated, 3 regressed"
    page.locator("tbody[data-outcome]", has_text="test_matrix[fp32]").locator("th button").click()
    assert "blocks.*.attention" in page.locator(".parts").first.inner_text()
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    for name, (width, height, scheme) in PICTURES.items():
        page.set_viewport_size({"width": width, "height": height})
        prefer(page, scheme)
        page.locator(".over_time svg .trace path").first.wait_for(state="attached")
        picture = folder / f"{name}.png"
        page.screenshot(path=picture)
        assert picture.stat().st_size < MOST_BYTES, name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
