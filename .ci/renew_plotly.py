"""Download the charts' library, plotly.js with its basic chart kinds, into the package.

`.ci/renew_plotly.py` downloads the release in `origin.json` again, and `.ci/renew_plotly.py 4.2.0` changes to another release.
A download is written only if its SHA-512 is the one in npm's registry. A release that is in the package already must also have
the SHA-512 in `origin.json`, because a published release never changes.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "pytest_gpumem" / "reporting" / "reports" / "html" / "plotly"
PACKAGE = "plotly.js-basic-dist-min"
REGISTRY = "https://registry.npmjs.org"
FILES = ("plotly-basic.min.js", "LICENSE")
SECONDS = 60


class DownloadError(Exception):
    """A download that must not be written."""


def download(url: str) -> bytes:
    """Return the content behind a URL."""
    with urllib.request.urlopen(url, timeout=SECONDS) as response:  # noqa: S310 - npm's registry, or a test's folder
        content: bytes = response.read()
    return content


def integrity_of(content: bytes) -> str:
    """Return the SHA-512 as npm writes it: ``"sha512-1oNF8PeQ..."``."""
    return f"sha512-{base64.b64encode(hashlib.sha512(content).digest()).decode()}"


def files_in(archive: bytes) -> dict[str, bytes]:
    """Return the contents of `FILES` in an npm package.

    Raises:
        DownloadError: A file is missing.
    """
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for name in FILES:
            try:
                file = package.extractfile(f"package/{name}")
            except KeyError:
                file = None
            if file is None:
                raise DownloadError(f"the package has no file {name}")
            contents[name] = file.read()
    return contents


def renew(folder: Path, release: str | None, registry: str = REGISTRY) -> str:
    """Write a release's files and their origin into ``folder``, and return the release.

    Args:
        folder: The folder with `origin.json`.
        release: Example: ``"4.2.0"``. ``None`` stands for the release in `origin.json`.
        registry: The registry's URL.

    Raises:
        DownloadError: The SHA-512 differs from the registry's or from that in `origin.json`, or the package lacks a file.
    """
    origin_file = folder / "origin.json"
    previous = json.loads(origin_file.read_text(encoding="utf-8"))
    release = release or previous["version"]
    listed = json.loads(download(f"{registry}/{PACKAGE}/{release}"))["dist"]
    archive = download(listed["tarball"])
    integrity = integrity_of(archive)
    if integrity != listed["integrity"]:
        raise DownloadError(f"{listed['tarball']} has {integrity}, but the registry lists {listed['integrity']}")
    if release == previous["version"] and integrity != previous["integrity"]:
        raise DownloadError(f"{release} has {integrity}, but origin.json has {previous['integrity']}")
    for name, content in files_in(archive).items():
        (folder / name).write_bytes(content)
    origin = {"package": PACKAGE, "version": release, "tarball": listed["tarball"], "integrity": integrity}
    origin_file.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    return release


def main() -> None:
    """Renew the files in the package, and print the release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", nargs="?", help="example: 4.2.0; default: the release in origin.json")
    try:
        release = renew(FOLDER, parser.parse_args().release)
    except (DownloadError, OSError) as error:
        sys.exit(f"{PACKAGE}: {error}")
    print(f"{PACKAGE} {release} is in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
