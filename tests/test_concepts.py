"""Figures on the pages of concepts are those of committed results, and the glossary is short and in order."""

from __future__ import annotations

import json
import re

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.judging.baselines.format import parse
from pytest_gpumem.judging.gate.baseline import Baseline, Budget
from pytest_gpumem.plugin.session.packing import needed_bytes
from tests.pages import HEADING, ROOT, read

EXAMPLE = ROOT / "example_project" / "gpumem-baselines"
RESULTS = ROOT / "benchmarks" / "results"
EMULATED = read("docs/concepts/emulated-gpu.md")


def row(name: str) -> list[str]:
    """Return the cells of a row of the page on emulated GPUs, without the first."""
    (cells,) = re.findall(rf"^\| {re.escape(name)}[^|]*\| (.*) \|$", EMULATED, flags=re.MULTILINE)
    return str(cells).split(" | ")


def stored(device: str) -> Baseline:
    """Return the baseline of the example project's training step on a device."""
    text = (EXAMPLE / device / "tests" / "test_gpt.py.toml").read_text(encoding="utf-8")
    (found,) = (one for key, one in parse(text, "tests/test_gpt.py").items() if key.test == "test_train_step")
    return found


def test_the_example_of_an_emulated_gpu_has_the_committed_figures():
    on_both = [stored(device) for device in ("cpu-x86_64", "emulated-h100-80gb")]
    for name in ("peak_allocated", "workspaces", "peak_reserved", "operators", "launches"):
        values = [{**baseline.metrics, "workspaces": baseline.workspaces}.get(name) for baseline in on_both]
        shown = str if name in ("operators", "launches") else format_bytes
        assert row(f"`{name}`") == ["-" if value is None else shown(int(value)) for value in values]


def test_the_step_of_gpt2_beside_a_real_gpu_has_the_figures_of_both():
    for name in ("requested", "allocated", "reserved"):
        told = [
            json.loads((RESULTS / device / "truth.json").read_text(encoding="utf-8"))["cases"][
                "gpt2-small/amp-bf16-ckpt-blocks-adamw-foreach"
            ]["peaks"]["backward"][name]
            for device in ("nvidia-h100-80gb-hbm3", "emulated-h100-80gb")
        ]
        assert row(name) == [f"{value:,}" for value in told]


def test_the_bytes_that_a_packed_test_reserves_are_those_of_the_example():
    reserved = needed_bytes(Budget(), [stored("emulated-h100-80gb")])
    assert reserved is not None
    assert f"= {format_bytes(reserved)}." in read("docs/concepts/processes.md")


def test_the_glossary_has_at_most_30_terms_in_order_each_with_an_example():
    text = read("docs/concepts/glossary.md")
    terms = HEADING.findall(text)[1:]
    assert 0 < len(terms) <= 30
    assert terms == sorted(terms)
    assert [part.split("\n")[0] for part in text.split("\n## ")[1:] if "Example: " not in " ".join(part.split())] == []
