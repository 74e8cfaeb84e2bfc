"""The page of `gpumem advise` in a browser."""

from __future__ import annotations

import pytest

from pytest_gpumem.measuring.models.task import TRAINING
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise.formats import html
from pytest_gpumem.tools.advise.results import Advice, DeviceTrials, Recommendation
from pytest_gpumem.tools.advise.search_order import Trial
from tests.reports.sessions import explained

FP32 = StepConfig.parse("fp32")
FITS = Trial(FP32, 10**9)


@pytest.mark.parametrize(("scheme", "width"), [("dark", 375), pytest.param("light", 1400, marks=pytest.mark.thorough)])
def test_the_memory_over_the_step_is_drawn_and_the_page_is_not_wider_than_the_screen(opens, tmp_path, scheme, width):
    text = "x" * 300
    cards = tuple(DeviceTrials(f"{text}{number}", 8 * 10**9, (FITS,), FITS) for number in range(3))
    code = (f"model.{text} = 1",)
    page_of = Advice(text, TRAINING, True, cards, (Recommendation(FP32, text, code, explained(text)),))
    path = tmp_path / "advice.html"
    path.write_text(html(page_of), encoding="utf-8")
    page = opens(path, width=width, color_scheme=scheme)
    page.locator(".chart svg").first.wait_for()
    assert page.locator(".chart .legendtext").all_text_contents() == ["parameters", "activations"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("tbody th", has_text="activations").first.is_visible()
