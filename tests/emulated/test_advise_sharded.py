"""Advice for one rank of a sharded job: what it takes is what a program with ``fully_shard`` takes, to the byte."""

from __future__ import annotations

import json

import pytest

from tests import needs

pytestmark = needs.package("transformers")

# 1003 and 515 rows are no multiples of 8.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1380,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1003,
    "max_position_embeddings": 512,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 512,
    "n_layer": 3,
    "n_head": 8,
    "vocab_size": 1003,
    "n_positions": 515,
}
MODEL = """
import math
import transformers

config = transformers.AutoConfig.from_pretrained("model")
config.use_cache = False
with torch.device("meta"):
    model = getattr(transformers, config.architectures[0])(config)
shards = 4 * sum(math.ceil(one.shape[0] / 8) * math.prod(one.shape[1:]) for one in model.parameters())
"""
PROGRAM = (
    MODEL
    + """
if {adapters}:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8))
blocks = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
for block in blocks:
    fully_shard(block)
fully_shard(model)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
batch = {{name: torch.randint(1003, (2, 256)).cuda() for name in ("input_ids", "labels")}}
for step in range(4):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
dist.destroy_process_group()
"""
)
STATE = (
    MODEL
    + """
from pytest_gpumem.measuring.devices.registry import make_cuda
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.models.name import batch_size
from pytest_gpumem.measuring.models.sources import model_name, named_model
from pytest_gpumem.measuring.models.task import TRAINING
from pytest_gpumem.plugin.relations.state import state_of
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import ModelFactory
from pytest_gpumem.measuring.steps.train_step import prepared_train_step

named = named_model(model_name("hf:model"), batch_size("2x256"), TRAINING)
device = make_cuda()
device.open()
context = MeasuringContext(device, None)
words = StepConfig.parse("fp32,shard=fsdp,world=8")
source = ModelFactory(lambda: named.build(torch.float32))
with prepared_train_step(context, source, named.batch, config=words) as step:
    state = state_of(step, step.measure().figures)
print([part.measured for part in (state.parameters, state.gradients, state.optimizer_state)])
print([shards, shards, 2 * shards])
"""
)


@pytest.fixture(params=[LLAMA, GPT2], ids=["llama", "gpt2"])
def model(request, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(request.param), encoding="utf-8")
    return request.param["model_type"]


def advised(processes, *words: str, model: str = "hf:model") -> dict:
    done = processes.gpumem("advise", model, *words, "--device=emulated:h100", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def figures(plain: dict) -> list[list[object]]:
    return [[one["config"], one["peak_allocated"], one["peak"]] for one in plain["devices"][0]["configs"]]


def test_a_rank_needs_as_much_as_a_fully_shard_program_and_holds_its_shards(processes, on_gpu, model):
    plain = advised(processes, "--batch", "2x256", "--config", "fp32", "--shard", "fsdp,world=8")
    assert plain["shard"] == "shard=fsdp,world=8"
    allocated, reserved = map(int, on_gpu(PROGRAM.format(adapters=False), timeout=300).split())
    assert figures(plain) == [["fp32,shard=fsdp,world=8", allocated, reserved]]
    code = plain["recommended"][0]["code"]
    blocks = {"llama": "model.model.layers", "gpt2": "model.transformer.h"}[model]
    at = code.index(f"for block in {blocks}:")
    assert code[at + 1 : at + 3] == ["    fully_shard(block)", "fully_shard(model)"]
    if model == "llama":
        said = advised(processes, "--batch", "2x256", "--config", "fp32,shard=fsdp,world=8")
        assert figures(said) == figures(plain)
    measured, formula = on_gpu(STATE, timeout=300).splitlines()
    assert measured == formula


@pytest.mark.parametrize("model", [LLAMA], ids=["llama"], indirect=True)
def test_a_rank_takes_what_a_program_takes_that_trains_adapters_on_sharded_weights(processes, on_gpu, model):
    pytest.importorskip("peft")
    plain = advised(processes, "--batch", "2x256", "--config", "fp32", "--shard", "fsdp,world=8", "--lora", "r=8")
    taken = [*map(int, on_gpu(PROGRAM.format(adapters=True), timeout=300).split())]
    assert figures(plain) == [["fp32,shard=fsdp,world=8", *taken]]
    (state,) = (one for one in plain["recommended"][0]["made_of"] if one["category"] == "optimizer state")
    # Of the adapters of queries and values in three layers a rank has one of the 8 rows of A, and an eighth of B's, 8 wide.
    assert state["bytes"] == 2 * 4 * 3 * ((512 + 512) + (512 + 128))
