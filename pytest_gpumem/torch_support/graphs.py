"""Find which tensors keep an autograd graph alive, and which tensors the graph has saved for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.private_api.autograd import next_nodes, saved_by
from pytest_gpumem.torch_support.reachability import alive, blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import contents_of, instance_dict, is_a, tensor_property

if TYPE_CHECKING:
    from collections.abc import Collection


def graphs_that_save(addresses: Collection[int]) -> dict[int, list[Any]]:
    """Return the tensors whose autograd graphs have saved the memory blocks at ``addresses`` for backward.

    For example, after ``loss = (x * y).sum()`` the result for the address of ``x`` is ``[loss]``, because the product saved
    ``x``.

    Saved tensors are not unpacked, because this would run the program's hooks (`torch.autograd.graph.saved_tensors_hooks`).

    Args:
        addresses: The blocks' addresses.

    Returns:
        For each address, the live Python tensors whose graph saved the block. If a tensor's node is inside another tensor's
        graph, only this other tensor is listed.
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
    """Return the addresses of all blocks saved by ``root``'s graph, and add its nodes' ids except the root's to ``inner``."""
    import torch

    saved: set[int] = set()
    seen: dict[int, Any] = {id(root): root}
    stack = [root]
    while stack:
        node = stack.pop()
        # A pack hook may have returned a tuple with the tensor, so search tuples. Do not search a leaf's gradient: the leaf
        # keeps it alive, and not the graph.
        packed = saved_by(node)
        packed += [part for value in packed if is_a(value, tuple, list) for part in contents_of(value)]
        saved |= blocks_of(value for value in packed if is_a(value, torch.Tensor)).keys()
        # A `torch.autograd.Function` may store tensors in attributes of `ctx`.
        saved |= blocks_of(reachable_tensors([instance_dict(node)])).keys()
        for other in next_nodes(node):
            if id(other) not in seen:
                seen[id(other)] = other
                stack.append(other)
    inner |= seen.keys() - {id(root)}
    return saved
