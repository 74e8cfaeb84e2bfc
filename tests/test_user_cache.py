"""The cache is refused if another user could have put files there; none of them is loaded or run."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.base import user_cache
from pytest_gpumem.base.errors import CacheError, InstallationError
from pytest_gpumem.base.git import plain_environment
from pytest_gpumem.base.processes import Stop
from pytest_gpumem.base.requirements import environments
from pytest_gpumem.base.requirements.environments import Environments, cache_folder, interpreter
from pytest_gpumem.base.requirements.requirement_set import requirement_set
from pytest_gpumem.base.user_cache import cache_root, check_private_folder, make_private_folder
from pytest_gpumem.tools.bisect.journal import journals_folder
from pytest_gpumem.tools.main import main

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users of this system have no numbers")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache of this user, in a folder that others can write to."""
    folder = tmp_path / "shared" / "pytest-gpumem"
    folder.parent.mkdir()
    folder.parent.chmod(0o1777)
    monkeypatch.setenv("GPUMEM_CACHE", str(folder))
    return folder


def kept(folder: Path) -> Path:
    """Make a folder of the cache that has a library."""
    make_private_folder(folder)
    (folder / "libcudart.so.13").touch()
    return folder


def writable(folder: Path, _monkeypatch) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libcudart.so.13").touch()
    folder.chmod(0o777)


def of_a_group(folder: Path, _monkeypatch) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libcudart.so.13").touch()
    folder.chmod(0o770)


def link(folder: Path, _monkeypatch) -> None:
    theirs = folder.with_name("theirs")
    theirs.mkdir()
    folder.symlink_to(theirs)


def another_users(folder: Path, monkeypatch) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    me = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: me + 1)


WHY = {
    writable: "other users can write to the folder",
    of_a_group: "other users can write to the folder",
    link: "is a symbolic link, which is not followed",
    another_users: "the folder belongs to another user",
}


@pytest.fixture(params=WHY, ids=lambda plant: plant.__name__)
def plant(request):
    return request.param


def test_a_cache_is_made_for_this_user_alone(cache):
    make_private_folder(cache / "emulation")
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (cache, cache / "emulation")] == [0o700, 0o700]


def test_others_are_kept_out_of_a_cache_that_they_could_only_read(cache):
    cache.mkdir(mode=0o755)
    make_private_folder(cache / "emulation")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o777])
def test_an_empty_folder_that_others_could_write_to_is_taken_and_closed(cache, mode):
    cache.mkdir()
    # A folder that the user made has such a mode under the umask 002.
    cache.chmod(mode)
    make_private_folder(cache / "emulation")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_folder_that_another_user_fills_meanwhile_is_refused(cache, monkeypatch):
    cache.mkdir()
    cache.chmod(0o777)
    listed = iter([[], ["libcudart.so.13"]])
    monkeypatch.setattr("os.listdir", lambda _: next(listed))
    with pytest.raises(CacheError, match="other users can write to the folder"):
        make_private_folder(cache / "emulation")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o777


def test_a_cache_that_others_may_have_filled_is_refused(cache, plant, monkeypatch):
    plant(cache, monkeypatch)
    with pytest.raises(CacheError, match=WHY[plant]) as refused:
        make_private_folder(cache / "emulation")
    assert str(refused.value).startswith(f"the cache {cache} is not used: ")
    assert str(refused.value).endswith("; set GPUMEM_CACHE to a new folder, or remove this one if it is yours")
    assert not (cache / "emulation").exists()


@pytest.mark.parametrize("made", [False, True], ids=["new", "closed"])
def test_a_cache_in_a_folder_in_which_others_can_rename_it_is_refused(cache, made):
    if made:
        make_private_folder(cache / "emulation")
    cache.parent.chmod(0o777)
    with pytest.raises(CacheError) as refused:
        make_private_folder(cache / "emulation")
    assert str(refused.value) == (
        f"the cache {cache} is not used: other users can write to {cache.parent}, so they could replace the cache; use "
        f"`chmod o-w {cache.parent}`, or set GPUMEM_CACHE to a folder in another place"
    )
    assert cache.exists() == made
    cache.parent.chmod(0o775)
    make_private_folder(cache / "emulation")


def test_the_folder_around_the_cache_is_made_for_this_user_alone(cache):
    inner = cache / "new" / "pytest-gpumem"
    umask = os.umask(0)
    try:
        make_private_folder(inner / "emulation")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(inner.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["writable", "of_a_group", "another_users"])
def test_a_folder_that_was_filled_before_the_cache_was_closed_is_refused(cache, monkeypatch, name):
    folder = kept(cache / "torch-2.13")
    check_private_folder(folder)
    plant = globals()[name]
    plant(folder, monkeypatch)
    with pytest.raises(CacheError, match=f"{WHY[plant]}; remove it"):
        check_private_folder(folder)


@pytest.mark.skipif(getattr(os, "getuid", lambda: 1)() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_in_a_folder_of_this_one_is_refused(cache):
    folder = kept(cache / "torch-2.13")
    os.chown(folder / "libcudart.so.13", 12345, -1)
    with pytest.raises(CacheError, match=r"libcudart\.so\.13 belongs to another user; remove it"):
        check_private_folder(folder)


def environment(folder: Path) -> Path:
    """Write what looks like an environment that is there, whose interpreter would run."""
    python = interpreter(folder)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    record = {"name": "tinymodels==1.0", "packages": {}, "modules": [], "made": time.time()}
    (folder / "environment.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


@pytest.mark.parametrize("where", ["cache", "environment"])
def test_an_environment_that_others_may_have_filled_is_not_run(cache, monkeypatch, where):
    wanted = requirement_set(["tinymodels==1.0"])
    known = Environments(cache_folder(), plain_environment())
    make_private_folder(known.folder)
    folder = environment(known.folder / environments._key(wanted, emulated=False))
    folder.chmod(0o700)
    assert known.make(wanted, Stop()).python == interpreter(folder)
    (cache if where == "cache" else folder).chmod(0o777)
    with pytest.raises(InstallationError, match="other users can write to the folder"):
        known.make(wanted, Stop())


def test_everything_is_kept_in_the_folder_that_the_variable_names(cache):
    assert {folder.parent for folder in (cache_folder(), journals_folder())} == {cache_root()} == {cache}


def test_clearing_removes_everything_that_is_kept_and_follows_no_link(cache, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    for name in ("emulation", "torchinductor", "bisections"):
        make_private_folder(cache / name)
    (cache / "environments").symlink_to(tmp_path / "elsewhere")
    (cache / "thesis").touch()
    assert CliRunner().invoke(main, ["cache", "--clear"]).exit_code == 0
    assert list(cache.iterdir()) == [cache / "thesis"]
    assert (tmp_path / "elsewhere" / "file").exists()


def test_clearing_a_cache_that_is_a_link_removes_nothing_behind_it(cache, tmp_path):
    theirs = tmp_path / "home"
    (theirs / "environments").mkdir(parents=True)
    cache.symlink_to(theirs)
    cleared = CliRunner().invoke(main, ["cache", "--clear"])
    assert cleared.exit_code == 2
    assert f"{cache} is a symbolic link, which is not followed; remove it" in cleared.output
    assert (theirs / "environments").exists()


def test_clearing_a_cache_that_is_not_there_does_nothing(cache):
    assert CliRunner().invoke(main, ["cache", "--clear"]).exit_code == 0
    assert not cache.exists()


def test_each_folder_that_is_kept_is_cleared():
    package = Path(user_cache.__file__).parents[1]
    named = {
        name for file in package.rglob("*.py") for name in re.findall(r'cache_root\(\) / "(\w+)"', file.read_text())
    }
    assert named == set(user_cache._FOLDERS)
