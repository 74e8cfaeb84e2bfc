"""A test for each regression that `models.py` can have, and those of the training script."""

from __future__ import annotations

import models
import torch
from models import VOCABULARY, planted


def tokens(samples: int = 8, length: int = 256) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (samples, length))
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.zeros(8, dtype=torch.long)}


def test_gpt2_eager(gpumem):
    attention = "eager" if planted("gpt2-eager") else "sdpa"
    gpumem.train_step(lambda: models.gpt2(attention), tokens())


def test_gpt2_not_checkpointed(gpumem):
    wanted = not planted("gpt2-not-checkpointed")
    gpumem.train_step(lambda: models.gpt2(checkpointing=wanted), tokens())  # planted: gpt2-not-checkpointed


def test_gpt2_float32_copy(gpumem):
    gpumem.train_step(lambda: models.gpt2(gated=True), tokens(), config="bf16")


def test_llama_repeated_heads(gpumem):
    gpumem.train_step(lambda: models.llama("grouped"), tokens(), config="bf16")


def test_llama_logits_in_float32(gpumem):
    gpumem.train_step(lambda: models.llama(vocabulary=4096), tokens(), config="bf16", loss=models.next_token_loss)


def test_llama_bigger_mlp(gpumem):
    inner = 1024 if planted("llama-bigger-mlp") else 512
    gpumem.train_step(lambda: models.llama(inner=inner), tokens())


def test_bert_softmax_in_float32(gpumem):
    gpumem.train_step(lambda: models.bert("soft"), tokens(), config="bf16")


def test_bert_teacher_with_gradients(gpumem):
    gpumem.train_step(models.Distilled, tokens()["input_ids"])


def test_bert_leak(gpumem):
    model, batch, losses = models.bert().to(gpumem.device), on(gpumem.device, tokens()), []

    def step():
        out = model(**batch)
        out.loss.backward()
        model.zero_grad()
        if planted("bert-leak"):
            losses.append(out.logits.detach().argmax(-1))  # planted: bert-leak

    gpumem.measure(step)


def test_vit_kept_clone(gpumem):
    gpumem.train_step(lambda: models.vit(models.ScoredMLP), images())


def test_vit_buffer_in_every_layer(gpumem):
    gpumem.train_step(lambda: models.vit(models.MaskedMLP), images())


def test_vit_hidden_states(gpumem):
    gpumem.infer_step(models.Features, images()["pixel_values"])


def test_t5_mask_in_float32(gpumem):
    gpumem.train_step(lambda: models.t5(dropping=True), tokens())


def test_t5_other_optimizer(gpumem):
    optimizer = torch.optim.AdamW if planted("t5-other-optimizer") else torch.optim.SGD
    gpumem.train_step(models.t5, tokens(), optimizer=optimizer)  # planted: t5-other-optimizer


def test_t5_retained_graph(gpumem):
    model, batch, last = models.t5().to(gpumem.device), on(gpumem.device, tokens()), []

    def step():
        loss = model(**batch).loss  # planted: t5-retained-graph
        loss.backward(retain_graph=planted("t5-retained-graph"))
        model.zero_grad()
        last[:] = [loss]

    gpumem.measure(step)


def test_perceptron_average_of_more_rows(gpumem):
    model, average = models.Perceptron().to(gpumem.device), models.Perceptron().to(gpumem.device)
    batch = torch.randn(64, 512, device=gpumem.device)
    # They need less than a workspace more: where threads keep theirs (up to torch 2.14), backward's is there before it. Where
    # they keep none, only what needs more than backward with the one of its product makes the peak.
    more = 2048 if torch.__version__ < (2, 15) else 4096
    rows = torch.randn(more if planted("perceptron-average-of-more-rows") else 1024, 512, device=gpumem.device)
    optimizer = torch.optim.SGD(model.parameters())

    with gpumem.loop():
        while True:
            with torch.no_grad():
                average(rows)  # in front of the products of which each thread makes its workspace
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def on(device: torch.device, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}
