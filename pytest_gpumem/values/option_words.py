"""Words of options: devices, and which baselines an update writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_DEVICE = "cuda"
"""The word of the device that is used where nobody names one."""
EMULATED = "emulated:"
"""Prefix of the words of emulated GPUs."""
NO_CUDA = "no CUDA device"
"""Beginning of the reason why a test is unmeasured where there is no GPU."""
NO_CUDNN = "none"
"""Stands for the release of cuDNN, among the details of an environment, where convolutions ran and none planned them."""
LACKS_WORKSPACES = "without cuDNN the peak lacks workspaces of convolutions"
"""Prefix of a measurement's note, where a workspace could have raised the peak."""
LOWER_BOUND = "lower bound"
"""Stands for what recurrent layers take, among the details of an environment, where they ran on an emulated GPU."""
EMULATED_SLUG = "emulated-"


def nearest_device(word: str, valid: list[str]) -> str:
    """Return the name nearest to that of a device: ``gpu`` is closer to ``cuda`` than its letters say."""
    from pytest_gpumem.units import nearest

    return nearest(DEFAULT_DEVICE if word.lower() == "gpu" else word, valid)


UpdateMode = Literal["new", "improved", "all"]
UPDATE_MODES: tuple[UpdateMode, ...] = ("new", "improved", "all")
Routing = Literal["balanced", "worst"]
ROUTINGS: Mapping[str, str] = {
    "balanced": "The experts get tokens in turn, so all have the same share. If a router masks groups of experts, the turn is "
    "among the experts that are left to tokens with the same mask.",
    "worst": "The first experts that are not masked get all tokens.",
}
"""Assumptions about the experts that get tokens, for devices that do not compute the values which choose them."""
