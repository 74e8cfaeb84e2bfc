"""Lines and modules at which operators are called, found from below autograd while a step runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pytest_gpumem.explain.trace import folded
from pytest_gpumem.explain.tracker import Tracker
from pytest_gpumem.torch_support.private_api import next_node_number, running_node_number
from pytest_gpumem.values.operator_counts import NOWHERE, Place

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.explain.sites import Site, Sites


class Places:
    """Finder of the places of operators during one run of a step."""

    def __init__(self, sites: Sites, device: torch.device) -> None:
        self._sites = sites
        self._tracker = Tracker(device, sites, "modules", looks=False)
        self._first_number = next_node_number()
        self._made: dict[int, tuple[int, Place]] = {}
        """Where, and in which thread, each node of the graph was made, by autograd's number, which each thread counts."""
        self._at_line: dict[Site, Place] = {}
        """Where forward reached a line first."""
        self._in_module: dict[tuple[str, str], Place] = {}
        """Where it reached a library's line in a module."""

    def watching(self) -> AbstractContextManager[None]:
        """Follow the modules' calls within the context."""
        return self._tracker.watching()

    def here(self) -> Place:
        """Return the place of the operator that is about to run. To be called for each operator: views make nodes, too."""
        module, site = folded(self._tracker.module), self._sites.here(2)
        number = running_node_number()
        if number is None:
            place = Place(module, *site)
            self._at_line.setdefault(site, place)
            self._in_module.setdefault((module, site.library), place)
        elif site.user or site.library:
            # What a node runs in Python: a part that is computed again, or a function's own backward.
            place = Place(module, *site)
            if not module:
                place = self._at_line.get(site, place)
            elif not site.user:
                place = self._in_module.get((module, site.library), place)
        else:
            return self._made.get(number, (0, NOWHERE))[1]
        self._remember(place)
        return place

    def _remember(self, place: Place) -> None:
        # Autograd has made the operator's node, if it makes one, before the operator runs.
        number, thread = next_node_number() - 1, threading.get_ident()
        if threading.current_thread() is threading.main_thread() and number < self._first_number:
            return
        made_in, _ = self._made.setdefault(number, (thread, place))
        if made_in != thread:
            self._made[number] = made_in, NOWHERE
