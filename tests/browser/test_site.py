"""The site of docs/ in a real browser: light and dark, on a telephone's screen, and searched. `make docs` builds it."""

from __future__ import annotations

import os
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import Watched
from tests.pages import FENCE, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SITE = ROOT / "build" / "site"
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md"))
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
COLORS = "(() => { const of = getComputedStyle(document.body); return [of.color, of.backgroundColor]; })()"

CUT_OFF = """[...document.querySelectorAll('.bd-article *')].filter((one) => {
    for (let around = one.parentElement; around; around = around.parentElement) {
        if (getComputedStyle(around).overflowX === 'auto' && around.closest('.bd-article')) return false;
    }
    return one.getBoundingClientRect().right > innerWidth;
}).length"""
"""How much of a page's text is beyond the window's edge, and not in something that scrolls by itself."""


IN_THE_LIST = """[...document.querySelectorAll('.bd-sidebar-secondary li *')]
    .filter((one) => one.getBoundingClientRect().right > innerWidth).length"""
"""How much of the list of a page's sections is beyond the window's edge."""


def is_hidden(path: Path) -> bool:
    """Whether it lies in a hidden folder or is a hidden file: a tool's cache is no page."""
    return any(part.startswith(".") for part in path.parts)


def lacking(site: Path, docs: Path) -> str | None:
    """Why a site cannot stand for the pages: there is none, or they have changed since."""
    front = site / "index.html"
    if not front.exists():
        return "needs the site: `make docs` builds it"
    files = [path for path in docs.rglob("*") if path.is_file() and not is_hidden(path.relative_to(docs))]
    newest = max(files, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > front.stat().st_mtime:
        return f"needs the site as it is now: {newest.relative_to(docs)} is newer, and `make docs` builds it again"
    return None


class Quiet(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        # Which a browser asks for by itself.
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site as it is served: a search opens pages, which files may not."""
    reason = lacking(SITE, ROOT / "docs")
    if reason is not None:
        pytest.skip(reason)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens a page of the site in a window of its own. It must not complain, nor ask for what is not in the site."""
    opened: list[Watched] = []

    def open_it(path: str, *, width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(Watched(context.new_page()))
        opened[-1].page.goto(f"{address}/{path}")
        return opened[-1].page

    yield open_it
    for one in opened:
        # The theme says in the console what it does.
        assert [text for text in one.complaints if not text.startswith("[PST]: ")] == []
        assert [url for url in one.requests if not url.startswith((address, "data:"))] == []
    for context in browser.contexts:
        context.close()


def brightness(color: str) -> float:
    """Of an ``rgb(...)``, from 0 to 255."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_a_site_that_is_older_than_its_pages_is_not_judged(tmp_path):
    site, docs = tmp_path / "site", tmp_path / "docs"
    assert "needs the site: " in lacking(site, docs)
    for path, seconds in ((docs / "index.md", 1), (docs / "_static" / "site.css", 2), (site / "index.html", 3)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (seconds, seconds))
    assert lacking(site, docs) is None
    cached = docs / ".ruff_cache" / "1"
    cached.parent.mkdir()
    cached.touch()
    assert lacking(site, docs) is None
    os.utime(docs / "_static" / "site.css", (4, 4))
    assert "_static/site.css is newer" in lacking(site, docs)


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_the_site_is_light_or_dark_as_the_system_is_and_can_be_read(visit, scheme, dark):
    text, ground = map(brightness, visit("guide/start.html", scheme=scheme).evaluate(COLORS))
    assert (ground < text) is dark
    assert abs(text - ground) > 150


def test_no_page_is_wider_than_a_telephone(visit, address):
    page = visit("index.html", width=375)
    wide = {}
    # Pages of commands have one layout.
    for path in (path for path in PAGES if not path.name.startswith("command-") or path.name == "command-advise.html"):
        page.goto(f"{address}/{path}")
        wide[str(path)] = (page.evaluate(OVERFLOW), page.evaluate(CUT_OFF))
    assert {path: by for path, by in wide.items() if any(by)} == {}


def test_every_page_is_in_the_navigation(visit, address):
    page = visit("index.html")
    linked = page.evaluate("[...document.querySelectorAll('nav a, .bd-sidebar-primary a')].map((one) => one.href)")
    missing = {path for path in PAGES if f"{address}/{path}" not in {one.partition("#")[0] for one in linked}}
    assert {str(path) for path in missing} <= {"index.html"}


def test_a_word_is_found_and_its_page_opens(visit):
    page = visit("search.html?q=leak")
    found = page.locator("#search-results li a", has_text="Which of my tests leak?").first
    found.click()
    assert page.locator("h1").first.inner_text().startswith("Which of my tests leak?")


NAMES = {
    "--gpumem-update": "reference/options.html#gpumem-update",
    "--gpumem-baseline": "reference/options.html#gpumem-baseline",
    "time_budget": "reference/settings.html#time-budget",
    "peak_allocated": "reference/metrics.html#peak-allocated",
    "--max-slowdown": "reference/command-ab.html#max-slowdown",
}
"""Names as they are typed into the search, and the section of the reference that each is."""


@pytest.mark.parametrize("name", NAMES)
def test_a_search_for_a_name_finds_its_section_of_the_reference_first(visit, name):
    page = visit(f"search.html?q={name}")
    assert page.locator("#search-results li a").first.get_attribute("href") == NAMES[name]


def test_options_of_the_reference_can_be_read_on_a_wide_screen(visit):
    page = visit("reference/options.html")
    assert page.evaluate("document.querySelectorAll('.bd-sidebar-secondary li').length") > 10
    assert page.evaluate(IN_THE_LIST) == 0


def test_the_name_of_a_file_stands_on_its_block(visit):
    page = visit("ci.html")
    name = page.get_by_text(".github/workflows/gpumem.yml", exact=True).first
    block = page.locator("p:has-text('.github/workflows/gpumem.yml') + div.highlight-yaml").first
    gap = block.bounding_box()["y"] - name.bounding_box()["y"] - name.bounding_box()["height"]
    assert 0 <= gap < 12


def test_each_page_has_its_markdown_and_llms_txt_lists_all(address):
    listed = re.findall(r"\]\(([\w/-]+\.md)\)", (SITE / "llms.txt").read_text(encoding="utf-8"))
    pages = sorted(path.with_suffix(".md").as_posix() for path in PAGES)
    assert sorted([*listed, "index.md"]) == pages
    for page in pages:
        text = (SITE / page).read_text(encoding="utf-8")
        assert "{toctree}" not in text
        relative = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", FENCE.sub("", text))
        assert [one for one in relative if not (SITE / page).parent.joinpath(one).exists()] == [], page
