"""The repeated blocks of a model, found or named."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.torch_support.static_access import class_name, elements_of, parameters_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    import torch


class Block(NamedTuple):
    """A module and its path in the model: ``transformer.h.0``."""

    path: str
    module: torch.nn.Module


def repeated_blocks(model: torch.nn.Module, named: str | None = None) -> list[list[Block]]:
    """Return the model's blocks in lists: those of one ``ModuleList`` or ``Sequential`` are run one after the other.

    Without a name: the largest list (by parameters) whose members are of one type, and every other list of this type
    (the stages of a ResNet, encoder and decoder). ``named`` is a pattern of the modules that hold them, or of the blocks
    themselves. Raises `ConfigError` when there are none.
    """
    if named is not None:
        return _named_blocks(model, named)
    lists = [
        (path, module, kind) for path, module in model.named_modules() if (kind := _type_of_members(module)) is not None
    ]
    # A list of leaves (embeddings, projections) is no list of blocks, unless there is no other.
    deep = [entry for entry in lists if any(True for member in entry[1].children() for _ in member.children())]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks (a ModuleList or Sequential of modules of one type); "
            "name them with blocks=PATTERN, or use checkpoint=modules:PATTERN"
        )
    chosen = max(deep or lists, key=lambda entry: parameters_of(entry[1]))[2]
    return [
        [Block(_join(path, name), member) for name, member in module.named_children()]
        for path, module in _outermost((path, module) for path, module, kind in lists if kind is chosen)
    ]


def modules_matching(model: torch.nn.Module, pattern: str) -> list[Block]:
    """Return the outermost modules whose path matches (``*`` and ``?``; ``*`` matches dots, too).

    Raises `ConfigError` when there is none.
    """
    matching = [
        (path, module)
        for path, module in model.named_modules()
        if path and fnmatchcase(path, pattern.replace("[", "[[]"))
    ]
    if not matching:
        some = ", ".join(path for path, _ in list(model.named_modules())[1:9])
        raise ConfigError(f"no module of {type(model).__name__} matches {pattern!r}; it has {some}, ...")
    return [Block(path, module) for path, module in _outermost(matching)]


def described(lists: Sequence[Sequence[Block]]) -> str:
    """Return the paths and types of lists of blocks: ``"h (12 x GPT2Block)"``."""
    texts = []
    for blocks in lists:
        counts = Counter(class_name(type(block.module)) for block in blocks)
        holders = {block.path.rpartition(".")[0] for block in blocks}
        what = ", ".join(f"{count} x {name}" for name, count in counts.most_common(3))
        texts.append(f"{holders.pop() or 'the model itself'} ({what})" if len(holders) == 1 else what)
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more lists" if len(texts) > 3 else "")


def pattern_of_called(model: torch.nn.Module, called: Container[int]) -> tuple[str, list[Block]] | None:
    """Return a pattern of repeated modules that are all ``called`` (ids) and have the most trainable parameters, and these."""
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
    """Return patterns of the modules of the same index in a list, and in lists of that name: ``h.*.mlp``, ``*.h.*.mlp``."""
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
        raise ConfigError(f"blocks={pattern}: {matching[0].path} holds no module")
    return lists


def _type_of_members(module: torch.nn.Module) -> type | None:
    """Return the type of the members of a list of at least two that are all of one type; else ``None``."""
    import torch

    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 2:
        return None
    kinds = {type(member) for member in module}
    return kinds.pop() if len(kinds) == 1 else None


def _outermost(modules: Iterable[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules that are not within another one; ``named_modules`` gives the outer ones first."""
    kept: list[tuple[str, torch.nn.Module]] = []
    for path, module in modules:
        if not any(path.startswith(f"{outer}.") or not outer for outer, _ in kept):
            kept.append((path, module))
    return kept


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
