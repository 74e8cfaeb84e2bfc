"""A thread in each rank, which gives signs of life, and ends the process if any rank is stuck or has crashed.

The main thread may wait for another rank in a collective. Nothing can interrupt this wait in C++, so the thread ends the whole
process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import BoardError
from pytest_gpumem.facts.values.rank import Rank, in_words
from pytest_gpumem.measuring.ranks.beat import Beat, Position, is_stuck, position_of, stuck_text
from pytest_gpumem.measuring.ranks.board import Board
from pytest_gpumem.measuring.ranks.consensus import Point, failure_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.measuring.ranks.consensus import Consensus
    from pytest_gpumem.measuring.ranks.launch import Launch

_SECONDS_BETWEEN_BEATS = 0.5
_SECONDS_AFTER_A_FAILURE = 30.0
"""If a test has failed on a rank, and no rank makes progress for this many seconds, rank 0 ends the job."""
_SECONDS_FOR_LAST_WORDS = 2.0
"""When the launcher ends the job, rank 0 waits at most this many seconds for a last sign of life from each other rank."""
_SECONDS_FOR_THE_FIRST = 15.0
"""The other ranks wait this many seconds longer than rank 0 before they end, because rank 0 has to write the report."""
_SECONDS_TO_WRITE = 20.0
"""Time limit in seconds for rank 0's report when the launcher ends the job. torchrun kills ranks after 30 s."""


class Watch(threading.Thread):
    """A thread that watches all ranks from `start` to `end`, and ends its process if a rank is stuck or has crashed."""

    def __init__(
        self, launch: Launch, consensus: Consensus, seconds: float, root: Path, lost: Callable[[str], object]
    ) -> None:
        """Connect to the ranks' key/value store. `start` begins to watch.

        Args:
            launch: How this rank was launched.
            consensus: This rank's consensus, whose `Consensus.point` is the rank's progress.
            seconds: The job ends if ranks wait and no rank makes progress for longer than this.
            root: The project's folder.
            lost: Called in this thread on rank 0 before the process ends. Its argument is a text about the lost ranks.
        """
        super().__init__(name="gpumem-ranks", daemon=True)
        self.where = "the collection"
        """The main thread's current work, for example ``"tests/test_gpt.py::test_step (call)"``."""
        self.measures = False
        """True during a measured test."""
        self.leaves = False
        """True if this rank is about to exit. Then an unreachable store is no error, because rank 0 may have exited."""
        self.writing = threading.Lock()
        """Held while the main thread writes a report, because the process must not end before the report is complete."""
        self._launch = launch
        self._rank = launch.rank
        self._consensus = consensus
        self._seconds = seconds
        self._root = root
        self._lost = lost
        self._board = Board(launch, seconds)
        self._main = threading.main_thread().ident or 0
        self._process = os.getpid()
        self._ended = threading.Event()
        self._beats = 0
        self._seen: list[tuple[Beat | None, float]] = [(None, time.monotonic())] * launch.rank.world
        self._progressed = time.monotonic()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._previous_handlers: tuple[Any, int] | None = None

    def start(self) -> None:
        """Start to watch, and handle SIGTERM, which torchrun sends to the other ranks if a rank has died."""
        self._previous_handlers = (
            signal.signal(signal.SIGTERM, self._terminated),
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False),
        )
        os.register_at_fork(after_in_child=self._forget_in_child)
        super().start()

    def end(self) -> None:
        """Stop watching, and restore the previous handler for SIGTERM."""
        self._ended.set()
        with suppress(OSError):
            self._wake.send(b"\0")
        if self._previous_handlers is not None:
            handler, descriptor = self._previous_handlers
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, handler)
            self._previous_handlers = None
        self.join(_SECONDS_FOR_LAST_WORDS)

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
                select.select([self._woken], [], [], _SECONDS_BETWEEN_BEATS)
                if signal.SIGTERM in self._signals():
                    self._end_with_the_job()
            except BoardError as error:
                if self._ended.is_set() or self.leaves:
                    return
                self._die(f"the ranks' store cannot be reached, so the launcher or rank 0 has ended: {error}", 1)

    def _signals(self) -> bytes:
        try:
            return self._woken.recv(4096)
        except BlockingIOError:
            return b""

    def _look(self) -> None:
        self._beats += 1
        position = position_of(self._main, self._root)
        beat = Beat(self._beats, self.where, self._consensus.point, self.measures, position)
        self._board.put(f"beat/{self._rank.number}", asdict(beat))
        reason = self._board.maybe("lost")
        if reason is not None and not self._rank.is_first:
            self._board.put(f"left/{self._rank.number}", True)
            self._die("", 1)
        self._read_beats(range(self._rank.world) if self._rank.is_first else [0])
        moment = time.monotonic()
        if self._rank.is_first:
            self._look_for_the_stuck(moment)
        elif moment - self._seen[0][1] > self._seconds + _SECONDS_FOR_THE_FIRST:
            self._die(f"rank 0 gave no sign of life for {moment - self._seen[0][1]:.0f} s", 1)

    def _look_for_the_stuck(self, moment: float) -> None:
        beats, silent = [beat for beat, _ in self._seen], [moment - since for _, since in self._seen]
        seconds_without_progress = moment - self._progressed
        if seconds_without_progress <= min(self._seconds, _SECONDS_AFTER_A_FAILURE) or not is_stuck(beats):
            return
        texts = {number: self._failure_of(number, beat) for number, beat in enumerate(beats)}
        failures = {number: text for number, text in texts.items() if text is not None}
        seconds = min(self._seconds, _SECONDS_AFTER_A_FAILURE) if failures else self._seconds
        if seconds_without_progress > seconds:
            self._end_the_job(stuck_text(beats, silent, seconds, failures))

    def _failure_of(self, number: int, beat: Beat | None) -> str | None:
        """Return the failure text if the test failed on this rank and the rank now waits for the others; otherwise ``None``."""
        if beat is None or not beat.point.waits:
            return None
        text: str | None = self._board.maybe(failure_key(beat.point[0], number))
        return text

    def _read_beats(self, ranks: range | list[int]) -> None:
        for number in ranks:
            plain = self._board.maybe(f"beat/{number}")
            if plain is None:
                continue
            beat = Beat(**{**plain, "point": Point(*plain["point"]), "position": Position(**plain["position"])})
            last = self._seen[number][0]
            if last is None or beat.number != last.number:
                self._seen[number] = beat, time.monotonic()
            if last is None or beat.progress != last.progress:
                self._progressed = time.monotonic()

    def _end_the_job(self, reason: str) -> None:
        """Write the report about the lost rank, and end all ranks. Called on rank 0."""
        self._board.put("lost", reason)
        # The other ranks end without a message, because this report includes their current work.
        self._last_report(reason)
        os._exit(1)

    def _end_with_the_job(self) -> None:
        """End this rank, because the launcher has sent SIGTERM.

        Rank 0 first waits for a last sign of life from the other ranks, and reports the ranks that gave none.
        """
        if not self._rank.is_first:
            self._board.put(f"terminated/{self._rank.number}", True)
            os._exit(128 + signal.SIGTERM)
        other_ranks = range(1, self._rank.world)
        deadline = time.monotonic() + _SECONDS_FOR_LAST_WORDS
        while (missing := [number for number in other_ranks if not self._has_last_words(number)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        if self._ended.is_set():
            return
        works = {number: self._board.maybe(f"where/{number}") for number in missing}
        self._last_report(_missing_text(missing, self._seen, works))
        os._exit(128 + signal.SIGTERM)

    def _has_last_words(self, number: int) -> bool:
        return any(self._board.has([f"{word}/{number}"]) for word in ("terminated", "left"))

    def _last_report(self, reason: str) -> None:
        # If the main thread is writing its own report, wait until this report is complete.
        if self.writing.acquire(timeout=_SECONDS_TO_WRITE):
            try:
                self._lost(reason)
            except BaseException as error:  # noqa: BLE001 - the process must end, whatever happens
                sys.stderr.write(f"gpumem: {reason}\ngpumem: this reason could not be reported: {error!r}\n")
        sys.stdout.flush()
        sys.stderr.flush()

    def _die(self, reason: str, status: int) -> None:
        if reason:
            os.write(2, f"gpumem: {self._rank}: {reason}\n".encode())
        os._exit(status)

    def _terminated(self, *_: object) -> None:
        """Do nothing, because Python runs this handler in the main thread, which may be blocked.

        The watching thread gets the signal through its socket (`signal.set_wakeup_fd`).
        """

    def _forget_in_child(self) -> None:
        """Restore the default handler for SIGTERM in a forked process. A DataLoader ends its workers with SIGTERM."""
        if self._previous_handlers is not None and os.getpid() != self._process:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _missing_text(
    missing: list[int], seen: Sequence[tuple[Beat | None, float]], works: Mapping[int, str | None]
) -> str:
    """Return a text for the report about ranks that ended without a last sign of life.

    For example, ``rank 1 of 2 ended without a message: ...`` and, on the next line, ``rank 1: last in
    tests/test_gpt.py::test_step (call), at test_gpt.py:18 in step``.

    Args:
        missing: The ranks without a last sign of life.
        seen: For each rank in the job, the latest sign of life and its time.
        works: For each missing rank, the work from `Consensus.comes_to`, which may be newer than the sign of life.
    """
    if not missing:
        return "the launcher ended the job (SIGTERM), and no rank was lost before"
    world = len(seen)
    name = str(Rank(missing[0], world)) if len(missing) == 1 else f"{in_words(missing)} of {world}"
    lines = [
        f"{name} ended without a message, so it was killed or has crashed; see its exit status in the launcher's output"
    ]
    for number in missing:
        beat, work = seen[number][0], works[number]
        if beat is None and work is None:
            last = "never started its measured tests"
        elif beat is None or work not in (None, beat.where):
            last = f"last in {work}"  # the latest sign of life is from earlier work
        else:
            last = f"last in {beat.where}, at {beat.position}"
        lines.append(f"  rank {number}: {last}")
    return "\n".join(lines)
