"""Modules that a measured test imports first: the frames that loading them leaves keep nothing of the test alive."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import weakref
from importlib.machinery import SourceFileLoader
from importlib.resources import files

import pytest

from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off, frames_cleared_behind_imports

KEEPS_ITS_CALLERS = """
import inspect

def wrap():
    frame = inspect.currentframe()
    caller = frame.f_back

wrap()
"""


class Model:
    pass


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write modules, which are forgotten at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name, text=KEEPS_ITS_CALLERS):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported_beside_a_model(name) -> weakref.ref[Model]:
    model = Model()
    __import__(name)
    return weakref.ref(model)


def is_kept(name) -> bool:
    with cyclic_collector_off():
        return imported_beside_a_model(name)() is not None


def test_an_import_keeps_nothing_of_its_importer_alive(module):
    assert is_kept(module("keeps_first"))
    with frames_cleared_behind_imports():
        assert not is_kept(module("keeps_second"))


def test_modules_that_a_module_imports_are_seen_to_with_it(module):
    module("keeps_inner")
    module("outer", "import keeps_inner\nVALUE = 3\n")
    with frames_cleared_behind_imports():
        assert not is_kept("outer")
    assert sys.modules["outer"].VALUE == 3


def test_a_module_has_its_own_loader_as_without_the_hook(module, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "data.txt").write_text("data")
    module("package/__init__", "LOADER = __spec__.loader, __loader__\n")
    with frames_cleared_behind_imports():
        package = importlib.import_module("package")
    assert {type(one) for one in (*package.LOADER, package.__spec__.loader, package.__loader__)} == {SourceFileLoader}
    assert (files(package) / "data.txt").read_text() == "data"
    assert importlib.reload(package) is package


def test_a_spec_that_is_only_looked_up_is_left_alone(module):
    with frames_cleared_behind_imports():
        spec = importlib.util.find_spec(module("only_looked_up"))
        assert type(spec.loader) is SourceFileLoader
        assert importlib.util.find_spec("there_is_no_such_module") is None


def test_a_module_that_fails_to_load_raises_its_own_error(module):
    module("fails", "import there_is_no_such_module\n")
    with frames_cleared_behind_imports():
        with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
            importlib.import_module("fails")
        assert not is_kept(module("keeps_after_a_failure"))


@pytest.mark.parametrize("fails", [False, True])
def test_the_hook_is_there_within_only(fails):
    before = list(sys.meta_path)
    the_list = sys.meta_path
    try:
        with frames_cleared_behind_imports(), frames_cleared_behind_imports():
            assert len(sys.meta_path) == len(before) + 2
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert sys.meta_path is the_list
    assert sys.meta_path == before


def test_a_hook_that_other_code_has_taken_out_is_not_missed():
    before = list(sys.meta_path)
    with frames_cleared_behind_imports():
        sys.meta_path[:] = before
    assert sys.meta_path == before


def test_hooks_within_each_other_ask_each_finder_once(module):
    asked = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            asked.append(name)

    sys.meta_path.insert(0, Finder)
    try:
        with frames_cleared_behind_imports(), frames_cleared_behind_imports():
            assert not is_kept(module("keeps_within_two"))
    finally:
        sys.meta_path.remove(Finder)
    assert asked.count("keeps_within_two") == 1


def test_threads_import_while_hooks_come_and_go(module):
    names = [module(f"of_thread_{number}", f"VALUE = {number}\n" + KEEPS_ITS_CALLERS) for number in range(40)]
    done = threading.Event()
    failures = []

    def import_all(mine):
        try:
            for name in mine:
                with frames_cleared_behind_imports():
                    importlib.import_module(name)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=import_all, args=(names[start::4],)) for start in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    done.set()
    assert failures == []
    assert [sys.modules[name].VALUE for name in names] == list(range(40))
