"""Models as tests without a file: by ``--gpumem-model`` and by ``[[tool.gpumem.models]]``, recorded, gated and explained."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpumem.measuring.models.name import ModelName
from pytest_gpumem.measuring.models.task import INFERENCE
from pytest_gpumem.plugin.config.models import ModelStep
from pytest_gpumem.plugin.model_tests import measure
from tests import preloaded
from tests.models.architectures import NEEDS_TRANSFORMERS
from tests.models.test_by_name import CLASSES, written
from tests.pages import blocks_of, follows

pytestmark = NEEDS_TRANSFORMERS
preloaded.load_as_well("tests.with_transformers")
TEN = [
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "CLIPModel",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "ViTForImageClassification",
    "WhisperForConditionalGeneration",
]
TWO_KINDS = ["CLIPModel", "MixtralForCausalLM"]
"""One takes texts and images, the other routes its tokens."""
PLANTED = "hidden_states = hidden_states + 0 * hidden_states.sin().cos()"


@pytest.fixture(autouse=True, scope="module")
def _the_library_is_loaded(suites_objects_hidden: None) -> None:
    """A run within this process would forget what it was the first to import, and import it anew each time."""
    import transformers

    for name in {*TWO_KINDS, "BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"}:
        getattr(transformers, name)


@pytest.fixture
def models(project):
    """Folders with the configurations of small models, called as their classes."""

    def write(*names: str) -> None:
        for name in names:
            (project.path / name).mkdir()
            written(project.path / name, name, *CLASSES[name])

    return write


def typed(*names: str) -> list[str]:
    return [f"--gpumem-model=hf-tiny:{name}" for name in names]


def collected(project, *arguments: str) -> list[str]:
    """The ids of the tests that a run has, without those that it leaves out."""
    return [line for line in project.run("--collect-only", "-q", *arguments).outlines if "::" in line]


def figures(verdicts):
    return {test: verdict["verdicts"][0]["measurement"]["metrics"] for test, verdict in verdicts.items()}


def test_models_recorded_by_option_equal_models_in_the_settings_to_the_byte(project, models):
    models(*TWO_KINDS)
    project.run(*typed(*TWO_KINDS), "--gpumem-update=new", "--junitxml=report.xml").assert_outcomes(passed=2)
    recorded, stored = figures(project.verdicts()), project.stored()
    assert list(recorded) == [f"hf-tiny:{name}[fp32]" for name in TWO_KINDS]
    names = ",\n".join(f'  {{model = "hf-tiny:{name}"}}' for name in TWO_KINDS)
    project.settings(f"[tool.gpumem]\nmodels = [\n{names}\n]\n")
    result = project.run("--gpumem-update=all", "--gpumem-baseline", "--junitxml=report.xml")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["gpumem: 2 gated"])
    assert figures(project.verdicts()) == recorded
    assert project.stored() == stored
    lines = [verdict["location"] for verdict in project.verdicts().values()]
    assert lines == [{"file": "pyproject.toml", "line": number} for number in (3, 4)]


@pytest.mark.thorough
def test_workers_have_the_same_figures_of_ten_models(project, models):
    models(*TEN)
    project.run(*typed(*TEN), "--gpumem-update=new", "--junitxml=report.xml").assert_outcomes(passed=10)
    alone = figures(project.verdicts())
    spread = project.run(*typed(*TEN), "--gpumem-baseline", "--junitxml=report.xml", "-n2", new=True)
    spread.assert_outcomes(passed=10)
    spread.stdout.fnmatch_lines(["gpumem: 10 gated"])
    assert figures(project.verdicts()) == alone


def test_a_change_in_the_code_of_the_library_is_red_with_its_line(project, models, monkeypatch):
    from transformers.models.gpt2 import modeling_gpt2

    models("GPT2LMHeadModel", "LlamaForCausalLM")
    both = typed("GPT2LMHeadModel", "LlamaForCausalLM")
    project.run(*both, "--gpumem-update=new").assert_outcomes(passed=2)
    lines = Path(modeling_gpt2.__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines) if "self.ln_2(hidden_states)" in line)
    lines[number] += f"\n        {PLANTED}"
    changed = {"__name__": modeling_gpt2.__name__, "__package__": modeling_gpt2.__package__}
    exec(compile("\n".join(lines), modeling_gpt2.__file__, "exec"), changed)
    monkeypatch.setattr(modeling_gpt2.GPT2Block, "forward", changed["GPT2Block"].forward)
    result = project.run(*both, "--gpumem-baseline")
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "FAILED pyproject.toml::hf-tiny:GPT2LMHeadModel[fp32]" in text
    assert re.search(rf"transformers [\d.]+: models/gpt2/modeling_gpt2\.py:{number + 2}\b", text), text
    assert "pytest --gpumem-model=hf-tiny:GPT2LMHeadModel --gpumem-update=all" in text


@pytest.mark.thorough
def test_the_readme_shows_what_a_model_by_name_prints(project):
    from transformers import GPT2Config

    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(project.path / "openai-community" / "gpt2")
    shown = [one for one in blocks_of("README.md") if one.section == "Start without a test"]
    line, printed = shown[0].commands[0], shown[1]
    result = project.run(*shlex.split(line)[1:], device=None)
    result.assert_outcomes(passed=1)
    assert follows(printed, result.outlines)


ENTRIES = """
[[tool.gpumem.models]]
model = "hf:GPT2LMHeadModel"
batch = "4x16"
config = ["fp32", "bf16,checkpoint=blocks"]
max_gb = 0.1
max_retained = "1 kB"

[[tool.gpumem.models]]
model = "hf:BertForMaskedLM"
train = false
batch = 2
max_gb = 0.0001
"""
GPT2 = [f"pyproject.toml::hf:GPT2LMHeadModel[4x16-{config}]" for config in ("fp32", "bf16-ckpt-blocks")]
BERT = "pyproject.toml::hf:BertForMaskedLM[2-infer-fp32]"


def test_an_entry_says_what_is_measured_and_what_holds_it(project, models):
    models("GPT2LMHeadModel", "BertForMaskedLM")
    project.settings(ENTRIES)
    result = project.run("--junitxml=report.xml", "-v")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["Memory over budget: peak *, budget 100.00 kB: *", "*modeling_bert.py:*"])
    assert "conftest.py:" not in result.stdout.str(), "whoever runs pytest has not called the model"
    lines = result.outlines
    matrix = next(n for n, line in enumerate(lines) if line.startswith("pyproject.toml::hf:GPT2LMHeadModel[4x16] "))
    assert [line.split()[0] for line in lines[matrix + 1 : matrix + 3]] == ["fp32", "bf16,checkpoint=blocks"]
    verdicts = project.verdicts()
    workloads = {test: one["verdicts"][0]["measurement"]["workload"] for test, one in verdicts.items()}
    assert [(one["step"], one["config"]) for one in workloads.values()] == [
        ("train_step", "fp32"),
        ("train_step", "bf16,checkpoint=blocks"),
        ("infer_step", "fp32"),
    ]
    assert "int64[4, 16]" in json.dumps(workloads[GPT2[0].partition("::")[2]])
    assert [one["location"]["line"] for one in verdicts.values()] == [3, 3, 10]


BY_HAND = """
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, GPT2LMHeadModel, GenerationConfig

CONFIG = AutoConfig.from_pretrained("GPT2LMHeadModel")
TOKENS = {"input_ids": torch.randint(2, (4, 12))}


def generating():
    model = GPT2LMHeadModel(CONFIG)
    model.generation_config = GenerationConfig(bos_token_id=CONFIG.bos_token_id)
    return model


def test_generation(gpumem):
    gpumem.infer_step(generating, TOKENS, new_tokens=3, config="fp32")


@pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' own
def test_adapters(gpumem):
    batch = {"input_ids": TOKENS["input_ids"], "labels": TOKENS["input_ids"].clone()}
    gpumem.train_step(lambda: get_peft_model(GPT2LMHeadModel(CONFIG), LoraConfig(r=4)), batch, config="fp32")
"""


def test_generation_and_adapters_by_name_take_what_tests_by_hand_take(project, models):
    pytest.importorskip("peft")
    models("GPT2LMHeadModel")
    project.settings(
        """
[[tool.gpumem.models]]
model = "hf:GPT2LMHeadModel"
batch = "4x12"
generate = 3

[[tool.gpumem.models]]
model = "hf:GPT2LMHeadModel"
batch = "4x12"
lora = "r=4"
"""
    )
    project.write(BY_HAND, "test_by_hand.py")
    project.run("pyproject.toml", "test_by_hand.py", "--junitxml=report.xml").assert_outcomes(passed=4)
    verdicts = project.verdicts()
    measured = figures(verdicts)
    generate, lora = "hf:GPT2LMHeadModel[4x12-generate-3-fp32]", "hf:GPT2LMHeadModel[4x12-lora-r4-fp32]"
    assert measured[generate] == measured["test_generation"]
    assert measured[lora] == measured["test_adapters"]
    steps = [verdicts[test]["verdicts"][0]["measurement"]["workload"]["step"] for test in (generate, lora)]
    assert steps == ["generate", "train_step"]


def test_tests_from_the_settings_run_in_full_runs_and_if_their_file_is_named(project, models):
    models("GPT2LMHeadModel", "BertForMaskedLM")
    all_three = [*GPT2, BERT]
    project.write("def test_one(): ...\n", "tests/test_one.py")
    one = "tests/test_one.py::test_one"
    project.settings(ENTRIES)
    assert collected(project) == [*all_three, one]
    assert collected(project, "pyproject.toml") == all_three
    assert collected(project, GPT2[1]) == [GPT2[1]]
    assert collected(project, "tests") == [one]
    assert collected(project, "-m", "gpumem", "-k", "ckpt or infer") == [GPT2[1], BERT]
    project.settings(f"[tool.pytest.ini_options]\ntestpaths = ['tests']\n{ENTRIES}")
    assert collected(project) == [one, *all_three]
    assert collected(project, ".") == [*all_three, one]
    assert collected(project, "tests") == [one]
    project.settings(f"[tool.pytest.ini_options]\ntestpaths = ['.']\n{ENTRIES}")
    assert collected(project) == [*all_three, one], "once"


def test_models_that_are_typed_run_alone_or_with_the_paths_that_are(project, models, monkeypatch):
    models("GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM")
    project.write("def test_one(): ...\n", "tests/test_one.py")
    one, llama = "tests/test_one.py::test_one", "pyproject.toml::hf-tiny:LlamaForCausalLM[fp32]"
    assert collected(project, *typed("LlamaForCausalLM")) == [llama], "there is no such file"
    assert collected(project, *typed("LlamaForCausalLM"), "tests") == [one, llama]
    project.settings(f"[tool.pytest.ini_options]\ntestpaths = ['tests']\n{ENTRIES}")
    assert collected(project, *typed("LlamaForCausalLM")) == [llama]
    assert collected(project, *typed("LlamaForCausalLM"), ".") == [llama, one]
    assert collected(project, "--gpumem-model=hf:GPT2LMHeadModel") == GPT2, "as the settings say"
    monkeypatch.chdir(project.path / "tests")
    assert collected(project, f"--gpumem-model=hf:{project.path / 'GPT2LMHeadModel'}") == GPT2
    assert collected(project, "--gpumem-model=hf:../GPT2LMHeadModel") == GPT2
    monkeypatch.chdir(project.path)
    project.settings("[tool.pytest.ini_options]\ntestpaths = ['tests']\naddopts = ['--gpumem-model=hf:org/name']\n")
    assert collected(project) == [one, "pyproject.toml::hf:org/name[fp32]"], "a suite must not go for an option of it"


def test_workers_collect_what_is_run_without_them(project, models):
    models("GPT2LMHeadModel", "BertForMaskedLM")
    (project.path / "tests").mkdir()
    (project.path / "tests" / "test_one.py").write_text("def test_one(): ...\n", encoding="utf-8")
    project.settings(f"[tool.pytest.ini_options]\ntestpaths = ['tests']\n{ENTRIES}")
    (project.path / "conftest.py").write_text("def pytest_runtest_protocol(): return True\n")
    # One has two configs in the settings, and there is a test of `testpaths`.
    for words, items in {(): "4 items", ("--gpumem-model=hf:BertForMaskedLM",): "1 item"}.items():
        project.run("-n1", "-v", *words, separate=True).stdout.fnmatch_lines([f"1 worker [[]{items}]"])


def test_what_no_step_can_be_made_of_fails_its_own_test_with_a_sentence(project, models, monkeypatch):
    import transformers

    def cached_file(*_):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your internet connection")

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    models("ViTForImageClassification")
    for name, config in {
        "theirs": {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}},
        "headless": {"model_type": "bert", "architectures": ["BertModel"]},
        "sizeless": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]},
    }.items():
        (project.path / name).mkdir()
        (project.path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (project.path / "theirs" / "theirs.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    (project.path / "nothing").mkdir()
    names = ["gone/model", "theirs", "headless", "nothing", "sizeless"]
    project.settings(
        "".join(f'[[tool.gpumem.models]]\nmodel = "hf:{name}"\n' for name in names)
        + '[[tool.gpumem.models]]\nmodel = "hf:ViTForImageClassification"\nconfig = "optimizer=sgd,checkpoint=every:9"\n'
    )
    result = project.run("--gpumem-baseline")
    result.assert_outcomes(failed=6)
    text = result.stdout.str()
    assert "hf:gone/model: We couldn't connect to 'https://huggingface.co' Check your internet connection" in text
    assert "needs code of its own (trust_remote_code), which is not run; write a function that returns" in text
    assert "BertModel has no loss, because its forward takes no labels; write a function" in text
    assert "hf:nothing: there is no config.json in this folder" in text
    assert "ResNetConfig does not say how large images are; write 1x224 for the batch" in text
    assert "checkpoint=every:9" in text
    assert "Traceback" not in text
    assert "/hub.py" not in text
    assert "fixture.py" not in text, "no frame of this package is shown"


def test_weights_and_batch_do_not_depend_on_earlier_draws_and_change_no_generator(project, models, monkeypatch, device):
    import torch

    models("BertForMaskedLM")
    monkeypatch.setattr("pytest_gpumem.plugin.runtest.hooks.run_of", lambda _: SimpleNamespace(device=device))
    step = ModelStep(ModelName("hf-tiny", "BertForMaskedLM"), task=INFERENCE)
    made = []

    def infer_step(build, batch, **_):
        made.append([*build().parameters(), batch()["input_ids"]])

    for _ in range(2):
        torch.rand(1)
        before = torch.get_rng_state()
        measure(None, step, project.path, SimpleNamespace(train_step=None, infer_step=infer_step))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--gpumem-model=gpt2"],
            "--gpumem-model is 'gpt2', expected the name of a model: hf:ORG/NAME",
        ),
        (["--gpumem-model=hf:"], "--gpumem-model: 'hf:' names no model; write hf:ORG/NAME"),
        (["--gpumem-model=hf:", "-n1"], "--gpumem-model: 'hf:' names no model; write hf:ORG/NAME"),
        (["--gpumem-modle=hf:a/b"], "no such option: --gpumem-modle; did you mean '--gpumem-model'?"),
    ],
)
def test_an_option_that_names_no_model_is_a_usage_error(project, words, said):
    result = project.run(*words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stderr.str()


def test_fixtures_and_hooks_of_the_project_are_those_of_any_test(project, models):
    models("GPT2LMHeadModel")
    (project.path / "conftest.py").write_text(
        """
import pytest


@pytest.fixture(autouse=True)
def around(request):
    print(f"set up for {request.node.name} in {request.node.path.name}")
    yield


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xfail(strict=True))
""",
        encoding="utf-8",
    )
    project.settings(ENTRIES.split("[[")[1].join(["[[", ""]).replace("0.1", "0.000001"))
    result = project.run("-rP", "-s")
    result.assert_outcomes(xfailed=2)
    result.stdout.fnmatch_lines(["*set up for hf:GPT2LMHeadModel[[]4x16-fp32] in pyproject.toml*"])


def test_a_baseline_of_a_model_that_the_settings_no_longer_have_is_unused(project, models):
    models("BertForMaskedLM")
    entry = '[[tool.gpumem.models]]\nmodel = "hf:BertForMaskedLM"\ntrain = false\nbatch = '
    project.settings(f'{entry}1\n{entry}"2"\n')
    project.run("--gpumem-update=new", "--gpumem-explain=never").assert_outcomes(passed=2)
    project.settings(f"{entry}1\n")
    result = project.run("--gpumem-baseline", "--gpumem-explain=never")
    result.assert_outcomes(passed=1)
    gone = "pyproject.toml::hf:BertForMaskedLM[[]2-infer-fp32] (infer_step)"
    result.stdout.fnmatch_lines([f"gpumem store: 1 unused baseline: {gone}; `gpumem prune` removes it"])
    typed_only = project.run("--gpumem-baseline", "--gpumem-explain=never", "--gpumem-model=hf:BertForMaskedLM")
    typed_only.assert_outcomes(passed=1)
    assert "unused baseline" not in typed_only.stdout.str(), "of such a run nobody knows what else there is"
