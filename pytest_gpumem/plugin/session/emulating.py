"""Start the emulation of a GPU for all processes in a session, before torch is imported."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pytest_gpumem.base.errors import EmulationError, SettingsError
from pytest_gpumem.base.variables import EMULATED_CARD
from pytest_gpumem.emulating.emulated_process.before_torch import described_gpus, install
from pytest_gpumem.emulating.emulated_process.start import emulate
from pytest_gpumem.emulating.emulation.gpus import emulated_gpu
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.plugin.config.settings import named_device, own_gpus_in, read_table


def emulate_gpu_of_settings(config: pytest.Config) -> None:
    """Emulate a GPU if the option or the settings name an emulated GPU.

    Raises:
        pytest.UsageError: This machine cannot emulate GPUs, torch is already imported, or the GPU is unknown.
    """
    arguments = config.known_args_namespace
    try:
        table = read_table(config.rootpath / "pyproject.toml") or {}
    except SettingsError:
        table = {}  # The session raises this error later, when reading its settings.
    word = table.get("device") if arguments.gpumem_device is None else arguments.gpumem_device
    if not isinstance(word, str) or not word.startswith(EMULATED):
        return
    try:
        # If a session in another project started this session, the device may be one of the other project's cards, which an
        # environment variable describes.
        own_gpus = {**described_gpus(), **own_gpus_in(table, "pyproject.toml: [tool.gpumem]")}
        gpu = emulated_gpu(word, own_gpus)
        emulate(gpu)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    except (EmulationError, ValueError) as error:
        raise pytest.UsageError(f"{named_device(word, typed=arguments.gpumem_device is not None)}: {error}") from None
    distributes = getattr(arguments, "numprocesses", None) or getattr(arguments, "tx", None)
    if distributes and (arguments.gpumem_pack or table.get("pack") is True):
        _share_a_card(config)
    install(gpu.device)


def _share_a_card(config: pytest.Config) -> None:
    """Let the workers of this process share one card, unless `GPUMEM_EMULATED_CARD` is already set."""
    if os.environ.get(EMULATED_CARD):
        return
    folder = tempfile.TemporaryDirectory(prefix="gpumem-card-")
    os.environ[EMULATED_CARD] = str(Path(folder.name, "card"))

    def remove_card() -> None:
        os.environ.pop(EMULATED_CARD, None)
        folder.cleanup()

    config.add_cleanup(remove_card)
