"""``gpumem history``: lists when, why and by whom a baseline was changed, from the git history of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import BackendError, GitError
from pytest_gpumem.base.git import is_shallow
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.baselines.history import (
    Event,
    events_of,
    file_changes,
    names_in,
    paths_ever,
    state_in,
    texts_of,
)
from pytest_gpumem.judging.baselines.store import path_of
from pytest_gpumem.judging.gate.baseline import Baseline, Key
from pytest_gpumem.reporting.reports.history import history_lines
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.one_test import check_is_no_file, keys_of_one_test, no_such_test
from pytest_gpumem.tools.console.project import checkout_of, committed, project_settings, read_baselines, store_backend
from pytest_gpumem.tools.console.store_options import slug_option, store_option
from pytest_gpumem.tools.console.streams import InputError, input_errors, screen, write_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.judging.baselines.backend import Backend
    from pytest_gpumem.reporting.reports.stored import StoredBaseline

_Entry = tuple[str, Key, Baseline | None]
"""The device's slug, the key and the baseline. The baseline is ``None`` if it was removed from the store."""
_SHALLOW = (
    "this clone is shallow, so changes are missing: fetch them with `git fetch --unshallow`, "
    "or on GitHub Actions with fetch-depth: 0 for actions/checkout"
)


@click.command()
@click.argument("test", shell_complete=completion.tests)
@click.option(
    "--metric",
    type=click.Choice(list(METRICS)),
    metavar="METRIC",
    default="peak_allocated",
    show_default=True,
    help="Show the changes in this metric, for example `step_time`.",
)
@slug_option
@store_option
def history(*, test: str, metric: str, slug: str | None, store: str | None) -> None:
    """Show when and why a baseline changed, from the git history of the store.

    The command prints a row for each commit that changed the metric, and a plot of the values. The latest commit comes
    last. Each measurement on each device has its own table.

    TEST is a test's id, for example `tests/test_gpt.py::test_train`, or a part that no other test's id contains. To see
    only one measurement, add its name: `test_train (train_step)`. If the baseline was removed from the store, give the
    test's full id.

    \b
    Examples:
      gpumem history tests/test_gpt.py::test_train_step
      gpumem history test_train_step --metric step_time
      gpumem history "test_train_step (train_step)" --slug emulated-h100-80gb

    Exit status: 0 if the history was printed, 1 after Ctrl-C, 2 for wrong usage, or if TEST has no baseline or matches
    several tests, or the store is not in a git repository.
    \f
    ## Rows

    - A row shows the date, the commit and its author, the new value and its change, packages whose version changed in the
      same commit, the reason from `--gpumem-reason`, and the first line of the commit message. Empty columns are left out.
    - `new`, `gone` and `back` mean that the baseline was added, removed or restored. `other work` means that the
      workload changed, so the old and the new value measure different steps.
    - Commits that changed the baseline but not this metric are counted below the table. Such a commit has a row only if it
      changed the workload or a package version, or if it has a reason.
    - Uncommitted changes come last.
    - If a file in the store was renamed, its history includes the old name if git detects the rename. Each commit in a
      merged branch has its own row. A merge commit has a row only if its value differs from the values in both parents.
    - The axis of the plot begins at the smallest value.

    ## Shallow clones

    In a shallow clone, the oldest row has no author, because the change may come from an earlier commit that the clone
    lacks. `git fetch --unshallow` fetches the missing commits. On GitHub Actions, set `fetch-depth: 0` for
    `actions/checkout`.
    """
    settings = project_settings(store)
    backend = store_backend(settings)
    checkout, folder = checkout_of(backend)
    below = "" if folder == "." else f"{folder}/"
    with input_errors(GitError, BackendError):
        entries = _named(test, read_baselines(backend, slug)) or _removed(test, checkout.top, folder, below, slug)
        if not entries:
            check_is_no_file(test)
            keys = [baseline.key for baseline in read_baselines(backend, slug)]
            hint = f"`{command_name()} show` lists the baselines"
            raise no_such_test(test, f"no commit ever contained a baseline of {test!r}", keys, hint)
        at_head = committed("HEAD", backend)[1]
        histories = [(on, key, _events(checkout.top, below, at_head, on, key, entry)) for on, key, entry in entries]
        shallow = is_shallow(checkout.top)
    values = {
        state.metrics.get(metric)
        for _, _, events in histories
        for event in events
        for state in (event.before, event.after)
        if isinstance(state, Baseline)
    }
    if values <= {None}:
        raise InputError(f"no baseline of {test!r} ever had {metric}; `{command_name()} show -v` lists their metrics")
    for on, key, events in histories:
        title = f"{key} on {on}: {METRICS[metric].title}"
        write_lines([title, "", *history_lines(events, metric, settings.units, screen()), ""])
    if shallow:
        click.echo(_SHALLOW, err=True)


def _named(name: str, baselines: Sequence[StoredBaseline]) -> Sequence[_Entry]:
    """Return the baselines of the test matching ``name``. The result is empty if no test matches.

    Raises:
        InputError: ``name`` matches several tests.
    """
    keys = keys_of_one_test(name, (baseline.key for baseline in baselines))
    return [baseline for baseline in baselines if baseline.key in keys]


def _removed(name: str, top: Path, folder: str, below: str, device: str | None) -> Sequence[_Entry]:
    """Return the removed baselines of the test with exactly this id. Raises `GitError`."""
    file, _, test = name.partition("::")
    if not test:
        return []
    removed: list[_Entry] = []
    for path in sorted(paths_ever(top, folder)):
        slug = path.removeprefix(below).partition("/")[0]
        if path != below + path_of(slug, file) or device not in (None, slug):
            continue
        texts = texts_of(top, file_changes(top, path))
        # The text may end with the name of a measurement: "test_gpt.py::test_train (train_step)".
        for test_name in {test, test.rpartition(" (")[0]} - {""}:
            keys = [Key(file, test_name, measurement) for measurement in names_in(texts, test_name)]
            removed += [(slug, key, None) for key in keys if name in (str(key), f"{file}::{test_name}")]
    return sorted(removed, key=lambda entry: (entry[1], entry[0]))


def _events(top: Path, below: str, at_head: Backend, slug: str, key: Key, entry: Baseline | None) -> list[Event]:
    """Return the changes to a baseline in git, the oldest first, and then its uncommitted change if there is one.

    Raises `InputError`, `GitError` and `BackendError`.
    """
    path = path_of(slug, key.file)
    changes = file_changes(top, below + path)
    events = events_of(changes, texts_of(top, changes), key)
    if not events:
        raise InputError(f"the baseline of {key} is in no commit yet: run `git add {below}{path}` and commit it")
    text = at_head.read(path)
    last = None if text is None else state_in(text.encode("utf-8"), key)
    return events if last == entry else [*events, Event(None, last, entry)]
