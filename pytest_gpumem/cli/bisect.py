"""``gpumem bisect``: finds the commit, package or package release that made a test need more."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from pytest_gpumem.ab.checkout import Checkout
from pytest_gpumem.ab.compare_variants import set_up
from pytest_gpumem.ab.errors import RunFailed
from pytest_gpumem.ab.runs import AFTER_SETUP, refused, without_baselines
from pytest_gpumem.baselines.history import events_of, file_changes, texts_of
from pytest_gpumem.baselines.selecting import selected
from pytest_gpumem.baselines.store import path_of
from pytest_gpumem.bisect import candidates
from pytest_gpumem.bisect.candidates import AT, commits, one_release, pins_of, releases
from pytest_gpumem.bisect.driver import JUDGED, TIMED, NothingFound, Search
from pytest_gpumem.bisect.journal import Journal
from pytest_gpumem.bisect.red_report import red_of
from pytest_gpumem.bisect.report import lines, markdown, nothing_as_json, nothing_as_markdown, to_json
from pytest_gpumem.bisect.state import state_of
from pytest_gpumem.cli import completion
from pytest_gpumem.cli.ab import (
    PYTEST_ARGUMENTS,
    WithPytestArguments,
    environments,
    max_slowdown_option,
    report_option,
    setup_option,
    tell_uncommitted,
    told_in,
    write_reports,
)
from pytest_gpumem.cli.files import FilePath, name_of, read_text, text_beside
from pytest_gpumem.cli.jobs import jobs_option, most_jobs
from pytest_gpumem.cli.one_test import check_is_no_file, no_such_test
from pytest_gpumem.cli.project import checkout_of, project_settings, read_baselines, store_backend
from pytest_gpumem.cli.store_options import slug_option
from pytest_gpumem.cli.streams import InputError, input_errors, screen, write_lines
from pytest_gpumem.command_name import command_name
from pytest_gpumem.git import GitError, Revision, plain_environment
from pytest_gpumem.measurement import changed_releases
from pytest_gpumem.processes import Stopped, noted_signals
from pytest_gpumem.reports.errors import ReportError
from pytest_gpumem.requirements.errors import NotInstalled, RequirementError
from pytest_gpumem.requirements.installed import versions
from pytest_gpumem.requirements.releases import is_same, public, releases_of
from pytest_gpumem.requirements.requirement_set import requirement_set
from pytest_gpumem.units import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.ab.runs import Runner
    from pytest_gpumem.ab.variants import Provisioner
    from pytest_gpumem.bisect.candidates import Candidate
    from pytest_gpumem.bisect.driver import Found
    from pytest_gpumem.bisect.red_report import Red


def _name_alone(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Return the name of a package. Raises ``click.BadParameter`` for other requirements, such as ``torch==2.6``."""
    if value is None:
        return None
    try:
        wanted = Requirement(value)
    except InvalidRequirement:
        raise click.BadParameter(f"{value!r} is no name of a package, like transformers") from None
    if str(wanted) != wanted.name:
        raise click.BadParameter(f"{value!r} is more than the name of a package: give {wanted.name} alone")
    return wanted.name


_OF_NOTHING = {".json": nothing_as_json, ".md": nothing_as_markdown}


@click.command(cls=WithPytestArguments)
@click.argument("tests", nargs=-1, metavar="TEST...", shell_complete=completion.tests)
@click.option(
    "--from",
    "source",
    metavar="REPORT",
    type=FilePath(exists=True),
    help="Take the test and both ends from this red JSON report of a session or of `gpumem ab`, for example `gpumem.json`. It "
    "replaces TEST, --good and --bad.",
)
@click.option(
    "--good",
    metavar="WHICH",
    help="The end at which the test needs less: a revision such as `v1.2`, with --package a release, with --packages a lock "
    "file.",
)
@click.option(
    "--bad",
    metavar="WHICH",
    help="The end at which the test needs more, written like --good. Default for revisions: `HEAD`.",
)
@click.option(
    "--package",
    metavar="NAME",
    callback=_name_alone,
    help="Search the releases of this package from --good to --bad, for example `transformers`.",
)
@click.option(
    "--packages",
    is_flag=True,
    help="Search the packages that differ between two lock files (--good, --bad), or between the test's baseline and the "
    "current environment. Then search the releases of the package that caused the change.",
)
@click.option(
    "--metric",
    type=click.Choice(JUDGED),
    metavar="METRIC",
    help="Judge by this metric, for example `peak_reserved`. Default: the first metric that is worse at the bad end. "
    "`step_time` is measured by turns, as `gpumem ab` does.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also search the commits of merged branches. By default a merge stands for all commits that it brought.",
)
@jobs_option("With --setup, only one run is made at a time.")
@max_slowdown_option("Used with --metric=step_time.")
@slug_option
@setup_option
@report_option
@click.pass_context
def bisect(
    context: click.Context,
    *,
    tests: tuple[str, ...],
    source: Path | None,
    good: str | None,
    bad: str | None,
    package: str | None,
    packages: bool,
    metric: str | None,
    everything: bool,
    jobs: int,
    max_slowdown: float,
    slug: str | None,
    setup: str | None,
    files: tuple[Path, ...],
) -> None:
    """Find the commit or package release that caused a regression.

    The command runs TEST at both ends and then halves the range between them. It ends with the first change that the gate
    would call worse than the good end. Arguments after `--` are passed to pytest. Changes that cannot be run are skipped. If
    the command is interrupted, the same command continues the search.

    \b
    Examples:
      gpumem bisect --good v1.2 --bad main tests/test_gpt.py::test_train
      gpumem bisect --package transformers --good 4.45.0 --bad 4.50.0 tests/test_llama.py
      gpumem bisect --packages tests/test_llama.py::test_train
      gpumem bisect --packages --good old.txt --bad new.txt tests/test_llama.py
      gpumem bisect --from gpumem.json

    Exit status: 0 if the change was found, 2 if there is nothing to find, an end cannot be run, or the usage is wrong, 130
    after Ctrl-C, 143 after SIGTERM.
    \f
    ## `--from`

    - The first test in the report that regressed is searched with, and no other test. Options about baselines in
      `PYTEST_ARGS` are left out.
    - With a report of `gpumem ab`, the command searches the packages that the report's `HEAD` asked for. A package from an
      address (`transformers @ git+https://...`) comes after all releases.
    - With a session's report, the command searches the packages that differ from the baseline's. If none of them is the cause,
      it searches the commits since the commit that accepted the baseline. A shallow clone does not contain that commit.

    ## `--all`

    As with `git bisect`, a good commit excludes all commits that it comes from.

    ## `--package`

    The candidates are the releases on the package index, without pre-releases.

    ## `--slug`

    Used with `--packages`, if the test has baselines from several devices.

    ## Output

    The command prints the candidates that it tried, the memory that the change added by module and line, the change, and the
    command that accepts it. The last line also names the releases that have to be installed first. If a release improved the
    figure, there is nothing to accept.

    ## How the search decides

    - **The good end is the baseline.** A candidate is bad if it is worse than the good end by more than the tolerance. If the
      first bad candidate explains less than half of the growth, the command prints the `--good` with which to continue.
    - **Skipped candidates** are printed with their reason: a commit that does not import, a release that cannot be installed.
      If the first bad candidate cannot be told apart from skipped ones beside it, all of them are named.
    - **A merge** that is the first bad commit is named as a merge, with the command that searches the merged branch.
    - **An improvement** is searched if `--bad` is the earlier commit or release. The result is the first candidate that is as
      good as `--good`.
    - Uncommitted changes are left out of a search in commits. A line on standard error counts the files.
    - Packages are installed into [cached environments](command-ab.md#sets-of-requirements), as for `gpumem ab`.

    ## Interrupted searches

    - After Ctrl-C or `kill -9`, the same command continues if the same packages are installed. It removes the worktrees that
      the first one left.
    - A search in releases begins anew if the current code has changed: for git, or without git by the names, sizes and times of
      `*.py`, `*.toml`, `*.ini` and `*.cfg` files.

    ## JSON

    | key | value |
    |---|---|
    | `format` | 1 |
    | `found` | whether the change was found |
    | `culprit` | the change |
    | `result` | a sentence about the result |
    | `test` | with `--from`, the test |
    | `metric`, `good`, `bad` | the metric, and its value before and after the change |
    | `after` | the last good candidate |
    | `why` | the reason, if nothing was found |
    """
    given: list[str] = context.meta[PYTEST_ARGUMENTS]
    with told_in(files, _OF_NOTHING), input_errors(GitError, ReportError, NothingFound):
        red = None if source is None else _red(source)
        _check_ends(tests, good, bad, package, packages=packages, red=red)
        of_code = package is None and not packages and red is None
        checkout = Checkout.around(Path.cwd()) if of_code else Checkout.as_it_is(Path.cwd())
        metric = metric or (red.metric if red is not None else None)
        options, store = (given, None) if red is None else without_baselines(given)
        arguments = [*([] if metric == TIMED else ["--no-gpumem-time"]), *options, *tests]
        why_not = refused(arguments, checkout.top)
        if why_not is not None:
            raise click.UsageError(why_not)
    only = () if red is None else (red.nodeid,)
    if of_code:
        tell_uncommitted(checkout.uncommitted())
    with told_in(files, _OF_NOTHING), noted_signals() as stop:
        try:
            with set_up(checkout, arguments, setup, environments(), stop, _say, only) as (runner, provisioner):
                rows = _Rows(runner, provisioner, metric, jobs, max_slowdown)
                if red is not None:
                    found = _of_red(red, rows, checkout, store, first_parent=not everything)
                elif of_code:
                    ends = checkout.revision(good or ""), checkout.revision(bad or "HEAD")
                    found = rows.find(commits(checkout, *ends, first_parent=not everything))
                elif package is not None:
                    found = rows.find(rows.releases(package, good or "", bad or ""))
                else:
                    found = _in_packages(rows, *_two_sides(good, bad, tests[0], slug))
        except (RunFailed, NothingFound, NotInstalled, GitError, RequirementError) as failure:
            raise InputError(*str(failure).splitlines()) from None
        except Stopped as stopped:
            click.echo("interrupted: the same command goes on from here", err=True)
            context.exit(stopped.exit_status)
    with text_beside(files):
        write_lines(lines(found, screen()))
    accepted = [*tests, *given] if red is None else [red.nodeid, *options]
    release_mended_it = found.bad.backwards and bool(found.bad.package)
    if (red is None or red.gated) and not release_mended_it:
        needed = "" if found.bad.variant.revision is not None else _not_here(package, bad, red)
        first = f", install {needed} first" if needed else ""
        with text_beside(files):
            click.echo(f"to accept it{first}: pytest {shlex.join(accepted)} --gpumem-update=all")
    write_reports(
        files, {".json": lambda result: to_json(result, red), ".md": lambda result: markdown(result, red)}, found
    )


@dataclass(frozen=True)
class _Rows:
    """Searches in several rows of candidates with the same tests and the same metric."""

    runner: Runner
    provisioner: Provisioner
    metric: str | None
    jobs: int
    max_slowdown: float

    def find(self, row: Sequence[Candidate]) -> Found:
        """Search a row of candidates. An interrupted search keeps its runs for the next call. Raises as `Search.find`."""
        _say(f"{counted(len(row), 'candidate')}, {row[0].name} to {row[-1].name}")
        runner = self.runner
        of_code = row[0].variant.revision is not None
        state = "" if of_code else state_of(runner.checkout)
        identity = [str(runner.checkout.top), state, runner.arguments, runner.setup, self.metric, *runner.only]
        identity += [
            str(candidate.variant.requirements and candidate.variant.requirements.lines) + candidate.name
            for candidate in row
        ]
        journal = Journal.of(identity)
        try:
            found = Search(row, runner, self.provisioner, journal, self.metric, self._jobs(), self.max_slowdown).find()
        except (RunFailed, NothingFound, NotInstalled, GitError):
            journal.remove()
            raise
        finally:
            if of_code and runner.setup is not None:
                _say(AFTER_SETUP)
        journal.remove()
        return found

    def _jobs(self) -> int:
        """Return the number of simultaneous runs, and print a line if it is lower than requested."""
        if self.jobs > 1 and self.runner.setup is not None:
            _say("with --setup, only one run is made at a time, because all runs share what it installs")
            return 1
        return most_jobs(self.jobs)

    def releases(self, package: str, good: str, bad: str, beside: Mapping[str, str] | None = None) -> list[Candidate]:
        """Return the releases of a package that its index has from one to another."""
        for release in (good, bad):
            if release.startswith(AT):
                continue
            try:
                Version(release)
            except InvalidVersion:
                raise RequirementError(f"{release!r} is no release of {package}, like 4.38.2") from None
        if good == bad:
            raise RequirementError(f"--good and --bad are the same release of {package}: {good}")
        if not bad.startswith(AT) and is_same(good, bad):
            raise RequirementError(f"{package} {good} and {bad} are one release on the index")
        try:
            listed = releases_of(package, plain_environment(), self.provisioner.stop)
        except NotInstalled:
            if not bad.startswith(AT):
                raise
            # It may be on no index at all.
            listed = []
        return releases(package, listed, good, bad, beside)


def _not_here(package: str | None, bad: str | None, red: Red | None) -> str:
    """Return the packages at the bad end that are not installed here. Its figures cannot be measured without them."""
    if package is not None:
        needed = {package: bad or ""}
    elif red is not None:
        needed = dict(red.now)
    else:
        needed = pins_of(requirement_set([f"-r {bad}"])) if bad is not None else {}
    here = versions(needed)
    others = [f"{name} {one}" for name, one in needed.items() if name not in here or not is_same(here[name], one)]
    return f"what {bad} pins" if others and package is None and red is None else " and ".join(others)


def _red(source: Path) -> Red:
    """Return the red test in a report. Raises `ReportError`, `NothingFound` and `InputError`."""
    try:
        return red_of(read_text(source), name_of(source))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name_of(source)} cannot be read: {error}") from None


def _of_red(
    red: Red,
    rows: _Rows,
    checkout: Checkout,
    store: str | None,
    *,
    first_parent: bool,
) -> Found:
    """Search the packages that differ and, if none is the cause, the commits since the baseline."""
    why_no_package = ""
    if red.then or not red.gated:
        try:
            return _in_packages(rows, dict(red.then), dict(red.now))
        except (NothingFound, NotInstalled, RunFailed) as failure:
            if not red.gated:
                raise
            why_no_package = f"; packages: {str(failure).splitlines()[0]}"
    try:
        row = commits(checkout, _accepted(red, store), checkout.revision("HEAD"), first_parent=first_parent)
        return rows.find(row)
    except (GitError, InputError, NothingFound) as failure:
        told = failure.format_message() if isinstance(failure, InputError) else str(failure)
        raise NothingFound(f"{told}{why_no_package}") from None


def _accepted(red: Red, store: str | None) -> Revision:
    """Return the commit that accepted a test's baseline. Raises `NothingFound`, `GitError` and `InputError`."""
    backend = store_backend(project_settings(store))
    checkout, folder = checkout_of(backend)
    path = path_of(red.slug, red.key.file)
    changes = file_changes(checkout.top, path if folder == "." else f"{folder}/{path}")
    events = events_of(changes, texts_of(checkout.top, changes), red.key)
    commit = events[-1].commit if events else None
    if commit is None:
        raise NothingFound(f"the baseline of {red.key} is in no commit, so that it is not known since when it was good")
    if commit.cut_off:
        raise NothingFound(
            f"this clone is shallow, so that it is not known which commit accepted the baseline of {red.key}: fetch its "
            "history with `git fetch --unshallow`, or on GitHub Actions with fetch-depth: 0 for actions/checkout"
        )
    if commit.name == checkout.revision("HEAD").commit:
        raise NothingFound(f"the last commit accepted the baseline of {red.key}, so that no commit after it did it")
    return Revision(commit.name, commit.name)


def _check_ends(
    tests: Sequence[str], good: str | None, bad: str | None, package: str | None, *, packages: bool, red: Red | None
) -> None:
    """Raise ``click.UsageError`` if an end is missing, or if a report already names both."""
    if red is not None:
        if tests or good or bad or package or packages:
            raise click.UsageError("--from names the test and both ends: leave TEST, --good, --bad and --package out")
        return
    if not tests:
        raise click.UsageError("Missing argument 'TEST...', or --from.")
    if package is not None and packages:
        raise click.UsageError("--package and --packages exclude each other")
    if good is None and not packages:
        raise click.UsageError("Missing option '--good': the revision, or with --package the release, that needs less.")
    if (package is not None and bad is None) or (packages and (good is None) != (bad is None)):
        raise click.UsageError("Missing option '--bad' or '--good': both ends have to be named here.")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _two_sides(good: str | None, bad: str | None, test: str, slug: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the releases on both sides: in two lock files, or in a test's baseline and in this environment."""
    if good is not None and bad is not None:
        then, now = (pins_of(requirement_set([f"-r {file}"])) for file in (good, bad))
        return then, now
    settings = project_settings()
    stored = read_baselines(store_backend(settings), slug)
    keys = selected((one.key for one in stored), test)
    found = [one for one in stored if one.key in keys]
    if not found:
        check_is_no_file(test)
        lists = f"`{command_name()} show` lists what there is"
        sentence = f"there is no baseline of {test!r}, whose packages could be compared"
        raise no_such_test(test, sentence, [one.key for one in stored], lists)
    slugs = sorted({one.slug for one in found})
    if len(slugs) > 1:
        raise InputError(f"{test!r} has baselines of {len(slugs)} devices; say which one: --slug {' or '.join(slugs)}")
    then = {name: version for one in found for name, version in one.entry.environment.releases.items()}
    return then, versions(then)


def _in_packages(rows: _Rows, then: dict[str, str], now: dict[str, str]) -> Found:
    """Search the packages that differ, and then the releases between the two of the package that is the cause."""
    differ, row = candidates.packages(then, now)
    same = one_release(then, now)
    if not differ:
        why = "; ".join(same) or "the packages are the same on both sides, as far as both are known"
        raise NothingFound(f"{why}, so that there is no release to search in" if same else why)
    for sentence in same:
        _say(sentence)
    _say(
        f"these differ: {'; '.join(changed_releases(*({name: side[name] for name in differ} for side in (then, now))))}"
    )
    found = rows.find(row) if len(differ) > 1 else None
    at = 1 if found is None else row.index(found.bad)
    if found is not None and found.skipped:
        return found
    culprit = differ[at - 1]
    beside = {name: (now if number < at - 1 else then)[name] for number, name in enumerate(differ) if name != culprit}
    between = rows.releases(culprit, _on_index(then[culprit]), _on_index(now[culprit]), beside)
    return found if found is not None and len(between) == len(row[:2]) else rows.find(between)


def _on_index(release: str) -> str:
    return release if release.startswith(AT) else public(release)
