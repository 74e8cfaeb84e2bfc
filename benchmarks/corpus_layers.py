"""Regressions of the corpus that are in the other layers of a model: norms, MLPs, convolutions, whole blocks."""

from __future__ import annotations

from corpus_judge import Case
from corpus_models import small_convnet, small_gpt, trained
from corpus_project import Edit

_LAYER_NORM = """class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)  # culprit
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias  # culprit


class Block(nn.Module):
"""

_MLP = """class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wider = nn.Linear(config.width, 4 * config.width)
        self.narrower = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.wider(x), inplace=True)  # culprit
        return self.narrower(x)


class Block(nn.Module):
"""
_SEQUENTIAL = """        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
"""

CASES = (
    Case(
        "layer norm by hand",
        "gpt",
        small_gpt(),
        (
            Edit("gpt", "class Block(nn.Module):\n", _LAYER_NORM),
            Edit("gpt", "self.attention_norm = nn.LayerNorm(", "self.attention_norm = LayerNorm("),
            Edit("gpt", "self.mlp_norm = nn.LayerNorm(", "self.mlp_norm = LayerNorm("),
        ),
        ("blocks.*.attention_norm", "blocks.*.mlp_norm"),
        why="both lines save tensors as large as the input, in both norms",
    ),
    Case(
        "GELU by hand",
        "vit",
        trained("vit"),
        (
            Edit(
                "vit",
                "        hidden_states = self.activation_fn(hidden_states)\n",
                "        x = hidden_states\n"
                "        hidden_states = 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))  # culprit\n",
            ),
        ),
        ("vit.layers.*.mlp",),
    ),
    Case(
        "SwiGLU by hand",
        "llama",
        trained("llama"),
        (
            Edit(
                "llama",
                "        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n",
                "        gate = self.gate_proj(x)\n"
                "        gate = gate * torch.sigmoid(gate)  # culprit\n"
                "        down_proj = self.down_proj(gate * self.up_proj(x))\n",
            ),
        ),
        ("model.layers.*.mlp",),
    ),
    Case(
        "float() under amp",
        "gpt2",
        trained("gpt2", "amp-bf16"),
        (
            Edit(
                "gpt2",
                "        hidden_states = self.act(hidden_states)\n",
                "        hidden_states = self.act(hidden_states.float())  # culprit\n",
            ),
        ),
        ("transformer.h.*.mlp", "transformer.h.*.mlp.act"),
        why="the cast is the MLP's, and what it makes wider is saved in the activation that is called in the same line",
    ),
    Case(
        "dropout mask in int64",
        "vit",
        trained("vit"),
        (
            Edit(
                "vit",
                "        kept = torch.rand_like(hidden_states) < 0.9\n",
                "        kept = (torch.rand_like(hidden_states) < 0.9).long()  # culprit\n",
            ),
        ),
        ("vit.layers.*",),
        given=(
            Edit(
                "vit",
                "        hidden_states = self.mlp(hidden_states)\n        hidden_states = self.dropout(hidden_states)\n",
                "        hidden_states = self.mlp(hidden_states)\n"
                "        kept = torch.rand_like(hidden_states) < 0.9\n"
                "        hidden_states = hidden_states * kept / 0.9\n",
            ),
        ),
    ),
    Case(
        "output of attention kept in a list",
        "gpt",
        small_gpt(),
        (
            Edit(
                "gpt",
                "        x = x + self.attention(self.attention_norm(x))\n",
                "        attended = self.attention(self.attention_norm(x))\n"
                "        self.kept = [attended]\n"
                "        x = x + attended\n",
            ),
            Edit(
                "gpt",
                "        projected: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))\n",
                "        projected: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))  # culprit\n",
            ),
        ),
        ("blocks.*.attention", "blocks.*.attention.out"),
        why="a list allocates nothing: what it keeps is what attention's last line makes",
    ),
    Case(
        "checkpointing lost on every other block",
        "gpt",
        small_gpt(layers=4),
        (
            Edit(
                "gpt",
                "        for block in self.blocks:\n            x = checkpoint(block, x, use_reentrant=False)\n",
                "        for number, block in enumerate(self.blocks):\n"
                "            x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)\n",
            ),
            Edit(
                "gpt",
                "        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))\n",
                "        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))  # culprit\n",
            ),
        ),
        ("blocks.*", "blocks.*.*"),
        given=(
            Edit(
                "gpt",
                "from torch.nn import functional as F",
                "from torch.utils.checkpoint import checkpoint\nfrom torch.nn import functional as F",
            ),
            Edit(
                "gpt",
                "        for block in self.blocks:\n            x = block(x)\n        logits",
                "        for block in self.blocks:\n            x = checkpoint(block, x, use_reentrant=False)\n        logits",
            ),
        ),
        reason="checkpointing off",
        why="the largest of what is kept again is the MLP's; the reason has to say that checkpointing was lost",
    ),
    Case(
        "exponential average of the blocks added",
        "gpt",
        small_gpt(samples=2),
        (
            Edit("gpt", "from dataclasses import dataclass\n", "import copy\nfrom dataclasses import dataclass\n"),
            Edit(
                "gpt",
                "        self.norm = nn.LayerNorm(self.config.width)\n",
                "        self.average = copy.deepcopy(self.blocks).requires_grad_(False)  # culprit\n"
                "        self.norm = nn.LayerNorm(self.config.width)\n",
            ),
        ),
        ("average.*", "average.*.*"),
    ),
    Case(
        "inplace removed",
        "gpt",
        small_gpt(training=False),
        (Edit("gpt", "F.relu(self.wider(x), inplace=True)", "F.relu(self.wider(x))"),),
        ("blocks.*.mlp",),
        given=(
            Edit("gpt", "class Block(nn.Module):\n", _MLP),
            Edit("gpt", _SEQUENTIAL, "        self.mlp = MLP(config)\n"),
        ),
    ),
    Case(
        "sum of the branches kept on the block",
        "convnet",
        small_convnet(samples=64),
        (
            Edit(
                "convnet",
                "        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))\n",
                "        self.before_relu = self.norm2(self.conv2(y)) + self.shortcut(x)  # culprit\n"
                "        return F.relu(self.before_relu)\n",
            ),
        ),
        ("stages.*",),
    ),
    Case(
        "stages scaled up and concatenated",
        "convnet",
        small_convnet(samples=64),
        (
            Edit(
                "convnet",
                "        for stage in self.stages:\n            x = stage(x)\n        logits",
                "        maps = []\n"
                "        for stage in self.stages:\n"
                "            x = stage(x)\n"
                "            maps.append(F.interpolate(x, size=(12, 12)))\n"
                "        pyramid = torch.cat(maps, dim=1).square()  # culprit\n"
                "        x = x + pyramid.mean(dim=(1, 2, 3), keepdim=True)\n"
                "        logits",
            ),
        ),
        ("ConvNet",),
    ),
    Case(
        "ReLU replaced by GELU",
        "convnet",
        small_convnet(samples=32),
        (
            Edit(
                "convnet",
                "        y = F.relu(self.norm1(self.conv1(x)))\n"
                "        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))\n",
                "        y = F.gelu(self.norm1(self.conv1(x)))  # culprit\n"
                "        return F.gelu(self.norm2(self.conv2(y)) + self.shortcut(x))  # culprit\n",
            ),
        ),
        ("stages.*", "stages.*.norm1"),
        why="GELU saves its input, which ReLU does not: the sum of two branches, or the output of a norm",
    ),
)
