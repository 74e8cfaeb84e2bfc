"""A process that runs code which a test has written as a text."""

from __future__ import annotations

import os

import pytest

from tests import preloaded


@pytest.fixture
def words_of(tmp_path):
    """Run code in a process, and return the words that it prints."""

    def run(code):
        done = preloaded.run("-c", code, cwd=tmp_path, env=dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()

    return run
