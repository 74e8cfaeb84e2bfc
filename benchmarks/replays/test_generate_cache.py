"""Generation by a Llama whose key/value cache is larger than what else a token needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_generate(gpumem: Gpumem) -> None:
    model = tiny.llama(gpumem.device, num_hidden_layers=8).eval()
    prompt = tiny.tokens(gpumem.device, 8, 256)
    gpumem.measure(lambda: model.generate(prompt, min_new_tokens=4, max_new_tokens=4, do_sample=False))
