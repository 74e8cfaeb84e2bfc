"""Record a process's allocations by its allocator's history, and find the blocks at the peak and those that stay.

The history has Python and C++ frames for each allocation, and `running_modules` adds the module. After the window, modules,
optimizers and tensors that still refer to a block give its category, dtype and shape. All code here leaves the program's
objects alone: it neither calls nor changes them. If the recording fails, the program goes on.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pytest_gpumem.base.errors import MeasuringError
from pytest_gpumem.emulating.emulated_process.allocation_counter import AllocationCounter
from pytest_gpumem.emulating.emulated_process.counter_history import CounterHistory, joined_traces
from pytest_gpumem.emulating.emulated_process.cuda_reports import CudaReports
from pytest_gpumem.emulating.emulated_process.running_modules import RunningModules, module_paths
from pytest_gpumem.emulating.emulated_process.stacks import CREATED_NODE, is_workspace, origin_of, stack_of
from pytest_gpumem.emulating.emulated_process.usage import Recorded, RecordedBlocks, Workspaces
from pytest_gpumem.torch_support.garbage_collector import is_heap_frozen
from pytest_gpumem.torch_support.holders import holders_of
from pytest_gpumem.torch_support.private_api.allocator import (
    before_history_changes,
    cuda_frees,
    cuda_history_is_on,
    cuda_snapshot,
    note_on_allocations,
    start_cuda_history,
    stop_cuda_history,
)
from pytest_gpumem.torch_support.private_api.autograd import ENGINE_RUN, engine_run_within
from pytest_gpumem.torch_support.private_api.native_frames import names_native_frames
from pytest_gpumem.torch_support.private_api.tensors import data_address
from pytest_gpumem.torch_support.reachability import alive, reachable_tensors
from pytest_gpumem.torch_support.static_access import (
    attribute,
    dense_bytes,
    dtype_and_shape,
    gradient_of,
    is_a,
    named_modules,
    named_tensors,
    parts_of,
    tensor_property,
    tensor_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_gpumem.emulating.emulated_process.usage import Frame

_MOST_FRAMES = 64
MOST_ENTRIES = 2**19
"""The most entries in a GPU's history. A tensor has three. A snapshot of 300,000 entries with 31 frames each took 5.4 s and
415 MB on two busy cores (torch 2.13), and the program waits for it. C++ frames add 1.8 s and 170 MB to 100,000 allocations."""
_BY_PROGRAM = "the program records them itself"
MOST_OBJECTS = 1_000_000
"""In a process with more Python objects, neither holders nor older tensors are searched, because the program may wait for the
search."""


class Owner(NamedTuple):
    """The tensor in a block."""

    category: str = "other"
    module: str = ""
    tensor: str = ""


_WORKSPACE = Owner("workspace")
_NO_NODE = (0, 0)


class History(Protocol):
    """The history of an allocator: torch's for CUDA (`CudaHistory`), or for the CPU (`CpuStatistics`)."""

    device_type: str

    def lacking_history(self) -> str | None:
        """Return the reason why this history cannot be recorded; ``None`` if it can."""

    def start_history(self) -> None:
        """Start to record each allocation with its Python frames, and each free."""

    def stop_history(self) -> None:
        """Stop recording. Another thread may read the history meanwhile."""

    def delete_history(self) -> None:
        """Delete the history after the recording has stopped. Nobody may read it meanwhile."""

    def stop_calls(self) -> None:
        """Read no more stacks, because Python ends."""

    def before_history_changes(self, call: Callable[[], None]) -> AbstractContextManager[object]:
        """Within the context, call a function before the program starts or stops the history itself."""

    def note_on_allocations(self, text: str) -> None:
        """Let the history show a text as ``user_metadata`` at each further allocation in this thread."""

    def frees(self) -> Sequence[int]:
        """Return the number of frees so far on each device."""

    def history(self) -> tuple[Sequence[Sequence[Mapping[str, Any]]], Mapping[int, Mapping[int, int]]] | str:
        """Return each device's entries as in torch's snapshots, and the live blocks' bytes by device and address.

        An allocation may have the running ``node``, as thread and number, and the new ``tensor``. A new node's entry has the
        action `CREATED_NODE`.

        If the history has no room for all entries, return a clause that says so.
        """


class CudaHistory:
    """The history of torch's CUDA allocator."""

    device_type = "cuda"

    def __init__(self, library: str | None = None) -> None:
        """Begin without a history.

        Args:
            library: The path of the library that records autograd's nodes. Without it, memory from backward has no line.
        """
        self._nodes: CounterHistory | None = None
        if library is not None:
            with suppress(MeasuringError):
                CudaReports(library)
                self._nodes = CounterHistory(AllocationCounter(library))
        self._entered = ExitStack()
        self._notes_backward = False

    def lacking_history(self) -> str | None:
        return _lacking()

    def start_history(self) -> None:
        start_cuda_history(native=names_native_frames(), most_entries=MOST_ENTRIES)
        if self._nodes is not None:
            # It stays from the first recording on, because the program may have replaced the function as well.
            if not self._notes_backward:
                self._notes_backward = True
                self._entered.enter_context(engine_run_within(self._nodes.backward))
            self._nodes.start(MOST_ENTRIES)

    def stop_history(self) -> None:
        stop_cuda_history()
        if self._nodes is not None:
            self._nodes.stop()

    def delete_history(self) -> None:
        if self._nodes is not None:
            self._nodes.delete()

    def stop_calls(self) -> None:
        if self._nodes is not None:
            self._nodes.stop_calls()

    def before_history_changes(self, call: Callable[[], None]) -> AbstractContextManager[object]:
        return before_history_changes(call)

    def note_on_allocations(self, text: str) -> None:
        note_on_allocations(text)
        if self._nodes is not None:
            self._nodes.note(text)

    def frees(self) -> Sequence[int]:
        return [cuda_frees(device) for device in range(torch.cuda.device_count())]

    def history(self) -> tuple[Sequence[Sequence[Mapping[str, Any]]], Mapping[int, Mapping[int, int]]] | str:
        snapshot = cuda_snapshot()
        recorded = None if self._nodes is None else self._nodes.recorded()
        traces = snapshot["device_traces"]
        lacks_nodes = self._nodes is not None and recorded is None
        if lacks_nodes or max(map(len, traces), default=0) >= MOST_ENTRIES:
            return f"the history has no room for more than {MOST_ENTRIES:,} entries"
        active: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    active[segment["device"]][block["address"]] = block["requested_size"]
        return traces if recorded is None else joined_traces(traces, recorded[0]), active


class BlockRecorder:
    """Records this process's allocations."""

    def __init__(self, history: History | None = None) -> None:
        """Begin without a recording. ``history`` is by default a new `CudaHistory`."""
        self._history: History = history or CudaHistory()
        self.failure: str | None = None
        """The reason why the current window's allocations are not recorded; ``None`` if they are recorded."""
        self._recording: ExitStack | None = None
        self._modules = RunningModules(self._history.note_on_allocations)
        self._older: Mapping[int, Mapping[int, Owner]] = {}
        """The tensors from before the recording, by GPU and by memory address."""

    def begin(self, *, with_older: bool = False) -> None:
        """Begin a new recording, unless the program records its history itself.

        Args:
            with_older: Whether to look at the tensors that exist now, so those that are freed later are known.
        """
        self.end()
        self._older = {}
        try:
            self.failure = self._history.lacking_history()
            if self.failure is None:
                with ExitStack() as stack:
                    self._history.start_history()
                    stack.callback(self._history.stop_history)
                    self._modules.watch()
                    stack.callback(self._modules.unwatch)
                    # Last, because this context must not see our own calls.
                    stack.enter_context(self._history.before_history_changes(self._give_way))
                    self._recording = stack.pop_all()
        except Exception as error:  # noqa: BLE001 -- the program must go on
            self.failure = _text_of(error)
        if with_older and self._recording is not None:
            with suppress(Exception):
                self._older = self._tensors_now()

    def end(self) -> None:
        """End the recording, if there is one, and delete the history."""
        self._stop()
        with suppress(Exception):
            self._history.delete_history()

    def _stop(self) -> None:
        """End the recording, if there is one."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):
                recording.close()

    def _tensors_now(self) -> Mapping[int, Mapping[int, Owner]]:
        """Return the tensors that exist now. Empty if the search might be wrong or would take long.

        For example, another thread may free a tensor's memory meanwhile, and use it again.
        """
        if _has_many_objects():
            return {}
        frees = self._history.frees()
        history = self._history.history()
        if isinstance(history, str):
            return {}
        models = _models()
        owners = self._owners(history[1], models, module_paths(models))
        return owners if self._history.frees() == frees else {}

    def _owners(
        self, active: Mapping[int, Mapping[int, int]], models: Iterable[torch.nn.Module], paths: Mapping[int, str]
    ) -> Mapping[int, Mapping[int, Owner]]:
        owners = _Owners(active, self._history.device_type)
        owners.add_all(models, paths)
        return owners.on_gpu

    def python_ends(self) -> None:
        """Read no more stacks, because Python ends."""
        self._history.stop_calls()

    def _give_way(self) -> None:
        """End the recording, because the program begins to record its history itself.

        The program calls this in any thread, while another thread may read the history. So the history is deleted later.
        """
        self.failure = _BY_PROGRAM
        self._stop()

    def recorded(self, workspaces: Mapping[int, Workspaces], *, with_holders: bool = False) -> Mapping[int, Recorded]:
        """Return the recorded blocks by GPU. The mapping is empty without a recording; `failure` says why.

        Args:
            workspaces: The workspaces that count once, by GPU.
            with_holders: Whether to search the holders of retained blocks.
        """
        if not self._is_recording():
            return {}
        try:
            recorded = self._recorded(workspaces, with_holders=with_holders)
        except Exception as error:  # noqa: BLE001 -- the program's objects may do anything
            self.failure = _text_of(error)
            return {}
        return recorded if self._is_recording() else {}  # the program may have begun its own history meanwhile

    def _is_recording(self) -> bool:
        return self._recording is not None

    def _recorded(self, workspaces: Mapping[int, Workspaces], *, with_holders: bool) -> Mapping[int, Recorded]:
        frees = self._history.frees()
        history = self._history.history()
        if isinstance(history, str):
            self.failure = history
            return {}
        traces, active = history
        models = _models()
        paths = module_paths(models)
        owners = self._owners(active, models, paths)
        of_workspaces = {device: workspaces.get(device, Workspaces()).addresses for device in range(len(traces))}
        retained = {device: retained_in(trace, of_workspaces[device]) for device, trace in enumerate(traces)}
        holders: Mapping[int, Mapping[int, str]] = {}
        if with_holders:
            holders = retained_holders(retained, lambda: self._history.frees() == frees)
        return {
            device: replace(
                recorded_blocks(
                    trace,
                    active.get(device, {}),
                    owners.get(device, {}),
                    lambda note: self._modules.path(note, paths),
                    of_workspaces[device],
                    holders.get(device, {}),
                    self._older.get(device, {}),
                ),
                modules=tuple(dict.fromkeys((*paths.values(), *self._modules.paths_in_dead_models()))),
            )
            for device, trace in enumerate(traces)
        }


def _lacking() -> str | None:
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        return f"the allocator {backend} has no history"
    return _BY_PROGRAM if cuda_history_is_on() else None


def retained_holders(
    blocks: Mapping[int, Mapping[int, int]], are_live: Callable[[], bool]
) -> dict[int, dict[int, str]]:
    """Return the path to each block's holder, by GPU and address. Empty if a path might be wrong or would take long to find.

    Args:
        blocks: The bytes of each block, by GPU and address.
        are_live: Returns whether all blocks are still live.
    """
    # Frozen objects are hidden. To see them, the heap would be thawed and frozen again, and then hides new garbage as well.
    if is_heap_frozen() or _has_many_objects():
        return {}
    with suppress(Exception):  # other threads change the program's objects meanwhile
        holders = {device: holders_of(by_address, with_container=True) for device, by_address in blocks.items()}
        # After a free in another thread, a block may be gone, and its address may belong to another tensor.
        return holders if are_live() else {}
    return {}


def _has_many_objects() -> bool:
    return len(gc.get_objects()) > MOST_OBJECTS


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def recorded_blocks(
    trace: Sequence[Mapping[str, Any]],
    active: Mapping[int, int],
    owners: Mapping[int, Owner],
    module_of: Callable[[str], str] = str,
    workspaces: Collection[int] = (),
    holders: Mapping[int, str] | None = None,
    older_owners: Mapping[int, Owner] | None = None,
) -> Recorded:
    """Return the blocks at the peak, the blocks that were allocated in a window and are live at its end, and the older blocks
    that were freed in it.

    Args:
        trace: The history's entries on a GPU, as in torch's snapshots, and entries for new autograd nodes.
        active: The live blocks' requested bytes at the window's end, by address.
        owners: The tensors at the window's end, by address.
        module_of: Returns the module's path for an entry's note.
        workspaces: The addresses of cuBLAS's workspaces. One of each size counts at the peak, and none is retained.
        holders: The paths to the holders of retained blocks, by address.
        older_owners: The tensors at the window's begin, by address.
    """
    entries = _allocations_and_frees(trace)
    peak_at = _peak_at(entries)
    at_peak, _ = _new_blocks(entries[: peak_at + 1])
    new, older_frees = _new_blocks(entries)
    owners = {**owners, **dict.fromkeys(workspaces, _WORKSPACE)}
    first_workspaces = {active[address]: address for address in sorted(workspaces, reverse=True)}
    by_chance = set(workspaces).difference(first_workspaces.values())
    nodes = {entry["node"]: entry for entry in trace if entry["action"] == CREATED_NODE}
    groups, left, freed = (_Groups(module_of, nodes) for _ in range(3))
    # Blocks from before the window: those that stayed, and those that were freed after the peak.
    for address, nbytes in active.items():
        if address not in new and address not in by_chance:
            groups.add(_older(address, nbytes), owners.get(address))
    for index in older_frees:
        address = entries[index]["addr"]
        block, owner = _older(address, entries[index]["size"]), (older_owners or {}).get(address)
        freed.add(block, owner)
        if index > peak_at:
            groups.add(block, owner)
    for address, index in at_peak.items():
        is_live = new.get(address) == index
        if not (is_live and address in by_chance):
            groups.add(entries[index], owners.get(address) if is_live else None)
    for address, index in new.items():
        if address not in workspaces:
            left.add(entries[index], owners.get(address), (holders or {}).get(address))
    return Recorded(groups.blocks(), left.blocks(), freed=freed.blocks())


def _older(address: int, nbytes: int) -> Mapping[str, Any]:
    """Return the entry of a block from before the window."""
    return {"addr": address, "size": nbytes}


def retained_in(trace: Iterable[Mapping[str, Any]], workspaces: Collection[int] = ()) -> dict[int, int]:
    """Return the bytes of each block that was allocated in a window and is live at its end, by address.

    Args:
        trace: The history's entries on a GPU.
        workspaces: The addresses of cuBLAS's workspaces, which are left out.
    """
    entries = _allocations_and_frees(trace)
    new, _ = _new_blocks(entries)
    return {address: entries[index]["size"] for address, index in new.items() if address not in workspaces}


def _allocations_and_frees(trace: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [entry for entry in trace if entry["action"] in ("alloc", "free_completed")]


def _peak_at(entries: Iterable[Mapping[str, Any]]) -> int:
    """Return the entry's index at which the peak was reached; -1 if it was at the begin."""
    change, highest, peak_at = 0, 0, -1
    for index, entry in enumerate(entries):
        change += entry["size"] if entry["action"] == "alloc" else -entry["size"]
        if change > highest:
            highest, peak_at = change, index
    return peak_at


def _new_blocks(entries: Iterable[Mapping[str, Any]]) -> tuple[dict[int, int], list[int]]:
    """Return the entries that allocated the blocks which are live at the end, by address, and frees for older blocks."""
    live: dict[int, int] = {}
    older_frees = []
    for index, entry in enumerate(entries):
        if entry["action"] == "alloc":
            live[entry["addr"]] = index
        elif live.pop(entry["addr"], None) is None:
            older_frees.append(index)
    return live, older_frees


class _Place(NamedTuple):
    owner: Owner
    frames: tuple[Frame, ...] = ()
    holder: str | None = None
    operator: str = ""
    node_frames: tuple[Frame, ...] = ()


class _Groups:
    """Equal blocks, joined."""

    def __init__(
        self,
        module_of: Callable[[str], str],
        nodes: Mapping[tuple[int, int], Mapping[str, Any]],
    ) -> None:
        self._module_of = module_of
        self._nodes = nodes
        """The entries for the creation of autograd nodes, by thread and number."""
        self._groups: defaultdict[tuple[_Place, int], list[int]] = defaultdict(list)

    def add(self, entry: Mapping[str, Any], owner: Owner | None = None, holder: str | None = None) -> None:
        """Add a block. Its owner is known if the block is live at the window's begin or end."""
        self._groups[self._place(entry, owner or Owner(), holder), entry["size"]].append(entry["size"])

    def _place(self, entry: Mapping[str, Any], owner: Owner, holder: str | None) -> _Place:
        stack = stack_of(entry.get("frames", ()))
        if owner.category == _WORKSPACE.category or is_workspace(stack):
            return _Place(_WORKSPACE)  # chance decides which operator is the first that needs it
        running = self._module_of(entry.get("user_metadata", ""))
        node = entry.get("node", _NO_NODE)
        origin = origin_of(stack, in_module=bool(running), in_node=node != _NO_NODE)
        category = "temporary" if origin.in_backward and owner.category == Owner().category else owner.category
        operator = origin.operator
        node_frames: tuple[Frame, ...] = ()
        if origin.in_backward:
            operator = operator or entry.get("node_name", "")
            created = self._nodes.get(node, {})
            running = self._module_of(created.get("user_metadata", ""))  # a running module may only call backward
            # The line that calls backward also belongs to nodes that backward creates (`create_graph`).
            creating = stack_of(created.get("frames", ())).python
            node_frames = tuple(frame for frame in creating if frame[2] != ENGINE_RUN)
        owner = Owner(category, owner.module or running, owner.tensor or _new_tensor_text(entry))
        return _Place(owner, stack.python[:_MOST_FRAMES], holder, operator, node_frames)

    def blocks(self) -> tuple[RecordedBlocks, ...]:
        """Return the groups."""
        return tuple(
            RecordedBlocks(
                sum(sizes), len(sizes), *place.owner, place.frames, place.holder, place.operator, place.node_frames
            )
            for (place, _), sizes in self._groups.items()
        )


def _new_tensor_text(entry: Mapping[str, Any]) -> str:
    """Return the dtype and shape of the tensor for which a block was allocated; empty if unknown."""
    tensor = entry.get("tensor")
    return tensor_text(tensor.dtype, tensor.shape) if tensor is not None and tensor.nbytes == entry["size"] else ""


def _models() -> list[torch.nn.Module]:
    """Return all modules that are not within another module."""
    modules = alive(torch.nn.Module)
    inner = {id(module) for outer in modules for path, module in named_modules(outer) if path}
    return [module for module in modules if id(module) not in inner]


class _Owners:
    """The live tensors, by GPU and by memory address.

    Args:
        active: The live blocks' bytes by device and address.
        device_type: ``cuda`` or ``cpu``.
    """

    def __init__(self, active: Mapping[int, Mapping[int, int]], device_type: str = "cuda") -> None:
        self._active = active
        self._device_type = device_type
        self.on_gpu: defaultdict[int, dict[int, Owner]] = defaultdict(dict)

    def add(self, tensors: Iterable[torch.Tensor], category: str, module: str = "") -> None:
        """Add tensors. A block's first category stays."""
        for tensor in tensors:
            with suppress(Exception):  # some tensors have neither memory nor a shape
                for part in parts_of(tensor):
                    self._add(part, category, module)

    def _add(self, tensor: torch.Tensor, category: str, module: str) -> None:
        gpu = tensor_property(tensor, "device")
        index = gpu.index or 0  # the CPU has no index
        blocks = self._active.get(index, {}) if gpu.type == self._device_type else {}
        address = data_address(tensor) if blocks else 0
        if address in blocks:
            is_whole = dense_bytes(tensor) == blocks[address]
            owner = Owner(category, module, tensor_text(*dtype_and_shape(tensor)) if is_whole else "")
            on_gpu = self.on_gpu[index]
            on_gpu[address] = _joined(on_gpu[address], owner) if address in on_gpu else owner

    def add_all(self, models: Iterable[torch.nn.Module], paths: Mapping[int, str]) -> None:
        """Add the modules' and optimizers' tensors, and then all other tensors.

        Args:
            models: The outermost modules.
            paths: Each module's path by id.
        """
        by_parameter: dict[int, str] = {}
        for model in models:
            modules = dict(named_modules(model))
            for path, _, parameter in named_tensors(model, "parameters"):
                module = by_parameter[id(parameter)] = paths[id(modules[path])]
                gradient = gradient_of(parameter)
                self.add([parameter], "parameter", module)
                self.add([] if gradient is None else [gradient], "gradient", module)
            for path, _, buffer in named_tensors(model, "buffers"):
                self.add([buffer], "buffer", paths[id(modules[path])])
        for optimizer in alive(torch.optim.Optimizer):
            states = attribute(optimizer, "state")
            for parameter, state in list(dict.items(states)) if is_a(states, dict) else ():
                self.add(reachable_tensors([state]), "optimizer state", by_parameter.get(id(parameter), ""))
        self.add(alive(torch.Tensor), "other")


def _joined(first: Owner, second: Owner) -> Owner:
    """Return a block's owner from two tensors in it. For modules ``blocks.0.k`` and ``blocks.0.v``, it is ``blocks.0``."""
    tensor = first.tensor or second.tensor
    if first.category != second.category:
        return first._replace(tensor=tensor)
    parts = zip(first.module.split("."), second.module.split("."), strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1], parts)
    return Owner(first.category, ".".join(part for part, _ in same), tensor)
