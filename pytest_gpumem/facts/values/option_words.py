"""Words in options: devices, and the baselines to update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_DEVICE = "cuda"
"""The device if neither an option, a setting nor a marker names a device."""
EMULATED = "emulated:"
"""Prefix for emulated GPUs."""
NO_CUDA = "no CUDA device"
"""Beginning of the reason if a test is unmeasured without a GPU."""
NO_CUDNN = "none"
"""The release of cuDNN in an environment's details if convolutions ran and cuDNN did not plan them."""
LACKS_WORKSPACES = "without cuDNN the peak lacks workspaces of convolutions"
"""Prefix of a measurement's note if a workspace may have raised the peak."""
LOWER_BOUND = "lower bound"
"""The detail of an environment for recurrent layers on an emulated GPU, whose memory is a lower bound."""
EMULATED_SLUG = "emulated-"


def nearest_device(word: str, valid: list[str]) -> str:
    """Return the valid name nearest to a word. ``gpu`` stands for ``cuda``, even if other names are spelled more alike."""
    from pytest_gpumem.base.units import nearest

    return nearest(DEFAULT_DEVICE if word.lower() == "gpu" else word, valid)


UpdateMode = Literal["new", "improved", "all"]
UPDATE_MODES: tuple[UpdateMode, ...] = ("new", "improved", "all")
Routing = Literal["balanced", "worst"]
ROUTINGS: Mapping[str, str] = {
    "balanced": "The experts get tokens in turn, so all have the same share. If a router masks groups of experts, the turn is "
    "among the experts that are left to tokens with the same mask.",
    "worst": "The first experts that are not masked get all tokens.",
}
"""Assumptions about the choice of experts, for devices that do not compute router values."""
