"""The batches. Not measured: nothing here has the marker or the fixture."""

from __future__ import annotations

import torch
from tiny_models.data import MODULES, image_batch, token_batch


def test_tokens_are_bytes_of_python_sources():
    tokens = token_batch(8, 256)
    assert tokens.shape == (8, 256)
    assert tokens.dtype == torch.int64
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 256


def test_images_come_with_their_module():
    images, labels = image_batch(16, 64)
    assert images.shape == (16, 1, 64, 64)
    assert labels.tolist() == [*range(len(MODULES))] * 2


def test_the_seed_decides_what_is_taken():
    assert token_batch(4, 64, seed=1).equal(token_batch(4, 64, seed=1))
    assert not token_batch(4, 64, seed=1).equal(token_batch(4, 64, seed=2))
