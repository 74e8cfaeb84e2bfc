"""The table of truth: its cases, what a case reads, and the file that nothing is lost from. On the CPU, with small models."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
import truth
from truth import Case, CudaCounters, DeviceCounters, cases, peaks_of, result_of
from truth_models import Subject, subjects

from pytest_gpumem.measuring.measure.reading import Phase
from pytest_gpumem.measuring.step_config.config import StepConfig

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


def test_there_are_216_cases_of_models_with_the_published_number_of_parameters():
    names = [case.name for case in cases("full")]
    assert names == [case.name for case in cases("small")]
    assert len(set(names)) == len(names) == 6 * 4 * 3 * 3
    assert len(cases("full", ["gpt2", "resnet"])) == 72
    assert [case.name for case in cases("full", ["bert*/bf16-ckpt-ops*fused"])] == [
        "bert-base/bf16-ckpt-ops-adamw-fused"
    ]
    with torch.device("meta"):
        built = {name: subject.build() for name, subject in subjects("full").items()}
        assert all(subject.batch() for subject in subjects("full").values())
    assert {name: sum(one.numel() for one in model.parameters()) for name, model in built.items()} == FULL_PARAMETERS


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[] if name == "vit-b-16" else pytest.mark.thorough) for name in FULL_PARAMETERS],
)
def test_a_case_has_a_peak_for_each_phase_and_holds_model_state_and_batch_between(model, device):
    small = {case.name: case for case in cases("small")}
    plain = result_of(small[f"{model}/amp-bf16-adamw-fused"], device, DeviceCounters(device), 0.1)
    blocks = result_of(small[f"{model}/amp-bf16-ckpt-blocks-adamw-fused"], device, DeviceCounters(device), 0)
    assert plain["settled"]
    assert 0 < min(plain["step_times"]) <= plain["step_time"] <= max(plain["step_times"])
    assert plain.keys() - blocks.keys() == {"step_time", "step_times"}
    assert plain["peaks"].keys() == {"rest", "forward", "backward", "optimizer"}
    assert blocks["peaks"]["forward"]["allocated"] < plain["peaks"]["forward"]["allocated"]
    assert blocks["peaks"]["rest"] == plain["peaks"]["rest"]
    if model == "vit-b-16":
        parameters, batch = subjects("small")[model].build().parameters(), subjects("small")[model].batch()
        held = sum(3 * parameter.nbytes + 4 for parameter in parameters)
        assert plain["peaks"]["rest"]["allocated"] == held + sum(tensor.nbytes for tensor in batch.values())


class ScriptedRuntime:
    """Statistics of a CUDA allocator as a phase sets them."""

    def __init__(self):
        self.now = self.peak = {}

    def use(self, **sizes):
        self.now = self.now | sizes
        self.peak = {name: max(self.peak.get(name, 0), size) for name, size in self.now.items()}

    def statistics(self):
        currents = {f"{name}_bytes.all.current": size for name, size in self.now.items()}
        return currents | {f"{name}_bytes.all.peak": size for name, size in self.peak.items()}

    def reset_peaks(self):
        self.peak = self.now


def test_cuda_phase_peaks_start_at_held_bytes_and_equal_names_merge():
    runtime = ScriptedRuntime()
    runtime.use(allocated=900, active=900, requested=900, reserved=900)
    runtime.use(allocated=512, active=512, requested=500, reserved=2048)

    def uses(**sizes):
        def run():
            runtime.use(**sizes)
            runtime.use(allocated=512, active=512, requested=500)

        return run

    phases = [
        Phase("forward", uses(allocated=2048, active=3072, requested=2000)),
        Phase("forward", uses(allocated=1024, active=1024, requested=1000)),
        Phase("backward", uses(requested=1500, reserved=4096)),
        Phase("optimizer", uses()),
    ]
    assert peaks_of(phases, CudaCounters(runtime)) == {
        "forward": {"allocated": 2048, "active": 3072, "requested": 2000, "reserved": 2048},
        "backward": {"allocated": 512, "active": 512, "requested": 1500, "reserved": 4096},
        "optimizer": {"allocated": 512, "active": 512, "requested": 500, "reserved": 4096},
    }


@pytest.mark.parametrize(
    ("error", "key", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. GPU 0 has 3.00 GiB free."), "cannot_run", "CUDA out of memory."),
        (RuntimeError("can't allocate memory: 4 bytes.\nMore"), "cannot_run", "can't allocate memory: 4 bytes."),
        (RuntimeError("no kernel\nfor this"), "failed", "RuntimeError: no kernel"),
    ],
)
def test_a_case_that_cannot_run_says_why(device, error, key, reason):
    def build():
        raise error

    case = Case("broken", Subject(build, dict), StepConfig.parse("fp32,optimizer=sgd"))
    result = result_of(case, device, DeviceCounters(device), 0)
    assert result == {"model": "broken", "config": "fp32,optimizer=sgd", key: reason}


SGD, BF16 = "resnet-50/fp32-sgd", "resnet-50/bf16-sgd"
FIGURES = {
    "peaks": {phase: {"allocated": 10**6} for phase in ("rest", "forward", "backward", "optimizer")},
    "step_time": 0.5,
}


def test_an_interrupted_run_resumes_and_another_environment_starts_over(tmp_path, monkeypatch, capsys):
    asked, given = [], {}

    def result(case, *_):
        asked.append(case.name)
        if case.name not in given:
            raise KeyboardInterrupt
        return given[case.name]

    def run(*more):
        asked.clear()
        arguments = ["--device", "cpu", "--size", "small", "--out", str(tmp_path), "--only", SGD, "--only", BF16]
        return truth.main([*arguments, *more])

    def kept():
        return {path.name: json.loads(path.read_text()) for path in tmp_path.glob("cpu-*/*")}

    monkeypatch.setattr(truth, "result_of", result)
    given[SGD] = FIGURES
    assert run() == truth.INTERRUPTED
    assert list(kept()["truth-small.json"]["cases"]) == [SGD]
    given[BF16] = {"failed": "RuntimeError: no"}
    assert (run(), asked) == (1, [BF16])
    assert f"{BF16} failed: RuntimeError: no" in capsys.readouterr().out
    given[BF16] = {"cannot_run": "out of memory"}
    assert (run("--seconds", "0"), asked) == (0, [BF16])
    assert (run(), asked) == (0, [])
    assert f"{BF16} cannot run: out of memory" in capsys.readouterr().out
    before = kept()["truth-small.json"]
    assert before["environment"].keys() >= {"device", "torch", "transformers", "python"}
    monkeypatch.setattr(truth, "environment_of", lambda _: {"torch": "another"})
    assert (run(), asked) == (0, [SGD, BF16])
    assert kept()["truth-small.before-1.json"] == before
    assert kept()["truth-small.json"]["environment"] == {"torch": "another"}


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_seconds_that_are_none_are_refused(capsys, seconds):
    assert truth.main(["--device", "cpu", "--seconds", seconds]) == 2
    assert capsys.readouterr().err == f"--seconds {float(seconds)}: expected a number of seconds, 0 for no times\n"
