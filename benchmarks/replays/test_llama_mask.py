"""A training step of a Llama that allows long sequences, on short ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_train_step(gpumem: Gpumem) -> None:
    ids = tiny.tokens(gpumem.device, 2, 128)
    model = tiny.llama(gpumem.device, max_position_embeddings=4096)
    gpumem.train_step(model, {"input_ids": ids, "labels": ids})
