"""Put a built site into its version's folder on the branch gh-pages, and list all versions for the version switcher."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

BRANCH = "gh-pages"
VERSIONS = "versions.json"
REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url={version}/"><title>pytest-gpumem</title>\n'
_RELEASE = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def put(site: Path, pages: Path, version: str, address: str) -> None:
    """Replace the folder of ``version`` by ``site``, and list all versions. The index page leads to the newest release.

    Args:
        site: The built site.
        pages: The folder with the branch's files.
        version: A tag (``v0.1.0``) or ``dev``.
        address: The URL of the published branch, with a final slash.
    """
    shutil.rmtree(pages / version, ignore_errors=True)
    shutil.copytree(site, pages / version)
    releases = sorted(
        (path.name for path in pages.iterdir() if _RELEASE.fullmatch(path.name)), key=_numbers, reverse=True
    )
    shown = [*releases, *(["dev"] if (pages / "dev").is_dir() else [])]
    entries = [{"version": name, "name": name, "url": f"{address}{name}/"} for name in shown]
    entries[0]["preferred"] = True
    (pages / VERSIONS).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    (pages / "index.html").write_text(REDIRECT.format(version=shown[0]), encoding="utf-8")
    (pages / ".nojekyll").touch()


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)))


def _git(*words: str, folder: Path | None = None) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def _commit(site: Path, version: str, address: str) -> None:
    """Commit to the branch in a temporary worktree. If the branch does not exist, it begins empty."""
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder, "pages")
        if _git("branch", "--all", "--list", f"*{BRANCH}"):
            _git("worktree", "add", str(pages), BRANCH)
        else:
            _git("worktree", "add", "--detach", str(pages))
            _git("switch", "--orphan", BRANCH, folder=pages)
        try:
            put(site, pages, version, address)
            _git("add", "--all", folder=pages)
            if _git("status", "--porcelain", folder=pages):
                _git("commit", "--message", f"Publish the documentation of {version}", folder=pages)
        finally:
            _git("worktree", "remove", "--force", str(pages))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("version")
    parser.add_argument("address")
    options = parser.parse_args()
    if options.version != "dev" and not _RELEASE.fullmatch(options.version):
        parser.error(f"the version is {options.version!r}, expected a tag like v0.1.0, or dev")
    _commit(options.site, options.version, options.address)
