"""Decide which allocated bytes belong to a test.

A test owns the bytes of its fixtures, and the bytes allocated during its call. All other allocated bytes are subtracted
from its figures, so the figures do not depend on earlier tests.

For example, 10 MB are allocated when a test's call begins: 6 MB by its session fixture ``model``, and 4 MB by a session
fixture for other tests. The test allocates 3 MB more, so its peak is 9 MB.
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

    from pytest_gpumem.measuring.devices.contract import Blocks, Device


@dataclass(frozen=True, slots=True)
class FixtureNote:
    """The memory that a fixture had allocated after its set-up."""

    hidden: int
    """The fixture's bytes that cannot be found through its value, for example in the generator's local variables or in a
    global."""
    gradients: tuple[weakref.ref[torch.Tensor], ...]
    """The gradients that existed after the set-up."""


@dataclass(frozen=True, slots=True)
class OwnBytes:
    """The bytes that belong to a test."""

    blocks: Blocks
    """The blocks that are found through its fixtures' values."""
    hidden: int
    """The other bytes of the test's fixtures, which cannot be found through their values (`FixtureNote.hidden`)."""

    @property
    def total(self) -> int:
        return sum(self.blocks.values()) + self.hidden


@dataclass
class Ownership:
    """The fixtures' bytes on a single device, and which of them belong to a test."""

    device: Device
    others: tuple[Ownership, ...] = ()
    """An `Ownership` for each further GPU (`Device.others`). Each fixture's set-up is recorded there as well."""
    _notes: dict[pytest.FixtureDef[Any], FixtureNote] = field(default_factory=dict)
    _nested_gains: list[int] = field(default_factory=list)
    """For each fixture that is being set up, the bytes allocated by fixtures that it requested, the innermost fixture last."""

    @contextmanager
    def setting_up(
        self, fixturedef: pytest.FixtureDef[Any], node: pytest.Item | pytest.Collector | None
    ) -> Iterator[Callable[[object], None]]:
        """Record the bytes of a fixture while it is set up for ``node``. The caller passes the fixture's value to the
        yielded function.

        If the set-up requests other fixtures by ``getfixturevalue``, bytes allocated by these fixtures do not count for
        this fixture.

        Example:
            A fixture ``model`` allocates 6 MB: 5 MB in its value, a module, and 1 MB in a local variable of its generator.
            So `FixtureNote.hidden` is 1 MB, and the 5 MB are found through the value.
        """
        with ExitStack() as stack:
            other_records = [stack.enter_context(other.setting_up(fixturedef, node)) for other in self.others]
            with self._setting_up(fixturedef, node) as record_here:

                def record(value: object) -> None:
                    for record_on_device in (record_here, *other_records):
                        record_on_device(value)

                yield record

    @contextmanager
    def _setting_up(
        self, fixturedef: pytest.FixtureDef[Any], node: pytest.Item | pytest.Collector | None
    ) -> Iterator[Callable[[object], None]]:
        if _is_of_pytest(fixturedef):
            pytest_values: list[object] = []
            yield pytest_values.append
            if tensors := list(reachable_tensors(pytest_values)):
                self._note(fixturedef, 0, tensors)
            return
        live_before = self.device.live()
        blocks_before = self._blocks([*map(_value_of, self._notes), *_class_values(node)])
        self._nested_gains.append(0)
        values: list[object] = []
        try:
            yield values.append
        finally:
            nested_gain = self._nested_gains.pop()
        gained = self.device.live() - live_before
        if gained:
            self.device.quiesce()
            gained = self.device.live() - live_before
        if self._nested_gains:
            self._nested_gains[-1] += gained
        tensors = list(reachable_tensors([*values, *_class_values(node)])) if self.device.is_used else []
        visible = sum(nbytes for address, nbytes in self._of(tensors).items() if address not in blocks_before)
        self._note(fixturedef, max(0, gained - nested_gain - visible), tensors)

    def _note(self, fixturedef: pytest.FixtureDef[Any], hidden: int, tensors: list[torch.Tensor]) -> None:
        gradients = [gradient for tensor in tensors if (gradient := gradient_of(tensor)) is not None]
        self._notes[fixturedef] = FixtureNote(hidden, tuple(map(weakref.ref, gradients)))

    def forget(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Remove the entry for a fixture after its teardown."""
        for ownership in self.everywhere:
            ownership._notes.pop(fixturedef, None)  # noqa: SLF001 - an instance of this class

    def clear_left_gradients(self, item: pytest.Item) -> None:
        """Before ``item`` is set up, clear gradients that earlier tests left on its shared fixtures.

        If these gradients stayed, the figures would depend on earlier tests, because accumulating into a gradient takes more
        memory than creating it. Gradients from a fixture's own set-up are not cleared.
        """
        for fixturedef, note in self._serving(item).items():
            set_up_gradients = {id(reference()) for reference in note.gradients}
            for tensor in reachable_tensors([_value_of(fixturedef)]):
                gradient = gradient_of(tensor)
                if gradient is not None and id(gradient) not in set_up_gradients:
                    clear_gradient(tensor)

    @property
    def everywhere(self) -> tuple[Ownership, ...]:
        """This ownership and `others`, in the order of `Device.everywhere`."""
        return (self, *self.others)

    def own(self, item: pytest.Item) -> OwnBytes:
        """Return the bytes that belong to ``item`` at this moment, through its fixtures, its class and its instance."""
        fixtures = self._serving(item)
        return OwnBytes(
            blocks=self._blocks([*_values_of(item), *map(_value_of, fixtures)]),
            hidden=sum(note.hidden for note in fixtures.values()),
        )

    def values(self, item: pytest.Item) -> list[object]:
        """Return the values that the test can reach: its arguments, its class's attributes, and its fixtures' values."""
        return [*_values_of(item), *map(_value_of, self._serving(item))]

    def storages(self, item: pytest.Item) -> Iterator[torch.UntypedStorage]:
        """Return the storages of the blocks in `own`. A reference to a storage keeps its memory allocated."""
        return storages_of(reachable_tensors(self.values(item)), self.device.torch_device)

    def _serving(self, item: pytest.Item) -> dict[pytest.FixtureDef[Any], FixtureNote]:
        """Return the fixtures of ``item``."""
        return {fixturedef: self._notes[fixturedef] for fixturedef in fixtures_used(item, self._notes)}

    def _blocks(self, values: Iterable[object]) -> Blocks:
        return self._of(reachable_tensors(values))

    def _of(self, tensors: Iterable[torch.Tensor]) -> Blocks:
        return blocks_of(tensors, self.device.torch_device) if self.device.is_used else {}


def fixtures_used(item: pytest.Item, among: Iterable[pytest.FixtureDef[Any]]) -> list[pytest.FixtureDef[Any]]:
    """Return the fixtures of ``item`` in ``among``.

    If a module overrides a fixture from conftest.py, the test uses the original only if the overriding fixture requests it.
    For example, a module's fixture ``model(model)`` uses the ``model`` in conftest.py, and a fixture ``model()`` does not.
    """
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
    """Return whether a fixture comes from pytest itself and allocates nothing in its set-up, such as ``tmp_path`` or a
    parameter.

    If its name begins with an underscore, the answer is no, because such fixtures run users' code such as ``setup_class``.
    """
    module = str(getattr(fixturedef.func, "__module__", None))
    return module.startswith("_pytest.") and not fixturedef.argname.startswith("_")


def _value_of(fixturedef: pytest.FixtureDef[Any]) -> object:
    return fixturedef.cached_result[0] if fixturedef.cached_result is not None else None


def _resolved(item: pytest.Item) -> set[pytest.FixtureDef[Any]] | None:
    """Return the fixture definitions that the test uses; ``None`` for an item without fixtures.

    The definitions come from a private mapping in pytest. If a name has several definitions, the last definition is the
    closest to the test. An earlier definition is used only if the following definition requests a fixture of the same name.
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
    """Return whether ``item`` uses the fixture's name (by an argument, autouse or ``usefixtures``), and whether the
    fixture's file applies to ``item``.
    """
    names: list[str] = getattr(item, "fixturenames", [])
    above = item.nodeid.removeprefix(fixturedef.baseid) if fixturedef.baseid else f"/{item.nodeid}"
    return fixturedef.argname in names and above != item.nodeid and above.startswith(("/", "::"))


def _values_of(item: pytest.Item) -> list[object]:
    return [*getattr(item, "funcargs", {}).values(), *_class_values(item)]


def _class_values(node: pytest.Item | pytest.Collector | None) -> list[object]:
    """Return the objects in which ``setUpClass``, ``setup_class`` and ``setup_method`` may store tensors: class attributes
    and the instance.
    """
    owner = getattr(node, "cls", None)
    if owner is None:
        return []
    return [*class_values(owner), getattr(node, "instance", None)]
