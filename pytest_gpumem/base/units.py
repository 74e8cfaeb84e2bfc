"""Convert sizes, ratios, rates and durations from text to numbers and from numbers to text.

``GB`` is always 10**9 bytes and ``GiB`` is always 2**30 bytes (IEC 80000-13). For example, ``parse_size("6.5 GB")`` is
6,500,000,000, and ``format_bytes(6_500_000_000, "iec")`` is ``"6.05 GiB"``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

UnitSystem = Literal["si", "iec"]

SYSTEMS: dict[UnitSystem, tuple[int, tuple[str, ...]]] = {
    "si": (1000, ("B", "kB", "MB", "GB", "TB")),
    "iec": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
}
"""For each system, the factor between two neighbouring units, and the units from the smallest to the largest."""
SIZES = {name: base**power for base, names in SYSTEMS.values() for power, name in enumerate(names)}
"""The number of bytes in each unit: ``SIZES["kB"]`` is 1000."""
_SIZES_BY_LOWER = {name.lower(): size for name, size in SIZES.items()}
_COUNTS = ("", "k", "M", "G", "T")
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
_RATE = re.compile(
    r"\s*(?P<number>[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(?P<of>[A-Za-z]+)\s*/\s*s\s*"
)
_QUANTITY = re.compile(r"\s*(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s*(?P<unit>[^\d\s].*?)?\s*")


def nearest(word: str, valid: list[str]) -> str:
    """Return a clause for an error message about a wrong ``word``.

    The clause names the most similar valid word, or all valid words if none of them is similar. For example,
    ``nearest("max_bg", ["max_gb", "device"])`` is ``"did you mean 'max_gb'?"``.
    """
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number and a noun: ``counted(1, "test")`` is ``"1 test"``, ``counted(3, "test")`` is ``"3 tests"``.

    The default plural is the noun with an s. ``counted(3, "test has", "tests have")`` is ``"3 tests have"``.
    """
    return f"{count} {word_form(count, noun, plural or f'{noun}s')}"


def word_form(count: int, singular: str, plural: str) -> str:
    """Return ``singular`` if ``count`` is 1, otherwise ``plural``.

    For example, ``word_form(1, "removes it", "removes them")`` is ``"removes it"``.
    """
    return singular if count == 1 else plural


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``"6.5 GB"`` or ``"24 MiB"``, rounded to a whole byte.

    Raises ``ValueError`` if the unit is missing or unknown, the number is negative, or the text is not a size.
    """
    number, unit = _quantity(text)
    if not number:
        raise ValueError(f"{text!r} is not a size; write it like '6.5 GB' or '24 MiB'")
    if not unit:
        raise ValueError(f"{text!r} has no unit; write it like '{number} GB' or '{number} MiB'")
    size = _SIZES_BY_LOWER.get(unit.lower())
    if size is None:
        raise ValueError(f"{text!r}: unknown unit {unit!r}; {nearest(unit, list(SIZES))}")
    if number.startswith("-"):
        raise ValueError(f"{text!r} is negative; a size is zero or more")
    return _whole(float(number) * size, repr(text), "size")


def parse_gigabytes(number: float) -> int:
    """Return the bytes in a number of GB (10**9 bytes). Raises ``ValueError`` if the number is negative or not finite."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"{number!r} is not a number of GB; {_as_gigabytes(number)}")
    if number < 0:
        raise ValueError(f"{number!r} is negative; a number of GB is zero or more")
    return _whole(number * 10**9, repr(number), "number of GB")


def _as_gigabytes(value: object) -> str:
    """Return a correction for a wrong number of GB, as a clause.

    For example, the correction for ``"60 MB"`` is ``write 0.06, or use max_memory='60 MB'``.
    """
    number, unit = _quantity(value)
    if number and not unit:
        return f"write {number}, or use max_memory='{number} GB'"
    try:
        size = parse_size(str(value))
    except ValueError:
        return "write 6.5, or use max_memory='6.5 GiB'"
    return f"write {size / 10**9:.12g}, or use max_memory={value!r}"


def _whole(count: float, shown: str, noun: str) -> int:
    # No memory has 2**63 bytes, and TOML cannot store a larger number.
    if not count < 2**63:
        raise ValueError(f"{shown} is not a finite {noun}")
    return round(count)


def parse_ratio(text: str) -> float:
    """Return a percentage as a ratio: ``"2 %"`` is 0.02.

    Raises ``ValueError`` if the percent sign is missing or the number is negative.
    """
    number, unit = _quantity(text)
    if unit != "%":
        raise ValueError(f"{text!r} is not a percentage; write it like '{_as_percentage(text)}'")
    if number.startswith("-"):
        raise ValueError(f"{text!r} is negative; a percentage here is zero or more")
    return float(Decimal(number) / 100)


def _as_percentage(value: object) -> str:
    """Return a percentage to suggest for a wrong value: ``"2 %"`` for both 0.02 and 2."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if isinstance(value, str) and _quantity(value)[0] and not _quantity(value)[1]:
        number = float(_quantity(value)[0])
    if number is None or not 0 < number < float("inf"):
        return "2 %"
    return f"{number * 100 if number < 1 else number:.6g} %"


def _quantity(text: object) -> tuple[str, str]:
    """Split a text into number and unit: ``"6.5 GB"`` becomes ``("6.5", "GB")``.

    A missing number or unit is an empty string.
    """
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    return (match["number"], match["unit"] or "") if match is not None else ("", "")


@dataclass(frozen=True, slots=True)
class ThroughputLimit:
    """A lower limit for the throughput: ``amount`` per second.

    The unit ``of`` is ``"samples"``, ``"tokens"``, ``"steps"`` or ``"items"``.
    """

    amount: float
    of: str

    def __str__(self) -> str:
        return f"{self.amount:g} {self.of}/s"


RATES = ("samples", "tokens", "steps", "items")


def parse_rate(text: str) -> ThroughputLimit:
    """Return the rate in a text such as ``"1200 samples/s"`` or ``"3.5e4 tokens/s"``.

    Raises ``ValueError`` for any other text.
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        typed = _amount(text)
        example = "'1200 samples/s', '35000 tokens/s' or '8 steps/s'" if typed is None else f"'{typed} samples/s'"
        raise ValueError(f"{text!r} is not a rate; write it like {example}")
    of = match["of"].lower()
    if of not in RATES:
        raise ValueError(f"{text!r}: unknown {match['of']!r}; {nearest(of, list(RATES))}")
    amount = float(match["number"].replace("_", ""))
    if not 0 < amount < float("inf"):
        raise ValueError(f"{text!r} is not a rate above zero")
    return ThroughputLimit(amount, of)


def _amount(value: object) -> str | None:
    """Return the text of ``value`` if it is a positive number without a unit; otherwise ``None``."""
    number, unit = _quantity(str(value)) if not isinstance(value, bool) else ("", "")
    return number if number and not unit and float(number) > 0 else None


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as ``"2 s"`` or ``"500 ms"``.

    Raises ``ValueError`` for 0 and for any other text.
    """
    number, unit = _quantity(text)
    scale = {"s": 1.0, "ms": 1e-3, "min": 60.0}.get(unit)
    if scale is None:
        typed = _amount(text)
        example = "'2 s' or '500 ms'" if typed is None else f"'{typed} s'"
        raise ValueError(f"{text!r} is not a duration; write it like {example}")
    seconds = float(number) * scale
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is not a duration above zero; to switch timing off, use --no-gpumem-time")
    return seconds


def rounded(value: float) -> float:
    """Return a number with four significant digits, as baselines store times, throughputs and ratios."""
    return float(f"{value:.4g}")


def format_bytes(count: int, system: UnitSystem = "si") -> str:
    """Return a size as text, for example ``"8.12 GB"``, in the largest unit in which the number is at least 1."""
    return _in_largest_unit(count, *SYSTEMS[system])


def _in_largest_unit(count: int, base: int, names: tuple[str, ...]) -> str:
    sign, value, power = ("-" if count < 0 else ""), float(abs(count)), 0
    # Choose the unit by the rounded value. Otherwise 999.995 kB would be shown as "1000.00 kB".
    while power < len(names) - 1 and (round(value, 2) if power else value) >= base:
        value /= base
        power += 1
    return f"{sign}{value:.2f} {names[power]}" if power else f"{sign}{value:.0f} {names[0]}"


def format_bytes_change(change: int, system: UnitSystem = "si") -> str:
    """Return a size with its sign: ``"+1.19 GB"``, ``"-3 B"``."""
    return ("+" if change >= 0 else "") + format_bytes(change, system)


_HUNDREDFOLD = 99


def format_ratio(ratio: float, large: str | None = None) -> str:
    """Return a percentage with its sign and one decimal: ``"+14.7 %"``.

    If the value grew a hundredfold or more, return ``large``, or by default a factor: ``"62,915 times"``. Nobody can read
    ``"+6291456.0 %"``.
    """
    if ratio < _HUNDREDFOLD or ratio == float("inf"):
        return f"{ratio * 100:+.1f} %"
    return f"{ratio + 1:,.0f} times" if large is None else large


def format_factor(factor: float) -> str:
    """Return a ratio between two values, with two decimals: ``"1.25"``."""
    return f"{factor:,.2f}"


def format_seconds(seconds: float) -> str:
    """Return seconds as ``"12.31 ms"``, ``"2.05 s"``, ``"840.00 µs"``."""
    for scale, name in ((1e6, "µs"), (1e3, "ms")):
        if round(seconds * scale, 2) < 1000:
            return f"{seconds * scale:.2f} {name}"
    return f"{seconds:.2f} s"


def format_rate(rate: float, of: str = "") -> str:
    """Return a rate with three digits, or without decimals if it is at least 100: ``"3.42 tokens/s"``, ``"1200 /s"``."""
    return f"{rate:.0f} {of}/s" if rate >= 100 else f"{rate:.3g} {of}/s"


def format_count(count: int) -> str:
    """Return ``"1,284"``."""
    return f"{count:,}"


def format_large_count(count: int) -> str:
    """Return ``"1.19 M"``: two decimals in the largest unit in which the number is at least 1."""
    return _in_largest_unit(count, 1000, _COUNTS).rstrip()


def format_flops(count: int) -> str:
    """Return a number of FLOPs as text: ``"1.23 GFLOP"``, in the largest unit in which the number is at least 1."""
    return _in_largest_unit(count, 1000, _FLOPS)


def whole_number(value: object, least: int = 1) -> int:
    """Convert a value such as ``8`` or ``"8"`` to an ``int``.

    Raises ``ValueError`` for values such as ``"8.5"``, and for numbers below ``least``.
    """
    try:
        count = int(str(value))
    except ValueError:
        count = least - 1
    if count < least or isinstance(value, bool) or not str(value).isascii():
        raise ValueError(f"expected a whole number, {least} or more")
    return count


def number(value: object) -> float:
    """Convert a value such as ``0.5`` or ``"0.5"`` to a ``float``. Raises ``ValueError`` for values such as ``"fast"``."""
    try:
        return float(str(value).encode("ascii"))
    except ValueError:
        raise ValueError("expected a number") from None
