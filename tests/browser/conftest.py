"""A browser for the tests of HTML reports, and pages in it that are watched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.reporting.reports.html.page import html

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_gpumem.reporting.reports.session_report import SessionReport

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
        self._listeners = {
            "console": lambda message: self.complaints.append(message.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "dialog": lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)

    def end(self) -> None:
        """Watch it no longer, and leave what it shows: the next test may show another report in it."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self.page.goto("about:blank")


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


@pytest.fixture(scope="module")
def window(browser: Any) -> Any:
    """A window for all tests that need nothing special of it: to open one takes as long again as to show a report in it."""
    return browser.new_context().new_page()


@pytest.fixture
def opens(browser: Any, window: Any, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Opens a report, or the file of one. It must not complain, nor ask for anything but its file."""
    opened: list[tuple[Watched, str | None]] = []

    def open_it(
        report: SessionReport | Path,
        *,
        width: int = 1400,
        fragment: str = "",
        watched: bool = True,
        color_scheme: str = "light",
        **options: Any,
    ) -> Any:
        path = tmp_path / "report.html"
        if hasattr(report, "results"):
            path.write_text(html(report), encoding="utf-8")
        else:
            path = report
        page = browser.new_context(**options).new_page() if options or opened else window
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(media="null", color_scheme=color_scheme)
        one = Watched(page)
        opened.append((one, path.as_uri() if watched else None))
        page.goto(path.as_uri() + fragment)
        return page

    yield open_it
    for one, _ in opened:
        one.end()
        if one.page is not window:
            one.page.context.close()
    for one, address in opened:
        if address is not None:
            assert one.complaints == []
            assert {url.partition("#")[0] for url in one.requests} == {address}
