"""``gpumem prune``: removes the baselines of tests that no longer exist or are no longer measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import BackendError, StoreError
from pytest_gpumem.base.units import counted, word_form
from pytest_gpumem.judging.baselines.selecting import unused_baselines
from pytest_gpumem.plugin.config.options import is_measured
from pytest_gpumem.plugin.config.selection import without_group
from pytest_gpumem.plugin.session import SESSION
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.project import run_pytest
from pytest_gpumem.tools.console.streams import InputError, write_lines

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session.process import GpumemSession


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--dry-run", is_flag=True, help="List the baselines to remove, and change nothing.")
@click.argument(
    "pytest_args", metavar="[PYTEST_ARGS]...", nargs=-1, type=click.UNPROCESSED, shell_complete=completion.tests
)
def prune(*, dry_run: bool, pytest_args: tuple[str, ...]) -> None:
    """Remove the baselines of tests that no longer exist or are no longer measured.

    The command collects tests as `pytest PYTEST_ARGS` would, but does not run them. It removes the baselines of tests that
    were not collected, or are not measured. If this machine does not have the device of a baseline, the baseline is removed
    only if its test file no longer exists. A pytest session never removes unused baselines: with --gpumem-baseline or
    --gpumem-update, a complete session lists them.

    PYTEST_ARGS are files, folders, test ids or options for pytest, for example --gpumem-store. If they contain test ids
    (FILE::TEST), only the baselines of these tests can be removed. Otherwise, the baselines of a test can be removed if
    all tests in its file were collected, or if the file no longer exists.

    \b
    Examples:
      gpumem prune --dry-run
      gpumem prune tests/models --gpumem-store=baselines
      gpumem prune tests/models/test_gpt.py::test_train

    Exit status: 0 if the unused baselines were removed or listed, 1 after Ctrl-C, or if the tests cannot be
    collected, the store cannot be read or written, or the store seems to belong to another project, 2 for wrong usage. If
    the status is 1 or 2, nothing was removed.
    \f
    ## Kept baselines

    - A suite can be parametrised over the GPUs of a machine, so two machines may collect different tests. Therefore,
      baselines from other machines' devices are kept as long as their test file exists. The command names these devices.
    - If you name a test by its id, its baselines are removed if the test is not measured, or if this machine does not have
      the device requested by the test. If a test fails because it is no longer measured, the failure shows this command with
      the test's id.
    - If no test file of the store exists below the root directory, the store seems to belong to another project. Then
      nothing is removed.
    """
    collected = _Collector()
    # Drop --gpumem-baseline, because with this option pytest fails if it collects no measured test.
    arguments = [argument for argument in pytest_args if argument != "--gpumem-baseline"]
    status = run_pytest(["--collect-only", "-qq", "--no-header", *arguments], collected)
    if status == pytest.ExitCode.USAGE_ERROR:
        raise InputError("pytest rejected the arguments (see above); nothing was removed")
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or collected.session is None:
        raise click.ClickException("the tests could not be collected (see above); nothing was removed")
    session, root = collected.session, collected.session.root

    def exists(file: str) -> bool:
        return (root / file).exists()

    try:
        store = session.store()
        stored = store.keys()
        files = {key.file for _, key in stored}
        if files and not any(map(exists, files)):
            these = "its only test file is not" if len(files) == 1 else f"none of its {len(files)} test files is"
            raise click.ClickException(
                f"the store seems to belong to another project: {these} below {root}; nothing was removed. Run "
                f"{command_name()} prune in the root directory of the tests, or name it with --rootdir; if the tests are "
                "gone, remove the store's files by hand"
            )
        selection = session.selection
        if collected.names_tests:
            own = [(slug, key) for slug, key in stored if f"{key.file}::{key.test}" in collected.selected]
            idle = collected.not_measured | (session.measured_elsewhere() if own else frozenset())
            candidates = [(slug, key) for slug, key in own if f"{key.file}::{key.test}" in idle]
        else:
            measured = session.living(collected.items)
            candidates = unused_baselines(stored, measured=measured, whole_files=selection.files, exists=exists)
        # `present_devices` imports torch, so call it only if a candidate's test file exists.
        present = session.present_devices() if any(exists(key.file) for _, key in candidates) else frozenset[str]()
        # A suite may be parametrized over a machine's devices, so a machine with another device may collect these tests. Keep
        # their baselines.
        elsewhere = [(slug, key) for slug, key in candidates if slug not in present and exists(key.file)]
        removable = [entry for entry in candidates if entry not in elsewhere]
        if removable and not dry_run:
            store.change({}, removable)
    except (StoreError, BackendError) as error:
        raise click.ClickException(str(error)) from None
    for slug, key in removable:
        write_lines([f"{'would remove' if dry_run else 'removed'} {slug}: {key}"])
    verb = word_form(len(removable), "is", "are") if dry_run else word_form(len(removable), "was", "were")
    click.echo(f"{len(removable)} of {counted(len(stored), 'baseline')} {verb} unused")
    if elsewhere:
        devices = ", ".join(sorted({slug for slug, _ in elsewhere}))
        have = counted(len(elsewhere), "baseline has no test here and was", "baselines have no test here and were")
        click.echo(
            f"{have} kept: this machine does not have the device ({devices}), and a machine with the device may collect the "
            f"tests; run {command_name()} prune on such a machine"
        )


class _Collector:
    """A pytest plugin to store pytest-gpumem's session and the collected tests for this command."""

    def __init__(self) -> None:
        self.session: GpumemSession | None = None
        self.names_tests = False
        """True if the arguments name single tests, not only files and folders."""
        self.items: list[pytest.Item] = []
        """The selected tests."""

    @property
    def selected(self) -> frozenset[str]:
        """The ids of the selected tests."""
        return frozenset(map(without_group, self.items))

    @property
    def not_measured(self) -> frozenset[str]:
        """The ids of the selected tests that are not measured."""
        return frozenset(without_group(item) for item in self.items if not is_measured(item))

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        # pytest-gpumem makes its `GpumemSession` only if a test is measured. This command needs the session in any case.
        collecting = config.pluginmanager.get_plugin("gpumem-collecting")
        assert collecting is not None, "the plugin registers it when pytest is configured"
        collecting.session()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        # Copy the list, because on an emulated GPU pytest-gpumem later deselects tests that are not measured.
        self.items = list(items)
        self.names_tests = any("::" in argument for argument in config.args)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session = session.config.stash[SESSION]
