"""Choose between nested operators to name an allocation."""

from __future__ import annotations

import re

# Operators that other operators call to create their results. Rows name the outer operator, which is more specific.
FACTORY = re.compile(r"aten::(_?empty|new_|zeros|ones|full|resize|clone|contiguous|to$|_to_copy|_resize)")


def within(outer: str, inner: str) -> str:
    """Return the more specific operator if one operator calls another.

    Example: ``aten::mm`` if ``aten::linear`` calls ``aten::mm``, and ``aten::exp`` if ``aten::exp`` calls ``aten::empty_like``.

    Args:
        outer: The calling operator, or an empty text.
        inner: The called operator.
    """
    return inner if not outer or not FACTORY.match(inner) else outer
