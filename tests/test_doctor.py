"""``gpumem doctor``: findings of made-up machines, and the command on this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.facts.measurement import Environment
from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.facts.values.plain import from_plain
from pytest_gpumem.reporting.reports.layout import Screen
from pytest_gpumem.tools.doctor import collecting
from pytest_gpumem.tools.doctor.facts import DeviceFacts, Facts, StoredFacts, StoreFacts, TorchFacts
from pytest_gpumem.tools.doctor.findings import exit_status, findings
from pytest_gpumem.tools.doctor.texts import lines, to_json
from pytest_gpumem.tools.main import main
from tests.git_store import Repository, entry

ROOT = Path(__file__).parents[1]
CPU = Environment(
    "cpu-x86_64", "CPU (x86_64)", {"torch": "2.15.0", "cpu_capability": "AVX512", "machine": "EPYC, 8 cores"}
)
H100 = Environment(
    "nvidia-h100", "NVIDIA H100", {"torch": "2.15.0", "cuda": "13.0", "driver": "580.1", "total_memory": 85 * 10**9}
)
EMULATED = Environment("emulated-h100-80gb", "NVIDIA H100 (emulated)", {"torch": "2.15.0", "emulated_cudnn": "none"})
QUIET = (
    Conditions(0, waited=0.0, stolen=0.0, other_cpu_seconds=0.0, cores=8),
    Conditions(0.5, waited=0.0, stolen=0.0, other_cpu_seconds=0.0, cores=8),
)
NO_CUDA = DeviceFacts("cuda", trouble="no CUDA device: torch 2.15.0 (CUDA 13.0) sees no GPU")
NO_EMULATION = DeviceFacts(
    "emulated:h100", trouble="no C compiler was found, which the emulated GPU needs: install one (apt-get install gcc)"
)
ON_CPU = DeviceFacts("cpu", CPU, pace=2000.0, conditions=QUIET, load_source="/proc")
ON_GPU = DeviceFacts("cuda", H100, pace=1.98e9, conditions=(Conditions(0), Conditions(0.5, clock_events=frozenset())))
FACTS = Facts(
    device="auto",
    releases={"Python": "3.12.3"},
    driver="unknown (NVML Shared Library Not Found)",
    torch=TorchFacts("2.15.0", "13.0"),
    torch_emulated=TorchFacts(),
    devices=(NO_CUDA, ON_CPU, NO_EMULATION),
    store=StoreFacts("gpumem-baselines", is_there=False),
)


def rows(facts: Facts, subject: str):
    return [one for one in findings(facts) if one.subject == subject]


def row(facts: Facts, subject: str):
    (found,) = rows(facts, subject)
    return found


def stored(environment: Environment, *metrics: str, has_times: bool = False) -> StoreFacts:
    return StoreFacts("gpumem-baselines", (StoredFacts(environment, 3, frozenset(metrics), has_times),))


# Each finding, of what is made up


@pytest.mark.parametrize(
    ("torch", "status", "fact", "mend"),
    [
        (TorchFacts("2.15.0", "13.0"), "ok", "torch 2.15.0 for CUDA 13.0", None),
        (
            TorchFacts("2.13.0+cpu"),
            "limited",
            "without CUDA",
            "pip install --force-reinstall torch==2.13.0 --index-url https://pypi.org/simple",
        ),
        (TorchFacts("2.6.0", "12.4"), "ok", "torch 2.6.0 for CUDA 12.4", None),
        (TorchFacts("2.5.1", "12.4"), "no", "too old: 2.6 or newer", "pip install 'torch>=2.6'"),
        (
            TorchFacts(trouble="ModuleNotFoundError: No module named 'torch'"),
            "no",
            "not installed",
            "pip install torch",
        ),
        (
            TorchFacts("2.15.0", trouble="OSError: libc10.so"),
            "no",
            "OSError: libc10.so",
            "--force-reinstall torch==2.15.0",
        ),
    ],
)
def test_a_torch_is_told_with_its_build_and_what_mends_it(torch, status, fact, mend):
    found = row(replace(FACTS, torch=torch), "torch")
    assert found.status == status
    assert fact in found.fact
    assert found.mend is None if mend is None else mend in found.mend


def test_a_torch_that_only_an_emulated_gpu_can_load_is_limited():
    facts = replace(
        FACTS,
        torch=TorchFacts("2.15.0", trouble="ImportError: libcudnn.so.9"),
        torch_emulated=TorchFacts("2.15.0", "13.0"),
    )
    found = row(facts, "torch")
    assert (found.status, "on an emulated GPU, torch can be imported" in found.fact) == ("limited", True)


@pytest.mark.parametrize(
    ("device", "devices", "status", "said"),
    [
        ("auto", (NO_CUDA, ON_CPU), 0, "measures on CPU (x86_64)"),
        ("auto", (ON_GPU, ON_CPU), 0, "measures on NVIDIA H100"),
        ("cpu", (NO_CUDA, ON_CPU), 0, "measures on CPU (x86_64)"),
        ("cuda", (NO_CUDA, ON_CPU), 1, "cannot be measured here"),
        ("emulated:h100", (NO_CUDA, ON_CPU, NO_EMULATION), 1, "cannot be measured here"),
        ("auto", (NO_CUDA, DeviceFacts("cpu", trouble="torch cannot be imported")), 1, "cannot be measured here"),
    ],
)
def test_the_exit_status_is_that_of_the_projects_own_device(device, devices, status, said):
    facts = replace(FACTS, device=device, devices=devices)
    assert exit_status(facts) == status
    found = row(facts, "project")
    assert (found.status, said in found.fact) == ("no" if status else "ok", True)
    assert status == 0 or found.mend


def test_a_gpu_that_is_not_seen_has_the_mend_of_its_cause():
    assert "emulated:h100" in row(FACTS, "cuda").mend
    with_driver = replace(FACTS, driver="470.1")
    assert "driver 470.1 is too old for CUDA 13.0" in row(with_driver, "cuda").mend
    assert row(replace(with_driver, torch=TorchFacts("2.15.0+cpu")), "cuda").mend.startswith(
        "pip install --force-reinstall torch==2.15.0 --index-url https://pypi.org/simple"
    )
    assert row(replace(FACTS, torch=TorchFacts(trouble="OSError")), "cuda").mend == "see the row of torch"


def test_what_an_emulated_gpu_lacks_stands_with_its_mend():
    found = row(FACTS, "emulated:h100")
    assert (found.status, found.mend) == ("no", "install one (apt-get install gcc)")
    lacking = "workspaces of convolutions count as 0 bytes, because no cuDNN is installed (pip install nvidia-cudnn-cu13==9.20.0.48)"
    there = replace(
        FACTS,
        devices=(ON_CPU, DeviceFacts("emulated:h100", EMULATED, tells_time=False, lacking=lacking)),
        compiling="torch.compile also needs Triton on an emulated GPU, and Triton is not installed: pip install --no-deps triton==3.6.0",
    )
    assert "no times" in row(there, "emulated:h100").fact
    assert row(there, "convolutions").mend == "pip install nvidia-cudnn-cu13==9.20.0.48"
    assert row(there, "torch.compile").mend == "pip install --no-deps triton==3.6.0"


def test_what_slows_a_gpu_and_who_works_on_it_is_told():
    hot = Conditions(0.5, clock_events=frozenset({"SwThermalSlowdown"}), sm_clock_default=1.98e9, other_processes=2)
    facts = replace(FACTS, devices=(replace(ON_GPU, conditions=(Conditions(0, other_processes=2), hot)), ON_CPU))
    assert row(facts, "clock of cuda").fact == "1,980 MHz of 1,980 MHz, limited by SwThermalSlowdown"
    found = row(facts, "load on cuda")
    assert found.status == "limited"
    assert "thermal slowdown by the driver" in found.fact
    assert "2 other processes" in found.fact
    assert row(facts, "load on cpu").status == "ok"


def test_clocks_that_cannot_be_read_are_told():
    silent = replace(ON_GPU, pace=None, conditions=(Conditions(0), Conditions(0.5)))
    no_proc = replace(ON_CPU, conditions=(Conditions(0), Conditions(0.5)))
    facts = replace(FACTS, devices=(silent, no_proc))
    assert row(facts, "clock of cuda").status == row(facts, "clock of cpu").status == "limited"
    assert "/proc/thread-self/schedstat" in row(facts, "clock of cpu").mend
    assert "pip install psutil" in row(facts, "clock of cpu").mend


@pytest.mark.parametrize(
    ("source", "waited", "said"),
    [
        ("/proc", 0.0, "; /proc reports the load on 8 cores and the wait for a core"),
        ("psutil", None, "; psutil reports the load on 8 cores and not the wait for a core, whose bound is the load"),
    ],
)
def test_the_source_of_the_load_is_told(source, waited, said):
    conditions = tuple(replace(reading, waited=waited) for reading in QUIET)
    facts = replace(FACTS, devices=(replace(ON_CPU, load_source=source, conditions=conditions),))
    found = row(facts, "clock of cpu")
    assert found.status == "ok"
    assert found.fact.endswith(said)


def test_baselines_of_another_torch_are_told_with_what_follows():
    earlier = Environment("cpu-x86_64", "CPU (x86_64)", {**CPU.details, "torch": "2.13.0"})
    found = row(replace(FACTS, store=stored(earlier, "peak_allocated", "operators")), "baselines of cpu-x86_64")
    assert found.status == "limited"
    assert found.fact == "3 baselines: torch was 2.13.0, now 2.15.0; a change of operators may be `uncertain`"
    assert found.mend.startswith(
        'pip install torch==2.13.0; or `pytest --gpumem-update=all --gpumem-reason="torch 2.15.0"`'
    )


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("2.12.0+cpu", "pip install torch==2.12.0+cpu --index-url https://download.pytorch.org/whl/cpu; or"),
        ("2.12.0+cu126", "pip install torch==2.12.0+cu126 --index-url https://download.pytorch.org/whl/cu126; or"),
        ("2.12.0+gitabc", "pip install torch==2.12.0; or"),
    ],
)
def test_the_torch_of_baselines_is_installed_in_its_build(release, command):
    earlier = Environment("cpu-x86_64", "CPU (x86_64)", {**CPU.details, "torch": release})
    facts = replace(FACTS, store=stored(earlier, "operators"))
    assert row(facts, "baselines of cpu-x86_64").mend.startswith(command)


def test_a_store_behind_a_url_that_cannot_be_read_has_no_history_in_git():
    store = StoreFacts(
        "s3://bucket/b", trouble="s3://bucket/b: cannot be read: there are no credentials: set AWS_PROFILE"
    )
    mend = row(replace(FACTS, store=store), "store").mend
    assert "git" not in mend
    assert "gpumem show --store s3://bucket/b" in mend


def test_what_moves_nothing_that_the_baselines_hold_is_well():
    earlier = Environment("cpu-x86_64", "CPU (x86_64)", {**CPU.details, "torch": "2.13.0", "machine": "Xeon, 2 cores"})
    assert row(replace(FACTS, store=stored(earlier, "peak_allocated")), "baselines of cpu-x86_64").status == "ok"
    timed = stored(earlier, "peak_allocated", "step_time", has_times=True)
    assert "times are not compared" in row(replace(FACTS, store=timed), "baselines of cpu-x86_64").fact


def test_other_instruction_sets_and_cudnn_are_told_with_the_way_back():
    lower = Environment("cpu-x86_64", "CPU (x86_64)", {**CPU.details, "cpu_capability": "AVX2"})
    found = row(replace(FACTS, store=stored(lower, "peak_allocated")), "baselines of cpu-x86_64")
    assert found.mend.startswith("set ATEN_CPU_CAPABILITY=avx2; or")
    higher = replace(FACTS, devices=(NO_CUDA, replace(ON_CPU, environment=lower)), store=stored(CPU, "peak_allocated"))
    assert "ATEN_CPU_CAPABILITY" not in row(higher, "baselines of cpu-x86_64").mend
    planned = Environment(
        "emulated-h100-80gb", "NVIDIA H100 (emulated)", {**EMULATED.details, "emulated_cudnn": "9.20.0"}
    )
    emulated = replace(FACTS, devices=(ON_CPU, DeviceFacts("emulated:h100", EMULATED, tells_time=False)))
    found = row(replace(emulated, store=stored(planned, "peak_allocated")), "baselines of emulated-h100-80gb")
    assert found.mend.startswith("install cuDNN 9.20.0; or")


def test_the_store_is_told_by_device_and_which_of_them_are_here():
    assert row(FACTS, "store").mend == "pytest --gpumem-update=new"
    facts = replace(FACTS, store=stored(H100, "peak_allocated"))
    found = row(facts, "store")
    assert (found.status, "no baseline from cpu-x86_64" in found.fact) == ("limited", True)
    assert row(facts, "baselines of nvidia-h100").status == "no"
    assert row(replace(FACTS, store=StoreFacts("s", trouble="s/a.toml: not TOML")), "store").status == "no"


def test_every_row_that_is_not_well_has_a_mend_and_fits_one_line():
    found = findings(FACTS)
    assert [one for one in found if one.status != "ok" and not one.mend] == []
    shown = ["".join(span.text for span in line) for line in lines(found, Screen())]
    assert [line for line in shown if "\n" in line] == []
    assert sum(line.lstrip().startswith("fix: ") for line in shown) == sum(one.mend is not None for one in found)


def test_json_has_the_facts_as_they_were():
    report = json.loads(to_json(FACTS, findings(FACTS)))
    assert report["format"] == 1
    assert report["exit_status"] == 0
    assert from_plain(Facts, report["facts"]) == FACTS


# The command


@pytest.fixture
def seen_once(monkeypatch):
    """What a process sees is made up: each would import torch."""

    def probe(words, environment):
        return collecting.ProbeResult(FACTS.torch, (NO_CUDA, ON_CPU) if "cpu" in words else (NO_EMULATION,))

    monkeypatch.setattr(collecting, "probe", probe)


def doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_the_command_tells_of_the_projects_store_and_device(seen_once, tmp_path, monkeypatch):
    repository = Repository(tmp_path / "project")
    repository.store(
        {"test_a": entry(device=replace(CPU, details={**CPU.details, "torch": "2.13.0"}), metrics={"operators": 7})},
        slug="cpu-x86_64",
    )
    (repository.path / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "auto"\n')
    monkeypatch.chdir(repository.path)
    done = doctor()
    assert done.exit_code == 0, done.output
    assert re.search(
        r"^limited +baselines of cpu-x86_64 +1 baseline: torch was 2\.13\.0, now 2\.15\.0", done.output, re.MULTILINE
    )
    report = json.loads(doctor("--format", "json").output)
    assert {one["status"] for one in report["findings"]} == {"ok", "limited", "no"}
    (repository.path / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "cuda"\n')
    assert doctor().exit_code == 1
    (repository.path / "gpumem-baselines/cpu-x86_64/a.py.toml").write_text("<<<<<<< HEAD\n")
    done = doctor()
    assert done.exit_code == 1
    assert re.search(r"^no +store +.*a\.py\.toml", done.output, re.MULTILINE)


def test_settings_of_a_nested_project_that_pytest_does_not_read_are_named(seen_once, tmp_path, monkeypatch):
    nested = tmp_path / "pkg"
    nested.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (nested / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "cpu"\n')
    monkeypatch.chdir(nested)
    output = doctor().output
    assert f"{nested / 'pyproject.toml'} has [tool.gpumem], which is not read" in output
    (nested / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "cpu"\n[tool.pytest.ini_options]\n')
    assert "which is not read" not in doctor().output


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('device = "gpu"', "did you mean 'cuda'?"),
        ('device = "emulated:h999"', "no GPU that can be emulated"),
        ("devise = 1", "unknown key 'devise'"),
        ("device = ", "not TOML"),
    ],
)
def test_wrong_settings_end_with_2(seen_once, tmp_path, monkeypatch, settings, said):
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n[tool.gpumem]\n{settings}\n")
    monkeypatch.chdir(tmp_path)
    done = doctor()
    assert done.exit_code == 2
    assert said in done.output or "pyproject.toml" in done.output


def test_a_pytest_that_does_not_load_the_plugin_ends_with_2(seen_once, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-p no:gpumem"\n')
    monkeypatch.chdir(tmp_path)
    done = doctor()
    assert done.exit_code == 2
    assert "pytest does not load pytest-gpumem here" in done.output
    assert "-p pytest_gpumem.plugin" in done.output


def test_a_device_that_a_conftest_adds_is_looked_at(seen_once, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "tpu"\n')
    (tmp_path / "conftest.py").write_text(
        "from pytest_gpumem import DeviceUnavailable\n\n\ndef make():\n"
        "    raise DeviceUnavailable('its firmware is asleep')\n\n\n"
        "def pytest_gpumem_devices(config):\n    return {'tpu': make}\n"
    )
    monkeypatch.chdir(tmp_path)
    done = doctor("--conftest")
    assert done.exit_code == 1
    assert re.search(r"^no +tpu +its firmware is asleep", done.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "device = 'cuda' by default"),
        ({"pyproject.toml": "[tool.gpumem]\n"}, "device = 'cuda' by default"),
        ({"pyproject.toml": '[tool.gpumem]\ndevice = "cuda"\n'}, "device = 'cuda' in its settings"),
        ({"pytest.ini": "[pytest]\naddopts = --gpumem-device=cpu\n"}, "device = 'cpu' in its settings"),
        ({"pyproject.toml": '[tool.gpumen]\ndevice = "cpu"\n'}, "device = 'cuda' by default"),
    ],
)
def test_a_device_that_no_setting_names_is_told_as_the_default(seen_once, tmp_path, monkeypatch, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    output = doctor().output
    assert re.search(rf"^\w+ +project +{re.escape(said)} ", output, re.MULTILINE)
    is_mistyped = "gpumen" in "".join(files.values())
    row = r"^limited +settings +\[tool\.gpumen\] in pyproject\.toml has no effect\n +fix: did you mean \[tool\.gpumem\]\?$"
    assert (re.search(row, output, re.MULTILINE) is not None) == is_mistyped


def test_this_machine_is_told_and_nothing_is_written(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "cpu"\n')
    done = _command(tmp_path, {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ok +cpu +CPU \(\S+\): bytes, counts and times$", done.stdout, re.MULTILINE)
    assert re.search(r"^\w+ +torch +torch \d", done.stdout, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libtorch_cpu.so: undefined symbol')\n")
    (tmp_path / "pyproject.toml").write_text('[tool.gpumem]\ndevice = "cpu"\n')
    done = _command(tmp_path, {"PYTHONPATH": os.pathsep.join([str(broken.parent), str(ROOT)])})
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(r"^no +torch +.*OSError: libtorch_cpu\.so: undefined symbol", done.stdout, re.MULTILINE)
    assert re.search(r"^no +cpu ", done.stdout, re.MULTILINE)


def test_a_torch_that_ends_its_process_is_a_finding(tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import os\nos.abort()\n")
    paths = os.pathsep.join([str(broken.parent), str(ROOT)])
    seen = collecting.probe(["cuda", "cpu"], {**os.environ, "PYTHONPATH": paths})
    assert "ended with status -6" in str(seen.torch.trouble)
    assert [one.word for one in seen.devices] == ["cuda", "cpu"]


def _command(folder, variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "pytest_gpumem.tools.main", "doctor"],
        cwd=folder,
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
