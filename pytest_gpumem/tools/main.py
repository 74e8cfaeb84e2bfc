"""The ``gpumem`` command. To start quickly, the command imports only the requested subcommand's module."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from pytest_gpumem import __version__
from pytest_gpumem.base.terminals import wants_colour
from pytest_gpumem.base.units import nearest


class Subcommand(NamedTuple):
    """A subcommand's line in ``gpumem --help``, which is printed without importing the subcommand's module below `tools`."""

    help: str
    module: str


GROUPS = {
    "First steps": {
        "init": Subcommand("Set up a repository: settings, a workflow and first baselines.", "init.command"),
        "doctor": Subcommand("Check which measurements work here, and how to enable the others.", "doctor.command"),
        "run": Subcommand("Measure and gate the training steps of a script.", "run.command"),
    },
    "Baselines and reports": {
        "show": Subcommand("Show the baselines in the store.", "store.show"),
        "history": Subcommand("Show when and why a baseline changed.", "store.history"),
        "prune": Subcommand("Remove the baselines of tests that no longer exist.", "store.prune"),
        "accept": Subcommand("Write baselines from the report of a session on another machine.", "accept.command"),
        "merge": Subcommand("Merge the reports of shards into one report with one verdict.", "report.merge"),
        "export": Subcommand("Write the figures in session reports for another tool.", "report.export"),
        "comment": Subcommand("Post a report in a pull request on GitHub, or in an issue.", "report.comment"),
    },
    "Changes": {
        "why": Subcommand("Explain the verdict on one test, from the last report.", "report.why"),
        "compare": Subcommand("Compare two reports, two revisions of the store, or two devices.", "report.compare"),
        "ab": Subcommand("Compare two revisions, or two sets of packages, by running both.", "ab.command"),
        "bisect": Subcommand("Find the commit or package release that caused a regression.", "bisect.command"),
        "cache": Subcommand("List the cached environments of ab and bisect, or remove them.", "ab.cache_command"),
    },
    "GPUs": {
        "advise": Subcommand("Find a config with which a model's step fits into a GPU.", "advise.command"),
        "fit": Subcommand("Find the GPUs into which an unchanged program fits.", "fit.command"),
        "emulate": Subcommand("Run a program on an emulated GPU and print its memory peaks.", "emulate.command"),
    },
}
"""The subcommands by the title of their group in the help."""

COMMANDS = {name: subcommand for group in GROUPS.values() for name, subcommand in group.items()}


class _LazyGroup(click.Group):
    """A click group that imports a subcommand when the user types it, for example ``store/show.py`` for ``gpumem show``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"pytest_gpumem.tools.{COMMANDS[cmd_name].module}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), subcommand.help) for name, subcommand in group.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [
            CompletionItem(name, help=subcommand.help)
            for name, subcommand in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ImportError as error:
            from pytest_gpumem.emulating.emulation.load import emulation_hint

            hint = emulation_hint(str(error), "--device=emulated:h100")
            if hint is None:
                raise
            raise click.UsageError(hint) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # During shell completion (``resilient_parsing``), click must not raise an error.
        if not ctx.resilient_parsing and name not in COMMANDS and not name.startswith("-"):
            raise click.UsageError(f"No such command {name!r}; {nearest(name, list(COMMANDS))}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pytest-gpumem")
@click.pass_context
def main(context: click.Context) -> None:
    """Work with the baselines and reports of pytest-gpumem, and find out how a model fits into a GPU.

    `pytest --gpumem-baseline` measures tests, and fails a test if its figures exceed the accepted figures, the baseline.
    These commands read baselines and reports from pytest, run tests at two revisions, or run a model or a program on an
    emulated GPU. They read the settings of the project in the current folder, as pytest does.

    Exit status: 0 if all is well, 1 if a result is worse than it should be, 2 for wrong usage or input, such as a file that is
    not a report, 130 after Ctrl-C in a command that runs tests or models. The help of each command lists its own exit statuses.
    \f
    ## Tasks

    | task | command |
    |---|---|
    | Set up a repository | `gpumem init` |
    | Check what works here | `gpumem doctor` |
    | List the baselines | `gpumem show` |
    | See how a baseline changed | `gpumem history TEST` |
    | Compare the store at two commits | `gpumem compare main HEAD` |
    | Read a failure in full | `gpumem why TEST` |
    | Merge the reports of shards | `gpumem merge shard-*.json` |
    | Accept figures measured in CI | `gpumem accept gpumem.json` |
    | Find unused baselines | `gpumem prune --dry-run` |
    | Compare a branch with main | `gpumem ab main` |
    | Check an upgrade | `gpumem ab --head-with "torch==2.15.*"` |
    | Find the commit that regressed | `gpumem bisect --good v1.2 TEST` |
    | Fit a model into a GPU | `gpumem advise hf:ORG/NAME --fits 24GB` |
    | Measure a program without a GPU | `gpumem emulate l4 -- python train.py` |
    | Find GPUs for a program | `gpumem fit train.py --batch 8` |
    | Gate a training script | `gpumem run train.py --gpumem-baseline` |

    ## Names

    `pytest-gpumem` and `python -m pytest_gpumem` are the same command as `gpumem`. On PyPI, another project is named `gpumem`.
    Its package installs a command `gpumem`, too. If the other command comes first on the `PATH`, messages of this project
    tell you to type `pytest-gpumem`, and `pytest-gpumem doctor` names its file. This project never runs the other command.

    ## Standard streams

    - Options for an output file accept `-` for standard output. With `--report -`, `gpumem merge`, `gpumem ab` and
      `gpumem bisect` write JSON to standard output, and print everything else to standard error.
    - Arguments for a report accept `-` for standard input.
    - A file named `-` is written `./-`.

    ```sh
    gpumem merge shard-*.json --report - | gpumem export bencher - > figures.json
    ```

    ## Colours

    The commands print colours under the same conditions as pytest: on a terminal, unless the environment variables `PY_COLORS`,
    `NO_COLOR`, `FORCE_COLOR` or `TERM` decide otherwise.

    ## Completion

    Add this line to your shell's settings. The shell then completes commands, options, tests with baselines, devices, names of
    emulated GPUs, metrics and formats:

    | shell | settings | line |
    |---|---|---|
    | bash | `~/.bashrc` | `eval "$(_GPUMEM_COMPLETE=bash_source gpumem)"` |
    | zsh | `~/.zshrc` | `eval "$(_GPUMEM_COMPLETE=zsh_source gpumem)"` |
    | fish | `~/.config/fish/completions/gpumem.fish` | `_GPUMEM_COMPLETE=fish_source gpumem \\| source` |

    - For the command name `pytest-gpumem`, replace the variable `_GPUMEM_COMPLETE` by `_PYTEST_GPUMEM_COMPLETE`.
    - The shell completes tests with a baseline in the store. `--store` or the nearest `pyproject.toml` names this store. A
      store at a URL is not read. No code of the project runs.
    - bash splits words at colons, so it completes a test's name without the file: `test_train`. After
      `COMP_WORDBREAKS=${COMP_WORDBREAKS//:}`, it completes the whole id: `tests/test_gpt.py::test_train`.
    """
    context.color = wants_colour(os.environ)


if __name__ == "__main__":
    sys.exit(main())
