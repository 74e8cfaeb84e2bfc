"""The picture of a failure in a terminal, drawn from the output of a run of the example project with a fault in it.

``SCREENSHOTS=docs/images`` keeps the picture (`make screenshots`).
"""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text

from tests import preloaded
from tests.pages import ROOT
from tests.test_example_project import EXAMPLE, FUSED, KEEPS_ITS_SCORES, OF_THE_PAGES, SECONDS, Example

COMMITTED = ROOT / "docs" / "images" / "failure.svg"
TEST = "tests/test_gpt.py::test_train_step"
SHOWN = re.compile(
    r"_+ test_train_step|Memory regressed|  what grew|  activations|  baseline:|  accept:|gpumem: |=+ 1 failed"
)
"""The lines that the picture shows begin so. Three dots stand for lines between them."""
COLUMNS, CHARACTER, LINE, PADDING, BAR = 126, 8.43, 19, 16, 34
"""The width of the terminal in characters, and of a character, a line and what is around them in pixels."""
CLASSES = {"bold": "bold", "color(1)": "red", "color(2)": "green", "color(6)": "cyan", "dim": "dim"}
STYLE = """
    .screen { fill: #fbfbfd; stroke: #d5d9e0 }
    .bar { fill: #eceef2 }
    text { fill: #1c2430; font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
    .bold { font-weight: bold }
    .dim { fill: #6a737d }
    .red { fill: #b91c2b }
    .green { fill: #1a7f37 }
    .cyan { fill: #0b6e85 }
    @media (prefers-color-scheme: dark) {
      .screen { fill: #14181f; stroke: #333a45 }
      .bar { fill: #20262f }
      text { fill: #e4e8ed }
      .dim { fill: #9aa4b0 }
      .red { fill: #ff7b72 }
      .green { fill: #56d364 }
      .cyan { fill: #5ccfe6 }
    }
"""
DOTS = ("#ff5f57", "#febc2e", "#28c840")


def shown(output: list[str]) -> list[Text]:
    """Return the lines of the picture: the command, and those of its output that `SHOWN` finds."""
    lines = [Text.assemble(("$ ", "dim"), (f"pytest {TEST} --gpumem-baseline", "bold"))]
    left_out = False
    for line in map(Text.from_ansi, output):
        if SHOWN.match(line.plain):
            if left_out:
                lines.append(Text("...", "dim"))
            lines.append(line)
        left_out = not SHOWN.match(line.plain) and (left_out or bool(line.plain)) and len(lines) > 1
    return lines


def row(line: Text) -> str:
    """Return the content of a ``<text>`` element: the line with its colours."""
    plain, parts, end = line.plain.rstrip(), [], 0
    spans = [(0, len(plain), str(line.style)), *((one.start, one.end, str(one.style)) for one in line.spans)]
    for start, stop, style in spans if line.style else spans[1:]:
        classes = " ".join(CLASSES[word] for word in style.split())
        parts += [escape(plain[end:start]), f'<tspan class="{classes}">{escape(plain[start:stop])}</tspan>']
        end = stop
    return "".join([*parts, escape(plain[end:])])


def svg(lines: list[Text]) -> str:
    """Return a picture of a terminal with these lines, which follows the reader's light or dark scheme."""
    width, height = round(COLUMNS * CHARACTER + 2 * PADDING), BAR + len(lines) * LINE + 2 * PADDING
    rows = [
        f'  <text x="{PADDING}" y="{BAR + PADDING + LINE * number + 14}" textLength="{len(line.plain.rstrip()) * CHARACTER:.1f}" '
        f'xml:space="preserve">{row(line)}</text>'
        for number, line in enumerate(lines)
    ]
    dots = [f'  <circle cx="{20 + 20 * at}" cy="17" r="6" fill="{colour}"/>' for at, colour in enumerate(DOTS)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            "  <title>A failing test in a terminal</title>",
            f"  <style>{STYLE}  </style>",
            f'  <rect class="screen" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            f'  <path class="bar" d="M1 {BAR}V8a7 7 0 0 1 7-7H{width - 8}a7 7 0 0 1 7 7V{BAR}z"/>',
            *dots,
            *rows,
            "</svg>\n",
        ]
    )


def text_of(picture: str) -> list[str]:
    """Return the lines of text in a picture."""
    rows = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(one.itertext()) for one in rows]


def lasting(lines: list[str]) -> list[str]:
    """Return lines without the seconds of the run, which also decide how long the rules beside them are."""
    return [re.sub(r"[_=]{3,}", "___", re.sub(r"in [\d.]+s", "in SECONDS", line)) for line in lines]


@OF_THE_PAGES
@pytest.mark.thorough
def test_the_picture_of_a_failure_is_that_of_a_run(tmp_path):
    example = Example(EXAMPLE).copy(tmp_path)
    example.plant(FUSED, KEEPS_ITS_SCORES)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = ["-m", "pytest", "-p", "no:randomly", "--color=yes", TEST, "--gpumem-baseline", "--gpumem-device=cpu"]
    done = preloaded.run(*command, cwd=example.folder, env={**environment, "COLUMNS": str(COLUMNS)}, timeout=SECONDS)
    output = [line.replace(" --gpumem-device=cpu", "") for line in done.stdout.splitlines()]
    picture = svg(shown(output))
    (Path(os.environ.get("SCREENSHOTS", tmp_path)) / "failure.svg").write_text(picture, encoding="utf-8")
    assert lasting(text_of(COMMITTED.read_text(encoding="utf-8"))) == lasting(text_of(picture))
