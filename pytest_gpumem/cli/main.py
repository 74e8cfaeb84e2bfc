"""The ``gpumem`` command: its subcommands, wired together."""

from __future__ import annotations

import sys

import click

from pytest_gpumem import __version__
from pytest_gpumem.cli.ab import ab
from pytest_gpumem.cli.advise import advise
from pytest_gpumem.cli.comment import comment
from pytest_gpumem.cli.compare import compare
from pytest_gpumem.cli.emulate import emulate
from pytest_gpumem.cli.export import export
from pytest_gpumem.cli.fit import fit
from pytest_gpumem.cli.history import history
from pytest_gpumem.cli.merge import merge
from pytest_gpumem.cli.prune import prune
from pytest_gpumem.cli.show import show


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpumem")
def main() -> None:
    """Keep the baselines of pytest-gpumem, read its reports, and find out how a model fits into a GPU.

    Tests are measured and gated by pytest itself (pytest --gpumem-baseline); these commands look at what it left, and at
    two revisions side by side. Those that need settings take them from the project in this folder, as pytest does.

    \b
    What is in the store:           gpumem show
    How a figure came to be:        gpumem history TEST
    What changed between two:       gpumem compare main HEAD
    One verdict of several shards:  gpumem merge shard-*.json
    Whose baselines are unused:     gpumem prune --dry-run
    Is this branch slower:          gpumem ab main
    What fits into this GPU:        gpumem advise MODULE:FACTORY --fits 24GB
    A program's peaks on no GPU:    gpumem emulate l4 -- python train.py
    Which GPUs a program fits:      gpumem fit train.py --batch 8

    Exit status: 0 when all is well, 1 when something is worse than it should be, 2 for wrong input or usage. Each command
    says what that means for it.
    """


for command in (ab, advise, comment, compare, emulate, export, fit, history, merge, prune, show):
    main.add_command(command)


if __name__ == "__main__":
    sys.exit(main())
