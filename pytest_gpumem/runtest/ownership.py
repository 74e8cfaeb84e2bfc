"""Ownership of live bytes: those of a test and its fixtures, and those that are not its own.

A test's bytes are what its fixtures hold when its call begins, and what it allocates itself. Everything else that is live
then is not its own, and not in its figures, so that they do not depend on what ran before.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors, storages_of
from pytest_gpumem.torch_support.static_access import class_values, clear_gradient, gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pytest
    import torch

    from pytest_gpumem.devices.contract import Blocks, Device


@dataclass(frozen=True, slots=True)
class FixtureNote:
    """State of a fixture when pytest set it up.

    ``hidden`` are bytes that it keeps but that cannot be reached from its value (a generator's locals, a global).
    ``gradients`` are those that it came with.
    """

    hidden: int
    gradients: tuple[weakref.ref[torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class OwnBytes:
    """The bytes that belong to a test: blocks that can be reached from its fixtures, and bytes that these keep hidden."""

    blocks: Blocks
    hidden: int

    @property
    def total(self) -> int:
        return sum(self.blocks.values()) + self.hidden


@dataclass
class Ownership:
    """The fixtures that are set up on one device, and the bytes that belong to tests through them."""

    device: Device
    others: tuple[Ownership, ...] = ()
    """The ownerships of the device's `others`, which are told what this one is told."""
    _notes: dict[pytest.FixtureDef[Any], FixtureNote] = field(default_factory=dict)
    _gained_within: list[int] = field(default_factory=list)

    @contextmanager
    def setting_up(
        self, fixturedef: pytest.FixtureDef[Any], node: pytest.Item | pytest.Collector | None
    ) -> Iterator[Callable[[object], None]]:
        """Note the bytes of a fixture that is set up within for ``node``; what is yielded is to be called with its value.

        Fixtures that are set up meanwhile (``getfixturevalue``) keep their share of the bytes for themselves.
        """
        with ExitStack() as stack:
            told = [stack.enter_context(one.setting_up(fixturedef, node)) for one in self.others]
            with self._setting_up(fixturedef, node) as tell:

                def done(value: object) -> None:
                    for each in (tell, *told):
                        each(value)

                yield done

    @contextmanager
    def _setting_up(
        self, fixturedef: pytest.FixtureDef[Any], node: pytest.Item | pytest.Collector | None
    ) -> Iterator[Callable[[object], None]]:
        if _is_of_pytest(fixturedef):
            of_pytest: list[object] = []
            yield of_pytest.append
            if tensors := list(reachable_tensors(of_pytest)):
                self._note(fixturedef, 0, tensors)
            return
        live_before = self.device.live()
        seen_before = self._blocks([*map(_value_of, self._notes), *_class_values(node)])
        self._gained_within.append(0)
        values: list[object] = []
        try:
            yield values.append
        finally:
            within = self._gained_within.pop()
        gained = self.device.live() - live_before
        if gained:
            self.device.quiesce()
            gained = self.device.live() - live_before
        if self._gained_within:
            self._gained_within[-1] += gained
        tensors = list(reachable_tensors([*values, *_class_values(node)])) if self.device.is_used else []
        visible = sum(nbytes for address, nbytes in self._of(tensors).items() if address not in seen_before)
        self._note(fixturedef, max(0, gained - within - visible), tensors)

    def _note(self, fixturedef: pytest.FixtureDef[Any], hidden: int, tensors: list[torch.Tensor]) -> None:
        gradients = [gradient for tensor in tensors if (gradient := gradient_of(tensor)) is not None]
        self._notes[fixturedef] = FixtureNote(hidden, tuple(map(weakref.ref, gradients)))

    def forget(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Forget a fixture that has been torn down."""
        for one in self.everywhere:
            one._notes.pop(fixturedef, None)  # noqa: SLF001 - of this class

    def clear_left_gradients(self, item: pytest.Item) -> None:
        """Clear gradients that earlier tests left on the parameters of fixtures that ``item`` shares, before it is set up.

        Had it run first they would not be there, and accumulating into a gradient takes more memory than making one.
        A gradient that a fixture was set up with stays.
        """
        for fixturedef, note in self._serving(item).items():
            came_with = {id(reference()) for reference in note.gradients}
            for tensor in reachable_tensors([_value_of(fixturedef)]):
                gradient = gradient_of(tensor)
                if gradient is not None and id(gradient) not in came_with:
                    clear_gradient(tensor)

    @property
    def everywhere(self) -> tuple[Ownership, ...]:
        """This one and those `others`, in the order of `Device.everywhere`."""
        return (self, *self.others)

    def own(self, item: pytest.Item) -> OwnBytes:
        """Return the bytes that belong to ``item`` now: those of its fixtures, of its class and of its instance."""
        fixtures = self._serving(item)
        return OwnBytes(
            blocks=self._blocks([*_values_of(item), *map(_value_of, fixtures)]),
            hidden=sum(note.hidden for note in fixtures.values()),
        )

    def values(self, item: pytest.Item) -> list[object]:
        """Return the values that the test can reach: its arguments, its class's attributes, and the values of its fixtures."""
        return [*_values_of(item), *map(_value_of, self._serving(item))]

    def storages(self, item: pytest.Item) -> Iterator[torch.UntypedStorage]:
        """Return the storages behind the blocks of `own`. A reference to one keeps its memory."""
        return storages_of(reachable_tensors(self.values(item)), self.device.torch_device)

    def _serving(self, item: pytest.Item) -> dict[pytest.FixtureDef[Any], FixtureNote]:
        """Return the fixtures that ``item`` uses."""
        return {fixturedef: self._notes[fixturedef] for fixturedef in fixtures_used(item, self._notes)}

    def _blocks(self, values: Iterable[object]) -> Blocks:
        return self._of(reachable_tensors(values))

    def _of(self, tensors: Iterable[torch.Tensor]) -> Blocks:
        return blocks_of(tensors, self.device.torch_device) if self.device.is_used else {}


def fixtures_used(item: pytest.Item, among: Iterable[pytest.FixtureDef[Any]]) -> list[pytest.FixtureDef[Any]]:
    """Return those that ``item`` uses. One that is overridden counts only if the one that overrides it asks for it."""
    resolved = _resolved(item)
    if resolved is not None:
        return [fixturedef for fixturedef in among if fixturedef in resolved]
    visible = [fixturedef for fixturedef in among if _serves(fixturedef, item)]
    overridden = {
        fixturedef
        for fixturedef in visible
        for other in visible
        if other.argname == fixturedef.argname
        and len(other.baseid) > len(fixturedef.baseid)
        and other.argname not in other.argnames
    }
    return [fixturedef for fixturedef in visible if fixturedef not in overridden]


def _is_of_pytest(fixturedef: pytest.FixtureDef[Any]) -> bool:
    """Return whether the fixture is one of pytest's own, such as parameters of a test, whose set-up allocates nothing.

    Those with an underscore run what the test's class and module set up.
    """
    module = str(getattr(fixturedef.func, "__module__", None))
    return module.startswith("_pytest.") and not fixturedef.argname.startswith("_")


def _value_of(fixturedef: pytest.FixtureDef[Any]) -> object:
    return fixturedef.cached_result[0] if fixturedef.cached_result is not None else None


def _resolved(item: pytest.Item) -> set[pytest.FixtureDef[Any]] | None:
    """Return the fixtures that pytest resolved the test's names to; ``None`` for an item that does not have them.

    pytest has no public way to ask. Of several definitions of a name the last is the closest; one further up is used only
    if the closer one asks for it by its own name.
    """
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None)
    if definitions is None:
        return None
    used: set[pytest.FixtureDef[Any]] = set()
    for name, candidates in definitions.items():
        for fixturedef in reversed(candidates):
            used.add(fixturedef)
            if name not in fixturedef.argnames:
                break
    return used


def _serves(fixturedef: pytest.FixtureDef[Any], item: pytest.Item) -> bool:
    """Return whether ``item`` uses the fixture: by name (arguments, autouse, ``usefixtures``), from its own file or above."""
    names: list[str] = getattr(item, "fixturenames", [])
    above = item.nodeid.removeprefix(fixturedef.baseid) if fixturedef.baseid else f"/{item.nodeid}"
    return fixturedef.argname in names and above != item.nodeid and above.startswith(("/", "::"))


def _values_of(item: pytest.Item) -> list[object]:
    return [*getattr(item, "funcargs", {}).values(), *_class_values(item)]


def _class_values(node: pytest.Item | pytest.Collector | None) -> list[object]:
    """Return the attributes of the class and the instance: what ``setUpClass``, ``setup_class`` and ``setup_method`` keep."""
    owner = getattr(node, "cls", None)
    if owner is None:
        return []
    return [*class_values(owner), getattr(node, "instance", None)]
