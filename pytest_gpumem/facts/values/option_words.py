"""Words in the values of options, settings and environments: devices, update modes and assumed routings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_DEVICE = "cuda"
"""The device that is measured if no option, setting or marker names a device."""
EMULATED = "emulated:"
"""Prefix of an emulated GPU's name in ``--gpumem-device``: ``emulated:h100``."""
NO_CUDA = "no CUDA device"
"""Prefix of the reason for which a test stays ``unmeasured`` on a machine without a GPU."""
NO_CUDNN = "none"
"""The text in a baseline's environment instead of cuDNN's release, if convolutions ran without cuDNN."""
LACKS_WORKSPACES = "without cuDNN the peak lacks workspaces of convolutions"
"""Prefix of the note on a measurement whose true peak may be higher, because cuDNN was not there to report workspaces."""
NOT_SEEN = "not seen"
"""Prefix of the note on a process with torch or CUDA that a test started and that does not report its memory."""
LOWER_BOUND = "lower bound"
"""The text in a baseline's environment if recurrent layers ran on an emulated GPU, which can underestimate their memory."""
EMULATED_SLUG = "emulated-"


def nearest_device(word: str, valid: list[str]) -> str:
    """Return the valid device name that is spelled most like a word. The word ``gpu`` always means ``cuda``."""
    from pytest_gpumem.base.units import nearest

    return nearest(DEFAULT_DEVICE if word.lower() == "gpu" else word, valid)


UpdateMode = Literal["new", "improved", "all"]
UPDATE_MODES: tuple[UpdateMode, ...] = ("new", "improved", "all")
Routing = Literal["balanced", "worst"]
ROUTINGS: Mapping[str, str] = {
    "balanced": "Tokens choose the experts in turn, so every expert gets the same share of the tokens. If a router masks "
    "some experts for a token, all tokens with the same mask choose in turn among the other experts.",
    "worst": "Every token chooses the first experts that are not masked, so these experts get all tokens.",
}
"""The assumptions that a user can make about the choice of experts on an emulated GPU, which does not compute router
scores."""
