"""A session on an emulated GPU begins: before torch, and for the processes that it starts."""

from __future__ import annotations

import pytest

from pytest_gpumem.emulation.before_torch import install
from pytest_gpumem.emulation.load import emulate
from pytest_gpumem.emulation.torch_build import EmulationError
from pytest_gpumem.session.settings import SettingsError, read_table
from pytest_gpumem.values.option_words import EMULATED


def begin(config: pytest.Config) -> None:
    """Emulate the GPU that the option or the settings ask for, if they do.

    Raises:
        pytest.UsageError: It cannot be done here, or is too late, or there is no such GPU.
    """
    word = config.known_args_namespace.gpumem_device
    if word is None:
        try:
            word = (read_table(config.rootpath / "pyproject.toml") or {}).get("device")
        except SettingsError:
            return  # an error when the settings are read
    if not isinstance(word, str) or not word.startswith(EMULATED):
        return
    try:
        emulate(word)
    except (EmulationError, ValueError) as error:
        raise pytest.UsageError(f"--gpumem-device={word}: {error}") from None
    install(word)
