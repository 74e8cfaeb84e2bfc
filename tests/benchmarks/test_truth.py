"""The table of truth: its cases, what a case reads, and the file that nothing is lost from. On the CPU, with small models."""

from __future__ import annotations

import gc
import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import truth
from counters import CudaCounters, DeviceCounters
from truth_cases import Case, cases, figures_of, peaks_of, result_of
from truth_file import TruthFile
from truth_models import Subject, subjects

from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.steps.config import StepConfig
from pytest_gpumem.steps.prepared import MeasuringContext
from pytest_gpumem.steps.reading import Phase
from tests.benchmarks.host_as_cuda import TIMES, HostAsCuda
from tests.measuring import measure_train_step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_gpumem.devices.cpu import CpuDevice

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: most of the models are its"
)

FULL_PARAMETERS = {
    "gpt2-small": 124_439_808,
    "llama-125m": 134_105_856,
    "bert-base": 109_514_298,
    "vit-b-16": 86_567_656,
    "t5-small": 60_506_624,
    "resnet-50": 25_557_032,
}
COUNTERS = ["active", "allocated", "requested", "reserved"]
MIB = 2**20


def case_named(name: str) -> Case:
    (found,) = (case for case in cases("small") if case.name == name)
    return found


@pytest.fixture
def cuda(device: CpuDevice) -> Iterator[tuple[CudaDevice, HostAsCuda]]:
    """A cuda device that has the host's memory, and what it asks."""
    runtime = HostAsCuda(device)
    device = CudaDevice(runtime)
    device.open()
    yield device, runtime
    device.close()


# The cases


def test_every_case_has_a_name_of_its_own_and_a_config_that_can_be_read_back() -> None:
    full, small = cases("full"), cases("small")
    names = [case.name for case in full]
    assert len(set(names)) == len(names) == 6 * 4 * 3 * 3
    assert names == [case.name for case in small]
    assert all(StepConfig.parse(str(case.config)) == case.config for case in full)
    assert {case.config.precision for case in full} == {"fp32", "amp-bf16", "amp-fp16", "bf16"}
    assert {case.config.checkpoint for case in full} == {"none", "blocks", "ops"}
    assert {case.config.optimizer for case in full} == {"sgd", "adamw-foreach", "adamw-fused"}


def test_cases_are_chosen_by_parts_of_their_names() -> None:
    assert len(cases("full", ["gpt2"])) == 36
    assert len(cases("full", ["gpt2", "resnet"])) == 72
    assert [case.name for case in cases("full", ["bert*/bf16-ckpt-ops*fused"])] == [
        "bert-base/bf16-ckpt-ops-adamw-fused"
    ]
    assert cases("full", ["gpt5"]) == []


@pytest.mark.parametrize("model", FULL_PARAMETERS)
def test_the_full_models_have_the_published_number_of_parameters(model: str) -> None:
    with torch.device("meta"):
        built = subjects("full")[model].build()
        batch = subjects("full")[model].batch()
    assert sum(parameter.numel() for parameter in built.parameters()) == FULL_PARAMETERS[model]
    assert {tensor.device.type for tensor in batch.values()} == {"meta"}


def test_the_full_batches_are_those_of_the_table() -> None:
    with torch.device("meta"):
        shapes = {
            name: [list(tensor.shape) for tensor in subject.batch().values()]
            for name, subject in subjects("full").items()
        }
    assert shapes == {
        "gpt2-small": [[8, 1024], [8, 1024]],
        "llama-125m": [[8, 1024], [8, 1024]],
        "bert-base": [[16, 512], [16, 512]],
        "vit-b-16": [[64, 3, 224, 224], [64]],
        "t5-small": [[16, 512], [16, 128]],
        "resnet-50": [[64, 3, 224, 224], [64]],
    }


# What a case reads


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[] if name in ("gpt2-small", "vit-b-16") else pytest.mark.thorough)
        for name in FULL_PARAMETERS
    ],
)
def test_every_model_is_measured_in_its_small_form(model: str, device: CpuDevice) -> None:
    plain = result_of(case_named(f"{model}/amp-bf16-adamw-fused"), device, DeviceCounters(device))
    blocks = result_of(case_named(f"{model}/amp-bf16-ckpt-blocks-adamw-fused"), device, DeviceCounters(device))
    for result in (plain, blocks):
        assert result["settled"]
        assert set(result["peaks"]) == {"rest", "forward", "backward", "optimizer"}
        assert result["step_time"] > 0
    assert blocks["peaks"]["forward"]["allocated"] < plain["peaks"]["forward"]["allocated"]
    assert blocks["peaks"]["rest"] == plain["peaks"]["rest"]


@pytest.mark.thorough
@pytest.mark.parametrize("config", ["fp32-ckpt-ops-adamw-foreach", "amp-fp16-sgd", "bf16-ckpt-ops-adamw-fused"])
def test_the_other_precisions_and_forms_are_measured_too(config: str, device: CpuDevice) -> None:
    result = result_of(case_named(f"gpt2-small/{config}"), device, DeviceCounters(device))
    assert result["settled"]
    assert result["peaks"]["backward"]["allocated"] > result["peaks"]["rest"]["allocated"] > 0


def test_between_steps_there_are_parameters_optimizer_state_and_batch(device: CpuDevice) -> None:
    result = figures_of(case_named("vit-b-16/fp32-adamw-fused"), device, DeviceCounters(device))
    model, batch = subjects("small")["vit-b-16"].build(), subjects("small")["vit-b-16"].batch()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    counts = 4 * len(list(model.parameters()))
    assert result["peaks"]["rest"] == {
        "allocated": 3 * weights + counts + sum(tensor.nbytes for tensor in batch.values())
    }


@pytest.mark.thorough
def test_a_case_repeats_to_the_byte_whatever_ran_before(device: CpuDevice) -> None:
    name = "resnet-50/amp-bf16-ckpt-ops-sgd"
    first = result_of(case_named(name), device, DeviceCounters(device))
    result_of(case_named("vit-b-16/fp32-adamw-foreach"), device, DeviceCounters(device))
    second = result_of(case_named(name), device, DeviceCounters(device))
    assert first["peaks"] == second["peaks"]


def test_on_cuda_four_counters_are_read_at_every_border_of_a_phase(cuda: tuple[CudaDevice, HostAsCuda]) -> None:
    device, runtime = cuda
    case = case_named("vit-b-16/fp32-ckpt-blocks-adamw-foreach")
    result = result_of(case, device, CudaCounters(runtime))
    assert "failed" not in result
    for reading in result["peaks"].values():
        assert sorted(reading) == COUNTERS
        assert reading == {name: times * reading["requested"] for name, times in TIMES.items()}
    bench = MeasuringContext(device, time_budget=None)
    measured = measure_train_step(bench, case.subject.build, case.subject.batch, config=case.config).metrics()
    for phase in ("forward", "backward", "optimizer"):
        assert result["peaks"][phase]["requested"] == measured[f"peak_{phase}"]


class ScriptedRuntime:
    """Statistics of a CUDA allocator as a phase sets them."""

    def __init__(self) -> None:
        self.now = dict.fromkeys(COUNTERS, 0)
        self.peak = dict(self.now)

    def use(self, **sizes: int) -> None:
        self.now |= sizes
        self.peak = {name: max(self.peak[name], size) for name, size in self.now.items()}

    def statistics(self) -> dict[str, int]:
        currents = {f"{name}_bytes.all.current": size for name, size in self.now.items()}
        return currents | {f"{name}_bytes.all.peak": size for name, size in self.peak.items()}

    def reset_peaks(self) -> None:
        self.peak = dict(self.now)


def test_a_phases_peaks_begin_at_what_is_held_when_it_begins() -> None:
    runtime = ScriptedRuntime()
    runtime.use(allocated=900, active=900, requested=900, reserved=900)
    runtime.use(allocated=512, active=512, requested=500, reserved=2 * MIB)

    def forward() -> None:
        runtime.use(allocated=2048, active=3072, requested=2000)
        runtime.use(allocated=1024, active=1024, requested=1000)

    def backward() -> None:
        runtime.use(allocated=1536, active=1536, requested=1500, reserved=4 * MIB)
        runtime.use(allocated=512, active=512, requested=500)

    def optimizer() -> None:
        return

    phases = [Phase("forward", forward), Phase("backward", backward), Phase("optimizer", optimizer)]
    assert peaks_of(phases, CudaCounters(runtime)) == {  # type: ignore[arg-type]
        "forward": {"allocated": 2048, "active": 3072, "requested": 2000, "reserved": 2 * MIB},
        "backward": {"allocated": 1536, "active": 1536, "requested": 1500, "reserved": 4 * MIB},
        "optimizer": {"allocated": 512, "active": 512, "requested": 500, "reserved": 4 * MIB},
    }


def test_phases_of_one_name_are_one_phase() -> None:
    runtime = ScriptedRuntime()
    phases = [Phase("forward", lambda size=size: runtime.use(requested=size)) for size in (300, 500, 400)]
    peaks = peaks_of(phases, CudaCounters(runtime))  # type: ignore[arg-type]
    assert peaks["forward"]["requested"] == 500


# What cannot run


def failing(error: Exception | type[BaseException]) -> Case:
    def build() -> torch.nn.Module:
        raise error

    return Case("broken", Subject(build, dict), StepConfig.parse("fp32,optimizer=sgd"))


@pytest.mark.parametrize(
    ("error", "key", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has 3.00 GiB free. More."),
            "cannot_run",
            "CUDA out of memory. Tried to allocate 12.00 GiB.",
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.\nMore"
            ),
            "cannot_run",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.",
        ),
        (RuntimeError("no kernel\nfor this"), "failed", "RuntimeError: no kernel"),
    ],
    ids=["gpu-memory", "host-memory", "failure"],
)
def test_a_case_that_cannot_run_says_why(device: CpuDevice, error: Exception, key: str, reason: str) -> None:
    result = result_of(failing(error), device, DeviceCounters(device))
    assert result == {"model": "broken", "config": "fp32,optimizer=sgd", key: reason}


def test_what_a_device_lacks_is_recorded_and_no_failure(device: CpuDevice) -> None:
    case = Case("gpt2-small", subjects("small")["gpt2-small"], StepConfig.parse("tf32"))
    result = result_of(case, device, DeviceCounters(device))
    assert "TF32 is a format of NVIDIA GPUs" in result["cannot_run"]


def test_nothing_stays_frozen_in_the_collector(device: CpuDevice) -> None:
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # the suite's own objects
    try:
        result_of(failing(RuntimeError("no")), device, DeviceCounters(device))
        assert gc.get_freeze_count() == 0
    finally:
        if frozen:
            gc.freeze()


# The command and its file

SGD = "resnet-50/fp32-sgd"
TWO = ("--only", "resnet-50/fp32-sgd", "--only", "resnet-50/bf16-sgd")


def run(out: Path, *arguments: str) -> int:
    return truth.main(["--device", "cpu", "--size", "small", "--out", str(out), *arguments])


def read(out: Path) -> dict[str, Any]:
    (path,) = out.glob("cpu-*/truth-small.json")
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def test_the_command_writes_figures_with_their_environment_and_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *TWO) == 0
    document = read(tmp_path)
    assert sorted(document["cases"]) == ["resnet-50/bf16-sgd", "resnet-50/fp32-sgd"]
    assert document["environment"].keys() >= {"device", "torch", "transformers", "python"}
    assert document["cases"][SGD]["config"] == "fp32,optimizer=sgd"
    told = capsys.readouterr().out
    assert "[2/2] resnet-50/bf16-sgd:" in told
    assert "case" in told
    assert "truth-small.json" in told


@pytest.mark.thorough
def test_a_second_run_does_what_is_missing_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--only", SGD)
    before = read(tmp_path)["cases"][SGD]
    capsys.readouterr()
    assert run(tmp_path, "--resume", *TWO) == 0
    assert "1 cases on CPU" in capsys.readouterr().out
    assert read(tmp_path)["cases"][SGD] == before
    assert len(read(tmp_path)["cases"]) == 2
    assert run(tmp_path, "--again", "--only", SGD) == 0
    assert "[1/1]" in capsys.readouterr().out
    assert read(tmp_path)["cases"][SGD]["peaks"] == before["peaks"]


def made_up(monkeypatch: pytest.MonkeyPatch, results: dict[str, dict[str, Any] | type[BaseException]]) -> list[str]:
    """Give the cases these results in place of running them. The names of the cases that were asked for."""
    asked: list[str] = []

    def result(case: Case, *_: object) -> dict[str, Any]:
        asked.append(case.name)
        given = results[case.name]
        if isinstance(given, dict):
            return given
        raise given

    monkeypatch.setattr(truth, "result_of", result)
    return asked


FIGURES: dict[str, Any] = {
    "peaks": {phase: {"allocated": 10**6} for phase in ("rest", "forward", "backward", "optimizer")},
    "step_time": 0.5,
}


def test_ctrl_c_loses_nothing_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, {SGD: FIGURES, "resnet-50/bf16-sgd": KeyboardInterrupt})
    assert run(tmp_path, *TWO) == truth.INTERRUPTED
    assert list(read(tmp_path)["cases"]) == [SGD]
    asked = made_up(monkeypatch, {"resnet-50/bf16-sgd": FIGURES})
    assert run(tmp_path, *TWO) == 0
    assert asked == ["resnet-50/bf16-sgd"]


def test_a_failure_is_told_and_tried_again_but_what_cannot_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, {SGD: {"failed": "RuntimeError: no"}, "resnet-50/bf16-sgd": {"cannot_run": "out of memory"}})
    assert run(tmp_path, *TWO) == 1
    told = capsys.readouterr().out
    assert f"{SGD} failed: RuntimeError: no" in told
    assert "resnet-50/bf16-sgd cannot run: out of memory" in told
    asked = made_up(monkeypatch, {SGD: FIGURES})
    assert run(tmp_path, *TWO) == 0
    assert asked == [SGD]


def test_a_device_that_is_not_there_and_a_pattern_without_cases_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--only", "gpt5") == 2
    assert "no case has gpt5 in its name" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert truth.main(["--device", "cuda", "--out", str(tmp_path)]) == 2
        assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_names_of_the_cases_are_listed_without_running_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert truth.main(["--list", "--only", "t5*bf16-ckpt-ops"]) == 0
    assert capsys.readouterr().out.split() == [
        f"t5-small/{precision}-ckpt-ops-{optimizer}"
        for precision in ("amp-bf16", "bf16")
        for optimizer in ("sgd", "adamw-foreach", "adamw-fused")
    ]


def test_the_same_figures_give_the_same_file_of_a_few_lines_a_case(tmp_path: Path) -> None:
    texts = []
    for order in (["b", "a"], ["a", "b"]):
        file = TruthFile(tmp_path / order[0] / "truth.json", {"torch": "2.13", "device": "Some GPU"})
        for name in order:
            file.put(name, {"step_time": 0.5, "peaks": {"forward": {"reserved": 2, "active": 1}}, "notes": []})
        texts.append(file.path.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    assert texts[0].splitlines()[:9] == [
        "{",
        '  "cases": {',
        '    "a": {',
        '      "notes": [],',
        '      "peaks": {',
        '        "forward": {"active": 1, "reserved": 2}',
        "      },",
        '      "step_time": 0.5',
        "    },",
    ]


def test_a_file_of_another_environment_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "truth.json"
    for version in ("2.11", "2.12", "2.13"):
        file = TruthFile(path, {"torch": version})
        assert not file.cases
        file.put("a", {"step_time": 1})
        file.put("b", {"step_time": 2})
    versions = {
        one.name: (json.loads(one.read_text())["environment"]["torch"], len(json.loads(one.read_text())["cases"]))
        for one in tmp_path.iterdir()
    }
    assert versions == {
        "truth.before-1.json": ("2.11", 2),
        "truth.before-2.json": ("2.12", 2),
        "truth.json": ("2.13", 2),
    }


def test_a_result_that_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = TruthFile(tmp_path / "truth.json", {})
    file.put("a", {"step_time": 1})
    before = file.path.read_text(encoding="utf-8")
    with pytest.raises(TypeError):
        file.put("b", {"step_time": object()})
    assert file.path.read_text(encoding="utf-8") == before


def test_a_file_that_is_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "truth.json"
    for text in ("", "[]", '{"tests": {}}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="is no table of truth"):
            TruthFile(path, {})
        assert path.read_text(encoding="utf-8") == text
