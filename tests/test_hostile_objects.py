"""Whatever objects a suite has at hand, measuring and explaining its tests neither runs their code nor fails them."""

from __future__ import annotations

import inspect

import pytest

from pytest_gpumem.facts.values.composition import REST, row_from_text
from tests import zoo

MODES = """
class RaisesInFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called within the test's own mode")


class RaisesInOperators(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called within the test's own mode")


@pytest.fixture(params=[RaisesInFunctions, RaisesInOperators])
def mode(request):
    kept = torch.ones(1000), torch.eye(4).to_sparse()
    with request.param():
        yield kept


@pytest.mark.gpumem
def test_marked(mode):
    assert len(mode) == 2
"""

PROJECT = """
import weakref

import menagerie


class Net(torch.nn.Module):
    def __init__(self, kept=None):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        self.kept = [kept]

    def forward(self, x, more=None):
        return self.layers(x).square().mean()


@pytest.fixture
def animals():
    yield menagerie.animals(torch.zeros(250))
    assert menagerie.RAN == []


@pytest.fixture
def net(animals):
    return Net(animals)


@pytest.mark.gpumem
def test_marked(animals, net):
    net(torch.ones(8, 16)).backward()


class TestOfAClass:
    @pytest.mark.gpumem
    def test_marked(self, animals, net):
        self.animals = animals
        net(torch.ones(8, 16)).backward()


def test_beside_a_step(gpumem, animals):
    gpumem.train_step(Net, torch.ones(8, 16))


def test_train_step(gpumem, net):
    gpumem.train_step(net, torch.ones(8, 16))


def test_train_step_under_a_config(gpumem, net):
    gpumem.train_step(net, torch.ones(8, 16), config="amp-bf16,checkpoint=blocks,accumulate=2,optimizer=sgd")


def test_infer_step(gpumem, net):
    gpumem.infer_step(net, torch.ones(8, 16))


def test_measure(gpumem, net, animals):
    def step():
        assert len(animals) > 40
        net(torch.ones(8, 16)).backward()
        net.zero_grad()

    gpumem.measure(step)


def test_track(gpumem, net, animals):
    with gpumem.track():
        net(torch.ones(8, 16)).backward()


def test_no_growth(gpumem, net, animals):
    gpumem.assert_no_growth(lambda: net(torch.ones(8, 16)))


def test_a_batch(gpumem, animals):
    more = [one for one in animals if not issubclass(type(one), (torch.Tensor, list))]
    gpumem.train_step(Net, {"x": torch.ones(8, 16), "more": more})
"""


def measurements(project) -> dict[str, dict]:
    """The measurements of the last run, by test."""
    told = {name: verdict["verdicts"] for name, verdict in project.verdicts().items()}
    return {name: one[0]["measurement"] for name, one in told.items() if one}


def test_no_kind_of_test_looks_with_the_objects_own_code(project):
    # Deep enough for a recursion to fail; each of these tests looks often.
    source = inspect.getsource(zoo).replace("DEPTH = 100_000", "DEPTH = 2_000")
    (project.path / "menagerie.py").write_text(source, encoding="utf-8")
    project.write(PROJECT)
    result = project.run("--gpumem-explain=always", "--junitxml=report.xml")
    result.assert_outcomes(passed=PROJECT.count("def test_"))
    found = measurements(project)
    assert len(found) == PROJECT.count("def test_") - 2  # two of one name, and one without a measurement
    for name, measurement in found.items():
        assert not [note for note in measurement["notes"] if "could not be" in note or "not counted" in note], name
        assert (measurement["explanation"] is None) == (name == "test_track")


def test_nothing_is_done_within_a_mode_of_the_tests_own(project):
    project.write(MODES)
    result = project.run("--gpumem-explain=always", "--junitxml=report.xml")
    result.assert_outcomes(passed=2)
    peaks = {name: one["metrics"]["peak_allocated"] for name, one in measurements(project).items()}
    assert set(peaks.values()) == {4000 + 4 * (2 * 8 + 4)}
    assert len(peaks) == 2


LIGHTNING = """
import weakref


class Trainer:
    def fit(self, model):
        self.model = model
        model.trainer = weakref.proxy(self)
        self.again = weakref.proxy(model)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))

    def forward(self, x):
        return self.blocks(x).square().mean()


@pytest.fixture
def trainer():
    trainer = Trainer()
    trainer.fit(Model())
    return trainer


@pytest.fixture
def model(trainer):
    return trainer.model


@pytest.mark.gpumem
def test_marked(model, trainer):
    model(torch.ones(8, 16)).backward()


def test_measure(gpumem, model):
    gpumem.measure(lambda: model(torch.ones(8, 16)).item())


def test_train_step(gpumem, model):
    gpumem.train_step(model, torch.ones(8, 16))


def test_infer_step_of_the_proxy(gpumem, trainer):
    gpumem.infer_step(trainer.again, torch.ones(8, 16))


def test_proxy_alone(gpumem, trainer):
    model = trainer.again
    gpumem.measure(lambda: model(torch.ones(8, 16)).item())
"""


def test_a_model_and_its_trainer_that_refer_to_each_other_by_proxies_are_explained(project):
    project.write(LIGHTNING)
    project.run("--gpumem-explain=always", "--junitxml=report.xml").assert_outcomes(passed=LIGHTNING.count("def test_"))
    found = measurements(project)
    assert len(found) == LIGHTNING.count("def test_")
    for name, measurement in found.items():
        assert measurement["notes"] == []
        rows = [row_from_text(text) for text in measurement["explanation"]["peak"]["rows"]]
        owners = {row.module for row in rows if row.category == "parameter" and row.operator != REST}
        # What only a proxy leads to belongs to whoever else holds it.
        assert owners == (set() if name == "test_proxy_alone" else {"blocks.*"}), name


@pytest.mark.parametrize("wrong", ["weakref.proxy(Net())", "unittest.mock.MagicMock(spec=Net)", "Net().named_modules"])
def test_what_is_no_model_says_so(project, wrong):
    project.write(
        "import unittest.mock, weakref\n\nNet = torch.nn.ReLU\n\n\n"
        f"def test_it(gpumem):\n    gpumem.infer_step({wrong}, torch.ones(2))\n"
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r"E +(ReferenceError: weakly|TypeError: .* returned \w+, not a torch\.nn\.Module)"])
