"""What the suite leaves to chance: nothing, unless it is asked to explore.

A plugin. The order of the tests and the examples of property tests are the same in every run; `make explore` draws new ones.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

SEED = 1
"""Of the order of tests, and of the random numbers that each begins with, where no ``--randomly-seed`` is given."""
EXAMPLES = 40
"""Of a property, the same in every run: more would show again what they showed the last time."""
EXAMPLES_TO_EXPLORE = 1000


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed before pytest-randomly draws one. Workers of pytest-xdist are given theirs."""
    if getattr(config.option, "randomly_seed", None) == "default" and not hasattr(config, "workerinput"):
        config.option.randomly_seed = SEED


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    """Have Hypothesis make its generator of random numbers before `tests.support.processes` hides what will hold it.

    It looks for the holder among the objects that the collector sees, with the first example. From Python 3.14 on a dictionary is
    one of them also while it holds nothing that is, and so among those that are hidden.
    """
    if "hypothesis" in sys.modules:
        from hypothesis import given
        from hypothesis.strategies import none

        given(none())(lambda _: None)()


def _register_profiles() -> None:
    """Hypothesis's profiles: ``repeatable``, which is loaded, and ``explore``, for ``--hypothesis-profile``.

    How long an example takes to draw or to run is a matter of the machine's load, and fails nothing in either. What Hypothesis
    itself chooses depends on whether it runs in CI.
    """
    from hypothesis import HealthCheck, settings

    unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("repeatable", unhurried, derandomize=True, database=None, max_examples=EXAMPLES)
    settings.register_profile(
        "explore", unhurried, derandomize=False, max_examples=EXAMPLES_TO_EXPLORE, print_blob=True
    )
    settings.load_profile("repeatable")


# On a machine with a GPU, `make gpu` runs with what is there. Before hypothesis's own plugin looks for a profile.
if importlib.util.find_spec("hypothesis") is not None:
    _register_profiles()
