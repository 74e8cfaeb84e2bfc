"""Objects that fail, lie or do something when they are looked at, as suites have them among their fixtures.

Self-contained: it is also written into the projects that end-to-end tests run.
"""

from __future__ import annotations

import collections
import functools
import threading
import types
import weakref
from unittest.mock import MagicMock, NonCallableMagicMock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

RAN: list[str] = []
"""What code of the objects was run."""
_KEPT: list[object] = []
"""What proxies stand for."""
DEPTH = 100_000


class Looked(Exception):
    """Raised by an object that was looked at with its own code."""


def _hostile(name: str):
    def method(*_args, **_kwargs):
        RAN.append(name)
        raise Looked(name)

    return method


def _methods(*names: str) -> dict[str, object]:
    return {name: _hostile(name) for name in names}


_LOOKS = _methods(
    *("__len__", "__iter__", "__bool__", "__eq__", "__hash__", "__repr__", "__str__", "__contains__", "__getitem__"),
    *("__getattr__", "__call__", "__reversed__", "__index__", "__copy__", "__deepcopy__", "__sizeof__", "__dir__"),
)
_CLASS_RAISES = {"__class__": property(_hostile("__class__"))}


def _kind(name: str, *bases: type, **namespace: object) -> type:
    return types.new_class(name, bases, exec_body=lambda body: body.update(namespace))


class Plain:
    """An object with an attribute."""

    def __init__(self, kept):
        self.kept = kept


class Hostile(Plain):
    """All that Python calls when it is asked about an object."""

    locals().update(_LOOKS)
    __class__ = property(_hostile("__class__"))
    anything = property(_hostile("a property"))


class Intercepting(Plain):
    """Raises for every attribute."""

    def __getattribute__(self, name):
        RAN.append(f"__getattribute__({name})")
        raise Looked(name)


class PrivateDict(Plain):
    """Its ``__dict__`` is a property."""

    def __init__(self, kept):
        object.__setattr__(self, "kept", kept)

    __dict__ = property(_hostile("__dict__"))


class NoPlainDict:
    """Its ``__dict__`` is a property, and no base has another."""

    def __init__(self, kept):
        self.kept = kept

    __dict__ = property(_hostile("__dict__"))


class Slots:
    """Slots of which Python changes the name, and one that is empty."""

    __slots__ = ("__kept", "empty")

    def __init__(self, kept):
        self.__kept = kept


class SlotsGone(Slots):
    """``__slots__`` is what is left of an iterator."""

    __slots__ = iter(("more",))

    def __init__(self, kept):
        super().__init__(None)
        self.more = kept


class OfAnyModule(Plain):
    """Says that it was defined in no module."""

    __module__ = property(_hostile("__module__"))


class Meta(type):
    """Answers for its classes, by raising."""

    def __getattribute__(cls, name):
        RAN.append(f"a metaclass's __getattribute__({name})")
        raise Looked(name)

    __instancecheck__ = __subclasscheck__ = _hostile("__instancecheck__")


class OfMeta(Plain, metaclass=Meta):
    """An object of such a class."""


Pair = collections.namedtuple("Pair", "kept other")  # noqa: PYI024 - as people write them


class PairBelow(Pair):
    """A named tuple that is no sequence any more."""

    locals().update(_LOOKS)


class HostileModule(torch.nn.Module):
    """A module that gives nothing away."""

    def __init__(self, kept):
        super().__init__()
        self._buffers["kept"] = kept

    config = property(_hostile("config"))
    locals().update(
        _methods(
            *("__getattr__", "__eq__", "__hash__", "__len__", "__iter__", "__repr__", "__bool__", "forward"),
            *("modules", "named_modules", "children", "named_children", "parameters", "named_parameters", "buffers"),
            *("named_buffers", "state_dict", "train"),
        )
    )


class HostileOptimizer(torch.optim.SGD):
    """An optimizer that wraps another one and fails to tell of it."""

    def __init__(self, kept):
        self.inner = torch.optim.SGD([kept])

    state = property(_hostile("state"))
    param_groups = property(_hostile("param_groups"))
    locals().update(_methods("__eq__", "__hash__", "__repr__"))


class Overriding(torch.Tensor):
    """Sees every torch function, and raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        RAN.append(f"__torch_function__ of {getattr(func, '__name__', func)}")
        raise Looked


class Computed(torch.Tensor):
    """A tensor whose properties are its own."""

    grad, device, layout, shape, dtype, nbytes, is_leaf, grad_fn, is_sparse = (
        property(_hostile(f"a tensor's {name}"))
        for name in ("grad", "device", "layout", "shape", "dtype", "nbytes", "is_leaf", "grad_fn", "is_sparse")
    )
    locals().update(
        _methods("untyped_storage", "data_ptr", "numel", "size", "dim", "__eq__", "__hash__", "detach", "__repr__")
    )


class Wrapping(torch.Tensor):
    """A tensor made of another one, which is asked for everything below autograd, and for its parts."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_device=True, dispatch_layout=True
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        RAN.append(f"__torch_dispatch__ of {func}")
        raise Looked

    __tensor_flatten__ = _hostile("__tensor_flatten__")


class WrappingItself(Wrapping):
    """It is among its own parts."""

    def __init__(self, inner):
        super().__init__(inner)
        self.itself = self


def deep(kept):
    for _ in range(DEPTH):
        kept = [kept]
    return kept


def cycle(kept):
    members: list[object] = [kept]
    members.append(members)
    return {"members": members, "kept": [members]}


def behind_a_proxy(_kept):
    model = torch.nn.Linear(2, 2)
    _KEPT.append(model)
    return Plain(weakref.proxy(model))


def dead_proxy(_kept):
    return Plain(weakref.proxy(torch.nn.Linear(2, 2)))


def behind_each_other(kept):
    """A model and its trainer, as Lightning leaves them: one leads to the other by a proxy."""
    model, trainer = torch.nn.Linear(2, 2), Plain(kept)
    model.trainer = weakref.proxy(trainer)
    trainer.model = weakref.proxy(model)
    return [model, trainer]


def suspended(kept):
    def generate():
        local = Hostile(kept)
        yield
        yield local

    generator = generate()
    next(generator)
    return generator


def running(kept):
    """A generator that is looked at while it runs: whoever iterates over what is returned is within it."""

    def generate():
        local = kept
        yield within
        yield local

    within: list[object] = []
    generator = generate()
    within.append(generator)
    next(generator)
    return within


def partial_below(kept):
    hidden = {name: property(_hostile(name)) for name in ("func", "args", "keywords")}
    return _kind("Partial", functools.partial, **hidden, **_CLASS_RAISES)(print, kept)


def uninitialised(kept):
    return [torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(), torch.nn.UninitializedParameter(), kept]


def optimizer_of_uninitialised(kept):
    optimizer = torch.optim.AdamW([torch.nn.UninitializedParameter(), torch.nn.Parameter(torch.ones(2))])
    optimizer.kept = kept
    return optimizer


def fake(kept):
    with FakeTensorMode():
        return [torch.empty(3, requires_grad=True), kept]


def thread_local(kept):
    local = threading.local()
    local.unseen = kept
    return local


def with_exception(kept):
    error = Looked("kept")
    error.kept = kept
    return error


def _container(kind: type):
    return lambda kept: _kind(f"Hostile{kind.__name__}", kind, **_LOOKS, **_CLASS_RAISES)([kept])


def _mapping(kind: type):
    below = _kind(
        f"Hostile{kind.__name__}", kind, **_LOOKS, **_CLASS_RAISES, **_methods("keys", "values", "items", "get")
    )

    def made(kept):
        mapping = below()
        kind.__setitem__(mapping, "kept", kept)
        return mapping

    return made


def _set(kind: type):
    below = _kind(
        f"Hostile{kind.__name__}", kind, **{n: m for n, m in _LOOKS.items() if n != "__hash__"}, **_CLASS_RAISES
    )
    return lambda kept: below([kept])


HOLDING = {
    "an object that fails when asked": Hostile,
    "an object that intercepts every attribute": Intercepting,
    "an object whose __dict__ is a property": PrivateDict,
    "an object whose only __dict__ is a property": NoPlainDict,
    "private slots": Slots,
    "slots from an iterator": SlotsGone,
    "an object of no module": OfAnyModule,
    "an object of a metaclass that fails": OfMeta,
    "an object that says it is a tensor": _kind("Liar", Plain, __class__=torch.Tensor),
    "an object that says it is a model": _kind("Liar", Plain, __class__=torch.nn.Module),
    "a list that fails": _container(list),
    "a tuple that fails": _container(tuple),
    "a set that fails": _set(set),
    "a deque that fails": _container(collections.deque),
    "a dict that fails": _mapping(dict),
    "an ordered dict that fails": _mapping(collections.OrderedDict),
    "a named tuple that fails": lambda kept: tuple.__new__(PairBelow, (kept, None)),
    "a proxy of a mapping that fails": lambda kept: types.MappingProxyType(_mapping(dict)(kept)),
    "a partial that fails": partial_below,
    "a generator with such locals": suspended,
    "a generator": running,
    "a mock of a tensor": lambda kept: NonCallableMagicMock(spec=torch.Tensor, kept=[kept]),
    "a mock of a model": lambda kept: MagicMock(spec=torch.nn.Module, kept=[kept]),
    "a module that fails": HostileModule,
    "an optimizer that fails": HostileOptimizer,
    "uninitialised modules": uninitialised,
    "an optimizer of uninitialised parameters": optimizer_of_uninitialised,
    "a fake tensor": fake,
    "a tensor that sees functions": lambda kept: [kept.as_subclass(Overriding), kept],
    "a tensor of its own properties": lambda kept: [kept.as_subclass(Computed), kept],
    "a tensor made of another": Wrapping,
    "a tensor made of itself": WrappingItself,
    "meta tensors": lambda kept: [torch.empty(3, device="meta"), kept],
    "deep nesting": deep,
    "a cycle": cycle,
    "proxies of each other": behind_each_other,
    "an exception": with_exception,
}
"""What leads to the tensor that it is made with."""

NOT_HOLDING = {
    "a proxy": behind_a_proxy,
    "a dead proxy": dead_proxy,
    "a thread's locals": thread_local,
    "a weak reference": weakref.ref,
}
"""What leads to no tensor, though somebody may keep one behind it."""


def animals(kept: torch.Tensor) -> list[object]:
    """One of each, which all hold the same tensor."""
    made = [make(kept) for make in (*HOLDING.values(), *NOT_HOLDING.values())]
    RAN.clear()
    return made
