"""The page of the GPUs that can be emulated."""

from __future__ import annotations

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.emulating.emulation import gpus
from pytest_gpumem.facts.values.option_words import EMULATED_SLUG
from pytest_gpumem.measuring.devices.cuda import cuda_slug
from pytest_gpumem.plugin.config.keys import GPU_KEYS, OTHER_KEYS
from reference.markdown import page, paragraphs, table
from reference.settings import entries

_HEADS = ("Card", "Name in CUDA", "Memory", "Compute capability", "SMs", "L2", "Folder in the store")


def cards_page() -> str:
    """Return the page of the cards: those of the table, their MIG slices, and the keys of one's own."""
    sources = (
        "The figures are those that CUDA reports. `pytest_gpumem/emulating/emulation/gpus.toml` has the source of each. As on "
        "a real card, kernels fail with `no kernel image is available for execution on the device` if torch has no code for "
        "it, for example recent releases for a `v100`."
    )
    capabilities = ", ".join(f"`{major}.{minor}`" for major, minor in gpus.known_capabilities())
    profiles = (
        "The profiles are those of NVIDIA's MIG user guide. Profiles with `+me`, `-me` or `+gfx` have the same memory, and no "
        "words of their own. A card with two words has two words for a slice, for example `a100-mig-1g.10gb`."
    )
    own = OTHER_KEYS["gpus"]
    return page(
        "Emulated cards",
        paragraphs(str(gpus.__doc__)),
        f"## Cards\n\n{sources}",
        table(_HEADS, map(_row, gpus.known_gpus())),
        f"## MIG slices\n\n{profiles}",
        table(_HEADS, map(_row, gpus.known_slices())),
        f"## Cards of your own\n\n{own.details.strip()}",
        *entries(GPU_KEYS, "gpus.NAME"),
        f"### Compute capabilities\n\nThe limits of these compute capabilities are known: {capabilities}.",
    )


def _row(gpu: gpus.Gpu) -> tuple[str, ...]:
    words = [word for word in gpus.known_words() if gpus.emulated_gpu(word) == gpu] or [gpu.word]
    major, minor = gpu.capability
    return (
        ", ".join(f"`{word}`" for word in words),
        gpu.name,
        format_bytes(gpu.total_bytes),
        f"{major}.{minor}",
        str(gpu.multiprocessors),
        format_bytes(gpu.l2_bytes, "iec"),
        f"`{EMULATED_SLUG}{cuda_slug(gpu.title)}`",
    )
