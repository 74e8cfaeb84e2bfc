"""Every operator that torch has samples for, on an emulated GPU whose memory was used before."""

from __future__ import annotations

import pytest

from tests.emulated.operators import OPERATORS


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OPERATORS)
def test_no_operator_depends_on_what_lay_in_memory_without_a_word(processes, kind):
    """Torch has samples of 700 operators of strided tensors, 200 of nested ones and 300 of sparse ones: minutes each."""
    source = f"from tests.emulated.operators import main\nmain({kind!r})"
    done = processes.run(source, new=True, timeout=7200)
    *different, count = done.stdout.splitlines()
    assert (different, done.returncode) == ([], 0), done.stdout + done.stderr
    assert int(count.partition(" ")[0]) >= 200
