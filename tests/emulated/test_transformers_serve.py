"""`transformers serve` on an emulated GPU: ten requests have a baseline, and the gate finds the KV cache kept after each."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import figures_of

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")),
    reason="needs transformers[serving]",
)

NEW_MODEL = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = {f"w{number}": number for number in range(1000)}
tokens = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="w0", eos_token="w1", pad_token="w1")
tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
tokenizer.save_pretrained("model")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=1000, max_position_embeddings=256, eos_token_id=1, pad_token_id=1, **sizes)
LlamaForCausalLM(config).save_pretrained("model")
"""
SERVE = """
import os

import torch
from transformers import GenerationMixin
from transformers.cli.transformers import main

kept = []
generate = GenerationMixin.generate


def leaking_generate(self, *arguments, **more):
    tokens = generate(self, *arguments, **more)
    with torch.inference_mode():
        kept.append(self(tokens, use_cache=True).past_key_values)
    return tokens


if "LEAK" in os.environ:
    GenerationMixin.generate = leaking_generate
main()
"""
GATED = """
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated.serving import Server

MODEL = str(Path("model").resolve())


@pytest.fixture(scope="session")
def server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", MODEL, "--device", "cuda", "--port", str(port)]
    with Path("server.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "serve.py", *words], stdout=log, stderr=log)
    started = Server(process, f"http://127.0.0.1:{port}")
    started.wait_for_health()
    yield started
    process.terminate()
    process.wait(30)


@pytest.mark.gpumem
def test_ten_requests(server):
    generation = json.dumps({"min_new_tokens": 8, "max_new_tokens": 8})
    body = {"model": MODEL, "messages": [{"role": "user", "content": "w2 w3 w4"}], "generation_config": generation}
    for _ in range(10):
        assert server.request("/v1/chat/completions", body)["usage"]["completion_tokens"] == 8
"""


@pytest.fixture
def session(processes, tmp_path):
    made = processes.run(NEW_MODEL, new=True)
    assert made.returncode == 0, made.stderr
    (tmp_path / "serve.py").write_text(SERVE, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(GATED, encoding="utf-8")

    def run(*arguments, **variables):
        return processes.pytest("--junitxml=report.xml", *arguments, **variables)

    return run


def test_ten_chats_repeat_to_the_byte_and_kept_caches_are_red_with_their_line(session, tmp_path):
    recorded = session("--gpumem-update=new")
    assert recorded.returncode == 0, recorded.stdout
    figures = figures_of(tmp_path / "report.xml")["test_ten_requests"]
    gated = session("--gpumem-baseline")
    assert gated.returncode == 0, gated.stdout
    assert figures_of(tmp_path / "report.xml")["test_ten_requests"] == figures
    leaking = session("--gpumem-baseline", LEAK=1)
    assert leaking.returncode == 1, leaking.stdout
    layers, heads, tokens, head_dim = 2, 2, 3 + 8, 32
    cache = layers * 2 * heads * tokens * head_dim * 4
    retained = figures_of(tmp_path / "report.xml")["test_ten_requests"]["call: serve.py.retained"]
    assert retained >= 10 * cache
    line = SERVE.split("kept.append", maxsplit=1)[0].count("\n") + 1
    rows = [row for row in leaking.stdout.splitlines() if f"(from serve.py:{line})" in row]
    of_caches = [row for row in rows if "20 x float32[1, 2, 11, 32]" in row and "self_attn" in row]
    assert len(of_caches) == 2, leaking.stdout
    assert "kept in: serve.kept[...] -> DynamicCache.layers[...] -> DynamicLayer.keys (56.32 kB)" in leaking.stdout
