"""Draw the pictures in docs/concepts: ``python .ci/draw_pictures.py`` writes SVG files into docs/images.

The curve in ``over-the-step.svg`` comes from a training step of the example project, which is recorded on the CPU. Colours
follow ``prefers-color-scheme``, so a file serves light and dark pages on GitHub and on the site.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from bisect import bisect_left, bisect_right
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.facts.values.plain import from_plain
from pytest_gpumem.facts.values.timeline import OverTime

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
EXAMPLE = ROOT / "example_project"
TEST = "tests/test_gpt.py::test_train_step"

LIGHT = {
    "paper": "#ffffff",
    "raised": "#f6f7f9",
    "ink": "#1c2430",
    "muted": "#59636f",
    "line": "#c3cad3",
    "bad": "#a3211b",
    "good": "#1d6b3a",
    "doubt": "#7a5200",
    "parameters": "#46658f",
    "optimizer-state": "#80649f",
    "input": "#6c9a68",
    "gradients": "#c7a04a",
    "activations": "#4aa3a2",
    "temporaries": "#d98b6a",
}
DARK = {
    "paper": "#14181d",
    "raised": "#1c2229",
    "ink": "#e4e8ed",
    "muted": "#a0aab6",
    "line": "#4a5561",
    "bad": "#ff9a90",
    "good": "#7fd39c",
    "doubt": "#eac06b",
    "parameters": "#6d8fc0",
    "optimizer-state": "#a389c4",
    "input": "#7fae7a",
    "gradients": "#cda956",
    "activations": "#3f9493",
    "temporaries": "#cf8263",
}
CATEGORIES = {
    "parameter": "parameters",
    "optimizer state": "optimizer-state",
    "input": "input",
    "gradient": "gradients",
    "activation": "activations",
    "temporary": "temporaries",
}
"""The categories in the timeline from the lowest area to the highest, with the names of their colours."""


def _style() -> str:
    def rules(colours: Mapping[str, str]) -> str:
        kinds = (f".{name}{{fill:{colours[name]}}}" for name in (*CATEGORIES.values(), "ink", "muted"))
        tones = (
            f".{name}{{fill:{colours[name]}}}.{name}-edge{{stroke:{colours[name]}}}"
            for name in ("bad", "good", "doubt")
        )
        return (
            f".paper{{fill:{colours['paper']}}}.box{{fill:{colours['raised']};stroke:{colours['line']}}}"
            f".arrow{{stroke:{colours['muted']};fill:none}}.head{{fill:{colours['muted']}}}"
            f".plain-edge{{stroke:{colours['line']}}}{''.join(kinds)}{''.join(tones)}"
        )

    font = "text{font:15px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}.bold{font-weight:600}.small{font-size:13px}"
    return f"<style>{font}{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}</style>"


class Picture:
    """An SVG picture. Lengths are in pixels, and ``y`` grows downwards."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self._size = (width, height)
        self._description = description
        self._parts: list[str] = []

    def add(self, part: str) -> None:
        """Draw a part over all earlier parts."""
        self._parts.append(part)

    def text(self, x: float, y: float, text: str, kind: str = "ink", *, anchor: str = "start") -> None:
        """Write a line of text whose baseline is ``y``."""
        self.add(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        title: str,
        lines: Sequence[str] = (),
        edge: str = "",
    ) -> float:
        """Draw a box with a title and smaller lines below, and return its height."""
        height = 30 + 19 * len(lines) + (6 if lines else 0)
        kind = f"box {edge}-edge" if edge else "box"
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" class="{kind}"/>')
        self.text(x + 12, y + 21, title, f"{edge or 'ink'} bold")
        for number, line in enumerate(lines):
            self.text(x + 12, y + 42 + 19 * number, line, "muted small")
        return height

    def arrow(self, points: Iterable[tuple[float, float]]) -> None:
        """Draw an arrow along points."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.add(f'<polyline points="{way}" class="arrow" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """Return the file's text."""
        width, height = self._size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0,0L8,4L0,8z" class="head"/></marker></defs>'
        )
        begin = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{escape(self._description)}</title>{_style()}{head}'
            f'<rect width="{width}" height="{height}" rx="8" class="paper"/>'
        )
        return "\n".join((begin, *self._parts, "</svg>\n"))


STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Collection",
        (
            "finds the marker, the gpumem fixture or a pattern of mark,",
            "and the budgets from marker and settings",
        ),
    ),
    (
        "Set-up",
        (
            "fixtures allocate; their bytes belong to the tests that use them,",
            "all other live bytes are subtracted from each figure",
        ),
    ),
)
FIGURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Counts", ("one more step: operators, FLOPs, syncs, kernel launches",)),
    ("First verdict", ("bytes and counts against budget and baseline",)),
    (
        "Explanation",
        (
            "one more run is recorded, if the test fails by its bytes",
            "or becomes a baseline; no figure comes from it",
        ),
    ),
    (
        "Times",
        (
            "rounds of steps, alone on the device;",
            "a second sample if the first one looks slower or faster",
        ),
    ),
    (
        "Verdict",
        (
            "the most serious one of all metrics decides:",
            "the test passes or fails, the last line counts it",
        ),
    ),
)


def from_marker_to_verdict() -> str:
    """Draw how a test goes from its marker to its verdict."""
    picture = Picture(720, 740, "How a test goes from its marker to its verdict")
    left, width, middle, gap = 130, 460, 360, 22
    y: float = 16
    for title, lines in STAGES:
        height = picture.box(left, y, width, title, lines)
        y += height
        if title == "Collection":
            picture.arrow([(middle, y), (middle, y + gap)])
            y += gap
    below = y + gap
    for x, title, lines in (
        (
            16,
            "Marker only: the call",
            ("runs once, cold: peak, retained bytes,", "cyclic garbage; no counts, no times"),
        ),
        (
            368,
            "Fixture: a step that repeats",
            (
                "runs until two peaks are equal (2 to 6 steps),",
                "then 4 times more: peaks, growth, retained",
            ),
        ),
    ):
        picture.arrow([(middle, y), (middle, y + 10), (x + 168, y + 10), (x + 168, below)])
        height = picture.box(x, below, 336, title, lines)
    y = below + height
    counts = y + gap
    for number, (title, lines) in enumerate(FIGURES):
        if number:
            picture.arrow([(middle, y), (middle, y + gap)])
        else:
            picture.arrow([(536, y), (536, counts)])
        y += gap
        height = picture.box(left, y, width, title, lines, "good" if title == "Verdict" else "")
        if title == "First verdict":
            picture.arrow([(60, below + 74), (60, y + height / 2), (left, y + height / 2)])
        y += height
    return picture.svg()


QUESTIONS: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = (
    ("Did the test itself raise an error?", "yes", (("not judged", "muted", "failed by itself"),)),
    (
        "Was anything measured?",
        "no",
        (("unmeasured", "doubt", ""), ("missing", "bad", "has a baseline")),
    ),
    ("Is the value beyond its budget?", "yes", (("over budget", "bad", ""),)),
    (
        "Was a comparison asked for?",
        "no",
        (("recorded", "muted", ""), ("ok", "good", "has a budget")),
    ),
    (
        "Is there a baseline for this device?",
        "no",
        (("new", "muted", ""), ("foreign", "doubt", "others have one")),
    ),
    (
        "Is the workload the same?",
        "no",
        (("stale", "doubt", ""), ("regressed", "bad", "bytes grew")),
    ),
    ("Is the change within the tolerance?", "yes", (("ok", "good", ""),)),
    ("Is the change an improvement?", "yes", (("improved", "good", ""),)),
    ("Can the code be innocent?", "yes", (("uncertain", "doubt", ""),)),
)


def decisions() -> str:
    """Draw how a metric gets its verdict, as questions in their order."""
    step, right = 62, 396
    picture = Picture(740, 62 + step * len(QUESTIONS), "How a metric gets its verdict: questions in their order")
    y: float = 16
    for question, leaves, outcomes in QUESTIONS:
        height = picture.box(16, y, 320, question)
        picture.arrow([(336, y + height / 2), (right, y + height / 2)])
        picture.text(362, y + 10, leaves, "muted small", anchor="middle")
        x: float = right
        for name, tone, condition in outcomes:
            name_ends = 26 + 9.9 * len(name)
            width = name_ends + (7.2 * len(condition) + 6 if condition else 0)
            picture.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="30" rx="15" class="box {tone}-edge"/>')
            picture.text(x + 13, y + 20, name, f"{tone} bold")
            picture.text(x + name_ends - 5, y + 20, condition, "muted small")
            x += width + 8
        picture.arrow([(176, y + height), (176, y + step)])
        picture.text(186, y + height + 21, "no" if leaves == "yes" else "yes", "muted small")
        y += step
    picture.add(f'<rect x="122" y="{y:g}" width="108" height="30" rx="15" class="box bad-edge"/>')
    picture.text(176, y + 20, "regressed", "bad bold", anchor="middle")
    return picture.svg()


def over_the_step(timeline: OverTime) -> str:
    """Draw a step's bytes by category, in the order of allocations and frees; each phase is equally wide."""
    picture = Picture(720, 420, "Bytes of a training step by category, over forward, backward and optimizer")
    left, top, panel, gap, height = 62, 48, 205, 8, 280
    highest, peak = 100e6, timeline.peak
    nothing = (0,) * len(timeline.time_ns)

    def level(nbytes: float) -> float:
        return round(top + height * (1 - nbytes / highest), 1)

    for mark in range(0, 101, 25):
        y = level(mark * 1e6)
        picture.add(f'<path d="M{left},{y:g}H{left + 3 * panel + 2 * gap}" class="plain-edge"/>')
        picture.text(left - 8, y + 5, f"{mark} MB", "muted small", anchor="end")
    for number, phase in enumerate(timeline.phases):
        x = left + number * (panel + gap)
        # The state before the phase's first event begins its panel.
        moments = range(
            max(0, bisect_left(timeline.time_ns, phase.begin) - 1), bisect_right(timeline.time_ns, phase.end)
        )
        picture.text(x + panel / 2, top - 24, phase.name, "ink bold", anchor="middle")
        picture.text(
            x + panel / 2,
            top - 8,
            f"{len(moments) - 1} allocations and frees",
            "muted small",
            anchor="middle",
        )
        below = [0] * len(moments)
        for category, colour in CATEGORIES.items():
            series = timeline.categories.get(category, nothing)
            above = [low + series[moment] for low, moment in zip(below, moments, strict=True)]
            if any(high - low > highest / 1000 for low, high in zip(below, above, strict=True)):
                points = [round(x + panel * at / (len(moments) - 1), 1) for at in range(len(moments))]
                picture.add(f'<path d="{_area(points, [*map(level, below)], [*map(level, above)])}" class="{colour}"/>')
            below = above
        if peak in moments:
            at = x + panel * (peak - moments[0]) / (len(moments) - 1)
            y = level(timeline.total[peak])
            picture.add(f'<circle cx="{at:g}" cy="{y:g}" r="4" class="ink"/>')
            picture.text(at - 10, y + 2, f"peak {timeline.total[peak] / 1e6:.2f} MB", "ink bold", anchor="end")
    for number, (category, colour) in enumerate(CATEGORIES.items()):
        if max(timeline.categories.get(category, nothing)) > highest / 1000:
            x, y = left + 213 * (number % 3), top + height + 34 + 26 * (number // 3)
            picture.add(f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="3" class="{colour}"/>')
            megabytes = timeline.categories[category][peak] / 1e6
            picture.text(x + 20, y, f"{colour.replace('-', ' ')}: {megabytes:.2f} MB", "muted small")
    picture.text(
        left,
        top + height + 86,
        "Figures are those at the peak. Each phase has the same width.",
        "muted small",
    )
    return picture.svg()


def _area(points: Sequence[float], below: Sequence[float], above: Sequence[float]) -> str:
    """Return the path of a stepped area, without points that change nothing."""

    def stepped(levels: Sequence[float]) -> list[tuple[float, float]]:
        corners = [(points[0], levels[0])]
        for number in range(1, len(points)):
            if levels[number] != levels[number - 1]:
                corners += [(points[number], levels[number - 1]), (points[number], levels[number])]
        return [*corners, (points[-1], levels[-1])]

    way = [*stepped(above), *reversed(stepped(below))]
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in way) + "Z"


def timeline_in(folder: Path) -> OverTime:
    """Return the timeline that ``--gpumem-artifacts`` wrote into a folder."""
    (path,) = folder.glob("*.timeline.json")
    written = json.loads(path.read_text(encoding="utf-8"))
    return from_plain(OverTime, {field.name: written[field.name] for field in fields(OverTime)})


def recorded_timeline() -> OverTime:
    """Record a training step from the example project on the CPU, and return its timeline."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--gpumem-device=cpu", "--no-gpumem-time", "--gpumem-explain=always", f"--gpumem-artifacts={folder}"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / TEST), *options]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return timeline_in(Path(folder))


def pictures() -> dict[str, str]:
    """Return the text of each picture without a recording, by file name."""
    return {"marker-to-verdict.svg": from_marker_to_verdict(), "decisions.svg": decisions()}


if __name__ == "__main__":
    for name, text in {
        **pictures(),
        "over-the-step.svg": over_the_step(recorded_timeline()),
    }.items():
        (IMAGES / name).write_text(text, encoding="utf-8")
