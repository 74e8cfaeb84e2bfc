"""Write files about a recorded step: a timeline as JSON, and on CUDA a snapshot for PyTorch's memory viewer."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.facts.values.plain import to_plain
from pytest_gpumem.measuring.explain.over_time import over_time_of

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.measuring.explain.recording import Recording

TIMELINE_FORMAT = 1
TIMELINE_KEYS = {"format": f"The number of the format: {TIMELINE_FORMAT}.", "test": "The test's node id."}
"""The keys in a timeline file besides the fields of `OverTime`, each with its meaning."""
_LONGEST_NAME = 120


def artifact_name(nodeid: str, number: int) -> str:
    """Return a file name without suffix for a test's ``number``-th recording. Two tests never get the same name."""
    plain = re.sub(r"[^A-Za-z0-9.\-]+", "_", nodeid)[-_LONGEST_NAME:].strip("_.-")
    return f"{plain or 'test'}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}-{number}"


class Artifacts:
    """Writes a test's recordings into the folder from ``--gpumem-artifacts``. Without this option, nothing is written.

    Each recorded step gets a file ``<test>-<hash>-<number>.timeline.json``, which is written completely or not at all. On CUDA,
    there is also a file ``<test>-<hash>-<number>.snapshot.pickle``, as ``torch.cuda.memory._dump_snapshot`` writes it.
    """

    def __init__(self, folder: Path | None, nodeid: str, device: Device) -> None:
        self._folder = folder
        self._nodeid = nodeid
        self._device = device
        self._count = 0

    def keep(self, recorded: Recording) -> str | None:
        """Write a recording's files. If this fails, return the reason, and otherwise ``None``."""
        if self._folder is None:
            return None
        self._count += 1
        name = artifact_name(self._nodeid, self._count)
        timeline, snapshot = (self._folder / f"{name}.{suffix}" for suffix in ("timeline.json", "snapshot.pickle"))
        try:
            for earlier in (timeline, snapshot):
                # Remove a file from an earlier session, so nobody takes it for a file from this session.
                earlier.unlink(missing_ok=True)
            write_atomically(timeline, json.dumps(timeline_to_plain(self._nodeid, recorded)) + "\n")
            self._device.keep_snapshot(snapshot)
        except OSError as error:
            return f"{self._folder}: cannot write the recording (--gpumem-artifacts): {error}"
        return None


def timeline_to_plain(nodeid: str, recorded: Recording) -> dict[str, Any]:
    """Return a timeline for JSON: ``format``, the test's node id, and all fields of `OverTime`."""
    return {"format": TIMELINE_FORMAT, "test": nodeid, **to_plain(over_time_of(recorded))}
