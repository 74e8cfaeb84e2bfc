"""A thread of each rank that gives signs of life, and ends the process when a rank is stuck or gone.

The main thread may be in a collective, in C++, which nothing interrupts: only the end of the process does.
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

from pytest_gpumem.ranks.beat import Beat, Position, is_stuck, position_of, stuck_text
from pytest_gpumem.ranks.board import Board
from pytest_gpumem.ranks.consensus import Point, failure_key
from pytest_gpumem.ranks.errors import BoardError
from pytest_gpumem.values.rank import Rank, in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpumem.ranks.consensus import Consensus
    from pytest_gpumem.ranks.launch import Launch

_SECONDS_BETWEEN_BEATS = 0.5
_SECONDS_AFTER_A_FAILURE = 30.0
"""The longest time that ranks may come no further after the test has failed on one of them, in seconds."""
_SECONDS_FOR_LAST_WORDS = 2.0
"""The time that rank 0 waits, when the job is ended, for other ranks to say that they are ended too, in seconds."""
_SECONDS_FOR_THE_FIRST = 15.0
"""The seconds that the other ranks wait longer than rank 0, as it has a report to write."""
_SECONDS_TO_WRITE = 20.0
"""The time in which rank 0 may go on writing when the job is ended: torchrun kills after 30 s."""


class Watch(threading.Thread):
    """Watches over the ranks from `start` to `end`."""

    def __init__(
        self, launch: Launch, consensus: Consensus, seconds: float, root: Path, lost: Callable[[str], object]
    ) -> None:
        """Watch over ``launch``'s ranks.

        Args:
            launch: This rank.
            consensus: What it waits in.
            seconds: How long ranks may come no further while others wait for them.
            root: The project's folder.
            lost: Called on rank 0, in this thread, with the clause that says which rank is lost, before the process ends.
        """
        super().__init__(name="gpumem-ranks", daemon=True)
        self.where = "the collection"
        """The main thread's work, as a clause."""
        self.measures = False
        self.leaves = False
        """True if this rank is about to exit, and rank 0 perhaps gone with the store."""
        self.writing = threading.Lock()
        """Held while the main thread writes what is not to be cut off."""
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
        self._before: tuple[Any, int] | None = None

    def start(self) -> None:
        """Begin, and take SIGTERM, by which torchrun ends the ranks that are left when one has died."""
        self._before = (
            signal.signal(signal.SIGTERM, self._terminated),
            signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False),
        )
        os.register_at_fork(after_in_child=self._forget_in_child)
        super().start()

    def end(self) -> None:
        """Watch no longer, and give SIGTERM back."""
        self._ended.set()
        with suppress(OSError):
            self._wake.send(b"\0")
        if self._before is not None:
            handler, descriptor = self._before
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, handler)
            self._before = None
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
                self._die(f"the store of the ranks is gone, and with it the launcher or rank 0: {error}", 1)

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
        why = self._board.maybe("lost")
        if why is not None and not self._rank.is_first:
            self._board.put(f"left/{self._rank.number}", True)
            self._die("", 1)
        self._read_beats(range(self._rank.world) if self._rank.is_first else [0])
        now = time.monotonic()
        if self._rank.is_first:
            self._look_for_the_stuck(now)
        elif now - self._seen[0][1] > self._seconds + _SECONDS_FOR_THE_FIRST:
            self._die(f"rank 0 gave no sign of life for {now - self._seen[0][1]:.0f} s", 1)

    def _look_for_the_stuck(self, now: float) -> None:
        beats, silent = [beat for beat, _ in self._seen], [now - since for _, since in self._seen]
        passed = now - self._progressed
        if passed <= min(self._seconds, _SECONDS_AFTER_A_FAILURE) or not is_stuck(beats):
            return
        texts = {number: self._failure_of(number, beat) for number, beat in enumerate(beats)}
        failed = {number: text for number, text in texts.items() if text is not None}
        seconds = min(self._seconds, _SECONDS_AFTER_A_FAILURE) if failed else self._seconds
        if passed > seconds:
            self._end_the_job(stuck_text(beats, silent, seconds, failed))

    def _failure_of(self, number: int, beat: Beat | None) -> str | None:
        """Return the text with which the test failed on a rank that waits for the others to end it, too."""
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

    def _end_the_job(self, why: str) -> None:
        """End all ranks, on rank 0, when it has been reported which of them is lost."""
        self._board.put("lost", why)
        # The others tell no more; where they are is in the report.
        self._last_report(why)
        os._exit(1)

    def _end_with_the_job(self) -> None:
        """End this rank, as the launcher wants; rank 0 finds out which rank is gone, and reports it."""
        if not self._rank.is_first:
            self._board.put(f"terminated/{self._rank.number}", True)
            os._exit(128 + signal.SIGTERM)
        others = range(1, self._rank.world)
        deadline = time.monotonic() + _SECONDS_FOR_LAST_WORDS
        while (gone := [number for number in others if not self._has_last_words(number)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        if self._ended.is_set():
            return
        wheres = {number: self._board.maybe(f"where/{number}") for number in gone}
        self._last_report(_gone_text(gone, self._seen, wheres))
        os._exit(128 + signal.SIGTERM)

    def _has_last_words(self, number: int) -> bool:
        return any(self._board.has([f"{word}/{number}"]) for word in ("terminated", "left"))

    def _last_report(self, why: str) -> None:
        # Where the main thread writes already, its report stands.
        if self.writing.acquire(timeout=_SECONDS_TO_WRITE):
            try:
                self._lost(why)
            except BaseException as error:  # noqa: BLE001 - the process must end, whatever happens
                sys.stderr.write(f"gpumem: {why}\ngpumem: and it could not be reported: {error!r}\n")
        sys.stdout.flush()
        sys.stderr.flush()

    def _die(self, why: str, status: int) -> None:
        if why:
            os.write(2, f"gpumem: {self._rank}: {why}\n".encode())
        os._exit(status)

    def _terminated(self, *_: object) -> None:
        """Let the thread act, which is woken by the signal's number: this runs only when the main thread is in Python."""

    def _forget_in_child(self) -> None:
        """Leave a forked process as it would be: a worker of a DataLoader is ended by SIGTERM."""
        if self._before is not None and os.getpid() != self._process:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _gone_text(gone: list[int], seen: Sequence[tuple[Beat | None, float]], wheres: Mapping[int, str | None]) -> str:
    """Return which ranks are gone, and what each ran last: by its sign of life, or what it has come to since."""
    if not gone:
        return "the job was ended (SIGTERM), and no rank was lost before"
    world = len(seen)
    who = str(Rank(gone[0], world)) if len(gone) == 1 else f"{in_words(gone)} of {world}"
    lines = [f"{who} ended without a word: killed, or crashed; the launcher's last lines have the exit status"]
    for number in gone:
        beat, where = seen[number][0], wheres[number]
        if beat is None and where is None:
            last = "never came to its measured tests"
        elif beat is None or where not in (None, beat.where):
            last = f"last in {where}"  # and the sign of life is older
        else:
            last = f"last in {beat.where}, at {beat.position}"
        lines.append(f"  rank {number}: {last}")
    return "\n".join(lines)
