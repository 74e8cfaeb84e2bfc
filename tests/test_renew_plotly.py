"""`.ci/renew_plotly.py` with a registry in a folder."""

from __future__ import annotations

import io
import json
import runpy
import tarfile
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "renew_plotly.py"))
LIBRARY, LICENSE = "plotly-basic.min.js", "LICENSE"


def packed(files: dict[str, bytes]) -> bytes:
    """An npm package with these files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


@pytest.fixture
def folder(tmp_path):
    """The package's folder with release 4.1.1."""
    (tmp_path / "plotly").mkdir()
    (tmp_path / "plotly" / LIBRARY).write_bytes(b"old")
    origin = {"version": "4.1.1", "integrity": "sha512-old"}
    (tmp_path / "plotly" / "origin.json").write_text(json.dumps(origin), encoding="utf-8")
    return tmp_path / "plotly"


@pytest.fixture
def publish(tmp_path):
    """Publish a release in a registry, whose URL is returned."""

    def publish_it(release: str, files: dict[str, bytes], integrity: str | None = None) -> str:
        archive = tmp_path / f"{release}.tgz"
        archive.write_bytes(packed(files))
        path = tmp_path / "registry" / SCRIPT["PACKAGE"] / release
        path.parent.mkdir(parents=True, exist_ok=True)
        integrity = integrity or SCRIPT["integrity_of"](archive.read_bytes())
        dist = {"tarball": archive.as_uri(), "integrity": integrity}
        path.write_text(json.dumps({"dist": dist}), encoding="utf-8")
        return (tmp_path / "registry").as_uri()

    return publish_it


def refused(folder: Path, release: str | None, registry: str) -> str:
    """Why a release is refused. No file has changed then."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SCRIPT["DownloadError"]) as raised:
        SCRIPT["renew"](folder, release, registry)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return str(raised.value)


def test_a_release_is_written_with_its_licence_and_origin(folder, publish):
    registry = publish("4.2.0", {LIBRARY: b"new\r\n", LICENSE: b"MIT", "README.md": b"no"})
    assert SCRIPT["renew"](folder, "4.2.0", registry) == "4.2.0"
    origin = json.loads((folder / "origin.json").read_text(encoding="utf-8"))
    assert (origin["package"], origin["version"]) == ("plotly.js-basic-dist-min", "4.2.0")
    assert origin["integrity"] == SCRIPT["integrity_of"](Path(folder.parent / "4.2.0.tgz").read_bytes())
    assert sorted(path.name for path in folder.iterdir()) == [LICENSE, "origin.json", LIBRARY]
    assert (folder / LIBRARY).read_bytes() == b"new\r\n"
    assert SCRIPT["renew"](folder, None, registry) == "4.2.0"


def test_the_digest_is_written_as_npm_writes_it():
    empty = "z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg=="
    assert SCRIPT["integrity_of"](b"") == f"sha512-{empty}"


def test_a_download_with_another_digest_than_the_registrys_is_refused(folder, publish):
    registry = publish("4.2.0", {LIBRARY: b"new", LICENSE: b"MIT"}, integrity="sha512-other")
    assert "but the registry lists sha512-other" in refused(folder, "4.2.0", registry)


def test_a_release_that_changed_after_its_publication_is_refused(folder, publish):
    registry = publish("4.1.1", {LIBRARY: b"changed", LICENSE: b"MIT"})
    assert "but origin.json has sha512-old" in refused(folder, None, registry)


def test_a_package_without_a_licence_is_refused(folder, publish):
    registry = publish("4.2.0", {LIBRARY: b"new"})
    assert refused(folder, "4.2.0", registry) == "the package has no file LICENSE"
