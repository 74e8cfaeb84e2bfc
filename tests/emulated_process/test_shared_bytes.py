"""The file in which processes publish the bytes of their tensors."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulating.emulated_process.counter_library import counter_library

LIBRARY = counter_library()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
BEGIN = f"""
import os
import sys
from pathlib import Path

import torch

from pytest_gpumem.emulating.emulated_process.cpu_statistics import CpuStatistics
from pytest_gpumem.emulating.emulated_process.shared_bytes import PublishedBytes, SharedBytes

LIBRARY = {str(LIBRARY)!r}
counting = CpuStatistics(LIBRARY)


def block(kib):
    return torch.empty(kib << 10, dtype=torch.uint8)


def publishing(folder=Path("shared"), started=1, index=0):
    published = PublishedBytes(LIBRARY, folder, is_cuda=False)
    published.begin(started, [index])
    return published


def highest(all_run=True):
    shared.remove_ended(lambda pid, started: all_run)
    return shared.restart().get(0, 0) >> 10


Path("shared").mkdir()
shared = SharedBytes(Path("shared"))
"""


@pytest.fixture
def run(words_of):
    """Run code in a process that counts, and return the words that it prints."""
    return lambda code: words_of(BEGIN + code)


def test_the_highest_sum_begins_again_at_the_current_sum(run):
    printed = run("""
kept = block(10)
published = publishing()
print(highest())
block(30)
print(highest(), highest())
del kept
print(highest(), highest())
published.end()
block(50)
print(highest())
""")
    assert printed == ["10", "40", "10", "10", "0", "0"]


def test_a_fork_has_no_bytes_until_it_publishes_its_own(run):
    printed = run("""
kept, more = block(10), []
publishing()
def in_fork(code):
    pid = os.fork()
    if pid == 0:
        code()
        os._exit(0)
    os.waitpid(pid, 0)
in_fork(lambda: block(100))
print(highest())
def publish():
    more.append(block(5))
    publishing(started=2)
    block(20)
in_fork(publish)
print(highest(), highest())
print(highest(all_run=False), highest())
""")
    assert printed == ["10", "35", "15", "15", "0"], "a killed fork's bytes leave the sum when its end is noticed"


def test_a_program_takes_the_place_of_the_process_that_runs_it(run, tmp_path):
    second = BEGIN[: BEGIN.index('Path("shared").mkdir()')]
    (tmp_path / "second.py").write_text(
        f"{second}kept = block(5)\npublishing(started=2, index=3)\nblock(20)\nos._exit(0)\n", encoding="utf-8"
    )
    printed = run("""
kept = block(10)
publishing()
if os.fork() == 0:
    kept_in_fork = block(7)
    publishing(started=2)
    os.execv(sys.executable, [sys.executable, "second.py"])
os.wait()
for _ in range(2):
    print(*(nbytes >> 10 for nbytes in shared.restart().values()))
""")
    assert printed == ["17", "25", "10", "5"]


def test_a_full_file_a_link_and_a_short_file_publish_nothing(run, tmp_path):
    printed = run("""
other = (1).to_bytes(8, "little") + bytes(64 * 8)
with open("shared/bytes", "r+b") as file:
    file.seek(2 * 64 * 8)
    file.write(512 * other)
print(publishing().live(0, 7, 0))
Path("link").symlink_to("shared")
print(publishing(Path("link")).live(0, 7, 0))
Path("linked").mkdir()
Path("linked/bytes").symlink_to(Path("shared/bytes").absolute())
print(publishing(Path("linked")).live(0, 7, 0))
Path("short").mkdir()
Path("short/bytes").write_bytes(b"0" * 100)
print(publishing(Path("short")).live(0, 7, 0))
print(publishing(Path("none")).live(0, 7, 0))
with open("shared/bytes", "r+b") as file:
    file.write(bytes(2 * 64 * 8 + 8))
print(publishing().live(0, 7, 0))
""")
    assert printed == ["None", "None", "None", "None", "None", "7"]


OWN = """
profiled = torch.autograd.profiler.profile(profile_memory=True)
shared.publish_own("cpu", [0])
"""


def test_the_own_process_publishes_the_allocations_that_a_profiler_records(run):
    printed = run(f"""{OWN}
print(shared.own(0), shared.own(1))
with profiled:
    kept = block(10)
    block(30)
    print(shared.own(0) >> 10, highest(), highest())
    with shared.own_paused(), shared.own_paused():
        block(70)
        more = block(1)
        print(shared.own(0) >> 10)
    print(shared.own(0) >> 10, highest())
block(50)
print(highest())
shared.publish_own("cpu", [3])
print(shared.restart(), shared.restart())
shared.publish_own("meta", [0])
print(shared.own(0), highest())
""")
    assert printed[:9] == ["0", "None", "10", "40", "10", "10", "11", "11", "11"]
    assert " ".join(printed[9:]) == "{0: 11264, 3: 11264} {3: 11264} None 0"


def test_a_measured_process_publishes_for_its_test_and_for_its_own_tests(run):
    printed = run(f"""{OWN}
Path("outer").mkdir()
outer = SharedBytes(Path("outer"))
published = publishing(Path("outer"))
with profiled:
    kept = block(10)
    more = block(20)
    del more
block(30)
print(highest(), outer.restart()[0] >> 10)
published.end()
print(highest(), outer.restart()[0] >> 10, *outer.restart())
""")
    assert printed == ["30", "40", "10", "10"]


def test_a_session_within_a_test_takes_the_own_process_out_of_the_file(run):
    printed = run(f"""{OWN}
Path("inner").mkdir()
inner = SharedBytes(Path("inner"))
with profiled:
    kept = block(10)
inner.publish_own("cpu", [0])
print(shared.own(0), inner.own(0) >> 10, highest(), highest())
inner.close()
shared.publish_own("cpu", [0])
print(shared.own(0) >> 10, highest())
""")
    assert printed == ["None", "10", "10", "0", "10", "10"]


def test_a_fork_does_not_publish_for_its_parent_and_a_closed_file_gets_no_bytes(run):
    printed = run(f"""{OWN}
with profiled:
    kept = block(10)
    with shared.own_paused():
        if os.fork() == 0:
            block(50)
            os._exit(shared.own(0) is not None)
        print(os.wait()[1])
    print(highest())
    shared.close()
    block(20)
print(shared.own(0), shared.restart())
""")
    assert printed == ["0", "10", "None", "{}"]
