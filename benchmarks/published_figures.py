"""Figures that others have published, emulated ones beside them, and files of these."""

from __future__ import annotations

import json
import platform
import struct
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

UNITS = {"B": 1, "10^6 B": 10**6, "MB": 2**20, "GB": 10**9, "GiB": 2**30}


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


def missing(suite: str, needs: str) -> str | None:
    """Return what to install, if torch or the suite's package is not."""
    try:
        version("torch")
        version(suite)
    except PackageNotFoundError as error:
        return f"{error.name} is not installed; {suite}'s rows need: {needs}"
    return None


def write_results(folder: Path, gpu: str, suite: str, packages: tuple[str, ...], rows: dict[str, Any]) -> None:
    """Write a suite's results, with the releases that they were emulated with."""
    release = version("torch").partition("+")[0]
    path = folder / f"emulated-{gpu.lower()}" / f"{suite}-torch-{release}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    releases = {name: version(name) for name in packages}
    whole = {"emulated": True, "gpu": f"emulated:{gpu}", **releases, "python": platform.python_version(), "rows": rows}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
