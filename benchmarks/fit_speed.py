"""Measure how long `gpumem fit` takes for all cards: in forks of one process, two at a time and one, and in a process for each.

Two programs train for three steps with 1 x 4,096 tokens in bf16, with AdamW and gradient checkpointing: GPT-2 small and a model
of Llama 3 8B's shapes (``fit/``). All ways must come out the same, to the byte. Times are those of the host, and no GPU's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from claims import Claim, conclude, parser_of, print_table

HERE = Path(__file__).parent
PROGRAMS = ("gpt2_small", "llama_3_8b")
WAYS = {"forks, two at a time": ("--jobs=2", "--"), "forks": ("--",), "processes": ("--", "env")}
"""Words before ``python program.py``: another command than Python's is a process for each card."""


@dataclass(frozen=True)
class Taken:
    """Seconds of a command on the wall, and the load of the machine when it began."""

    wall: float
    load: float


def fit(program: str, way: str) -> tuple[Taken, list[dict[str, Any]]]:
    """Return what the command takes for all cards, and what it finds for each."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest_gpumem.tools.main", "fit", "--format", "json"]
    command += [*WAYS[way], sys.executable, str(HERE / "fit" / f"{program}.py")]
    load, began = os.getloadavg()[0], time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    wall = time.perf_counter() - began
    if done.returncode > 1:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return Taken(round(wall, 1), load), json.loads(done.stdout)["gpus"]


def main() -> int:
    """Run both programs each way, write the results, print what was taken, and tell whether the claims hold."""
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of results")
    parser.add_argument("--only", choices=PROGRAMS, action="append", help="a program; may be repeated")
    options = parser.parse_args()
    folder = options.out / "emulated-h100"
    folder.mkdir(parents=True, exist_ok=True)
    rows, claims = [], []
    for program in options.only or PROGRAMS:
        taken: dict[str, list[Taken]] = {way: [] for way in WAYS}
        came: dict[str, Any] = {}
        for _ in range(options.rounds):
            for way in WAYS:
                one, came[way] = fit(program, way)
                taken[way].append(one)
        best = {way: min(all_of, key=lambda one: one.wall) for way, all_of in taken.items()}
        rows += [(program, way, f"{one.wall} s", f"{one.load:.1f}") for way, one in best.items()]
        two_at_a_time, *others = came.values()
        different = sum(
            any(one != of_other for of_other in in_others)
            for one, *in_others in zip(two_at_a_time, *others, strict=True)
        )
        claims.append(
            Claim(f"{program}: seconds for all cards, two at a time", best["forks, two at a time"].wall, 60.0)
        )
        claims.append(Claim(f"{program}: cards that come out otherwise another way", different, 0))
        seconds = {way: [asdict(one) for one in all_of] for way, all_of in taken.items()}
        plain = {"emulated": True, "seconds": seconds, "different": different, "gpus": two_at_a_time}
        (folder / f"fit-{program}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    print_table(("program", "each card in", "wall", "load before"), rows)
    return conclude(claims, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
