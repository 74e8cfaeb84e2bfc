"""``gpumem history``: every accepted change of a baseline, by whom and why, out of git."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pytest_gpumem.baselines.errors import BackendError
from pytest_gpumem.baselines.history import Event, events_of, file_changes, names_in, paths_ever, state_in, texts_of
from pytest_gpumem.baselines.store import path_of
from pytest_gpumem.cli import completion
from pytest_gpumem.cli.one_test import check_is_no_file, keys_of_one_test, no_such_test
from pytest_gpumem.cli.project import checkout_of, committed, project_settings, read_baselines, store_backend
from pytest_gpumem.cli.streams import InputError, input_errors, screen, write_lines
from pytest_gpumem.command_name import command_name
from pytest_gpumem.gate.baseline import Baseline, Key
from pytest_gpumem.git import GitError, is_shallow
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.reports.history import history_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpumem.baselines.backend import Backend
    from pytest_gpumem.reports.stored import StoredBaseline

_Entry = tuple[str, Key, Baseline | None]
"""Slug, key and baseline, which is ``None`` where it was removed."""
_SHALLOW = (
    "this clone is shallow, so that changes are missing: fetch them with `git fetch --unshallow`, "
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
    help="The figure to follow, by its name in the store: step_time, flops, peak_reserved, ...",
)
@click.option(
    "--slug",
    metavar="SLUG",
    shell_complete=completion.slugs,
    help="On one device only, by the name of its folder in the store.",
)
@click.option(
    "--store",
    metavar="PATH",
    shell_complete=completion.folders,
    help="Where the baselines lie, if not where the project's settings say.",
)
def history(*, test: str, metric: str, slug: str | None, store: str | None) -> None:
    """Tell how a baseline came to be what it is.

    TEST is a test's id, or a part of it that no other test's has; with (name) behind it, one of its measurements. Each change
    that was committed to the store is shown: when, by whom, from which value to which, and the reason if one was given
    (--gpumem-reason). Files that were renamed are followed; a baseline that is gone by now is found by its whole id.

    \b
    Examples:
      gpumem history tests/test_gpt.py::test_train_step
      gpumem history test_train_step --metric step_time

    Exit status: 0 when there is a history, 2 when there is none: no such baseline, several, or no git repository.
    """
    settings = project_settings(store)
    backend = store_backend(settings)
    checkout, folder = checkout_of(backend)
    below = "" if folder == "." else f"{folder}/"
    with input_errors(GitError, BackendError):
        found = _named(test, read_baselines(backend, slug)) or _removed(test, checkout.top, folder, below, slug)
        if not found:
            check_is_no_file(test)
            keys = [one.key for one in read_baselines(backend, slug)]
            lists = f"`{command_name()} show` lists what there is"
            raise no_such_test(test, f"there is no baseline of {test!r}, and there never was", keys, lists)
        at_head = committed("HEAD", backend)[1]
        histories = [(on, key, _events(checkout.top, below, at_head, on, key, entry)) for on, key, entry in found]
        shallow = is_shallow(checkout.top)
    values = {
        state.metrics.get(metric)
        for _, _, events in histories
        for event in events
        for state in (event.before, event.after)
        if isinstance(state, Baseline)
    }
    if values <= {None}:
        raise InputError(f"no baseline of {test!r} ever had {metric}; `{command_name()} show -v` tells what they have")
    for on, key, events in histories:
        title = f"{key} on {on}: {METRICS[metric].title}"
        write_lines([title, "", *history_lines(events, metric, settings.units, screen()), ""])
    if shallow:
        click.echo(_SHALLOW, err=True)


def _named(name: str, baselines: Sequence[StoredBaseline]) -> Sequence[_Entry]:
    """Return the baselines of the one test that ``name`` means, none if there is no such test. Raises `InputError`."""
    keys = keys_of_one_test(name, (one.key for one in baselines))
    return [one for one in baselines if one.key in keys]


def _removed(name: str, top: Path, folder: str, below: str, wanted: str | None) -> Sequence[_Entry]:
    """Return the baselines of the test with just this id which the store does not have any more. Raises `GitError`."""
    file, _, test = name.partition("::")
    if not test:
        return []
    found: list[_Entry] = []
    for path in sorted(paths_ever(top, folder)):
        slug = path.removeprefix(below).partition("/")[0]
        if path != below + path_of(slug, file) or wanted not in (None, slug):
            continue
        texts = texts_of(top, file_changes(top, path))
        # With the name of a measurement behind it, or without.
        for one in {test, test.rpartition(" (")[0]} - {""}:
            keys = [Key(file, one, name) for name in names_in(texts, one)]
            found += [(slug, key, None) for key in keys if name in (str(key), f"{file}::{one}")]
    return sorted(found, key=lambda entry: (entry[1], entry[0]))


def _events(top: Path, below: str, at_head: Backend, slug: str, key: Key, entry: Baseline | None) -> list[Event]:
    """Return the changes of a baseline, the latest last. Raises `InputError`, `GitError` and `BackendError`."""
    path = path_of(slug, key.file)
    changes = file_changes(top, below + path)
    events = events_of(changes, texts_of(top, changes), key)
    if not events:
        raise InputError(f"the baseline of {key} is in no commit yet: `git add {below}{path}`, and commit it")
    text = at_head.read(path)
    last = None if text is None else state_in(text.encode("utf-8"), key)
    return events if last == entry else [*events, Event(None, last, entry)]
