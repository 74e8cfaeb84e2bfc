"""Regressions of the corpus that are in the training script, or in how it calls the model."""

from __future__ import annotations

from corpus_judge import Case
from corpus_models import looped
from corpus_project import Edit

_TRAINING = (
    "        loss = model(**batch, use_cache=False).loss\n        loss.backward()\n        optimizer.step()\n"
    "        optimizer.zero_grad()\n\n    return step\n\n\ndef accumulating("
)
_CALL = "        loss = model(**batch, use_cache=False).loss\n        loss.backward()\n"
_CREATED = "    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)\n"


def _training(body: str) -> Edit:
    """The step of ``training`` replaced."""
    return Edit("train", _TRAINING, f"{body}\n    return step\n\n\ndef accumulating(")


CASES = (
    Case(
        "optimizer created twice",
        "gpt2",
        looped("gpt2", "training", samples=1, length=32),
        (
            Edit(
                "train",
                _CREATED,
                _CREATED + "    second = torch.optim.AdamW(model.parameters(), foreach=False)  # culprit\n",
            ),
            _training(
                "        loss = model(**batch, use_cache=False).loss\n"
                "        loss.backward()\n"
                "        optimizer.step()\n"
                "        second.step()  # culprit\n"
                "        optimizer.zero_grad()\n"
            ),
        ),
        ("transformer.*",),
        library=True,
        why="the state is that of every parameter; it is made by the second optimizer's step",
    ),
    Case(
        "optimizer created anew in the step",
        "gpt2",
        looped("gpt2", "training", samples=1, length=32),
        (
            Edit("train", _CREATED, _CREATED + "    optimizers = [optimizer]\n"),
            _training(
                "        loss = model(**batch, use_cache=False).loss\n"
                "        loss.backward()\n"
                "        optimizers[1:] = [torch.optim.AdamW(model.parameters(), foreach=False)]  # culprit\n"
                "        for each in optimizers:\n"
                "            each.step()  # culprit\n"
                "        optimizer.zero_grad()\n"
            ),
        ),
        ("transformer.*",),
        library=True,
        why="the state is that of every parameter; it is made by the new optimizer's step",
    ),
    Case(
        "gradients not freed",
        "gpt2",
        looped("gpt2", "training"),
        (
            _training(
                "        loss = model(**batch, use_cache=False).loss\n"
                "        loss.backward()  # culprit\n"
                "        optimizer.step()\n"
                "        optimizer.zero_grad(set_to_none=False)  # culprit\n"
            ),
        ),
        ("transformer.*",),
        library=True,
        why="every parameter has a gradient; backward makes them, and zero_grad is what leaves them",
    ),
    Case(
        "losses of all parts summed before one backward",
        "gpt2",
        looped("gpt2", "accumulating", samples=8),
        (
            Edit(
                "train",
                "        for part in range(parts):\n"
                "            few = {name: tensor.chunk(parts)[part] for name, tensor in batch.items()}\n"
                "            loss = model(**few, use_cache=False).loss / parts\n"
                "            loss.backward()\n",
                "        loss = torch.zeros(())\n"
                "        for part in range(parts):\n"
                "            few = {name: tensor.chunk(parts)[part] for name, tensor in batch.items()}\n"
                "            loss = loss + model(**few, use_cache=False).loss / parts  # culprit\n"
                "        loss.backward()\n",
            ),
        ),
        ("transformer.h.*",),
        library=True,
    ),
    Case(
        "retain_graph, and the loss kept until the next step",
        "gpt2",
        looped("gpt2", "training"),
        (
            Edit("train", _CREATED, _CREATED + "    loss: Any = None\n"),
            _training(
                "        nonlocal loss\n"
                "        loss = model(**batch, use_cache=False).loss  # culprit\n"
                "        loss.backward(retain_graph=True)  # culprit\n"
                "        optimizer.step()\n"
                "        optimizer.zero_grad()\n"
            ),
        ),
        ("transformer.h.*",),
        library=True,
        why="backward keeps the graph, and the name keeps it until it is given to the next loss",
    ),
    Case(
        "loss history kept with its graph",
        "gpt2",
        looped("gpt2", "evaluating"),
        (
            Edit(
                "train",
                "        with torch.no_grad():\n            history.append(model(**batch, use_cache=False).loss.item())\n",
                "        history.append(model(**batch, use_cache=False).loss)  # culprit\n",
            ),
        ),
        ("transformer.h.*",),
        library=True,
        figure="retained",
        why="what is retained is what the model saved for a backward that never comes",
    ),
    Case(
        "no_grad forgotten",
        "vit",
        looped("vit", "evaluating"),
        (
            Edit(
                "train",
                "        with torch.no_grad():\n            history.append(model(**batch).loss.item())\n",
                "        history.append(model(**batch).loss.item())  # culprit\n",
            ),
        ),
        ("vit.layers.*",),
        given=(
            Edit(
                "train",
                "            history.append(model(**batch, use_cache=False)",
                "            history.append(model(**batch)",
            ),
        ),
        library=True,
    ),
    Case(
        "hidden states of every layer collected",
        "gpt2",
        looped("gpt2", "evaluating", num_hidden_layers=12, attn_implementation="sdpa"),
        (
            Edit(
                "train",
                "            history.append(model(**batch, use_cache=False).loss.item())\n",
                "            out = model(**batch, use_cache=False, output_hidden_states=True)  # culprit\n"
                "            history.append((out.loss.item(), len(out.hidden_states)))\n",
            ),
        ),
        ("transformer.h.*",),
        library=True,
    ),
    Case(
        "KV cache left on in training",
        "gpt2",
        looped("gpt2", "training", attn_pdrop=0.0, attn_implementation="sdpa"),
        (
            _training(
                "        loss = model(**batch).loss  # culprit\n"
                "        loss.backward()\n"
                "        optimizer.step()\n"
                "        optimizer.zero_grad()\n"
            ),
        ),
        ("transformer.h.*.attn",),
        library=True,
    ),
    Case(
        "sequence not truncated",
        "llama",
        looped("llama", "truncating", length=128),
        (
            Edit(
                "train",
                "        loss = model(input_ids=ids[:, :longest], labels=ids[:, :longest], use_cache=False).loss\n",
                "        loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # culprit\n",
            ),
        ),
        ("model.layers.*",),
        library=True,
        reason="was float32[4, 4, 64, 64], now float32[4, 4, 128, 128]",
        why="everything grows; the largest is the weights of attention, which grow with the square",
    ),
    Case(
        "autocast lost",
        "bert",
        looped("bert", "autocasting"),
        (
            Edit(
                "train",
                '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            loss = model(**batch).loss\n',
                "        loss = model(**batch).loss  # culprit\n",
            ),
        ),
        ("bert.encoder.layer.*",),
        given=(
            Edit(
                "train",
                "            loss = model(**batch, use_cache=False).loss\n        loss.backward()",
                "            loss = model(**batch).loss\n        loss.backward()",
            ),
        ),
        library=True,
        reason="float32",
    ),
    Case(
        "hook that holds outputs",
        "gpt2",
        looped("gpt2", "training", attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa"),
        (
            Edit(
                "train",
                _CREATED,
                _CREATED + "    seen: list[Any] = []\n"
                "    for block in model.transformer.h:\n"
                "        block.attn.register_forward_hook(lambda *call: seen.append(call[-1][0]))\n",
            ),
            _training(
                "        seen.clear()\n"
                "        loss = model(**batch, use_cache=False).loss  # culprit\n"
                "        loss.backward()\n"
                "        optimizer.step()\n"
                "        optimizer.zero_grad()\n"
            ),
        ),
        ("transformer.h.*.attn", "transformer.h.*.attn.*"),
        library=True,
        why="a hook allocates nothing: what it holds is the output of attention, made in the model's call",
    ),
    Case(
        "gradients flattened to clip them",
        "llama",
        looped("llama", "training", samples=1, length=16),
        (
            _training(
                "        loss = model(**batch, use_cache=False).loss\n"
                "        loss.backward()\n"
                "        flat = torch.cat([one.grad.flatten() for one in model.parameters()])  # culprit\n"
                "        for one in model.parameters():\n"
                "            one.grad /= flat.norm().clamp(min=1.0)\n"
                "        optimizer.step()\n"
                "        optimizer.zero_grad()\n"
            ),
        ),
        ("",),
        library=True,
        why="the optimizer's part of a step is in no module",
    ),
)
