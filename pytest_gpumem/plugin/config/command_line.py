"""Find out whether the command line selects only some tests, and define the command that runs an item again."""

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
"""The stash key for an item's `Command`, if ``pytest ID`` cannot run the item again."""

WORKER_IS_WHOLE = "gpumem_whole"
"""The key in a pytest-xdist worker's input under which the controller stores its result of `is_whole_run`, so all workers
have the same result."""

SELECTING = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob", "gpumem_model", "pyargs")
"""Options of pytest and of this plugin that select only some of the tests."""
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
"""Options of pytest-split, pytest-shard, pytest-test-groups, pytest-picked and pytest-testmon that select only some of the
tests."""
_SETTINGS = ("addopts", "testpaths", "python_files", "python_classes", "python_functions", "norecursedirs")
"""pytest's settings that decide which files, classes and functions are collected."""


def is_whole_run(config: pytest.Config) -> bool:
    """Return whether the user typed no paths and no option that selects tests. In such a run, only settings can leave tests
    out.

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
    # An option from a conftest.py may select tests as well, for example the project's own `--shard 1`.
    own_options = typed.keys() - vars(config.known_args_namespace).keys()
    overridden_settings = {word.partition("=")[0] for word in typed.get("override_ini") or ()}
    selecting = ("file_or_dir", *SELECTING, *_SELECTING_OF_PLUGINS, *own_options)
    if any(typed.get(name) != default.get(name) for name in selecting) or overridden_settings & {*_SETTINGS}:
        return False
    # If pytest was started below the root directory, without `testpaths`, it collects only the current folder.
    uses_current_folder = config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR
    return not uses_current_folder or config.invocation_params.dir == config.rootpath


def selects(config: pytest.Config) -> bool:
    """Return whether an option, typed or in ``addopts``, selects only some of the tests in the collected files."""
    return any(getattr(config.option, name, None) for name in SELECTING) or any("::" in word for word in config.args)
