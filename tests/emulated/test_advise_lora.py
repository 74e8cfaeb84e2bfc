"""Training of adapters on an emulated card: what is said to be needed is what a program with PEFT needs, to the byte."""

from __future__ import annotations

import json

import pytest

from tests import needs

pytestmark = needs.package("peft")

GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 2048, "n_positions": 256}
LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
# What PEFT gives adapters to: of GPT-2 one projection to queries, keys and values; of Llama those to queries and to values.
TRAINED = {"gpt2": 4 * 8 * (256 + 3 * 256), "llama": 4 * 8 * ((256 + 256) + (256 + 64))}
CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2, "fp32"),
    "llama": ("LlamaForCausalLM", LLAMA, "bf16,checkpoint=blocks"),
}
PROGRAM = """
import functools
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

config = transformers.AutoConfig.from_pretrained("model")
config.use_cache = False
dtype = torch.bfloat16 if "bf16" in {config!r} else torch.float32
torch.set_default_dtype(dtype)
with torch.device("cuda"):
    model = getattr(transformers, config.architectures[0])(config)
    model = get_peft_model(model, LoraConfig(r=8))
torch.set_default_dtype(torch.float32)
model.to(dtype)
if "checkpoint" in {config!r}:
    for block in model.base_model.model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
optimizer = torch.optim.AdamW(model.parameters())
tokens, labels = torch.randint(2048, (4, 128)).cuda(), torch.randint(2048, (4, 128)).cuda()
model.train()
for step in range(4):
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


@pytest.mark.parametrize("kind", CASES)
def test_a_card_has_to_hold_frozen_weights_and_what_training_adapters_takes(processes, on_gpu, tmp_path, kind):
    model_class, values, config = CASES[kind]
    (tmp_path / "model").mkdir()
    text = json.dumps({"architectures": [model_class], "model_type": kind, **values})
    (tmp_path / "model/config.json").write_text(text, encoding="utf-8")
    words = ["--lora", "r=8", "--batch", "4x128", "--config", config, "--device=emulated:h100", "--format=json"]
    done = processes.gpumem("advise", "hf:model", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    (tried,) = told["devices"][0]["configs"]
    assert [tried["peak_allocated"], tried["peak"]] == [*map(int, on_gpu(PROGRAM.format(config=config)).split())]
    (recommended,) = told["recommended"]
    made_of = {one["category"]: one for one in recommended["made_of"]}
    itemsize = 2 if "bf16" in config else 4
    assert made_of["optimizer state"]["bytes"] == 2 * TRAINED[kind] * itemsize
    assert all(".lora_" in module for module in made_of["optimizer state"]["modules"])
    adapters = sum(n for module, n in made_of["parameter"]["modules"].items() if ".lora_" in module)
    assert adapters == TRAINED[kind] * itemsize
    assert "model = get_peft_model(model, LoraConfig(r=8))" in recommended["code"]
    assert told["lora"] == "r=8"
