"""A test's bytes are the same alone, in any order, and on any worker."""

from __future__ import annotations

import pytest

from tests.support.processes import own_objects_out_of_sight

SUITE = """
import gc


@pytest.fixture(scope="session")
def shared():
    model = torch.nn.Linear(1000, 1000)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model


@pytest.fixture(scope="module")
def hidden():
    kept = torch.ones(500_000)
    yield "its value does not lead to its bytes"
    del kept


@pytest.fixture
def garbage():
    cycle = [torch.ones(300_000)]
    cycle.append(cycle)


@pytest.mark.gpumem
def test_trains(shared):
    shared.optimizer.zero_grad()
    shared(torch.ones(10, 1000)).sum().backward()
    shared.optimizer.step()


@pytest.mark.gpumem
def test_accumulates(shared):
    shared(torch.ones(10, 1000)).sum().backward()


@pytest.mark.gpumem
def test_infers(shared):
    with torch.no_grad():
        shared(torch.ones(10, 1000))


@pytest.mark.gpumem
def test_hidden(hidden):
    torch.ones(250_000)


@pytest.mark.gpumem
def test_leaves_cycles(garbage):
    cycle = [torch.ones(400_000)]
    cycle.append(cycle)


@pytest.mark.gpumem
def test_leaks():
    globals().setdefault("LEAK", []).append(torch.ones(600_000))


def test_steps(gpumem):
    model = torch.nn.Linear(200, 200)
    gpumem.train_step(model, torch.ones(8, 200), loss=lambda o, b: o.sum(), name="given")
    gpumem.train_step(lambda: torch.nn.Linear(200, 200), torch.ones(8, 200), loss=lambda o, b: o.sum(), name="built")
    gpumem.infer_step(model, torch.ones(8, 200))
    gpumem.measure(lambda: model(torch.ones(8, 200)))
    with gpumem.track():
        model(torch.ones(8, 200))


def test_trains_the_shared_model(gpumem, shared):
    gpumem.train_step(shared, torch.ones(4, 1000), loss=lambda o, b: o.sum())


def test_is_not_measured(shared):
    shared(torch.ones(10, 1000)).sum().backward()
    globals()["ANOTHER"] = torch.ones(123_456)
"""
OPTIMIZER = """


@pytest.mark.gpumem
def test_optimizer():
    model = torch.nn.Linear(1000, 1000)
    torch.optim.AdamW(model.parameters())
    del model
    torch.ones(100_000)
"""

REVERSED = """
def pytest_collection_modifyitems(items):
    items.reverse()
"""


@pytest.fixture(autouse=True, scope="module")
def suites_objects_hidden() -> None:
    """Hide none: these tests collect as a user's do."""


def test_every_order_gives_the_same_bytes_which_are_those_that_the_code_asks_for(project):
    project.write(SUITE + OPTIMIZER)
    forward = project.figures("--no-gpumem-time", separate=True)
    assert len(forward) == 9
    model = (1000 * 1000 + 1000) * 4
    nothing_left = {"call.retained": 0, "call.cyclic_garbage": 0}
    assert forward["test_infers"]["call.peak_allocated"] == model + 2 * 10 * 1000 * 4
    assert forward["test_trains"]["call.peak_allocated"] >= 2 * model
    assert forward["test_hidden"] == {"call.peak_allocated": 3_000_000, **nothing_left}
    assert forward["test_leaves_cycles"]["call.cyclic_garbage"] == 1_600_000
    assert forward["test_leaks"]["call.retained"] == 2_400_000
    assert forward["test_optimizer"] == {"call.peak_allocated": model, **nothing_left}
    with own_objects_out_of_sight():
        for name in ("test_accumulates", "test_leaves_cycles", "test_trains_the_shared_model"):
            assert project.figures("--no-gpumem-time", f"test_it.py::{name}") == {name: forward[name]}
    (project.path / "conftest.py").write_text(REVERSED)
    assert project.figures("--no-gpumem-time", separate=True) == forward
    # A worker loads TorchDynamo when it makes the first optimizer; processes of the forkserver have it loaded.
    of_a_worker = project.figures("--no-gpumem-time", "-n", "1", separate=True)
    of_the_first_optimizer = of_a_worker["test_optimizer"]
    # TorchDynamo of torch 2.6 makes tensors of 36 bytes while it is loaded.
    assert 0 <= of_the_first_optimizer.pop("call.peak_allocated") - model <= 36
    assert of_the_first_optimizer == nothing_left
    del forward["test_optimizer"], of_a_worker["test_optimizer"]
    assert of_a_worker == forward


def test_timing_a_step_leaves_no_trace_in_what_is_measured_next(project):
    project.settings('[tool.gpumem]\ntime_budget = "0.1 s"\n')
    project.write(
        """
def test_it(gpumem):
    model = torch.nn.Linear(500, 500)

    def step():
        model.zero_grad()
        model(torch.ones(8, 500)).sum().backward()

    first = gpumem.measure(step, name="first")
    second = gpumem.measure(step, name="second")
    assert first.metrics.keys() >= {"step_time"}
    with gpumem.track() as region:
        step()
    assert second.peak_allocated == first.peak_allocated == region.measurement.peak_allocated
"""
    )
    project.run(timed=True).assert_outcomes(passed=1)


def test_memory_that_nobody_saw_allocated_is_seen_to_be_freed(project):
    project.write(
        """
@pytest.fixture(scope="module")
def box():
    return {"x": torch.ones(5_000_000)}


def test_unmeasured(box):
    box["x"] = torch.ones(5_000_000)


@pytest.mark.gpumem
def test_swaps(box):
    box["x"] = None
    box["y"] = torch.ones(5_000_000)
"""
    )
    figures = project.figures()
    assert figures == project.figures("-k", "swaps")
    assert figures["test_swaps"] == {"call.peak_allocated": 20_000_000, "call.retained": 0, "call.cyclic_garbage": 0}


OLDER = """
import gc


class Node:
    def __init__(self, numbers):
        self.tensor, self.itself = torch.ones(numbers), self


@pytest.fixture(scope="module")
def box():
    return {"cycle": Node(10_000), "tensor": torch.ones(20_000)}


def test_sets_the_box_up(box):
    pass


def test_leaves_garbage_that_holds_the_tensor(box):
    Node(1).tensor = box["tensor"]


@pytest.mark.gpumem
def test_makes_garbage_of_what_was_there(box):
    box["cycle"] = None
    torch.ones(10)


@pytest.mark.gpumem
def test_replaces(box):
    box["tensor"] = None
    box["tensor"] = torch.ones(20_000)


@pytest.mark.gpumem
def test_collects_itself(box):
    Node(500)
    gc.collect()
    Node(500)


class TestClass:
    @classmethod
    def setup_class(cls):
        cls.node = Node(3_000)

    def test_of_the_class(self):
        pass

    @pytest.mark.gpumem
    def test_of_the_class_that_is_measured(self):
        torch.ones(10)
"""


def test_garbage_from_older_objects_and_unmeasured_tests_is_in_no_figure(project):
    project.write(OLDER)
    forward = project.figures(separate=True)
    assert {name: (of["call.peak_allocated"], of["call.cyclic_garbage"]) for name, of in forward.items()} == {
        "test_makes_garbage_of_what_was_there": (120_040, 40_000),
        "test_replaces": (80_000, 0),
        "test_collects_itself": (82_000, 2_000),
        "test_of_the_class_that_is_measured": (12_040, 0),
    }
    without = project.figures("-k", "makes_garbage or class_that_is_measured", separate=True)
    assert without == {name: forward[name] for name in without}
    assert len(without) == 2


ASKED_BY_NAME = """
@pytest.fixture(scope="session")
def base():
    return torch.ones(1_000_000)


@pytest.fixture(scope="session")
def derived(request):
    return request.getfixturevalue("base")[:500_000].clone()


@pytest.mark.gpumem
def test_first(derived):
    torch.ones(500_000)


@pytest.mark.gpumem
def test_second(derived):
    torch.ones(500_000)


@pytest.mark.gpumem
def test_base(base):
    torch.ones(500_000)
"""


def test_a_fixture_that_another_asked_for_by_name_is_no_tests_of_its_users(project):
    project.write(ASKED_BY_NAME)
    forward = project.figures("-p", "no:randomly")
    assert forward["test_first"] == forward["test_second"] != forward["test_base"]
    backward = project.figures("-p", "no:randomly", *(f"test_it.py::test_{one}" for one in ("base", "second", "first")))
    assert backward == forward


KEEPS_ITS_CALLERS = (
    "import inspect\n\n\ndef wrap():\n    frame = inspect.currentframe()\n    caller = frame.f_back\n\n\nwrap()\n"
)
IMPORTS = """
@pytest.mark.gpumem
def test_first():
    model = torch.nn.Linear(1000, 1000)
    import keeps_its_callers
    del model
    torch.ones(100_000)
"""


def test_the_first_import_of_a_module_keeps_no_model_alive(project):
    (project.path / "keeps_its_callers.py").write_text(KEEPS_ITS_CALLERS, encoding="utf-8")
    project.write(IMPORTS.replace("    del model\n", "") + IMPORTS.replace("first", "second"))
    project.run("--junitxml=report.xml")
    first, second = (one["verdicts"][0]["measurement"]["metrics"] for one in project.verdicts().values())
    assert first["cyclic_garbage"] == second["cyclic_garbage"] == first["retained"] == second["retained"] == 0
