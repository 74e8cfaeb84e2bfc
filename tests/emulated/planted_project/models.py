"""Models of transformers, small and with random weights, changed as a project changes them: each with one regression or more.

``PLANTED`` in the environment brings them in: the name of one, or ``all``. ``# planted: NAME`` ends the line that makes what a
regression costs.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.t5.modeling_t5 import T5DenseActDense
from transformers.models.vit.modeling_vit import ViTMLP

LAYERS = 2
VOCABULARY = 512


def planted(name: str) -> bool:
    return os.environ.get("PLANTED", "") in ("all", name)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, hidden):
        hidden = self.wide(hidden)  # planted: perceptron-average-of-more-rows
        hidden = hidden.relu()
        return self.narrow(hidden)


# GPT-2


class GatedMLP(GPT2MLP):
    """The MLP with a gate of its own."""

    def forward(self, hidden):
        hidden = self.c_fc(hidden)
        if planted("gpt2-float32-copy"):
            wide = hidden.float()  # planted: gpt2-float32-copy
            hidden = (wide * wide.sigmoid()).to(hidden.dtype)  # planted: gpt2-float32-copy
        else:
            hidden = nn.functional.silu(hidden)
        return self.dropout(self.c_proj(hidden))


def gpt2(attention: str = "sdpa", *, checkpointing: bool = False, gated: bool = False) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=256,
        n_layer=LAYERS,
        n_head=4,
        n_positions=512,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if gated:
        for block in model.transformer.h:
            block.mlp = GatedMLP(4 * 256, config)
    return model


# Llama


def grouped_attention(module, query, key, value, mask, dropout=0.0, scaling=None, **_):
    """Attention whose keys and values are shared by several heads."""
    if planted("llama-repeated-heads"):
        key = key.repeat_interleave(8, dim=1)  # planted: llama-repeated-heads
        value = value.repeat_interleave(8, dim=1)  # planted: llama-repeated-heads
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)


def llama(attention: str = "sdpa", *, inner: int = 512, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    heads = 1 if attention == "grouped" else 8
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        attn_implementation=attention,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def next_token_loss(output, batch):
    logits = output.logits[:, :-1].flatten(0, 1)
    if planted("llama-logits-in-float32"):
        logits = logits.float()  # planted: llama-logits-in-float32
    return cross_entropy(logits, batch["input_ids"][:, 1:].flatten())  # planted: llama-logits-in-float32


# BERT


def soft_attention(module, query, key, value, mask, dropout=0.0, scaling=None, **_):
    """Attention whose weights somebody wants to see."""
    scores = query @ key.transpose(-1, -2) * scaling
    dtype = torch.float32 if planted("bert-softmax-in-float32") else scores.dtype
    weights = scores.softmax(-1, dtype=dtype)  # planted: bert-softmax-in-float32
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register("soft", soft_attention)


def bert_config(attention: str = "sdpa") -> BertConfig:
    return BertConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=512,
        vocab_size=VOCABULARY,
        attn_implementation=attention,
        attention_probs_dropout_prob=0.0,
    )


def bert(attention: str = "sdpa") -> BertForMaskedLM:
    return BertForMaskedLM(bert_config(attention))


class Distilled(nn.Module):
    """A student that learns what a frozen teacher says."""

    def __init__(self):
        super().__init__()
        self.teacher = BertModel(bert_config(), add_pooling_layer=False)
        self.student = BertModel(bert_config(), add_pooling_layer=False)

    def forward(self, ids):
        with torch.set_grad_enabled(planted("bert-teacher-with-gradients")):
            target = self.teacher(ids).last_hidden_state  # planted: bert-teacher-with-gradients
        return (self.student(ids).last_hidden_state - target).square().mean()


# ViT


class ScoredMLP(ViTMLP):
    """The MLP, with how much each token was changed."""

    def forward(self, hidden):
        out = super().forward(hidden)
        if planted("vit-kept-clone"):
            self.seen = out.detach().clone()  # planted: vit-kept-clone
        return out


class MaskedMLP(ViTMLP):
    """The MLP of some of the tokens."""

    def __init__(self, config):
        super().__init__(config)
        if planted("vit-buffer-in-every-layer"):
            self.register_buffer("mask", torch.ones(1024, 1024))  # planted: vit-buffer-in-every-layer


def vit_config() -> ViTConfig:
    return ViTConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=64,
        patch_size=4,
        num_labels=10,
    )


def vit(mlp: type[ViTMLP]) -> ViTForImageClassification:
    model = ViTForImageClassification(vit_config())
    for layer in model.vit.layers:
        layer.mlp = mlp(vit_config())
    return model


class Features(nn.Module):
    """What a ViT says of an image, for inference."""

    def __init__(self):
        super().__init__()
        config = vit_config()
        config.num_hidden_layers = 12
        self.vit = ViTModel(config, add_pooling_layer=False)

    def forward(self, pixels):
        return self.vit(pixels, output_hidden_states=planted("vit-hidden-states"))  # planted: vit-hidden-states


# T5


class DroppingMLP(T5DenseActDense):
    """The MLP with a dropout of its own."""

    def forward(self, hidden):
        hidden = self.act(self.wi(hidden))
        kept = torch.rand_like(hidden) > 0.1
        if planted("t5-mask-in-float32"):
            kept = kept.float()  # planted: t5-mask-in-float32
        return self.wo(hidden * kept)


def t5(*, dropping: bool = False) -> T5ForConditionalGeneration:
    config = T5Config(
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=1,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config)
    if dropping:
        for block in (*model.encoder.block, *model.decoder.block):
            block.layer[-1].DenseReluDense = DroppingMLP(config)
    return model
