"""Lines of code as texts: ``model.py:88``, or for a package ``transformers 4.38.2: models/llama/modeling_llama.py:1074``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PACKAGE = re.compile(r"(?<!\S)(\S+) \S+: ")
"""A package with its release. The lookbehind keeps the search linear in a long text without blanks."""
_MOST_DIGITS = 18

Chain = tuple[str, ...]
"""A line's callers, innermost first: ``("models/exact_gp.py:426", "train.py:9")``."""
MOST_CHAINS = 4
"""The most chains in a row. A helper in a large model is called from dozens of lines."""
_CALLED_BY, _NEXT_CHAIN = " < ", " ; "


def chains_of(site: str, library: str, callers: Iterable[Chain]) -> tuple[Chain, ...]:
    """Return the call chains with the allocating line first.

    Example: ``("linear_operator 0.6: cholesky.py:24", "gpytorch 1.13: exact_gp.py:426", "train.py:9")``.

    Args:
        site: The innermost line of the user's own code.
        library: The innermost line of an installed package beneath it.
        callers: The chains of callers. They contain ``site`` if there is a ``library``.
    """
    own = tuple(filter(None, (library, site)))
    return tuple((*own[:1], *chain) for chain in callers) or (own,)


def line_of(site: str, library: str, named: str = "") -> str:
    """Return the allocating line as reports show it, with the user's line that led to it.

    Example:
        ``line_of("test_hf.py:11", "transformers 5.0.0: models/gpt2/modeling_gpt2.py:63")`` is
        ``"transformers 5.0.0: models/gpt2/modeling_gpt2.py:63 (from test_hf.py:11)"``.

    Args:
        site: The user's line.
        library: The library's line.
        named: A caller to show before the allocating line; empty for none.
    """
    allocating = library or site
    if not named or named == allocating:
        return f"{library} (from {site})" if library and site else allocating
    reached = f" (from {site})" if library and site not in ("", named) else ""
    return f"{named}, which calls {allocating}{reached}"


def alternatives_clause(lines: Sequence[str]) -> list[str]:
    """Return a clause for several candidate lines: ``["one of a.py:3, b.py:5"]``. The list is empty for a single line."""
    return [f"one of {', '.join(lines)}"] if len(lines) > 1 else []


def all_chains(chains: Iterable[Chain]) -> tuple[Chain, ...]:
    """Return the first `MOST_CHAINS` different chains."""
    return tuple(dict.fromkeys(chain for chain in chains if chain))[:MOST_CHAINS]


def chains_to_text(chains: Iterable[Chain]) -> str:
    """Return chains as one text: ``a.py:3 < b.py:8 ; a.py:3 < c.py:5``. `chains_from_text` is the inverse."""
    return _NEXT_CHAIN.join(_CALLED_BY.join(chain) for chain in chains)


def chains_from_text(text: str) -> tuple[Chain, ...]:
    """Return the chains that `chains_to_text` wrote."""
    return tuple(tuple(chain.split(_CALLED_BY)) for chain in text.split(_NEXT_CHAIN)) if text else ()


def without_release(line: str) -> str:
    """Return a line without its package's release, so lines from two releases can be equal."""
    return _PACKAGE.sub(r"\1: ", line, count=1)


def package_of(line: str) -> str:
    """Return a line's package, or an empty text for a project line."""
    match = _PACKAGE.match(line)
    return match.group(1) if match else ""


def file_and_line(line: str) -> tuple[str, int]:
    """Return a line's file, without its package's release, and the line number, or 0 without a number."""
    file, _, number = line.rpartition(":")
    if number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS:
        return without_release(file), int(number)
    return without_release(line), 0
