"""The threads of this process, as listed by Linux."""

from __future__ import annotations

import threading
from pathlib import Path


def other_threads(name: bytes = b"") -> dict[str, tuple[bool, str]]:
    """Return, by thread id, whether a thread sleeps, and how often it has gone to sleep so far. Only Linux lists threads.

    Args:
        name: The begin of the threads' names. The calling thread is left out.
    """
    states = {}
    own = str(threading.get_native_id())
    for thread in Path("/proc/self/task").glob("*"):
        try:
            # A thread's name may not be valid text, for example if it was cut after 15 bytes.
            if thread.name != own and (thread / "comm").read_bytes().startswith(name):
                status = dict(
                    line.split(":\t", 1) for line in (thread / "status").read_text(errors="replace").splitlines()
                )
                states[thread.name] = status["State"].startswith("S"), status.get("voluntary_ctxt_switches", "")
        except (OSError, KeyError):
            continue  # the thread has ended
    return states
