"""Find out whether the command line leaves tests out, and which command runs a test (an item) again."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_gpumem.plugin.config.options import PARSER


class Command(NamedTuple):
    """A command that runs an item again, for example ``gpumem run --gpumem-update=all train.py``.

    Options go between ``words`` (``gpumem run``) and ``rest`` (``train.py``).
    """

    words: tuple[str, ...]
    rest: tuple[str, ...] = ()


COMMAND: pytest.StashKey[Command] = pytest.StashKey()
"""The command that runs an item again, for items that ``pytest ID`` does not run."""

WORKER_IS_WHOLE = "gpumem_whole"
"""The key for `is_whole_run` in a worker's input. A worker of pytest-xdist cannot compute the answer, because it
gets all arguments as if they were typed."""

SELECTING = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob", "gpumem_model", "pyargs")
"""Options in pytest and this plugin that leave tests out of a run."""
_SELECTING_OF_PLUGINS = (
    "splits",
    "group",
    "num_shards",
    "shard_id",
    "test_group",
    "test_group_count",
    "picked",
    "testmon",
)
"""Options in pytest-split, pytest-shard, pytest-test-groups, pytest-picked and pytest-testmon that leave tests out."""
_SETTINGS = ("addopts", "testpaths", "python_files", "python_classes", "python_functions", "norecursedirs")
"""pytest's settings for finding tests."""


def is_whole_run(config: pytest.Config) -> bool:
    """Return whether no paths and no test selection were typed, so only settings can leave tests out.

    For example, ``pytest -n 2 --gpumem-baseline`` in the root directory is a whole run, even with ``addopts = -k fast``. A run
    with a typed ``-k fast`` is not.
    """
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        return bool(workerinput.get(WORKER_IS_WHOLE, False))
    parser = config.stash.get(PARSER, None)
    if parser is None:
        return False
    typed, default = (
        vars(parser.parse_known_args([str(word) for word in words])) for words in (config.invocation_params.args, ())
    )
    # An option that a conftest.py adds may select tests, for example the project's own `--shard 1`.
    own_options = typed.keys() - vars(config.known_args_namespace).keys()
    overridden_settings = {word.partition("=")[0] for word in typed.get("override_ini") or ()}
    selecting = ("file_or_dir", *SELECTING, *_SELECTING_OF_PLUGINS, *own_options)
    if any(typed.get(name) != default.get(name) for name in selecting) or overridden_settings & {*_SETTINGS}:
        return False
    # In another folder than the root directory, pytest collects only this folder.
    uses_current_folder = config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR
    return not uses_current_folder or config.invocation_params.dir == config.rootpath


def selects(config: pytest.Config) -> bool:
    """Return whether an option, typed or from the settings, leaves tests out of the collected files."""
    return any(getattr(config.option, name, None) for name in SELECTING) or any("::" in word for word in config.args)
