"""Names of tests as a page links and shows them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.reports.escaping import visible

if TYPE_CHECKING:
    from collections.abc import Iterable


_LONGEST = 60


def anchor_of(nodeid: str) -> str:
    """``"test_train_step-amp-bf16-1f0c9a3b"``: letters and digits of the test's name, and a digest of its whole id."""
    digest = hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9_]+", "-", nodeid.rpartition("::")[2]).strip("-")[:_LONGEST]
    return f"{words or 'test'}-{digest}"


def unique(anchors: Iterable[str]) -> list[str]:
    """``anchors``, with a number behind those that were there before: shards may have run the same test."""
    seen: Counter[str] = Counter()
    found = []
    for anchor in anchors:
        seen[anchor] += 1
        found.append(anchor if seen[anchor] == 1 else f"{anchor}-{seen[anchor]}")
    return found


def in_lines(text: str) -> str:
    """``text`` with its lines and tabs as they are; what cannot be seen, or held by a file, as an escape."""
    return visible(text.replace("\r\n", "\n"), keep="\n\t")


def in_one_line(text: str) -> str:
    """``text`` with newlines and tabs as escapes, too: an id in a table."""
    return visible(text)
