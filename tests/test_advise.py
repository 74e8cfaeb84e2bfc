"""``gpumem advise``: from a function that builds a model to the config with which it fits, on the CPU."""

from __future__ import annotations

import json
import re
import sys
import warnings
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.errors import EmulationError
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.tools.advise import trial
from pytest_gpumem.tools.main import main
from tests import preloaded
from tests.models.architectures import NEEDS_TRANSFORMERS

preloaded.load_as_well("tests.with_transformers")
MODELS = """
import logging
import warnings

import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 128)
        self.down = torch.nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make():
    return Model(), torch.randn(512, 32), lambda output, batch: output.square().mean()


def make_without_loss():
    return Model(), torch.randn(512, 32)


def make_with_a_batch_of_samples():
    return Model(), torch.randn(512, 32), lambda output, batch: output.square()


def make_unlisted():
    model = Model()
    model.blocks.append(torch.nn.Identity())
    return model, torch.randn(512, 32), lambda output, batch: output.square().mean()


def make_one_that_cannot_be_cast():
    class Stubborn(Model):
        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("planted\\nand more")
            return super().forward(x)

    return Stubborn(), torch.randn(512, 32), lambda output, batch: output.square().mean()


def make_nonsense():
    return Model()


def make_with_warnings():
    class Slow(Model):
        def forward(self, x):
            logging.getLogger("a_library").warning("the fast path is not available")
            return super().forward(x)

    warnings.warn("made without weights")
    return Slow(), torch.randn(512, 32), lambda output, batch: output.square().mean()


def make_a_hungry_one():
    class Hungry(Model):
        def forward(self, x):
            if x.shape[0] == 512:
                raise torch.OutOfMemoryError("planted")
            return super().forward(x)

    return Hungry(), torch.randn(512, 32), lambda output, batch: output.square().mean()
"""


@pytest.fixture
def advise(tmp_path, monkeypatch):
    (tmp_path / "advised_models.py").write_text(MODELS, encoding="utf-8")
    few = "from functools import partial\n\nclass Animal: ...\n\ndef zoo(): ...\n"
    (tmp_path / "advised_few.py").write_text(few, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "advised_models", raising=False)
    monkeypatch.setattr(trial, "_SECONDS", 0.05)
    # To run what is recommended once more is for the test of that.
    monkeypatch.setattr("pytest_gpumem.tools.advise.command.explain_config", lambda *_, **__: "left out")
    yield lambda *args: CliRunner().invoke(main, ["advise", *args, "--device", "cpu"])
    for name in ("advised_models", "advised_few"):
        sys.modules.pop(name, None)


def configs_in(text: str) -> list[str]:
    """The configs in the order of the table's rows."""
    rows = text.split("config ", 1)[1].partition("\n\n")[0].splitlines()[1:]
    return [line.split()[0] for line in rows if line.startswith(("fp32", "amp", "bf16"))]


def test_the_first_config_that_fits_ends_the_search_and_comes_with_its_code(advise):
    result = advise("advised_models:make", "--fits", "2.5 MB")
    assert result.exit_code == 0, result.output
    last = "amp-bf16,checkpoint=blocks"
    assert configs_in(result.stdout) == ["fp32", "amp-bf16", "amp-bf16,checkpoint=ops", last]
    assert f"recommended: {last}: " in result.stdout
    assert "    optimizer = torch.optim.AdamW(model.parameters())" in result.stdout
    assert "[1] fp32 ... " in result.stderr


def test_where_everything_fits_one_config_is_enough(advise):
    result = advise("advised_models:make", "--fits", "1 GB")
    assert configs_in(result.stdout) == ["fp32"]
    assert "too low" not in result.stdout
    assert result.exit_code == 0


def test_warnings_of_the_model_and_of_its_runs_stand_below_the_table_once(advise):
    configs = ["--config", "fp32", "--config", "amp-bf16"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = advise("advised_models:make_with_warnings", "--fits", "1 GB", *configs)
    assert result.exit_code == 0, result.output
    below = result.stdout.partition("amp-bf16")[2]
    assert below.count("\nwarning: a_library: the fast path is not available\n") == 1
    assert below.count("\nwarning: UserWarning: made without weights\n") == 1


def test_peaks_that_lack_workspaces_of_convolutions_are_told(advise, monkeypatch):
    emulation = SimpleNamespace(cudnn=SimpleNamespace(lacking=lambda: "no cuDNN is installed"))
    monkeypatch.setattr("pytest_gpumem.tools.advise.command.current_emulation", lambda: emulation)
    told = advise("advised_models:make", "--fits", "1 GB").stdout
    assert "peaks may be too low: no cuDNN is installed\n" in told


def test_where_nothing_fits_the_smallest_is_named_and_the_exit_status_is_1(advise, monkeypatch):
    sizes = iter(range(9000, 2000, -100))
    monkeypatch.setattr(
        "pytest_gpumem.tools.advise.command.try_config", lambda _, __, config: trial.Trial(config, next(sizes), 1.0)
    )
    result = advise("advised_models:make", "--fits", "1 kB")
    assert result.exit_code == 1
    *_, last = configs_in(result.stdout)
    (told,) = [
        line for line in result.stdout.splitlines() if line.startswith("no config fits into 1.00 kB; the smallest is ")
    ]
    assert told.endswith(f" with {last}")


def test_running_out_of_memory_is_an_answer_and_not_the_end(advise):
    words = ("--config", "fp32", "--config", "fp32,accumulate=2")
    result = advise("advised_models:make_a_hungry_one", "--fits", "50 MB", *words)
    assert result.exit_code == 0, result.output
    assert "[1] fp32 ... out of memory" in result.stderr
    assert "recommended: fp32,accumulate=2: " in result.stdout


def test_an_error_of_a_later_config_does_not_throw_away_what_was_measured(advise):
    words = ("--config", "fp32", "--config", "amp-bf16")
    result = advise("advised_models:make_one_that_cannot_be_cast", "--fits", "50 MB", *words)
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if line.startswith("amp-bf16"))
    assert row.endswith("RuntimeError: planted")
    assert "recommended: fp32: " in result.stdout


def test_blocks_that_are_named_are_measured_and_stand_in_the_code(advise, monkeypatch):
    def try_config(device, subject, config):
        if config.checkpoint == "blocks":
            return trial.try_config(device, subject, config)
        return trial.Trial(config, 4_000_000 if config.precision == "fp32" else 3_000_000, 1.0)

    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", try_config)
    words = ("advised_models:make_unlisted", "--fits", "2.5 MB")
    unnamed = advise(*words)
    assert "amp-bf16,checkpoint=blocks ... the model has no repeated blocks" in unnamed.stderr
    assert "name them with --blocks PATTERN" in unnamed.stdout
    result = advise(*words, "--blocks", "blocks.?")
    assert result.exit_code == 0, result.output
    assert "recommended: amp-bf16,checkpoint=blocks,blocks=blocks.?: " in result.stdout
    assert "    for block in model.blocks:" in result.stdout
    # A config that is named is given them, too, or names them itself.
    given = advise(words[0], "--config", "fp32,checkpoint=blocks", "--blocks", "blocks.?")
    own = advise(words[0], "--config", "fp32,checkpoint=blocks,blocks=blocks.?")
    for named in (given, own):
        assert configs_in(named.stdout) == ["fp32,checkpoint=blocks,blocks=blocks.?"]
        assert "recommended: fp32,checkpoint=blocks,blocks=blocks.?: " in named.stdout
    assert "    for block in model.blocks:" in given.stdout
    assert 'config="fp32,checkpoint=blocks,blocks=blocks.?"' in own.stdout


def interrupted(monkeypatch, peaks):
    """Ctrl-C comes when there is no other answer in ``peaks``: bytes, or ``None`` for out of memory."""
    answers = iter(peaks)

    def answer(device, subject, config):
        for peak in answers:
            return trial.Trial(config, peak, 1.0) if peak else trial.Trial(config, why_not="out of memory")
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", answer)


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ([3000, None, 2000], "not finished: 2 configs measured, none of them fits\n"),
        ([3000], "not finished: 1 config measured, none of them fits\n"),
        ([None], "not finished: 0 configs measured\n"),
    ],
)
def test_an_interrupted_search_concludes_nothing_of_what_was_not_tried(advise, monkeypatch, peaks, said):
    interrupted(monkeypatch, peaks)
    result = advise("advised_models:make", "--fits", "1 kB")
    assert result.exit_code == 130
    assert result.stdout.endswith(said)
    assert len(configs_in(result.stdout)) == len(peaks)
    assert "nothing" not in result.stdout


def test_an_interrupted_search_without_a_row_has_no_table(advise, monkeypatch):
    interrupted(monkeypatch, [])
    result = advise("advised_models:make", "--fits", "1 kB")
    assert (result.exit_code, result.stdout) == (130, "not finished: 0 configs measured\n")


def test_an_interrupted_search_recommends_what_fits_already(advise, monkeypatch):
    interrupted(monkeypatch, [3000, 900])
    result = advise("advised_models:make", "--all", "--fits", "1 kB")
    assert result.exit_code == 130
    assert "not finished: 2 configs measured\nrecommended: fp32,optimizer=adamw-8bit: 900 B" in result.stdout


def test_all_measures_every_combination(advise, monkeypatch):
    asked = []

    def answer(device, subject, config):
        asked.append(config)
        return trial.Trial(config, 1000 - len(asked), 1.0)

    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", answer)
    result = advise("advised_models:make", "--all")
    assert result.exit_code == 0
    assert len(asked) == len(set(asked)) == 96
    assert "recommended: " in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["advised_models:make"],
            "cpu has no default limit: give the memory that the step may take, for example --fits 24GB",
        ),
        (["advised_models:make", "--fits", "24"], "'24' has no unit; write it like '24 GB' or '24 MiB'"),
        (
            ["advised_models:mak", "--fits", "1GB"],
            "advised_models has no function 'mak'; it has make, make_a_hungry_one",
        ),
        (["advised_few:mak", "--fits", "1GB"], "advised_few has no function 'mak'; it has zoo, Animal, partial\n"),
        (["advised_models.py:make", "--fits", "1GB"], "names a file; write advised_models:make\n"),
        (["./sub/models.py:make", "--fits", "1GB"], "names a file; write sub.models:make\n"),
        (["../models.py:make", "--fits", "1GB"], "names a file; write models:make, in the folder of the file\n"),
        (["advised_models:make", "--fits", "1GB", "--blocks", "block"], "no module of Model matches 'block'"),
        (["advised_model:make", "--fits", "1GB"], "there is no module 'advised_model'"),
        (["advised_models", "--fits", "1GB"], "'advised_models': write MODULE:FACTORY"),
        (
            ["advised_models:make", "--fits", "1GB", "--batch", "4x16"],
            "--batch needs a named model such as hf:ORG/NAME, but advised_models:make is a function",
        ),
        (["advised_models:make", "--fits", "1GB", "--generate", "4"], "--generate needs a named model such as hf:"),
        (["hf:x", "--generate", "4", "--train"], "--generate measures inference; leave --train out"),
        (["hf:x", "--lora", "r=8", "--infer"], "is the same as with the plain model: leave --lora or --"),
        (["hf:x", "--lora", "r=8", "--generate", "4"], "is the same as with the plain model: leave --lora or --"),
        (["hf:x", "--lora", "r=8", "--shard", "tp:2"], "--lora cannot be combined with --shard tp"),
        (["hf:x", "--infer", "--blocks", "h"], "--blocks needs a training step"),
        (["hf:x", "--lora", "r=0"], "LoRA's r is '0', expected a whole number, 1 or more"),
        (
            ["advised_models:make", "--fits", "1GB", "--lora", "r=8"],
            "--lora needs a named model such as hf:ORG/NAME, but advised_",
        ),
        (["hf:x", "--generate", "none"], "'none' is not a valid integer"),
        (
            ["advised_models:make", "--batch", "4*16"],
            "'4*16' is not a batch size: write SAMPLES like 32",
        ),
        (["advised_models:make", "--config", "amp-bf17"], "step config 'amp-bf17': "),
        (["advised_models:make", "--config", "fp32", "--all"], "use only one of these options"),
        (["advised_models:make", "--device", "emulated:h100"], "several devices are only possible if all are emulated"),
        (
            ["advised_models:make", "--fits", "1GB", "--largest-batch"],
            "--largest-batch needs a named model such as hf:",
        ),
        (["hf:x", "--largest-batch", "--longest-sequence"], "exclude each other: run the command once with each"),
        (
            ["hf:x", "--config", "fp32", "--largest-batch"],
            "cpu has no default limit: give the memory that the step may take, for example --fits 24GB\n",
        ),
        (["hf:", "--fits", "1GB"], "'hf:' names no model; write hf:ORG/NAME"),
        (
            ["hf.py:make", "--fits", "1GB"],
            "write a module with another name that contains `from hf import make`, because hf: ",
        ),
        (["advised_models:make", "--shard", "fsdp"], "shard=fsdp needs the number of ranks; add world=N"),
        (
            ["advised_models:make", "--shard", "fsdp,world=1"],
            "world=1: expected a whole number, 2 or more; write a kind",
        ),
        (["advised_models:make", "--shard", "ddp,world=2", "--infer"], "--shard needs a training step"),
        (
            ["advised_models:make", "--shard", "ddp,world=2", "--config", "fp32,shard=ddp,world=4"],
            "names a sharding, but --shard adds shard=ddp,world=2; leave one of the two out",
        ),
        (
            ["hf:./gone", "--fits", "1GB", "--device", "emulated:h100"],
            "several devices are only possible if all are emulated",
        ),
        (
            ["advised_models:make_nonsense", "--fits", "1GB"],
            "expected (model, batch) or (model, batch, loss) from make_nonsense(), got Model",
        ),
    ],
)
def test_wrong_usage_says_what_would_be_right(advise, args, message):
    result = advise(*args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_several_gpus_are_refused_for_a_model_that_runs_on_one():
    result = CliRunner().invoke(main, ["advise", "hf:x", "--device", "emulated:h100x8"])
    assert result.exit_code == 2
    assert "use emulated:h100, with --shard fsdp,world=8 to measure one of 8 ranks" in result.stderr


@pytest.mark.parametrize(
    ("factory", "returned"),
    [("make_without_loss", "the model"), ("make_with_a_batch_of_samples", "loss(...)")],
)
def test_a_model_without_a_loss_is_told_how_to_give_one(advise, factory, returned):
    result = advise(f"advised_models:{factory}", "--fits", "1GB")
    assert result.exit_code == 2
    assert (
        f"there is no scalar loss: {returned} returned float32[512, 32]; return (model, batch, loss)" in result.stderr
    )
    assert "pass loss=" not in result.stderr


def test_an_unknown_device_is_told(advise):
    result = CliRunner().invoke(main, ["advise", "advised_models:make", "--fits", "1GB", "--device", "gpu"])
    assert result.exit_code == 2
    assert "did you mean 'cuda'?" in result.stderr


@pytest.mark.parametrize("model", ["advised_models:make", "hf:x"])
def test_a_gpu_that_cannot_be_emulated_is_a_device_that_cannot_be_used(advise, monkeypatch, model):
    def fails():
        raise EmulationError("planted")

    monkeypatch.setattr("pytest_gpumem.tools.advise.command.prepare", fails)
    result = CliRunner().invoke(main, ["advise", model, "--device", "emulated:h100"])
    assert (result.exit_code, result.stderr) == (1, "Error: planted\n")


@NEEDS_TRANSFORMERS
def test_a_module_that_is_called_like_a_source_is_told_of(advise, tmp_path):
    (tmp_path / "hf.py").write_text("def make(): ...", encoding="utf-8")
    result = advise("hf:./make", "--fits", "1GB")
    assert result.exit_code == 2
    assert (
        "; hf: means a library's model here, so import your function into a module with another name" in result.stderr
    )


def test_configs_that_are_named_are_measured_and_no_others(advise):
    words = ["fp32,checkpoint=blocks", "fp32", "fp32"]
    result = advise("advised_models:make", *(word for one in words for word in ("--config", one)))
    assert result.exit_code == 0, result.output
    assert configs_in(result.stdout) == ["fp32,checkpoint=blocks", "fp32"]
    clipped = advise("advised_models:make", "--config", "fp32,clip=1").stdout
    assert 'a test can pass config="fp32,clip=1" to a step of the fixture' in clipped
    assert "optimizer.step()" not in clipped


def test_every_config_is_sharded_and_the_title_says_so(advise):
    if (why := CpuDevice().lacks("fully_shard")) is not None:
        pytest.skip(why)
    words = ["--config", "fp32", "--config", "fp32,optimizer=adafactor"]
    result = advise("advised_models:make", *words, "--shard", "zero2,world=8", "--format", "json")
    assert result.exit_code == 0, result.output
    plain = json.loads(result.stdout)
    assert plain["shard"] == "shard=zero2,world=8"
    refused, sharded = plain["devices"][0]["configs"]
    assert refused["why_not"] == "torch's Adafactor does not accept sharded parameters; use adamw"
    said = advise("advised_models:make", "--config", "fp32,shard=zero2,world=8", "--format", "json")
    (same,) = json.loads(said.stdout)["devices"][0]["configs"]
    assert (sharded["config"], sharded["peak"]) == (same["config"], same["peak"])


def test_a_rank_is_told_above_the_table(advise):
    told = advise("advised_models:make", "--config", "fp32", "--shard", "ddp,world=8").stdout.splitlines()
    assert told[:2] == ["rank 0 of 8, DDP", "bytes and samples are for a single rank, which has a GPU to itself"]
    assert "    model = DistributedDataParallel(model)" in told


def test_a_model_that_fails_by_itself_is_told_in_one_sentence(advise, monkeypatch):
    def fails(*_):
        raise trial.TrialFailed("hf:x: Model fails by itself: ValueError: planted")

    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", fails)
    result = advise("advised_models:make", "--fits", "1GB")
    assert result.exit_code == 1
    assert result.stderr.endswith("fp32 ... failed\nError: hf:x: Model fails by itself: ValueError: planted\n")
    assert "Traceback" not in result.stderr


def test_inference_of_a_function_is_measured_without_a_loss(advise):
    result = advise("advised_models:make_without_loss", "--infer", "--fits", "1 GB")
    assert result.exit_code == 0, result.output
    assert configs_in(result.stdout) == ["fp32"]
    assert "    with torch.inference_mode():\n        output = model(**batch)\n" in result.stdout


def write_gpt2(folder):
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **config}), encoding="utf-8")


@NEEDS_TRANSFORMERS
def test_a_model_by_name_is_measured_on_this_machine_and_its_peak_is_told(advise, tmp_path, monkeypatch):
    write_gpt2(tmp_path)
    whole = advise("hf:config.json", "--batch", "2x32", "--config", "fp32")
    assert whole.exit_code == 0, whole.output
    assert re.match(
        r"hf:config.json: GPT2LMHeadModel, random weights, [\d.]+ [kM] parameters, \d layers; training, batch 2x32\n"
        "attention: sdpa, ",
        whole.stdout,
    )
    monkeypatch.setattr("pytest_gpumem.tools.advise.command.explain_config", trial.explain_config)
    tiny = advise("hf-tiny:config.json", "--batch", "2x32", "--config", "fp32")
    peaks = [re.search(r"recommended: fp32: ([0-9.]+) MB", one.stdout)[1] for one in (whole, tiny)]
    assert float(peaks[0]) > 1.5 * float(peaks[1])
    assert whole.stdout.endswith("\n\nleft out\n")
    told = tiny.stdout.partition("allocated at the peak in ")[2].splitlines()
    assert told[0].split() == ["backward", "bytes", "of", "all"]
    # 512 tokens and 64 positions of 64, two layers, a norm: 136,960 parameters of 4 bytes.
    assert ["parameters", "547.84", "kB"] in [line.split()[:3] for line in told]
    assert {"activations", "optimizer"} <= {line.split()[0] for line in told[1:]}
    assert any(line.startswith("  transformer.h.*.mlp.c_fc ") for line in told)


@NEEDS_TRANSFORMERS
def test_adapters_are_told_to_be_in_the_dtype_of_the_config(advise, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    write_gpt2(tmp_path)
    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", lambda _, __, config: trial.Trial(config, 100))
    words = ["hf:config.json", "--batch", "2x8", "--config", "bf16", "--fits", "1GB"]
    assert "PEFT makes float32 adapters" in advise(*words, "--lora", "r=4").stdout
    assert "PEFT" not in advise(*words).stdout


@NEEDS_TRANSFORMERS
def test_generation_is_measured_by_configs_of_inference_and_shows_its_call(advise, tmp_path, monkeypatch):
    write_gpt2(tmp_path)
    tried = []

    def answer(device, subject, config):
        tried.append((subject.task.new_tokens, subject.number("tokens"), str(config)))
        return trial.Trial(config, 1000 // len(tried), 1.0)

    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", answer)
    told = advise("hf:config.json", "--batch", "2x60", "--generate", "4", "--fits", "600B", "--longest-sequence").stdout
    assert re.search(r"GPT2LMHeadModel, random weights, .* layers; generation of 4 tokens, batch 2x60\n", told)
    assert tried[:2] == [(4, 60, "fp32"), (4, 60, "bf16")]
    assert {number for number, _, _ in tried} == {4}
    call = "        output = model.generate(**batch, max_new_tokens=4, do_sample=False, num_beams=1)\n"
    assert f"    model.to(torch.bfloat16)\n    with torch.inference_mode():\n{call}" in told
    assert "has 64 positions, but a prompt of 61 tokens with 4 new tokens needs 65" in told


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("40kB", ": fp32: at most 39 samples fit, with 40.00 kB; 40 do not\n"),
        ("1.5kB", ": fp32: not even 1 fits\n"),
        ("1.2kB", ": fp32: it is not known how many samples fit\n"),
    ],
)
def test_the_largest_batch_is_found_also_where_the_given_one_does_not_fit(advise, tmp_path, monkeypatch, limit, said):
    write_gpt2(tmp_path)

    def answer(device, subject, config):
        if limit == "1.2kB" and subject.samples != 4:
            raise KeyboardInterrupt
        return trial.Trial(config, 1000 * (1 + subject.samples), 1.0)

    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", answer)
    result = advise("hf:config.json", "--batch", "4x32", "--config", "fp32", "--fits", limit, "--largest-batch")
    assert said in result.stdout
    assert result.exit_code == {"40kB": 0, "1.5kB": 1, "1.2kB": 130}[limit]


@NEEDS_TRANSFORMERS
def test_the_longest_sequence_ends_at_the_positions_that_the_model_has(advise, tmp_path, monkeypatch):
    write_gpt2(tmp_path)
    monkeypatch.setattr("pytest_gpumem.tools.advise.command.try_config", lambda *args: trial.Trial(args[-1], 100, 1.0))
    words = ["--batch", "2x32", "--config", "fp32", "--fits", "1kB", "--longest-sequence"]
    told = advise("hf:config.json", *words).stdout
    assert (
        "at most 64 tokens fit, with 100 B; 65 do not: GPT2LMHeadModel has 64 positions, but the batch has 65" in told
    )
    plain = json.loads(advise("hf:config.json", *words, "--format", "json").stdout)
    assert plain["largest_of"] == "tokens"
    assert plain["devices"][0]["configs"][0]["largest"]["size"] == 64
