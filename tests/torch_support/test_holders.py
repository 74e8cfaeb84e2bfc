"""Who keeps a tensor: the attribute, variable or container that a leak is mended at."""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import logging
import sys
import threading
import types
import weakref
from contextlib import nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpumem.emulating.host_values.backward import _in_mode
from pytest_gpumem.torch_support.garbage_collector import cyclic_collector_off
from pytest_gpumem.torch_support.holders import HIGHEST, MOST_TENSORS, NO_OBJECT, holders_of
from tests.support.processes import own_objects_out_of_sight

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REGISTRY = {}
AMONG_ALL = pytest.mark.parametrize("suites_objects_hidden", [False], indirect=True, ids=["among all objects"])
FROZEN = pytest.mark.parametrize(
    ("suites_objects_hidden", "frozen"),
    [(True, False), (False, True)],
    indirect=["suites_objects_hidden"],
    ids=["young", "frozen"],
)


@pytest.fixture(autouse=True)
def suites_objects_hidden(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide them except from the tests that look among all objects, which takes seconds beside a whole suite."""
    with own_objects_out_of_sight() if getattr(request, "param", True) else nullcontext():
        yield


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    """Return a global of a module that is not hidden."""
    module = types.ModuleType("young")
    module.REGISTRY = {}
    yield module.REGISTRY
    module.REGISTRY.clear()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.last = None


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def told(addresses: Iterable[int]) -> tuple[str, ...]:
    """Return the paths to the holders of some blocks, each once."""
    return tuple(dict.fromkeys(holders_of(dict.fromkeys(addresses, 4)).values()))


@FROZEN
def test_an_attribute_and_an_element_of_one_are_told_by_the_objects_class(frozen):
    net = Net()
    if frozen:
        gc.freeze()
    try:
        net.seen.append({"x": (torch.ones(3),)})
        net.last = torch.ones(4)
        assert told({address(net.seen[0]["x"][0])}) == ("Net.seen[...]",)
        assert told({address(net.last)}) == ("Net.last",)
    finally:
        gc.unfreeze()


def test_a_container_is_told_beside_an_attribute_if_both_hold_the_tensor():
    """A server's `last` is replaced by each request, and its list grows."""
    net = Net()
    net.last = torch.ones(4)
    blocks = {address(net.last): 16}
    assert [*holders_of(blocks, with_container=True).values()] == ["Net.last"]
    net.seen.append({"x": (net.last,)})
    assert [*holders_of(blocks).values()] == ["Net.last"]
    assert [*holders_of(blocks, with_container=True).values()] == ["Net.last, and Net.seen[...]"]


def test_a_view_is_kept_like_the_tensor():
    net = Net()
    net.seen = collections.deque([torch.ones(4, 4)[1]])
    assert told({address(net.seen[0])}) == ("Net.seen[...]",)


def test_a_variable_of_a_function_is_told_with_it():
    kept = []

    def step():
        kept.append(torch.ones(5))

    step()
    assert told({address(kept[0])}) == ("test_a_variable_of_a_function_is_told_with_it.<locals>.kept[...]",)


@AMONG_ALL
def test_a_global_is_told_with_its_module(monkeypatch):
    monkeypatch.setitem(REGISTRY, "last", [torch.ones(6)])
    assert told({address(REGISTRY["last"][0])}) == (f"{__name__}.REGISTRY[...]",)


def test_containers_that_lead_to_one_another_end():
    loop = [torch.ones(8)]
    loop.append(loop)
    assert isinstance(told({address(loop[0])}), tuple)
    del loop[:]


def test_code_of_holders_is_not_run():
    class Hostile:
        def __getattribute__(self, name):
            raise AssertionError(name)

        def __eq__(self, other):
            raise AssertionError

        __hash__ = None

    hostile = Hostile()
    tensor = torch.ones(9)
    object.__setattr__(hostile, "kept", tensor)
    assert told({address(tensor)}) == ("Hostile.kept",)


def test_a_dict_that_is_computed_is_not_asked():
    class Computed:
        __slots__ = ("kept",)

        @property
        def __dict__(self):
            raise RuntimeError

    holder = Computed()
    holder.kept = [torch.ones(10)]
    assert told({address(holder.kept[0])}) == ("Computed.kept[...]",)


# What stays: modules, classes and functions, of a package or of the project


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that keeps tensors in every way that there is."""
    folder = tmp_path / "site-packages"
    (folder / "holdall").mkdir(parents=True)
    (folder / "holdall" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "holdall" / "state.py").write_text(KEEPING, encoding="utf-8")
    information = folder / "hold_all-1.2.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: hold-all\nVersion: 1.2.3\n", encoding="utf-8")
    (information / "top_level.txt").write_text("holdall\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("holdall.state")
    for name in ("holdall", "holdall.state"):
        del sys.modules[name]


KEEPING = """
import functools
import threading
import weakref

CACHE = {}
WEAKLY = weakref.WeakKeyDictionary()


class State:
    _shared_state = {}
    nested = {"lists": [[]]}

    def __init__(self):
        self.__dict__ = self._shared_state


class Meta(type):
    made = []


class Registered(metaclass=Meta):
    pass


class Locals(threading.local):
    made = []

    def __init__(self):
        self.entries = []
        self.made.append(threading.current_thread().name)


THREADS_OWN = Locals()


def make():
    cache = {}

    def put(one):
        cache[0] = one

    return put


put = make()


@functools.lru_cache
def bounded(one):
    return [one]


@functools.cache
def unbounded(one):
    return (one,)


def collect(one, into=[]):
    into.append(one)


def collect_by_name(one, *, into={}):
    into[0] = one


def count(one):
    count.seen = one


class Loader:
    def __init__(self, data):
        self.data = data
"""

WAYS = {
    "a global": (lambda package, one: package.CACHE.update(a=[one]), "holdall.state.CACHE[...]"),
    "a Borg": (lambda package, one: vars(package.State()).update(last=[one]), "State._shared_state[...]"),
    "a class attribute": (lambda package, one: package.State.nested["lists"][0].append(one), "State.nested[...]"),
    "a metaclass": (lambda package, one: package.Meta.made.append(one), "Meta.made[...]"),
    "a class's own attribute": (lambda package, one: setattr(package.Registered, "last", one), "Registered.last"),
    "a weak key": (lambda package, one: package.WEAKLY.update({package.State: one}), "holdall.state.WEAKLY[...]"),
    "a thread's own": (
        lambda package, one: package.THREADS_OWN.entries.append(one),
        "holdall.state.THREADS_OWN -> Locals.entries[...]",
    ),
    "a closure": (lambda package, one: package.put(one), "holdall.state.make.<locals>.cache[...]"),
    "lru_cache": (lambda package, one: package.bounded(one), "lru_cache of holdall.state.bounded[...]"),
    "cache": (lambda package, one: package.unbounded(one), "lru_cache of holdall.state.unbounded[...]"),
    "a default": (lambda package, one: package.collect(one), "holdall.state.collect(into=...)[...]"),
    "a default by name": (
        lambda package, one: package.collect_by_name(one),
        "holdall.state.collect_by_name(into=...)[...]",
    ),
    "a function's attribute": (lambda package, one: package.count(one), "holdall.state.count.seen"),
    "an object of its own": (
        lambda package, one: package.CACHE.update(a=package.Loader([one])),
        "holdall.state.CACHE[...] -> Loader.data[...]",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_package_keeps_is_told_with_its_release(package, way):
    keep, name = WAYS[way]
    kept = torch.ones(11)
    keep(package, kept)
    kept = address(kept)
    assert told({kept}) == (f"hold-all 1.2.3: {name}",)


@FROZEN
def test_an_object_that_is_in_use_is_told_by_its_class_also_where_a_package_has_it(package, frozen):
    loader = package.CACHE["a"] = package.Loader([])
    if frozen:
        gc.freeze()
    try:
        loader.data.append(torch.ones(12))
        assert told({address(loader.data[0])}) == ("Loader.data[...]",)
    finally:
        gc.unfreeze()


def test_a_model_is_one_object_and_its_parts_are_told_by_their_class():
    model = torch.nn.Sequential(torch.nn.Sequential(Net()))
    model[0][0].seen.append(torch.ones(13))
    model[0][0].register_buffer("table", torch.ones(14))
    assert told({address(model[0][0].seen[0])}) == ("Net.seen[...]",)
    assert told({address(model[0][0].table)}) == ("Net.table",)


def test_a_model_that_a_global_keeps_is_told_with_it(registry):
    registry["models"] = [torch.nn.Sequential(torch.nn.Sequential(Net()))]
    registry["models"][0][0][0].last = torch.ones(15)
    kept = address(registry["models"][0][0][0].last)
    assert told({kept}) == ("young.REGISTRY[...] -> Net.last",)


def test_a_long_path_is_told_by_both_its_ends(registry):
    class Link:
        def __init__(self, held):
            self.held = held

    kept = torch.ones(16)
    registry["chain"] = Link(Link(Link([kept])))
    kept = address(kept)
    assert told({kept}) == ("young.REGISTRY[...] -> ... -> Link.held[...]",)


def test_a_holder_that_is_too_far_away_is_said(registry):
    kept = nest = torch.ones(17)
    for _ in range(HIGHEST + 1):
        nest = [nest]
    registry["far"] = nest
    kept = address(kept)
    assert told({kept}) == (f"an object more than {HIGHEST} references away, or a reference cycle",)


def test_the_shortest_path_wins_whichever_was_there_first(registry):
    kept = torch.ones(18)
    for name in ("long", "short", "longer"):
        registry[name] = kept if name == "short" else Net()
    registry["long"].last = registry["longer"].seen = kept
    kept = address(kept)
    assert told({kept}) == ("young.REGISTRY[...]",)


def test_of_many_tensors_some_are_looked_at(registry):
    registry["many"] = [torch.ones(19) for _ in range(5 * MOST_TENSORS)]
    assert told({address(one) for one in registry["many"]}) == ("young.REGISTRY[...]",)


def test_what_another_thread_keeps_for_itself_is_found_and_asked_for_nothing(package):
    ready, stop = threading.Event(), threading.Event()
    kept, made = [], package.Locals.made

    def work():
        package.THREADS_OWN.entries.append(torch.ones(20))
        kept.append(address(package.THREADS_OWN.entries[0]))
        ready.set()
        stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        before = len(made)
        assert told({*kept}) == ("hold-all 1.2.3: holdall.state.THREADS_OWN -> Locals.entries[...]",)
        assert len(made) == before
    finally:
        stop.set()
        thread.join()


def test_a_kept_exception_is_the_holder_of_variables_in_its_frames(registry):
    def fails():
        kept = torch.ones(24)
        places.append(address(kept))
        raise ValueError

    places: list[int] = []
    with pytest.raises(ValueError) as raised:
        fails()
    registry["last"] = raised.value
    del raised
    assert told({*places}) == ("young.REGISTRY[...]",)


def test_looking_keeps_nothing_alive_until_a_collection(package):
    """The collector is off while steps are recorded: a frame in a variable of its own would keep all that they held."""
    package.CACHE["a"] = package.Loader([torch.ones(22)])
    kept = weakref.ref(package.CACHE["a"].data[0])
    with cyclic_collector_off():
        assert told({address(package.CACHE["a"].data[0])})
        package.CACHE.clear()
        assert kept() is None


def test_what_a_running_function_has_asked_for_stays_as_it_is():
    """Until Python 3.12 a frame gives the same dict to all who ask for its variables, which then holds itself."""
    kept = [torch.ones(23)]
    asked_for = locals()
    assert len(told({address(kept[0])})) == (sys.version_info < (3, 13))
    assert asked_for["kept"] is kept
    asked_for.clear()


def test_pytest_is_not_blamed_for_what_its_fixtures_have(request):
    request.node.stash_of_mine = [torch.ones(21)]
    assert told({address(request.node.stash_of_mine[0])}) == ("",)


@AMONG_ALL
def test_what_torch_caches_is_told_as_torchs():
    module = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4))
    with torch.nn.utils.parametrize.cached():
        kept = address(module.weight)
        assert told({kept}) == (f"torch {version('torch')}: torch.nn.utils.parametrize._cache[...]",)


# This package's own


class Watcher:
    """A callable with state, as a hook or a strategy is."""

    def __init__(self):
        self.memo = []

    def __call__(self, *given):
        return given


def ours(function):
    """Return a function as this package makes them around others, such as hooks on an emulated GPU."""
    return _in_mode(None, function)


WRAPPED = {
    "a closure": ours,
    "a closure of a closure": lambda watcher: ours(ours(watcher)),
    "a bound method": lambda watcher: ours(watcher.__call__),
    "a partial": lambda watcher: functools.partial(ours(watcher), 1),
    "a partial within": lambda watcher: ours(functools.partial(watcher, 1)),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_functions_of_this_package_are_seen_through(registry, way):
    watcher = Watcher()
    watcher.memo.append(torch.ones(31))
    kept = address(watcher.memo[0])
    registry["hook"] = WRAPPED[way](watcher)
    del watcher
    assert told({kept}) == ("young.REGISTRY[...] -> Watcher.memo[...]",)


# What only an autograd graph holds


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        tripled = x * 3
        ctx.save_for_backward(tripled)
        ctx.extra = x * 4
        ctx.places = [address(tripled), address(ctx.extra)]
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def saved_by_an_operator():
    inner = torch.ones(32, requires_grad=True) * 2
    result = inner.exp()
    return result.sum(), address(result)


def saved_by_a_function():
    result = Doubled.apply(torch.ones(33, requires_grad=True))
    return result.sum(), result.grad_fn.places[0]


def an_attribute_of_a_function():
    result = Doubled.apply(torch.ones(34, requires_grad=True))
    return result.sum(), result.grad_fn.places[1]


def a_leaf():
    leaf = torch.ones(35, requires_grad=True)
    return (leaf * 2).sum(), address(leaf)


def with_hooks():
    def unpack(packed):
        raise AssertionError(packed)

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        return saved_by_an_operator()


@pytest.mark.parametrize(
    "make", [saved_by_an_operator, saved_by_a_function, an_attribute_of_a_function, a_leaf, with_hooks]
)
def test_what_only_an_autograd_graph_holds_is_told_with_what_keeps_the_graph(registry, make):
    loss, kept = make()
    registry["losses"] = [loss]
    del loss
    assert told({kept}) == ("the autograd graph of young.REGISTRY[...]",)


def test_the_root_of_a_graph_is_the_holder_and_no_tensor_within_it(registry):
    loss, kept = saved_by_an_operator()
    registry["losses"] = [loss * 2]
    loss = weakref.ref(loss)
    assert loss() is None
    assert told({kept}) == ("the autograd graph of young.REGISTRY[...]",)


def test_what_no_object_of_python_holds_is_said():
    nobodys = torch.empty(36)
    where = address(nobodys)
    del nobodys
    assert told({where}) == (NO_OBJECT,)


def test_an_array_of_numpys_on_the_memory_is_followed_to_its_holder(registry):
    kept = torch.ones(37)
    where = address(kept)
    registry["arrays"] = [kept[5:].numpy()[3:]]
    del kept
    assert holders_of({where: 37 * 4}) == {where: "young.REGISTRY[...]"}


def test_a_variable_of_a_running_function_is_told_if_nothing_else_holds_the_tensor(registry):
    alone, also_elsewhere = torch.ones(38), torch.ones(39)
    registry["also"] = also_elsewhere
    assert told({address(alone)}) == (f"{sys._getframe().f_code.co_name}.<locals>.alone",)
    assert told({address(also_elsewhere)}) == ("young.REGISTRY[...]",)


def test_a_gradient_that_nobody_has_read_is_told_with_its_parameter(registry):
    registry["weight"] = weight = torch.ones(40, requires_grad=True)
    (weight * 2).sum().backward()
    where = address(weight.grad)
    del weight
    assert told({where}) == ("the gradient of young.REGISTRY[...]",)


def test_a_record_of_logging_is_told_with_what_keeps_the_record(registry):
    kept = torch.ones(41)
    registry["records"] = [logging.makeLogRecord({"args": (kept,)})]
    kept = address(kept)
    assert told({kept}) == ("young.REGISTRY[...] -> LogRecord.args[...]",)


def test_a_gradient_is_the_leafs_also_if_a_graph_leads_to_the_leaf(registry):
    registry["weight"] = weight = torch.ones(42, requires_grad=True)
    registry["kept"] = [(weight * 2).sum()]
    (weight * 2).sum().backward()
    where = address(weight.grad)
    del weight
    assert told({where}) == ("the gradient of young.REGISTRY[...]",)


@pytest.mark.parametrize(
    ("name", "file", "path"),
    [
        ("__main__", "/srv/serve.py", "serve.KEPT"),
        ("__mp_main__", "/srv/serve.py", "serve.KEPT"),
        ("__main__", "/srv/server/__main__.py", "server.KEPT"),
        ("__main__", None, "__main__.KEPT"),
    ],
)
def test_a_program_is_called_after_its_file(name, file, path):
    program = types.ModuleType(name)
    if file is not None:
        program.__file__ = file
    program.KEPT = torch.ones(43)
    assert told({address(program.KEPT)}) == (path,)


def test_a_dict_that_another_thread_changes_is_searched():
    """Python raises an error if a dict changes while a loop reads it, and another thread may run between two items."""
    program = types.ModuleType("program")
    names = vars(program)
    names.update({f"before_{number}": None for number in range(100_000)}, KEPT=torch.ones(44))
    ended = threading.Event()

    def change():
        while not ended.is_set():
            if names.pop("changed", False) is False:
                names["changed"] = None

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        paths = {told({address(program.KEPT)}) for _ in range(3)}
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert paths == {("program.KEPT",)}
