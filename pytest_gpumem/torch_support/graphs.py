"""Autograd graphs: their saved tensors, and the Python tensors that keep each graph alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api import next_nodes, saved_by
from pytest_gpumem.torch_support.reachability import alive, blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import contents_of, instance_dict, is_a, tensor_property

if TYPE_CHECKING:
    from collections.abc import Collection


def graphs_that_save(addresses: Collection[int]) -> dict[int, list[Any]]:
    """Return the roots of the graphs that saved the blocks at ``addresses`` for backward.

    For example, after ``loss = (x * y).sum()`` the address of ``x`` gives ``[loss]``, because the product saved ``x``.

    A saved tensor is not unpacked, because this would run the hooks from `torch.autograd.graph.saved_tensors_hooks`.

    Args:
        addresses: Addresses of blocks.

    Returns:
        The tensors whose graph saved each block, by address. A tensor inside another tensor's graph is left out.
    """
    import torch

    if not addresses:
        return {}
    tensors: dict[int, tuple[Any, list[Any]]] = {}
    for tensor in alive(torch.Tensor):
        node = tensor_property(tensor, "grad_fn")
        if node is not None:
            tensors.setdefault(id(node), (node, []))[1].append(tensor)
    inner: set[int] = set()
    graphs_of: dict[int, list[tuple[int, list[Any]]]] = {}
    for number, (node, its_tensors) in tensors.items():
        if number not in inner:
            saved = _saved_below(node, inner)
            for address in saved & set(addresses):
                graphs_of.setdefault(address, []).append((number, its_tensors))
    return {
        address: [tensor for number, roots in graphs if number not in inner for tensor in roots]
        for address, graphs in graphs_of.items()
    }


def _saved_below(root: Any, inner: set[int]) -> set[int]:
    """Return the addresses that a node's graph saved, and add the nodes below the root to ``inner``."""
    import torch

    saved: set[int] = set()
    seen: dict[int, Any] = {id(root): root}
    stack = [root]
    while stack:
        node = stack.pop()
        # A pack hook may have packed a tensor into a tuple. A leaf's gradient belongs to the leaf and is not counted.
        packed = saved_by(node)
        packed += [part for value in packed if is_a(value, tuple, list) for part in contents_of(value)]
        saved |= blocks_of(value for value in packed if is_a(value, torch.Tensor)).keys()
        # An object of `torch.autograd.Function` has attributes, which may be tensors.
        saved |= blocks_of(reachable_tensors([instance_dict(node)])).keys()
        for other in next_nodes(node):
            if id(other) not in seen:
                seen[id(other)] = other
                stack.append(other)
    inner |= seen.keys() - {id(root)}
    return saved
