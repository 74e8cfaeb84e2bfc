"""The names that figures go by in other tools: stable from run to run, different for what must not be compared. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.exports.figures import Figure

_SURROGATE = re.compile("[\ud800-\udfff]")
_AMBIGUOUS = re.compile("\\\\(?=\\\\*(?:ud[89a-f][0-9a-f]{2}|[\ud800-\udfff]))")
"""Backslashes that would be taken for a part of a spelled surrogate."""


def benchmark_name(figure: Figure) -> str:
    """``"tests/test_gpt.py::test_train[fp32] (train_step) @ nvidia-h100-80gb-hbm3"``.

    With the device, since neither bytes nor times of two are to be compared; and always with the measurement, so that a
    second one in a test does not rename the first.
    """
    return utf8(f"{figure.test} ({figure.measurement}) @ {figure.environment.slug}")


def utf8(text: str) -> str:
    r"""``text`` as any UTF-8 reader takes it: lone surrogates are spelled ``\ud800``.

    No two texts become the same: backslashes before a surrogate, spelled or not, are doubled. `from_utf8` is the way back.
    """
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", _AMBIGUOUS.sub(r"\\\\", text))


def from_utf8(text: str) -> str:
    """The text that `utf8` made ``text`` of."""
    return re.sub(r"(\\+)(ud[89a-f][0-9a-f]{2})", _unescaped, text)


def _unescaped(found: re.Match[str]) -> str:
    half, odd = divmod(len(found[1]), 2)
    return "\\" * half + (chr(int(found[2][1:], 16)) if odd else found[2])
