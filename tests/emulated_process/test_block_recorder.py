"""Blocks at a process's peak and at a window's end, from typed-out histories; and paths of modules."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import types
import warnings

import pytest
import torch

from pytest_gpumem.emulating.emulated_process import block_recorder, running_modules
from pytest_gpumem.emulating.emulated_process.block_recorder import (
    BlockRecorder,
    Owner,
    recorded_blocks,
    retained_holders,
    retained_in,
)
from pytest_gpumem.emulating.emulated_process.running_modules import RunningModules, module_paths
from pytest_gpumem.emulating.emulated_process.stacks import CREATED_NODE
from pytest_gpumem.emulating.emulated_process.usage import Recorded, RecordedBlocks
from pytest_gpumem.torch_support.private_api.autograd import ENGINE_RUN
from pytest_gpumem.torch_support.private_api.compiler import load_compiler
from pytest_gpumem.torch_support.private_api.tensor_creation import NewTensor


def _alloc(address, nbytes, line=0, note=""):
    frames = [{"filename": "/serve.py", "line": line, "name": "ask"}] if line else []
    return {"action": "alloc", "addr": address, "size": nbytes, "frames": frames, "user_metadata": note}


def _free(address, nbytes):
    return {"action": "free_completed", "addr": address, "size": nbytes, "frames": [], "user_metadata": ""}


def _blocks(nbytes, line=0, count=1, category="other", module="", tensor=""):
    frames = (("/serve.py", line, "ask"),) if line else ()
    return RecordedBlocks(nbytes, count, category, module, tensor, frames)


def test_blocks_freed_before_the_peak_are_left_out_and_those_that_stay_are_retained():
    trace = [_alloc(1, 100, 5), _free(1, 100), _alloc(2, 60, 6), _alloc(3, 70, 7), _free(3, 70), _alloc(4, 20, 8)]
    recorded = recorded_blocks(trace, {2: 60, 4: 20}, {})
    assert recorded == Recorded((_blocks(60, 6), _blocks(70, 7)), (_blocks(60, 6), _blocks(20, 8)))


def test_the_first_of_equal_peaks_counts():
    trace = [_alloc(1, 100, 5), _free(1, 100), _alloc(1, 100, 6), _free(1, 100)]
    assert recorded_blocks(trace, {}, {}) == Recorded((_blocks(100, 5),), ())


def test_older_blocks_are_at_the_peak_if_they_stay_or_are_freed_after_it():
    trace = [_free(7, 30), _alloc(1, 100, 5), _free(8, 40), _free(1, 100)]
    recorded = recorded_blocks(trace, {9: 50}, {})
    assert recorded == Recorded((_blocks(50), _blocks(40), _blocks(100, 5)), (), freed=(_blocks(30), _blocks(40)))


def test_an_older_block_that_is_freed_has_the_owner_from_the_begin():
    trace = [_free(7, 30), _alloc(7, 30, 5), _alloc(1, 100, 5), _free(8, 40), _free(7, 30)]
    older_owners = {7: Owner("gradient", "fc", "int8[30]"), 8: Owner("gradient", "fc", "int8[40]")}
    recorded = recorded_blocks(trace, {}, {}, older_owners=older_owners)
    gradients = [_blocks(nbytes, 0, 1, "gradient", "fc", f"int8[{nbytes}]") for nbytes in (30, 40)]
    assert recorded.at_peak == (gradients[1], _blocks(30, 5), _blocks(100, 5))
    assert recorded.freed == tuple(gradients)


def test_a_window_that_only_frees_has_its_peak_at_its_begin():
    recorded = recorded_blocks([_free(7, 30), _alloc(1, 30, 5)], {9: 50, 1: 30}, {})
    assert recorded == Recorded((_blocks(50), _blocks(30)), (_blocks(30, 5),), freed=(_blocks(30),))


def test_a_block_at_a_freed_address_does_not_get_the_earlier_blocks_owner_or_line():
    owners = {1: Owner("parameter", "fc", "float32[25]")}
    trace = [_alloc(1, 100, 5), _free(1, 100), _alloc(1, 90, 6)]
    recorded = recorded_blocks(trace, {1: 90}, owners)
    assert recorded.at_peak == (_blocks(100, 5),)
    assert recorded.retained == (_blocks(90, 6, 1, "parameter", "fc", "float32[25]"),)


def test_equal_blocks_are_a_group_and_blocks_of_another_size_are_not():
    trace = [_alloc(1, 100, 5), _alloc(2, 100, 5), _alloc(3, 80, 5), _alloc(4, 100, 6)]
    recorded = recorded_blocks(trace, {}, {})
    assert recorded.at_peak == (_blocks(200, 5, 2), _blocks(80, 5), _blocks(100, 6))


def test_the_module_is_the_owners_or_else_that_in_the_note():
    trace = [_alloc(1, 100, 5, "note 1"), _alloc(2, 100, 5, "note 1"), _alloc(3, 10, 5, "the program's own")]
    owners = {2: Owner("buffer", "norm")}
    recorded = recorded_blocks(trace, {1: 100, 2: 100, 3: 10}, owners, lambda note: {"note 1": "attn"}.get(note, ""))
    assert [(group.category, group.module) for group in recorded.at_peak] == [
        ("other", "attn"),
        ("buffer", "norm"),
        ("other", ""),
    ]


def test_retained_blocks_with_other_holders_are_groups_of_their_own():
    trace = [_alloc(1, 100, 5), _alloc(2, 100, 5), _alloc(3, 100, 5), _alloc(4, 100, 5), _free(4, 100)]
    holders = {1: "serve.kept[...]", 2: "serve.kept[...]", 3: ""}
    recorded = recorded_blocks(trace, {1: 100, 2: 100, 3: 100}, {}, holders=holders)
    assert [(group.holder, group.count) for group in recorded.retained] == [("serve.kept[...]", 2), ("", 1)]
    assert [(group.holder, group.count) for group in recorded.at_peak] == [(None, 4)]


def test_only_retained_blocks_are_searched_for_and_no_workspaces():
    trace = [_alloc(1, 100, 5), _free(1, 100), _alloc(2, 60, 6), _alloc(3, 4, 6), _free(9, 5)]
    assert retained_in(trace, {3}) == {2: 60}


@pytest.fixture
def kept():
    """A global in a program, and the blocks of a GPU with its tensor."""
    module = types.ModuleType("serve")
    module.kept = [torch.ones(7)]
    return module, {0: {module.kept[0].data_ptr(): 28}}


@pytest.fixture
def visible(monkeypatch):
    """All objects can be searched."""
    monkeypatch.setattr(block_recorder, "is_heap_frozen", lambda: False)
    monkeypatch.setattr(block_recorder, "MOST_OBJECTS", 100_000_000)


def test_a_retained_block_has_the_path_to_its_holder(kept, visible):
    _, blocks = kept
    assert retained_holders(blocks, lambda: True) == {0: dict.fromkeys(blocks[0], "serve.kept[...]")}


def test_holders_are_left_out_if_another_thread_has_freed_memory(kept, visible):
    assert retained_holders(kept[1], lambda: False) == {}


def test_holders_are_left_out_if_objects_are_hidden_or_too_many(kept, visible, monkeypatch):
    monkeypatch.setattr(block_recorder, "is_heap_frozen", lambda: True)
    assert retained_holders(kept[1], lambda: True) == {}
    monkeypatch.setattr(block_recorder, "is_heap_frozen", lambda: False)
    assert retained_holders(kept[1], lambda: True) != {}
    monkeypatch.setattr(block_recorder, "MOST_OBJECTS", 0)
    assert retained_holders(kept[1], lambda: True) == {}


def test_a_search_that_fails_leaves_the_holders_out(kept, visible, monkeypatch):
    monkeypatch.setattr(block_recorder, "holders_of", lambda _: {}[1])
    assert retained_holders(kept[1], lambda: True) == {}


def test_an_operator_and_a_workspace_are_read_from_native_frames():
    def native(*names):
        return [{"filename": "/lib/libtorch.so", "line": 0, "name": name} for name in names]

    product = "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"
    trace = [_alloc(1, 100, 5), _alloc(2, 100, 5), _alloc(3, 50, 5)]
    trace[0]["frames"] += native(product)
    trace[2]["frames"] += native("at::cuda::getCurrentCUDABlasHandle(bool)", product)
    at_peak = recorded_blocks(trace, {}, {}).at_peak
    assert [(group.operator, group.category, group.frames) for group in at_peak] == [
        ("mm", "other", (("/serve.py", 5, "ask"),)),
        ("", "other", (("/serve.py", 5, "ask"),)),
        ("", "workspace", ()),
    ]


def test_blocks_from_backward_are_temporary_unless_they_have_an_owner():
    node = "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"
    trace = [_alloc(1, 100), _alloc(2, 100)]
    for entry in trace:
        entry["frames"] += [{"filename": "/lib/libtorch.so", "line": 0, "name": node}]
    at_peak = recorded_blocks(trace, {1: 100, 2: 100}, {2: Owner("gradient", "fc")}).at_peak
    assert [(group.category, group.module, group.operator) for group in at_peak] == [
        ("temporary", "", "MmBackward0"),
        ("gradient", "fc", "MmBackward0"),
    ]


def test_a_freed_block_has_the_dtype_and_shape_with_which_it_was_allocated():
    tensor = NewTensor("float32", (5, 5), 100)
    blocks = [{**_alloc(address, nbytes, 5), "tensor": tensor} for address, nbytes in ((1, 100), (2, 100), (3, 120))]
    owners = {2: Owner("other", "", "float32[25]")}
    (freed, live, larger) = recorded_blocks([*blocks, _free(1, 100), _free(3, 120)], {2: 100}, owners).at_peak
    assert (freed.tensor, live.tensor, larger.tensor) == ("float32[5, 5]", "float32[25]", "")


NODE = "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"


def _in_backward(address, node, python=(), **fields):
    frames = [{"filename": "/lib/libtorch.so", "line": 0, "name": NODE}]
    frames += [{"filename": file, "line": line, "name": name} for file, line, name in python]
    return {"action": "alloc", "addr": address, "size": 100, "frames": frames, "node": node, **fields}


def _creation(node, line, note):
    frames = [{"filename": "/model.py", "line": line, "name": "forward"}]
    return {"action": CREATED_NODE, "addr": 0, "size": 0, "frames": frames, "node": node, "user_metadata": note}


def test_a_block_from_backward_has_the_module_and_stack_that_created_its_node():
    trace = [
        _creation((1, 7), 30, "up"),
        _creation((2, 7), 40, "down"),
        _in_backward(1, (1, 7)),
        _in_backward(2, (2, 7), user_metadata="a module that calls backward"),
        _in_backward(3, (1, 8)),
    ]
    at_peak = recorded_blocks(trace, {}, {}).at_peak
    assert [(group.module, group.operator, group.node_frames) for group in at_peak] == [
        ("up", "MmBackward0", (("/model.py", 30, "forward"),)),
        ("down", "MmBackward0", (("/model.py", 40, "forward"),)),
        ("", "MmBackward0", ()),
    ]


def test_a_node_that_frames_do_not_name_has_the_name_in_the_entry():
    block = _in_backward(1, (1, 7), node_name="DoubleBackward")
    block["frames"][0]["name"] = "torch::autograd::Engine::evaluate_function(int)"
    (group,) = recorded_blocks([block], {}, {}).at_peak
    assert group.operator == "DoubleBackward"


def test_a_node_that_backward_creates_has_the_line_that_calls_backward():
    creation = _creation((1, 7), 50, "")
    creation["frames"].insert(0, {"filename": "/torch/autograd/graph.py", "line": 1, "name": ENGINE_RUN})
    (group,) = recorded_blocks([creation, _in_backward(1, (1, 7))], {}, {}).at_peak
    assert group.node_frames == (("/model.py", 50, "forward"),)


def test_recomputed_code_does_not_belong_to_the_node_that_recomputes_it():
    block = _in_backward(1, (1, 7), [("/torch/utils/checkpoint.py", 1, "unpack_hook")], node_name="MmBackward0")
    (group,) = recorded_blocks([_creation((1, 7), 30, "up"), block], {}, {}).at_peak
    assert (group.module, group.operator, group.node_frames) == ("", "", ())


def test_without_native_frames_a_known_node_shows_that_backward_runs():
    blocks = [_in_backward(1, (1, 7), node_name="MmBackward0"), _in_backward(2, (0, 0), node_name="")]
    for block in blocks:
        del block["frames"][0]
    at_peak = recorded_blocks([_creation((1, 7), 30, "up"), *blocks], {}, {}).at_peak
    assert [(group.category, group.module, group.operator) for group in at_peak] == [
        ("temporary", "up", "MmBackward0"),
        ("other", "", ""),
    ]


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.key = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.key(x)


class Failing(torch.nn.Module):
    def forward(self, x):
        raise ValueError


class Hostile(torch.nn.Module):
    """A module whose attributes run code, and whose submodules are not in a dict."""

    def __init__(self):
        super().__init__()
        self.__dict__["_modules"] = object()

    def __getattribute__(self, name):
        if name in ("named_modules", "children", "__class__"):
            raise AssertionError(name)
        return super().__getattribute__(name)

    def __hash__(self):
        raise AssertionError

    def __eq__(self, other):
        raise AssertionError

    def forward(self, x):
        return x + 1


@pytest.fixture
def noted(monkeypatch):
    """The notes of this thread and others, in the order in which they were made, as paths of dead modules."""
    notes = []
    monkeypatch.setattr(running_modules, "note_on_allocations", notes.append)
    modules = RunningModules()
    modules.watch()
    yield lambda paths=None: [modules.path(note, paths or {}) for note in notes]
    modules.unwatch()


def test_a_note_has_the_path_within_the_outermost_module_and_ends_with_the_module(noted):
    torch.nn.Sequential(Attention())(torch.ones(2))
    assert noted() == ["Sequential", "Sequential.0", "Sequential.0.key", "Sequential.0", "Sequential", ""]


def test_a_live_module_has_its_path_within_the_whole_model(noted):
    model = torch.nn.ModuleDict({"encoder": Attention()})
    model["encoder"](torch.ones(2))
    assert noted(module_paths([model])) == ["encoder", "encoder.key", "encoder", ""]


def test_a_module_that_runs_again_alone_keeps_its_path_in_the_model(monkeypatch):
    notes = []
    modules = RunningModules(notes.append)
    modules.watch()
    try:
        model = torch.nn.Sequential(torch.nn.Sequential(Attention()))
        model(torch.ones(2))
        model[0](torch.ones(2))  # as a checkpoint does in backward
        alone = torch.nn.Sequential(Attention())
        alone(torch.ones(2))
    finally:
        modules.unwatch()
    paths = [modules.path(note, {}) for note in notes]
    inner = ("Sequential.0", "Sequential.0.0", "Sequential.0.0.key", "Sequential.0.0", "Sequential.0")
    assert paths == [
        *("Sequential", *inner, "Sequential", ""),
        *(*inner, ""),
        *("Sequential", "Sequential.0", "Sequential.0.key", "Sequential.0", "Sequential", ""),
    ]


def test_a_module_that_raises_leaves_no_note(noted):
    with pytest.raises(ValueError):
        torch.nn.Sequential(Failing())(torch.ones(2))
    Attention()(torch.ones(2))
    assert noted() == ["Sequential", "Sequential.0", "Sequential", "", "Attention", "key", "Attention", ""]


def test_threads_have_their_own_running_modules(noted):
    class Waiting(torch.nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=Attention(), args=(x,))
            thread.start()
            thread.join()
            return x

    Waiting()(torch.ones(2))
    assert noted() == ["Waiting", "Attention", "key", "Attention", "", ""]


def test_a_module_runs_as_ever_if_its_attributes_are_hostile(noted):
    hostile = Hostile()
    assert hostile(torch.ones(1)).item() == 2
    assert noted() == ["Hostile", ""]
    assert module_paths([hostile]) == {id(hostile): "Hostile"}


def test_notes_from_an_earlier_recording_or_the_program_name_no_module(monkeypatch):
    notes = []
    monkeypatch.setattr(running_modules, "note_on_allocations", notes.append)
    modules = RunningModules()
    model = Attention()
    for _ in range(2):
        modules.watch()
        model(torch.ones(2))
    modules.unwatch()
    assert [modules.path(note, {}) for note in notes] == ["", "", "", "", "Attention", "key", "Attention", ""]
    assert modules.path("phase 1", {}) == ""


def test_a_program_that_compiles_is_neither_warned_nor_has_hooks_in_its_graphs(noted):
    load_compiler()
    model = torch.nn.Sequential(Attention())
    model(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(torch.ones(2))
    assert noted() == ["Sequential", "Sequential.0", "Sequential.0.key", "Sequential.0", "Sequential", "", ""]
    later = RunningModules()
    later.watch()
    assert not torch.nn.modules.module._global_forward_hooks
    del compiled


def test_a_module_that_compiles_in_its_forward_names_no_later_allocation(noted):
    load_compiler()  # its import would warn

    class Compiling(torch.nn.Module):
        def forward(self, x):
            torch.compile(torch.sin)
            return x

    Compiling()(torch.ones(2))
    assert noted() == ["Compiling", ""]


def test_if_another_thread_runs_a_module_at_compilation_no_module_is_named(noted):
    load_compiler()

    class Waiting(torch.nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=torch.compile, args=(torch.sin,))
            thread.start()
            thread.join()
            return x

    Waiting()(torch.ones(2))
    assert noted() == ["", ""]


def test_a_model_that_is_gone_leaves_the_paths_of_all_its_modules(noted, monkeypatch):
    modules = RunningModules()
    modules.watch()
    model, other = torch.nn.Sequential(Attention(), torch.nn.ReLU()), torch.nn.Linear(2, 2)
    for _ in range(2):
        model[0](other(torch.ones(2)))
    modules.unwatch()
    assert modules.paths_in_dead_models() == []
    del model
    gc.collect()
    assert modules.paths_in_dead_models() == ["Attention", "key"]


def test_models_of_two_classes_with_equal_paths_are_told_apart():
    class Other(Attention):
        pass

    first, second, copy = Attention(), Other(), Attention()
    paths = module_paths([first, second])
    assert [paths[id(module)] for module in (first, first.key, second, second.key)] == [
        *("Attention", "Attention.key", "Other", "Other.key")
    ]
    paths = module_paths([first, copy])
    assert paths[id(copy.key)] == "key"


def test_wrappers_do_not_change_paths():
    model = torch.nn.DataParallel(Attention())
    paths = module_paths([model])
    assert [paths[id(module)] for module in (model, model.module, model.module.key)] == [
        *("DataParallel", "Attention", "key")
    ]


class TypedHistory:
    """A history of the CPU with a block for each tensor, that can count frees in another thread."""

    device_type = "cpu"

    def __init__(self, tensors):
        self.active = {0: {tensor.data_ptr(): tensor.nbytes for tensor in tensors}}
        self.trace = []
        self.frees = lambda: [0]

    def history(self):
        return [self.trace], self.active

    def before_history_changes(self, _):
        return contextlib.nullcontext()

    def __getattr__(self, _):
        return lambda *_: None


@pytest.mark.parametrize(
    ("is_busy", "most_objects", "expected"), [(False, 10**8, "float32[3, 7]"), (True, 10**8, ""), (False, 0, "")]
)
def test_tensors_at_the_begin_are_known_in_a_small_process_that_frees_none(
    is_busy, most_objects, expected, monkeypatch
):
    monkeypatch.setattr(block_recorder, "MOST_OBJECTS", most_objects)
    tensor = torch.ones(3, 7)
    history = TypedHistory([tensor])
    numbers = itertools.count()
    if is_busy:
        history.frees = lambda: [next(numbers)]
    recorder = BlockRecorder(history)
    recorder.begin(with_older=True)
    history.trace, history.active = [_free(tensor.data_ptr(), 84)], {}
    assert [group.tensor for group in recorder.recorded({})[0].freed] == [expected]
    recorder.end()


def test_a_history_stays_while_it_is_read_if_the_program_begins_its_own(monkeypatch):
    history = TypedHistory([torch.ones(3)])
    recorder, deleted, switches = BlockRecorder(history), [], []
    monkeypatch.setattr(history, "before_history_changes", lambda call: contextlib.nullcontext(switches.append(call)))
    recorder.begin()
    monkeypatch.setattr(history, "delete_history", lambda: deleted.append(history), raising=False)
    monkeypatch.setattr(history, "frees", switches[0])
    assert recorder.recorded({}) == {}
    assert (recorder.failure, deleted) == ("the program records them itself", [])
    recorder.end()
    assert deleted == [history]


def test_what_fails_in_a_recording_is_its_reason_and_not_an_error(monkeypatch):
    recorder = BlockRecorder()
    monkeypatch.setattr("torch.cuda.memory.get_allocator_backend", lambda: "cudaMallocAsync")
    recorder.begin()
    assert (recorder.recorded({}), recorder.failure) == ({}, "the allocator cudaMallocAsync has no history")
    monkeypatch.setattr("torch.cuda.memory.get_allocator_backend", lambda: "native")
    monkeypatch.setattr("torch._C._cuda_isHistoryEnabled", lambda: True, raising=False)
    recorder.begin()
    assert (recorder.recorded({}), recorder.failure) == ({}, "the program records them itself")
    monkeypatch.delattr("torch._C._cuda_isHistoryEnabled", raising=False)
    recorder.begin()
    assert recorder.recorded({}) == {}
    assert recorder.failure is not None
    assert recorder.failure.startswith("AttributeError: ")
