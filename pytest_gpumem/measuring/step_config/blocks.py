"""Find a model's repeated blocks: detect them, or select them by a pattern."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.torch_support.static_access import class_name, elements_of, parameters_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    import torch


class Block(NamedTuple):
    """A module and its path in the model: ``transformer.h.0``."""

    path: str
    module: torch.nn.Module


def repeated_blocks(model: torch.nn.Module, named: str | None = None) -> list[list[Block]]:
    """Return the lists of repeated blocks in a model. The model runs the blocks in a list one after another.

    Without a pattern, the function looks for lists (``ModuleList`` or ``Sequential``) whose members all have the same type. It
    selects the list with the most parameters, and all other lists with the same type of members, such as the stages of a
    ResNet, or encoder and decoder. For example, GPT-2 has the list ``transformer.h`` with 12 ``GPT2Block`` modules.

    Args:
        model: The model.
        named: A pattern for the modules that contain the blocks, or for the blocks themselves.

    Raises:
        ConfigError: The model has no such blocks.
    """
    if named is not None:
        return _named_blocks(model, named)
    lists = [
        (path, module, kind) for path, module in model.named_modules() if (kind := _type_of_members(module)) is not None
    ]
    # Use a list whose modules have no children (embeddings, projections) only if there is no other list.
    deep = [listing for listing in lists if any(True for member in listing[1].children() for _ in member.children())]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks (a ModuleList or Sequential whose modules have the same type); "
            "name the blocks with blocks=PATTERN, or use checkpoint=modules:PATTERN"
        )
    block_type = max(deep or lists, key=lambda listing: parameters_of(listing[1]))[2]
    return [
        [Block(_join(path, name), member) for name, member in module.named_children()]
        for path, module in _outermost((path, module) for path, module, kind in lists if kind is block_type)
    ]


def modules_matching(model: torch.nn.Module, pattern: str) -> list[Block]:
    """Return the outermost modules whose path matches a pattern (``*`` and ``?``; ``*`` also matches dots).

    For example, ``h.*`` matches ``h.0`` and ``h.0.mlp``, but the function returns only ``h.0``.

    Raises:
        ConfigError: No module matches.
    """
    matching = [
        (path, module)
        for path, module in model.named_modules()
        if path and fnmatchcase(path, pattern.replace("[", "[[]"))
    ]
    if not matching:
        first_paths = ", ".join(path for path, _ in list(model.named_modules())[1:9])
        raise ConfigError(f"no module of {type(model).__name__} matches {pattern!r}; it has {first_paths}, ...")
    return [Block(path, module) for path, module in _outermost(matching)]


def described(lists: Sequence[Sequence[Block]]) -> str:
    """Return a text with each list's path and its block types: ``"h (12 x GPT2Block)"``."""
    texts = []
    for blocks in lists:
        counts = Counter(class_name(type(block.module)) for block in blocks)
        holders = {block.path.rpartition(".")[0] for block in blocks}
        types = ", ".join(f"{count} x {name}" for name, count in counts.most_common(3))
        texts.append(f"{holders.pop() or 'the model itself'} ({types})" if len(holders) == 1 else types)
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more lists" if len(texts) > 3 else "")


def pattern_of_called(model: torch.nn.Module, called: Container[int]) -> tuple[str, list[Block]] | None:
    """Return a pattern for ``blocks=`` that matches only modules that forward calls, and the matching modules.

    If there are several patterns, the modules with the most trainable parameters win.

    Args:
        model: The model.
        called: The ids of all modules that forward calls.

    Returns:
        The pattern and at least two modules; ``None`` if there is no such pattern.
    """
    best: tuple[int, str, list[Block]] = (0, "", [])
    patterns = [
        pattern for path, module in model.named_modules() if id(module) in called for pattern in _patterns(path)
    ]
    for pattern in dict.fromkeys(patterns):
        blocks = modules_matching(model, pattern)
        if len(blocks) > 1 and all(id(block.module) in called for block in blocks):
            trained = {id(p): p for block in blocks for p in block.module.parameters() if p.requires_grad}
            size = sum(map(elements_of, trained.values()))
            if size > best[0]:
                best = size, pattern, blocks
    return best[1:] if best[0] else None


def _patterns(path: str) -> Iterator[str]:
    """Yield patterns that match the module at ``path`` and its counterparts in the same list, or in all lists with this name.

    For example, the patterns for ``encoder.h.0.mlp`` are ``encoder.h.*.mlp`` and ``*.h.*.mlp``.
    """
    names = path.split(".")
    for index, name in enumerate(names):
        if name.isdecimal() and index:
            within = [*names[index - 1 : index], "*", *names[index + 1 :]]
            yield ".".join([*names[: index - 1], *within])
            if index > 1:
                yield ".".join(["*", *within])


def _named_blocks(model: torch.nn.Module, pattern: str) -> list[list[Block]]:
    import torch

    holders = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
    matching = modules_matching(model, pattern)
    if not all(isinstance(block.module, holders) for block in matching):
        return [matching]
    lists = [
        [Block(_join(block.path, name), member) for name, member in block.module.named_children()] for block in matching
    ]
    if not all(lists):
        raise ConfigError(f"blocks={pattern}: {matching[0].path} contains no module")
    return lists


def _type_of_members(module: torch.nn.Module) -> type | None:
    """Return the common type of a list's members; ``None`` if the types differ, or if there are fewer than two members."""
    import torch

    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 2:
        return None
    kinds = {type(member) for member in module}
    return kinds.pop() if len(kinds) == 1 else None


def _outermost(modules: Iterable[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules that are not inside another module in ``modules``. Outer modules must come before inner modules."""
    outermost: list[tuple[str, torch.nn.Module]] = []
    for path, module in modules:
        if not any(path.startswith(f"{outer}.") or not outer for outer, _ in outermost):
            outermost.append((path, module))
    return outermost


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
