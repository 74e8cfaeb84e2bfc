"""Cost of a composition: the recorded step, and reading it, against an ordinary step. GPT-2 small, on the CPU.

Both kinds take turns in one process, on one thread, as the cpu device measures. The ordinary step runs unrecorded.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from claims import claim_of, conclude, parser_of, print_table, ratio_of_medians

from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.explain.sites import Sites
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import ModelFactory
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off

LIMIT = 3.0
SAMPLES, LENGTH = 1, 256


@dataclass(frozen=True)
class Run:
    """CPU seconds of an ordinary step, and of a recorded one with all that is made of it."""

    ordinary: float
    composed: float


def gpt2_small() -> torch.nn.Module:
    """GPT-2 small by its published sizes (124 million parameters), with random weights."""
    import transformers

    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def runs_of(rounds: int) -> tuple[list[Run], list[str]]:
    """Run both kinds in turns. Also lines that say what was recorded."""
    device = CpuDevice()
    device.open()
    bench = MeasuringContext(device, time_budget=None, sites=Sites(Path(__file__).parent))
    tokens = torch.randint(50257, (SAMPLES, LENGTH))
    runs: list[Run] = []
    batch = {"input_ids": tokens, "labels": tokens}
    with (
        prepared_train_step(bench, ModelFactory(gpt2_small), batch, config=StepConfig()) as prepared,
        cyclic_collector_off(),
    ):
        step = prepared.measure()
        peak = step.figures.memory.own_peak
        for _ in range(rounds):
            with device.unrecorded():
                began = time.process_time()
                for phase in prepared.phases:
                    phase.run()
                ordinary = time.process_time() - began
            began = time.process_time()
            explanation = prepared.explain(step)
            assert not isinstance(explanation, str), explanation
            runs.append(Run(ordinary, time.process_time() - began))
    device.close()
    assert not isinstance(explanation, str)
    composition = explanation.peak
    told = [
        (
            f"peak {peak} bytes, {len(composition.rows)} rows that add up to {composition.total}, "
            f"{composition.of('unattributed')} of them unattributed"
        ),
        *composition.notes,
    ]
    return runs, told


def main() -> int:
    """Print what both kinds took, and tell whether the claim holds."""
    options = parser_of(__doc__, rounds=7).parse_args()
    runs, told = runs_of(options.rounds)
    ordinary, composed = [run.ordinary for run in runs], [run.composed for run in runs]
    rows = [
        (kind, f"{statistics.median(taken):.3f} s", f"{min(taken):.3f} s")
        for kind, taken in (("ordinary step", ordinary), ("recorded and composed", composed))
    ]
    print_table(("step of GPT-2 small", "CPU, median", "CPU, least"), rows)
    for line in told:
        print(line)
    claim = claim_of(
        "CPU time of a composition over that of an ordinary step, medians",
        ratio_of_medians,
        (composed, ordinary),
        LIMIT,
    )
    return conclude([claim], check=options.check)


if __name__ == "__main__":
    sys.exit(main())
