"""A store from a stranger's branch may hold links: nothing outside of it is read or changed, by no command that writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.base.errors import BackendError
from pytest_gpumem.base.open_folder import OpenFolder
from pytest_gpumem.judging.baselines.folder import Folder, GitBackend
from pytest_gpumem.tools.main import main
from tests.git_store import Repository, entry

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links need permissions on other systems")
SLUG = "cpu-x86_64"
PATH = f"{SLUG}/test_it.py.toml"
TEST = "@pytest.mark.gpumem\ndef test_step():\n    torch.ones({count})\n"
REFUSED = "is a symbolic link, which is not followed; remove it"


def file(store: Path, outside: Path) -> None:
    (store / PATH).symlink_to(outside / "file.toml")


def device_folder(store: Path, outside: Path) -> None:
    (store / SLUG).rmdir()
    (store / SLUG).symlink_to(outside)


def ignore(store: Path, outside: Path) -> None:
    (store / ".gitignore").symlink_to(outside / "ignore")


def lock(store: Path, outside: Path) -> None:
    (store / ".lock").symlink_to(outside / "lock")


def dangling_file(store: Path, outside: Path) -> None:
    (store / PATH).symlink_to(outside / "new.toml")


def dangling_folder(store: Path, outside: Path) -> None:
    (store / SLUG).rmdir()
    (store / SLUG).symlink_to(outside / "new")


def chain(store: Path, outside: Path) -> None:
    (store / "README").symlink_to(outside / "file.toml")
    (store / PATH).symlink_to("../README")


def device(store: Path, outside: Path) -> None:
    (store / PATH).symlink_to("/dev/zero")


KINDS = [file, device_folder, ignore, lock, dangling_file, dangling_folder, chain, device]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def plant(request):
    return request.param


@pytest.fixture
def outside(tmp_path_factory) -> Path:
    """A folder with files that links may lead to. One of them looks like the ignore file of a store."""
    folder = tmp_path_factory.mktemp("outside")
    for name in ("file.toml", "lock", "test_it.py.toml", ".older.draft"):
        (folder / name).write_text("precious\n", encoding="utf-8")
    (folder / "ignore").write_text("/.gitignore\n", encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))}


def empty(store: Path) -> Path:
    (store / SLUG).mkdir(parents=True)
    return store


# The folder


@pytest.mark.parametrize("has_descriptors", [True, False], ids=["by descriptor", "by path, as on Windows"])
def test_no_operation_of_a_folder_reaches_what_a_link_in_it_leads_to(
    tmp_path, outside, plant, monkeypatch, has_descriptors
):
    monkeypatch.setattr("pytest_gpumem.base.open_folder._HAS_DESCRIPTORS", has_descriptors)
    store = empty(tmp_path / "store")
    plant(store, outside)
    before = contents(outside)
    folder = Folder(store)
    told = []
    for work in (
        folder.paths,
        lambda: folder.read(PATH),
        lambda: folder.write(PATH, "mine\n"),
        lambda: folder.remove(PATH),
        lambda: folder.locked().__enter__(),
    ):
        try:
            found = work()
        except BackendError as error:
            told.append(str(error))
        else:
            assert found in (None, [PATH], [])
    assert contents(outside) == before
    assert any(REFUSED in text for text in told)
    assert all(str(store) in text for text in told)


@pytest.mark.parametrize(
    "work",
    [
        lambda folder: folder.read(PATH),
        lambda folder: folder.write(PATH, "theirs\n"),
        lambda folder: folder.remove(PATH),
    ],
    ids=["read", "write", "remove"],
)
def test_a_folder_that_becomes_a_link_after_the_check_is_not_followed(tmp_path, outside, monkeypatch, work):
    store = empty(tmp_path / "store")
    (store / PATH).write_text("mine\n", encoding="utf-8")
    before = contents(outside)
    check = OpenFolder.refuse_link

    def swap(self, name):
        check(self, name)
        if name == SLUG and not (store / SLUG).is_symlink():
            (store / SLUG).rename(tmp_path / "moved")
            (store / SLUG).symlink_to(outside)

    monkeypatch.setattr(OpenFolder, "refuse_link", swap)
    try:
        found = work(Folder(store))
    except BackendError as error:
        found = str(error)
    # Linux says of a link that it is no folder.
    assert found is None or str(store / PATH) in found
    assert (store / SLUG).is_symlink()
    assert contents(outside) == before
    assert (tmp_path / "moved" / "test_it.py.toml").read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize("name", [SLUG, "test_it.py.toml"])
def test_a_link_that_appears_while_a_file_is_written_is_not_followed(tmp_path, outside, monkeypatch, name):
    store = empty(tmp_path / "store")
    before = contents(outside)
    sync = os.fsync

    def swap(descriptor):
        sync(descriptor)
        if name == SLUG:
            (store / SLUG).rename(tmp_path / "moved")
            (store / SLUG).symlink_to(outside)
        else:
            (store / PATH).symlink_to(outside / "file.toml")

    monkeypatch.setattr("os.fsync", swap)
    Folder(store).write(PATH, "mine\n")
    assert contents(outside) == before
    written = tmp_path / "moved" / "test_it.py.toml" if name == SLUG else store / PATH
    assert not written.is_symlink()
    assert written.read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize("has_descriptors", [True, False], ids=["by descriptor", "by path, as on Windows"])
def test_a_store_whose_root_is_a_link_works(tmp_path, monkeypatch, has_descriptors):
    """A user's own choice, for example to a disk that several machines share."""
    monkeypatch.setattr("pytest_gpumem.base.open_folder._HAS_DESCRIPTORS", has_descriptors)
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    folder = Folder(tmp_path / "store")
    with folder.locked():
        folder.write(PATH, "mine\n")
    assert (folder.paths(), folder.read(PATH)) == ([PATH], "mine\n")
    assert (tmp_path / "disk" / PATH).read_text(encoding="utf-8") == "mine\n"
    folder.remove(PATH)
    assert (tmp_path / "store").is_symlink()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == [".gitignore", ".lock"]


def test_a_link_that_no_baseline_can_be_behind_is_left_alone(tmp_path, outside):
    store = empty(tmp_path / "store")
    (store / "README.md").symlink_to(outside / "file.toml")
    (store / SLUG / ".killed.draft").symlink_to(outside / "file.toml")
    folder = Folder(store)
    before = contents(outside)
    with folder.locked():
        folder.write(PATH, "mine\n")
    assert folder.paths() == [PATH]
    assert contents(outside) == before
    assert (store / "README.md").is_symlink()
    assert not (store / SLUG / ".killed.draft").is_symlink()


def test_a_link_in_a_commit_is_named(tmp_path):
    repository = Repository(tmp_path / "project")
    repository.store({"test_step": entry()})
    link = repository.path / "gpumem-baselines" / "h100" / "b.py.toml"
    link.symlink_to("/etc/passwd")
    commit = repository.commit("some")
    with pytest.raises(BackendError, match=f"^HEAD:gpumem-baselines/h100/b.py.toml {REFUSED}$"):
        GitBackend(repository.path, commit, "gpumem-baselines", "HEAD")


# Every command that writes


@pytest.fixture
def measured(project, outside):
    """A project with a report of its last session, and no baseline yet."""
    project.write(TEST.format(count=1_000_000))
    project.run("--gpumem-baseline", "--gpumem-report=report.json")
    assert (project.path / "report.json").exists()
    empty(project.store)
    return project


def refuses(project, outside, plant, command) -> None:
    plant(project.store, outside)
    before = contents(outside)
    told = command()
    assert contents(outside) == before
    assert REFUSED in told


def test_a_session_that_records_changes_nothing_outside(measured, outside, plant):
    def record() -> str:
        result = measured.run("--gpumem-update=all")
        assert result.ret != pytest.ExitCode.OK
        return "\n".join([*result.outlines, *result.errlines])

    refuses(measured, outside, plant, record)


def test_accepting_a_report_changes_nothing_outside(measured, outside, plant, monkeypatch):
    monkeypatch.chdir(measured.path)

    def accept() -> str:
        result = CliRunner().invoke(main, ["accept", "report.json", "--store", "gpumem-baselines"])
        assert result.exit_code == 2
        return result.output

    refuses(measured, outside, plant, accept)


@pytest.mark.parametrize(
    "plant", [kind for kind in KINDS if kind is not dangling_folder], ids=lambda kind: kind.__name__
)
def test_pruning_changes_nothing_outside(measured, outside, plant):
    """A dangling folder hides nothing, so no baseline of it is pruned."""
    measured.run("--gpumem-update=new", "--gpumem-store=kept")
    (baselines,) = (measured.path / "kept").rglob("*.toml")
    other = measured.store / "cpu-other"
    other.mkdir()
    for name in ("test_it", "test_gone"):
        text = baselines.read_text(encoding="utf-8").replace(f'"{SLUG}"', '"cpu-other"')
        (other / f"{name}.py.toml").write_text(text, encoding="utf-8")

    def prune() -> str:
        result = measured.gpumem("prune")
        assert result.returncode == 1
        return result.stderr

    refuses(measured, outside, plant, prune)


@pytest.mark.parametrize("command", [["show"], ["merge", "report.json"], ["why", "test_step", "report.json"]])
def test_commands_that_read_show_nothing_from_outside(measured, outside, command):
    file(measured.store, outside)
    result = measured.gpumem(*command)
    assert "precious" not in result.stdout + result.stderr
    assert contents(outside)["file.toml"] == b"precious\n"


# Other files


def test_a_file_that_is_a_link_is_refused_and_a_folder_is_the_users(tmp_path, outside):
    (tmp_path / "report.json").symlink_to(outside / "file.toml")
    with pytest.raises(OSError, match=REFUSED):
        write_atomically(tmp_path / "report.json", "mine\n")
    assert (outside / "file.toml").read_text(encoding="utf-8") == "precious\n"
    (tmp_path / "reports").symlink_to(outside)
    write_atomically(tmp_path / "reports" / "report.json", "mine\n")
    assert (outside / "report.json").read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize(
    "command",
    [
        ["merge", "report.json", "--report=out.json"],
        ["export", "bencher", "report.json", "--output=out.json"],
        ["export", "openmetrics", "report.json", "--output=out.json"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_command_that_runs_no_tests_writes_through_no_link(measured, outside, monkeypatch, command):
    monkeypatch.chdir(measured.path)
    Path("out.json").symlink_to(outside / "file.toml")
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "which is not followed; name the target of the link, or - for standard output" in result.output
    assert (outside / "file.toml").read_text(encoding="utf-8") == "precious\n"


def test_the_report_that_a_session_keeps_replaces_a_link(measured, outside):
    kept = measured.path / ".pytest_cache" / "d" / "gpumem" / "report.json"
    kept.parent.mkdir(parents=True)
    kept.symlink_to(outside / "file.toml")
    measured.run("-p", "cacheprovider")
    assert kept.is_file()
    assert not kept.is_symlink()
    assert (outside / "file.toml").read_text(encoding="utf-8") == "precious\n"


@pytest.mark.parametrize("at", [".pytest_cache", ".pytest_cache/d", ".pytest_cache/d/gpumem"])
@pytest.mark.parametrize("existing", [True, False], ids=["there", "dangling"])
def test_no_report_is_kept_through_a_link_that_leaves_the_root(measured, outside, at, existing):
    theirs = outside / "theirs"
    if existing:
        theirs.mkdir()
    link = measured.path / at
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(theirs)
    result = measured.run("-p", "cacheprovider", "-W", "ignore::pytest.PytestCacheWarning")
    assert result.ret == 0
    line = (
        f"gpumem why: no report is kept, because {measured.path}/.pytest_cache leads out of the root directory by a *"
    )
    result.stdout.fnmatch_lines([line])
    assert not [path for path in outside.rglob("*") if path.name in ("gpumem", "report.json")]


def test_a_link_of_the_cache_within_the_root_is_followed(measured):
    (measured.path / "build").mkdir()
    (measured.path / ".pytest_cache").symlink_to("build")
    measured.run("-p", "cacheprovider").stdout.no_fnmatch_line("*no report is kept*")
    assert (measured.path / "build" / "d" / "gpumem" / "report.json").is_file()
