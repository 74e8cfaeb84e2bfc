"""Explaining what suites do: models in turn, threads, vmap, quantized weights, EMA, two models, steps that fail when run again."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.facts.values.composition import REST

if TYPE_CHECKING:
    from tests.conftest import Project

ALWAYS = ("--no-gpumem-time", "--gpumem-explain=always", "--junitxml=report.xml")
NEEDS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def measured(project: Project, test: str = "test_it") -> dict[str, Any]:
    (verdict,) = project.verdicts()[test]["verdicts"]
    found: dict[str, Any] = verdict["measurement"]
    return found


def rows(project: Project, test: str = "test_it") -> list[str]:
    """The rows of the peak of the last run, which was recorded as it was measured."""
    explanation = measured(project, test)["explanation"]
    assert explanation["peak"]["notes"] == []
    assert explanation["peak"]["total"] == measured(project, test)["metrics"]["peak_allocated"]
    found: list[str] = explanation["peak"]["rows"]
    return found


def test_models_that_a_step_makes_in_turn_are_not_kept_alive(project):
    project.write(
        "def step():\n    for _ in range(3):\n        model = torch.nn.Linear(300, 400)\n"
        "        optimizer = torch.optim.AdamW(model.parameters())\n        model(torch.ones(8, 300)).sum().backward()\n"
        "        optimizer.step()\n        del model, optimizer\n\n\n"
        "def test_it(gpumem):\n    gpumem.measure(step)\n\n\n@pytest.mark.gpumem\ndef test_call():\n    step()\n"
    )
    project.run(*ALWAYS).assert_outcomes(passed=2)
    for test in ("test_it", "test_call"):
        assert any(row.startswith("optimizer state | Linear |") for row in rows(project, test)), test


def test_what_other_threads_run_does_not_disturb(project):
    project.settings("[tool.pytest.ini_options]\nfilterwarnings = ['error']\n")
    project.write(
        "import threading\n\nMODEL = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(10)))\n\n\n"
        "@pytest.mark.gpumem\ndef test_it():\n    other = torch.nn.Sequential(*MODEL)\n    failed = []\n\n"
        "    def run():\n        try:\n            for _ in range(30):\n                other(torch.ones(1, 100))\n"
        "        except BaseException as error:\n            failed.append(error)\n\n"
        "    thread = threading.Thread(target=run)\n    thread.start()\n"
        "    kept = [MODEL(torch.ones(500, 100)) for _ in range(10)]\n    thread.join()\n    assert not failed, failed\n"
    )
    project.run(*ALWAYS).assert_outcomes(passed=1)
    assert any(" | test_it.py:" in row for row in rows(project))


def test_a_model_that_is_built_with_vmap_is_measured_and_explained(project):
    project.write(
        "class Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        made = torch.func.vmap(lambda x: torch.outer(x, x))(torch.ones(4, 50))\n"
        "        self.weight = torch.nn.Parameter(made)\n\n    def forward(self, x):\n"
        "        return torch.func.vmap(lambda w: w @ x)(self.weight).sum()\n\n\n"
        "def test_it(gpumem):\n    gpumem.train_step(Model, torch.ones(50))\n"
    )
    project.run("--no-gpumem-time").assert_outcomes(passed=1)
    project.run(*ALWAYS).assert_outcomes(passed=1)
    assert any(row.startswith("parameter | Model |") for row in rows(project))


@pytest.mark.parametrize("raised", ["RuntimeError('only eight times')", "pytest.skip.Exception('only eight times')"])
def test_a_step_that_fails_when_it_is_recorded_is_measured_and_says_so(project, raised):
    project.write(
        "CALLS = []\n\n\ndef test_it(gpumem):\n    def step():\n        CALLS.append(1)\n"
        f"        if len(CALLS) > 8:\n            raise {raised}\n        torch.ones(1000)\n\n    gpumem.measure(step)\n"
    )
    project.run(*ALWAYS).assert_outcomes(passed=1)
    found = measured(project)
    assert found["metrics"]["peak_allocated"] == 4000
    assert found["explanation"] is None
    assert found["notes"][-1].startswith("the measured code could not be run again to explain its peak: ")
    assert found["notes"][-1].endswith("only eight times")


def test_a_composition_that_could_not_be_recorded_says_why(project):
    project.write(
        "CALLS = []\n\n\ndef test_it(gpumem):\n    def step():\n        CALLS.append(1)\n"
        "        if len(CALLS) > 7:\n            raise RuntimeError('only seven times')\n        torch.ones(1000)\n\n"
        "    gpumem.measure(step, explain=True).composition\n"
    )
    result = project.run("--no-gpumem-time")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *MissingComposition: the composition of * was not recorded: the measured code could not be run again*only seven times"
        ]
    )


@pytest.mark.parametrize("kind", ["call", "step"])
def test_what_comes_of_the_second_run_does_not_hide_that_memory_ran_out(project, kind):
    body = (
        "    CALLS.append(1)\n    if len(CALLS) > 1:\n        pytest.skip('not again')\n"
        "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB')\n"
    )
    test = (
        "@pytest.mark.gpumem\ndef test_it():\n    step()\n"
        if kind == "call"
        else "def test_it(gpumem):\n    gpumem.measure(step)\n"
    )
    project.write(f"CALLS = []\n\n\ndef step():\n{body}\n\n{test}")
    result = project.run("--no-gpumem-time")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*OutOfMemoryError: CUDA out of memory*", "gpumem: 0 gated, 1 failed by itself*"])


def test_a_name_that_only_sounds_like_a_composition_runs_no_call_twice(project):
    project.write(
        "CALLS = []\n\n\nclass Shap:\n    explanation = 1\n\n\n@pytest.mark.gpumem\ndef test_it():\n    CALLS.append(1)\n"
        "    torch.ones(Shap().explanation)\n\n\ndef test_calls():\n    assert CALLS == [1]\n"
    )
    project.run("--no-gpumem-time").assert_outcomes(passed=2)


@NEEDS_TORCHAO
def test_quantized_weights_are_parameters_of_their_module(project):
    project.write(
        "class Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = torch.nn.Linear(256, 512)\n\n    def forward(self, x):\n        return self.fc(x)\n\n\n"
        "def test_it(gpumem):\n    gpumem.infer_step(Model, torch.ones(4, 256), config='bf16,weights=int8')\n"
    )
    project.run(*ALWAYS).assert_outcomes(passed=1)
    assert any(row.startswith("parameter | fc |") and "1 x int8[512, 256]" in row for row in rows(project))


def test_models_that_a_step_holds_and_does_not_call_are_found_on_what_holds_them(project):
    project.write(
        "import copy\n\n\nclass Trainer:\n    def __init__(self):\n        self.model = torch.nn.Linear(100, 200)\n"
        "        self.average = copy.deepcopy(self.model)\n\n    def step(self):\n"
        "        self.model(torch.ones(4, 100)).sum().backward()\n        self.model.zero_grad()\n\n\n"
        "def test_it(gpumem):\n    trainer = Trainer()\n    gpumem.measure(trainer.step)\n"
    )
    project.run(*ALWAYS).assert_outcomes(passed=1)
    (weights,) = [row for row in rows(project) if "[200, 100]" in row and row.startswith("parameter")]
    assert " | 2 x float32[200, 100] | 160000" in weights


def test_modules_of_the_same_names_in_two_models_are_told_apart(project):
    both = "\n\n".join(
        f"class {name}(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.fc = torch.nn.Linear(100, {width})\n\n    def forward(self, x):\n        return self.fc(x)\n"
        for name, width in (("Generator", 100), ("Discriminator", 50))
    )
    project.write(
        f"{both}\n\ndef test_it(gpumem):\n    first, second = Generator(), Discriminator()\n"
        "    gpumem.measure(lambda: second(first(torch.ones(10, 100))))\n"
    )
    project.run(*ALWAYS).assert_outcomes(passed=1)
    modules = {row.split(" | ")[1] for row in rows(project) if row.startswith("parameter") and REST not in row}
    assert modules in ({"fc", "Discriminator.fc"}, {"fc", "Generator.fc"})


def test_numpys_random_numbers_do_not_depend_on_whether_a_step_was_explained(project):
    pytest.importorskip("numpy", reason="needs NumPy")
    project.write(
        "from pathlib import Path\n\nimport numpy\n\n\n@pytest.fixture(autouse=True, scope='module')\ndef seed():\n"
        "    numpy.random.seed(0)\n\n\n@pytest.mark.gpumem\ndef test_call():\n    torch.ones(numpy.random.randint(5, 9))\n\n\n"
        "def test_step(gpumem):\n    gpumem.measure(lambda: torch.ones(int(numpy.random.randint(5, 9)) * 0 + 5))\n\n\n"
        "def test_after():\n    Path('drawn.txt').write_text(str(numpy.random.randint(10**9)))\n"
    )
    drawn = []
    for mode in ("never", "always"):
        project.run("--no-gpumem-time", f"--gpumem-explain={mode}").assert_outcomes(passed=3)
        drawn.append((project.path / "drawn.txt").read_text(encoding="utf-8"))
    assert drawn[0] == drawn[1]


def test_ctrl_c_while_a_call_is_recorded_keeps_what_was_measured_before(project):
    project.write(
        "CALLS = []\n\n\n@pytest.mark.gpumem\ndef test_before():\n    torch.ones(1000)\n\n\n"
        "@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1000)\n    CALLS.append(1)\n    if len(CALLS) > 1:\n"
        "        raise KeyboardInterrupt\n"
    )
    result = project.run("--no-gpumem-time", "--gpumem-update=new", separate=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(
        ["gpumem store: 1 baseline written (new)*", "gpumem: 1 recorded, new; 1 did not finish"]
    )
    (text,) = project.stored().values()
    assert "test_before" in text
    assert "test_it.call" not in text
