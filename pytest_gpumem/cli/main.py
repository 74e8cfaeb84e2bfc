"""The ``gpumem`` command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import pytest

from pytest_gpumem import __version__
from pytest_gpumem.baselines.place import PlaceError
from pytest_gpumem.baselines.store import StoreError
from pytest_gpumem.baselines.unused import unused
from pytest_gpumem.cli.ab import ab
from pytest_gpumem.cli.advise import advise
from pytest_gpumem.plugin import SESSION

if TYPE_CHECKING:
    from pytest_gpumem.session import GpumemSession


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpumem")
def main() -> None:
    """Keep the baselines of pytest-gpumem, and find out how a model fits into a GPU."""


main.add_command(ab)
main.add_command(advise)


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def prune(*, dry_run: bool, pytest_args: tuple[str, ...]) -> None:
    """Remove baselines of tests that are gone.

    Collects the tests as pytest would with PYTEST_ARGS (paths and options such as --gpumem-store), without running them.
    Only a test file that was collected whole, or that is gone, can lose baselines; those of every device are looked at.
    """
    collected = _Collected()
    # This command has imported the plugin before pytest could, of which pytest warns.
    quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    status = pytest.main(["--collect-only", "-qq", "--no-header", *quiet, *pytest_args], plugins=[collected])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or collected.session is None:
        raise click.ClickException("the tests could not be collected (see above); nothing was removed")
    session, root = collected.session, collected.session.root
    try:
        store = session.store()
        stored = store.keys()
        gone = unused(
            stored,
            measured=session.selection.measured,
            whole_files=session.selection.files,
            exists=lambda file: (root / file).exists(),
        )
        if gone and not dry_run:
            store.change({}, gone)
    except (StoreError, PlaceError) as error:
        raise click.ClickException(str(error)) from None
    for slug, key in gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} {slug}: {key}")
    click.echo(f"{len(gone)} of {len(stored)} baselines {'are' if dry_run else 'were'} unused")


class _Collected:
    """A plugin that remembers the session's knowledge of what was collected."""

    def __init__(self) -> None:
        self.session: GpumemSession | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        # A session makes itself known only when it has something to measure, and here that is in question.
        collecting = config.pluginmanager.get_plugin("gpumem-collecting")
        assert collecting is not None, "the plugin registers it when pytest is configured"
        collecting.session()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session = session.config.stash[SESSION]


if __name__ == "__main__":
    sys.exit(main())
