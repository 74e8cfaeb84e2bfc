"""Edits of the corpus that change no memory: their difference has to be empty."""

from __future__ import annotations

from corpus_judge import Refactoring
from corpus_models import small_convnet, small_gpt, trained
from corpus_project import Edit

_BLOCK = """        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y
"""
_MLP = """        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
"""

REFACTORINGS = (
    Refactoring(
        "modules renamed",
        "gpt",
        small_gpt(),
        (
            Edit("gpt", "self.attention_norm = nn", "self.ln_1 = nn"),
            Edit("gpt", "self.attention = Attention", "self.attn = Attention"),
            Edit("gpt", "self.mlp_norm = nn", "self.ln_2 = nn"),
            Edit(
                "gpt",
                _BLOCK,
                "        x = x + self.attn(self.ln_1(x))\n"
                "        y: torch.Tensor = x + self.mlp(self.ln_2(x))\n"
                "        return y\n",
            ),
        ),
    ),
    Refactoring(
        "class renamed and moved below another",
        "gpt",
        small_gpt(),
        (
            Edit("gpt", "class GPT(nn.Module):\n", "class Decoder(nn.Module):\n"),
            Edit("gpt", "def next_token_loss(", "GPT = Decoder\n\n\n\n\n\ndef next_token_loss("),
            Edit("gpt", "class Attention(nn.Module):\n", "# Attention.\n\n\n\n\n\n\nclass Attention(nn.Module):\n"),
        ),
    ),
    Refactoring(
        "layers reordered in __init__",
        "convnet",
        small_convnet(),
        (
            Edit("convnet", "        self.stem = nn.Conv2d(1, width, 3, padding=1)\n", ""),
            Edit(
                "convnet",
                "        self.head = nn.Linear(channels[-1], classes)\n",
                "        self.head = nn.Linear(channels[-1], classes)\n"
                "        self.stem = nn.Conv2d(1, width, 3, padding=1)\n",
            ),
        ),
    ),
    Refactoring(
        "functions made modules",
        "convnet",
        small_convnet(),
        (
            Edit(
                "convnet",
                "        self.shortcut = nn.Conv2d(channels_in",
                "        self.relu = nn.ReLU()\n        self.shortcut = nn.Conv2d(channels_in",
            ),
            Edit(
                "convnet",
                "        y = F.relu(self.norm1(self.conv1(x)))\n"
                "        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))\n",
                "        y = self.relu(self.norm1(self.conv1(x)))\n"
                "        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))\n",
            ),
        ),
    ),
    Refactoring(
        "sequence of layers unrolled",
        "gpt",
        small_gpt(),
        (
            Edit(
                "gpt",
                _MLP,
                "        self.wider = nn.Linear(config.width, 4 * config.width)\n"
                "        self.narrower = nn.Linear(4 * config.width, config.width)\n",
            ),
            Edit("gpt", "x + self.mlp(self.mlp_norm(x))", "x + self.narrower(F.gelu(self.wider(self.mlp_norm(x))))"),
        ),
    ),
    Refactoring(
        "half of the block in a method of its own",
        "llama",
        trained("llama"),
        (
            Edit(
                "llama",
                "        residual = hidden_states\n"
                "        hidden_states = self.post_attention_layernorm(hidden_states)\n"
                "        hidden_states = self.mlp(hidden_states)\n"
                "        hidden_states = residual + hidden_states\n"
                "        return hidden_states\n",
                "        return self.feed_forward(hidden_states)\n\n"
                "    def feed_forward(self, x):\n"
                "        return x + self.mlp(self.post_attention_layernorm(x))\n",
            ),
        ),
    ),
    Refactoring(
        "the same operators spelled otherwise",
        "bert",
        trained("bert"),
        (
            Edit(
                "bert",
                "    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling\n",
                "    attn_weights = scaling * (query @ key.mT)\n",
            ),
            Edit(
                "bert",
                "    attn_weights = nn.functional.softmax(attn_weights, dim=-1)\n",
                "    attn_weights = attn_weights.softmax(-1)\n",
            ),
            Edit(
                "bert",
                "        embeddings = inputs_embeds + token_type_embeddings\n",
                "        embeddings = token_type_embeddings + inputs_embeds\n",
            ),
        ),
    ),
    Refactoring("model copied from the library into the project", "gpt2", trained("gpt2", "amp-bf16"), (), moved=True),
    Refactoring(
        "attention moved into a module of its own",
        "vit",
        trained("vit"),
        (
            Edit(
                "vit",
                "        attn_output, attn_weights = attention_interface(\n            self,\n",
                "        attn_output, attn_weights = self.core(\n            attention_interface,\n            self,\n",
            ),
            Edit(
                "vit",
                "        self.is_causal = False\n\n        self.q_proj",
                "        self.is_causal = False\n        self.core = ViTCore()\n\n        self.q_proj",
            ),
            Edit(
                "vit",
                "class ViTAttention(nn.Module):\n",
                "class ViTCore(nn.Module):\n"
                "    def forward(self, function, owner, *args, **kwargs):\n"
                "        return function(owner, *args, **kwargs)\n\n\n"
                "class ViTAttention(nn.Module):\n",
            ),
        ),
    ),
)
