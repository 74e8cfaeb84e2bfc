"""Tests that run models, found by reading source, and the patterns that name them."""

from __future__ import annotations

import pytest

from pytest_gpumem.plugin.config.settings import matches_test
from pytest_gpumem.tools.init.patterns import patterns_of
from pytest_gpumem.tools.init.project_tests import Names, ProjectTest, find_tests
from pytest_gpumem.tools.init.sources import sources_of


def found(files, names=None):
    return find_tests(sources_of(files), names or Names()).tests


def running(source, **files):
    head = "import pytest\nimport torch\nfrom torch import nn\n\n"
    all_files = {"test_it.py": head + source, **{f"{name}.py": text for name, text in files.items()}}
    return [one.nodeid.partition("::")[2] for one in found(all_files) if one.runs_model]


@pytest.mark.parametrize(
    "body",
    [
        "loss.backward()",
        "optimizer.step()",
        "self_opt.step()",
        "nn.Linear(8, 8)(x)",
        "m = torch.nn.Sequential(nn.Linear(8, 8)).cuda().eval()\n    y = m(x)",
        "m, n = nn.Linear(8, 8), 3\n    m(x)",
        "m: nn.Module = nn.Linear(8, 8)\n    m(x)",
        "m = torch.compile(nn.Linear(8, 8))\n    m(x)",
        "llm.generate(ids)",
        "net.forward(x)",
        "trainer.fit(net, data)",
        "lightning.Trainer(max_steps=2).fit(net)",
        "self_trainer.train()",
        "OwnTrainer(net, args=1).evaluate()",
        "torch.autograd.grad(a, b)",
        "from transformers import AutoModel\n    AutoModel.from_pretrained('x')",
        "import timm\n    timm.create_model('resnet18')(x)",
        "import torchvision.models\n    torchvision.models.resnet18()(x)",
        "with torch.no_grad():\n        nn.GELU()(x)",
        "async_result = [nn.ReLU()(x) for x in xs]",
    ],
)
def test_a_body_that_runs_a_model_is_found(body):
    assert running(f"def test_it(x):\n    {body}\n") == ["test_it"]


@pytest.mark.parametrize(
    "body",
    [
        "assert torch.ones(3).sum() == 3",
        "m = nn.Linear(8, 8)\n    assert m.in_features == 8",
        "scheduler.step()",
        "scaler.fit(x)",
        "net.train()",
        "trainer.save_model('x')",
        "m: nn.Module\n    m(x)",
        "torch.autograd.set_detect_anomaly(True)",
        "nn.Parameter(torch.ones(3))",
        "from transformers import AutoTokenizer\n    AutoTokenizer.from_pretrained('x')",
        "from torchvision import transforms\n    transforms.ToTensor()",
        "'loss.backward()'",
        "nn.functional.relu(x)",
    ],
)
def test_a_body_that_runs_none_is_not(body):
    assert running(f"def test_it(x):\n    {body}\n") == []


def test_fixtures_helpers_and_classes_are_followed():
    fixture = "@pytest.fixture\ndef net():\n    return nn.Linear(8, 8)\n\n\n@pytest.fixture(name='out')\ndef _out(net):\n    return net(1)\n\n\n"
    assert running(
        f"{fixture}def test_a(net):\n    net(1)\n\n\ndef test_b(out):\n    out\n\n\ndef test_c(net):\n    net\n"
    ) == ["test_a", "test_b"]
    helper = "def step(m):\n    m.backward()\n\n\ndef outer(m):\n    step(m)\n\n\n"
    assert running(f"{helper}def test_a():\n    outer(1)\n\n\ndef test_b():\n    print(1)\n") == ["test_a"]
    assert running(
        "from steps import train\n\n\ndef test_a():\n    train()\n", steps="def train():\n    loss.backward()\n"
    ) == ["test_a"]
    method = "class TestIt:\n    def run_it(self):\n        x.backward()\n\n    def test_a(self):\n        self.run_it()\n\n    def test_b(self):\n        pass\n"
    assert running(method) == ["TestIt::test_a"]
    inherited = "class Base:\n    def test_a(self):\n        x.backward()\n\n\nclass TestIt(Base):\n    pass\n"
    assert running(inherited) == ["TestIt::test_a"]


def test_fixtures_of_conftests_above_and_models_of_the_project_are_known():
    files = {
        "pkg/nets.py": "import torch\n\n\nclass Base(torch.nn.Module):\n    pass\n\n\nclass Net(Base):\n    pass\n\n\ndef build():\n    net = Net()\n    return net, 3\n",
        "tests/conftest.py": "import pytest\nfrom pkg.nets import build\n\n\n@pytest.fixture\ndef net():\n    made, _ = build()\n    yield made\n",
        "tests/deep/test_it.py": "from pkg import nets\n\n\ndef test_a(net):\n    net(1)\n\n\ndef test_b():\n    nets.Net()(1)\n\n\ndef test_c(net):\n    str(net)\n",
        "other/test_it.py": "def test_d(net):\n    net(1)\n",
        "tests/test_broken.py": "def test_(:\n",
    }
    assert [one.nodeid for one in found(files) if one.runs_model] == [
        "tests/deep/test_it.py::test_a",
        "tests/deep/test_it.py::test_b",
    ]


RUN = "nn.Linear(8, 8)(1)"


@pytest.mark.parametrize("name", ["setUp", "setUpClass", "setup_method", "setup_class"])
def test_what_is_run_before_the_methods_of_a_class_is_of_its_tests(name):
    set_up = (
        f"class TestIt:\n    @classmethod\n    def {name}(cls):\n        {RUN}\n\n    def test_a(self):\n        pass\n"
    )
    assert running(f"{set_up}\n\ndef test_b():\n    pass\n") == ["TestIt::test_a"]


@pytest.mark.parametrize("body", ["cls.net = nn.Linear(8, 8)", "cls.net: nn.Module = nn.Linear(8, 8)"])
def test_a_model_that_a_class_has_for_its_methods_is_known(body):
    tests = "    def test_a(self):\n        self.net(1)\n\n    def test_b(self):\n        str(self.net)\n"
    set_up = f"    @classmethod\n    def setUpClass(cls):\n        {body}\n\n"
    assert running(f"class TestIt:\n{set_up}{tests}") == ["TestIt::test_a"]
    assert running(f"class TestIt:\n    net = nn.Linear(8, 8)\n\n{tests}") == ["TestIt::test_a"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("setup_module", ["test_a", "TestIt::test_b"]),
        ("setUpModule", ["test_a", "TestIt::test_b"]),
        ("setup_function", ["test_a"]),
        ("setup_other", []),
    ],
)
def test_what_is_run_before_the_tests_of_a_module_is_of_its_tests(name, expected):
    tests = "def test_a():\n    pass\n\n\nclass TestIt:\n    def test_b(self):\n        pass\n"
    assert running(f"def {name}():\n    {RUN}\n\n\n{tests}") == expected


@pytest.mark.parametrize("head", ["net = None\n\n\ndef setup_module():\n    global net\n    ", ""])
def test_a_model_that_is_a_global_is_known(head):
    source = f"{head}net: nn.Module = nn.Linear(8, 8)\n" if not head else f"{head}net = nn.Linear(8, 8)\n"
    assert running(f"{source}\n\ndef test_a():\n    net(1)\n\n\ndef test_b():\n    str(net)\n") == ["test_a"]


def test_fixtures_that_no_test_has_to_take_are_of_all():
    fixture = f"@pytest.fixture(autouse=True, params=[1, 2])\ndef warm():\n    {RUN}\n\n\n"
    tests = "def test_a():\n    pass\n\n\nclass TestIt:\n    def test_b(self):\n        pass\n"
    assert running(f"{fixture}{tests}") == ["test_a", "TestIt::test_b"]
    assert running(f"{fixture.replace('True', 'False')}{tests}") == []
    head = "import pytest\nfrom torch import nn\n\n\n"
    (one, other) = found({"a/conftest.py": head + fixture, "a/test_a.py": tests})
    assert one.runs_model
    assert other.runs_model
    assert one.has_parameters
    of_class = (
        "class TestIt:\n    @pytest.fixture(autouse=True)\n    def warm(self):\n        self.net = nn.Linear(8, 8)\n\n"
    )
    assert running(f"{of_class}    def test_a(self):\n        self.net(1)\n") == ["TestIt::test_a"]


def test_methods_of_a_test_case_are_tests_whatever_the_settings_say():
    source = "import unittest\n\n\nclass Base(unittest.TestCase):\n    def test_a(self): pass\n    def check_b(self): pass\n\n\n"
    source += "class NetCase(Base):\n    def __init__(self): pass\n\n\ndef test_c(): pass\ndef check_d(): pass\n"
    assert [one.nodeid for one in found({"test_it.py": source}, Names(functions=["check_*"]))] == [
        "test_it.py::Base::test_a",
        "test_it.py::NetCase::test_a",
        "test_it.py::check_d",
    ]


def test_functions_that_call_each_other_end():
    assert running("def a():\n    b()\n\n\ndef b():\n    a()\n\n\ndef test_it():\n    a()\n") == []


def test_tests_are_those_that_pytest_would_collect():
    files = {
        "test_a.py": "class Helper:\n    def test_x(self): pass\n\n\nclass TestB:\n    def __init__(self): pass\n    def test_x(self): pass\n\n\ndef test_y(): pass\ndef check_z(): pass\n",
        "b_test.py": "def test_b(): pass\n",
        "checks/c.py": "def test_c(): pass\n",
    }
    assert [one.nodeid for one in found(files)] == ["b_test.py::test_b", "test_a.py::test_y"]
    names = Names(files=["*.py"], functions=["check_*"], folders=["."])
    assert [one.nodeid for one in found(files, names)] == ["test_a.py::check_z"]
    assert found(files, Names(folders=["checks"])) == ()


def test_tests_that_are_measured_already_are_known():
    source = "import pytest\n\n\n@pytest.mark.gpumem(max_gb=1)\ndef test_a(): pass\n\n\ndef test_b(gpumem): pass\n\n\ndef test_c(): pass\n"
    assert [one.is_measured for one in found({"test_it.py": source})] == [True, True, False]
    marked = "import pytest\n\npytestmark = [pytest.mark.gpumem]\n\n\ndef test_a(): pass\n"
    assert [one.is_measured for one in found({"test_it.py": marked})] == [True]


@pytest.mark.parametrize(
    "decorator", ["pytest.mark.parametrize('x', [1])", "pytest.mark.gpumem_configs(precision=['fp32'])"]
)
def test_tests_that_become_several_items_are_known(decorator):
    source = f"import pytest\n\n\n@{decorator}\ndef test_a(x): pass\n\n\ndef test_b(): pass\n"
    assert [one.has_parameters for one in found({"test_it.py": source})] == [True, False]


# Names of models, and what runs them


CLASSES = "class Small(nn.Module):\n    pass\n\n\nclass Large(Small):\n    pass\n\n\n"


@pytest.mark.parametrize(
    ("decorator", "argument"),
    [
        ("pytest.mark.parametrize('kind', [Small, Large])", "kind"),
        ("pytest.mark.parametrize(('size', 'kind'), [(1, Small), (2, Large)])", "size, kind"),
        ("pytest.mark.parametrize('size,kind', [pytest.param(1, Small, id='s')])", "size, kind"),
        ("pytest.mark.parametrize(argnames='kind', argvalues=[pytest.param(Small)])", "kind"),
    ],
)
def test_classes_of_models_that_parametrize_gives_are_known(decorator, argument):
    function = f"@{decorator}\ndef test_a({argument}):\n    net = kind()\n    net(1)\n"
    assert running(f"{CLASSES}{function}") == ["test_a"]
    methods = f"class TestIt:\n    def test_a(self, {argument}):\n        kind().eval()(1)\n\n    def test_b(self, {argument}):\n        kind()\n"
    assert running(f"{CLASSES}@{decorator}\n{methods}") == ["TestIt::test_a"]
    assert running(f"{CLASSES}pytestmark = [{decorator}]\n\n\n{methods}") == ["TestIt::test_a"]
    assert running(f"{CLASSES}{function.replace('Small', 'int').replace('Large', 'str')}") == []


def test_models_that_parametrize_and_fixtures_with_parameters_give_are_known():
    assert running("@pytest.mark.parametrize('net', [nn.Linear(8, 8)])\ndef test_a(net):\n    net(1)\n") == ["test_a"]
    fixture = "@pytest.fixture(params=[Small, Large])\ndef net(request):\n    return request.param()\n\n\n"
    assert running(f"{CLASSES}{fixture}def test_a(net):\n    net(1)\n\n\ndef test_b(net):\n    net\n") == ["test_a"]


@pytest.mark.parametrize(
    "body",
    [
        "for kind in (Small, Large):\n        kind()(1)",
        "for size, kind in [(1, Small)]:\n        kind(size)(1)",
        "kind = Small\n    kind()(1)",
        "wrapped(Small)(3)(1)",
        "net = wrapped(Small)(3)\n    net(1)",
    ],
)
def test_other_names_of_a_class_of_models_are_known(body):
    assert running(f"{CLASSES}def test_a():\n    {body}\n") == ["test_a"]


RUNS_A_MODEL = "def check(size, net, *rest, out=None):\n    net(size)\n"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("check(1, nn.ReLU())", ["test_a"]),
        ("check(size=1, net=nn.ReLU())", ["test_a"]),
        ("check(nn.ReLU(), 1)", []),
        ("check(1, print, out=nn.ReLU())", []),
    ],
)
def test_a_helper_runs_the_model_that_it_is_handed(call, expected):
    for source, others in (
        (f"{RUNS_A_MODEL}\n\n", {}),
        ("from helpers import check\n\n\n", {"helpers": RUNS_A_MODEL}),
        ("from helpers import *\n\n\n", {"helpers": RUNS_A_MODEL}),
        (
            "class TestIt:\n    def check(self, size, net, out=None):\n        net(size)\n\n",
            {},
        ),
    ):
        if source.startswith("class"):
            test = f"    def test_a(self):\n        self.{call}\n"
            assert [one.rpartition("::")[2] for one in running(source + test)] == expected
        else:
            assert running(f"{source}def test_a():\n    {call}\n", **others) == expected


def test_a_helper_is_handed_a_model_through_another_one():
    outer = "def outer(model):\n    check(3, model)\n"
    assert running(
        f"{RUNS_A_MODEL}\n\n{outer}\n\ndef test_a():\n    outer(nn.ReLU())\n\n\ndef test_b():\n    outer(1)\n"
    ) == ["test_a"]


def test_a_helper_that_parametrize_gives_runs_the_model_that_it_is_handed():
    source = f"{RUNS_A_MODEL}\n\n@pytest.mark.parametrize('way', [check, print])\ndef test_a(way):\n    way(1, net=nn.ReLU())\n"
    assert running(source) == ["test_a"]


def test_a_method_of_a_model_that_runs_it_is_followed():
    mixin = (
        "class Steps:\n    def loss(self, x):\n        return self(x).sum()\n\n    def size(self):\n        return 3\n"
    )
    source = "from steps import Steps\n\n\nclass Net(nn.Module, Steps):\n    pass\n\n\n"
    tests = "def test_a():\n    net = Net()\n    net.loss(1)\n\n\ndef test_b():\n    Net().size()\n"
    assert running(source + tests, steps=mixin) == ["test_a"]


HOLDER = "import torch\n\n\nclass Net(torch.nn.Module):\n    pass\n\n\nclass Forecaster:\n    @classmethod\n    def from_pretrained(cls, path):\n        return cls(load(path))\n\n    def __init__(self, model: Net):\n        self.model = model\n\n    def predict(self, x):\n        return self.model(x)\n\n    def vocabulary(self):\n        return self.model.words\n"


def test_what_is_loaded_with_its_weights_is_followed_to_the_model_that_it_holds():
    fixture = "from lib import *\n\n\n@pytest.fixture\ndef it():\n    return Forecaster.from_pretrained('x')\n\n\n"
    tests = "def test_a(it):\n    it.predict(1)\n\n\ndef test_b(it):\n    it.vocabulary()\n\n\ndef test_c():\n    OwnTokenizer.from_pretrained('x')(1)\n"
    assert running(fixture + tests, lib=HOLDER) == ["test_a"]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("nn.Module", ["test_a"]),
        ("'nn.Module'", ["test_a"]),
        ("None | nn.Linear", ["test_a"]),
        ("torch.Tensor", []),
        ("type[nn.Module]", []),
        ("'not ('", []),
    ],
)
def test_a_parameter_is_a_model_by_its_annotation(annotation, expected):
    assert running(f"def step(m: {annotation}):\n    m(1)\n\n\ndef test_a():\n    step(load())\n") == expected


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        ("nn.Module", "m = nn.Linear(8, 8).sampled()\n    m(1)"),
        ("nn.Module", "with nn.Linear(8, 8).sampled() as m:\n        m(1)"),
        ("Generator[nn.Module, None, None]", "with nn.Linear(8, 8).sampled() as m:\n        m(1)"),
        ("Iterator[nn.Module]", "with nn.Linear(8, 8).sampled() as m, other():\n        m(1)"),
    ],
)
def test_a_method_of_a_model_gives_another_by_its_annotation(annotation, body):
    source = (
        f"class Net(nn.Module):\n    def sampled(self) -> {annotation}:\n        ...\n\n\ndef test_a():\n    {body}\n"
    )
    assert running(source) == ["test_a"]
    assert running(source.replace(f"-> {annotation}", "-> list[nn.Module]")) == []


def test_other_names_of_a_class_of_models_are_known_where_they_are_imported():
    nets = "import functools\nimport torch\n\n\nWide = functools.partial(torch.nn.Linear, 8)\nlarge = 8\n"
    tests = "from nets import *\n\n\ndef test_a():\n    Wide(8)(1)\n\n\ndef test_b():\n    large(8)(1)\n"
    assert running(tests, nets=nets) == ["test_a"]


def test_what_is_made_from_a_class_of_models_trains_it_by_fit():
    fixtures = "@pytest.fixture\ndef cls():\n    return nn.Linear\n\n\n@pytest.fixture\ndef it(kind, cls):\n    return kind(cls, lr=1)\n\n\n"
    tests = "def test_a(it):\n    it.fit(1)\n\n\ndef test_b(it):\n    it.lr\n\n\ndef test_c():\n    Classifier(nn.Linear).fit(1)\n\n\ndef test_d():\n    Classifier(3).fit(1)\n"
    assert running(fixtures + tests) == ["test_a", "test_c"]


def test_names_that_a_package_gives_on_are_followed():
    files = {
        "src/net/__init__.py": "from .steps import train\nfrom .deep import *\n",
        "src/net/steps.py": "def train():\n    loss.backward()\n",
        "src/net/deep/__init__.py": "from ..steps import train as fit\nfrom .more import other\n",
        "src/net/deep/more.py": "from ..circle import other\n",
        "src/net/circle.py": "from .deep.more import other\n",
        "src/net/deep/steps.py": "def train():\n    pass\n",
        "tests/test_it.py": "import net\nfrom net import train, fit, other\n\n\ndef test_a():\n    train()\n\n\ndef test_b():\n    fit()\n\n\n"
        "def test_c():\n    other()\n\n\ndef test_d():\n    net.train()\n",
    }
    assert [one.nodeid[-1] for one in found(files) if one.runs_model] == ["a", "b", "d"]


def test_fixtures_that_a_marker_takes_are_of_its_tests():
    fixture = f"@pytest.fixture(params=[1, 2])\ndef warm():\n    {RUN}\n\n\n"
    mark = "pytest.mark.usefixtures('warm')"
    tests = f"@{mark}\ndef test_a():\n    pass\n\n\n@{mark}\nclass TestIt:\n    def test_b(self):\n        pass\n\n\ndef test_c():\n    pass\n"
    assert running(f"{fixture}{tests}") == ["test_a", "TestIt::test_b"]
    head = "import pytest\nfrom torch import nn\n\n\n"
    files = {"test_it.py": f"{head}{fixture}pytestmark = [{mark}]\n\n\ndef test_a():\n    pass\n"}
    assert [(one.runs_model, one.has_parameters) for one in found(files)] == [(True, True)]


def test_tests_that_a_class_inherits_from_another_file_are_its_own():
    files = {
        "tests/mixins.py": "import pytest\n\n\n@pytest.mark.parametrize('size', [1, 2])\nclass Mixin:\n    def check(self):\n        pass\n\n"
        "    def test_runs(self, size):\n        self.net(size)\n\n    def test_checks(self, size):\n        self.check()\n\n"
        "    def test_has(self, size):\n        str(self.net)\n",
        "tests/cases.py": "import unittest\n\n\nclass Case(unittest.TestCase):\n    pass\n",
        "tests/test_it.py": "from torch import nn\nfrom tests.cases import Case\nfrom .mixins import Mixin\n\n\nclass TestIt(Mixin):\n"
        "    def setup_method(self):\n        self.net = nn.ReLU()\n\n    def check(self):\n        self.net(1)\n\n\n"
        "class NetCase(Case):\n    def test_a(self):\n        nn.ReLU()(1)\n",
    }
    assert [(one.nodeid, one.runs_model, one.has_parameters) for one in found(files)] == [
        ("tests/test_it.py::TestIt::test_runs", True, True),
        ("tests/test_it.py::TestIt::test_checks", True, True),
        ("tests/test_it.py::TestIt::test_has", False, True),
        ("tests/test_it.py::NetCase::test_a", True, False),
    ]


def test_schedulers_of_a_library_of_models_are_no_models():
    assert running("from diffusers import DDIMScheduler\n\n\ndef test_a():\n    DDIMScheduler().step(1)\n") == []


# Patterns


def patterns(**tests: bool | None):
    """The patterns of tests, by ``file__name``: True runs a model, False does not, None is measured already."""
    made = [
        ProjectTest(name.replace("__", "::").replace("_py", ".py"), bool(runs), runs is None)
        for name, runs in tests.items()
    ]
    return patterns_of(made), made


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ({"a_py__test_x": True, "a_py__test_y": True}, ("a.py",)),
        ({"a_py__test_x": True, "a_py__test_y": False}, ("a.py::test_x",)),
        ({"a_py__test_x": True, "a_py__test_y": None}, ("a.py",)),
        ({"a_py__T__test_x": True, "a_py__T__test_z": True, "a_py__test_y": False}, ("a.py::T",)),
        ({"a_py__T__test_x": True, "a_py__T__test_y": False}, ("a.py::T::test_x",)),
        ({"a_py__test_run_x": True, "a_py__test_run_y": True, "a_py__test_y": False}, ("a.py::test_run*",)),
        (
            {"a_py__test_run_x": True, "a_py__test_run_y": True, "a_py__test_run": False},
            ("a.py::test_run_x", "a.py::test_run_y"),
        ),
        ({"a_py__test_x": False}, ()),
    ],
)
def test_patterns_are_few_and_name_exactly_the_tests_that_run_models(tests, expected):
    made, of = patterns(**tests)
    assert made == expected
    for one in of:
        if not one.is_measured:
            assert any(matches_test(pattern, one.nodeid) for pattern in made) == one.runs_model


def test_a_folder_of_tests_that_all_run_models_is_one_pattern():
    tests = [ProjectTest(f"tests/models/{name}::test_x", True) for name in ("test_a.py", "deep/test_b.py")]
    assert patterns_of([*tests, ProjectTest("tests/test_c.py::test_x", False)]) == ("tests/models/*",)


def test_parametrized_tests_are_named_with_their_brackets():
    one, other = ProjectTest("a.py::test_x", True, has_parameters=True), ProjectTest("a.py::test_xy", False)
    (pattern,) = patterns_of([one, other])
    assert matches_test(pattern, "a.py::test_x[1]")
    assert not matches_test(pattern, "a.py::test_xy")
    assert patterns_of([ProjectTest("a.py::test_x", True, has_parameters=None), other]) == (
        "a.py::test_x",
        "a.py::test_x[*",
    )
