"""Changes that a session makes for processes that a test starts, on the CPU, and processes that cannot be counted there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from pytest_gpumem.measuring.jobs.windows import ProcessWindows
from pytest_gpumem.plugin.runtest.child_processes import SessionProcesses
from tests.conftest import figures_of
from tests.support.cpu_sessions import CpuSessions

STATE = """
import os
import subprocess
import sys


def state():
    return dict(os.environ), list(sys.path), subprocess.Popen.__init__


def ours():
    return {name for name in os.environ if name.startswith("GPUMEM_USAGE")}
"""
CONFTEST = """
import state

BEFORE = []


def without_current_test(state):
    environment, *others = state
    return [{name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}, *others]


def pytest_sessionstart(session):
    BEFORE.append(without_current_test(state.state()))
    session.config.add_cleanup(lambda: print("as before:", without_current_test(state.state()) == BEFORE[0]))
"""


@pytest.fixture
def states(project):
    (project.path / "state.py").write_text(STATE, encoding="utf-8")
    (project.path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    return project


def test_a_session_that_measures_nothing_leaves_the_environment_alone(states):
    states.write("import state\n\n\ndef test_it():\n    assert state.ours() == set()\n")
    result = states.run(separate=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["as before: True"])


@pytest.mark.parametrize("outcome", ["torch.ones(5)", "raise KeyboardInterrupt", "assert 0"])
def test_the_environment_is_as_before_after_a_session_that_measures(states, outcome):
    states.write(f"""
import state


@pytest.mark.gpumem
def test_measured():
    assert state.ours() == {{"GPUMEM_USAGE", "GPUMEM_USAGE_LIVE", "GPUMEM_USAGE_COUNTER", "GPUMEM_USAGE_LIBRARY"}}
    kept = torch.ones(5)
    {outcome}
""")
    result = states.run(separate=True)
    result.stdout.fnmatch_lines(["as before: True"])
    result.assert_outcomes(passed=outcome == "torch.ones(5)", failed=outcome == "assert 0")


def test_a_variable_that_a_test_changed_stays_changed(states):
    states.write("""
import os
import state


@pytest.mark.gpumem
def test_measured():
    kept = torch.ones(5)
    os.environ["PYTHONPATH"] += os.pathsep + "/mine"
    os.environ["GPUMEM_USAGE"] = "/other"
""")
    (states.path / "conftest.py").write_text(
        "import os\n\n\ndef pytest_configure(config):\n"
        "    config.add_cleanup(lambda: print('left:', os.environ['PYTHONPATH'], os.environ.get('GPUMEM_USAGE')))\n",
        encoding="utf-8",
    )
    result = states.run(separate=True)
    result.assert_outcomes(passed=1)
    (line,) = [line for line in result.outlines if line.startswith("left:")]
    assert line.endswith("/mine /other")


def test_without_a_compiler_a_child_with_torch_is_noted_as_not_counted(project, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "/no/cc")
    project.write("""
import subprocess
import sys


@pytest.mark.gpumem
@pytest.mark.parametrize("code", ["import torch", "import json"])
def test_it(code):
    kept = torch.ones(5)
    subprocess.run([sys.executable, "-c", code], check=True)
""")
    project.run("--junitxml=report.xml", separate=True).assert_outcomes(passed=2)
    notes = {name: verdict["unmeasured_processes"] for name, verdict in project.verdicts().items()}
    assert notes["test_it[import json]"] == []
    (note,) = notes["test_it[import torch]"]
    assert note.startswith("not counted: `")
    assert note.endswith(
        "-c 'import torch'` loads torch, and the C compiler /no/cc cannot be run: No such file or directory; install /no/cc, "
        "or set CC to another compiler"
    )


LACKING = """
import ctypes

real = ctypes.CDLL


def without_counts(path, *arguments, **keywords):
    library = real(path, *arguments, **keywords)
    if "allocation_counter" in str(path):
        library.counter_read = lambda figures: None
    return library


ctypes.CDLL = without_counts
import torch
"""


def test_a_child_whose_allocator_is_not_counted_is_noted_and_fails_no_test(project):
    (project.path / "child.py").write_text(LACKING, encoding="utf-8")
    project.write("""
import subprocess
import sys


@pytest.mark.gpumem
def test_it():
    kept = torch.ones(5)
    subprocess.run([sys.executable, "child.py"], check=True)


def test_job(gpumem):
    gpumem.launch([sys.executable, "child.py"])
""")
    result = project.run("--junitxml=report.xml", "-rs", separate=True)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*gpumem.launch: *child.py` loads torch, and torch * cannot be counted*"])
    (note,) = project.verdicts()["test_it"]["unmeasured_processes"]
    assert note.endswith("allocates memory on the CPU by functions that cannot be counted")


@pytest.mark.parametrize("code", ["import torch", "import torch; torch.cuda.is_available(); torch.empty(0)"])
def test_a_child_that_loads_torch_and_allocates_nothing_is_not_measured(project, code):
    project.write(f"""
import subprocess
import sys


@pytest.mark.gpumem
def test_it():
    kept = torch.ones(5)
    subprocess.run([sys.executable, "-c", {code!r}], check=True)
    killed = subprocess.Popen([sys.executable, "-c", {code!r} + "; print('ready', flush=True); input()"], stdout=-1, stdin=-1)
    killed.stdout.readline()
    killed.kill()
    killed.wait()
""")
    figures = project.figures("--junitxml=report.xml", separate=True)
    assert {key.partition(".")[0] for key in figures["test_it"]} == {"call"}
    assert project.verdicts()["test_it"]["verdicts"][0]["measurement"]["notes"] == []


def test_a_worker_of_a_data_loader_is_not_measured(project):
    project.write("""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(1000) * index


@pytest.mark.gpumem
def test_it():
    for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2):
        kept = batch + 1
""")
    figures = project.figures(separate=True)
    assert {key.partition(".")[0] for key in figures["test_it"]} == {"call"}


def test_a_worker_of_a_data_loader_that_imports_tensors_is_not_measured(project):
    (project.path / "data.py").write_text(
        """
import torch

ALL = torch.arange(8000)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return ALL[index] * torch.ones(1000)
""",
        encoding="utf-8",
    )
    project.write("""
from data import Data


@pytest.mark.gpumem(max_memory="1 GB")
def test_it():
    loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    for batch in loader:
        kept = batch + 1
""")
    figures = project.figures("--junitxml=report.xml", separate=True)
    assert {key.partition(".")[0] for key in figures["test_it"]} == {"call"}
    assert project.verdicts()["test_it"]["unmeasured_processes"] == []


EARLY = """
import subprocess
import sys

CODE = "import torch; kept = torch.ones(5); print('ready', flush=True); input()"
STARTED = []


def start(name):
    process = subprocess.Popen([sys.executable, "-c", CODE, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\\n"
    STARTED.append(process)


start("import")


def pytest_sessionstart(session):
    start("session")


def pytest_unconfigure(config):
    for process in STARTED:
        process.communicate(b"end")
"""


def test_processes_from_before_the_collection_are_named_as_not_seen(project):
    (project.path / "conftest.py").write_text(EARLY, encoding="utf-8")
    project.write("""
@pytest.mark.gpumem
def test_it():
    kept = torch.ones(5)
""")
    project.run("--junitxml=report.xml", separate=True).assert_outcomes(passed=1)
    notes = project.verdicts()["test_it"]["unmeasured_processes"]
    for name, note in zip(("import", "session"), sorted(notes), strict=True):
        assert note.startswith("not seen: `")
        assert note.endswith(
            f" {name}` loads torch or CUDA, and does not report its memory, because it, or the process that started it, began "
            "before the tests were collected (start it in a fixture)"
        )
    assert project.run("--gpumem-strict", separate=True).ret == 1


@pytest.mark.parametrize(
    "leave",
    [
        "os._exit(status=3)",
        "os.execve(sys.executable, [sys.executable, '-c', 'raise SystemExit(3)'], env=dict(os.environ))",
    ],
)
def test_a_process_that_ends_by_named_arguments_ends_as_it_would_alone(project, leave):
    code = f"import os, sys, torch; kept = torch.ones(1000); {leave}"
    project.write(f"""
import subprocess
import sys


@pytest.mark.gpumem
def test_it():
    assert subprocess.run([sys.executable, "-c", {code!r}]).returncode == 3
""")
    assert project.figures(separate=True)["test_it"]["call: python -c.peak_allocated"] == 4000


def test_a_test_that_clears_its_environment_still_has_its_servers_figures(project):
    project.write("""
import os
import subprocess
import sys

CODE = "import torch\\nwhile line := input(): torch.ones(int(line)); print('done', flush=True)"


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.communicate(b"\\n")


@pytest.mark.gpumem
def test_it(server, monkeypatch):
    # The environment is still cleared when the call is judged.
    for name in set(os.environ) - {"PYTEST_CURRENT_TEST"}:
        monkeypatch.delenv(name)
    server.stdin.write(b"1000\\n")
    server.stdin.flush()
    assert server.stdout.readline() == b"done\\n"
""")
    assert project.figures(separate=True)["test_it"]["call: python -c.peak_allocated"] == 4000


GROWING = """
import os
import subprocess
import sys


@pytest.mark.gpumem
def test_it():
    for count in os.environ["COUNTS"].split():
        subprocess.run([sys.executable, "-c", f"import torch; torch.ones({count}000)"], check=True)
"""


def test_a_grown_process_is_accepted_from_a_report_and_a_new_process_is_told(project, monkeypatch):
    project.write(GROWING)

    def run(counts, *options):
        monkeypatch.setenv("COUNTS", counts)
        return project.run("--gpumem-report=report.json", "--gpumem-explain=never", *options, separate=True)

    assert run("1000", "--gpumem-update=new").ret == 0
    grown = run("2000", "--gpumem-baseline")
    assert grown.ret == 1
    grown.stdout.fnmatch_lines(["*In call: python -c: Memory regressed: peak 8.00 MB, baseline 4.00 MB*"])
    accepted = project.gpumem("accept", "report.json", "--reason=larger")
    assert accepted.returncode == 0, accepted.stderr
    assert run("2000", "--gpumem-baseline").ret == 0
    further = run("2000 1000", "--gpumem-baseline")
    further.stdout.fnmatch_lines(["*test_it (call: python -c 2) *4.00 MB *new"])


TWO_SESSIONS = """
import os
import subprocess
import sys

import pytest

OWN, OTHER = os.environ["OWN"], os.environ["OTHER"]


@pytest.mark.gpumem
def test_it():
    subprocess.run([sys.executable, "child.py", OWN, OTHER], check=True)
"""
BESIDE_ANOTHER = """
import pathlib
import sys
import time

import torch

kept = torch.ones(int(sys.argv[1]))
pathlib.Path("allocated").touch()
deadline = time.monotonic() + 100
while not pathlib.Path(sys.argv[2], "allocated").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""


def test_two_sessions_at_once_have_their_own_processes_only(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "test_it.py").write_text(TWO_SESSIONS, encoding="utf-8")
        (folder / "child.py").write_text(BESIDE_ANOTHER, encoding="utf-8")

    def run(number):
        folder, other = folders[number], folders[1 - number]
        done = CpuSessions(folder).pytest("--junitxml=report.xml", new=True, OWN=1000 * (number + 1), OTHER=other)
        assert done.returncode == 0, done.stdout
        return figures_of(folder / "report.xml")["test_it"]

    with ThreadPoolExecutor(2) as threads:
        figures = list(threads.map(run, range(2)))
    for number, of_test in enumerate(figures):
        peak = 4000 * (number + 1)
        assert of_test["call: child.py.peak_allocated"] == of_test["call: all processes.peak_allocated"] == peak
        assert not any("child.py 2" in name for name in of_test)


def test_forks_of_the_tests_process_count_their_own_allocations(project):
    project.write("""
import os

shared = torch.ones(5000)


@pytest.mark.gpumem
def test_it():
    for number in (1, 2):
        pid = os.fork()
        if pid == 0:
            own = [torch.ones(1000) for _ in range(number)]
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
""")
    figures = project.figures(separate=True)["test_it"]
    peaks = {name: figures[f"call: {name}.peak_allocated"] for name in ("fork", "fork 2", "all processes")}
    assert peaks == {"fork": 4000, "fork 2": 8000, "all processes": 8000}


def test_processes_with_any_name_have_baselines(project):
    project.write("""
import multiprocessing


def work():
    torch.ones(1000)


@pytest.mark.gpumem
def test_it():
    for name in ("worker rank 0 of 2", "worker \\udce9", "w" * 300):
        child = multiprocessing.get_context("fork").Process(target=work, name=name)
        child.start()
        child.join()
        assert child.exitcode == 0
""")
    names = ("worker rank 0/2", r"worker \udce9", "w" * 100 + "...")
    for option in ("--gpumem-update=new", "--gpumem-baseline"):
        figures = project.figures(option, separate=True)["test_it"]
        assert [figures[f"call: {name}.peak_allocated"] for name in names] == [4000] * 3


STEP = """
def test_step(gpumem):
    kept = []
    gpumem.measure(lambda: kept.append(torch.ones(1000)), items=4)
    gpumem.train_step(lambda: torch.nn.Linear(8, 8), torch.ones(4, 8), loss=lambda output, _: output.sum())
    with gpumem.loop() as training:
        while not training.step_ended():
            torch.ones(1000)
    gpumem.load(lambda: torch.ones(1000))
    gpumem.assert_no_growth(lambda: torch.ones(1000), steps=4)
"""


def test_steps_have_equal_figures_whether_or_not_the_session_looks_for_processes(project, monkeypatch):
    asked = []
    monkeypatch.setattr(ProcessWindows, "_answers", lambda *arguments: asked.append(arguments) or {})
    project.write(STEP)
    figures = []
    for option in ("--gpumem-processes", "--no-gpumem-processes"):
        project.run(option, "--junitxml=report.xml", "--no-gpumem-time").assert_outcomes(passed=1)
        figures.append(figures_of(project.path / "report.xml"))
    assert figures[0] == figures[1]
    assert asked == [], "no process is there"


SERVER_ALONE = """
from pytest_gpumem.emulating.emulated_process.usage import DeviceUsage, ProcessIdentity, ProcessUsage
from pytest_gpumem.measuring.jobs.figures import OwnPeak, job_figures
from pytest_gpumem.plugin.runtest.child_processes import SessionProcesses

SERVER = ProcessUsage(
    1, None, (DeviceUsage(0, 9000, 9000, 0, 9000, 50, 50, 1),), process=ProcessIdentity(5, 5, ("python", "serve.py")), window=1
)


def end_step(self, device, own, earlier):
    return job_figures([SERVER], own={0: OwnPeak("cpu", own["cpu"].own_peak)}, earlier=earlier)


SessionProcesses.end_step = end_step
"""


def test_a_step_that_uses_only_a_servers_memory_has_its_figures_and_the_steps_times(project, monkeypatch):
    monkeypatch.setattr(SessionProcesses, "end_step", SessionProcesses.end_step)
    project.write(SERVER_ALONE, "conftest.py")
    project.write("""
def test_it(gpumem):
    measurement = gpumem.measure(list, items=4)
    assert (measurement.name, measurement.peak_allocated, measurement.growth) == ("measure: all processes", 9000, 0)
    assert measurement.throughput == 4 / measurement.step_time
    both = gpumem.measure(lambda: torch.ones(1000), items=4)
    assert (both.name, both.peak_allocated, "throughput" in both.metrics) == ("measure-2", 4000, True)
""")
    project.run("--gpumem-time", "--junitxml=report.xml", timed=True).assert_outcomes(passed=1)
    measured = {
        part["measurement"]["name"]: part["measurement"]["metrics"]
        for part in project.verdicts()["test_it"]["verdicts"]
    }
    assert measured["measure-2: all processes"] == {"peak_allocated": 13000, "growth": 0}
    assert measured["measure: serve.py"] == {"peak_allocated": 9000, "growth": 0, "retained": 0}
    assert {name for name, metrics in measured.items() if "step_time" in metrics} == {
        "measure: all processes",
        "measure-2",
    }
