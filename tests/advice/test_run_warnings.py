"""Warnings of a run: of Python and of loggers, each once, but for what the project hides and what torch logs about itself."""

from __future__ import annotations

import logging
import warnings

import pytest

from pytest_gpumem.measuring.steps.model_step import quietly
from pytest_gpumem.tools.advise.run_warnings import collected_warnings

WARNING = "the fast path is not available"


@pytest.fixture
def library():
    """A logger like that of transformers: with a handler of its own, and nothing for the root logger."""
    logger = logging.getLogger("a_library.models.mamba")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    yield logger
    logging.root.manager.loggerDict.pop(logger.name)


@pytest.fixture(autouse=True)
def _every_warning_is_shown():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_, **__: None
        yield


def test_a_warning_of_python_and_a_log_record_are_kept_once(library):
    with collected_warnings() as kept:
        for _ in range(2):
            library.warning("%s\n  because %s", WARNING, "mamba_ssm is missing")
            warnings.warn("no gradients", UserWarning, stacklevel=1)
        library.error("no kernel")
        library.info("loaded")
    assert kept == [
        f"a_library: {WARNING} because mamba_ssm is missing",
        "UserWarning: no gradients",
        "a_library: no kernel",
    ]


def test_a_warning_is_still_printed_and_both_hooks_are_put_back(library):
    shown, printed = [], []
    warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
    library.handlers[0].handle = lambda record: printed.append(record.getMessage())
    hooks = warnings.showwarning, logging.getLogRecordFactory()
    with collected_warnings():
        warnings.warn("no gradients", UserWarning, stacklevel=1)
        library.warning(WARNING)
    assert (shown, printed) == (["no gradients"], [WARNING])
    assert (warnings.showwarning, logging.getLogRecordFactory()) == hooks


def test_a_hidden_warning_is_not_kept(library):
    with collected_warnings() as kept:
        with quietly():
            warnings.warn("no gradients", UserWarning, stacklevel=1)
            library.warning(WARNING)
        for package in ("torchao", "torch"):
            logging.getLogger(f"{package}.of_a_test").warning("a kernel does not fit this machine")
        with warnings.catch_warnings(record=True):
            warnings.warn("expected by the library", UserWarning, stacklevel=1)
        library.setLevel(logging.ERROR)
        library.warning(WARNING)
    assert kept == []


def test_a_record_with_wrong_arguments_does_not_end_the_run(library):
    library.handlers = [logging.NullHandler()]  # pytest's own raises where a record cannot be printed
    with collected_warnings() as kept:
        library.warning("%d layers", "no number")
    assert kept == []
