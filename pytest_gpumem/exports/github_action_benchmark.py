"""Figures for github-action-benchmark, as its tools ``customSmallerIsBetter`` and ``customBiggerIsBetter`` read them. Pure.

A file is an array of objects with ``name``, ``unit`` and ``value``, and ``range`` and ``extra`` as texts; the action takes
one direction a file. See https://github.com/benchmark-action/github-action-benchmark, "Custom benchmarks".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pytest_gpumem.exports.figures import ExportError, benchmark_name, utf8
from pytest_gpumem.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pytest_gpumem.exports.figures import Figure

Better = Literal["smaller", "bigger"]


def metrics_of(better: Better, among: Collection[str] = ()) -> list[str]:
    """The metrics that stand in a file of this direction, of all or of those in ``among``. Raises `ExportError` for none."""
    names = [name for name in among or METRICS if METRICS[name].larger_is_better == (better == "bigger")]
    if not names:
        other = "smaller" if better == "bigger" else "bigger"
        raise ExportError(
            f"of {', '.join(among)} {other} is better, and a file has one direction: say --better={other}"
        )
    return names


def github_action_benchmark(figures: Sequence[Figure]) -> str:
    """The figures in their metrics' units; all of one direction, see `metrics_of`."""
    return json.dumps([_entry(figure) for figure in figures], indent=1) + "\n"


def _entry(figure: Figure) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": f"{benchmark_name(figure)}: {figure.metric}",
        "unit": METRICS[figure.metric].unit if figure.of is None else f"{figure.of}/s",
        "value": figure.value,
    }
    if figure.interval is not None:
        low, high = figure.interval
        entry["range"] = f"± {max(high - figure.value, figure.value - low):.3g}"
    entry["extra"] = utf8("\n".join(f"{name}: {value}" for name, value in _details(figure).items()))
    return entry


def _details(figure: Figure) -> dict[str, str | int]:
    config = {} if figure.config is None else {"config": figure.config}
    commit = {} if figure.commit is None else {"commit": figure.commit}
    return {"device": figure.environment.device, **config, **commit, **figure.environment.details}
