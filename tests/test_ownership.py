"""Whose bytes are these: the test's own, its fixtures', or somebody else's."""

from __future__ import annotations

import gc

import pytest
import torch

from pytest_gpumem.plugin.runtest.ownership import Ownership
from pytest_gpumem.torch_support.garbage_collector import FrozenHeap
from tests import zoo

KB = 1000


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Fixture:
    """As much of pytest's FixtureDef as is looked at."""

    def __init__(self, argname: str, scope: str = "function", baseid: str = ""):
        self.argname = argname
        self.scope = scope
        self.baseid = baseid
        self.cached_result = None
        self.func = lambda: None


class Item:
    """As much of a test as is looked at."""

    def __init__(
        self, *fixturenames: str, nodeid: str = "tests/test_a.py::test_a", cls=None, instance=None, **funcargs
    ):
        self.nodeid = nodeid
        self.fixturenames = list(fixturenames)
        self.funcargs = funcargs
        self.cls = cls
        self.instance = instance


@pytest.fixture(autouse=True)
def frozen():
    """As while a test is measured: what was there before is not looked through again and again."""
    heap = FrozenHeap()
    heap.freeze()
    yield heap
    heap.thaw()


@pytest.fixture
def residency(device) -> Ownership:
    return Ownership(device)


def set_up(residency: Ownership, fixture: Fixture, make, item: Item | None = None) -> None:
    """What happens when pytest sets a fixture up whose function is ``make``."""
    with residency.setting_up(fixture, item) as done:
        value = make()
        fixture.cached_result = (value, None, None)
        done(value)


def total(residency: Ownership, item: Item) -> int:
    return residency.own(item).total


# Fixtures


def test_a_test_owns_what_its_fixtures_hold_and_nothing_of_others(residency):
    foreign = tensor(500 * KB)
    set_up(residency, Fixture("model", "session"), lambda: [tensor(100 * KB)])
    set_up(residency, Fixture("batch"), lambda: {"ids": tensor(30 * KB)})
    for number in range(3):
        assert total(residency, Item("model", nodeid=f"tests/test_{number}.py::test_a")) == 100 * KB
    assert total(residency, Item("model", "batch")) == 130 * KB
    assert total(residency, Item("batch")) == 30 * KB
    assert total(residency, Item()) == 0
    assert foreign.numel() == 500 * KB


def test_what_two_fixtures_share_counts_once(residency):
    weights = []

    def make():
        weights.append(tensor(100 * KB))
        return weights

    set_up(residency, Fixture("model"), make)
    set_up(residency, Fixture("head"), lambda: (weights[0], tensor(KB)))
    assert total(residency, Item("model", "head")) == 101 * KB
    assert total(residency, Item("head")) == 101 * KB


def test_what_a_fixture_keeps_out_of_sight_belongs_to_its_tests(residency):
    out_of_sight = []

    def make():
        out_of_sight.append(tensor(100 * KB))
        return [tensor(30 * KB)]

    set_up(residency, Fixture("model", "session"), make)
    own = residency.own(Item("model"))
    assert (sum(own.blocks.values()), own.hidden) == (30 * KB, 100 * KB)
    assert total(residency, Item("other")) == 0


def test_every_byte_that_a_fixture_of_hostile_objects_made_belongs_to_its_tests(residency, device):
    before = device.live()
    set_up(residency, Fixture("zoo", "session"), lambda: zoo.animals(tensor(100 * KB)))
    assert zoo.RAN == []
    own = residency.own(Item("zoo"))
    assert (own.total, own.hidden > 0) == (device.live() - before, True)
    assert own.total > 100 * KB
    residency.clear_left_gradients(Item("zoo"))
    assert zoo.RAN == []


def test_a_fixture_without_a_value_may_keep_something_out_of_sight(residency):
    out_of_sight = []
    set_up(residency, Fixture("warm_up"), lambda: out_of_sight.append(tensor(100 * KB)))
    assert total(residency, Item("warm_up")) == 100 * KB


def test_what_a_fixture_needed_only_while_it_was_set_up_is_nobodys(residency):
    def make():
        tensor(500 * KB)
        cycle: list = [tensor(200 * KB)]
        cycle.append(cycle)
        return tensor(30 * KB)

    gc.disable()
    try:
        set_up(residency, Fixture("model"), make)
    finally:
        gc.enable()
    assert total(residency, Item("model")) == 30 * KB


def test_a_fixture_set_up_within_another_keeps_its_share_for_itself(residency):
    out_of_sight = []
    outer, inner = Fixture("outer"), Fixture("inner", "session")

    def make_inner():
        out_of_sight.append(tensor(100 * KB))

    def make_outer():
        set_up(residency, inner, make_inner)
        out_of_sight.append(tensor(30 * KB))

    set_up(residency, outer, make_outer)
    assert total(residency, Item("inner")) == 100 * KB
    assert total(residency, Item("outer")) == 30 * KB
    assert total(residency, Item("outer", "inner")) == 130 * KB


def test_a_fixture_that_returns_what_another_holds_adds_nothing(residency):
    model = Fixture("model", "session")
    set_up(residency, model, lambda: tensor(100 * KB))
    set_up(residency, Fixture("alias"), lambda: model.cached_result[0])
    assert residency.own(Item("model", "alias")).hidden == 0
    assert total(residency, Item("model", "alias")) == 100 * KB


def test_what_a_fixture_hides_is_found_also_when_it_returns_what_another_holds(residency):
    model, out_of_sight = Fixture("model", "session"), []
    set_up(residency, model, lambda: tensor(100 * KB))

    def make():
        out_of_sight.append(tensor(30 * KB))
        return model.cached_result[0]

    set_up(residency, Fixture("alias"), make)
    assert residency.own(Item("model", "alias")).hidden == 30 * KB
    assert total(residency, Item("alias")) == 130 * KB


def test_a_fixture_that_holds_more_later_is_looked_at_when_asked(residency):
    cache: dict[str, torch.Tensor] = {}
    set_up(residency, Fixture("cache", "session"), lambda: {"first": tensor(KB), "rest": cache})
    assert total(residency, Item("cache")) == KB
    cache["second"] = tensor(100 * KB)
    assert total(residency, Item("cache")) == 101 * KB
    cache.clear()
    assert total(residency, Item("cache")) == KB


def test_a_fixture_that_was_torn_down_belongs_to_nobody_until_it_is_set_up_again(residency):
    fixture = Fixture("model", "module")
    for nbytes in (100 * KB, 30 * KB):
        set_up(residency, fixture, lambda nbytes=nbytes: tensor(nbytes))
        assert total(residency, Item("model")) == nbytes
        residency.forget(fixture)
        residency.forget(fixture)
        assert total(residency, Item("model")) == 0


def test_a_fixture_that_failed_is_not_noted_and_the_next_one_is(residency):
    def fail():
        tensor(100 * KB)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        set_up(residency, Fixture("model"), fail)
    set_up(residency, Fixture("batch"), lambda: tensor(30 * KB))
    assert total(residency, Item("model", "batch")) == 30 * KB


def test_a_fixture_that_failed_within_another_does_not_confuse_it(residency):
    def fail():
        raise ZeroDivisionError

    def make_outer():
        with pytest.raises(ZeroDivisionError):
            set_up(residency, Fixture("inner"), fail)
        return tensor(30 * KB)

    set_up(residency, Fixture("outer"), make_outer)
    assert total(residency, Item("outer")) == 30 * KB


@pytest.mark.parametrize(
    ("baseid", "nodeid", "serves"),
    [
        ("", "tests/gpt/test_a.py::test_a", True),
        ("tests/gpt", "tests/gpt/test_a.py::test_a", True),
        ("tests/gpt/test_a.py::TestA", "tests/gpt/test_a.py::TestA::test_a", True),
        ("tests/gpt", "tests/gpt2/test_a.py::test_a", False),
        ("tests/gpt/test_a.py::TestA", "tests/gpt/test_a.py::TestAll::test_a", False),
    ],
)
def test_a_fixture_of_the_same_name_serves_only_tests_that_can_see_it(residency, baseid, nodeid, serves):
    set_up(residency, Fixture("model", "session", baseid), lambda: tensor(100 * KB))
    assert total(residency, Item("model", nodeid=nodeid)) == (100 * KB if serves else 0)


# The test itself


def test_a_test_owns_its_arguments(residency):
    argument = tensor(100 * KB)
    assert total(residency, Item("batch", batch=[argument])) == 100 * KB


def test_a_test_owns_what_its_class_and_its_instance_hold(residency):
    class Base:
        inherited = tensor(5 * KB)

    class TestModel(Base):
        shared = [tensor(100 * KB)]  # noqa: RUF012 - as setup_class would leave it

        def test_a(self):
            pass

    instance = TestModel()
    instance.mine = tensor(30 * KB)
    assert total(residency, Item(cls=TestModel, instance=instance)) == 135 * KB
    assert total(residency, Item()) == 0


def test_what_setup_class_makes_in_a_fixture_of_pytest_is_not_hidden_as_well(residency):
    class TestModel:
        pass

    item = Item("_xunit_setup_class", cls=TestModel)

    def make():
        TestModel.model = tensor(100 * KB)

    set_up(residency, Fixture("_xunit_setup_class", "class"), make, item)
    assert total(residency, item) == 100 * KB


# Gradients that others left


def trained(model: torch.nn.Linear) -> torch.nn.Linear:
    model(torch.ones(1, 2)).sum().backward()
    return model


def gradients(model: torch.nn.Linear) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_that_an_earlier_test_left_are_cleared(residency):
    fixture = Fixture("model", "session")
    set_up(residency, fixture, lambda: torch.nn.Linear(2, 3))
    model = trained(fixture.cached_result[0])
    residency.clear_left_gradients(Item("model"))
    assert gradients(model) == [None, None]


def test_gradients_that_a_fixture_came_with_stay_and_what_replaced_them_is_cleared(residency):
    fixture = Fixture("model", "session")
    set_up(residency, fixture, lambda: trained(torch.nn.Linear(2, 3)))
    model = fixture.cached_result[0]
    before = gradients(model)
    residency.clear_left_gradients(Item("model"))
    assert all(now is then for now, then in zip(gradients(model), before, strict=True))
    model.zero_grad(set_to_none=True)
    trained(model)
    residency.clear_left_gradients(Item("model"))
    assert gradients(model) == [None, None]


def test_gradients_of_fixtures_that_the_test_does_not_use_are_left_alone(residency):
    fixture = Fixture("model", "session")
    set_up(residency, fixture, lambda: torch.nn.Linear(2, 3))
    model = trained(fixture.cached_result[0])
    residency.clear_left_gradients(Item("batch"))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_fixture_that_holds_tensors_with_a_history_is_no_trouble(residency):
    fixture = Fixture("output", "session")
    set_up(residency, fixture, lambda: torch.nn.Linear(2, 3)(torch.ones(1, 2)))
    residency.clear_left_gradients(Item("output"))
    assert fixture.cached_result[0].grad_fn is not None


# Fixtures of one name, as pytest itself tells them apart

MODEL = """
@pytest.fixture(scope="session")
def model():
    return torch.ones({count})
"""
TEST = """
@pytest.mark.gpumem
def test_{name}(model):
    model.sum()
"""
# A float for each of the 250,000 of its own model, and one for the sum.
EXPECTED = 250_000 * 4 + 4


WEIGHTLESS = """
class Weightless:
    def sum(self):
        return torch.ones(250_000).sum()
"""


@pytest.mark.parametrize(
    ("overriding", "test"),
    [
        (MODEL.format(count=250_000), "test_second"),
        (WEIGHTLESS + MODEL.format(count=0).replace("torch.ones(0)", "Weightless()"), "test_second"),
        (f'{WEIGHTLESS}\n\n@pytest.mark.parametrize("model", [Weightless()], ids=["it"])', "test_second[it]"),
    ],
    ids=["fixture", "fixture that holds nothing", "parameter"],
)
def test_a_fixture_that_the_tests_own_file_overrides_is_not_the_tests(project, overriding, test):
    project.write(MODEL.format(count=1_000_000), "conftest.py")
    project.write(TEST.format(name="first"), "test_first.py")
    project.write(overriding + TEST.format(name="second"), "test_second.py")
    for files in (["test_second.py"], ["test_first.py", "test_second.py"]):
        assert project.figures(*files)[test]["call.peak_allocated"] == EXPECTED


def test_a_fixture_that_overrides_another_and_uses_it_holds_both(project):
    project.write(MODEL.format(count=1_000_000), "conftest.py")
    project.write(
        """
@pytest.fixture(scope="session")
def model(model):
    return [model, torch.ones(250_000)]


@pytest.mark.gpumem
def test_both(model):
    model[1].sum()
"""
    )
    assert project.figures()["test_both"]["call.peak_allocated"] == 1_000_000 * 4 + EXPECTED


def test_fixtures_of_pytests_own_are_looked_at_without_a_reading(residency, device, monkeypatch):
    monkeypatch.setattr(device, "live", lambda: pytest.fail("a reading was taken"))
    monkeypatch.setattr(Fixture, "func", vars(pytest.MonkeyPatch)["context"].__func__, raising=False)
    assert Fixture.func.__module__.startswith("_pytest.")
    parameter = Fixture("model")
    del parameter.func
    model = torch.nn.Linear(3, 3)
    set_up(residency, parameter, lambda: model)
    model(torch.ones(1, 3)).sum().backward()
    residency.clear_left_gradients(Item("model"))
    assert model.weight.grad is None
