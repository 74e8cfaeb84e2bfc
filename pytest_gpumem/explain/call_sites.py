"""The lines at which tensors are made, and operators called, in backward too."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpumem.explain.tracker import Tracker, function_mode
from pytest_gpumem.torch_support.private_api import next_node_number, running_node_number
from pytest_gpumem.torch_support.reachability import storage_of, tensors_in
from pytest_gpumem.values.layers import folded
from pytest_gpumem.values.operator_counts import NOWHERE, OperatorSite
from pytest_gpumem.values.source_lines import all_chains

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.explain.sites import Site, Sites


@contextmanager
def creation_sites(sites: Sites, found: dict[int, Site]) -> Iterator[None]:
    """Enter the tensors that torch functions make within the context in ``found``: the line of the call, by address."""
    import torch

    def addresses(value: object) -> set[int]:
        tensors = (one for one in tensors_in(value) if type(one) in (torch.Tensor, torch.nn.Parameter))
        return {storage.data_ptr() for one in tensors if (storage := storage_of(one)) is not None}

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        # Functions that work in place return an argument.
        made = addresses(result) if getattr(func, "__name__", "") != "__get__" else ()
        for address in made and made - addresses((args, kwargs)):
            found[address] = sites.here(2)
        return result

    with function_mode(call):
        yield


class OperatorSites:
    """Finder of the places of operators during one run of a step."""

    def __init__(self, sites: Sites, device: torch.device) -> None:
        self._sites = sites
        self._tracker = Tracker(device, sites, "modules", snapshots=False)
        self._first_number = next_node_number()
        self._made: dict[int, tuple[int, OperatorSite]] = {}
        """Thread and place of each node's creation, by autograd's number, which each thread counts."""
        self._at_line: dict[tuple[str, str], OperatorSite] = {}
        """Place of the first operator of forward at each line."""
        self.modules: set[str] = set()
        """Paths of the modules in which operators ran."""
        self._in_module: dict[tuple[str, str], OperatorSite] = {}
        """Place of the first one at each module's line of a library."""

    def watching(self) -> AbstractContextManager[None]:
        """Follow the modules' calls within the context."""
        return self._tracker.watching()

    def here(self) -> OperatorSite:
        """Return the place of the operator that is about to run. To be called for each operator: views make nodes, too."""
        module, site = self._tracker.module, self._sites.here(2)
        self.modules.add(module)
        number = running_node_number()
        place = OperatorSite(module, site.user, site.library, all_chains([site.callers]))
        line = site.user, site.library
        if number is None:
            # Of any layer: what is recomputed there does not tell of which it is.
            self._at_line.setdefault(line, replace(place, module=folded(module)))
            self._in_module.setdefault((module, site.library), place)
        elif site.user or site.library:
            # What a node runs in Python: a part that is computed again, or a function's own backward.
            if not module:
                place = self._at_line.get(line, place)
            elif not site.user:
                place = self._in_module.get((module, site.library), place)
        else:
            return self._made.get(number, (0, NOWHERE))[1]
        self._remember(place)
        return place

    def _remember(self, place: OperatorSite) -> None:
        # Autograd has made the operator's node, if it makes one, before the operator runs.
        number, thread = next_node_number() - 1, threading.get_ident()
        if threading.current_thread() is threading.main_thread() and number < self._first_number:
            return
        made_in, _ = self._made.setdefault(number, (thread, place))
        if made_in != thread:
            self._made[number] = made_in, NOWHERE
