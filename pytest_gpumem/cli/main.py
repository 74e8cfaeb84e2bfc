"""The ``gpumem`` command: its subcommands, each in a module that is imported when it is used."""

from __future__ import annotations

import importlib
import os
import sys

import click
from click.shell_completion import CompletionItem

from pytest_gpumem import __version__
from pytest_gpumem.terminals import wants_colour
from pytest_gpumem.units import nearest

_COMMANDS = {
    "ab": "Run two revisions in turn here, and judge what changed.",
    "accept": "Write baselines from the report of a session that ran elsewhere.",
    "advise": "Find the config with which a model's step fits into a GPU.",
    "bisect": "Find the commit, or the release of a package, that did it.",
    "cache": "List and clear the environments of requirements that were compared.",
    "comment": "Put a report into the pull request, as one comment.",
    "compare": "Compare figures that are there: reports, revisions, devices.",
    "doctor": "Tell what can be measured here, and how to get the rest.",
    "emulate": "Run a program on an emulated GPU, and tell its peaks.",
    "export": "Give the figures of reports to another tool.",
    "fit": "Find the GPUs that a program, as it is, fits into.",
    "history": "Tell how a baseline came to be what it is.",
    "init": "Set a repository up: settings, a workflow and first baselines.",
    "merge": "Make one report and one verdict of the shards of a run.",
    "prune": "Remove baselines of tests that are gone.",
    "run": "Measure and gate the training steps of a script.",
    "show": "Show the baselines that are in the store.",
    "why": "Tell everything about one test, from the last report.",
}
"""Each subcommand with its line in the help of all, which imports none of them."""


class _LazyGroup(click.Group):
    """A group that imports a subcommand when it is used: the function of its name in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"pytest_gpumem.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=told) for name, told in _COMMANDS.items() if name.startswith(incomplete)]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # A shell that completes words shows no error.
        if not ctx.resilient_parsing and name not in _COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}; {nearest(name, list(_COMMANDS))}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pytest-gpumem")
@click.pass_context
def main(context: click.Context) -> None:
    """Keep the baselines of pytest-gpumem, read its reports, and find out how a model fits into a GPU.

    Tests are measured and gated by pytest itself (pytest --gpumem-baseline); these commands look at what it left, and at
    two revisions side by side. Those that need settings take them from the project in this folder, as pytest does.

    \b
    A gate for a repository:        gpumem init
    What can be measured here:      gpumem doctor
    What is in the store:           gpumem show
    How a figure came to be:        gpumem history TEST
    What changed in the store:      gpumem compare main HEAD
    Why a test failed, in full:     gpumem why TEST
    One verdict of several shards:  gpumem merge shard-*.json
    Accept what CI has measured:    gpumem accept gpumem.json
    Whose baselines are unused:     gpumem prune --dry-run
    Is this branch slower:          gpumem ab main
    What does an upgrade cost:      gpumem ab --head-with "transformers==5.0.0"
    Which change did it:            gpumem bisect --good v1.2 --bad main TEST
    What fits into this GPU:        gpumem advise MODULE:FACTORY --fits 24GB
    A program's peaks on no GPU:    gpumem emulate l4 -- python train.py
    Which GPUs a program fits:      gpumem fit train.py --batch 8
    A training script, gated:       gpumem run train.py --gpumem-baseline

    Exit status: 0 when all is well, 1 when something is worse than it should be, 2 for wrong input or usage. Each command
    says what that means for it.
    """
    context.color = wants_colour(os.environ)


if __name__ == "__main__":
    sys.exit(main())
