"""The words on the command line, apart from the settings: do they leave tests out, and which words run an item again?"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_gpumem.config.options import PARSER


class Command(NamedTuple):
    """A command that runs an item again. Options go between ``words`` (``gpumem run``) and ``rest`` (``train.py``)."""

    words: tuple[str, ...]
    rest: tuple[str, ...] = ()


COMMAND: pytest.StashKey[Command] = pytest.StashKey()
"""The command that runs an item again, if pytest with the item's id does not."""

WORKER_IS_WHOLE = "gpumem_whole"
"""The key by which a worker of pytest-xdist learns it: the worker is given all arguments as if they were typed."""

SELECTING = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob", "gpumem_model", "pyargs")
"""Options of pytest, and one of this plugin, by which a run leaves tests out."""
_OF_PLUGINS = ("splits", "group", "num_shards", "shard_id", "test_group", "test_group_count", "picked", "testmon")
"""The same of pytest-split, pytest-shard, pytest-test-groups, pytest-picked and pytest-testmon."""
_SETTINGS = ("addopts", "testpaths", "python_files", "python_classes", "python_functions", "norecursedirs")
"""Settings of pytest that decide which tests there are."""


def is_whole_run(config: pytest.Config) -> bool:
    """Return whether nobody typed paths or a selection of tests, so that only settings leave tests out.

    For example, ``pytest -n 2 --gpumem-baseline`` in the root directory, also with ``addopts = -k fast``.
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
    # An option that a conftest.py adds may select tests, as `--shard 1` of the project's own.
    own = typed.keys() - vars(config.known_args_namespace).keys()
    overridden = {word.partition("=")[0] for word in typed.get("override_ini") or ()}
    selecting = ("file_or_dir", *SELECTING, *_OF_PLUGINS, *own)
    if any(typed.get(name) != default.get(name) for name in selecting) or overridden & {*_SETTINGS}:
        return False
    # In another folder pytest collects that folder only.
    by_folder = config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR
    return not by_folder or config.invocation_params.dir == config.rootpath


def selects(config: pytest.Config) -> bool:
    """Return whether an option, typed or not, leaves tests out of the files that are collected."""
    return any(getattr(config.option, name, None) for name in SELECTING) or any("::" in word for word in config.args)
