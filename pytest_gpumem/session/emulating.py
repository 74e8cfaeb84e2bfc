"""A session on an emulated GPU begins: before torch, and for the processes that it starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.config.settings import named_device, own_gpus_in, read_table
from pytest_gpumem.emulated_process.before_torch import gpu_told, install
from pytest_gpumem.emulated_process.start import emulate
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.gpus import emulated_gpu
from pytest_gpumem.values.option_words import EMULATED
from pytest_gpumem.variables import EMULATED_CARD


def begin(config: pytest.Config) -> None:
    """Emulate the GPU that the option or the settings ask for, if they do.

    Raises:
        pytest.UsageError: It cannot be done here, or is too late, or there is no such GPU.
    """
    known = config.known_args_namespace
    try:
        table = read_table(config.rootpath / "pyproject.toml") or {}
    except SettingsError:
        table = {}  # an error when the settings are read
    word = table.get("device") if known.gpumem_device is None else known.gpumem_device
    if not isinstance(word, str) or not word.startswith(EMULATED):
        return
    try:
        # Where this session is of a project that another one was started for, that has told it of its GPU.
        own = {**gpu_told(), **own_gpus_in(table, "pyproject.toml: [tool.gpumem]")}
        gpu = emulated_gpu(word, own)
        emulate(gpu)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    except (EmulationError, ValueError) as error:
        raise pytest.UsageError(f"{named_device(word, typed=known.gpumem_device is not None)}: {error}") from None
    distributes = getattr(known, "numprocesses", None) or getattr(known, "tx", None)
    if distributes and (known.gpumem_pack or table.get("pack") is True):
        _share_a_card(config)
    install(gpu.device)


def _share_a_card(config: pytest.Config) -> None:
    """Give the workers that this process will start one card together, unless they have one already."""
    if os.environ.get(EMULATED_CARD):
        return
    folder = tempfile.TemporaryDirectory(prefix="gpumem-card-")
    os.environ[EMULATED_CARD] = str(Path(folder.name, "card"))

    def give_back() -> None:
        os.environ.pop(EMULATED_CARD, None)
        folder.cleanup()

    config.add_cleanup(give_back)
