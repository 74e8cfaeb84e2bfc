"""Publishing of the documentation site: a folder for each version, and a list of them with the newest release first."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "publish_docs.py"


@pytest.fixture
def put():
    spec = importlib.util.spec_from_file_location("publish_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.put


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "guide.html").write_text("new", encoding="utf-8")
    return folder


def test_the_newest_release_is_shown_first_and_a_version_replaces_itself(put, site, tmp_path):
    pages = tmp_path / "pages"
    (pages / "dev").mkdir(parents=True)
    (pages / "dev" / "gone.html").touch()
    for version in ("v0.9.0", "v0.10.0", "dev"):
        put(site, pages, version, "https://example.org/p/")
    listed = json.loads((pages / "versions.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in listed] == ["v0.10.0", "v0.9.0", "dev"]
    assert listed[0] == {
        "version": "v0.10.0",
        "name": "v0.10.0",
        "url": "https://example.org/p/v0.10.0/",
        "preferred": True,
    }
    assert "url=v0.10.0/" in (pages / "index.html").read_text(encoding="utf-8")
    assert [path.name for path in (pages / "dev").iterdir()] == ["guide.html"]


def test_the_site_is_committed_to_an_empty_branch_and_the_checkout_stays(site, tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()

    def git(*words: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(["git", *named, *words], cwd=checkout, check=True, capture_output=True, text=True).stdout

    git("init", "--initial-branch=main")
    git("config", "user.name", "a")
    git("config", "user.email", "a@example.org")
    (checkout / "code.py").touch()
    git("add", "--all")
    git("commit", "--message", "Begin")
    for version in ("dev", "v0.1.0", "v0.1.0"):
        publish = [sys.executable, str(SCRIPT), str(site), version, "https://example.org/p/"]
        subprocess.run(publish, cwd=checkout, check=True)
    published = git("ls-tree", "-r", "--name-only", "gh-pages").split()
    assert published == [".nojekyll", "dev/guide.html", "index.html", "v0.1.0/guide.html", "versions.json"]
    assert len(git("log", "--format=%s", "gh-pages").splitlines()) == 2
    assert git("status", "--porcelain") == ""
    assert git("worktree", "list").count("\n") == 1


def test_a_version_that_is_no_tag_is_refused(site):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(site), "../x", "a/"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "expected a tag like v0.1.0, or dev" in done.stderr
