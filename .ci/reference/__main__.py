"""Write `docs/reference/`: every page is made from the code.

With ``--check`` nothing is written: the program names each page that is stale, and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from pytest_gpumem.plugin.config.options import OPTIONS  # noqa: E402 - from this checkout
from reference import (  # noqa: E402
    api,
    commands,
    emulation,
    environment,
    formats,
    hooks,
    markdown,
    metrics,
    settings,
    step_configs,
    verdicts,
)

PAGES = {
    **commands.pages(),
    "options": settings.options_page,
    "settings": settings.settings_page,
    "marker": api.marker_page,
    "fixture": api.fixture_page,
    "values": api.values_page,
    "metrics": metrics.metrics_page,
    "step-configs": step_configs.step_configs_page,
    "reports": formats.reports_page,
    "store-format": formats.store_page,
    "models-by-name": settings.models_page,
    "verdicts": verdicts.verdicts_page,
    "cards": emulation.cards_page,
    "environment": environment.environment_page,
    "hooks": hooks.hooks_page,
}
"""Each page's function by the name of its file, in the order of the index."""


def main() -> int:
    """Write or check the pages. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page is stale")
    check = parser.parse_args().check
    texts = {f"{name}.md": page() for name, page in PAGES.items()}
    # A key of `[tool.gpumem]` that is an option has no entry of its own, but an argument of the marker has one: `device`.
    keys = [option.name for option in OPTIONS if option.is_key]
    texts = markdown.with_links(texts | {"index.md": markdown.index(texts)}, keys)
    stale = [name for name, text in texts.items() if not _is(FOLDER / name, text)]
    unknown = [path.name for path in FOLDER.glob("*.md") if path.name not in texts]
    if check:
        for name in [*stale, *unknown]:
            print(f"docs/reference/{name} is stale: run `make reference`, and commit what it writes", file=sys.stderr)
        return 1 if stale or unknown else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(texts[name], encoding="utf-8")
    for name in unknown:
        (FOLDER / name).unlink()
    print(f"docs/reference: {len(texts)} pages, {len(stale)} written, {len(unknown)} removed")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
