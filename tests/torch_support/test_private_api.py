"""The private names of torch: that they do what measuring needs of them, whichever torch it is."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import _FlopCounterMode

from pytest_gpumem.facts.values.events import AllocationEvent
from pytest_gpumem.torch_support.private_api import allocator, autograd, dispatch, tensors
from pytest_gpumem.torch_support.private_api.allocator import (
    before_history_changes,
    clear_cublas_workspaces,
    cublas_workspace_sizes,
    cuda_snapshot,
    note_on_allocations,
    peak_resets,
)
from pytest_gpumem.torch_support.private_api.attributes import MODULE_PARTS
from pytest_gpumem.torch_support.private_api.autograd import next_node_number, running_node_number
from pytest_gpumem.torch_support.private_api.compiler import (
    activation_memory_budget,
    around_scripts,
    before_compiling,
    compiled_graphs,
    compiles_within_modes,
    is_tracing,
    lists_of_script,
    load_compiler,
    may_have_compiled,
    never_compiled,
    script_as,
    untraced,
)
from pytest_gpumem.torch_support.private_api.dispatch import (
    beneath_modes,
    flop_counter,
    is_higher_order,
    outside_torch_function,
    run_kernel,
    takes_numbers_for_tensors,
    watched_operators,
)
from pytest_gpumem.torch_support.private_api.numerics import tf32_allowed
from pytest_gpumem.torch_support.private_api.profiler import (
    allocation_events,
    event_tree,
    recording_no_operators,
    threads_of_spans,
)
from pytest_gpumem.torch_support.private_api.tensors import (
    data_address,
    parts_of_coo,
    reduced_with_attribute,
    unwrapped,
)


def recorded(run) -> list[AllocationEvent]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return allocation_events(profiler)


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_allocations_and_frees_are_events_with_their_address_and_the_bytes_asked_for():
    kept = []
    (event,) = recorded(lambda: kept.append(tensor(1001)))
    assert (event.address, event.nbytes) == (kept[0].untyped_storage().data_ptr(), 1001)
    allocation, free = recorded(lambda: tensor(1001))
    assert free == AllocationEvent(free.time_ns, allocation.address, -1001)
    assert free.time_ns >= allocation.time_ns


def test_many_events_come_in_the_order_in_which_they_happened():
    sizes = [64 + 8 * number for number in range(300)]

    def run():
        for size in sizes:
            tensor(size)

    assert [event.nbytes for event in recorded(run)] == [signed for size in sizes for signed in (size, -size)]


def test_events_within_operators_are_found_at_any_depth():
    left = torch.ones(1000)

    def run():
        with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
            (left + left).square()

    assert [event.nbytes for event in recorded(run)] == [4000, 4000, -4000, -4000]


def test_events_of_a_backward_pass_are_found():
    weight = torch.ones(1000, requires_grad=True)
    loss = weight.sum()
    events = recorded(loss.backward)
    assert weight.grad.untyped_storage().data_ptr() in {event.address for event in events if event.nbytes == 4000}


def test_without_operators_the_same_allocations_are_recorded_and_nothing_else():
    def step() -> None:
        weight = torch.ones(10, 10, requires_grad=True)
        with torch.profiler.record_function("mine"):
            (torch.ones(10, 10) @ weight).relu().sum().backward()

    def profiled():
        profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
        profiler.__enter__()
        return profiler

    def read(profiler) -> tuple[list[int], list[str]]:
        step()
        profiler.__exit__(None, None, None)
        stack = list(event_tree(profiler))
        names = []
        while stack:
            event = stack.pop()
            names.append(event.name)
            stack += event.children
        return [event.nbytes for event in allocation_events(profiler)], names

    expected, names = read(profiled())
    assert {"mine", "aten::mm", "[memory]"} <= set(names)
    with recording_no_operators():
        profiler = profiled()
    assert read(profiler) == (expected, ["[memory]"] * len(expected))
    assert read(profiled()) == (expected, names), "the next profiler records all again"


def made_up(kind: str, time_ns: int, nbytes: int = 0, *children, device: str = "cpu"):
    """As much of an event of the profiler's tree as is looked at."""
    fields = SimpleNamespace(ptr=nbytes, alloc_size=nbytes, device=torch.device(device))
    return SimpleNamespace(
        tag=getattr(_EventType, kind), start_time_ns=time_ns, extra_fields=fields, children=list(children)
    )


def events_of_tree(*roots) -> list[int]:
    results = SimpleNamespace(experimental_event_tree=lambda: list(roots))
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    return [event.nbytes for event in allocation_events(profiler)]


def test_events_are_put_in_order_when_the_tree_does_not_have_them_so():
    assert events_of_tree(
        made_up("TorchOp", 30, 0, made_up("Allocation", 35, 4), made_up("Allocation", 32, 3)),
        made_up("TorchOp", 10, 0, made_up("TorchOp", 11, 0, made_up("Allocation", 12, 1))),
        made_up("Allocation", 20, 2),
    ) == [1, 2, 3, 4]


def test_events_of_the_same_moment_stay_as_the_tree_has_them():
    assert events_of_tree(*(made_up("Allocation", 5, nbytes) for nbytes in (3, -3, 1, 2, -1))) == [3, -3, 1, 2, -1]


def test_events_of_a_gpu_are_left_out():
    assert events_of_tree(made_up("Allocation", 1, 5, device="cuda"), made_up("Allocation", 2, 7)) == [7]


def test_indices_and_values_of_sparse_tensors_are_found_uncopied_coalesced_or_not():
    indices, values = torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0])
    uncoalesced = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=False)
    assert not uncoalesced.is_coalesced()
    for sparse, count in ((uncoalesced, 2), (uncoalesced.coalesce(), 1)):
        found_indices, found_values = parts_of_coo(sparse)
        assert (found_indices.shape, found_values.shape) == ((2, count), (count,))
        again = parts_of_coo(sparse)
        assert [part.data_ptr() for part in again] == [found_indices.data_ptr(), found_values.data_ptr()]


def test_a_pickled_tensor_has_the_attribute_that_it_is_given_when_it_is_read(monkeypatch, tmp_path):
    reduce = torch.Tensor.__reduce_ex__
    monkeypatch.setattr(
        torch.Tensor,
        "__reduce_ex__",
        lambda self, protocol: reduced_with_attribute(reduce(self, protocol), torch.Tensor, "told", 7),
    )
    tensor = torch.arange(3)
    torch.save(tensor, tmp_path / "saved.pt")
    for read in (torch.load(tmp_path / "saved.pt", weights_only=True), pickle.loads(pickle.dumps(tensor))):
        assert (read.told, read.tolist()) == (7, [0, 1, 2])


def test_the_workspaces_of_cublas_are_cleared(monkeypatch):
    cleared = []
    monkeypatch.setattr("torch._C._cuda_clearCublasWorkspaces", lambda: cleared.append(True), raising=False)
    clear_cublas_workspaces()
    assert cleared == [True]


def test_a_torch_that_cannot_clear_workspaces_says_so(monkeypatch):
    monkeypatch.delattr("torch._C._cuda_clearCublasWorkspaces", raising=False)
    with pytest.raises(AttributeError, match="_cuda_clearCublasWorkspaces"):
        clear_cublas_workspaces()


def test_the_sizes_of_workspaces_are_those_that_a_release_tells(monkeypatch):
    for name in ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize"):
        monkeypatch.delattr(torch._C, name, raising=False)
    assert cublas_workspace_sizes() == frozenset()
    monkeypatch.setattr(torch._C, "_cuda_getCublasWorkspaceSize", lambda: 33_554_432, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCublasLtWorkspaceSize", lambda: 0, raising=False)
    assert cublas_workspace_sizes() == {33_554_432}


def test_what_public_resets_end_in_is_among_the_names_that_are_guarded():
    import inspect

    public = [torch.cuda.reset_peak_memory_stats]
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "reset_peak_memory_stats"):
        public.append(torch.accelerator.reset_peak_memory_stats)
    for reset in public:
        source = inspect.getsource(reset)
        assert any(f"{module}.{name}(" in source for module, name in peak_resets("cuda")), reset


# torch.compile


@pytest.fixture
def compiled():
    """A function that is compiled by a backend which compiles nothing; its code is forgotten afterwards."""
    torch.compiler.reset()
    yield torch.compile(lambda x: x.sin() + 1, backend="eager")
    torch.compiler.reset()


class Breaks:
    """Nothing can be compiled across its borders, so what is called within is called while torch.compile looks on."""

    def __enter__(self):
        torch._dynamo.graph_break()

    def __exit__(self, *raised: object):
        torch._dynamo.graph_break()


def inner(x):
    return x.cos()


def outer(x):
    return inner(x.sin())


@pytest.mark.parametrize(("called", "graphs"), [(outer, 1), (never_compiled(outer), 0)])
def test_a_function_that_is_never_compiled_is_not_and_nothing_that_it_calls(compiled, called, graphs):
    def step(x):
        with Breaks():
            x = called(x)
        return [x for _ in range(2) if not torch._dynamo.graph_break()]

    before = compiled_graphs()
    (result, _) = torch.compile(step, backend="eager")(torch.ones(3))
    assert compiled_graphs() - before == graphs
    assert torch.equal(result, torch.ones(3).sin().cos())


def test_operators_are_watched_and_their_flops_counted_without_the_compiler(monkeypatch):
    wrapped = getattr(_FlopCounterMode.__torch_dispatch__, "__wrapped__", None)
    monkeypatch.delattr(wrapped, "__dynamo_disable", raising=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it raises
    square = torch.ones(3, 3)
    with flop_counter({}) as counter, watched_operators(lambda _operator, _args, _kwargs, run: run()):
        square.mm(square)
    assert counter.get_total_flops() == 2 * 3**3


def test_whether_modes_keep_a_release_from_compiling_is_known(compiled):
    class Mode(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    before = compiled_graphs()
    with Mode():
        compiled(torch.ones(3))
    assert (compiled_graphs() > before) == compiles_within_modes()


def test_compiled_graphs_are_counted_and_so_is_every_recompilation(compiled):
    before = compiled_graphs()
    compiled(torch.ones(3))
    assert compiled_graphs() == before + 1
    compiled(torch.ones(3))
    assert compiled_graphs() == before + 1
    compiled(torch.ones(3, dtype=torch.float64))
    assert compiled_graphs() == before + 2


def test_a_compiled_function_without_an_operator_of_torch_counts_no_graph():
    torch.compiler.reset()
    before = compiled_graphs()
    assert torch.compile(lambda x: x, backend="eager")(5) == 5
    assert compiled_graphs() == before


def test_the_budget_of_activations_decides_what_backward_computes_again():
    def saved_for_backward(fraction: float) -> int:
        from functorch.compile import min_cut_rematerialization_partition, nop
        from torch._functorch.aot_autograd import aot_function

        kept = []

        def forward(graph, inputs):
            kept.append(len(list(graph.graph.nodes)[-1].args[0]) - 1)
            return nop(graph, inputs)

        def run(x, weight):
            for _ in range(4):
                x = torch.tanh(x @ weight)
            return x.sum()

        function = aot_function(
            run, fw_compiler=forward, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
        )
        with activation_memory_budget(fraction):
            x = torch.ones(64, 64, requires_grad=True)
            weight = torch.eye(64, requires_grad=True)
            function(x, weight).backward()
        return kept[0]

    assert saved_for_backward(0.0) < saved_for_backward(1.0)


def test_the_compiler_is_loaded_and_nobody_is_warned(monkeypatch):
    loaded = []

    def load(name):
        warnings.warn("of its own use of torch.jit", DeprecationWarning, stacklevel=1)
        loaded.append(importlib.util.find_spec(name).name)

    monkeypatch.setattr(
        "pytest_gpumem.torch_support.private_api.compiler.importlib", SimpleNamespace(import_module=load)
    )
    load_compiler()
    assert loaded == ["torch._inductor.compile_fx"]


def test_watched_operators_are_told_below_autograd_and_run_when_asked():
    seen = []

    def told(operator, args, kwargs, run):
        seen.append(str(operator.overloadpacket))
        return run()

    weight = torch.ones(2, 2, requires_grad=True)
    with watched_operators(told):
        (torch.ones(1, 2) @ weight).sum().backward()
    assert seen.count("aten.mm") == 2
    assert torch.equal(weight.grad, torch.ones(2, 2))
    seen.clear()
    torch.ones(1).exp()
    assert seen == []


def test_a_node_that_runs_has_the_number_that_was_the_next_when_it_was_made():
    x = torch.ones(2, requires_grad=True)
    made = []
    y = x
    for _ in range(2):
        made.append(next_node_number())
        y = y.exp()
    ran = []
    y.grad_fn.register_prehook(lambda _: ran.append(running_node_number()))
    assert running_node_number() is None
    y.sum().backward()
    assert (ran, running_node_number()) == ([made[1]], None)


def test_what_makes_no_node_leaves_the_next_number():
    number = next_node_number()
    torch.ones(2).exp()
    assert next_node_number() == number


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_sizes_are_numbers_out_of_the_trace_and_the_program_is_traced_within():
    seen = []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.neg.default:
                with untraced():
                    seen.append(type(args[0].numel()))
            return func(*args, **(kwargs or {}))

    def program(x):
        with untraced() as traced:
            x.abs()
            seen.append((type(x.numel()), is_tracing()))
            return traced(torch.neg)(x)

    with Looking():
        graph = torch.jit.trace(program, torch.ones(3), check_trace=False).graph
    assert seen == [(int, False), int]
    assert [node.kind() for node in graph.nodes()] == ["aten::neg"]
    assert not is_tracing()


@pytest.mark.parametrize(("name", "takes"), [("mul", True), ("view", False), ("equal", False)])
def test_an_operator_takes_numbers_for_tensors_or_refuses_them(name, takes):
    operator = {"mul": torch.ops.aten.mul.Tensor, "view": torch.ops.aten.view, "equal": torch.ops.aten.equal}[name]
    refused = nullcontext() if takes else pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'")
    with refused:
        operator(*{"mul": (torch.ones(1), 2), "view": (2.0, [1]), "equal": (torch.ones(1), 2)}[name])
    assert takes_numbers_for_tensors(name) == takes


def test_a_tensor_is_found_within_all_wrappers_of_transformations():
    seen = []

    def look(x):
        seen.append(unwrapped(x).untyped_storage().nbytes())
        return x.sum()

    torch.vmap(torch.func.grad(look))(torch.ones(5, 2))
    assert seen == [40]
    torch.func.functionalize(look)(torch.ones(3))
    assert seen == [40, 12]
    plain = torch.ones(2)
    assert unwrapped(plain) is plain


def test_beneath_modes_neither_modes_nor_subclasses_see_what_is_done():
    seen = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    def told(operator, _args, _kwargs, run):
        seen.append(operator)
        return run()

    below = torch.ones(2).as_subclass(Subclass)
    with Functions(), watched_operators(told), beneath_modes():
        torch.empty(3)
        torch.add(below, 1)
    assert seen == []
    with Functions(), watched_operators(told):
        torch.add(below, 1)
    assert len(seen) >= 3


def test_a_module_keeps_its_parts_in_dicts_by_name():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert vars(model)[MODULE_PARTS["modules"]] == {"0": model[0]}
    assert vars(model[0])[MODULE_PARTS["parameters"]] == dict(model[0].named_parameters())
    assert vars(model[0])[MODULE_PARTS["buffers"]] == dict(model[0].named_buffers())


def test_the_current_dispatch_mode_is_the_innermost_of_this_thread():
    from torch.utils.flop_counter import FlopCounterMode

    assert dispatch.current_dispatch_mode() is None
    with FlopCounterMode(display=False):
        mode = dispatch.current_dispatch_mode()
        assert mode is not None
    assert dispatch.current_dispatch_mode() is None


def test_a_thread_knows_that_it_runs_backward():
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(autograd.in_backward()))
    assert not autograd.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not autograd.in_backward()


def test_all_python_that_backward_calls_can_be_replaced(monkeypatch):
    from torch.autograd.function import BackwardCFunction, _HookMixin
    from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

    monkeypatch.setattr(torch.Tensor, "register_hook", torch.Tensor.register_hook)
    name = "register_post_accumulate_grad_hook"
    monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    monkeypatch.setattr(_HookMixin, "_register_hook", staticmethod(_HookMixin._register_hook))
    monkeypatch.setattr(BackwardCFunction, "apply", BackwardCFunction.apply)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", torch.autograd.Variable._execution_engine)
    monkeypatch.setattr(saved_tensors_hooks, "__init__", saved_tensors_hooks.__init__)
    saved = torch._C._autograd.SavedTensor
    monkeypatch.setattr(saved, "register_hooks", saved.register_hooks)
    called, replaced = [], []

    def counted(call):
        def run(*args, **named):
            replaced.append(call)
            return call(*args, **named)

        return run

    def hook(name, result=None):
        return lambda *args: called.append(name) or result

    autograd.replace_python_of_backward(differentiating=counted, unpacking=counted)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            called.append("function")
            return gradient * 2

    def of_tensor(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(hook("later"))

    def unpack(tensor):
        called.append("unpack")
        return tensor

    layer = torch.nn.Linear(3, 3)
    layer.register_full_backward_hook(hook("module"))
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(of_tensor)
    leaf.register_post_accumulate_grad_hook(hook=hook("leaf"))
    register_multi_grad_hook((leaf,), hook("several"))
    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = Doubled.apply(leaf) ** 2
    out.grad_fn.register_prehook(hook("before"))
    out.grad_fn.register_hook(hook("after"))
    other = out.exp()
    other.grad_fn._raw_saved_result.register_hooks(lambda tensor: tensor, unpack)
    layer(other).sum().backward()
    assert sorted(called) == ["after", "before", "function", "later", "leaf", "module", "several", "unpack", "unpack"]
    # `of_tensor` is one more, and torch has a function of its own before and after a module.
    assert len(replaced) >= len(called) + 1


def test_the_node_that_runs_has_a_name():
    seen = []
    y = torch.ones(3, requires_grad=True).exp()
    y.grad_fn.register_prehook(lambda _: seen.append(autograd.running_node_name()))
    assert autograd.running_node_name() is None
    y.sum().backward()
    assert seen == ["ExpBackward0"]


def test_what_is_run_in_backward_is_run_once_whatever_the_caller_is_in():
    seen = []
    for surroundings in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with surroundings:
            autograd.run_in_backward(lambda: seen.append(autograd.in_backward()), torch.device("cpu"))
    assert seen == [True] * 3


def test_what_waits_for_cuda_is_not_called_without_it():
    if torch.cuda.is_initialized():
        pytest.skip("this process has used CUDA")
    called = []
    allocator.when_cuda_begins(lambda: called.append(True))
    assert called == []


def test_tensors_of_the_host_are_printed_as_ever(monkeypatch):
    monkeypatch.setattr(torch._tensor_str, "_tensor_str", torch._tensor_str._tensor_str)
    before = str(torch.arange(3.0))
    tensors.print_by_way_of_the_host()
    assert str(torch.arange(3.0)) == before == "tensor([0., 1., 2.])"


def test_the_operators_that_a_kernel_calls_are_seen_by_the_modes():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Mode():
        found = run_kernel(torch.ops.aten.isin.Tensor_Tensor, "CPU", (torch.arange(100), torch.arange(60)), {})
    assert found.sum() == 60
    assert "isin" not in seen
    assert any("unique" in name for name in seen)


class Listing(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        found: list[int] = x.tolist()
        return found


class Calling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listing = Listing()

    def forward(self, x: torch.Tensor):
        return self.listing(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of another category in each release
def test_a_script_runs_within_a_context_and_tells_which_lists_it_makes_of_tensors(monkeypatch):
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        monkeypatch.setattr(kind, "__call__", kind.__call__)
    seen = []

    @contextmanager
    def around(script, given):
        yield seen.append((lists_of_script(script), len(given)))

    around_scripts(around)
    assert torch.jit.script(Calling())(torch.arange(3)) == [0, 1, 2]
    assert torch.jit.script(torch.nn.functional.relu)(torch.ones(2)).sum() == 2
    assert seen == [(["List[int]"], 1), ([], 1)]


def test_a_backward_pass_in_another_thread_is_seen_while_it_runs():
    x, seen = torch.ones(3, requires_grad=True), []
    with ThreadPoolExecutor(1) as pool:
        x.register_hook(lambda _: seen.append(pool.submit(autograd.backward_runs).result()))
        x.sum().backward()
    assert (seen, autograd.backward_runs()) == ([True], False)


def test_a_release_without_the_name_of_the_engines_run_says_so(monkeypatch):
    assert autograd.engine_run_is_seen()
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    assert not autograd.engine_run_is_seen()


# What autograd saved


def no_unpacking(packed):
    raise AssertionError(packed)


def test_what_a_node_saved_is_read_and_not_unpacked():
    inner = torch.ones(3, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor), no_unpacking):
        result = inner.exp() * inner
    saved = [one for node in (result.grad_fn, *autograd.next_nodes(result.grad_fn)) for one in autograd.saved_by(node)]
    packed = [one[1].data_ptr() for one in saved if type(one) is tuple]
    assert inner.data_ptr() in packed
    assert len(packed) == 3


def test_a_leaf_is_saved_by_the_node_that_accumulates_its_gradient():
    leaf = torch.ones(3, requires_grad=True)
    (accumulates,) = autograd.next_nodes((leaf * 2).grad_fn)
    assert any(one is leaf for one in autograd.saved_by(accumulates))


def test_a_node_whose_tensors_backward_has_freed_saved_nothing():
    result = torch.ones(3, requires_grad=True).exp()
    result.sum().backward()
    assert [one for one in autograd.saved_by(result.grad_fn) if one is not None] == []


class Squaring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_a_mode_sees_functions_in_backward_only_if_it_is_entered_around_the_pass():
    loss = Squaring.apply(torch.ones(3, requires_grad=True)).sum()
    seen, roots = [], []

    def mode():
        return dispatch.function_mode(lambda func, args, kwargs: seen.append(func.__name__) or func(*args, **kwargs))

    def around(of_pass):
        roots.extend(of_pass)
        return mode()

    with mode():
        loss.backward(retain_graph=True)
    assert seen == ["backward"]
    with autograd.engine_run_within(around), mode():
        loss.backward(retain_graph=True)
    assert seen[1] == "backward"
    assert "mul" in seen[-1], "a function that the backward of `Squaring` calls"
    loss.backward()
    assert len(roots) == 1, "a pass after the context is torch's own"
    assert roots[0] is loss


def minus(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a script calls torch's operator")


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of another category in each release
def test_a_script_calls_an_operator_in_place_of_a_python_function():
    script_as(minus, "sub")

    def step(x: torch.Tensor) -> torch.Tensor:
        return minus(x, x)

    assert torch.jit.script(step)(torch.ones(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("operator", "takes"), [(torch.ops.higher_order.cond, True), (torch.ops.aten.add.Tensor, False)]
)
def test_an_operator_takes_functions_or_tensors(operator, takes):
    assert is_higher_order(operator) == takes


def test_a_function_mode_decides_about_each_function_and_its_class_is_made_once():
    with dispatch.function_mode(lambda func, _args, _kwargs: func.__name__) as mode:
        assert torch.ones(3) == "ones"
    assert type(dispatch.function_mode(print)) is type(mode)


class Overriding(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_neither_modes_nor_classes_override_functions_within_the_context():
    tensor = torch.ones(3).as_subclass(Overriding)

    def refused(func, _args, _kwargs):
        raise AssertionError(func)

    with dispatch.function_mode(refused), outside_torch_function():
        assert type(torch.add(tensor, 1)) is torch.Tensor
    with pytest.raises(AssertionError):
        torch.add(tensor, 1)


def tf32_settings() -> list[object]:
    backends = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    own = [backend.fp32_precision for backend in backends if hasattr(backend, "fp32_precision")]
    return [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, *own]


@pytest.mark.parametrize(("allowed", "word", "own"), [(True, "high", "tf32"), (False, "highest", "ieee")])
def test_tf32_is_allowed_or_forbidden_in_all_settings_within_the_context(allowed, word, own):
    before = tf32_settings()
    with tf32_allowed(allowed):
        products, convolutions, *of_backends = tf32_settings()
        assert (products, convolutions, {*of_backends}) == (word, allowed, {own} if of_backends else set())
        with torch.backends.cudnn.flags():  # reads a common setting, which raises if a backend's differs
            pass
    assert tf32_settings() == before


def test_a_node_of_backward_has_the_thread_that_created_it_and_an_operator_has_none():
    leaf, named = torch.ones(3, requires_grad=True), {}
    with torch.autograd.profiler.profile(use_kineto=True) as profiler:
        leaf.exp().sum().backward()
    threads = threads_of_spans(profiler)
    stack = list(event_tree(profiler))
    while stack:
        event = stack.pop()
        named[event.name] = threads[event.start_time_ns]
        stack += event.children
    forward, backward = named["aten::exp"], named["autograd::engine::evaluate_function: ExpBackward0"]
    assert forward.made_by == 0
    assert backward.made_by == forward.run_by != 0


@pytest.mark.parametrize(("remembers", "device"), [(True, "meta"), (False, "cpu")])
def test_a_default_device_applies_to_a_replaced_function_that_torch_remembers(monkeypatch, remembers, device):
    original, functions = torch.ones, _device._device_constructors
    functions.cache_clear()
    try:
        if remembers:
            tensors.remember_functions_that_take_a_device()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "ones", partial(original))
            with torch.device("meta"):
                assert torch.ones(2).device.type == device
    finally:
        functions.cache_clear()


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.ones(4)[2:], torch.nn.Parameter(torch.ones(2))])
def test_the_address_of_a_tensors_memory_is_its_storages(tensor):
    assert data_address(tensor) == tensor.untyped_storage().data_ptr()


def test_a_lazy_clone_stays_lazy_and_a_fake_tensor_has_no_address(recwarn):
    from torch._subclasses import FakeTensorMode

    tensor = torch.ones(4)
    clone = torch._lazy_clone(tensor)
    assert data_address(clone) == data_address(tensor)
    assert torch._C._is_cow_tensor(clone)
    with FakeTensorMode():
        assert data_address(torch.ones(4)) == 0
    assert not recwarn.list
    with pytest.raises(RuntimeError):
        data_address(torch.ones(2).to_sparse())


def test_a_function_is_called_before_the_program_changes_the_history(monkeypatch):
    calls = []
    monkeypatch.setattr("torch._C._cuda_record_memory_history", lambda *_: calls.append("switch"), raising=False)
    with before_history_changes(lambda: calls.append("told")):
        torch._C._cuda_record_memory_history(None)
    torch._C._cuda_record_memory_history(None)
    assert calls == ["told", "switch", "switch"]


def test_notes_on_allocations_reach_torch_if_the_release_has_them(monkeypatch):
    notes = []
    monkeypatch.setattr("torch._C._cuda_setMemoryMetadata", notes.append, raising=False)
    note_on_allocations("fc")
    monkeypatch.delattr("torch._C._cuda_setMemoryMetadata")
    note_on_allocations("fc 2")
    assert notes == ["fc"]


def test_a_snapshot_sees_the_compiler_only_if_it_is_imported(monkeypatch):
    asked = []
    monkeypatch.delattr("torch._inductor", raising=False)
    monkeypatch.setitem(vars(torch), "__getattr__", lambda name: asked.append(name) or name)
    monkeypatch.setattr(
        "torch.cuda.memory._snapshot", lambda: {"has": hasattr(torch, "_inductor"), "other": torch._other}
    )
    assert cuda_snapshot() == {"has": False, "other": "_other"}
    assert torch._inductor == "_inductor"
    assert asked == ["_other", "_inductor"]


def test_a_program_may_have_compiled_while_the_result_of_a_compilation_is_there():
    load_compiler()
    function = torch.compile(lambda x: x + 1, backend="eager")
    assert may_have_compiled()
    calls = []
    with before_compiling(lambda: calls.append(True)):
        torch.compile(function)
        assert calls
    count = len(calls)
    torch.compile(function)
    assert len(calls) == count
