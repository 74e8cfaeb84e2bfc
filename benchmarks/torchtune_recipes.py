"""Runs a recipe of torchtune as it is, with stand-ins for what cannot be had: weights, a tokenizer and a data set.

Peaks do not depend on values: weights are what `torch.empty` gives, tokens are random. `published_finetuning.py` calls it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.data import Dataset

HERE = "torchtune_recipes"
PACKED_TOGETHER = 20
"""Texts in a pack. The mask is made of blocks whose number depends on the pack's length alone."""
TOKENS = 1000
"""Tokens are drawn of so many: fewer than any vocabulary has."""


class Done(Exception):
    """Enough steps were made."""


class Tokenizer:
    """A tokenizer as recipes ask for it."""

    pad_id = 0


class Texts(Dataset[dict[str, Any]]):
    """Random texts, packed or each of the same length."""

    def __init__(self, tokenizer: Tokenizer, *, packed: bool, length: int, texts: int) -> None:
        self.packed, self.length, self.texts = packed, length, texts

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, labels = torch.randint(TOKENS, (2, self.length))
        if not self.packed:
            return {"tokens": tokens.tolist(), "labels": labels.tolist()}
        lengths = [self.length // PACKED_TOGETHER] * (PACKED_TOGETHER - 1)
        lengths.append(self.length - sum(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        return {"tokens": tokens, "labels": labels, "input_pos": positions, "seq_lens": torch.tensor(lengths)}


class Weights:
    """A checkpointer whose weights were never written."""

    def __init__(self, model: str, model_type: str, *, resume_from_checkpoint: bool) -> None:
        self.model = model

    def load_checkpoint(self) -> dict[str, Any]:
        """Return tensors of the host, of the shapes that the model has."""
        module, _, name = self.model.rpartition(".")
        with torch.device("meta"):
            model = getattr(importlib.import_module(module), name)()
        return {"model": {key: torch.empty(one.shape, dtype=torch.bfloat16) for key, one in model.state_dict().items()}}


class Peaks:
    """A logger that keeps the peaks of each step, and ends the run after so many."""

    kept: list[dict[str, int]]

    def __init__(self, steps: int) -> None:
        self.steps = steps
        Peaks.kept = []

    def log_config(self, config: Any) -> None:
        """Do nothing."""

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        """Keep the peaks in bytes: what the recipe logs is in GiB, which fp64 holds exactly."""
        Peaks.kept.append({name: round(value * 2**30) for name, value in payload.items() if name.startswith("peak")})
        if step >= self.steps:
            raise Done

    def close(self) -> None:
        """Do nothing."""


def _recipe(name: str) -> Any:
    """Return the class of a recipe, which torchtune installs as a script."""
    path = Path(sysconfig.get_paths()["purelib"]) / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"torchtune has no recipe {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return next(value for key, value in vars(module).items() if key.endswith("RecipeSingleDevice"))


def _compile_norms() -> None:
    """Have RMS norms compiled wherever they are, and not in the layers only."""
    from torchtune.modules.rms_norm import RMSNorm

    RMSNorm.forward = torch.compile(RMSNorm.forward)


def run_recipe(asked: dict[str, Any]) -> list[dict[str, int]]:
    """Run a recipe with one of its configs.

    Args:
        asked: ``recipe`` and ``config``, their names in torchtune; ``weights``, the builder of the model without adapters;
            ``changes`` to the config; ``packed`` and ``length`` of a text; ``steps``; ``compile_norms``.

    Returns:
        Peaks of each step, in bytes, by torchtune's names.
    """
    sys.modules.setdefault(HERE, sys.modules[__name__])
    if asked["compile_norms"]:
        _compile_norms()
    config = OmegaConf.load(Path(sysconfig.get_paths()["purelib"]) / "recipes" / "configs" / f"{asked['config']}.yaml")
    config.update(
        {
            "tokenizer": {"_component_": f"{HERE}.Tokenizer"},
            "dataset": {
                "_component_": f"{HERE}.Texts",
                "packed": asked["packed"],
                "length": asked["length"],
                "texts": 2 * (asked["steps"] + 1),
            },
            "checkpointer": {"_component_": f"{HERE}.Weights", "model": asked["weights"], "model_type": "LLAMA3"},
            "metric_logger": {"_component_": f"{HERE}.Peaks", "steps": asked["steps"]},
            "profiler": None,
            "seed": 0,
            "batch_size": 2,
            "epochs": 1,
            "gradient_accumulation_steps": 1,
            "log_peak_memory_stats": True,
            **asked["changes"],
        }
    )
    recipe = _recipe(asked["recipe"])(cfg=config)
    recipe.setup(cfg=config)
    try:
        recipe.train()
    except Done:
        return Peaks.kept
    raise RuntimeError(f"{asked['recipe']} ended before {asked['steps']} steps")
