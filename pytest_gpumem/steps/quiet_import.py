"""Imports a library that warns and logs while it loads, which is neither the test's nor its reader's affair."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def import_quietly(name: str) -> ModuleType:
    """The module called ``name``. Raises ``ImportError`` as ``import`` does."""
    disabled = logging.root.manager.disable
    # torchao logs each of its kernels that does not fit this machine, and torch what torchao still does the old way.
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        logging.disable(disabled)
