"""A wrong file, test, model or device of a command, and a wrong call of the fixture: the answer names the right form."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.reporting.reports.file_kinds import SESSION, STORED, kind_of, kind_of_file
from pytest_gpumem.reporting.reports.json_report import to_json
from pytest_gpumem.tools.main import main
from tests.reports.test_merging import measured, shard

STORE = Path(__file__).parents[1] / "example_project/gpumem-baselines"
STORED_FILE = str(STORE / "cpu-x86_64/tests/test_gpt.py.toml")
A_REPORT = "the report of a session (for `gpumem why --report` and `gpumem accept`)"
A_STORED_FILE = "a file of the store (for `gpumem show --store FOLDER`)"
OTHERS = {
    "ab": {"format": 2, "accounting": "gpumem ab: 1 ok", "packages": [], "not_compared": []},
    "compare": {"format": 2, "tests": [], "added": [], "gone": []},
    "bisect": {"format": 2, "found": False, "culprit": None},
    "advise": {"format": 1, "subject": "GPT2", "recommended": []},
    "fit": {"format": 1, "gpus": [], "conclusion": "fits none"},
    "doctor": {"format": 1, "exit_status": 0, "findings": []},
    "show": {"format": 1, "store": "gpumem-baselines", "baselines": []},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gpumem.json").write_text(to_json(shard(measured(test=("a.py", "test_a")))), encoding="utf-8")
    return tmp_path


def refusal(*arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    return result.stderr.partition("Error: ")[2].strip()


@pytest.mark.parametrize("command", OTHERS)
def test_the_result_of_a_command_is_no_report_and_is_called_by_its_name(command):
    Path("other.json").write_text(json.dumps(OTHERS[command]), encoding="utf-8")
    assert f"other.json: it is the result of gpumem {command}" in refusal("merge", "other.json")


@pytest.mark.parametrize(
    "command", [["merge"], ["accept"], ["export", "bencher"], ["why", "t", "--report"], ["compare"]]
)
def test_a_file_of_the_store_is_no_report(command):
    assert f"{STORED_FILE}: it is {A_STORED_FILE}; write a report with" in refusal(*command, STORED_FILE)


@pytest.mark.parametrize("command", ["show", "accept", "compare"])
def test_a_report_is_no_store(command):
    needed = {"accept": ["gpumem.json"], "compare": ["a", "b"]}.get(command, [])
    said = refusal(command, *needed, "--store", "gpumem.json")
    assert f"gpumem.json is a file, expected a folder; it is {A_REPORT}" in said


def test_a_report_is_no_store_of_a_session(project):
    (project.path / "gpumem.json").write_text(to_json(shard(measured(test=("a.py", "test_a")))), encoding="utf-8")
    project.write("@pytest.mark.gpumem\ndef test_it(): ...\n")
    result = project.run("--gpumem-baseline", "--gpumem-store=gpumem.json")
    assert f"expected a folder; it is {A_REPORT}" in "".join(result.errlines)


@pytest.mark.parametrize("command", ["show", "why"])
def test_a_report_is_no_test(command):
    store = [] if command == "why" else ["--store", str(STORE)]
    assert refusal(command, *store, "gpumem.json") == f"gpumem.json is {A_REPORT}, expected a test"


def test_a_report_in_place_of_a_format_of_exports_is_told_where_it_goes():
    said = refusal("export", "gpumem.json")
    assert said.startswith("name the format before gpumem.json, like gpumem export bencher gpumem.json; formats: ")
    assert refusal("export", "benche", "gpumem.json") == "no such format: benche; did you mean 'bencher'?"


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("test_b", "none of the 1 measured test in gpumem.json matches 'test_b'; there is a.py::test_a"),
        (
            "nothing_like_it",
            "none of the 1 measured test in gpumem.json matches 'nothing_like_it'; there is:\n  a.py::test_a",
        ),
    ],
)
def test_a_test_that_is_in_no_report_is_told_with_those_that_are(test, said):
    assert refusal("why", test, "--report", "gpumem.json") == said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "lfm2/config.json",
            "there is no file lfm2/config.json; a configuration file is written 'hf:lfm2/config.json'",
        ),
        ("here/config.json", "here/config.json is a configuration: did you mean 'hf:here/config.json'?"),
        ("here", "here is a configuration: did you mean 'hf:here'?"),
        ("gpumem.json", f"gpumem.json is {A_REPORT}, expected a model"),
        ("LiquidAI/LFM2-350M", "'LiquidAI/LFM2-350M': did you mean 'hf:LiquidAI/LFM2-350M'?"),
        ("hg:LiquidAI/LFM2-350M", "did you mean 'hf:LiquidAI/LFM2-350M'?"),
        ("lfm2", "'lfm2': write MODULE:FACTORY, like my_project.models:make_gpt, or a model by name: hf:NAME, "),
    ],
)
def test_a_model_without_its_source_is_told_with_it(folder, model, said):
    (folder / "here").mkdir()
    (folder / "here/config.json").write_text("{}")
    assert said in refusal("advise", model, "--fits", "24GB", "--device", "cpu")


def test_a_misspelt_source_of_models_is_told():
    said = refusal("advise", "tim:resnet50", "--fits", "24GB", "--device", "cpu")
    assert said.startswith("there is no module 'tim'")
    assert said.endswith("; did you mean 'timm:resnet50'?")


@pytest.mark.parametrize(("typed", "near"), [("l4", "emulated:l4"), ("gpu", "cuda"), ("cud", "cuda")])
def test_a_card_in_place_of_a_device_is_told_as_an_emulated_one(typed, near):
    assert (
        refusal("advise", "x:y", "--all", "--device", typed)
        == f"--device {typed}: no such device; did you mean '{near}'?"
    )


@pytest.mark.parametrize(("typed", "near"), [("l5", "'l4'"), ("emulated:l5", "'emulated:l4'")])
def test_a_misspelt_card_is_told_as_it_was_typed(typed, near):
    assert f"'{typed}' is no GPU that can be emulated; did you mean {near}?" in refusal(
        "fit", "--device", typed, "x.py"
    )


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", "[" * 100_000, "format = 1\n", '{"terms": 1}'])
def test_a_file_of_another_program_has_no_kind(folder, text):
    assert kind_of(text) is None
    (folder / "file").write_bytes(b"\xff" + text.encode())
    assert kind_of_file(folder / "file") is None
    assert kind_of_file(folder) is kind_of_file(folder / "gone") is None


def test_files_of_this_package_are_recognized():
    assert kind_of_file(Path("gpumem.json")) == SESSION
    assert kind_of_file(Path(STORED_FILE)) == STORED


# The traceback ends in the line of the test

WRONG = {
    "keyword": 'gpumem.train_step(make, BATCH, precision="bf16")',
    "config": 'gpumem.train_step(make, BATCH, config="fp17")',
    "config of a type": "gpumem.infer_step(make, BATCH, config=3)",
    "estimate": 'gpumem.estimate(make, BATCH, "fp17")',
    "gradients": 'gpumem.assert_same_gradients(make, BATCH, None, "fp32")',
    "no step": "gpumem.train_step(make, BATCH, loss=lambda output, _: output)",
    "no generate": "gpumem.infer_step(make, BATCH, new_tokens=3)",
    "no model": "gpumem.train_step(3, BATCH)",
    "name": "gpumem.measure(make, name=3)",
    "items": 'gpumem.measure(make, items="x")',
    "no function": "gpumem.measure(BATCH.sum())",
    "no step to repeat": "gpumem.assert_no_growth(BATCH)",
    "load": "gpumem.load(3)",
    "steps": "gpumem.loop([1, 2])",
    "growth": "gpumem.assert_no_growth(make, steps=0)",
    "method": "gpumem.trian_step(make, BATCH)",
    "for": "list(gpumem.loop())",
    "attribute": "gpumem.track().measurement",
}
CALLING = """BATCH = torch.ones(2, 4)


class Fails(torch.nn.Linear):
    def forward(self, x):
        raise TypeError("of the model")


def make():
    return torch.nn.Linear(4, 4)


def make_failing():
    return Fails(4, 4)


def test_it(gpumem):
    {}  # the call
"""
OURS = re.compile(r"(?:pytest_gpumem|contextlib)\S*\.py:\d+")


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_the_traceback_of_a_wrong_call_ends_in_the_line_of_the_test(project, call):
    project.write(CALLING.format(call))
    result = project.run()
    result.assert_outcomes(failed=1)
    assert not OURS.search(result.stdout.str())
    result.stdout.fnmatch_lines([f">*{call.replace('[', '[[]')}  # the call", "E  *", "", "test_it.py:*: *"])


def test_all_frames_are_there_for_errors_of_the_model_and_on_request(project):
    project.write(CALLING.format("gpumem.infer_step(make_failing, BATCH)"))
    assert OURS.search(project.run().stdout.str())
    project.write(CALLING.format("gpumem.infer_step(make, BATCH, config=3)"))
    assert OURS.search(project.run("--full-trace").stdout.str())
