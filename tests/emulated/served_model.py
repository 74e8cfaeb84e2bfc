"""A server program for tests: a small Llama with random weights generates tokens on a GPU. Run ``python served_model.py PORT``.

- ``GET /health`` answers once the model is on the GPU.
- ``GET /memory`` returns the allocator's current and peak bytes.
- ``POST /generate`` with ``{"prompt": [1, 2, 3], "tokens": 16}`` generates tokens and returns their number. The tokens themselves
  are not computed on an emulated GPU, so a test is unmeasured if the server reads them.

A single thread generates. With a thread for each request, cuBLAS would take a workspace for each thread that is alive at the
same time, so chance would decide the peak.

``LEAK=1`` keeps each request's KV cache. ``PORT`` 0 takes a free port, and the server prints its address.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=256, num_key_value_heads=2, eos_token_id=None, pad_token_id=0, **SIZES)
MEMORY = {
    "allocated": "allocated_bytes.all.current",
    "requested": "requested_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "peak_allocated": "allocated_bytes.all.peak",
    "peak_requested": "requested_bytes.all.peak",
    "peak_reserved": "reserved_bytes.all.peak",
}
KEPT: list[Any] = []


class Generator:
    """The model, and the thread that uses it."""

    def __init__(self) -> None:
        self.model = LlamaForCausalLM(CONFIG).to("cuda", torch.bfloat16).eval()
        self.worker = ThreadPoolExecutor(1)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.worker.submit(self.generate, request["prompt"], request["tokens"]).result()}

    @torch.no_grad()
    def generate(self, prompt: list[int], tokens: int) -> int:
        inputs = torch.tensor([prompt], device="cuda")
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        result = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            return_dict_in_generate=True,
            **lengths,
        )
        if os.environ.get("LEAK") == "1":
            KEPT.append(result.past_key_values)  # planted: the KV cache of each request stays
        return result.sequences.shape[1] - len(prompt)


def memory() -> dict[str, int]:
    statistics = torch.cuda.memory_stats()
    return {name: statistics[key] for name, key in MEMORY.items()}


class Handler(BaseHTTPRequestHandler):
    """Requests. ``generator`` is set by `main`."""

    protocol_version = "HTTP/1.1"
    generator: Generator

    def do_GET(self) -> None:
        answers = {"/health": lambda: {"status": "ok"}, "/memory": memory}
        if self.path in answers:
            self.reply(200, answers[self.path]())
        else:
            self.reply(404, {"error": self.path})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(200, self.generator.answer(json.loads(body)))

    def reply(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Write no line for a request."""


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    torch.manual_seed(0)
    Handler.generator = Generator()
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)

    def stop(*_: object) -> None:
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
    server.server_close()


if __name__ == "__main__":
    main()
