"""Cost of the store in a session: reading, comparing and writing 10,000 baselines.

As with `--gpumem-baseline` (read, compare) and `--gpumem-update` (write, which reads again what others may have written).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from claims import Claim, conclude, parser_of, print_table
from cost import Cost, cost_of

from pytest_gpumem.facts.measurement import Environment, Measurement, Workload
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.judging.gate.baseline import Baseline, Budget, Key, baseline_of
from pytest_gpumem.judging.gate.judge import judge
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.plugin.config.settings import DEFAULT_TOLERANCES

FILES, TESTS_A_FILE = 100, 100
LIMIT = 2.0
HERE = Environment(
    "some-gpu",
    "Some GPU",
    {"total_memory": 80 * 10**9, "torch": "2.13.0", "cuda": "13.0", "driver": "1.2", "allocator": "default"},
)


def made_up_measurements() -> dict[Key, Measurement]:
    """A measurement with every metric that a training step on a GPU has, for each of the tests."""
    peaks = ("peak_allocated", "peak_forward", "peak_backward", "peak_optimizer", "peak_reserved")
    return {
        Key(f"tests/models/test_model_{file}.py", f"TestModel::test_step[amp-bf16-{test}]", "train_step"): Measurement(
            name="train_step",
            workload=Workload("train_step", "fp32", 124_439_808 + file, f"int64[8, {test + 1}]"),
            environment=HERE,
            metrics={
                **{metric: 10**9 + 10**6 * file + 10**3 * test + number for number, metric in enumerate(peaks)},
                "retained": 0,
                "cyclic_garbage": 0,
                "step_time": 0.123456 + test / 1000,
                "throughput": 66_355.2 - test,
            },
        )
        for file in range(FILES)
        for test in range(TESTS_A_FILE)
    }


def one_round(folder: Path, measured: dict[Key, Measurement]) -> dict[str, Cost]:
    """Write everything; then, with one store as a session has it, read when it starts, compare, and write it all again."""
    entries: dict[Key, Baseline] = {key: baseline_of(one, "2026-01-01", "abc123456") for key, one in measured.items()}
    Store(Folder(folder)).change(entries)
    changed = {key: replace(entry, recorded="2026-01-02") for key, entry in entries.items()}
    store = Store(Folder(folder))

    def compare() -> None:
        for key, one in measured.items():
            verdict = judge(one, Budget(), store.find(key, HERE.slug), DEFAULT_TOLERANCES)
            if verdict.outcome is not Outcome.OK:
                raise AssertionError(f"{key} is {verdict.outcome.words}")

    parts = {"reading": store.check, "comparing": compare, "writing": lambda: store.change(changed)}
    return {name: cost_of(action)[0] for name, action in parts.items()}


def main() -> int:
    """Run the rounds, print what each part took, and tell whether the claim holds."""
    options = parser_of(__doc__, rounds=5).parse_args()
    measured = made_up_measurements()
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            rounds.append(one_round(Path(name), measured))
    parts = {part: [taken[part] for taken in rounds] for part in rounds[0]}
    parts["all"] = [
        Cost(sum(one.cpu for one in taken.values()), sum(one.wall for one in taken.values())) for taken in rounds
    ]
    print(f"{len(measured)} baselines in {FILES} files, {options.rounds} rounds\n")
    print_table(
        ("part", "CPU, median", "CPU, least", "wall, median", "wall, least"),
        [
            (
                part,
                *(
                    f"{reduce([getattr(one, clock) for one in taken]):.3f} s"
                    for clock in ("cpu", "wall")
                    for reduce in (statistics.median, min)
                ),
            )
            for part, taken in parts.items()
        ],
    )
    seconds = statistics.median([one.cpu for one in parts["all"]])
    return conclude([Claim("CPU seconds of reading, comparing and writing", seconds, LIMIT)], check=options.check)


if __name__ == "__main__":
    sys.exit(main())
