"""Train GPT-2 small for three steps: 1 x 4,096 tokens, bf16, AdamW, gradient checkpointing, random weights."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = GPT2LMHeadModel(GPT2Config(n_positions=4096, use_cache=False)).train()
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(50_257, (1, 4096)).cuda()
for _ in range(3):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
