"""``[tool.gpumem]`` and the options: what they make, which entries hold for a test, and what is said of mistakes."""

from __future__ import annotations

import datetime
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import SettingsError
from pytest_gpumem.base.units import ThroughputLimit
from pytest_gpumem.facts.metrics import METRICS, Tolerance
from pytest_gpumem.judging.gate.baseline import Budget
from pytest_gpumem.measuring.models.lora import Lora
from pytest_gpumem.measuring.models.name import BatchSize, ModelName
from pytest_gpumem.measuring.models.task import INFERENCE, TRAINING, Task
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.plugin.config.models import ModelStep
from pytest_gpumem.plugin.config.own_gpus import own_gpus
from pytest_gpumem.plugin.config.settings import (
    DEFAULT_TOLERANCES,
    KEYS,
    PatternBudget,
    Settings,
    check_device,
    matches_test,
    options_to_repeat,
    read_table,
    settings_from_table,
    settings_of,
)

if TYPE_CHECKING:
    from pathlib import Path

unhurried = settings(deadline=None)
TINY = ModelName("hf-tiny", "org/name")

# Tables


def test_an_empty_table_is_the_defaults():
    assert settings_from_table({}, "here") == Settings()


def test_every_key_of_a_table_is_taken():
    as_they_are = {
        "baseline": True,
        "update": "new",
        "store": "s3://bucket/baselines",
        "device": "auto",
        "strict": True,
        "time": True,
        "processes": False,
        "pack": True,
        "explain": "always",
        "artifacts": "timelines",
        "routing": "worst",
        "units": "iec",
    }
    one = ModelName("hf", "one")
    table = {
        **as_they_are,
        "report": ["gpumem.html", "gpumem.json"],
        "time_budget": "500 ms",
        "tolerance": {"peak_allocated": "2 %", "retained": "0 %"},
        "budget": [{"tests": "tests/test_gpt.py", "max_gb": 6.5}, {"tests": "*", "max_retained": "1 MB"}],
        "models": [
            {"model": "hf-tiny:org/name", "config": ["fp32", "bf16,clip=1"], "max_gb": 1},
            {"model": "hf:one", "batch": 4, "train": False},
            {"model": "hf:one", "generate": 8},
            {"model": "hf:one", "lora": "r=8,alpha=16"},
        ],
        "rank_timeout": "2 min",
        "mark": ["*"],
        "gpus": {"mine": {"memory": "20GB", "capability": "8.9"}},
    }
    assert table.keys() == KEYS.keys()
    assert settings_from_table(table, "here") == Settings(
        **as_they_are,
        report=("gpumem.html", "gpumem.json"),
        time_budget=0.5,
        tolerances={"peak_allocated": Tolerance(0.02), "retained": Tolerance(0.0)},
        budgets=(
            PatternBudget("tests/test_gpt.py", Budget({"peak_allocated": 6_500_000_000})),
            PatternBudget("*", Budget({"retained": 1_000_000})),
        ),
        models=(
            ModelStep(TINY, None, StepConfig("fp32"), TRAINING, {"max_gb": 1}, 0, "hf-tiny:org/name", 0),
            ModelStep(TINY, None, StepConfig("bf16", clip=1), TRAINING, {"max_gb": 1}, 0, "hf-tiny:org/name", 1),
            ModelStep(one, BatchSize(4), StepConfig("fp32"), INFERENCE, {}, 1, "hf:one", 0),
            ModelStep(one, None, StepConfig("fp32"), Task(trains=False, new_tokens=8), {}, 2, "hf:one", 0),
            ModelStep(one, None, StepConfig("fp32"), Task(lora=Lora(8, 16)), {}, 3, "hf:one", 0),
        ),
        rank_timeout=120,
        mark=("*",),
        gpus=own_gpus(table["gpus"], "here"),
    )


def test_settings_from_a_table_cannot_be_changed():
    made = settings_from_table({"tolerance": {"retained": "1 %"}}, "here")
    with pytest.raises(TypeError):
        made.tolerances["retained"] = Tolerance(1.0)
    with pytest.raises(AttributeError):
        made.strict = True


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"basline": True}, "here: unknown key 'basline'; did you mean 'baseline'?"),
        (
            {"zebra": 1},
            (
                "here: unknown key 'zebra'; valid: baseline, update, device, store, strict, explain, artifacts, "
                "report, time, rank_timeout, processes, pack, routing, units, time_budget, tolerance, budget, mark, gpus, models"
            ),
        ),
        ({"baseline": 1}, "here: baseline is 1, expected true or false"),
        ({"store": 5}, "here: store is 5, expected a string"),
        ({"rank_timeout": True}, "here: rank_timeout is True, expected a number of seconds or a string"),
        (
            {"rank_timeout": 0},
            "here: rank_timeout is 0, expected a duration above zero: '300 s' or '10 min'",
        ),
        ({"rank_timeout": float("nan")}, "here: rank_timeout is nan, expected a duration above zero"),
        ({"rank_timeout": 10**400}, "expected a duration above zero"),
        ({"store": ""}, "here: store is empty, expected a folder or a URL"),
        ({"update": "impoved"}, "here: update is 'impoved'; did you mean 'improved'?"),
        ({"routing": "foo"}, "here: routing is 'foo'; valid: balanced, worst"),
        ({"units": "kB"}, "here: units is 'kB'; valid: si, iec"),
        ({"time_budget": "2"}, "here: time_budget: '2' is not a duration; write it like '2 s'"),
        (
            {"time_budget": "0 s"},
            "here: time_budget: '0 s' is not a duration above zero; to switch timing off, use --no-gpumem-time",
        ),
        ({"report": "gpumem.html"}, "here: report is 'gpumem.html', expected an array"),
        ({"report": ["gpumem.txt"]}, "here: report: 'gpumem.txt' has to end with .sarif, .json, .md or .html"),
        (
            {"report": ["-"]},
            "here: report: '-' is not a file, and pytest itself writes to standard output; name a file that ends with .sarif, ",
        ),
        (
            {"report": ["a.json", "gpumem.xml"]},
            "here: report: 'gpumem.xml' has to end with .sarif, .json, .md or .html; for JUnit XML, use pytest's --junitxml=FILE",
        ),
        ({"tolerance": "2 %"}, "here: tolerance is '2 %', expected a table"),
        ({"tolerance": {"peak_forward": "2 %"}}, "here: tolerance: unknown metric 'peak_forward'; "),
        (
            {"tolerance": {"peak_alocated": "2 %"}},
            "here: tolerance: unknown metric 'peak_alocated'; did you mean 'peak_allocated'?",
        ),
        (
            {"tolerance": {"peak_allocated": 0.02}},
            "here: tolerance.peak_allocated: 0.02 is not a percentage; write it like '2 %'",
        ),
        ({"budget": {"tests": "*", "max_gb": 1}}, "expected an array of tables"),
        ({"budget": ["*"]}, "here: budget 1 is '*', expected a table: [[tool.gpumem.budget]]"),
        (
            {"budget": [{"max_gb": 1}]},
            'here: budget 1 needs tests, a pattern of test ids, like tests = "tests/test_gpt.py::*"',
        ),
        (
            {"budget": [{"test": "*", "max_gb": 1}]},
            "here: budget 1 needs tests, a pattern of test ids; did you mean tests instead of 'test'?",
        ),
        ({"budget": [{"tests": "*"}]}, "here: budget 1 (tests = '*') sets no limit; write max_gb = 6.5, say"),
        (
            {"budget": [{"tests": "a", "max_gb": 1}, {"tests": "b", "max_gbs": 1}]},
            "here: budget 2 (tests = 'b'): unknown argument 'max_gbs'; did you mean 'max_gb'?",
        ),
        ({"models": {"model": "hf:a/b"}}, "here: models is {'model': 'hf:a/b'}, expected an array of tables"),
        ({"models": ["hf:a/b"]}, "here: models 1 is 'hf:a/b', expected a table: [[tool.gpumem.models]]"),
        ({"models": [{"batch": "4"}]}, 'here: models 1 needs the key model, like model = "hf-tiny:'),
        (
            {"models": [{"model": "gpt2"}]},
            "here: models 1: model is 'gpt2', expected the name of a model: hf:ORG/NAME, hf-tiny:ORG/NAME",
        ),
        ({"models": [{"model": "hf:"}]}, "here: models 1: model: 'hf:' names no model; write hf:ORG/NAME"),
        (
            {"models": [{"model": "hf:a"}, {"model": "hf:b", "batch": "4*16"}]},
            "here: models 2 (model = 'hf:b'): '4*16' is not a batch size: write SAMPLES like 32, SAMPLESxTOKENS like 4x4096",
        ),
        ({"models": [{"model": "hf:a", "batch": True}]}, "(model = 'hf:a'): 'True' is not a batch size"),
        ({"models": [{"model": "hf:a", "batch": [4, 16]}]}, "(model = 'hf:a'): '[4, 16]' is not a batch size"),
        (
            {"models": [{"model": "hf:a", "config": "amp-bf17"}]},
            "here: models 1 (model = 'hf:a'): step config 'amp-bf17': unknown precision 'amp-bf17'; did you mean 'amp-bf16'?",
        ),
        ({"models": [{"model": "hf:a", "config": 16}]}, "(model = 'hf:a'): 16 is no step config; write a text like"),
        (
            {"models": [{"model": "hf:a", "config": []}]},
            "(model = 'hf:a'): config is empty, so the entry makes no test",
        ),
        (
            {"models": [{"model": "hf:a", "train": False, "config": "bf16,accumulate=2"}]},
            "(model = 'hf:a'): step config 'bf16,accumulate=2': accumulate does nothing in gpumem.infer_step",
        ),
        (
            {"models": [{"model": "hf:a", "train": 1}]},
            "(model = 'hf:a'): train is 1, expected true for a training step, or false",
        ),
        *(
            (
                {"models": [{"model": "hf:a", "generate": n}]},
                f"(model = 'hf:a'): generate is {n!r}, expected a whole number",
            )
            for n in (0, True, 2.5, "8 tokens")
        ),
        (
            {"models": [{"model": "hf:a", "lora": 8}]},
            "(model = 'hf:a'): lora is 8, expected its settings, like lora = \"r=8\"",
        ),
        ({"models": [{"model": "hf:a", "lora": "rank=8"}]}, "(model = 'hf:a'): LoRA has no setting 'rank' here"),
        (
            {"models": [{"model": "hf:a", "generate": 8, "train": True}]},
            "(model = 'hf:a'): generate measures inference; leave train = true out",
        ),
        *(
            ({"models": [{"model": "hf:a", "lora": "r=8", **more}]}, f"the plain model: leave lora or {word} out")
            for word, more in (("generate", {"generate": 8}), ("train = false", {"train": False}))
        ),
        (
            {"models": [{"model": "timm:a", "generate": 8}]},
            "(model = 'timm:a'): timm:a generates no tokens; only models from hf: and hf-tiny: do",
        ),
        (
            {"models": [{"model": "hf:a", "generate": 8, "config": "cache=on"}]},
            "(model = 'hf:a'): step config 'cache=on': generate() uses a cache by default; leave cache=on out",
        ),
        (
            {"models": [{"model": "hf:a", "generate": 8, "config": "clip=1"}]},
            "(model = 'hf:a'): step config 'clip=1': clip does nothing in gpumem.infer_step",
        ),
        (
            {"models": [{"model": "hf:a", "max_gbs": 1}]},
            "(model = 'hf:a'): unknown key 'max_gbs'; did you mean 'max_gb'?",
        ),
        (
            {"models": [{"model": "hf:a", "infer": 1}]},
            "unknown key 'infer'; valid: model, batch, config, train, generate, lora, max_gb",
        ),
        ({"models": [{"model": "hf:a", "max_gb": "1"}]}, "here: models 1 (model = 'hf:a'): max_gb: "),
        (
            {"models": [{"model": "hf:a"}, {"model": "hf:a", "config": ["bf16", "fp32"]}]},
            "here: models 2 (model = 'hf:a') and models 1 both make the test hf:a[fp32]: remove one entry",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_would_be_right(table, message):
    with pytest.raises(SettingsError, match=re.escape(message)) as caught:
        settings_from_table(table, "here")
    assert str(caught.value).startswith("here")


@pytest.mark.parametrize(("written", "seconds"), [(0.5, 0.5), ("300", 300), ("300 s", 300), ("5 min", 300)])
def test_the_seconds_of_ranks_are_a_number_or_a_duration(written, seconds):
    assert settings_from_table({"rank_timeout": written}, "here").rank_timeout == seconds


def test_limits_of_speed_are_set_by_a_pattern_of_tests():
    entry = {"tests": "tests/*", "max_slowdown": "30 %", "min_throughput": "8 steps/s"}
    budget = settings_from_table({"budget": [entry]}, "here").budget_for("tests/test_gpt.py::test_a")
    assert budget == Budget(max_slowdown=0.3, min_throughput=ThroughputLimit(8, "steps"))


def test_every_judged_metric_takes_a_tolerance():
    table = dict.fromkeys(DEFAULT_TOLERANCES, "3 %")
    assert settings_from_table({"tolerance": table}, "here").tolerances == dict.fromkeys(table, Tolerance(0.03))
    assert set(DEFAULT_TOLERANCES) == {name for name, metric in METRICS.items() if metric.tolerance is not None}


# What a TOML document can hold: no None, keys are strings.
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["new", "si", "cpu", "2 %", "1 GB", "-1 GB", "*", "1 %%"])
    | st.dates()
    | st.datetimes(timezones=st.just(datetime.timezone.utc))
)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)
LIMITS = st.sampled_from(["max_gb", "max_memory", "max_reserved", "max_retained", "tolerance", "device", "max_gbs"])
BUDGETS = st.fixed_dictionaries(
    {}, optional={"tests": st.sampled_from(["*", "tests/*", ""]) | VALUES}
) | st.dictionaries(LIMITS, SCALARS, max_size=3).map(lambda limits: {"tests": "*", **limits})
MODELS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["hf:org/name", "hf-tiny:org/name", "hf:", "org/name"]) | VALUES,
        "batch": st.sampled_from(["4x16", "4*16", 4]) | VALUES,
        "config": st.sampled_from(["fp32", "bf16,clip=1", ["fp32", "amp-bf16"]]) | VALUES,
        "train": st.booleans() | VALUES,
        "generate": st.integers(-1, 2) | VALUES,
        "lora": st.sampled_from(["r=8", "r=8,alpha=x"]) | VALUES,
    },
) | st.dictionaries(LIMITS, SCALARS, max_size=3).map(lambda limits: {"model": "hf:org/name", **limits})
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "baseline": st.booleans() | VALUES,
        "update": st.sampled_from(["new", "improved", "all", "none"]) | VALUES,
        "store": VALUES,
        "device": VALUES,
        "gpus": VALUES | st.dictionaries(st.text(max_size=8), VALUES, max_size=2),
        "strict": st.booleans() | VALUES,
        "time": st.booleans() | VALUES,
        "processes": st.booleans() | VALUES,
        "pack": st.booleans() | VALUES,
        "explain": st.sampled_from(["on-failure", "always", "never", "on_failure"]) | VALUES,
        "artifacts": VALUES,
        "routing": st.sampled_from(["balanced", "worst"]) | VALUES,
        "units": st.sampled_from(["si", "iec"]) | VALUES,
        "tolerance": st.dictionaries(st.sampled_from([*METRICS, "peak"]), SCALARS, max_size=3) | VALUES,
        "budget": st.lists(BUDGETS | VALUES, max_size=3) | VALUES,
        "models": st.lists(MODELS | VALUES, max_size=3) | VALUES,
        "baselines": VALUES,
    },
)


@settings(unhurried, max_examples=300)
@given(TABLES | st.dictionaries(st.text(max_size=8), VALUES, max_size=3))
@example({"budget": [{"tests": "*", "max_gb": 1e300}]})
@example({"budget": [{"tests": "*", "max_memory": "9" * 400 + " GB"}]})
def test_any_table_makes_settings_or_a_settings_error(table):
    try:
        made = settings_from_table(table, "here")
    except SettingsError as error:
        made = str(error)
    if isinstance(made, str):
        assert made.startswith("here")
    else:
        read_further = {"tolerance", "budget", "models"}
        assert {name: getattr(made, name) for name in table.keys() - read_further} == {
            name: value for name, value in table.items() if name not in read_further
        }
        assert made.tolerances.keys() == table.get("tolerance", {}).keys()
        assert [entry.tests for entry in made.budgets] == [entry["tests"] for entry in table.get("budget", [])]
        assert {step.written for step in made.models} == {entry["model"] for entry in table.get("models", [])}


# Files


def test_a_project_without_a_pyproject_says_nothing(tmp_path):
    assert read_table(tmp_path / "pyproject.toml") is None


@pytest.mark.parametrize("text", ["", "[tool.pytest.ini_options]\n", "# gpumem\n[tool.other]\n"])
def test_a_pyproject_without_the_table_says_nothing(tmp_path, text):
    path = tmp_path / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    assert read_table(path) is None


def test_the_table_is_read_as_it_stands(tmp_path):
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[tool.gpumem]\ndevice = "cpu"\n[[tool.gpumem.budget]]\ntests = "*"\nmax_gb = 1\n', encoding="utf-8"
    )
    assert read_table(path) == {"device": "cpu", "budget": [{"tests": "*", "max_gb": 1}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.gpumem\n", "pyproject.toml: not TOML: "),
        ("[tool]\ngpumem = 5\n", "pyproject.toml: [tool.gpumem] is 5, expected a table"),
        ("[[tool.gpumem]]\nstrict = true\n", "pyproject.toml: [tool.gpumem] is [{'strict': True}], expected a table"),
        ("tool = 'gpumem'\n", "pyproject.toml"),
    ],
)
def test_a_pyproject_that_cannot_be_understood_is_named(tmp_path, text, message):
    path = tmp_path / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}"):
        read_table(path)


# Options over the table


def config_of(root: Path, started_in: Path | None = None, **options):
    """As much of pytest's config as the settings are made of."""
    return SimpleNamespace(
        rootpath=root,
        invocation_params=SimpleNamespace(dir=started_in or root, args=[f"--gpumem-{name}" for name in options]),
        getoption=lambda name: options.get(name.removeprefix("gpumem_")),
    )


def write_table(root: Path, text: str) -> None:
    (root / "pyproject.toml").write_text(f"[tool.gpumem]\n{text}", encoding="utf-8")


def test_without_options_and_table_nothing_was_said(tmp_path):
    made = settings_of(config_of(tmp_path))
    assert made == Settings(store_base=tmp_path, artifacts_base=tmp_path, report_base=tmp_path, model_base=tmp_path)
    assert not made.explicit


def test_an_empty_table_is_something_said(tmp_path):
    write_table(tmp_path, "")
    assert settings_of(config_of(tmp_path)).explicit


@pytest.mark.parametrize(("option", "expected"), [("store", "a folder or a URL"), ("artifacts", "a folder")])
def test_an_option_for_a_place_that_is_empty_is_a_mistake(tmp_path, option, expected):
    with pytest.raises(SettingsError, match=f"^--gpumem-{option} is empty, expected {expected}$"):
        settings_of(config_of(tmp_path, **{option: ""}))


def test_options_go_before_the_table_and_leave_the_rest(tmp_path):
    write_table(tmp_path, 'device = "cpu"\nstrict = true\nupdate = "new"\nunits = "iec"\n')
    made = settings_of(config_of(tmp_path, device="cuda", update="all", baseline=True))
    assert made == Settings(
        baseline=True,
        update="all",
        device="cuda",
        strict=True,
        units="iec",
        store_base=tmp_path,
        artifacts_base=tmp_path,
        report_base=tmp_path,
        model_base=tmp_path,
        explicit=True,
    )


@pytest.mark.parametrize(
    ("option", "in_table", "typed"),
    [
        ("store", "in-table", "typed"),
        ("artifacts", "in-table", "typed"),
        ("report", ["in-table.html"], ["a.md", "b.json"]),
    ],
)
def test_a_place_in_the_table_counts_from_the_root_and_one_that_is_typed_from_there(tmp_path, option, in_table, typed):
    write_table(tmp_path, f"{option} = {in_table!r}\n")
    below = tmp_path / "below"
    for given_options, value, base in (({}, in_table, tmp_path), ({option: typed}, typed, below)):
        made = settings_of(config_of(tmp_path, below, **given_options))
        assert getattr(made, option) == (tuple(value) if option == "report" else value)
        bases = {name: getattr(made, f"{name}_base") for name in ("store", "artifacts", "report")}
        assert bases == {**dict.fromkeys(bases, tmp_path), option: base}


def test_a_report_in_no_known_format_is_a_mistake_before_anything_runs(tmp_path):
    with pytest.raises(SettingsError, match=r"^--gpumem-report: 'a.pdf' has to end with .sarif, .json, .md or .html$"):
        settings_of(config_of(tmp_path, report=["a.pdf"]))


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        (" flash attention\n off until #12 ", "flash attention off until #12"),
        ("off\udcff until\x00 'x\"", "off\\udcff until\x00 'x\""),
    ],
)
def test_a_reason_is_one_line_of_characters_that_a_file_can_hold(tmp_path, typed, reason):
    assert settings_of(config_of(tmp_path, update="all", reason=typed)).reason == reason


def test_a_reason_needs_something_that_it_is_the_reason_of(tmp_path):
    with pytest.raises(SettingsError, match="add --gpumem-update=all"):
        settings_of(config_of(tmp_path, reason="flash attention off"))
    with pytest.raises(SettingsError, match="--gpumem-reason is empty"):
        settings_of(config_of(tmp_path, update="all", reason=" "))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda"}, "this session measures on cuda: add --gpumem-device=emulated:h100"),
        ({}, "this session measures on cuda"),
        ({"device": "emulated:h100"}, "has no effect without a comparison: add --gpumem-baseline"),
        ({"device": "emulated:h100", "baseline": True, "update": "all"}, "leave --gpumem-update=all out"),
        ({"device": "emulated:h100", "against": "emulated-h100-80gb"}, "does not name a real GPU"),
    ],
)
def test_what_cannot_be_held_against_a_real_gpu_is_a_mistake(tmp_path, options, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        settings_of(config_of(tmp_path, **{"against": "nvidia-h100", **options}))


def test_an_emulated_gpu_is_compared_with_a_real_one_where_that_is_named(tmp_path):
    made = settings_of(config_of(tmp_path, device="emulated:h100", baseline=True, against="nvidia-h100"))
    assert made.compared_slug("emulated-h100-80gb") == "nvidia-h100"
    assert Settings().compared_slug("emulated-h100-80gb") == "emulated-h100-80gb"


def test_an_unknown_device_is_told_with_the_nearest():
    with pytest.raises(SettingsError, match=r"^--gpumem-device=cud: no such device; did you mean 'cuda'\?$"):
        check_device(Settings(device="cud"), ["cuda", "cpu", "auto"])


def test_a_command_repeats_the_options_that_decide_what_is_measured(tmp_path):
    given_options = options_to_repeat(
        config_of(tmp_path, device="cpu", store="a b", strict=True, baseline=True, explain="never", artifacts="here")
    )
    assert given_options == ["--gpumem-device=cpu", "--gpumem-store=a b", "--gpumem-explain=never"]
    assert options_to_repeat(config_of(tmp_path)) == []
    with_password = config_of(tmp_path, store="sftp://me:secret@host/baselines")
    assert options_to_repeat(with_password) == ["--gpumem-store=sftp://***@host/baselines"]
    # A real GPU's baselines are written there.
    assert options_to_repeat(config_of(tmp_path, device="emulated:h100", against="nvidia-h100")) == [
        "--gpumem-device=cuda"
    ]


# Budgets by pattern


@pytest.mark.parametrize(
    ("pattern", "nodeid"),
    [
        ("tests/test_gpt.py", "tests/test_gpt.py::test_train"),
        ("tests/test_gpt.py", "tests/test_gpt.py::TestTrain::test_step[fp32]"),
        ("tests/test_gpt.py::test_train[a::b]", "tests/test_gpt.py::test_train[a::b]"),
        ("tests/test_gpt.py::test_*[amp-*]", "tests/test_gpt.py::test_train[amp-bf16]"),
        ("tests/*", "tests/deep/test_gpt.py::test_train"),
        ("*::test_train", "tests/test_gpt.py::test_train"),
        ("tests/test_?pt.py", "tests/test_gpt.py::test_train"),
    ],
)
def test_a_pattern_matches(pattern, nodeid):
    assert matches_test(pattern, nodeid)


@pytest.mark.parametrize(
    ("pattern", "nodeid"),
    [
        ("tests/test_gpt.py", "tests/test_gpt.pyx::test_train"),
        ("test_gpt.py", "tests/test_gpt.py::test_train"),
        ("tests/test_gpt.py::test_train", "tests/test_gpt.py::test_training"),
        ("tests/test_gpt.py::test_train", "tests/test_gpt.py::test_train[fp32]"),
        # A set of characters it is not: this would match fnmatch's [amp].
        ("tests/test_gpt.py::test_train[amp]", "tests/test_gpt.py::test_traina"),
        ("TESTS/*", "tests/test_gpt.py::test_train"),
    ],
)
def test_a_pattern_does_not_match(pattern, nodeid):
    assert not matches_test(pattern, nodeid)


NODE_IDS = st.lists(st.text("abc[]-*?!.:/é ", min_size=1, max_size=8), min_size=1, max_size=3).map("::".join)


@unhurried
@given(NODE_IDS)
def test_a_node_id_matches_itself_whatever_characters_it_has(nodeid):
    assert matches_test(nodeid, nodeid)


@unhurried
@given(NODE_IDS, st.text("abc[]-!", min_size=1, max_size=6))
def test_a_pattern_without_wildcards_matches_what_it_names_and_what_is_in_it(nodeid, pattern):
    inside = nodeid == pattern or nodeid.startswith(f"{pattern}::")
    assert matches_test(pattern, nodeid) == inside


def test_the_first_entry_that_sets_a_limit_wins():
    made = settings_from_table(
        {
            "budget": [
                {"tests": "tests/test_gpt.py::test_train", "max_gb": 1},
                {"tests": "tests/*", "max_gb": 2, "max_retained": "2 MB"},
                {"tests": "*", "max_gb": 3, "max_retained": "3 MB", "tolerance": "3 %"},
            ]
        },
        "here",
    )
    assert made.budget_for("tests/test_gpt.py::test_train") == Budget(
        {"peak_allocated": 1_000_000_000, "retained": 2_000_000}, tolerance=0.03
    )
    assert made.budget_for("tests/test_gpt.py::test_other").limits["peak_allocated"] == 2_000_000_000
    assert made.budget_for("other.py::test_other").limits["peak_allocated"] == 3_000_000_000
