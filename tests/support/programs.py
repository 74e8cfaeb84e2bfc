"""Programs with processes that use an emulated GPU, or the CPU if the variable ``DEVICE`` is ``cpu``."""

from __future__ import annotations

JOB = '''
import asyncio
import concurrent.futures
import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

# Without the stand-ins of the emulated GPU, torch's build for CUDA cannot be imported; its library can be mapped.
LOADS_TORCH = """
import importlib.util, mmap, pathlib, time
library = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cpu.so"
file = library.open("rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
time.sleep(2)
"""
# The program goes on after a failed exec, takes more, and is killed before it could report that.
FAILS_TO_EXEC = """
import contextlib, job, os
job.work()
with contextlib.suppress(OSError):
    os.execv("/none", ["none"])
job.work(1)
os.kill(os.getpid(), 9)
"""
DEVICE = os.environ.get("DEVICE", "cuda")
COUNT = int(os.environ.get("COUNT", "2"))
"""The number of processes of a way that may start several."""
CLEARED = {"PATH": os.environ["PATH"], "CLEARED": "1"}
DONE = threading.Event()
"""Set when nobody waits for a pool any more."""
GROWN = int(os.environ.get("GROWN", "1")) + (os.environ.get("RANK") == os.environ.get("LARGEST_RANK", ""))


def fault():
    """Return what a test's process has to do after its work. The file is the same for all processes of a session."""
    return pathlib.Path(os.environ["FAULT"]).read_text() if "FAULT" in os.environ else ""


def environment():
    return CLEARED if fault() == "cleared" else os.environ


def work(number=0):
    """Take 4 MB, or more for a grown job or the largest rank, and print the peak as a program does."""
    if "CLEARED" in os.environ:
        exec(LOADS_TORCH, {})
        return
    import torch

    tensor = torch.ones((GROWN + (fault() == "grown") + number) << 20, device=DEVICE)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else tensor.nbytes
    print(f"PEAK {peak}\\n", end="", flush=True)
    if fault() in ("killed", "hangs"):
        announce()
        os.kill(os.getpid(), signal.SIGKILL if fault() == "killed" else signal.SIGSTOP)
    if fault() in ("serves", "leaks"):
        serve()


def announce(port=0):
    """Tell the test this process's pid and port."""
    new = pathlib.Path(f"{os.environ['FAULT']}-new-{os.getpid()}")
    new.write_text(str(port))
    new.rename(f"{os.environ['FAULT']}-of-{os.getpid()}")


def serve():
    """Answer each line of a test. A request takes 1 MB, and a leaking server keeps 64 kB."""
    import torch

    kept = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        announce(server.getsockname()[1])
        connection, _ = server.accept()
        with connection, connection.makefile("rwb", buffering=0) as lines:
            for line in lines:
                used = torch.ones(1 << 18, device=DEVICE)
                if fault() == "leaks":
                    kept.append(torch.ones(1 << 14, device=DEVICE))
                del used
                lines.write(line)


def python(*words, **more):
    subprocess.run([sys.executable, *words], check=True, **{"env": environment(), **more})


def by_multiprocessing(method):
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=work, args=(number,)) for number in range(COUNT)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def by_executor():
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        executor.submit(work).result()


def by_torch():
    import torch.multiprocessing

    torch.multiprocessing.spawn(work, nprocs=COUNT)


def by_fork():
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    os.waitpid(pid, 0)


def by_fork_after_import():
    import torch

    by_fork()


def by_forks(both=False, import_first=True):
    """A fork of a fork, as of a daemon. All three use CUDA, or only the last."""
    if import_first:
        import torch

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            work(2)
            os.write(writing, b"x")
            os._exit(0)
        if both:
            work(1)
            os.wait()
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)
    if both:
        os.wait()
        work()


def by_pool_that_restarts(method):
    with multiprocessing.get_context(method).Pool(1, maxtasksperchild=1) as pool:
        for number in range(3):
            pool.apply(work, (number,))
        pool.close()
        pool.join()


def by_pool():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply_async(work)
        while not (result.ready() or DONE.wait(0.05)):
            pass  # a pool waits for the result of a killed worker, too


async def by_asyncio():
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "script", env=environment())
    await process.wait()


WAYS = {
    "script": work,
    "child": lambda: python(__file__, "script"),
    "grandchild": lambda: python(__file__, "child"),
    "shell": lambda: subprocess.run(f"{sys.executable} {__file__} script", shell=True, check=True, env=environment()),
    "module": lambda: python("-m", "job", "script"),
    "code": lambda: python("-c", "import job; job.work()"),
    "thread of a pool": lambda: concurrent.futures.ThreadPoolExecutor().submit(python, __file__, "script").result(),
    "posix_spawn": lambda: os.waitpid(os.posix_spawn(sys.executable, [sys.executable, __file__, "script"], environment()), 0),
    "exec": lambda: os.execve(sys.executable, [sys.executable, __file__, "script"], environment()),
    "os.fork": by_fork,
    "fork": lambda: by_multiprocessing("fork"),
    "spawn": lambda: by_multiprocessing("spawn"),
    "forkserver": lambda: by_multiprocessing("forkserver"),
    "executor": by_executor,
    "torch.multiprocessing": by_torch,
    "torchrun": lambda: python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={COUNT}", __file__, "script"),
    "accelerate": lambda: python("-m", "accelerate.commands.launch", "--num_processes=1", __file__, "script"),
    "cleared": lambda: python("-c", LOADS_TORCH, env={"PATH": os.environ["PATH"]}),
    "isolated": lambda: python("-I", "-c", LOADS_TORCH),
    "own session": lambda: python("-c", LOADS_TORCH, env={"PATH": os.environ["PATH"]}, start_new_session=True),
    "killed": lambda: subprocess.run(
        [sys.executable, "-c", "import job, os, time; job.work(); time.sleep(1); os.kill(os.getpid(), 9)"]
    ),
    "killed at once": lambda: subprocess.run(
        [sys.executable, "-c", "import job, os, torch; torch.cuda.init() if job.DEVICE == 'cuda' else torch.ones(1); os.kill(os.getpid(), 9)"]
    ),
    "left": lambda: subprocess.Popen([sys.executable, "-c", "import job, time; job.work(); time.sleep(30)"]) and work(),
    "terminated": lambda: subprocess.run([sys.executable, "-c", "import job, os; job.work(); os.kill(os.getpid(), 15)"]),
    "pool": by_pool,
    "asyncio": lambda: asyncio.run(by_asyncio()),
    "exec after CUDA": lambda: subprocess.run(
        [sys.executable, "-c", "import job, os, sys; job.work(); os.execv(sys.executable, [sys.executable, '-c', '1'])"]
    ),
    "failed exec": lambda: subprocess.run([sys.executable, "-c", FAILS_TO_EXEC]),
    "exit function": lambda: python("-c", "import atexit, job, torch; atexit.register(job.work)"),
    "one after the other": lambda: [python(__file__, "script") for _ in range(2)],
    "fork after import": by_fork_after_import,
    "fork of a fork": by_forks,
    "forks that all use CUDA": lambda: by_forks(both=True),
    "fork of a fork without torch": lambda: by_forks(both=True, import_first=False),
    "pool of forks that restarts": lambda: by_pool_that_restarts("fork"),
    "forkserver pool that restarts": lambda: by_pool_that_restarts("forkserver"),
    "hanging": lambda: python("-c", "import job, time; job.work(); time.sleep(600)"),
}


def left(code, ending="", *options, **more):
    """Start a process that a test leaves running, or that ends by itself, and return it once it has come that far."""
    print_ready = "; print('ready', flush=True)"
    command = [sys.executable, *options, "-c", f"{code}{print_ready}{ending}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)
    while process.stdout.readline() not in ("ready\\n", ""):
        pass
    return process


WORKED = "import job; job.work()"
MAPPED = "\\n".join(LOADS_TORCH.strip().splitlines()[:-1]) + "\\nimport time"
LEFT = {
    "ended": lambda: left(WORKED),
    "hanging": lambda: left(WORKED, "; import re; re.match('(a+)+$', 'a' * 60 + 'b')"),
    "cleared": lambda: left(MAPPED, "; time.sleep(600)", env={"PATH": os.environ["PATH"]}),
    "isolated": lambda: left(MAPPED, "; time.sleep(600)", "-I"),
    "of another release": lambda: left(f"import pytest_gpumem; pytest_gpumem.__version__ = '9.9'; {WORKED}"),
    "of another release, running": lambda: left(
        f"import pytest_gpumem; pytest_gpumem.__version__ = '9.9'; {WORKED}", "; import time; time.sleep(600)"
    ),
}
if __name__ == "__main__":
    WAYS[sys.argv[1]]()
'''
"""The file `job.py`. Its argument is a way to start processes, which take 4 MB each and print their peaks."""

SERVER = """
import http.server
import os
import threading
import time

import torch

GROWN, LEAK, LAZY = (int(os.environ.get(name, "0")) for name in ("GROWN", "LEAK", "LAZY"))
DEVICE = os.environ.get("DEVICE", "cuda")
KEPT, PEAKS = [], []
ONE_AT_A_TIME = threading.Lock()


def weights():
    if not KEPT:
        KEPT.append(torch.ones(3 << 18, device=DEVICE))


def note_peak(*used):
    # On a GPU, the program's own peak is torch's.
    PEAKS.append(sum(tensor.nbytes for tensor in (*KEPT, *used)))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        with ONE_AT_A_TIME:
            self.answer()

    def answer(self):
        weights()
        word, answer, used = self.path.strip("/"), "", None
        if word == "reset":
            PEAKS.clear()
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
        elif word == "peak":
            answer = str(torch.cuda.memory_stats()["requested_bytes.all.peak"] if DEVICE == "cuda" else max(PEAKS))
        else:
            used = torch.ones((int(word) + GROWN) * 250_001, device=DEVICE)
            note_peak(used)
            if LEAK:
                KEPT.append(used[: 1 << 14].clone())
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())
        self.wfile.flush()
        time.sleep(0.005)  # the tensors are freed after the response
        del used

    def log_message(self, *_):
        pass


if not LAZY:
    weights()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""The file `server.py`. It prints its port. A request for a number takes memory, and ``/peak`` is its own peak since ``/reset``."""
