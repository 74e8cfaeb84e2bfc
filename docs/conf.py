"""Configuration of the documentation site: Sphinx reads the Markdown that GitHub shows, with MyST."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from pytest_gpumem import __version__  # noqa: E402 - from this checkout

REPOSITORY = os.environ.get("DOCS_REPOSITORY", "https://github.com/OWNER/pytest-gpumem")
"""Files outside of docs/ are shown there."""
VERSION = os.environ.get("DOCS_VERSION", "dev")
"""The folder that this build is published in: a release's tag, or ``dev``."""

project = "pytest-gpumem"
copyright = "the pytest-gpumem contributors"  # noqa: A001 - Sphinx's name
version = release = __version__
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_enable_extensions = ["linkify", "html_image"]
myst_linkify_fuzzy_links = False
myst_heading_anchors = 4
nitpicky = True
pygments_style = "default"
smartquotes_action = "qe"  # not dashes: an option begins with two hyphens
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "pytest-gpumem"
html_baseurl = os.environ.get("DOCS_ADDRESS", "")
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["pages.html"]}
html_theme_options = {
    "use_edit_page_button": False,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "icon_links": [{"name": "GitHub", "url": REPOSITORY, "icon": "fa-brands fa-github"}],
    "navbar_center": [],
    # The front page has wide output, and headings that need no list.
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
if html_baseurl:
    # A site that is published names the other versions, which a local build cannot know.
    html_theme_options["navbar_end"] = ["version-switcher", "theme-switcher", "navbar-icon-links"]
    html_theme_options["switcher"] = {
        "json_url": f"{html_baseurl}versions.json",
        "version_match": VERSION,
    }
    html_theme_options["check_switcher"] = False

_UPWARDS = re.compile(r"\]\((?P<path>\.\./[^)#]*)(?P<anchor>#[^)]*)?\)")
_TOCTREE = re.compile(r"^```\{toctree\}\n.*?^```\n?", re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(
    r"(?<=\]\()(?:\.\./)*images/(?=[\w-]+\.(?:png|svg)\))|(?<=src=\")(?:\.\./)*images/"
)


def _link_outside(_app: object, name: str, source: list[str]) -> None:
    """Link files outside of docs/ to the repository."""

    def address(match: re.Match[str]) -> str:
        path = (HERE / name).parent.joinpath(match["path"]).resolve()
        if path.is_relative_to(HERE):
            return match[0]
        if not path.exists():
            raise FileNotFoundError(
                f"docs/{name}.md links to {match['path']}, which does not exist"
            )
        kind = "tree" if path.is_dir() else "blob"
        revision = "main" if VERSION == "dev" else VERSION
        return f"]({REPOSITORY}/{kind}/{revision}/{path.relative_to(HERE.parent).as_posix()}{match['anchor'] or ''})"

    source[0] = _UPWARDS.sub(address, source[0])


class NamesInIndex(SphinxTransform):
    """Enter the names that head sections of the reference into the index, so a search for a name finds its section first."""

    default_priority = 800
    """Before Sphinx collects the entries of the index, at 850."""

    def apply(self, **_: Any) -> None:
        page = self.env.docname
        if not page.startswith("reference/"):
            return
        for section in [*self.document.findall(nodes.section)]:
            title = section.next_node(nodes.title)
            if title is None or len(title) != 1 or not isinstance(title[0], nodes.literal):
                continue
            name = title.astext()
            # Commands that take an option of pytest refer to its own section.
            repeated = name.startswith("--gpumem-") and page != "reference/options"
            main = "" if repeated else "main"
            entry = ("single", name, section["ids"][0], main, None)
            section.append(addnodes.index(entries=[entry]))


def _contents(env: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each part of the front page's contents: its caption, and its pages with those nested below them."""
    for toctree in env.get_doctree("index").findall(addnodes.toctree):
        pages = toctree["includefiles"]
        nested = [[page, *env.toctree_includes.get(page, [])] for page in pages]
        yield toctree["caption"], [page for one in nested for page in one]


def _write_markdown(app: Any, error: Exception | None) -> None:
    """Write each page's Markdown beside its HTML, and ``llms.txt``, which lists them for language models."""
    if error is not None or app.builder.name != "html":
        return
    site = Path(app.outdir)
    for name in app.env.found_docs:
        text = [(HERE / f"{name}.md").read_text(encoding="utf-8")]
        _link_outside(app, name, text)
        text[0] = _IMAGE.sub("../" * name.count("/") + "_images/", _TOCTREE.sub("", text[0]))
        (site / f"{name}.md").write_text(text[0].rstrip() + "\n", encoding="utf-8")
    front = (HERE / "index.md").read_text(encoding="utf-8")
    summary = " ".join(front.split("\n\n")[1].split())
    lines = [f"# {project}", "", f"> {summary}"]
    for caption, pages in _contents(app.env):
        lines += ["", f"## {caption}", ""]
        lines += [f"- [{app.env.titles[name].astext()}]({name}.md)" for name in pages]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Any) -> None:
    """Register what this project adds to Sphinx."""
    app.add_transform(NamesInIndex)
    app.connect("source-read", _link_outside)
    app.connect("build-finished", _write_markdown)
