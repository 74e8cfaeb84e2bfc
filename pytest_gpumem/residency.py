"""Whose bytes are these: the test's own, its fixtures', or somebody else's.

A test's bytes are what its fixtures hold when its call begins, and what it allocates itself. Everything else that is live
then is foreign and not in its figures, so that they do not depend on what ran before.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpumem.devices.torch_internals import version_of
from pytest_gpumem.reach import blocks_of, reachable_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pytest
    import torch

    from pytest_gpumem.devices.contract import Blocks, Device


@dataclass(frozen=True, slots=True)
class FixtureNote:
    """What was seen of a fixture when pytest set it up.

    ``hidden`` are bytes that it keeps but that cannot be reached from its value (a generator's locals, a global).
    ``gradients`` are the addresses of gradients that it came with.
    """

    hidden: int
    gradients: frozenset[int]


@dataclass(frozen=True, slots=True)
class LeftGradient:
    """A gradient that another test left on a shared fixture's parameter."""

    parameter: weakref.ref[torch.Tensor]
    gradient: weakref.ref[torch.Tensor]
    version: int
    nbytes: int

    def is_untouched(self) -> bool:
        """Whether it is still there and nobody has written to it."""
        parameter, gradient = self.parameter(), self.gradient()
        if parameter is None or gradient is None:
            return False
        return parameter.grad is gradient and version_of(gradient) == self.version


@dataclass(frozen=True, slots=True)
class OwnBytes:
    """The bytes that belong to a test when its call begins."""

    blocks: Blocks
    hidden: int
    left_gradients: tuple[LeftGradient, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.blocks.values()) + self.hidden

    def foreign_after_all(self) -> int:
        """Bytes of gradients that earlier tests left on shared fixtures and that this call had no use for.

        A test that trains writes to them or replaces them, as it would have made its own; one that only runs a model
        forward leaves them alone, and would not have had them had it run first.
        """
        return sum(left.nbytes for left in self.left_gradients if left.is_untouched())


@dataclass
class Residency:
    """What is known of the fixtures that are set up now, for one device."""

    device: Device
    _notes: dict[pytest.FixtureDef[Any], FixtureNote] = field(default_factory=dict)
    _gained_within: list[int] = field(default_factory=list)

    @contextmanager
    def setting_up(
        self, fixturedef: pytest.FixtureDef[Any], item: pytest.Item | None
    ) -> Iterator[Callable[[object], None]]:
        """Within, the fixture is set up for ``item``; what is yielded is to be called with its value.

        Fixtures that are set up meanwhile (``getfixturevalue``) keep their share of the bytes for themselves.
        """
        live_before = self.device.live()
        seen_before = self._blocks([*map(_value_of, self._notes), *_class_values(item)])
        self._gained_within.append(0)
        values: list[object] = []
        try:
            yield values.append
        finally:
            within = self._gained_within.pop()
        if self.device.live() != live_before:
            self.device.settle()
        gained = self.device.live() - live_before
        if self._gained_within:
            self._gained_within[-1] += gained
        tensors = list(reachable_tensors([*values, *_class_values(item)]))
        if gained == within and not tensors:
            return
        visible = sum(nbytes for address, nbytes in self._of(tensors).items() if address not in seen_before)
        self._notes[fixturedef] = FixtureNote(
            hidden=max(0, gained - within - visible),
            gradients=frozenset(self._of(_gradients(tensors))),
        )

    def forget(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """The fixture has been torn down."""
        self._notes.pop(fixturedef, None)

    def own(self, item: pytest.Item) -> OwnBytes:
        """The bytes that belong to ``item``: those of its fixtures, of its class and of its instance."""
        fixtures = {fixturedef: note for fixturedef, note in self._notes.items() if _serves(fixturedef, item)}
        came_with = frozenset(address for note in fixtures.values() for address in note.gradients)
        shared = reachable_tensors(_value_of(fixture) for fixture in fixtures if fixture.scope != "function")
        left = [
            tensor
            for tensor in shared
            if tensor.is_leaf and tensor.grad is not None and came_with.isdisjoint(self._of([tensor.grad]))
        ]
        return OwnBytes(
            blocks=self._blocks([*_values_of(item), *map(_value_of, fixtures)]),
            hidden=sum(note.hidden for note in fixtures.values()),
            left_gradients=tuple(self._left(parameter) for parameter in left),
        )

    def held(self, item: pytest.Item) -> int:
        """Bytes that the fixtures, class and instance of ``item`` hold now."""
        return self.own(item).total

    def _left(self, parameter: torch.Tensor) -> LeftGradient:
        gradient = parameter.grad
        assert gradient is not None, "own() selects parameters with a gradient"
        return LeftGradient(
            weakref.ref(parameter), weakref.ref(gradient), version_of(gradient), sum(self._of([gradient]).values())
        )

    def _blocks(self, values: Iterable[object]) -> Blocks:
        return self._of(reachable_tensors(values))

    def _of(self, tensors: Iterable[torch.Tensor]) -> Blocks:
        return blocks_of(tensors, self.device.torch_device)


def _value_of(fixturedef: pytest.FixtureDef[Any]) -> object:
    return fixturedef.cached_result[0] if fixturedef.cached_result is not None else None


def _gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]


def _serves(fixturedef: pytest.FixtureDef[Any], item: pytest.Item) -> bool:
    """Whether ``item`` uses the fixture: by name (arguments, autouse, ``usefixtures``), from its own file or above."""
    names: list[str] = getattr(item, "fixturenames", [])
    return fixturedef.argname in names and item.nodeid.startswith(fixturedef.baseid)


def _values_of(item: pytest.Item) -> list[object]:
    return [*getattr(item, "funcargs", {}).values(), *_class_values(item)]


def _class_values(item: pytest.Item | None) -> list[object]:
    """Attributes of the class and the instance: what ``setUpClass``, ``setup_class`` and ``setup_method`` keep."""
    owner = getattr(item, "cls", None)
    if owner is None:
        return []
    values = [value for kind in owner.__mro__ for value in vars(kind).values()]
    return [*values, getattr(item, "instance", None)]
