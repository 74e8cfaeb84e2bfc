"""``gpumem history``: every accepted change of a baseline, by whom and why, out of git."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.streams import InputError
from pytest_gpumem.metrics import METRICS

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem.baselines.backend import Backend
    from pytest_gpumem.baselines.history import Event
    from pytest_gpumem.gate.baseline import Baseline, Key
    from pytest_gpumem.reports.stored import StoredBaseline
    from pytest_gpumem.session.settings import Settings

_MOST_LISTED = 20
_SHALLOW = (
    "this clone is shallow, so that changes are missing: fetch them with `git fetch --unshallow`, "
    "or on GitHub Actions with fetch-depth: 0 for actions/checkout"
)


@click.command()
@click.argument("test")
@click.option(
    "--metric",
    type=click.Choice(list(METRICS)),
    metavar="METRIC",
    default="peak_allocated",
    show_default=True,
    help="The figure to follow, by its name in the store: step_time, flops, peak_reserved, ...",
)
@click.option("--device", metavar="SLUG", help="On one device only, by the name of its folder in the store.")
@click.option("--store", metavar="PATH", help="Where the baselines lie, if not where the project's settings say.")
def history(*, test: str, metric: str, device: str | None, store: str | None) -> None:
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
    from pytest_gpumem.cli.project import checkout_of, committed, place_of_store, project_settings, read_baselines
    from pytest_gpumem.gate.baseline import Baseline
    from pytest_gpumem.git import GitError, is_shallow

    settings = project_settings(store)
    backend = place_of_store(settings)
    checkout, folder = checkout_of(backend)
    baselines = read_baselines(backend, device)
    try:
        found = _found(checkout.top, folder, baselines, test, device)
        at_head = committed("HEAD", backend)[1]
        told = [(one, _events(checkout.top, folder, at_head, one)) for one in found]
        shallow = is_shallow(checkout.top)
    except GitError as error:
        raise InputError(str(error)) from None
    values = {
        state.metrics.get(metric)
        for _, events in told
        for event in events
        for state in (event.before, event.after)
        if isinstance(state, Baseline)
    }
    if values <= {None}:
        raise InputError(f"no baseline of {test!r} ever had {metric}; `gpumem show -v` tells what they have")
    for (slug, key, _), events in told:
        _tell(slug, key, events, metric, settings)
    if shallow:
        click.echo(_SHALLOW, err=True)


def _found(
    top: Path, folder: str, baselines: list[StoredBaseline], said: str, device: str | None
) -> list[tuple[str, Key, Baseline | None]]:
    """The baselines of the one test that ``said`` means, as (slug, key, entry). Raises `InputError` and `GitError`."""
    from pytest_gpumem.baselines.selecting import nearest_tests, selected

    keys = selected((one.key for one in baselines), said)
    tests = sorted({f"{key.file}::{key.test}" for key in keys})
    if len(tests) > 1:
        more = [f"... and {len(tests) - _MOST_LISTED} more"] if len(tests) > _MOST_LISTED else []
        listed = [f"  {test}" for test in [*tests[:_MOST_LISTED], *more]]
        raise InputError(f"{said!r} is in the ids of {len(tests)} tests; say which one:", *listed)
    if tests:
        return [(one.slug, one.key, one.entry) for one in baselines if one.key in keys]
    gone = _gone(top, folder, said, device)
    if not gone:
        near = nearest_tests((one.key for one in baselines), said)
        hint = f"; there is {' and '.join(near)}" if near else "; `gpumem show` lists what there is"
        raise InputError(f"there is no baseline of {said!r}, and there never was{hint}")
    return gone


def _gone(top: Path, folder: str, said: str, device: str | None) -> list[tuple[str, Key, Baseline | None]]:
    """Baselines of the test with just this id, which the store does not have any more."""
    from pytest_gpumem.baselines.history import file_changes, names_in, paths_ever, texts_of
    from pytest_gpumem.baselines.store import path_of
    from pytest_gpumem.gate.baseline import Key

    file, _, test = said.partition("::")
    if not test:
        return []
    found: list[tuple[str, Key, Baseline | None]] = []
    below = _below(folder)
    for path in sorted(paths_ever(top, folder)):
        slug = path.removeprefix(below).partition("/")[0]
        if path != below + path_of(slug, file) or device not in (None, slug):
            continue
        texts = texts_of(top, file_changes(top, path))
        # With the name of a measurement behind it, or without.
        for one in {test, test.rpartition(" (")[0]} - {""}:
            keys = [Key(file, one, name) for name in names_in(texts, one)]
            found += [(slug, key, None) for key in keys if said in (str(key), f"{file}::{one}")]
    return sorted(found, key=lambda baseline: (baseline[1], baseline[0]))


def _events(top: Path, folder: str, at_head: Backend, baseline: tuple[str, Key, Baseline | None]) -> list[Event]:
    """The changes of a baseline, the latest last. Raises `InputError` and `GitError`."""
    from pytest_gpumem.baselines.backend import BackendError
    from pytest_gpumem.baselines.history import Event, events_of, file_changes, state_in, texts_of
    from pytest_gpumem.baselines.store import path_of

    slug, key, entry = baseline
    path = path_of(slug, key.file)
    changes = file_changes(top, _below(folder) + path)
    events = events_of(changes, texts_of(top, changes), key)
    if not events:
        raise InputError(f"the baseline of {key} is in no commit yet: `git add {_below(folder)}{path}`, and commit it")
    try:
        committed = state_in(at_head.read(path), key)
    except BackendError as error:
        raise InputError(str(error)) from None
    return events if committed == entry else [*events, Event(None, committed, entry)]


def _below(folder: str) -> str:
    return "" if folder == "." else f"{folder}/"


def _tell(slug: str, key: Key, events: list[Event], metric: str, settings: Settings) -> None:
    from pytest_gpumem.cli.streams import screen, tell
    from pytest_gpumem.reports.history import history_lines

    tell([f"{key} on {slug}: {METRICS[metric].title}", ""])
    tell([*history_lines(events, metric, settings.units, screen()), ""])
