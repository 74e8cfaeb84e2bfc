"""Which tensors can be reached from a value, and which memory they are."""

from __future__ import annotations

import collections
import functools
import threading
import types
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.torch_support.reachability import blocks_of, is_on, reachable_tensors

unhurried = settings(deadline=None)
CPU = torch.device("cpu")


def reached(*roots) -> set[int]:
    return {id(tensor) for tensor in reachable_tensors(roots)}


class Plain:
    """An object with whatever attributes it is given."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def method(self):
        return self


class Slotted:
    __slots__ = ("empty", "tensor")

    def __init__(self, tensor):
        self.tensor = tensor


class SlottedBelow(Slotted):
    __slots__ = "other"  # noqa: PLC0205 - a single name may stand by itself

    def __init__(self, tensor, other):
        super().__init__(tensor)
        self.other = other


def closure_over(tensor):
    return lambda: tensor


def with_defaults(tensor):
    def function(argument=tensor, *, keyword=None):
        return argument, keyword

    return function


def with_keyword_default(tensor):
    def function(*, keyword=tensor):
        return keyword

    return function


def suspended(tensor):
    def generate():
        local = tensor
        yield
        yield local

    generator = generate()
    next(generator)
    return generator


def with_attribute(tensor):
    def function():
        return None

    function.cache = tensor
    return function


WAYS = {  # beside those of `NESTS` and of tests/zoo.py
    "a dict's keys": lambda tensor: {tensor: "a"},
    "a default dict": lambda tensor: collections.defaultdict(list, a=[tensor]),
    "a slot of a base class": lambda tensor: SlottedBelow(tensor, None),
    "a single slot": lambda tensor: SlottedBelow(None, tensor),
    "a default": with_defaults,
    "a keyword's default": with_keyword_default,
    "an attribute of a function": with_attribute,
    "a bound method": lambda tensor: Plain(a=tensor).method,
    "a partial's keywords": lambda tensor: functools.partial(print, end=tensor),
    "a partial's function": lambda tensor: functools.partial(closure_over(tensor)),
    "a simple namespace": lambda tensor: types.SimpleNamespace(a=tensor),
    "an attribute of a tensor": lambda tensor: _with(torch.empty(1), tensor),
}


def _with(holder: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    holder.kept = tensor
    return holder


@pytest.mark.parametrize("hold", WAYS.values(), ids=WAYS)
def test_a_tensor_is_reached_through(hold):
    tensor = torch.empty(3)
    assert id(tensor) in reached(hold(tensor))


def test_a_module_reaches_its_parameters_buffers_submodules_and_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    expected = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert reached(model) == expected
    assert len(expected) == 7
    model(torch.ones(2, 2)).sum().backward()
    assert reached(model) == expected | {id(parameter.grad) for parameter in model.parameters()}


def test_an_optimizer_reaches_its_state_and_its_parameters():
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {id(value) for entry in optimizer.state.values() for value in entry.values()}
    assert len(state) == 2 * 3
    assert state | {id(parameter) for parameter in model.parameters()} <= reached(optimizer)


def test_an_output_does_not_reach_what_its_graph_saved():
    saved = torch.ones(3, requires_grad=True)
    output = saved.exp() * 2
    assert reached(output) == {id(output)}


def test_a_tensor_is_yielded_once_however_often_it_is_held():
    tensor = torch.empty(3)
    assert len(list(reachable_tensors([tensor, [tensor, {"a": tensor}], Plain(a=tensor)]))) == 1


def test_equal_tensors_are_told_apart():
    first, second = torch.zeros(3), torch.zeros(3)
    assert reached([first, second]) == {id(first), id(second)}


GLOBAL = torch.empty(3)


def reads_a_global():
    return GLOBAL


class WithClassAttribute:
    shared = torch.empty(3)


@pytest.mark.parametrize(
    "value",
    [reads_a_global, types, WithClassAttribute, WithClassAttribute(), threading.Lock(), iter([])],
    ids=["global", "module", "class", "instance", "lock", "iterator"],
)
def test_what_belongs_to_everybody_or_holds_nothing_is_not_followed(value):
    assert reached(value) == set()


def test_looking_into_a_generator_keeps_nothing_of_it_alive():
    def generate():
        while True:
            local = torch.empty(3)
            yield weakref.ref(local)

    generator = generate()
    first = next(generator)
    assert reached(generator) == {id(first())}
    second = next(generator)
    assert first() is None
    assert second() is not None


def test_what_leads_to_the_session_is_not_followed(request):
    request.node.kept_for_this_test = torch.empty(3)
    assert reached(request, request.node, request.config) == set()


def test_an_empty_cell_and_an_exhausted_generator_hold_nothing():
    def outer():
        def inner():
            return later

        if inner is None:
            later = None
        return inner

    generator = suspended(torch.empty(3))
    list(generator)
    assert reached(outer(), generator) == set()


TENSORS = [torch.empty(count) for count in range(1, 6)]
LEAVES = (
    st.sampled_from(range(len(TENSORS))).map(lambda number: TENSORS[number]) | st.none() | st.integers() | st.text()
)
NESTS = st.recursive(
    LEAVES,
    lambda nests: (
        st.lists(nests, max_size=3)
        | st.lists(nests, max_size=3).map(tuple)
        | st.lists(nests, max_size=3).map(collections.deque)
        | st.dictionaries(st.text(max_size=2), nests, max_size=3)
        | nests.map(lambda nest: Plain(nest=nest))
        | nests.map(closure_over)
        | nests.map(lambda nest: functools.partial(print, nest))
        | nests.map(suspended)
        | nests.map(Slotted)
    ),
    max_leaves=8,
)


def tensors_put_into(nest) -> set[int]:
    """The tensors of a nest, by walking it as it was built."""
    if isinstance(nest, torch.Tensor):
        return {id(nest)}
    if isinstance(nest, dict):
        parts = list(nest.values())
    elif isinstance(nest, (list, tuple, collections.deque)):
        parts = list(nest)
    elif isinstance(nest, Plain):
        parts = [nest.nest]
    elif isinstance(nest, functools.partial):
        parts = list(nest.args)
    elif isinstance(nest, types.FunctionType):
        parts = [nest()]
    elif isinstance(nest, types.GeneratorType):
        parts = [nest.gi_frame.f_locals["local"]]
    elif isinstance(nest, Slotted):
        parts = [nest.tensor]
    else:
        parts = []
    return set().union(*map(tensors_put_into, parts))


@unhurried
@given(NESTS)
def test_exactly_the_tensors_of_any_nest_are_reached(nest):
    assert reached(nest) == tensors_put_into(nest)


# Memory


def test_a_tensor_is_the_bytes_of_its_storage():
    tensor = torch.empty(3, 5)
    assert blocks_of([tensor], CPU) == {tensor.data_ptr(): 60}


def test_views_of_one_storage_count_once_and_whole():
    base = torch.empty(100)
    blocks = blocks_of([base[10:20], base.view(10, 10), base[50:]], CPU)
    assert blocks == {base.data_ptr(): 400}


def test_a_tensor_without_elements_is_no_memory():
    assert blocks_of([torch.empty(0)], CPU) == {}


def test_tensors_elsewhere_are_no_memory_here():
    assert blocks_of([torch.empty(3, device="meta")], CPU) == {}
    assert blocks_of([torch.empty(3)], torch.device("cuda", 0)) == {}


def test_only_memory_of_the_asked_device_counts_among_several():
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert is_on(second, second)
    assert is_on(second, torch.device("cuda"))
    assert not is_on(second, first)
    assert not is_on(CPU, first)


def test_fake_tensors_are_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    assert fake.device == CPU
    assert blocks_of([fake], CPU) == {}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda dense: dense.to_sparse_coo(), ("_indices", "_values")),
        (lambda dense: dense.to_sparse_csr(), ("crow_indices", "col_indices", "values")),
        (lambda dense: dense.to_sparse_csc(), ("ccol_indices", "row_indices", "values")),
        (lambda dense: dense.to_sparse_bsr((2, 2)), ("crow_indices", "col_indices", "values")),
        (lambda dense: dense.to_sparse_bsc((2, 2)), ("ccol_indices", "row_indices", "values")),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc"],
)
def test_a_sparse_tensor_is_the_bytes_of_its_parts(make, parts):
    sparse = make(torch.eye(4))
    expected = {}
    for name in parts:
        storage = getattr(sparse, name)().untyped_storage()
        expected[storage.data_ptr()] = storage.nbytes()
    assert blocks_of([sparse], CPU) == expected
    assert len(expected) == len(parts)


class Wrapped(torch.Tensor):
    """A tensor made of another, as DTensor and quantized weights are: it has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_a_tensor_made_of_others_is_the_bytes_of_those():
    inner = torch.empty(25)
    tensors = list(reachable_tensors([Wrapped(inner)]))
    assert id(inner) in {id(tensor) for tensor in tensors}
    assert blocks_of(tensors, CPU) == {inner.data_ptr(): 100}


def test_looking_allocates_nothing():
    from pytest_gpumem.measuring.devices.cpu import CpuDevice

    model = torch.nn.Linear(8, 8)
    model(torch.ones(1, 8)).sum().backward()
    sparse = torch.eye(4).to_sparse_coo()
    device = CpuDevice()
    device.open()
    try:
        blocks_of(reachable_tensors([model, sparse]), CPU)
        assert device.pop_peak().allocated == 0
    finally:
        device.close()
