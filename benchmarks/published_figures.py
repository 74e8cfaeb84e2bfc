"""Figures that others have published, and emulated ones beside them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

UNITS = {"B": 1, "MB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Figure:
    """A published figure."""

    value: float
    unit: str
    digits: int
    """Digits behind its point."""

    @classmethod
    def read(cls, row: Mapping[str, str]) -> Figure:
        return cls(float(row["value"]), row["unit"], len(row["value"].partition(".")[2]))

    @property
    def bytes(self) -> float:
        return self.value * UNITS[self.unit]

    def is_that_of(self, emulated: float) -> bool:
        """Tell whether so many bytes would have been published so: in bytes to the last, in Liger's MB rounded to fp32."""
        if self.unit == "MB":
            return _as_fp32(emulated / UNITS["MB"]) == self.value
        return round(emulated / UNITS[self.unit], self.digits) == self.value


@dataclass(frozen=True)
class Compared:
    """An emulated figure beside the published one."""

    name: str
    metric: str
    emulated: float
    published: Figure

    @property
    def difference(self) -> float:
        return self.emulated - self.published.bytes

    @property
    def percent(self) -> float:
        return 100 * self.difference / self.published.bytes

    @property
    def equal(self) -> bool:
        return self.published.is_that_of(self.emulated)

    @property
    def off(self) -> float:
        """Percent that cannot be the publisher's rounding."""
        return 0.0 if self.equal else abs(self.percent)

    def cells(self) -> tuple[str, ...]:
        there = self.published
        said = f"{there.value:,.0f}" if there.unit == "B" else f"{there.value:,.{there.digits}f} {there.unit}"
        apart = ("equal", "") if self.equal else (f"{self.difference:+,.0f}", f"{self.percent:+.4f} %")
        return (self.name, self.metric.removeprefix("peak_"), f"{self.emulated:,.0f}", said, *apart)


HEADER = ("case", "peak", "emulated, B", "published", "difference, B", "")


def _as_fp32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]
