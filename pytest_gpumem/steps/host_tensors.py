"""Which tensors live on the host while a step runs on a GPU, and which on the CPU would, if it were a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_gpumem.torch_support.reachability import is_host, storage_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

_COUNTERS = ("step", "mu_product")
"""State that torch's optimizers keep on the host, unless ``capturable`` or ``fused``: read for every parameter."""


class HostTensors:
    """Tells the host's tensors from the device's.

    On a GPU a tensor's device says it. On the CPU every tensor counts as one of a GPU's, but the counters of an optimizer,
    and what the step itself makes without a device, or copies to the host (`mark`); and what is computed from such alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.stands_in = is_host(device)
        """Whether the CPU stands in for a GPU."""
        # The storages are held: an address is not given to another one meanwhile.
        self._marked: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if not self.stands_in:
            return is_host(tensor.device)
        if not self._marked:
            return False
        storage = storage_of(tensor)
        return storage is not None and storage.data_ptr() in self._marked

    def mark(self, result: object, *, host: bool = True) -> None:
        """What tensors in ``result`` are from now on, where the CPU stands in."""
        if not self.stands_in:
            return
        for tensor in tensors_in([result]):
            storage = storage_of(tensor)
            if storage is None:
                continue
            if host:
                self._marked[storage.data_ptr()] = storage
            else:
                self._marked.pop(storage.data_ptr(), None)

    def follow(self, inputs: Iterable[object], result: object) -> None:
        """What comes from the host's tensors alone is the host's."""
        if not self._marked:
            return
        tensors = list(tensors_in(list(inputs)))
        if tensors and all(tensor in self for tensor in tensors):
            self.mark(result)

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Within, the counters of every optimizer that steps are known; in the end, nothing is."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        if not self.stands_in:
            yield
            return

        def know(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                if group.get("capturable") or group.get("fused"):
                    continue
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    self.mark([state[name] for name in _COUNTERS if name in state])

        handle = register_optimizer_step_pre_hook(know)
        try:
            yield
        finally:
            handle.remove()
            self._marked.clear()
