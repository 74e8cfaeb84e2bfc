"""Figures of the processes that a test, its fixtures or its session started, for the time of a test's call or region.

Each process that inherits the environment reports its own memory (`emulating/emulated_process/usage_recorder.py`). At
the begin and the end of a window, running processes are asked for their figures. Ended processes have left them in files.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.emulating.emulated_process.before_torch import record_fork
from pytest_gpumem.emulating.emulated_process.control import answer_from, is_listening, listen, request_line
from pytest_gpumem.emulating.emulated_process.usage import RECORD, SEEN, mark_in, usage_from
from pytest_gpumem.measuring.jobs.popen_watch import PopenWatch
from pytest_gpumem.measuring.jobs.processes import JobProcesses, bytes_of, is_running, own_children, text_of
from pytest_gpumem.measuring.jobs.run import reporting_to

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessUsage

ANSWER_SECONDS = 10.0
"""A process has this many seconds to answer. A stopped process does not, and neither does a process in a long call with the
interpreter's lock."""
_RECORDED_SECONDS = 60.0
"""The same for a process that recorded its allocations, because it looks at up to 2**19 entries of the history. 300,000 entries
took 5.4 s on two busy cores."""
_LOOK_SECONDS = 0.02
_PREFIX = "gpumem-processes-"
_YOUNG_SECONDS = 86_400.0
"""A younger folder may belong to a session on another machine, because machines may share a folder for temporary files."""
_MOST_REMOVALS = 10
"""A running process may write a file while the folder is removed, so the folder is removed again."""


class _Key(NamedTuple):
    """A process. A later process may have the same pid, and a process may run another program by ``exec``."""

    pid: int
    began: int


def _key(usage: ProcessUsage) -> _Key:
    return _Key(usage.process.pid, usage.began)


@dataclass(frozen=True, slots=True)
class WindowUsage:
    """The processes in a window."""

    usages: tuple[ProcessUsage, ...] = ()
    """The usage of each process with CUDA in this window."""
    killed: tuple[ProcessUsage, ...] = ()
    """The last reports of killed processes. Their peaks are lower bounds."""
    silent: tuple[ProcessUsage, ...] = ()
    """The last reports of running processes that did not answer in time."""
    unseen: tuple[str, ...] = ()
    """The commands of processes with torch or CUDA, and without reports."""
    importing: tuple[str, ...] = ()
    """The commands of processes in which torch was imported in this window. A fork of the test's process does not import."""


def joined(parts: Iterable[WindowUsage]) -> WindowUsage:
    """Return consecutive parts of a window as a single window."""
    usages: dict[_Key, ProcessUsage] = {}
    killed: dict[_Key, ProcessUsage] = {}
    silent: dict[_Key, ProcessUsage] = {}
    unseen: dict[str, None] = {}
    importing: dict[str, None] = {}
    for part in parts:
        for usage in part.usages:
            key = _key(usage)
            usages[key] = _joined_usage(usages[key], usage) if key in usages else usage
        killed |= {_key(usage): usage for usage in part.killed}
        silent |= {_key(usage): usage for usage in part.silent}
        unseen |= dict.fromkeys(part.unseen)
        importing |= dict.fromkeys(part.importing)
    return WindowUsage(
        tuple(usages.values()), tuple(killed.values()), tuple(silent.values()), tuple(unseen), tuple(importing)
    )


def _joined_usage(earlier: ProcessUsage, later: ProcessUsage) -> ProcessUsage:
    before = {device.device: device for device in earlier.devices}
    devices = tuple(_joined_device(before.pop(device.device, None), device) for device in later.devices)
    times = earlier.times_out_of_memory + later.times_out_of_memory
    return replace(later, devices=(*before.values(), *devices), window=earlier.window, times_out_of_memory=times)


def _joined_device(earlier: DeviceUsage | None, later: DeviceUsage) -> DeviceUsage:
    if earlier is None:
        return later
    return replace(
        later,
        allocated=max(earlier.allocated, later.allocated),
        reserved=max(earlier.reserved, later.reserved),
        requested=max(earlier.requested, later.requested),
        live_before=earlier.live_before,
        allocations=earlier.allocations + later.allocations,
    )


class Window:
    """A part of a test. `usage` is complete when the part has ended."""

    def __init__(self) -> None:
        self.parts: list[WindowUsage] = []

    @property
    def usage(self) -> WindowUsage:
        """The processes in this window."""
        return joined(self.parts)


class ProcessWindows:
    """The windows of the tests in this process. It has a folder of its own, so it does not see another session's processes."""

    def __init__(self) -> None:
        _remove_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # only this user can open it
        self._listener = listen(self._folder)
        self._connections: dict[socket.socket, bytes] = {}
        """Connections to processes, each with the received begin of an answer."""
        self._open: list[Window] = []
        self._live_first: dict[_Key, dict[int, int]] = {}
        """For each process, the live bytes on each GPU when its first window began."""
        self._live_last: dict[_Key, dict[int, int]] = {}
        """For each process, the live bytes on each GPU in its last answer."""
        self._number = 0
        self._owner = os.getpid()
        self._older = frozenset(own_children())
        """Children from before this object. They have no variables, and are not this session's."""
        self._watch = PopenWatch(self._folder, self.variables({}))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_fork)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with which a child process reports, in addition to the variables in ``environment``."""
        return reporting_to(self._folder, environment)

    def close(self) -> None:
        """Remove the folder. Processes that still run go on without reports."""
        self._close_sockets()
        self._watch.close()
        if self._owner == os.getpid():
            for _ in range(_MOST_REMOVALS):
                if self._folder.exists():
                    shutil.rmtree(self._folder, ignore_errors=True)

    def _close_sockets(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _begin_fork(self) -> None:
        """In a fork of this process: close the sockets, and report as other processes do."""
        self._close_sockets()
        self._open.clear()
        if self._folder.is_dir():
            record_fork(self.variables({}))

    @contextmanager
    def window(self, *, record: bool = False) -> Iterator[Window]:
        """Read the figures of all processes within the context. A window may contain other windows.

        Args:
            record: Whether the processes record their allocations.
        """
        window = Window()
        flag = self._folder / RECORD
        if record:
            flag.touch()
        try:
            # Without an answer now, a process has no new peaks, so its figures in this window will be too large.
            window.parts.append(WindowUsage(silent=self._divide().silent))
            self._open.append(window)
            begin = time.monotonic()
            marks = set(self._folder.glob(f"*{SEEN}"))
            yield window
            flag.unlink(missing_ok=True)
            self._divide(_RECORDED_SECONDS if record else ANSWER_SECONDS)
            unseen = (*self._unseen(), *self._watch.unseen_since(begin))
            window.parts.append(WindowUsage(unseen=unseen, importing=self._imported_since(marks)))
        finally:
            flag.unlink(missing_ok=True)
            self._open = [opened for opened in self._open if opened is not window]

    def divide(self) -> WindowUsage:
        """End a part of all open windows, and return the processes in this part."""
        return self._divide()

    def _divide(self, seconds: float = ANSWER_SECONDS) -> WindowUsage:
        """Ask all processes for their figures since the last request. Add the answers to the open windows.

        A process has this many seconds to answer.
        """
        self._number += 1
        asked = time.monotonic_ns()
        if self._listener is None or not (self._connections or self._accepted() or self._reports()):
            return WindowUsage()
        answers = self._answers(asked, seconds)
        usages = [self._with_live_first(usage) for usage in answers.values()]
        killed: list[ProcessUsage] = []
        silent: list[ProcessUsage] = []
        for path, usage in self._reports().items():
            if _key(usage) in answers or self._is_later(usage, asked):
                continue
            if usage.ended is None and is_running(usage.process.pid, usage.process.started):
                silent.append(usage)
                continue
            (usages if usage.ended is not None else killed).append(self._with_live_first(usage))
            path.unlink(missing_ok=True)
        part = WindowUsage(tuple(usages), tuple(killed), tuple(silent))
        for window in self._open:
            window.parts.append(part)
        return part

    def _with_live_first(self, usage: ProcessUsage) -> ProcessUsage:
        """Return a process's usage with the live bytes on each GPU when the process's first window began.

        If the process began within a window, it had no bytes when this window began. Growth between windows counts as if it had
        been there at first, because a fixture may load a larger model.
        """
        live = {device.device: device.live for device in usage.devices}
        key = _key(usage)
        live_first = self._live_first.setdefault(key, {} if self._open else dict(live))
        if not self._open:
            for gpu, nbytes in self._live_last.get(key, {}).items():
                live_first[gpu] = live_first.get(gpu, 0) + live.get(gpu, nbytes) - nbytes
        self._live_last[key] = live
        devices = (replace(device, live_first=live_first.get(device.device, 0)) for device in usage.devices)
        return replace(usage, devices=tuple(devices))

    def _is_later(self, usage: ProcessUsage, asked: int) -> bool:
        """Return whether a report is about the next window."""
        return usage.window == self._number or (usage.window is None and usage.began > asked)

    def _answers(self, asked: int, seconds: float) -> dict[_Key, ProcessUsage]:
        """Return the answers of all running processes with CUDA."""
        answers: dict[_Key, ProcessUsage] = {}
        waiting: set[socket.socket] = set()
        new = set(self._connections)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for connection in new:
                with suppress(OSError):
                    connection.sendall(request_line(self._number))
            waiting |= new
            ready = wait(waiting, _LOOK_SECONDS) if waiting else []
            for connection in waiting.intersection(ready):
                for usage in self._received(connection):
                    answers[_key(usage)] = usage
                    waiting.discard(connection)
                if connection not in self._connections:
                    waiting.discard(connection)
            new = self._accepted()
            if not new and not waiting:
                if not any(self._may_answer(usage, answers, asked) for usage in self._reports().values()):
                    break
                time.sleep(_LOOK_SECONDS)  # a process with CUDA is about to connect
        return answers

    def _may_answer(self, usage: ProcessUsage, answers: Mapping[_Key, ProcessUsage], asked: int) -> bool:
        is_expected = usage.ended is None and _key(usage) not in answers and not self._is_later(usage, asked)
        return is_expected and is_running(usage.process.pid, usage.process.started)

    def _accepted(self) -> set[socket.socket]:
        """Accept new connections, and return them."""
        new = set()
        with suppress(OSError):  # no further process waits
            while self._listener is not None:
                connection = self._listener.accept()[0]
                connection.setblocking(False)
                self._connections[connection] = b""
                new.add(connection)
        return new

    def _received(self, connection: socket.socket) -> list[ProcessUsage]:
        """Return the received answers to the current request. An answer to an earlier request is too late."""
        try:
            received = connection.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            received = b""
        if not received:  # the process has ended
            del self._connections[connection]
            connection.close()
            return []
        *lines, self._connections[connection] = (self._connections[connection] + received).split(b"\n")
        answers = [answer_from(line) for line in lines]
        return [usage for number, usage in answers if number == self._number]

    def _reports(self) -> dict[Path, ProcessUsage]:
        return {path: usage_from(path.read_text(encoding="utf-8")) for path in self._folder.glob("*.json")}

    def _imported_since(self, marks: Collection[Path]) -> tuple[str, ...]:
        own = Path("/proc/self/cmdline").read_bytes() if Path("/proc/self/cmdline").exists() else b""
        new = [path for path in self._folder.glob(f"*{SEEN}") if path not in marks]
        return tuple(text_of(command) for command, _ in map(mark_in, map(bytes_of, new)) if command and command != own)

    def _unseen(self) -> tuple[str, ...]:
        """Return descendants without reports, by their commands."""
        children = set(own_children()) - self._older
        if not children:
            return ()
        processes = JobProcesses(self._folder)
        for pid in children:
            processes.begin(pid)
        processes.look()
        processes.look()
        return processes.unseen()


def command_text(usage: ProcessUsage) -> str:
    """Return a process's command for a message."""
    return shlex.join(usage.process.command)


def _remove_abandoned() -> None:
    """Remove this user's folders of sessions that were killed. Nobody listens in such a folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            is_own = hasattr(os, "getuid") and status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
            if is_own and time.time() - status.st_mtime > _YOUNG_SECONDS and not is_listening(folder):
                shutil.rmtree(folder, ignore_errors=True)
