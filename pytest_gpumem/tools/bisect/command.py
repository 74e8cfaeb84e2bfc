"""``gpumem bisect``: finds the commit, the package or the package release since which a test needs more memory or time."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from pytest_gpumem.base.command_name import command_name
from pytest_gpumem.base.errors import (
    GitError,
    InstallationError,
    NothingToSearch,
    ReportError,
    RequirementError,
    RunFailed,
    StopSignal,
)
from pytest_gpumem.base.git import Revision, plain_environment
from pytest_gpumem.base.processes import recorded_signals
from pytest_gpumem.base.requirements.installed import versions
from pytest_gpumem.base.requirements.releases import is_same_release, releases_of, without_local_version
from pytest_gpumem.base.requirements.requirement_set import requirement_set
from pytest_gpumem.base.units import counted
from pytest_gpumem.facts.measurement import changed_releases
from pytest_gpumem.judging.baselines.history import events_of, file_changes, texts_of
from pytest_gpumem.judging.baselines.selecting import selected_keys
from pytest_gpumem.judging.baselines.store import path_of
from pytest_gpumem.tools.ab.command import (
    PYTEST_ARGUMENTS,
    WithPytestArguments,
    environments,
    error_reports,
    max_slowdown_option,
    print_uncommitted,
    report_option,
    setup_option,
    write_reports,
)
from pytest_gpumem.tools.ab.compare_variants import set_up
from pytest_gpumem.tools.ab.runs import SETUP_NOTE, reason_to_refuse, without_baseline_options
from pytest_gpumem.tools.bisect import candidates
from pytest_gpumem.tools.bisect.candidates import ADDRESS_PREFIX, commits, pins_of, releases, same_release_notes
from pytest_gpumem.tools.bisect.driver import JUDGED_METRICS, STEP_TIME, Search
from pytest_gpumem.tools.bisect.journal import Journal
from pytest_gpumem.tools.bisect.red_report import regressed_test_of
from pytest_gpumem.tools.bisect.report import failure_as_json, failure_as_markdown, lines, markdown, to_json
from pytest_gpumem.tools.bisect.state import state_of
from pytest_gpumem.tools.checkout import Checkout
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.files import FilePath, name_of, read_text, text_beside
from pytest_gpumem.tools.console.jobs import jobs_option, most_jobs
from pytest_gpumem.tools.console.one_test import check_is_no_file, no_such_test
from pytest_gpumem.tools.console.project import checkout_of, project_settings, read_baselines, store_backend
from pytest_gpumem.tools.console.store_options import slug_option
from pytest_gpumem.tools.console.streams import InputError, input_errors, screen, write_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpumem.tools.ab.runs import Runner
    from pytest_gpumem.tools.ab.variants import Provisioner
    from pytest_gpumem.tools.bisect.candidates import Candidate
    from pytest_gpumem.tools.bisect.driver import SearchResult
    from pytest_gpumem.tools.bisect.red_report import RegressedTest


def _package_name(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Return the name of the package after ``--package``.

    Raises:
        click.BadParameter: The text is not only a name. For example, it is ``torch==2.6``.
    """
    if value is None:
        return None
    try:
        requirement = Requirement(value)
    except InvalidRequirement:
        raise click.BadParameter(f"{value!r} is not the name of a package; give a name such as transformers") from None
    if str(requirement) != requirement.name:
        raise click.BadParameter(f"{value!r} contains more than the name of a package; give only {requirement.name}")
    return requirement.name


_ERROR_RENDERERS = {".json": failure_as_json, ".md": failure_as_markdown}


@click.command(cls=WithPytestArguments)
@click.argument("tests", nargs=-1, metavar="TEST...", shell_complete=completion.tests)
@click.option(
    "--from",
    "source",
    metavar="REPORT",
    type=FilePath(exists=True),
    help="Read the test, the good end and the bad end from a JSON report, for example `gpumem.json`. It comes from a failed "
    "pytest session or from `gpumem ab`. Leave out TEST, --good and --bad.",
)
@click.option(
    "--good",
    metavar="WHICH",
    help="Begin the search here, where the test needs less: at a git revision such as `v1.2`, with --package at a release such "
    "as `4.45.0`, or with --packages at a lock file such as `old.txt`.",
)
@click.option(
    "--bad",
    metavar="WHICH",
    help="End the search here, where the test needs more. Written like --good. Default for git revisions: `HEAD`.",
)
@click.option(
    "--package",
    metavar="NAME",
    callback=_package_name,
    help="Search the releases of this package from --good to --bad, for example `transformers`.",
)
@click.option(
    "--packages",
    is_flag=True,
    help="First find the package that caused the change, and then its release. The command tries the packages whose releases "
    "differ in two lock files (--good and --bad), or by default in the test's baseline and in this environment.",
)
@click.option(
    "--metric",
    type=click.Choice(JUDGED_METRICS),
    metavar="METRIC",
    help="Compare this metric, for example `peak_reserved`. Default: the first metric that is worse at the bad end. "
    "For `step_time`, the good end and the candidate run by turns, as in `gpumem ab`.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Also search the commits in merged branches. By default, the result can be a merge, but not a commit in the merged "
    "branch.",
)
@jobs_option("With --setup, only one run is made at a time.")
@max_slowdown_option("Only used with --metric=step_time.")
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

    The command runs TEST at a good end (--good), where TEST needs less, and at a bad end (--bad), where TEST needs more. The
    ends are git revisions, or with --package or --packages releases of packages. Then the command runs TEST halfway between
    them, and goes on with the half that contains the regression. The result is the first commit or release at which TEST is
    worse than at the good end, by the rules of the gate.

    Commits and releases at which TEST cannot run are skipped. Arguments after `--` are passed to pytest. If the search is
    interrupted, run the same command again to continue it.

    \b
    Examples:
      gpumem bisect --good v1.2 --bad main tests/test_gpt.py::test_train
      gpumem bisect --package transformers --good 4.45.0 --bad 4.50.0 tests/test_llama.py
      gpumem bisect --packages tests/test_llama.py::test_train
      gpumem bisect --packages --good old.txt --bad new.txt tests/test_llama.py
      gpumem bisect --from gpumem.json

    Exit status: 0 if the change was found, 2 if the bad end is not worse than the good end, TEST cannot run at an end, or the
    usage is wrong, 130 after Ctrl-C, 143 after SIGTERM.
    \f
    ## `--from`

    - The command searches only for the first regressed test in the report. It ignores options about baselines in `PYTEST_ARGS`.
    - With a report from `gpumem ab`, the command searches the packages that `--head-with` named. If `--head-with` named an
      address (`transformers @ git+https://...`), the address is a candidate after all releases of the package.
    - With a report from a pytest session, the command searches the packages that differ from the baseline's environment. If no
      package is the cause, it searches the commits after the commit that accepted the baseline. This needs a full clone,
      because a shallow clone lacks old commits.

    ## `--all`

    As in `git bisect`, the command assumes that all ancestors of a good commit are good.

    ## `--package`

    The candidates are the releases on the package index between `--good` and `--bad`. Pre-releases are left out.

    ## `--slug`

    With `--packages`, choose a device if the test has baselines from several devices.

    ## Output

    A candidate is a commit or a release that the command tries. The command prints the tried candidates, the module and line of
    the added memory, the change that it found, and the command for accepting the new figures. If you have to install other
    releases before you accept the figures, the last line names them. If a release improved the figure, there is nothing to
    accept.

    ## How the search decides

    - **Bad candidates.** The figures at the good end serve as the baseline. A candidate is bad if its figures are worse by more
      than the tolerance. If the first bad candidate explains less than half of the growth between the ends, there is a later
      cause as well. The command then prints the `--good` with which to search for it.
    - **Skipped candidates.** A candidate is skipped if it cannot run, for example because a commit cannot be imported or a
      release cannot be installed. The output lists the skipped candidates with their reasons. If skipped candidates lie just
      before the first bad candidate, any of them may be the cause, and the result names all of them.
    - **Merges.** If the first bad commit is a merge, the output says so, and shows the command for searching the merged branch.
    - **Improvements.** If `--bad` is an earlier commit or release than `--good`, the command searches for an improvement. The
      result is the first candidate that is as good as `--good`.
    - **Uncommitted changes** are left out when commits are searched. A line on standard error counts the changed files.
    - **Packages** are installed into [cached environments](command-ab.md#sets-of-requirements), as in `gpumem ab`.

    ## Interrupted searches

    - After Ctrl-C or `kill -9`, the same command continues the search if the same packages are installed. It also removes the
      worktrees that the interrupted search left.
    - A search in releases begins again if the project's code has changed. Git decides whether the code has changed. Outside a
      git repository, names, sizes and modification times of `*.py`, `*.toml`, `*.ini` and `*.cfg` files decide.

    ## JSON

    | key | value |
    |---|---|
    | `format` | 1 |
    | `found` | whether the change was found |
    | `culprit` | the commit, package or release that caused the change |
    | `result` | a sentence about the result |
    | `test` | with `--from`, the test from the report |
    | `metric`, `good`, `bad` | the metric, and its value before and after the change |
    | `after` | the last good candidate before the change |
    | `why` | the reason, if nothing was found |
    """
    pytest_arguments: list[str] = context.meta[PYTEST_ARGUMENTS]
    with error_reports(files, _ERROR_RENDERERS), input_errors(GitError, ReportError, NothingToSearch):
        red = None if source is None else _red_test(source)
        _check_ends(tests, good, bad, package, packages=packages, red=red)
        of_code = package is None and not packages and red is None
        checkout = Checkout.around(Path.cwd()) if of_code else Checkout.as_it_is(Path.cwd())
        metric = metric or (red.metric if red is not None else None)
        options, store = (pytest_arguments, None) if red is None else without_baseline_options(pytest_arguments)
        arguments = [*([] if metric == STEP_TIME else ["--no-gpumem-time"]), *options, *tests]
        why_not = reason_to_refuse(arguments, checkout.top)
        if why_not is not None:
            raise click.UsageError(why_not)
    only = () if red is None else (red.nodeid,)
    if of_code:
        print_uncommitted(checkout.uncommitted())
    with error_reports(files, _ERROR_RENDERERS), recorded_signals() as stop:
        try:
            with set_up(checkout, arguments, setup, environments(), stop, _say, only) as (runner, provisioner):
                searches = _CandidateSearches(runner, provisioner, metric, jobs, max_slowdown)
                if red is not None:
                    result = _search_for_red_test(red, searches, checkout, store, first_parent=not everything)
                elif of_code:
                    ends = checkout.revision(good or ""), checkout.revision(bad or "HEAD")
                    result = searches.find(commits(checkout, *ends, first_parent=not everything))
                elif package is not None:
                    result = searches.find(searches.releases(package, good or "", bad or ""))
                else:
                    result = _search_packages(searches, *_releases_at_ends(good, bad, tests[0], slug))
        except (RunFailed, NothingToSearch, InstallationError, GitError, RequirementError) as failure:
            raise InputError(*str(failure).splitlines()) from None
        except StopSignal as stopped:
            click.echo("interrupted; run the same command again to continue the search", err=True)
            context.exit(stopped.exit_status)
    with text_beside(files):
        write_lines(lines(result, screen()))
    accepted = [*tests, *pytest_arguments] if red is None else [red.nodeid, *options]
    release_fixed_it = result.bad.backwards and bool(result.bad.package)
    if (red is None or red.gated) and not release_fixed_it:
        needed = "" if result.bad.variant.revision is not None else _missing_packages(package, bad, red)
        first = f", install {needed} first" if needed else ""
        with text_beside(files):
            click.echo(f"to accept it{first}: pytest {shlex.join(accepted)} --gpumem-update=all")
    write_reports(files, {".json": lambda end: to_json(end, red), ".md": lambda end: markdown(end, red)}, result)


@dataclass(frozen=True)
class _CandidateSearches:
    """The tests and options for all searches of a ``gpumem bisect`` command.

    For example, ``--packages`` makes two searches: first for the package that caused the change, and then for its release.
    """

    runner: Runner
    provisioner: Provisioner
    metric: str | None
    jobs: int
    max_slowdown: float

    def find(self, searched: Sequence[Candidate]) -> SearchResult:
        """Find the first bad candidate in a list from the good end to the bad end.

        Runs are stored, so the same command can continue an interrupted search. Raises the exceptions of `Search.find`, for
        example `NothingToSearch` if the bad end is not worse than the good end.
        """
        _say(f"{counted(len(searched), 'candidate')}, {searched[0].name} to {searched[-1].name}")
        runner = self.runner
        of_code = searched[0].variant.revision is not None
        state = "" if of_code else state_of(runner.checkout)
        identity = [str(runner.checkout.top), state, runner.arguments, runner.setup, self.metric, *runner.only]
        identity += [
            str(candidate.variant.requirements and candidate.variant.requirements.lines) + candidate.name
            for candidate in searched
        ]
        journal = Journal.of(identity)
        try:
            result = Search(
                searched, runner, self.provisioner, journal, self.metric, self._jobs(), self.max_slowdown
            ).find()
        except (RunFailed, NothingToSearch, InstallationError, GitError):
            journal.remove()
            raise
        finally:
            if of_code and runner.setup is not None:
                _say(SETUP_NOTE)
        journal.remove()
        return result

    def _jobs(self) -> int:
        """Return the number of simultaneous runs, and print a line if the number is lower than ``--jobs``."""
        if self.jobs > 1 and self.runner.setup is not None:
            _say("with --setup, only one run is made at a time, because all runs share the packages that it installs")
            return 1
        return most_jobs(self.jobs)

    def releases(
        self, package: str, good: str, bad: str, pinned_releases: Mapping[str, str] | None = None
    ) -> list[Candidate]:
        """Return the releases on the package index from ``good`` to ``bad`` as candidates.

        Args:
            package: The name of the package.
            good: The first release, for example ``"4.45.0"``.
            bad: The last release, or an address such as ``"@ git+https://..."``.
            pinned_releases: Releases of other packages to install in each candidate, by name.

        Raises:
            RequirementError: An end is not a release, or both ends are the same release.
            InstallationError: The index cannot be read.
        """
        for release in (good, bad):
            if release.startswith(ADDRESS_PREFIX):
                continue
            try:
                Version(release)
            except InvalidVersion:
                raise RequirementError(
                    f"{release!r} is not a release of {package}; give a release such as 4.38.2"
                ) from None
        if good == bad:
            raise RequirementError(
                f"--good and --bad are the same release of {package}: {good}; give two different releases"
            )
        if not bad.startswith(ADDRESS_PREFIX) and is_same_release(good, bad):
            raise RequirementError(
                f"{package} {good} and {bad} are the same release on the index; give two different releases"
            )
        try:
            listed = releases_of(package, plain_environment(), self.provisioner.stop)
        except InstallationError:
            if not bad.startswith(ADDRESS_PREFIX):
                raise
            # The package index may lack a package that was installed from a git address. Then only the two ends are candidates.
            listed = []
        return releases(package, listed, good, bad, pinned_releases)


def _missing_packages(package: str | None, bad: str | None, red: RegressedTest | None) -> str:
    """Return the releases to install before this environment equals the bad end, for example ``"tinymodels 1.4"``."""
    if package is not None:
        needed = {package: bad or ""}
    elif red is not None:
        needed = dict(red.bad_releases)
    else:
        needed = pins_of(requirement_set([f"-r {bad}"])) if bad is not None else {}
    installed = versions(needed)
    missing = [
        f"{name} {release}"
        for name, release in needed.items()
        if name not in installed or not is_same_release(installed[name], release)
    ]
    return f"the packages in {bad}" if missing and package is None and red is None else " and ".join(missing)


def _red_test(source: Path) -> RegressedTest:
    """Return the first regressed test in the report ``source``. Raises `ReportError`, `NothingToSearch` and `InputError`."""
    try:
        return regressed_test_of(read_text(source), name_of(source))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name_of(source)} cannot be read: {error}") from None


def _search_for_red_test(
    red: RegressedTest,
    searches: _CandidateSearches,
    checkout: Checkout,
    store: str | None,
    *,
    first_parent: bool,
) -> SearchResult:
    """Search the packages whose releases differ from the baseline's environment. If none is the cause, search the commits
    after the baseline's commit.
    """
    why_no_package = ""
    if red.good_releases or not red.gated:
        try:
            return _search_packages(searches, dict(red.good_releases), dict(red.bad_releases))
        except (NothingToSearch, InstallationError, RunFailed) as failure:
            if not red.gated:
                raise
            why_no_package = f"; packages: {str(failure).splitlines()[0]}"
    try:
        good, bad = _accepting_commit(red, store), checkout.revision("HEAD")
        return searches.find(commits(checkout, good, bad, first_parent=first_parent))
    except (GitError, InputError, NothingToSearch) as failure:
        message = failure.format_message() if isinstance(failure, InputError) else str(failure)
        raise NothingToSearch(f"{message}{why_no_package}") from None


def _accepting_commit(red: RegressedTest, store: str | None) -> Revision:
    """Return the commit that accepted a test's current baseline. Raises `NothingToSearch`, `GitError` and `InputError`."""
    backend = store_backend(project_settings(store))
    checkout, folder = checkout_of(backend)
    path = path_of(red.slug, red.key.file)
    changes = file_changes(checkout.top, path if folder == "." else f"{folder}/{path}")
    events = events_of(changes, texts_of(checkout.top, changes), red.key)
    commit = events[-1].commit if events else None
    if commit is None:
        raise NothingToSearch(
            f"no commit contains the baseline of {red.key}, so no good commit is known; give TEST and --good instead of --from"
        )
    if commit.cut_off:
        raise NothingToSearch(
            f"this clone is shallow, so the commit that accepted the baseline of {red.key} is not known: fetch the "
            "history with `git fetch --unshallow`, or on GitHub Actions with fetch-depth: 0 for actions/checkout"
        )
    if commit.name == checkout.revision("HEAD").commit:
        raise NothingToSearch(
            f"HEAD accepted the baseline of {red.key}, so no later commit can have caused the regression"
        )
    return Revision(commit.name, commit.name)


def _check_ends(
    tests: Sequence[str],
    good: str | None,
    bad: str | None,
    package: str | None,
    *,
    packages: bool,
    red: RegressedTest | None,
) -> None:
    """Raise ``click.UsageError`` if the good end or the bad end is missing, or is given although ``--from`` names both ends."""
    if red is not None:
        if tests or good or bad or package or packages:
            raise click.UsageError(
                "--from already names the test and both ends; leave out TEST, --good, --bad, --package and --packages"
            )
        return
    if not tests:
        raise click.UsageError("Missing argument 'TEST...': name a test, or give --from REPORT.")
    if package is not None and packages:
        raise click.UsageError("--package and --packages exclude each other: leave out one of them")
    if good is None and not packages:
        raise click.UsageError(
            "Missing option '--good': give the revision, or with --package the release, at which the test needs less."
        )
    if (package is not None and bad is None) or (packages and (good is None) != (bad is None)):
        raise click.UsageError("Missing option '--bad' or '--good': give both.")


def _say(text: str) -> None:
    click.echo(text, err=True)


def _releases_at_ends(
    good: str | None, bad: str | None, test: str, slug: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the releases of packages at the good end and at the bad end.

    The ends are two lock files if ``good`` and ``bad`` name them, otherwise the environment of the test's baseline and the
    current environment. For example, the result is ``({"transformers": "4.45.0"}, {"transformers": "4.50.0"})``.

    Raises:
        InputError: The test has no baseline, or has baselines from several devices.
    """
    if good is not None and bad is not None:
        good_releases, bad_releases = (pins_of(requirement_set([f"-r {file}"])) for file in (good, bad))
        return good_releases, bad_releases
    settings = project_settings()
    stored = read_baselines(store_backend(settings), slug)
    keys = selected_keys((baseline.key for baseline in stored), test)
    of_test = [baseline for baseline in stored if baseline.key in keys]
    if not of_test:
        check_is_no_file(test)
        hint = f"`{command_name()} show` lists the baselines"
        sentence = f"there is no baseline of {test!r} with packages to compare"
        raise no_such_test(test, sentence, [baseline.key for baseline in stored], hint)
    slugs = sorted({baseline.slug for baseline in of_test})
    if len(slugs) > 1:
        raise InputError(f"{test!r} has baselines from {len(slugs)} devices; choose one: --slug {' or '.join(slugs)}")
    recorded = {name: version for baseline in of_test for name, version in baseline.entry.environment.releases.items()}
    return recorded, versions(recorded)


def _search_packages(searches: _CandidateSearches, good: dict[str, str], bad: dict[str, str]) -> SearchResult:
    """Search the packages whose releases differ between ``good`` and ``bad``, and then the releases of the guilty package.

    For example, with ``{"torch": "2.12.0", "transformers": "4.45.0"}`` and ``{"torch": "2.13.0", "transformers": "4.50.0"}``,
    and a change caused by transformers, the first search finds transformers. The second search tries its releases from
    4.45.0 to 4.50.0, with torch 2.13.0.
    """
    differing, by_package = candidates.packages(good, bad)
    same = same_release_notes(good, bad)
    if not differing:
        why = "; ".join(same) or "all packages have the same releases at both ends"
        raise NothingToSearch(f"{why}, so there is no release to search" if same else why)
    for sentence in same:
        _say(sentence)
    changed = changed_releases(*({name: end[name] for name in differing} for end in (good, bad)))
    _say(f"packages that differ: {'; '.join(changed)}")
    result = searches.find(by_package) if len(differing) > 1 else None
    position = 1 if result is None else by_package.index(result.bad)
    if result is not None and result.skipped:
        return result
    culprit = differing[position - 1]
    # Candidate N has the releases of the bad end for the first N packages, and those of the good end for all other packages.
    pinned_releases = {
        name: (bad if number < position - 1 else good)[name] for number, name in enumerate(differing) if name != culprit
    }
    between = searches.releases(culprit, _on_index(good[culprit]), _on_index(bad[culprit]), pinned_releases)
    return result if result is not None and len(between) == len(by_package[:2]) else searches.find(between)


def _on_index(release: str) -> str:
    return release if release.startswith(ADDRESS_PREFIX) else without_local_version(release)
