"""A library that is loud while it loads is not heard, and its loudness afterwards is nobody's loss."""

from __future__ import annotations

import logging
import sys

import pytest

from pytest_gpumem.measuring.steps.model_step import import_quietly


def test_what_a_library_says_while_it_loads_is_not_heard(tmp_path, monkeypatch, caplog):
    source = "import logging, warnings\nlogging.getLogger('loud').warning('loading')\nwarnings.warn('old')\nvalue = 1\n"
    (tmp_path / "loud_library.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    # The suite makes warnings errors.
    assert import_quietly("loud_library").value == 1
    assert caplog.messages == []
    logging.getLogger("loud").warning("working")
    assert caplog.messages == ["working"]
    del sys.modules["loud_library"]


def test_a_library_that_is_not_there_is_told_and_logging_goes_on(caplog):
    with pytest.raises(ImportError, match="no_such_library"):
        import_quietly("no_such_library")
    logging.getLogger("loud").warning("working")
    assert caplog.messages == ["working"]
