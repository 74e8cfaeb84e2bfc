"""Loading a Llama onto the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tiny
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem import Gpumem


def test_from_pretrained(gpumem: Gpumem, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tiny.llama(torch.device("cpu"), hidden_size=512, intermediate_size=2048, num_hidden_layers=4).save_pretrained(
        tmp_path
    )
    gpumem.load(lambda: LlamaForCausalLM.from_pretrained(tmp_path, device_map=str(gpumem.device)))
