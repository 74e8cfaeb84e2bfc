"""Check the archives of a release: links on the package index's page, and placeholders in any file."""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINK = re.compile(
    r"\]\(\s*<?(?P<inline>[^)\s>]+)|^ {0,3}\[[^]]+\]:\s*<?(?P<reference>\S+)|\b(?:href|src)=[\"']?(?P<html>[^\"'\s>]+)",
    re.MULTILINE,
)
_LEADS_SOMEWHERE = re.compile(r"https?://|mailto:")
PLACEHOLDERS = {
    # The help of a command writes OWNER/NAME for any repository.
    r"\bOWNER\b(?!/NAME)": "OWNER stands for the repository's account: replace it",
    r"(?i:not\s+on\s+PyPI\s+yet)": "a release is on PyPI: say how to install it from there",
    r"(?i:until\s+the\s+first\s+release)": "this is the first release: delete this",
    r"\] - unreleased": "the changelog's section has no date",
}
"""Regular expressions for placeholders, and how to replace each in a release. A match may span two lines."""
NAMES_THEM = (".ci/check_dist.py", "tests/test_check_dist.py")
"""The files that mention placeholders on purpose."""


def files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file in a wheel or an sdist. The top folder of an sdist is not part of the path."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                file = sdist.extractfile(member) if member.isfile() else None
                if file is not None:
                    yield member.name.partition("/")[2], file.read()


def links_within(page: str) -> list[str]:
    """Return the links from a Markdown page to files or headings, in order."""
    targets = (next(filter(None, link.groups())) for link in _LINK.finditer(page))
    return [target for target in targets if not _LEADS_SOMEWHERE.match(target)]


def dead_links(archive: Path) -> list[str]:
    """Return a message for each link in a wheel's description that is dead on the package index."""
    (metadata,) = [content for name, content in files_of(archive) if name.endswith(".dist-info/METADATA")]
    page = message_from_bytes(metadata).get_payload(decode=True)
    assert isinstance(page, bytes)
    return [
        f"{archive.name}: the package index would show a link to {target}" for target in links_within(page.decode())
    ]


def placeholders(archive: Path) -> list[str]:
    """Return a message for each placeholder in the files of a wheel or an sdist."""
    faults = []
    for name, content in files_of(archive):
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue  # a picture
        if name in NAMES_THEM:
            continue
        for pattern, advice in PLACEHOLDERS.items():
            lines = [text.count("\n", 0, match.start()) + 1 for match in re.finditer(pattern, text)]
            faults += [f"{archive.name}: {name}:{line}: {advice}" for line in lines]
    return faults


def main() -> int:
    """Print the faults in the archives. Return 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", nargs="+", type=Path, help="the wheel and the sdist")
    parser.add_argument("--release", action="store_true", help="refuse placeholders as well")
    options = parser.parse_args()
    faults = [fault for archive in options.archives if archive.suffix == ".whl" for fault in dead_links(archive)]
    if options.release:
        faults += [fault for archive in options.archives for fault in placeholders(archive)]
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
