"""``gpumem accept``: writes baselines from the report of a pytest session that ran on another machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.errors import (
    BackendError,
    IncompleteChangeError,
    SettingsError,
    StoreError,
    UnfitReport,
    UnknownCause,
    UnknownTest,
)
from pytest_gpumem.base.git import commit_of
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.judging.baselines.changes import Source
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.judging.gate.baseline import Baseline
from pytest_gpumem.plugin.config.conversions import convert
from pytest_gpumem.plugin.config.kinds import LINE
from pytest_gpumem.reporting.reports.causes import cause_cells
from pytest_gpumem.reporting.reports.values import shown
from pytest_gpumem.reporting.reports.view import why_failed
from pytest_gpumem.tools.accept.by_cause import numbered_causes, with_causes
from pytest_gpumem.tools.accept.commit import why_other_commit
from pytest_gpumem.tools.accept.from_report import Candidate, by_device, candidates_of
from pytest_gpumem.tools.accept.selection import Refusal, check_report, selected_results
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.files import FilePath, name_of
from pytest_gpumem.tools.console.project import backend_in
from pytest_gpumem.tools.console.store_options import store_option
from pytest_gpumem.tools.console.streams import INTERRUPTED, InputError, input_errors, read_report, write_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.base.units import UnitSystem
    from pytest_gpumem.judging.baselines.backend import Backend
    from pytest_gpumem.judging.gate.causes import Cause, Causes
    from pytest_gpumem.reporting.reports.session_report import SessionReport

_ANSWERS = ("a", "s", "q")


def _reason(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else str(convert(LINE, value, "--reason"))
    except SettingsError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("report_file", metavar="REPORT.json", type=FilePath())
@click.argument("tests", metavar="[TEST]...", nargs=-1, shell_complete=completion.tests)
@click.option(
    "--reason",
    metavar="TEXT",
    callback=_reason,
    help='Say why the new figures are right, for example "attention scores in float32, see issue #12". This reason is stored '
    "with each changed baseline. Later failures and `gpumem history` show it.",
)
@click.option(
    "--cause",
    "causes",
    metavar="N",
    type=int,
    multiple=True,
    help="Accept the tests with growth from cause N, for example `1`. N is a row's number in the session's table of "
    "causes. May be repeated.",
)
@store_option
@click.option(
    "--force-commit",
    is_flag=True,
    help="Accept the report even if it comes from another commit than `HEAD`, or if the baselines in the store have changed "
    "since the session. The stored reason says so.",
)
def accept(
    *,
    report_file: Path,
    tests: tuple[str, ...],
    reason: str | None,
    causes: tuple[int, ...],
    store: str | None,
    force_commit: bool,
) -> None:
    """Write baselines from the report of a session on another machine.

    Write REPORT.json by `pytest --gpumem-baseline --gpumem-report=REPORT.json`, for example in a CI job on a GPU, or by
    `gpumem merge`. This command measures nothing. It writes the baselines that --gpumem-update=all would have written in
    that session: a baseline for each test that passed, or failed only because of its baseline.

    A TEST is a test's id, a part of an id, or a pattern with `*` and `?`. Without TEST and --cause, the command accepts all
    tests in the report. On a terminal, it first asks about each cause of growth, and about each other test that differs from
    its baseline: accept, skip, or quit, which skips all remaining tests.

    \b
    Examples:
      gpumem accept gpumem.json
      gpumem accept gpumem.json tests/test_gpt.py::test_train --reason "float32 scores until #12"
      gpumem accept gpumem.json "*[amp-bf16]"
      gpumem accept gpumem.json --cause 1 --reason "scores are kept until #12"

    Exit status: 0 if no test was refused, even if nothing was accepted, 1 if a test was refused, 2 for wrong usage, a report
    that cannot be accepted, or a store that cannot be read or written, 130 after Ctrl-C.
    \f
    After Ctrl-C, nothing is written. If a write to the store fails, for example because the disk is full, the message says how
    many baselines were written before.

    ## `--cause`

    `--cause 1 --cause 2` accepts each test that grew only because of these two causes. If a third cause contributed to the
    growth, the test is refused, because a baseline cannot be accepted in part.

    ## `--store`

    With this option, the command does not read the project's settings. Without it, the command reads the settings as pytest
    does, with the plugins that `addopts` names.

    ## `--force-commit`

    Each baseline is stored with the commit in the report. Its reason names both commits, for example
    `measured at 1f2e3d4c5, accepted at 5d4c3b2a1`.

    ## What is written

    - The files in the store are identical to the files that `--gpumem-update=all` would have written. Date and commit come from
      the report. If an accepted test no longer takes a measurement, the baseline of this measurement is removed.
    - A baseline contains step times only if the session timed steps. By default, a gate does not time a test whose baseline has
      no step times.
    - If the session ended early, its report lacks some of the tests. The output says so.

    ## The questions on a terminal

    - The command asks `accept (a), skip (s) or quit (q)` for each cause that concerns several tests, and then for each
      remaining test. After `q`, the command writes the baselines of the accepted tests.
    - A test with several causes is accepted when you accept the last of its causes. It is skipped when you skip any of them.
    - Without a terminal, as in a workflow, the command asks nothing and accepts all tests.

    ## Refused tests

    The command writes nothing for a refused test, and accepts the other tests. A test that failed by itself is refused even if
    it also failed the gate. The output names the kind of each refusal:

    | refused | because |
    |---|---|
    | over budget | the test needs more than its budget, which a baseline does not change |
    | failed by itself | the test, a subtest, its set-up or tear-down failed; or an old report does not say why |
    | did not pass, not measured | a test that you named was skipped, failed as expected, or measured nothing |
    | nothing to accept | a test that you named passed, and its figures equal its baseline |
    | not by baselines | no baseline makes the test pass, for example if `max_slowdown` limits a test without times |
    | other causes | with `--cause`: other causes also made the test grow, or all causes together do not explain its growth |
    | another baseline now | the baseline in the store changed after the session; `--force-commit` overwrites it |
    | not for the store | the store cannot represent a name or a figure in the report |

    ## Reports that cannot be accepted

    The command writes nothing, and ends with exit status 2, if one of these conditions holds:

    - The session ran without `--gpumem-baseline` and `--gpumem-update`, or with `--gpumem-against`.
    - The report has another format.
    - The store cannot be read or written, or has a newer format.
    - The session ran at another commit than `HEAD`, and files outside the store differ between the two commits. A job for a
      pull request checks out a merge commit, which has the same files if your branch is up to date. Fetch it with `git fetch
      origin pull/NUMBER/merge`. Outside a git repository, a report without a commit is accepted.
    """
    if tests and causes:
        raise click.UsageError("name tests or use --cause, not both")
    report = read_report(report_file)
    backend = backend_in(store)
    units = report.terms.units
    with input_errors(UnfitReport):
        check_report(report, name_of(report_file))
    source = _source(report, reason, backend, force=force_commit)
    apart: list[Candidate] = []
    with input_errors(UnknownTest, UnknownCause):
        results = selected_results(report, tests)
        if causes:
            named = numbered_causes(report.causes, causes, units)
            explained = with_causes(report.causes, results, named, units)
            results = [result for result, why in explained if why is None]
            apart = [Candidate(result, refused=why) for result, why in explained if why is not None]
    current_store = Store(backend)
    with input_errors(StoreError, BackendError):
        current_store.check()
        candidates = [*candidates_of(results, report.terms, current_store, source, forced=force_commit), *apart]
    write_lines(_on_the_session(report))
    asks = not (tests or causes) and _is_terminal()
    changing = [candidate for candidate in candidates if candidate.changes_store and (candidate.is_noticed or not asks)]
    try:
        accepted = _accepted_by_a_person(changing, report.causes, units) if asks else changing
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted; nothing was written", err=True)
        sys.exit(INTERRUPTED)
    with input_errors(StoreError, BackendError):
        _write(current_store, accepted)
    titles = Counter(candidate.title for candidate in candidates)
    refused = [
        (
            f"{candidate.title} on {candidate.device}" if titles[candidate.title] > 1 else candidate.title,
            candidate.refused,
        )
        for candidate in candidates
        if candidate.refused and (tests or causes or candidate.result.failed)
    ]
    refused += _with_nothing_to_accept(report, tests, candidates)
    for candidate in accepted:
        write_lines(f"accepted {line}" for line in _figures(candidate, units))
    write_lines(f"not accepted: {title}: {why.why}" for title, why in refused)
    write_lines([_accounting(candidates, accepted, changing, [why for _, why in refused])])
    sys.exit(1 if refused else 0)


def _write(store: Store, accepted: Sequence[Candidate]) -> None:
    """Write the baselines of the accepted tests, one device after another.

    Raises:
        BackendError: A write failed. The message has the number of written baselines.
        StoreError: A file in the store has invalid content.
    """
    written = 0
    for entries, removed in by_device(accepted).values():
        try:
            store.change(entries, removed)
        except BackendError as error:
            written += error.written if isinstance(error, IncompleteChangeError) else 0
            raise BackendError(f"{error}; {counted(written, 'baseline')} written") from error
        written += len(entries)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _source(report: SessionReport, reason: str | None, backend: Backend, *, force: bool) -> Source:
    """Return the date, commit and reason to store with each baseline.

    Raises:
        InputError: The report comes from another commit, and ``force`` is false.
    """
    folder = backend.root if isinstance(backend, Folder) else None
    why = why_other_commit(report.commit, Path.cwd(), folder)
    if why is not None:
        if not force:
            raise InputError(f"{why}; --force-commit accepts the report anyway, and says so in each baseline")
        at = f"measured at {report.commit or 'an unknown commit'}, accepted at {commit_of(Path.cwd()) or 'none'}"
        reason = f"{reason} ({at})" if reason else at
    return Source(report.ended[:10], report.commit, reason)


def _on_the_session(report: SessionReport) -> Iterator[str]:
    """Yield the reason why the report lacks results, and the number of tests without a result. For a complete report, yield
    nothing.
    """
    if report.ended_early is not None:
        yield f"the session ended early: {report.ended_early}"
    if report.not_run:
        first = "::".join(report.not_run[0]) + (", ..." if len(report.not_run) > 1 else "")
        yield (
            f"the report has no result of {counted(len(report.not_run), 'selected test')}, so their baselines do not change: "
            f"{first}"
        )


def _accepted_by_a_person(changing: Sequence[Candidate], causes: Causes, units: UnitSystem) -> list[Candidate]:
    """Ask the user about each cause of growth in several tests, then about each remaining test, and return the accepted tests.

    Raises:
        click.Abort: Standard input ended before all questions were answered.
    """
    accepted: list[Candidate] = []
    remaining = list(changing)
    taken: list[Cause] = []
    shown_causes = (
        zip(causes.causes, cause_cells(causes, units, None), strict=True) if causes.concern_several_tests else ()
    )
    for cause, cells in shown_causes:
        of_cause = [candidate for candidate in remaining if candidate.title in cause.tests]
        if len(of_cause) < 2:
            continue
        where = " ".join(filter(None, (cells.module, cells.operator, cells.tensors)))
        write_lines(
            [
                f"cause {cells.number}: {cells.name}: {cells.metric} {cells.total} in {cells.tests} tests",
                *([f"  {where}"] if where else []),
                *(f"  {line}" for candidate in of_cause for line in _figures(candidate, units)),
                "",
            ]
        )
        answer = _answer()
        if answer == "q":
            return accepted
        if answer == "s":
            remaining = [candidate for candidate in remaining if candidate not in of_cause]
            continue
        taken.append(cause)
        explained = with_causes(causes, [candidate.result for candidate in remaining], taken, units)
        ready = [result for result, why in explained if why is None]
        accepted += [candidate for candidate in remaining if candidate.result in ready]
        remaining = [candidate for candidate in remaining if candidate.result not in ready]
    for number, candidate in enumerate(remaining, start=1):
        write_lines([f"{number} of {len(remaining)}: {candidate.title}", ""])
        why = why_failed(candidate.result).split("\n") if candidate.result.failed else list(_figures(candidate, units))
        write_lines([*(f"  {line}".rstrip() for line in why), ""])
        answer = _answer()
        if answer == "q":
            break
        accepted += [candidate] if answer == "a" else []
    return accepted


def _answer() -> str:
    answer: str = click.prompt("accept (a), skip (s) or quit (q)", type=click.Choice(_ANSWERS), show_choices=False)
    click.echo()
    return answer


def _with_nothing_to_accept(
    report: SessionReport, tests: Sequence[str], candidates: Sequence[Candidate]
) -> Iterator[tuple[str, Refusal]]:
    """Yield a refusal for each test whose figures equal its baseline, if the user named the test.

    If a pattern also matches a test with something to accept, none of its tests is refused.
    """
    for test in tests:
        titles = {result.verdict.nodeid for result in selected_results(report, [test])}
        named = [candidate for candidate in candidates if candidate.title in titles]
        if not any(candidate.changes_store or candidate.refused or candidate.is_noticed for candidate in named):
            for candidate in named:
                yield candidate.title, Refusal("nothing to accept", "it passed and equals its baseline")


def _figures(candidate: Candidate, units: UnitSystem) -> Iterator[str]:
    """Yield a line for each baseline that is written or removed if this test is accepted."""
    changes = candidate.changes
    assert changes is not None, "the test changes the store"
    for key, entry in changes.entries.items():
        was = changes.stored[key]
        old = was.metrics if isinstance(was, Baseline) else {}
        deciding = changes.measured[key][0].deciding
        names = dict.fromkeys(("peak_allocated", *([] if deciding is None else [deciding.metric])))
        figures = [_figure(name, entry.metrics[name], old.get(name), units) for name in names if name in entry.metrics]
        yield f"{key} on {entry.environment.slug}: {'; '.join(figures)}"
    for slug, key in changes.removals:
        yield f"{key} on {slug}: removed, because the test no longer takes this measurement"


def _figure(metric: str, new: float, stored: float | None, units: UnitSystem) -> str:
    title = "peak" if metric == "peak_allocated" else METRICS[metric].title
    return f"{title} {shown(metric, new, units)}, {'new' if stored is None else f'was {shown(metric, stored, units)}'}"


def _accounting(
    candidates: Sequence[Candidate],
    accepted: Sequence[Candidate],
    changing: Sequence[Candidate],
    refused: Sequence[Refusal],
) -> str:
    """Return the last line of the output: ``"gpumem accept: 12 accepted, 1 refused (over budget), 3 skipped"``."""
    kinds = ", ".join(dict.fromkeys(refusal.kind for refusal in refused))
    skipped = len(changing) - len(accepted)
    unchanged = len(candidates) - len(changing) - len(refused)
    parts = [f"{len(accepted)} accepted" if accepted or skipped or refused else "nothing to accept"]
    parts += [f"{len(refused)} refused ({kinds})"] if refused else []
    parts += [f"{skipped} skipped"] if skipped else []
    parts += [f"{unchanged} unchanged"] if unchanged > 0 else []
    return f"gpumem accept: {', '.join(parts)}"
