"""Regressions of the corpus that are in attention."""

from __future__ import annotations

from corpus_judge import Case
from corpus_models import small_gpt, trained
from corpus_project import Edit

_WEIGHTS_OF_GPT2 = "    attn_weights = nn.functional.softmax(attn_weights, dim=-1)\n\n    # Downcast"
_DROPOUT_OF_BERT = "    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)\n"
_FUSED = "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
_HEADS = "        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)\n"

CASES = (
    Case(
        "softmax in fp32",
        "gpt2",
        trained("gpt2", "bf16"),
        (
            Edit(
                "gpt2",
                _WEIGHTS_OF_GPT2,
                "    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32)  # culprit\n\n"
                "    # Downcast",
            ),
        ),
        ("transformer.h.*.attn",),
    ),
    Case(
        "scores upcast before the mask",
        "bert",
        trained("bert", "bf16"),
        (
            Edit(
                "bert",
                "    attn_weights = nn.functional.softmax(attn_weights, dim=-1)\n",
                "    attn_weights = nn.functional.softmax(attn_weights.float(), dim=-1).type_as(value)  # culprit\n",
            ),
        ),
        ("bert.encoder.layer.*.attention.self",),
    ),
    Case(
        "attention weights kept on the module",
        "gpt2",
        trained("gpt2", "fp32,checkpoint=blocks", length=128),
        (
            Edit(
                "gpt2",
                "    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)\n",
                "    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)  # culprit\n"
                "    module.last_weights = attn_weights\n",
            ),
        ),
        ("transformer.h.*.attn",),
        why="an assignment allocates nothing: what it keeps is made in the line above",
    ),
    Case(
        "attention weights returned",
        "gpt",
        small_gpt(),
        (
            Edit(
                "gpt",
                _FUSED,
                "        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5\n"
                "        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float('-inf'))  # culprit\n"
                "        self.weights = scores.softmax(dim=-1)  # culprit\n"
                "        y = self.weights @ v\n",
            ),
        ),
        ("blocks.*.attention",),
        why="masked_fill saves its mask for backward, softmax its result: one or the other is the largest",
    ),
    Case(
        "eager attention in place of the fused one",
        "vit",
        trained("vit", attn_implementation="sdpa"),
        (
            Edit(
                "vit",
                "            self.config._attn_implementation, eager_attention_forward\n        )\n",
                '            "eager", eager_attention_forward\n        )\n',
            ),
            Edit(
                "vit",
                "    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)\n",
                "    attn_weights = nn.functional.softmax(  # culprit\n"
                "        attn_weights, dim=-1, dtype=torch.float32\n    ).to(query.dtype)\n",
            ),
        ),
        ("vit.layers.*.attention",),
        why="the setting allocates nothing: the weights are made by the softmax that runs now",
    ),
    Case(
        "dropout mask in float",
        "bert",
        trained("bert", length=128),
        (
            Edit(
                "bert",
                "    mask = torch.rand_like(attn_weights) >= dropout\n",
                "    mask = (torch.rand_like(attn_weights) >= dropout).to(attn_weights.dtype)  # culprit\n",
            ),
        ),
        ("bert.encoder.layer.*.attention.self",),
        given=(
            Edit(
                "bert",
                _DROPOUT_OF_BERT,
                "    mask = torch.rand_like(attn_weights) >= dropout\n"
                "    attn_weights = attn_weights * mask / (1 - dropout)\n",
            ),
        ),
    ),
    Case(
        "float causal mask built in every layer",
        "gpt",
        small_gpt(samples=1, length=256),
        (
            Edit(
                "gpt",
                _FUSED,
                "        mask = torch.full((length, length), float('-inf'), device=x.device).triu(1)  # culprit\n"
                "        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)\n",
            ),
        ),
        ("blocks.*.attention",),
    ),
    Case(
        "mask registered as a buffer in every layer",
        "gpt",
        small_gpt(samples=2, context=512),
        (
            Edit(
                "gpt",
                "        self.out = nn.Linear(config.width, config.width)\n",
                "        self.out = nn.Linear(config.width, config.width)\n"
                '        self.register_buffer("mask", torch.ones(config.context, config.context).tril())  # culprit\n',
            ),
        ),
        ("blocks.*.attention",),
    ),
    Case(
        "contiguous() on the transposed keys",
        "gpt",
        small_gpt(),
        (Edit("gpt", _FUSED, "        k = k.contiguous()  # culprit\n" + _FUSED),),
        ("blocks.*.attention",),
    ),
    Case(
        "clone() of the queries' input",
        "bert",
        trained("bert", samples=16, length=48),
        (
            Edit(
                "bert",
                "        # get all proj\n        query_layer = self.query(hidden_states).view(*hidden_shape).transpose(1, 2)\n",
                "        # get all proj\n"
                "        query_layer = self.query(hidden_states.clone()).view(*hidden_shape).transpose(1, 2)  # culprit\n",
            ),
        ),
        ("bert.encoder.layer.*.attention.self",),
    ),
    Case(
        "rotary tables made full for every layer",
        "llama",
        trained("llama", samples=8, length=48),
        (
            Edit(
                "llama",
                "    cos = cos.unsqueeze(unsqueeze_dim)\n",
                "    cos = cos.unsqueeze(unsqueeze_dim).expand_as(q).contiguous()  # culprit\n",
            ),
        ),
        ("model.layers.*.self_attn",),
    ),
    Case(
        "heads of keys and values repeated by hand",
        "llama",
        trained("llama", attn_implementation="sdpa", num_key_value_heads=1, samples=16, length=48),
        (
            Edit(
                "llama",
                "        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS",
                "        key_states = key_states.repeat_interleave(4, dim=1)  # culprit\n"
                "        value_states = value_states.repeat_interleave(4, dim=1)  # culprit\n"
                "        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS",
            ),
            Edit(
                "llama",
                "        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads\n",
                "        self.num_key_value_groups = 1\n",
            ),
        ),
        ("model.layers.*.self_attn",),
        why="both copies are as large",
    ),
)
