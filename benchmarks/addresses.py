"""Where the driver puts device memory: addresses of ``cudaMalloc`` after many allocations and releases.

torch's allocator took the lower of two free blocks of equal size up to 2.11, so that peaks depend on addresses. An emulated GPU
has the rules that were read from what this script recorded (`pytest_gpumem/emulating/emulation/native/addresses.c`), and a test
replays the recording (`tests/emulated/test_addresses.py`). It needs a GPU that nobody else uses, and torch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
MOST_HELD = 12_000
"""MiB that a trace holds at a time."""
SIZES = (
    (2, 20, 22, 40),
    (2, 2, 2, 20, 20, 26, 74, 154, 200),
    (34, 64, 98, 130, 590),
    (2,),
    (2, 20),
    (20, 24, 28, 30),
    (2, 4, 6, 8, 10, 12, 16),
)
"""MiB of the allocations of each random trace. torch asks for 2, 20, and multiples of 2."""


def traces() -> dict[str, list[int]]:
    """Return lists of operations by name: a size in MiB, or ``-1 - n`` to release what operation ``n`` allocated."""
    made = {
        "2 MiB": [2] * 40,
        "20 MiB": [20] * 12,
        "mixed": [2, 20, 2, 22, 2, 30, 32, 2, 34, 64, 2, 20, 66, 100, 2, 128, 20, 2, 300, 2, 20],
    }
    made |= {f"random {sizes}": _random(seed, sizes) for seed, sizes in enumerate(SIZES, 1)}
    draw = random.Random(9)  # noqa: S311 - the same each time
    sizes = [draw.choice((2, 20, 20, 2, 26, 64, 98, 154)) for _ in range(60)]
    made["all and again"] = [*sizes, *range(-1, -61, -1), *sizes, *range(-121, -181, -1), *reversed(sizes)]
    made["two stay"] = [2, 20, *sizes, *range(-3, -63, -1), *reversed(sizes)]
    return made


def _random(seed: int, sizes: tuple[int, ...]) -> list[int]:
    draw, held = random.Random(seed), 0  # noqa: S311 - the same each time
    operations: list[int] = []
    live: list[int] = []
    for number in range(400):
        if live and (draw.random() < 0.42 or held > MOST_HELD):
            released = live.pop(draw.randrange(len(live)))
            held -= operations[released]
            operations.append(-1 - released)
        else:
            size = draw.choice(sizes)
            held += size
            operations.append(size)
            live.append(number)
    return operations


class Memory:
    """The functions of the CUDA runtime that torch calls."""

    def __init__(self) -> None:
        import torch

        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        self._runtime = ctypes.CDLL(next(one for one in _libraries() if "libcudart" in one))

    def allocate(self, mib: int) -> int:
        """Return the address of so many MiB. Raises ``MemoryError`` when the GPU has not that much."""
        at = ctypes.c_void_p()
        if self._runtime.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(mib * MIB)) or at.value is None:
            raise MemoryError(f"cudaMalloc of {mib} MiB failed")
        return at.value

    def release(self, at: int) -> None:
        """Release what is at an address. Raises ``ValueError`` where nothing is."""
        if self._runtime.cudaFree(ctypes.c_void_p(at)):
            raise ValueError(f"cudaFree of {at:#x} failed")

    def run(self, operations: list[int]) -> list[int]:
        """Return the address of each allocation of a trace, and release what is left of it."""
        live: dict[int, int] = {}
        addresses = []
        for number, operation in enumerate(operations):
            if operation < 0:
                self.release(live.pop(-1 - operation))
            else:
                live[number] = self.allocate(operation)
                addresses.append(live[number])
        for at in live.values():
            self.release(at)
        return addresses


def _libraries() -> list[str]:
    return re.findall(r"\S+/lib\S+\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8"))


def main() -> int:
    """Record. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of results (default: %(default)s)")
    out: Path = parser.parse_args().out
    import torch

    from pytest_gpumem.measuring.devices.registry import make_cuda

    memory = Memory()
    (first,) = memory.run([2])
    origin = first // (32 * MIB) * 32
    found = {name: [at // MIB - origin for at in memory.run(trace)] for name, trace in traces().items()}
    environment = make_cuda().environment()
    path = out / environment.slug / "addresses.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"device": environment.device, "torch": torch.__version__, "cuda": torch.version.cuda}
    path.write_text(json.dumps({**head, "unit": "MiB", "addresses": found}) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
