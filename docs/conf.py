"""Configuration of the documentation site: Sphinx reads the Markdown that GitHub shows, with MyST."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

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


def _link_outside(_app: object, name: str, source: list[str]) -> None:
    """Link files that are no page, which exist beside docs/, to the repository."""

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


def setup(app: object) -> None:
    """Register what this project adds to Sphinx."""
    app.connect("source-read", _link_outside)  # type: ignore[attr-defined]
