"""A browser for the tests of HTML reports, and pages in it that are watched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.reports.html.page import html

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_gpumem.reports.session_report import SessionReport

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MILLISECONDS = 60_000
"""Longer than anything takes; what hangs must not hang the suite."""


INK = {"light": "rgb(28, 36, 48)", "dark": "rgb(228, 232, 237)"}


def prefer(page: Any, scheme: str) -> None:
    """Switch the system to light or dark, and wait until every chart is drawn anew for it."""
    from playwright.sync_api import expect

    page.emulate_media(color_scheme=scheme)
    # All charts are drawn at once, so the first tells of the others.
    expect(page.locator(".legendtext").first).to_have_css("fill", INK[scheme], timeout=MILLISECONDS)


@dataclass
class Watched:
    """A page, and what it complained of and asked for meanwhile."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(MILLISECONDS)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium as Debian has it. A module has one, as a test outside may run an event loop of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: `make browser` installs it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=[*ARGUMENTS])
        yield browser
        browser.close()


@pytest.fixture
def opens(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Opens a report, or the file of one, in a window of its own. It must not complain, nor ask for anything but its file."""
    opened: list[tuple[Watched, str]] = []

    def open_it(
        report: SessionReport | Path, *, width: int = 1400, fragment: str = "", watched: bool = True, **window: Any
    ) -> Any:
        path = tmp_path / "report.html"
        if hasattr(report, "results"):
            path.write_text(html(report), encoding="utf-8")
        else:
            path = report
        context = browser.new_context(viewport={"width": width, "height": 900}, **window)
        one = Watched(context.new_page())
        if watched:
            opened.append((one, path.as_uri()))
        one.page.goto(path.as_uri() + fragment)
        return one.page

    yield open_it
    for one, address in opened:
        assert one.complaints == []
        assert {url.partition("#")[0] for url in one.requests} == {address}
    for context in browser.contexts:
        context.close()
