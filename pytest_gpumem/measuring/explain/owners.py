"""Find the owners of blocks in a recording (models, optimizers and inputs), and label the owners' tensors."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

from pytest_gpumem.measuring.explain.trace import Label
from pytest_gpumem.torch_support.reachability import reachable, reachable_tensors, storages_of
from pytest_gpumem.torch_support.static_access import (
    attribute,
    contents_of,
    dense_bytes,
    displayed_path,
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

    from pytest_gpumem.measuring.explain.sites import Site

_EARLY = ("parameter", "buffer")
_STAYS = (*_EARLY, "optimizer state")


class TensorOwners:
    """Models, optimizers and inputs that own blocks. This object keeps inputs alive, but neither models nor optimizers.

    Args:
        device: The device of the blocks.
        creation_sites: The lines that allocated older blocks, by address.
    """

    def __init__(self, device: torch.device, creation_sites: Mapping[int, Site]) -> None:
        self._device = device
        self._creation_sites = creation_sites
        # The keys are ids, because a module or optimizer may be unhashable, or equal to another module.
        self._paths: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
        self._roots: list[tuple[weakref.ref[torch.nn.Module], str]] = []
        """Outermost models, each with a prefix for its modules' paths."""
        self._first = ""
        """The first outermost model's class."""
        self._optimizers: dict[int, tuple[weakref.ref[torch.optim.Optimizer], str]] = {}
        """Optimizers, each with the line that calls ``optimizer.step()``, because this call creates the optimizer's state."""
        self._inputs: list[object] = []
        self._buckets: Mapping[int, torch.Tensor] = {}
        self._zeroed: dict[int, str] = {}
        """The line that fills a gradient with zeros instead of freeing the gradient, by address."""
        self._labelled: set[tuple[str, int, str]] = set()

    def model(self, module: torch.nn.Module) -> None:
        """Register a model by its outermost module, unless the module is part of a registered model.

        `DistributedDataParallel` and `DataParallel` around a model do not change its modules' paths.
        """
        import torch

        if self.path_of(module) is not None:
            return
        if is_a(module, torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
            self._paths[id(module)] = weakref.ref(module), type(module).__name__
            self.model(dict(named_modules(module))["module"])
            return
        # A generator and a discriminator may have modules with equal names. So the second model's class prefixes its paths.
        class_name = type(module).__name__
        self._first = self._first or class_name
        prefix = "" if class_name == self._first else f"{class_name}."
        self._roots.append((weakref.ref(module), prefix))
        for path, child in named_modules(module):
            if self.path_of(child) is None:
                self._paths[id(child)] = weakref.ref(child), displayed_path(module, prefix, path)

    def optimizer(self, optimizer: torch.optim.Optimizer, line: str = "") -> None:
        """Register an optimizer, and the line that calls ``optimizer.step()``."""
        line = line or _text_for(self._optimizers, optimizer) or ""
        self._optimizers[id(optimizer)] = weakref.ref(optimizer), line

    def inputs(self, value: object) -> None:
        """Register the tensors reachable from ``value`` as inputs, unless they have another owner."""
        self._inputs.append(value)

    def buckets(self, buckets: Mapping[int, torch.Tensor]) -> None:
        """Register `DistributedDataParallel`'s copies of gradients. The mapping may change while the step runs."""
        self._buckets = buckets

    def within(self, value: object) -> None:
        """Register the models and optimizers reachable from a value."""
        import torch

        objects = list(reachable([value]))
        modules = [candidate for candidate in objects if is_a(candidate, torch.nn.Module)]
        parts = {id(child) for module in modules for _, child in named_modules(module) if child is not module}
        for module in modules:
            if id(module) not in parts:
                self.model(module)
        for candidate in objects:
            if is_a(candidate, torch.optim.Optimizer):
                self.optimizer(candidate)

    def path_of(self, module: torch.nn.Module) -> str | None:
        """Return a module's path in its registered model, or ``None`` if it is in no registered model."""
        return _text_for(self._paths, module)

    def zeroed(self, tensors: object, line: str) -> None:
        """Record the line at which tensors were filled with zeros."""
        for tensor in reachable_tensors([tensors]):
            for address, _ in self.blocks_of(tensor):
                self._zeroed[address] = line

    def forget(self) -> None:
        """Release the inputs and the buckets."""
        self._inputs.clear()
        self._buckets = {}

    def labels(self) -> Iterator[Label]:
        """Yield an ownership snapshot: labels for the current parameters, buffers, gradients, optimizer state and inputs.

        Parameters, buffers and optimizer state do not move, so each gets a label only in the first snapshot that contains it.
        """
        owners: dict[int, str] = {}
        for reference, prefix in self._roots:
            root = reference()
            if root is None:
                continue
            for path, _, parameter in named_tensors(root, "parameters"):
                owners[id(parameter)] = displayed_path(root, prefix, path)
                yield from self._parameter(parameter, owners[id(parameter)])
            for path, _, buffer in named_tensors(root, "buffers"):
                yield from self._label("buffer", displayed_path(root, prefix, path), parts_of(buffer))
        for optimizer_reference, line in self._optimizers.values():
            optimizer = optimizer_reference()
            if optimizer is not None:
                yield from self._of_optimizer(optimizer, line, owners)
        yield from self._label("gradient", "DistributedDataParallel", self._buckets.values())
        yield from self._label("input", "", reachable_tensors(self._inputs))

    def _of_optimizer(self, optimizer: torch.optim.Optimizer, line: str, owners: Mapping[int, str]) -> Iterator[Label]:
        state_dict = attribute(optimizer, "state")
        states = {id(parameter): state for parameter, state in dict.items(state_dict)} if is_a(state_dict, dict) else {}
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
        """Return the line that made a block.

        Creation sites are stored by address, and a later block may reuse the address. So they are used only for parameters and
        buffers, which are made early.
        """
        if category in _EARLY and address in self._creation_sites:
            return self._creation_sites[address].user
        return self._zeroed.get(address, "") if category == "gradient" else maker

    def blocks_of(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Return the address and size in bytes for each of a tensor's storages on the device."""
        return [(storage.data_ptr(), storage.nbytes()) for storage in storages_of([tensor], self._device)]


def parameters_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield an optimizer's parameters. For a wrapper around an optimizer, yield the wrapped optimizer's parameters."""
    import torch

    groups = attribute(optimizer, "param_groups")
    for group in list.copy(groups) if is_a(groups, list) else ():
        parameters = dict.get(group, "params") if is_a(group, dict) else None
        yield from (parameter for parameter in contents_of(parameters) if is_a(parameter, torch.Tensor))


Reference = TypeVar("Reference")


def _text_for(texts: Mapping[int, tuple[weakref.ref[Reference], str]], owner: Reference) -> str | None:
    """Return the text stored for an owner, or ``None``.

    A text does not count if it was stored for an earlier object with the same ``id``.
    """
    reference, text = texts.get(id(owner), (None, None))
    return text if reference is not None and reference() is owner else None
