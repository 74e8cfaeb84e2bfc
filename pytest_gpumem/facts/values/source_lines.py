"""Source lines and call stacks as texts.

Example: ``model.py:88`` is a line in the project, and ``transformers 4.38.2: models/llama/modeling_llama.py:1074`` is a line
in an installed package.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PACKAGE = re.compile(r"(?<!\S)(\S+) \S+: ")
"""Matches a package with its release, ``transformers 4.38.2: ``. Without the lookbehind, the search in a long text without
spaces would take quadratic time."""
_MOST_DIGITS = 18

Chain = tuple[str, ...]
"""A call stack as the calling lines, the innermost first: ``("models/exact_gp.py:426", "train.py:9")``."""
MOST_CHAINS = 4
"""Store at most this many call stacks for a line, because a large model may call a helper function from dozens of lines."""
_CALLED_BY, _NEXT_CHAIN = " < ", " ; "


def chains_of(site: str, library: str, callers: Iterable[Chain]) -> tuple[Chain, ...]:
    """Return the call stacks that lead to an allocation, each with the allocating line first.

    Example: ``("linear_operator 0.6: cholesky.py:24", "gpytorch 1.13: exact_gp.py:426", "train.py:9")``.

    Args:
        site: The innermost line in the user's own code.
        library: The innermost line in an installed package that ``site`` called; empty if ``site`` called torch directly.
        callers: The call stacks above the allocating line. If ``library`` is not empty, each of them contains ``site``.
    """
    own = tuple(filter(None, (library, site)))
    return tuple((*own[:1], *chain) for chain in callers) or (own,)


def line_of(site: str, library: str, named: str = "") -> str:
    """Return an allocating line as reports show it, with the line in the user's code that called the library.

    Example:
        ``line_of("test_hf.py:11", "transformers 5.0.0: models/gpt2/modeling_gpt2.py:63")`` is
        ``"transformers 5.0.0: models/gpt2/modeling_gpt2.py:63 (from test_hf.py:11)"``.

    Args:
        site: The innermost line in the user's own code.
        library: The innermost line in an installed package; empty if ``site`` called torch directly.
        named: A caller to show before the allocating line; empty to show no caller.
    """
    allocating = library or site
    if not named or named == allocating:
        return f"{library} (from {site})" if library and site else allocating
    reached = f" (from {site})" if library and site not in ("", named) else ""
    return f"{named}, which calls {allocating}{reached}"


def alternatives_clause(lines: Sequence[str]) -> list[str]:
    """Return a text with several possible lines: ``["one of a.py:3, b.py:5"]``; an empty list for a single line."""
    return [f"one of {', '.join(lines)}"] if len(lines) > 1 else []


def all_chains(chains: Iterable[Chain]) -> tuple[Chain, ...]:
    """Return the first `MOST_CHAINS` call stacks. Empty call stacks and repetitions are left out."""
    return tuple(dict.fromkeys(chain for chain in chains if chain))[:MOST_CHAINS]


def chains_to_text(chains: Iterable[Chain]) -> str:
    """Return call stacks as a text: ``a.py:3 < b.py:8 ; a.py:3 < c.py:5``. `chains_from_text` converts the text back."""
    return _NEXT_CHAIN.join(_CALLED_BY.join(chain) for chain in chains)


def chains_from_text(text: str) -> tuple[Chain, ...]:
    """Return the call stacks from a text that `chains_to_text` returned."""
    return tuple(tuple(chain.split(_CALLED_BY)) for chain in text.split(_NEXT_CHAIN)) if text else ()


def without_release(line: str) -> str:
    """Remove the package's release from a line's text, so lines from two releases of a package can be compared."""
    return _PACKAGE.sub(r"\1: ", line, count=1)


def package_of(line: str) -> str:
    """Return the name of the package that contains a line; empty for a line in the project."""
    match = _PACKAGE.match(line)
    return match.group(1) if match else ""


def file_and_line(line: str) -> tuple[str, int]:
    """Split a line's text into the file, without the package's release, and the line number, or 0 without a number."""
    file, _, number = line.rpartition(":")
    if number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS:
        return without_release(file), int(number)
    return without_release(line), 0
