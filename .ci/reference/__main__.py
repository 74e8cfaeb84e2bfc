"""Write `docs/reference/` and the schema of JSON reports: every file is made from the code.

With ``--check`` nothing is written: the program names each file that is stale, and ends with 1 if there is one.
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
    schema,
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
    files = {FOLDER / name: text for name, text in texts.items()} | {ROOT / schema.FILE: schema.schema_text()}
    stale = [path for path, text in files.items() if not _is(path, text)]
    unknown = [path for path in FOLDER.glob("*.md") if path not in files]
    if check:
        for path in [*stale, *unknown]:
            name = path.relative_to(ROOT).as_posix()
            print(f"{name} is stale: run `make reference`, and commit what it writes", file=sys.stderr)
        return 1 if stale or unknown else 0
    FOLDER.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
    for path in unknown:
        path.unlink()
    print(f"docs/reference: {len(files)} files, {len(stale)} written, {len(unknown)} removed")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
