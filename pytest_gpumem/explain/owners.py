"""Owners of blocks in a recording: models, optimizers and inputs, and the labels of their tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

from pytest_gpumem.explain.trace import Label
from pytest_gpumem.torch_support.private_api import MODULE_PARTS
from pytest_gpumem.torch_support.reachability import reachable, reachable_tensors, storages_of
from pytest_gpumem.torch_support.static_access import (
    attribute,
    contents_of,
    dense_bytes,
    dtype_and_shape,
    gradient_of,
    is_a,
    named_modules,
    named_tensors,
    parts_of,
    tensor_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

    from pytest_gpumem.explain.sites import Site

_COMPILED = "_orig_mod"
"""The name of a module within the one that torch.compile puts around it."""
_EARLY = ("parameter", "buffer")
_STAYS = (*_EARLY, "optimizer state")


class TensorOwners:
    """Owners that were registered, or found while the step ran. Only inputs are kept alive by it.

    ``creation_sites`` are the lines that allocated older blocks on ``device``, by address.
    """

    def __init__(self, device: torch.device, creation_sites: Mapping[int, Site]) -> None:
        self._device = device
        self._creation_sites = creation_sites
        # By identity: modules and optimizers may forbid to be hashed, or be equal to others.
        self._paths: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._roots: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        """Outermost models, and what stands before the paths of their modules."""
        self._first = ""
        """The class of the first outermost model."""
        self._optimizers: dict[int, tuple[weakref.ref[torch.optim.Optimizer], str]] = {}
        """Each with the line that calls its step, which makes its state."""
        self._inputs: list[object] = []
        self._buckets: Mapping[int, torch.Tensor] = {}
        self._zeroed: dict[int, str] = {}
        """The line that fills a gradient with zeros, and so keeps it: by address."""
        self._labelled: set[tuple[str, int, str]] = set()

    def model(self, module: torch.nn.Module) -> None:
        """Register a model by its outermost module, unless it is a part of a registered one.

        Modules within `DistributedDataParallel` and `DataParallel` have the paths that they have without.
        """
        import torch

        if self.path_of(module) is not None:
            return
        if is_a(module, torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
            self._paths[id(module)] = weakref.ref(module), type(module).__name__
            self.model(dict(named_modules(module))["module"])
            return
        # A generator and a discriminator may have modules of the same names; blocks of one list are of one kind.
        kind = type(module).__name__
        self._first = self._first or kind
        before = "" if kind == self._first else f"{kind}."
        self._roots.append((weakref.ref(module), before))
        for path, child in named_modules(module):
            if self.path_of(child) is None:
                self._paths[id(child)] = weakref.ref(child), _shown(module, before, path)

    def optimizer(self, optimizer: torch.optim.Optimizer, line: str = "") -> None:
        """Register an optimizer, and the line that calls its step."""
        line = line or _of(self._optimizers, optimizer) or ""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer), line

    def inputs(self, value: object) -> None:
        """Register the tensors reachable from ``value`` as inputs, where they are nothing else."""
        self._inputs.append(value)

    def buckets(self, buckets: Mapping[int, torch.Tensor]) -> None:
        """Register the copies of gradients that `DistributedDataParallel` sends, which may change while the step runs."""
        self._buckets = buckets

    def within(self, value: object) -> None:
        """Register the models and optimizers that can be reached from a value."""
        import torch

        found = list(reachable([value]))
        modules = [one for one in found if is_a(one, torch.nn.Module)]
        parts = {id(child) for module in modules for _, child in named_modules(module) if child is not module}
        for module in modules:
            if id(module) not in parts:
                self.model(module)
        for one in found:
            if is_a(one, torch.optim.Optimizer):
                self.optimizer(one)

    def path_of(self, module: torch.nn.Module) -> str | None:
        """Return the path of a module in its registered model."""
        return _of(self._paths, module)

    def zeroed(self, tensors: object, line: str) -> None:
        """Note the line that filled tensors with zeros."""
        for tensor in reachable_tensors([tensors]):
            for address, _ in self.blocks_of(tensor):
                self._zeroed[address] = line

    def forget(self) -> None:
        """Release the inputs, and buckets."""
        self._inputs.clear()
        self._buckets = {}

    def labels(self) -> Iterator[Label]:
        """Return an ownership snapshot: parameters, buffers, gradients, optimizer state and inputs, as they are now.

        Blocks that stay where they are have a label in the first snapshot only.
        """
        owners: dict[int, str] = {}
        for reference, before in self._roots:
            root = reference()
            if root is None:
                continue
            for path, _, parameter in named_tensors(root, "parameters"):
                owners[id(parameter)] = _shown(root, before, path)
                yield from self._parameter(parameter, owners[id(parameter)])
            for path, _, buffer in named_tensors(root, "buffers"):
                yield from self._label("buffer", _shown(root, before, path), parts_of(buffer))
        for known, line in self._optimizers.values():
            optimizer = known()
            if optimizer is not None:
                yield from self._of_optimizer(optimizer, line, owners)
        yield from self._label("gradient", "DistributedDataParallel", self._buckets.values())
        yield from self._label("input", "", reachable_tensors(self._inputs))

    def _of_optimizer(self, optimizer: torch.optim.Optimizer, line: str, owners: Mapping[int, str]) -> Iterator[Label]:
        held = attribute(optimizer, "state")
        states = {id(parameter): state for parameter, state in dict.items(held)} if is_a(held, dict) else {}
        for parameter in parameters_of_optimizer(optimizer):
            owner = owners.get(id(parameter), "")
            yield from self._parameter(parameter, owner)
            state = states.get(id(parameter))
            yield from self._label("optimizer state", owner, reachable_tensors([state]), line)

    def _parameter(self, parameter: torch.Tensor, owner: str) -> Iterator[Label]:
        yield from self._label("parameter", owner, parts_of(parameter))
        gradient = gradient_of(parameter)
        if gradient is not None:
            yield from self._label("gradient", owner, parts_of(gradient))

    def _label(self, category: str, module: str, tensors: Iterable[torch.Tensor], maker: str = "") -> Iterator[Label]:
        for tensor in tensors:
            blocks = self.blocks_of(tensor)
            for address, nbytes in blocks:
                if category in _STAYS:
                    if (category, address, maker) in self._labelled:
                        continue
                    self._labelled.add((category, address, maker))
                text = ""
                if len(blocks) == 1 and nbytes == dense_bytes(tensor):
                    text = tensor_text(*dtype_and_shape(tensor))
                yield Label(address, category, module, text, self._line(category, address, maker))

    def _line(self, category: str, address: int, maker: str) -> str:
        """Return the line that made a block. Creation sites hold for early categories only: later blocks reuse addresses."""
        if category in _EARLY and address in self._creation_sites:
            return self._creation_sites[address].user
        return self._zeroed.get(address, "") if category == "gradient" else maker

    def blocks_of(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Return address and bytes of each storage of a tensor on the device."""
        return [(storage.data_ptr(), storage.nbytes()) for storage in storages_of([tensor], self._device)]


def parameters_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer holds itself; for a wrapper those of the optimizer that it wraps."""
    import torch

    groups = attribute(optimizer, "param_groups")
    for group in list.copy(groups) if is_a(groups, list) else ():
        parameters = dict.get(group, "params") if is_a(group, dict) else None
        yield from (one for one in contents_of(parameters) if is_a(one, torch.Tensor))


Reference = TypeVar("Reference")


def _of(noted: Mapping[int, tuple[weakref.ref[Reference], str]], one: Reference) -> str | None:
    """Return what was noted of a live object, since ids are used again."""
    reference, text = noted.get(id(one), (None, None))
    return text if reference is not None and reference() is one else None


def _shown(root: torch.nn.Module, before: str, path: str) -> str:
    """Return a module's path without what torch.compile puts around modules; the class for the model itself.

    A path that begins with a number looks like a row's number, so the parts of a ``Sequential`` have its class:
    ``Sequential.2``.
    """
    parts = [part for part in path.split(".") if part not in ("", _COMPILED)]
    if parts and not parts[0].isdecimal():
        return before + ".".join(parts)
    modules = attribute(root, MODULE_PARTS["modules"])
    model = dict.get(modules, _COMPILED, root) if is_a(modules, dict) else root
    return ".".join([type(model).__name__, *parts])
