"""Decoding a few frames by CogVideoX's autoencoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pytest_gpumem import Gpumem


def test_decode(gpumem: Gpumem) -> None:
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(0)
    sizes = {"block_out_channels": (16, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
    autoencoder = AutoencoderKLCogVideoX(**sizes).to(gpumem.device).eval()
    latents = torch.ones(1, 4, 5, 16, 16, device=gpumem.device)

    @torch.no_grad()
    def decode() -> None:
        autoencoder.decode(latents)

    gpumem.measure(decode)
