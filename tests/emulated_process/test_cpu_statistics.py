"""Count torch's allocations on the CPU in another process: each byte that PyTorch's profiler reports, and those of all threads."""

from __future__ import annotations

import platform
import re
import sys
from types import SimpleNamespace

import pytest

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.base.variables import CACHE, COMPILER
from pytest_gpumem.emulating.emulated_process.counter_library import counter_library
from pytest_gpumem.emulating.emulated_process.cpu_statistics import CpuStatistics
from pytest_gpumem.torch_support.private_api.tensor_creation import creation_functions

LIBRARY = counter_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
BEGIN = f"""
import os
import threading

import torch

from pytest_gpumem.emulating.emulated_process.cpu_statistics import CpuStatistics

older = [torch.ones(1000) for _ in range(10)]
counting = CpuStatistics({str(LIBRARY)!r})
begun = []
counting.when_it_begins(lambda: begun.append(os.getpid()))


def figures():
    statistics = counting.statistics(0)
    nbytes = statistics["requested_bytes"]["all"]
    return nbytes["current"], nbytes["peak"], statistics["allocation"]["all"]["allocated"]

"""


@pytest.fixture
def run(words_of):
    """Run code in a process that counts, and return the words that it prints."""
    return lambda code: words_of(BEGIN + code)


def test_the_live_bytes_and_the_peak_are_those_of_the_profiler(run):
    printed = run("""
from torch.autograd.profiler import profile
from pytest_gpumem.torch_support.private_api.profiler import allocation_events

def train():
    model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        images = torch.nn.functional.conv2d(torch.randn(2, 3, 32, 32), torch.randn(8, 3, 3, 3, requires_grad=True))
        loss = model(torch.randn(8, 20, 32)).square().mean() + images.sort().values.sum() + torch.eye(9).matrix_exp().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, torch.randperm(1000).tolist()[:3], torch.tensor([1, 2, 3])

with profile(use_kineto=True, profile_memory=True) as profiler:
    kept = train()
live, peak = 0, 0
for event in allocation_events(profiler):
    live += event.nbytes
    peak = max(peak, live)
count = sum(event.nbytes > 0 for event in allocation_events(profiler))
print(*figures(), live, peak, count)
""")
    assert printed[:3] == printed[3:]
    assert int(printed[1]) > 100_000


def test_blocks_of_all_threads_count_and_older_blocks_do_not(run):
    printed = run("""
def work():
    for _ in range(500):
        torch.ones(1000)
    kept.append(torch.ones(100))

kept = []
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
older.clear()
for thread in threads:
    thread.join()
live, peak, allocations = figures()
print(live, 4000 <= peak <= 8 * 4400, allocations)
torch.autograd.grad(sum((x.requires_grad_() * 2).sum() for x in kept), kept)
kept.clear()
print(figures()[0])
""")
    assert printed == ["3200", "True", "4008", "0"]


def test_a_fork_counts_its_own_blocks_from_its_first_one(run):
    printed = run("""
kept = torch.ones(1000)
stop = threading.Event()
busy = [threading.Thread(target=lambda: [torch.ones(10) for _ in iter(stop.is_set, True)]) for _ in range(4)]
for thread in busy:
    thread.start()
for number in range(50):
    pid = os.fork()
    if pid == 0:
        begun.clear()
        idle = figures()
        del kept, older
        own = torch.ones(500)
        is_right = (idle, figures(), begun) == ((0, 0, 0), (2000, 2000, 1), [os.getpid()])
        os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for thread in busy:
    thread.join()
print(figures()[0], begun == [os.getpid()])
""")
    assert printed == ["4000", "True"]


def test_a_second_counter_in_a_process_counts_nothing_twice(run):
    printed = run(f"""
second = CpuStatistics({str(LIBRARY)!r})
second.when_it_begins(lambda: begun.append("second"))
kept = torch.ones(1000)
pid = os.fork()
if pid == 0:
    own = torch.ones(10)
    os._exit(0 if begun == ["second"] * 2 and figures()[2] == 1 else 1)
print(*figures(), os.waitpid(pid, 0)[1], *begun)
""")
    assert printed == ["4000", "4000", "1", "0", "second"]


def test_a_new_peak_begins_at_the_live_bytes(run):
    printed = run("""
kept = torch.ones(10)
torch.ones(1000)
before = figures()
counting.reset(0)
print(*before, *figures())
""")
    assert printed == ["40", "4040", "2", "40", "40", "2"]


def test_each_free_is_counted(run):
    printed = run("""
before = counting.frees()[0]
kept = [torch.ones(10) for _ in range(5)]
during = counting.frees()[0]
del kept[:2]
print(during - before, counting.frees()[0] - during)
""")
    assert printed == ["0", "2"]


def test_the_table_keeps_each_block_among_many(run):
    printed = run("""
import random
random.seed(0)
blocks, expected = {}, 0
for number in range(60_000):
    if blocks and random.random() < 0.45:
        key = random.choice(tuple(blocks)[:50])
        expected -= blocks.pop(key).nbytes()
    else:
        blocks[number] = torch.UntypedStorage(random.randrange(1, 200))
        expected += blocks[number].nbytes()
    if number % 1000 == 0:
        assert figures()[0] == expected, number
blocks.clear()
print(figures()[0])
""")
    assert printed == ["0"]


def test_the_history_has_each_block_with_frames_and_note(run):
    printed = run("""
from pytest_gpumem.torch_support.private_api.native_frames import operator_in

def make():
    return torch.ones(500)

counting.start_history()
first = make()
counting.note_on_allocations("gpumem 1")
second = make()
del first
(entries,), (alive,) = (part if isinstance(part, list) else part.values() for part in counting.history())
for entry in entries:
    python = [frame["name"] for frame in entry["frames"] if frame["line"]]
    is_ones = any(operator_in(frame["name"]) == "aten::ones" for frame in entry["frames"])
    is_allocation = entry["action"] == "alloc"
    note = entry["user_metadata"] if is_allocation else None
    print(entry["action"], entry["size"], python[:2] == ["make", "<module>"], is_ones, note)
print(alive[second.data_ptr()])
counting.stop_history()
make()
print(len(counting.history()[0][0]) == len(entries))
counting.delete_history()
print(counting.history()[0][0])
""")
    assert " ".join(printed) == (
        "alloc 2000 True True alloc 2000 True True gpumem 1 free_completed 2000 False False None 2000 True []"
    )


@pytest.mark.skipif(creation_functions() is None, reason="torch's functions are known on x86-64")
def test_the_history_has_the_dtype_and_shape_of_each_new_tensor(run):
    printed = run("""
make = {
    "freed": lambda: [torch.ones(3, 5).exp().T @ torch.ones(3, 2)] and None,
    "by dtype": lambda: torch.zeros((), dtype=torch.float64).to(torch.bool),
    "strided": lambda: torch.empty_strided((3, 4), (1, 3), dtype=torch.int16),
    "out of memory": lambda: torch.empty(1 << 50),
    "without tensor": lambda: torch.UntypedStorage(60),
    "resized": lambda: torch.empty(0).resize_(8),
}
for name, function in make.items():
    counting.start_history()
    try:
        function()
    except RuntimeError:
        pass
    (entries,), _ = counting.history()
    tensors = [entry["tensor"] for entry in entries if entry["action"] == "alloc"]
    print(name, *(tensor and f"{tensor.dtype}{list(tensor.shape)}={tensor.nbytes}" for tensor in tensors), sep="|")
print(torch.ones(2).tolist())
""")
    assert " ".join(printed) == (
        "freed|float32[3, 5]=60|float32[3, 5]=60|float32[3, 2]=24|float32[5, 2]=40 by dtype|float64[]=8|bool[]=1 "
        "strided|int16[3, 4]=24 out of memory without tensor|None resized|None [1.0, 1.0]"
    )


@pytest.mark.parametrize("is_swapped", [False, True])
def test_tensors_that_a_test_does_not_see_correctly_are_left_out(run, is_swapped):
    printed = run(f"""
from pytest_gpumem.emulating.emulated_process import counter_history

if {is_swapped}:  # as if torch passed the sizes in another order
    new_tensor = counter_history.new_tensor
    counter_history.new_tensor = lambda dtype, shape: new_tensor(dtype, shape[::-1])
with torch.overrides.TorchFunctionMode() as mode:
    mode.__class__ = type("Mode", (type(mode),), {{"__torch_function__": lambda *_: print("seen")}})
    counting.start_history()
tensor = torch.ones(3, 5)
print([entry["tensor"] is None for entry in counting.history()[0][0]])
""")
    assert printed == [f"[{is_swapped}]"]


def test_a_process_that_changes_its_title_keeps_its_lines(run):
    """vLLM's and Ray's processes do so. The C library names functions of the program by this title."""
    printed = run("""
import ctypes

from pytest_gpumem.emulating.emulated_process.stacks import stack_of

with open("/proc/self/stat") as file:
    start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
ctypes.memmove(start, b"ray::Model".ljust(end - start, b"\\0"), end - start)
counting.start_history()
kept = torch.ones(3)
counting.stop_history()
[[entry]], _ = counting.history()
stack = stack_of(entry["frames"])
print(stack.python[0][2], "_start" in stack.native)
""")
    assert printed == ["<module>", "True"]


def test_a_recording_that_the_first_allocation_begins_has_its_block(run):
    printed = run("""
counting.when_it_begins(counting.start_history)
first, second = torch.ones(10), torch.ones(20)
(entries,), _ = counting.history()
print(*(entry["size"] for entry in entries), all(entry["frames"] for entry in entries))
""")
    assert printed == ["40", "80", "True"]


NODES = """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

class Twice(Double):
    pass

def add(x):
    return x + torch.ones(3)

def creations(entries):
    return {entry["node"]: entry for entry in entries if entry["action"] == "created node"}

def function_of(entry):
    names = [frame["name"] for frame in entry["frames"] if frame["line"]]
    return next(name for name in names if name in ("add", "<module>"))
"""


def test_an_allocation_in_backward_has_its_node_and_the_node_its_stack_in_forward(run):
    printed = run(
        NODES
        + """
x = torch.ones(3, requires_grad=True)
counting.start_history()
counting.note_on_allocations("gpumem 7")
loss = Twice.apply(add(x)).exp()
counting.note_on_allocations("")
kept = []
x.register_hook(kept.append)  # so the gradient is copied
loss.sum().backward()
(entries,), _ = counting.history()
created = creations(entries)
for entry in entries:
    if entry["action"] == "alloc" and entry["node_name"]:
        creation = created.get(entry["node"])
        print(entry["node_name"], creation and function_of(creation), creation and creation["user_metadata"])
"""
    )
    rows = " ".join(printed)
    assert "ExpBackward0 <module> gpumem 7 TwiceBackward <module> gpumem 7" in rows
    assert "AccumulateGrad None None" in rows


def test_threads_with_equal_numbers_have_their_own_nodes(run):
    printed = run(
        NODES
        + """
def by_exp(x):
    return x.exp()

def by_sin(x):
    return x.sin()

def work(function):
    x = torch.ones(3, requires_grad=True)
    y = function(x)
    results.append((y.grad_fn._sequence_nr(), y))

counting.start_history()
results = []
for function in (by_exp, by_sin):
    thread = threading.Thread(target=work, args=(function,))
    thread.start()
    thread.join()
numbers, losses = zip(*results)
torch.autograd.backward(losses, [torch.ones(3)] * 2)
(entries,), _ = counting.history()
created = creations(entries)
pairs = {
    (entry["node_name"], frame["name"])
    for entry in entries
    if entry["action"] == "alloc" and entry["node"] in created
    for frame in created[entry["node"]]["frames"]
    if frame["name"].startswith("by_")
}
print(len(set(numbers)), sorted(pairs))
"""
    )
    assert " ".join(printed) == "1 [('ExpBackward0', 'by_exp'), ('SinBackward0', 'by_sin')]"


def test_a_recording_leaves_the_nodes_and_their_references_as_they_are(run):
    printed = run(
        NODES
        + """
import gc
import weakref

def train():
    x = torch.ones(1000, requires_grad=True)
    y = Twice.apply(x * 2)
    node = weakref.ref(y.grad_fn)
    y.sum().backward()
    number = y.grad_fn._sequence_nr()
    del y
    gc.collect()
    return number, node() is None, figures()[0]

first = train()
counting.start_history()
second = train()
counting.stop_history()
third = train()
print(second[0] - first[0] == third[0] - second[0], first[1:] == second[1:] == third[1:], first[1])
"""
    )
    assert printed == ["True", "True", "True"]


def test_a_recording_knows_whether_a_backward_pass_ran_at_its_start(run):
    printed = run(f"""
from pytest_gpumem.emulating.emulated_process.allocation_counter import AllocationCounter
from pytest_gpumem.emulating.emulated_process.counter_history import CounterHistory

history = CounterHistory(AllocationCounter({str(LIBRARY)!r}))
x = torch.ones(3, requires_grad=True)
x.register_hook(lambda _: history.start(1000))
x.sum().backward()
print(history.knows_passes)
history.start(1000)
print(history.knows_passes)
""")
    assert printed == ["False", "True"]


def test_an_exception_under_way_survives_the_recording(run):
    printed = run("""
class Allocates:
    def __del__(self):
        torch.ones(100)

def fails():
    allocates = Allocates()
    torch.ones(3) + torch.ones(4)

counting.start_history()
try:
    fails()
except RuntimeError as error:
    print("must", "match" in str(error))
""")
    assert printed == ["must", "True"]


def test_an_exception_from_a_signal_handler_reaches_the_program_while_it_is_recorded(run):
    printed = run("""
import signal

class Alarm(Exception):
    pass

def rings(*_):
    raise Alarm

signal.signal(signal.SIGALRM, rings)
counting.start_history()
heard = 0
for _ in range(20):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        while True:
            torch.ones(2)
    except Alarm:
        heard += 1
    counting.start_history()
print(heard)
""")
    assert printed == ["20"]


def test_a_thread_without_python_code_is_recorded_without_frames(run):
    printed = run("""
forked = torch.jit.CompilationUnit('''
def work(x):
    return x + 1

def forked(x):
    return torch.jit.wait(torch.jit.fork(work, x))
''').forked

x = torch.ones(1000)
counting.start_history()
kept = [forked(x) for _ in range(5)]
(entries,), _ = counting.history()
print(sum(entry["size"] == 4000 and entry["action"] == "alloc" for entry in entries))
""")
    assert printed == ["5"]


def test_equal_stacks_are_a_single_list(run):
    printed = run("""
counting.start_history()
kept = [torch.ones(10) for _ in range(50)]
(entries,), _ = counting.history()
print(len({id(entry["frames"]) for entry in entries if entry["action"] == "alloc"}))
""")
    assert printed == ["1"]


def test_threads_that_wait_for_each_other_do_not_hang_while_they_are_recorded(run):
    printed = run("""
counting.start_history()
weight = torch.ones(64, 64, requires_grad=True)

def work():
    for _ in range(100):
        (torch.ones(64, 64) @ weight).sum().backward()

threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
(entries,), (alive,) = (part if isinstance(part, list) else part.values() for part in counting.history())
print(all(entry["frames"] for entry in entries if entry["action"] == "alloc"), sum(alive.values()) == figures()[0])
""")
    assert printed == ["True", "True"]


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    with pytest.raises(MeasuringError, match=r"counter of allocations cannot be loaded: .*broken\.so"):
        CpuStatistics(str(tmp_path / "broken.so"))


@pytest.mark.parametrize("lost", ["is_found", "counts"])
def test_an_allocator_that_is_not_counted_is_found_by_a_test_allocation(run, lost):
    change = "counter_install = lambda *_: 0" if lost == "is_found" else "counter_read = lambda figures: None"
    printed = run(f"""
import ctypes
from pytest_gpumem.base.errors import MeasuringError

real = ctypes.CDLL
def changed(path):
    library = real(path)
    library.{change}
    return library
ctypes.CDLL = changed
try:
    CpuStatistics({str(LIBRARY)!r})
except MeasuringError as error:
    print(error)
""")
    assert " ".join(printed).endswith("allocates memory on the CPU by functions that cannot be counted")


@pytest.fixture
def compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    counter_library.cache_clear()
    yield counter_library
    counter_library.cache_clear()


def test_the_library_is_compiled_once(compiled_anew, monkeypatch):
    path = compiled_anew()
    assert path.exists()
    monkeypatch.setenv(COMPILER, "/no/compiler")
    compiled_anew.cache_clear()
    assert compiled_anew() == path


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/no/cc", "the C compiler /no/cc cannot be run: No such file or directory; install /no/cc, or set CC"),
        ("false", "the C compiler false failed on the counter of allocations"),
        ("", "no C compiler was found, and other processes need a compiler once to count .*: install one .* or set CC"),
    ],
)
def test_without_a_compiler_the_reason_says_what_to_install(compiled_anew, monkeypatch, compiler, reason):
    monkeypatch.setenv(COMPILER, compiler)
    if not compiler:
        monkeypatch.setenv("PATH", "")
    text = compiled_anew()
    assert isinstance(text, str)
    assert re.match(reason, text)


def test_on_other_systems_the_reason_names_them(compiled_anew, monkeypatch):
    module = sys.modules[counter_library.__module__]
    monkeypatch.setattr(module, "sys", SimpleNamespace(platform="darwin"))
    assert compiled_anew() == (
        "other processes count their allocations only on Linux on x86-64 and aarch64, and this is darwin on "
        + platform.machine()
    )
