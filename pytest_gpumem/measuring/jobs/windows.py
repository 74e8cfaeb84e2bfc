"""Figures of the processes that a test, its fixtures or its session started, for the time of a test's call or region.

Each process that inherits the environment reports its own memory (`emulating/emulated_process/usage_recorder.py`). At
the begin and the end of a window, running processes are asked for their figures. Ended processes have left them in files.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.base.shown_command import shown_command
from pytest_gpumem.emulating.emulated_process.before_torch import record_fork
from pytest_gpumem.emulating.emulated_process.control import (
    answer_from,
    has_socket,
    is_listening,
    listen,
    pid_at,
    request_line,
)
from pytest_gpumem.emulating.emulated_process.exit_status import status_file
from pytest_gpumem.emulating.emulated_process.marks import SEEN, UNCOUNTED, bytes_of, mark_in, text_of, uncounted_in
from pytest_gpumem.emulating.emulated_process.shared_bytes import SharedBytes
from pytest_gpumem.emulating.emulated_process.usage import (
    MOST_BYTES,
    RECORD,
    TOO_LONG,
    InvalidReport,
    read_reports,
    ticks_now,
)
from pytest_gpumem.measuring.jobs.child_watch import ChildWatch
from pytest_gpumem.measuring.jobs.figures import shown_process
from pytest_gpumem.measuring.jobs.processes import is_running, own_children, own_children_before
from pytest_gpumem.measuring.jobs.run import JOB_PREFIX, reporting_to

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessUsage
    from pytest_gpumem.measuring.jobs.processes import Unseen

ANSWER_SECONDS = 10.0
"""A process has this many seconds to answer. A stopped process does not, and neither does a process in a long call with the
interpreter's lock."""
_RECORDED_SECONDS = 60.0
"""The same for a process that records its allocations. At the begin, a search for 200,000 older tensors took 7.5 s on two
busy cores. At the end, 300,000 entries took 5.4 s, and a history has at most 2**19."""
_LOOK_SECONDS = 0.02
_MOST_DIGITS = 10
_PREFIX = "gpumem-processes-"
_OTHER_PARENTS = ("/tmp", "/dev/shm", "/var/tmp")  # noqa: S108 -- `mkdtemp` makes a folder that only this user can open
_NO_SOCKETS = "no folder for temporary files has Unix sockets. Set TMPDIR to a folder on a local disk"
_IN_FORK = "this test runs in a fork of pytest, which cannot ask other processes"
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
    """Each process's usage in this window."""
    killed: tuple[ProcessUsage, ...] = ()
    """The last reports of killed processes. Their peaks are lower bounds."""
    silent: tuple[str, ...] = ()
    """A sentence for each running process that did not answer in time."""
    unknown: tuple[str, ...] = ()
    """A sentence for each process whose memory is not known for another reason, for example because its report is invalid."""
    unseen: tuple[Unseen, ...] = ()
    """The processes with torch or CUDA, and without a report."""
    importing: tuple[str, ...] = ()
    """The commands of processes in which torch was imported in this window. A fork of the test's process does not import."""
    uncounted: tuple[tuple[str, str], ...] = ()
    """The commands of processes that cannot count their memory on the CPU, each with the reason."""
    simultaneous: Mapping[int, int] = field(default_factory=dict)
    """The most bytes published by all processes at the same time, by the GPU's index in the machine."""


def joined(parts: Iterable[WindowUsage]) -> WindowUsage:
    """Return consecutive parts of a window as a single window."""
    usages: dict[_Key, ProcessUsage] = {}
    killed: dict[_Key, ProcessUsage] = {}
    silent: dict[str, None] = {}
    unknown: dict[str, None] = {}
    unseen: dict[Unseen, None] = {}
    importing: dict[str, None] = {}
    uncounted: dict[tuple[str, str], None] = {}
    simultaneous: dict[int, int] = {}
    for part in parts:
        for usage in part.usages:
            key = _key(usage)
            usages[key] = _joined_usage(usages[key], usage) if key in usages else usage
        killed |= {_key(usage): usage for usage in part.killed}
        silent |= dict.fromkeys(part.silent)
        unknown |= dict.fromkeys(part.unknown)
        unseen |= dict.fromkeys(part.unseen)
        importing |= dict.fromkeys(part.importing)
        uncounted |= dict.fromkeys(part.uncounted)
        simultaneous |= {gpu: max(nbytes, simultaneous.get(gpu, 0)) for gpu, nbytes in part.simultaneous.items()}
    return WindowUsage(
        tuple(usages.values()),
        tuple(killed.values()),
        tuple(silent),
        tuple(unknown),
        tuple(unseen),
        tuple(importing),
        tuple(uncounted),
        simultaneous,
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
        published=None if earlier.published is None else later.published,
    )


def first_live(first: int, last: int, current: int) -> int:
    """Return a process's live bytes at first, after a change between two windows.

    The change first undoes the growth in earlier windows, for example if a fixture empties a server's cache after each test.
    The rest counts as if it had been there at first, because a fixture may load another model.

    Example:
        A server had 100 bytes at first. Tests let it keep 30 more, and a fixture frees them: ``first_live(100, 130, 100)``
        returns 100. If the fixture loads 400 bytes more instead, ``first_live(100, 130, 530)`` returns 500.

    Args:
        first: The bytes at first, so far.
        last: The bytes when the last window ended.
        current: The bytes now.
    """
    change, grown = current - last, last - first
    undone = sorted((0, change, -grown))[1]  # 0 if both have the same sign, otherwise the smaller of both
    return first + change - undone


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

    def __init__(self, variables: Mapping[str, str] | None = None, session_began: int | None = None) -> None:
        """Begin without windows.

        Args:
            variables: Further environment variables for the processes.
            session_began: The time when the session began, as in `ProcessIdentity.started`. Children that started between this
                time and now cannot report. If it is ``None``, all current children count as older than the session.
        """
        _remove_abandoned()
        self._further_variables = dict(variables or {})
        self._folder, self._listener = _folder_with_listener()
        self.shared = SharedBytes(self._folder)
        """The bytes that the processes and this process publish."""
        self._while_asked: dict[int, int] = {}
        """The highest sum of all processes on each GPU while the latest request was answered."""
        self._connections: dict[socket.socket, bytearray] = {}
        """Connections to processes, each with the received begin of an answer."""
        self._invalid: dict[str, None] = {}
        """Sentences about invalid answers to the current request."""
        self._open: list[Window] = []
        self._live_first: dict[_Key, dict[int, int]] = {}
        """For each process, the live bytes on each GPU when its first window began."""
        self._live_last: dict[_Key, dict[int, int]] = {}
        """For each process, the live bytes on each GPU in its last answer."""
        self._number = 0
        self._owner = os.getpid()
        self._first_tick = ticks_now()
        self._older = frozenset(own_children()) if session_began is None else own_children_before(session_began)
        """Children from before the session."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_fork)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with which a child process reports, in addition to the variables in ``environment``."""
        return {**self._further_variables, **reporting_to(self._folder, environment)}

    def close(self) -> None:
        """Remove the folder. Processes that still run go on without reports."""
        self._close_sockets()
        self.shared.close()
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
    def window(
        self, *, record: bool = False, look: Callable[[frozenset[int]], None] = lambda _: None
    ) -> Iterator[Window]:
        """Read the figures of all processes within the context. A window may contain other windows.

        Args:
            record: Whether the processes record their allocations.
            look: A function called several times a second with the pids of all descendants, in another thread.
        """
        window = Window()
        seconds = _RECORDED_SECONDS if record else ANSWER_SECONDS
        flag = self._folder / RECORD
        if record:
            if not self._folder.is_dir():
                raise MeasuringError(self._removed)
            flag.touch()
        try:
            # Without an answer now, a process has no new peaks, so its figures in this window will be too large.
            begin_part = self._divide(seconds)
            unasked = begin_part.unknown if self._listener is None else ()
            window.parts.append(WindowUsage(silent=begin_part.silent, unknown=unasked))
            self._open.append(window)
            marks, earlier = set(self._folder.glob(f"*{SEEN}")), set(self._folder.glob(f"*{UNCOUNTED}"))
            with ChildWatch(self._folder, self._older, look, self._first_tick) as watch:
                yield window
            flag.unlink(missing_ok=True)
            self._divide(seconds)
            unseen = watch.unseen()
            if unseen and not self._folder.is_dir():
                # No process can report, so another cause of being unseen would be a guess.
                window.parts.append(WindowUsage(unknown=(self._removed,)))
                unseen = ()
            uncounted = tuple(map(uncounted_in, set(self._folder.glob(f"*{UNCOUNTED}")) - earlier))
            if self._owner != os.getpid():
                # A server from before this window is not counted either.
                marks = {path for path in marks if not _may_run(path.name.partition(".")[0])}
                marks.add(self._folder / f"{os.getpid()}{SEEN}")
            importing = self._imported_since(marks)
            if self._owner != os.getpid():
                uncounted = tuple((command, _IN_FORK) for command in importing)
            window.parts.append(WindowUsage(unseen=unseen, importing=importing, uncounted=uncounted))
        finally:
            flag.unlink(missing_ok=True)
            self._open = [opened for opened in self._open if opened is not window]

    @property
    def _removed(self) -> str:
        return (
            f"the folder {self._folder} was removed while the session ran, and other processes report their memory there, so "
            "their memory is not known. Let no test remove folders that it has not made"
        )

    @contextmanager
    def ending_new_processes(self) -> Iterator[None]:
        """End the processes that report, start within the context, and still run after it."""
        time.sleep(1 / os.sysconf("SC_CLK_TCK"))  # earlier processes then started at an earlier tick
        first_tick = ticks_now()
        try:
            yield
        finally:
            for usage in read_reports(self._folder).usages.values():
                process = usage.process
                is_new = first_tick and process.started >= first_tick
                if is_new and usage.ended is None and is_running(process.pid, process.started):
                    with suppress(OSError):
                        os.kill(process.pid, signal.SIGTERM)

    def divide(self) -> WindowUsage:
        """End a part of all open windows, and return the processes in this part."""
        return self._divide()

    def _divide(self, seconds: float = ANSWER_SECONDS) -> WindowUsage:
        """Ask all processes for their figures since the last request. Add the answers to the open windows.

        A process has this many seconds to answer.
        """
        self._number += 1
        asked = time.monotonic_ns()
        # On Windows, only launched jobs are measured. A fork of the test's process measures nothing.
        if not hasattr(socket, "AF_UNIX") or self._owner != os.getpid():
            return WindowUsage()
        until_asked = self.shared.restart()
        if not (self._connections or self._accepted() or any(self._folder.glob("*.json"))):
            self._while_asked = {}
            return WindowUsage()
        answers = {} if self._listener is None else self._answers(asked, seconds)
        usages = [self._with_live_first(usage) for usage in answers.values()]
        killed: list[ProcessUsage] = []
        silent: list[str] = []
        reports = read_reports(self._folder)
        unknown = [*self._invalid, *reports.invalid.values()]
        self._invalid.clear()
        for path in reports.invalid:
            if not _may_run(path.name.partition("-")[0]):
                _remove(path)
        for path, usage in reports.usages.items():
            if _key(usage) in answers or self._is_later(usage, asked):
                continue
            if usage.ended is None and is_running(usage.process.pid, usage.process.started):
                if self._listener is None:
                    unknown.append(
                        f"`{command_text(usage)}` runs, and cannot be asked for its GPU memory, because {_NO_SOCKETS}"
                    )
                else:
                    silent.append(
                        f"`{command_text(usage)}` did not report its memory within {seconds:g} seconds, so its memory is not "
                        "known. It is stopped, or in a long call that keeps Python's lock"
                    )
                continue
            (usages if usage.ended is not None else killed).append(self._with_live_first(usage))
            path.unlink(missing_ok=True)
            status_file(path).unlink(missing_ok=True)
        # A process's peak may be between its answer and the last answer. Then the next part has it.
        answered = {(usage.process.pid, usage.process.started) for usage in answers.values()}
        self.shared.remove_ended(lambda pid, started: (pid, started) in answered or is_running(pid, started))
        sums = [self._while_asked, until_asked, while_asked := self.shared.restart()]
        self._while_asked = while_asked
        gpus = sorted({gpu for by_gpu in sums for gpu in by_gpu})
        simultaneous = {gpu: max(by_gpu.get(gpu, 0) for by_gpu in sums) for gpu in gpus}
        part = WindowUsage(tuple(usages), tuple(killed), tuple(silent), tuple(unknown), simultaneous=simultaneous)
        for window in self._open:
            window.parts.append(part)
        return part

    def _with_live_first(self, usage: ProcessUsage) -> ProcessUsage:
        """Return a process's usage with the live bytes on each GPU when the process's first window began.

        If the process began within a window, it had no bytes when this window began. Between windows, `first_live` decides.
        """
        live = {device.device: device.live for device in usage.devices}
        key = _key(usage)
        live_first = self._live_first.setdefault(key, {} if self._open else dict(live))
        if not self._open:
            for gpu, nbytes in self._live_last.get(key, {}).items():
                live_first[gpu] = first_live(live_first.get(gpu, 0), nbytes, live.get(gpu, nbytes))
        self._live_last[key] = live
        devices = (replace(device, live_first=live_first.get(device.device, 0)) for device in usage.devices)
        return replace(usage, devices=tuple(devices))

    def _is_later(self, usage: ProcessUsage, asked: int) -> bool:
        """Return whether a report is about the next window."""
        return usage.window == self._number or (usage.window is None and usage.began > asked)

    def _answers(self, asked: int, seconds: float) -> dict[_Key, ProcessUsage]:
        """Return the answers from all running processes."""
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
                try:
                    received = self._received(connection)
                except InvalidReport as error:
                    self._invalid[f"{_name_at(connection)} {error}"] = None
                    waiting.discard(connection)
                    continue
                for usage in received:
                    answers[_key(usage)] = usage
                    waiting.discard(connection)
                if connection not in self._connections:
                    waiting.discard(connection)
            new = self._accepted()
            if not new and not waiting:
                usages = read_reports(self._folder).usages.values()
                if not any(self._may_answer(usage, answers, asked) for usage in usages):
                    break
                time.sleep(_LOOK_SECONDS)  # a reporting process is about to connect
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
                self._connections[connection] = bytearray()
                new.add(connection)
        return new

    def _received(self, connection: socket.socket) -> list[ProcessUsage]:
        """Return the received answers to the current request. An answer to an earlier request is too late.

        Raises:
            InvalidReport: The process sent something else.
        """
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
        answer = self._connections[connection]
        if len(answer) > MOST_BYTES:
            answer.clear()
            raise InvalidReport(TOO_LONG)
        answer += received
        if b"\n" not in received:
            return []
        *lines, rest = answer.split(b"\n")
        answer[:] = rest
        answers = [answer_from(bytes(line)) for line in lines]
        return [usage for number, usage in answers if number == self._number]

    def _imported_since(self, marks: Collection[Path]) -> tuple[str, ...]:
        own = Path("/proc/self/cmdline").read_bytes() if Path("/proc/self/cmdline").exists() else b""
        new = [path for path in self._folder.glob(f"*{SEEN}") if path not in marks]
        return tuple(text_of(command) for command, _ in map(mark_in, map(bytes_of, new)) if command and command != own)


def _may_run(pid: str) -> bool:
    """Return whether a process runs whose pid begins a file's name."""
    return pid.isdecimal() and len(pid) < _MOST_DIGITS and is_running(int(pid), 0)


def _remove(path: Path) -> None:
    """Remove a file or folder."""
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _name_at(connection: socket.socket) -> str:
    """Return a name for the process at the other end of a connection: its command if it still runs."""
    pid = pid_at(connection)
    command = text_of(bytes_of(Path(f"/proc/{pid}/cmdline")))
    return f"`{command}`" if command else f"process {pid}"


def _folder_with_listener() -> tuple[Path, socket.socket | None]:
    """Make a folder that only this user can open, and return it with a socket to which processes connect.

    A folder for temporary files may be on a file system without Unix sockets, for example on a network. Then other folders are
    tried. If none has sockets, the socket is ``None``, and running processes cannot be asked.
    """
    without_sockets: list[Path] = []
    try:
        for parent in _parents():
            try:
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            except OSError:
                continue
            listener = listen(folder)
            if listener is not None:
                return folder, listener
            without_sockets.append(folder)
        return (without_sockets.pop(0) if without_sockets else Path(tempfile.mkdtemp(prefix=_PREFIX))), None
    finally:
        for folder in without_sockets:
            shutil.rmtree(folder, ignore_errors=True)


def _parents() -> list[Path]:
    """Return the folders that may contain a folder of this module: the first for temporary files, then others."""
    names = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), *_OTHER_PARENTS)
    return [parent for parent in dict.fromkeys(map(Path, filter(None, names))) if parent.is_dir()]


def command_text(usage: ProcessUsage) -> str:
    """Return a process's command for a message."""
    return shown_command(shown_process(usage.process))


def _remove_abandoned() -> None:
    """Remove this user's folders of sessions and jobs that were killed. Nobody listens in such a folder."""
    prefixes = (_PREFIX, JOB_PREFIX)
    for folder in (folder for parent in _parents() for prefix in prefixes for folder in parent.glob(f"{prefix}*")):
        with suppress(OSError):
            status = folder.lstat()
            is_own = hasattr(os, "getuid") and status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
            is_old = is_own and time.time() - status.st_mtime > _YOUNG_SECONDS
            # A job's folder without a socket may be of a running job, in a file system without sockets.
            may_run = folder.name.startswith(JOB_PREFIX) and not has_socket(folder)
            if is_old and not may_run and not is_listening(folder):
                shutil.rmtree(folder, ignore_errors=True)
