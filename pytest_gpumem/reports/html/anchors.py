"""Names by which a link finds a test on a page: the same in every report, whatever the test is called."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import TYPE_CHECKING

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
