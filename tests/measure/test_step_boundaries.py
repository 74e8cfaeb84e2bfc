"""The boundaries of a loop's steps, in the process that runs the loop."""

from __future__ import annotations

import os

import pytest
import torch

from pytest_gpumem.measuring.measure.step_boundaries import StepBoundaries


# torch's CUDA build has a thread from its import on, and from Python 3.15 on this warning can be an error.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_child_that_steps_the_loops_optimizer_ends_no_step_of_the_loop():
    found = []
    boundaries = StepBoundaries(lambda: found.append(os.getpid()))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with boundaries.watched():
        optimizer.step()
        assert found == [os.getpid()]
        child = os.fork()
        if not child:
            optimizer.step()
            os._exit(len(found))
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
