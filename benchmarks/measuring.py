"""Cost of measuring: tests with the marker against the same tests without, and a train_step against its bare steps.

On the CPU, where every allocation is recorded; reading a GPU's statistics costs less. All of it in one run of pytest, the
kinds in turns. The small model shows what a measurement costs at least, the large one what it adds to real work.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from claims import claim_of, conclude, difference_of_medians, parser_of, print_table, ratio_of_medians

if TYPE_CHECKING:
    from collections.abc import Generator

WIDTHS = {"small": 32, "large": 512}
"""Models with which a bare training step takes some milliseconds, and some hundreds of them."""
ADDED_LIMIT = 0.025
"""CPU seconds that the marker may add to a trivial test."""
STEPS_LIMIT = 1.5
"""Most bare steps that a step of train_step may cost, with the large model."""

SOURCE = """
import time

import pytest
import torch

ON_THE_CPU = pytest.mark.gpumem(device="cpu")
TRIVIAL = {"trivial": (), "marked trivial": (ON_THE_CPU,)}
MARKS = {
    "test": (),
    "marked test": (ON_THE_CPU,),
    "bare steps": (),
    "train_step": (ON_THE_CPU,),
}
CASES = [
    pytest.param(width, kind, marks=marks, id=f"{width}-{kind}-{number}")
    for number in range(ROUNDS)
    for width in WIDTHS
    for kind, marks in MARKS.items()
]
TRIVIAL_CASES = [
    pytest.param(kind, marks=marks, id=f"{kind}-{number}") for number in range(ROUNDS) for kind, marks in TRIVIAL.items()
]


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.steps = 0

    def forward(self, batch):
        self.steps += 1
        return self.layers(batch).square().mean()


@pytest.fixture(scope="module")
def models():
    return {width: Model(width) for width in WIDTHS}


def step(model, optimizer, batch):
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", TRIVIAL_CASES)
def test_trivial(kind):
    torch.ones(1000)


@pytest.mark.parametrize(("width", "kind"), CASES)
def test_cost(request, models, width, kind, record_property):
    # As the cpu device does while it measures, so that nothing but the measuring differs.
    torch.set_num_threads(1)
    model, batch = models[width], torch.randn(4, 64, width)
    steps = model.steps
    if kind == "train_step":
        began = time.process_time()
        request.getfixturevalue("gpumem").train_step(model, batch)
    else:
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, batch)
        if kind == "bare steps":
            steps = model.steps
            began = time.process_time()
            for _ in range(5):
                step(model, optimizer, batch)
    if kind in ("bare steps", "train_step"):
        record_property("cpu_of_a_step", (time.process_time() - began) / (model.steps - steps))
        record_property("steps", model.steps - steps)
"""


class Costs:
    """A plugin that notes what each test took, from its set-up to its end."""

    def __init__(self) -> None:
        self.cpu: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.wall: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.steps: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.cpu_of_a_step: dict[tuple[int, str], list[float]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, object, object]:
        cpu, began = time.process_time(), time.perf_counter()
        result = yield
        case = (item.callspec.params.get("width", 0), item.callspec.params["kind"])
        self.cpu[case].append(time.process_time() - cpu)
        self.wall[case].append(time.perf_counter() - began)
        noted = dict(item.user_properties)
        if "steps" in noted:
            self.steps[case].append(noted["steps"])
            self.cpu_of_a_step[case].append(noted["cpu_of_a_step"])
        return result


def costs_of(rounds: int) -> Costs:
    """Run the tests. Raises when they do not all pass."""
    costs = Costs()
    with tempfile.TemporaryDirectory() as name:
        tests, settings = Path(name) / "test_cost.py", Path(name) / "pytest.ini"
        header = f"ROUNDS = {rounds}\nWIDTHS = {list(WIDTHS.values())}\n"
        tests.write_text(header + SOURCE, encoding="utf-8")
        settings.write_text("[pytest]\n", encoding="utf-8")
        command = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-c", str(settings), str(tests)]
        with contextlib.redirect_stdout(io.StringIO()) as told:
            status = pytest.main(command, plugins=[costs])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests that are timed did not pass:\n{told.getvalue()}")
    return costs


def main() -> int:
    """Run the tests, print what they took, and tell whether the claims hold."""
    options = parser_of(__doc__, rounds=9).parse_args()
    costs = costs_of(options.rounds)
    cases = [("", 0, kind) for kind in ("trivial", "marked trivial")]
    for size, width in WIDTHS.items():
        cases += [(f"{size}: ", width, kind) for kind in ("test", "marked test", "bare steps", "train_step")]
    rows = []
    for size, width, kind in cases:
        case = (width, kind)
        a_step, steps = costs.cpu_of_a_step[case], costs.steps[case]
        rows.append(
            (
                f"{size}{kind}",
                f"{statistics.median(costs.cpu[case]) * 1e3:.1f} ms",
                f"{statistics.median(costs.wall[case]) * 1e3:.1f} ms",
                f"{statistics.median(steps):.0f}" if steps else "",
                f"{statistics.median(a_step) * 1e3:.1f} ms" if a_step else "",
            )
        )
    print(f"{options.rounds} rounds of each in turns, medians\n")
    print_table(("model: kind", "CPU", "wall", "steps", "CPU a step"), rows)
    large = WIDTHS["large"]
    claims = [
        claim_of(
            "CPU seconds that the marker adds to a trivial test",
            difference_of_medians,
            (costs.cpu[0, "marked trivial"], costs.cpu[0, "trivial"]),
            ADDED_LIMIT,
        ),
        claim_of(
            "CPU time of a step in train_step over a bare one, large model",
            ratio_of_medians,
            (costs.cpu_of_a_step[large, "train_step"], costs.cpu_of_a_step[large, "bare steps"]),
            STEPS_LIMIT,
        ),
    ]
    return conclude(claims, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
