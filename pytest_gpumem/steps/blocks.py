"""The repeated blocks of a model, found or named, and segments of them that are recomputed as one."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.steps.errors import ConfigError
from pytest_gpumem.torch_support.static_access import class_name, elements_of, is_a

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    import torch

    Forward = Callable[..., Any]
    Recompute = Callable[..., Any]


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
    chosen = max(deep or lists, key=lambda entry: _parameters(entry[1]))[2]
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
    """Return patterns of the modules at the same place in a list, and in lists of that name: ``h.*.mlp``, ``*.h.*.mlp``."""
    names = path.split(".")
    for place, name in enumerate(names):
        if name.isdecimal() and place:
            within = [*names[place - 1 : place], "*", *names[place + 1 :]]
            yield ".".join([*names[: place - 1], *within])
            if place > 1:
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


def _parameters(module: torch.nn.Module) -> int:
    return sum(map(elements_of, module.parameters()))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Segment:
    """Two or more consecutive blocks that are recomputed as one. ``forwards()`` are the replacements of their ``forward``.

    The first block runs all of them; the others hand on what they get. That is right only where the model's loop runs each
    block once and in order, does nothing between two and gives each the same arguments, so all of that is checked each time.
    """

    def __init__(self, blocks: Sequence[Block], recompute: Recompute) -> None:
        """Make the segment of ``blocks``, in the order in which they run.

        ``recompute(function, *args, **kwargs)`` runs ``function`` so that it is run again in backward.
        """
        self._paths = [block.path for block in blocks]
        self._own = [block.module.forward for block in blocks]
        self._recompute = recompute
        self._output: Any = None
        self._ran = 0
        """Number of blocks that the loop has run in a call that has not ended."""
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def forwards(self) -> list[Forward]:
        """Return the replacement of each block's ``forward``, in their order."""
        return [self._first(), *(self._follower(number) for number in range(1, len(self._own)))]

    def check_ended(self) -> None:
        """Raise `ConfigError` if the model's loop has run the first block and not all of them."""
        if self._call is not None:
            raise self._wrong(self._ran, f"it did not run after {self._paths[self._ran - 1]}")

    def _first(self) -> Forward:
        def run_all(*args: Any, **kwargs: Any) -> Any:
            self.check_ended()
            self._output, self._call, self._ran = self._recompute(self._run, *args, **kwargs), (args, kwargs), 1
            return self._output

        return run_all

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        output = self._own[0](*args, **kwargs)
        for number, forward in enumerate(self._own[1:]):
            args, kwargs = _with_hidden(args, kwargs, self._hidden_of(output, number))
            output = forward(*args, **kwargs)
        return output

    def _follower(self, number: int) -> Forward:
        last = number == len(self._own) - 1

        def hand_on(*args: Any, **kwargs: Any) -> Any:
            if self._call is None:
                raise self._wrong(number, f"it ran before {self._paths[0]}")
            self._check(number, args, kwargs)
            output = self._output
            self._ran += 1
            if last:
                self._output = self._call = None
            return output

        return hand_on

    def _check(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._call is not None, "the caller has looked"
        if number < self._ran:
            raise self._wrong(number, "it ran more than once")
        if number > self._ran:
            self.check_ended()
        hidden, where = _hidden(args, kwargs)
        if hidden is not self._hidden_of(self._output, number - 1):
            raise self._wrong(number, "the model changes what it gets from the block before")
        theirs, mine = _others(*self._call, where), _others(args, kwargs, where)
        if theirs.keys() != mine.keys() or any(theirs[name] is not mine[name] for name in mine):
            differing = [
                str(name) for name in sorted({*theirs, *mine}, key=str) if theirs.get(name) is not mine.get(name)
            ]
            raise self._wrong(number, f"its argument {', '.join(differing)} is not that of {self._paths[0]}")

    def _hidden_of(self, output: Any, number: int) -> Any:
        """Return the next block's input from a block's output: the output, or the first of a tuple that has nothing else."""
        import torch

        if is_a(output, torch.Tensor):
            return output
        if is_a(output, tuple, list) and output and is_a(output[0], torch.Tensor):
            if all(more is None for more in output[1:]):
                return output[0]
            raise self._wrong(number, "it returns more than one tensor")
        raise self._wrong(number, f"it returns {class_name(type(output))}")

    def _wrong(self, number: int, why: str) -> ConfigError:
        return ConfigError(
            f"{self._paths[number]} cannot be recomputed together with the blocks around it: {why}; "
            "use checkpoint=blocks or checkpoint=every:N"
        )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int | str | None]:
    """Return the first tensor among a call's arguments, and its position or keyword."""
    import torch

    for where, value in _by_place(args, kwargs):
        if is_a(value, torch.Tensor):
            return value, where
    return None, None


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, where = _hidden(args, kwargs)
    if isinstance(where, int):
        return (*args[:where], hidden, *args[where + 1 :]), kwargs
    return args, kwargs if where is None else {**kwargs, where: hidden}


def _others(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: int | str | None) -> dict[int | str, Any]:
    return {where: value for where, value in _by_place(args, kwargs) if where != hidden}


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()
