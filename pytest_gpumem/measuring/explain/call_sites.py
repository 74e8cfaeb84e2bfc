"""Find the lines that create tensors or call operators, in forward and backward."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.facts.values.layers import folded
from pytest_gpumem.facts.values.operator_counts import NOWHERE, OperatorSite
from pytest_gpumem.facts.values.source_lines import all_chains
from pytest_gpumem.measuring.explain.tracker import Tracker
from pytest_gpumem.torch_support.private_api.autograd import next_node_number, running_node_number
from pytest_gpumem.torch_support.private_api.dispatch import function_mode
from pytest_gpumem.torch_support.reachability import storage_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.measuring.explain.sites import Site, Sites


@contextmanager
def creation_sites(sites: Sites, by_address: dict[int, Site]) -> Iterator[None]:
    """Record which line creates each tensor within the context.

    For each tensor created by a torch function, the calling line is stored in ``by_address``, under the storage's address. A
    freed tensor's line is removed at the end of the context. Otherwise a later tensor that C++ created at the same address
    would have this line, and chance decides which addresses are used again.
    """
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    storage_refs: dict[int, StorageWeakRef] = {}

    def storages(value: object) -> dict[int, torch.UntypedStorage]:
        tensors = (tensor for tensor in tensors_in(value) if type(tensor) in (torch.Tensor, torch.nn.Parameter))
        return {storage.data_ptr(): storage for tensor in tensors if (storage := storage_of(tensor)) is not None}

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        # An in-place function returns one of its arguments, which is not a new tensor.
        returned = storages(result) if getattr(func, "__name__", "") != "__get__" else {}
        for address in returned and returned.keys() - storages((args, kwargs)).keys():
            by_address[address] = sites.caller_site(2)
            storage_refs[address] = StorageWeakRef(returned[address])  # type: ignore[no-untyped-call]
        return result

    with function_mode(call):
        yield
    for address, storage_ref in storage_refs.items():
        if storage_ref.expired():  # type: ignore[no-untyped-call]
            del by_address[address]


class OperatorSites:
    """Finds the module and the lines from which each operator is called, during a single run of a step."""

    def __init__(self, sites: Sites, device: torch.device) -> None:
        self._sites = sites
        self._tracker = Tracker(device, sites, "modules", snapshots=False)
        self._first_number = next_node_number()
        self._made: dict[int, tuple[int, OperatorSite]] = {}
        """The thread and place that created each autograd node, by the node's number. Threads number their nodes separately."""
        self._at_line: dict[tuple[str, str], OperatorSite] = {}
        """The place of the first forward operator at each line."""
        self.modules: set[str] = set()
        """The paths of all modules in which operators ran."""
        self._in_module: dict[tuple[str, str], OperatorSite] = {}
        """The place of the first forward operator for each module and library line."""

    def watching(self) -> AbstractContextManager[None]:
        """Track module calls within the context."""
        return self._tracker.watching()

    def operator_site(self) -> OperatorSite:
        """Return the place of the operator that runs next. Call this also for views, because they create nodes too."""
        module, site = self._tracker.module, self._sites.caller_site(2)
        self.modules.add(module)
        number = running_node_number()
        place = OperatorSite(module, site.user, site.library, all_chains([site.callers]))
        line = site.user, site.library
        if number is None:
            # If backward recomputes this line, the layer is unknown. So the line's place has a folded path: ``blocks.*``
            # instead of ``blocks.3``.
            self._at_line.setdefault(line, replace(place, module=folded(module)))
            self._in_module.setdefault((module, site.library), place)
        elif site.user or site.library:
            # Python code runs in an autograd node: recomputed code, or the backward of a custom autograd function.
            if not module:
                place = self._at_line.get(line, place)
            elif not site.user:
                place = self._in_module.get((module, site.library), place)
        else:
            return self._made.get(number, (0, NOWHERE))[1]
        self._remember(place)
        return place

    def _remember(self, place: OperatorSite) -> None:
        # Autograd creates an operator's node before the operator runs. So if the latest number is new, this operator has it.
        number, thread = next_node_number() - 1, threading.get_ident()
        if threading.current_thread() is threading.main_thread() and number < self._first_number:
            return
        creating_thread, _ = self._made.setdefault(number, (thread, place))
        if creating_thread != thread:
            # Two threads have a node with this number, so the number does not show the place.
            self._made[number] = creating_thread, NOWHERE
