"""Regressions of the corpus that are before and after a model's layers: embeddings, logits, the loss."""

from __future__ import annotations

from corpus_judge import Case
from corpus_models import small_gpt, trained
from corpus_project import Edit

CASES = (
    Case(
        "logits upcast",
        "gpt",
        small_gpt("bf16", samples=8),
        (
            Edit(
                "gpt",
                "        logits: torch.Tensor = self.head(self.norm(x))\n",
                "        logits: torch.Tensor = self.head(self.norm(x)).float()  # culprit\n",
            ),
        ),
        ("GPT",),
    ),
    Case(
        "logits upcast",
        "bert",
        trained("bert", "bf16", samples=8, length=48, vocab_size=1024),
        (
            Edit(
                "bert",
                "        sequence_output = outputs[0]\n        prediction_scores = self.cls(sequence_output)\n\n"
                "        masked_lm_loss = None\n",
                "        sequence_output = outputs[0]\n"
                "        prediction_scores = self.cls(sequence_output).float()  # culprit\n\n"
                "        masked_lm_loss = None\n",
            ),
        ),
        ("BertForMaskedLM",),
    ),
    Case(
        "confidence kept with its graph",
        "bert",
        trained("bert", samples=8, length=48, vocab_size=1024),
        (
            Edit(
                "bert",
                "        sequence_output = outputs[0]\n        prediction_scores = self.cls(sequence_output)\n\n"
                "        masked_lm_loss = None\n",
                "        sequence_output = outputs[0]\n        prediction_scores = self.cls(sequence_output)\n"
                "        self.confidence = prediction_scores.softmax(-1).amax(-1)  # culprit\n\n"
                "        masked_lm_loss = None\n",
            ),
        ),
        ("BertForMaskedLM",),
    ),
    Case(
        "embedding upcast",
        "gpt2",
        trained("gpt2", "bf16,optimizer=sgd", samples=1, length=16, vocab_size=8192),
        (
            Edit(
                "gpt2",
                "            inputs_embeds = self.wte(input_ids)\n",
                "            table = self.wte.weight.float()  # culprit\n"
                "            inputs_embeds = nn.functional.embedding(input_ids, table).to(self.wte.weight.dtype)  # culprit\n",
            ),
        ),
        ("transformer",),
        why="in backward the table's gradient is as wide: it is that of the lookup, and then that of the cast",
    ),
    Case(
        "one-hot targets",
        "gpt",
        small_gpt(),
        (
            Edit(
                "gpt",
                "    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())\n",
                "    targets = F.one_hot(tokens[:, 1:].flatten(), logits.shape[-1]).float()  # culprit\n"
                "    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)\n",
            ),
        ),
        ("",),
        why="the loss is outside of the model",
    ),
    Case(
        "layers stacked to be averaged",
        "gpt",
        small_gpt(),
        (
            Edit(
                "gpt",
                "        for block in self.blocks:\n            x = block(x)\n        logits",
                "        hidden = []\n"
                "        for block in self.blocks:\n"
                "            x = block(x)\n"
                "            hidden.append(x)\n"
                "        x = torch.stack(hidden).square().mean(0)  # culprit\n"
                "        logits",
            ),
        ),
        ("GPT",),
    ),
    Case(
        "logits of every layer",
        "gpt",
        small_gpt(samples=8),
        (
            Edit(
                "gpt",
                "            x = block(x)\n        logits: torch.Tensor = self.head(self.norm(x))\n",
                "            x = block(x)\n"
                "            deep = self.head(self.norm(x)).log_softmax(-1)  # culprit\n"
                "            self.penalty = self.penalty + deep.mean()\n"
                "        logits: torch.Tensor = self.head(self.norm(x)) + self.penalty\n",
            ),
            Edit(
                "gpt",
                "        x = self.token(tokens) + self.position(positions)\n",
                "        x = self.token(tokens) + self.position(positions)\n        self.penalty = torch.zeros(())\n",
            ),
        ),
        ("GPT",),
    ),
)
