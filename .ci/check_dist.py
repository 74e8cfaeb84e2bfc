"""Look into what a release is made of: links of the page that the index shows, and placeholders in any file that is shipped."""

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
    # OWNER/NAME is how the help of a command writes any repository.
    r"\bOWNER\b(?!/NAME)": "OWNER stands for the account that the repository is under: replace it",
    r"(?i:not\s+on\s+PyPI\s+yet)": "a release is on PyPI: say how it is installed from there",
    r"(?i:until\s+the\s+first\s+release)": "this is the first release: leave it out",
    r"\] - unreleased": "the changelog's section has no date",
}
"""Regular expressions of placeholders, and what to do about each in a release. Words may stand on two lines."""
NAMES_THEM = (".ci/check_dist.py", "tests/test_check_dist.py")
"""The files of the project that are about placeholders."""


def files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file of a wheel or an sdist, without the folder that holds an sdist's files."""
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
    """Return the links of a page in Markdown that lead to a file or a heading, in order."""
    targets = (next(filter(None, link.groups())) for link in _LINK.finditer(page))
    return [target for target in targets if not _LEADS_SOMEWHERE.match(target)]


def dead_links(archive: Path) -> list[str]:
    """Return the links of a wheel's description which lead nowhere on the page of the package index."""
    (metadata,) = [content for name, content in files_of(archive) if name.endswith(".dist-info/METADATA")]
    page = message_from_bytes(metadata).get_payload(decode=True)
    assert isinstance(page, bytes)
    return [f"{archive.name}: the package index would show a link to {one}" for one in links_within(page.decode())]


def placeholders(archive: Path) -> list[str]:
    """Return the places in the files of a wheel or an sdist at which something still stands for something else."""
    found = []
    for name, content in files_of(archive):
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue  # a picture
        if name in NAMES_THEM:
            continue
        for pattern, advice in PLACEHOLDERS.items():
            lines = [text.count("\n", 0, match.start()) + 1 for match in re.finditer(pattern, text)]
            found += [f"{archive.name}: {name}:{line}: {advice}" for line in lines]
    return found


def main() -> int:
    """Print what is wrong with the archives, and return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", nargs="+", type=Path, help="the wheel and the sdist")
    parser.add_argument("--release", action="store_true", help="refuse placeholders, too")
    given = parser.parse_args()
    found = [fault for archive in given.archives if archive.suffix == ".whl" for fault in dead_links(archive)]
    if given.release:
        found += [fault for archive in given.archives for fault in placeholders(archive)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
