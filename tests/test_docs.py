"""The documentation is true: it names what there is and nothing else, and its examples run.

A Python block below a line with the name of its file is a whole file. Such blocks of one section are one project.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import click
import pytest

import pytest_gpumem
from pytest_gpumem import Composition, Explanation, Measurement, Row, StepConfig, hookspecs
from pytest_gpumem.baselines import url_backend
from pytest_gpumem.baselines.format import parse, render
from pytest_gpumem.cli.ab import ab
from pytest_gpumem.cli.advise import advise
from pytest_gpumem.cli.doctor import doctor
from pytest_gpumem.cli.fit import fit
from pytest_gpumem.cli.init import init
from pytest_gpumem.cli.main import main
from pytest_gpumem.cli.run import run
from pytest_gpumem.config.marker_arguments import MARKER_ARGUMENTS
from pytest_gpumem.config.options import EXPLAIN_MODES, OPTIONS
from pytest_gpumem.config.settings import KEYS, Settings, read_table, settings_from_table
from pytest_gpumem.fixture import Gpumem
from pytest_gpumem.gate.difference import difference
from pytest_gpumem.gate.graph_changes import GraphChange
from pytest_gpumem.gate.verdict import Outcome
from pytest_gpumem.metrics import METRICS, Tolerance
from pytest_gpumem.relations.estimate import Estimate
from pytest_gpumem.relations.gradients import DEFAULT_TOLERANCES
from pytest_gpumem.reports.explanation import change_table, part_lines
from pytest_gpumem.step_config.config import (
    _NOT_IN,
    AXES,
    CACHES,
    CHECKPOINTS,
    COMPILES,
    OPTIMIZERS,
    PRECISIONS,
    WEIGHTS,
    ZERO_GRADS,
    combinations,
)
from pytest_gpumem.units import parse_ratio, parse_size
from pytest_gpumem.values.composition import CATEGORIES, REST, CompositionError, row_from_text
from pytest_gpumem.values.module_calls import Calls
from pytest_gpumem.values.option_words import UPDATE_MODES
from tests.pages import FENCE, HEADING, PAGES, ROOT, blocks, blocks_of, read

FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+|[\w-]+\.(?:py|c|toml|json|yml|md))`")
"""A path with a folder, or the name of a file."""
MADE_BY_MAKE = ("build/", "dist/")


def without_recipes(text: str) -> str:
    """A page without its recipes, whose files and options are made by whoever follows them: tests/recipes."""
    return re.sub(r"^## Recipes$.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)


def section_of(page: str, heading: str) -> str:
    """The text under a second-level heading."""
    return re.split(rf"^## {re.escape(heading)}$", read(page), flags=re.MULTILINE)[1].split("\n## ")[0]


def subsection_of(page: str, heading: str, name: str) -> str:
    """The text under a third-level heading of a section."""
    return re.split(rf"^### {re.escape(name)}$", section_of(page, heading), flags=re.MULTILINE)[1].split("\n### ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in ``text``, row by row, headers included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def named_rows(text: str) -> dict[str, list[str]]:
    """The other cells of each row, by the name in backticks in its first cell."""
    return {cells[0].strip("`"): cells[1:] for cells in rows(text) if cells[0].startswith("`")}


def type_and_default(key: str) -> list[str]:
    """What the reference says of the value of a key, or of an option that is none."""
    defaults = Settings()
    durations = {name: f'`"{getattr(defaults, name):g} s"`' for name in ("time_budget", "rank_timeout")}
    default = getattr(defaults, key, None)
    nothing = "`false`" if default is False else "see [Metrics](#metrics)" if key == "tolerance" else "none"
    expected = KEYS[key].expected.removeprefix("a ").removeprefix("an ") if key in KEYS else "none"
    return [expected, durations.get(key) or (f'`"{default}"`' if default else nothing)]


def test_the_reference_has_every_option_with_its_key_and_default():
    table = named_rows(section_of("docs/reference.md", "Options"))
    told = {name.partition("=")[0]: cells[:2] for name, cells in table.items() if name.startswith("--")}
    expected = {}
    for option in OPTIONS:
        kind, default = type_and_default(option.name)
        expected[option.flag] = [f"`{option.name}`: {kind}" if option.is_key else "-", default]
    assert told == expected


def test_the_reference_has_every_setting_that_is_no_option_with_its_type_and_default():
    table = named_rows(section_of("docs/reference.md", "Settings"))
    only_keys = KEYS.keys() - {option.name for option in OPTIONS}
    assert {key: cells[:2] for key, cells in table.items()} == {key: type_and_default(key) for key in only_keys}


@pytest.mark.parametrize("page", ["docs/reference.md", "docs/ci.md", "CONTRIBUTING.md"])
def test_the_contents_of_a_page_are_its_sections(page):
    text = FENCE.sub("", read(page))
    links = re.findall(r"\]\(#([^)]+)\)", text.partition("\n## ")[0])
    sections = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    ]
    assert [link for link in links if link in sections] == sections


def test_tables_of_measurements_in_the_docs_have_columns_that_are_printed():
    printed = {
        metric.short or name.replace("_", " ") for name, metric in METRICS.items() if metric.shown != "in details"
    }
    headers = [
        re.split(r"  +", line.strip())
        for block in blocks("text")
        for line in block.text.splitlines()
        if re.match(r"test {3,}", line) and line.endswith("verdict")
    ]
    measurements = [header for header in headers if "metric" not in header]
    assert len(measurements) >= 2
    for header in measurements:
        assert {*header} <= {"test", "peak", "change", "verdict", *printed}


def test_no_page_speaks_of_an_option_that_does_not_exist():
    said = {
        option for page in PAGES for option in re.findall(r"--gpumem-[a-z]+(?:-[a-z]+)*", without_recipes(read(page)))
    }
    assert said <= {option.flag for option in OPTIONS}


COMMAND = re.compile(r"^(?:- run: |\$ |\s)*gpumem (?=[a-z]+ )(.+?)(?: {2,}#.*)?$", flags=re.MULTILINE)
GUIDE_COMMANDS = sorted(
    {
        line
        for page in PAGES
        for fence in FENCE.finditer(without_recipes(read(page)))
        if fence["language"] != "text"
        for line in COMMAND.findall(fence["text"])
    }
)


@pytest.mark.parametrize("line", GUIDE_COMMANDS)
def test_every_command_in_the_pages_is_one_that_the_program_takes(line, tmp_path, monkeypatch):
    """With the files that it names; what each does is shown by the tests of the command."""
    monkeypatch.chdir(tmp_path)
    command, context, words = main, None, shlex.split(line.replace("*", "1"))
    for word in words:
        if word.endswith((".json", ".py")):
            (tmp_path / word.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word.lstrip("/")).touch()
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context, info_name="gpumem")
        command = command.get_command(context, words.pop(0))
        assert command is not None, line
    command.make_context(command.name, words, parent=context)


def test_the_reference_has_every_update_mode():
    header = next(cells for cells in rows(section_of("docs/reference.md", "Options")) if cells[0] == "")
    assert header[1:] == [f"`{mode}`" for mode in UPDATE_MODES]


def test_the_reference_has_every_argument_of_the_marker_and_the_metric_it_holds():
    table = named_rows(section_of("docs/reference.md", "Marker"))
    holds = {name: cells[1].strip("`") for name, cells in table.items()}
    limits = {name: target for name, (target, _) in MARKER_ARGUMENTS.items()}
    limits["tolerance"], limits["max_slowdown"], limits["device"] = "peak_allocated", "step_time", ""
    limits["min_throughput"] = "throughput"
    assert holds == limits


def test_the_reference_has_every_metric_with_its_unit_and_tolerance():
    table = named_rows(section_of("docs/reference.md", "Metrics"))
    assert list(table) == list(METRICS)
    for name, cells in table.items():
        assert cells[0] == METRICS[name].unit
        assert tolerance(cells[-1]) == METRICS[name].tolerance


def tolerance(text: str) -> Tolerance | None:
    """What a cell such as ``"0.5 %, at least 1 MB"`` says."""
    if text in ("not judged", "by `min_throughput` only"):
        return None
    if text == "none at all":
        return Tolerance(0.0)
    plain = text.replace("[up to 40 MiB](#what-reserved-bytes-may-vary-by)", "40 MiB")
    relative, *absolute = plain.removesuffix(", [and more](#step-time)").split(", at least ")
    return Tolerance(parse_ratio(relative), *map(parse_size, absolute))


def test_the_reference_has_every_verdict_in_the_order_of_their_weight():
    assert list(named_rows(section_of("docs/reference.md", "Verdicts"))) == [outcome.value for outcome in Outcome]


def test_the_guide_says_what_to_do_about_every_verdict():
    table = named_rows(section_of("docs/guide/verdicts.md", "What to do about each verdict"))
    assert list(table) == [outcome.words for outcome in Outcome]


def test_the_reference_has_every_hook_with_its_arguments():
    hooks = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("pytest_gpumem_")}
    expected = [f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in hooks.items()]
    assert list(named_rows(section_of("docs/reference.md", "Hooks"))) == expected


def test_the_reference_has_every_method_of_the_fixture_with_its_arguments():
    said = re.findall(r"^### `gpumem\.(.+)`$", section_of("docs/reference.md", "Fixture"), flags=re.MULTILINE)
    members = {name: member for name, member in vars(Gpumem).items() if not name.startswith("_")}
    expected = {name if isinstance(member, property) else name + arguments(member) for name, member in members.items()}
    assert set(said) == expected


def arguments(method) -> str:
    """The signature without ``self``, types, and what only takes wrong keyword arguments."""
    signature = inspect.signature(method)
    told = {name: value for name, value in signature.parameters.items() if name not in ("self", "unknown")}
    bare = [value.replace(annotation=value.empty) for value in told.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


@pytest.mark.parametrize(("value", "section"), [(Measurement, "Measurement"), (Estimate, "Fixture")])
def test_the_reference_has_every_attribute_of_a_measurement_and_an_estimate(value, section):
    text = section_of("docs/reference.md", section)
    public = {name for name in dir(value) if not name.startswith("_")}
    assert {name for name in public if f"`{name}`" not in text} == set()


def test_the_reference_imports_every_public_name():
    imported = re.findall(r"`from pytest_gpumem import (.+?)`", read("docs/reference.md"))
    assert {name for names in imported for name in names.split(", ")} == set(pytest_gpumem.__all__) - {"__version__"}
    assert all(hasattr(pytest_gpumem, name) for name in pytest_gpumem.__all__)


@pytest.mark.parametrize("value", [Composition, Explanation, Row])
def test_the_reference_has_every_attribute_of_what_explains_a_peak(value):
    table = section_of("docs/reference.md", "Composition").partition(f"| attribute of `{value.__name__}` |")[2]
    told = re.findall(r"`(\w+)`", " ".join(cells[0] for cells in rows(table.partition("\n\n")[0])))
    public = {name for name in dir(value) if not name.startswith("_")} - {"text"}
    assert set(told) == public


def test_the_reference_has_the_rule_of_every_category():
    table = rows(section_of("docs/reference.md", "Composition").partition("The first that holds")[2])
    assert set(re.findall(r"`(.+?)`", " ".join(cells[0] for cells in table))) == set(CATEGORIES)


def test_the_reference_has_the_text_of_a_row_as_it_is_read():
    with pytest.raises(CompositionError) as refused:
        row_from_text("activation")
    form = str(refused.value).partition("expected 7: ")[2]
    assert f"`{form}`" in section_of("docs/reference.md", "Store")


def test_the_guide_has_every_mode_of_explaining():
    table = rows(section_of("docs/guide/read-a-failure.md", "When it is recorded, and what it costs"))
    assert [re.findall(r"`(.+?)`", cells[0])[0] for cells in table[1:]] == list(EXPLAIN_MODES)
    assert (
        "(the default)" in dict(zip(EXPLAIN_MODES, [cells[0] for cells in table[1:]], strict=True))[Settings().explain]
    )


def test_the_reference_has_every_key_of_a_timeline(project):
    project.write(
        "def test_it(gpumem):\n    gpumem.train_step(torch.nn.Linear(8, 8), torch.ones(8, 8), loss=lambda y, _: y.sum())\n"
    )
    project.run("--gpumem-explain=always", "--gpumem-artifacts=kept", "--no-gpumem-time").assert_outcomes(passed=1)
    (file,) = (project.path / "kept").iterdir()
    timeline = json.loads(file.read_text(encoding="utf-8"))
    table = named_rows(section_of("docs/reference.md", "Timeline"))
    assert list(table) == list(timeline)
    assert table["format"] == [str(timeline["format"])]
    assert all(f"`{key}`" in table["phases"][0] for key in timeline["phases"][0])
    assert set(timeline["categories"]) <= set(CATEGORIES)
    moments = zip(*timeline["categories"].values(), strict=True)
    assert [sum(moment) for moment in moments] == timeline["total"]
    assert timeline["total"][timeline["peak"]] == max(timeline["total"])


def activation(
    operator: str = "mul", count: int = 1, tensor: str = "float32[8, 256]", category: str = "activation"
) -> Row:
    """A row of a module at a line."""
    bits = math.prod(int(number) for number in re.findall(r"\d+", tensor))
    return Row(category, count * bits // 8, "blocks.*", "model.py:8", "", operator, tensor, count)


HALF, WHOLE = "bfloat16[8, 256]", "float32[8, 256]"
REASONS = [
    ([activation(tensor=HALF)], [activation(tensor=WHOLE)]),
    ([activation(tensor=HALF)], [activation(tensor="float16[8, 256]", count=2)]),
    ([activation(tensor=HALF)], [activation(tensor=HALF), activation("to", tensor=WHOLE)]),
    ([], [activation("clone")]),
    ([activation(count=4)], [activation(count=4), activation("tanh", count=4)]),
    ([activation(count=24)], [activation(count=48)]),
    (
        [replace(activation(), nbytes=9000), Row("activation", 20, operator=REST, count=2)],
        [
            replace(activation(), nbytes=9000),
            Row("activation", 10, site="a.py:1"),
            Row("activation", 500, site="b.py:1"),
        ],
    ),
    ([activation(tensor="float32[2048, 512]")], [activation(tensor="float32[4096, 512]")]),
    ([activation(category="temporary")], [activation(count=2)]),
    ({"recomputed": {"blocks.*": 4}}, {"recomputed": {"blocks.*": 2}}),
]
"""What a composition was and is, for each reason that the guide tells of, in its order."""
GRAPH_CHANGES = [
    GraphChange("no_grad", "teacher", ("models.py:41",), Calls(1, 1), Calls(0, 1)),
    GraphChange("no_grad", "Net", ("train.py:12", "train.py:13"), Calls(1, 2), Calls(0, 2)),
    GraphChange("no_grad", "step()", ("train.py:20",), Calls(4, 11), Calls(0, 11)),
    GraphChange("no_backward", "teacher", ("models.py:41",), Calls(1, 1), Calls(0, 1)),
]


def test_the_reasons_in_the_guide_are_those_that_are_given():
    told = named_rows(section_of("docs/guide/read-a-failure.md", "What grew").partition("Reasons:")[2])
    given = []
    for before, after in REASONS:
        if isinstance(before, dict):
            old, new = Composition(0, (), **before), replace(composed([activation()]), **after)
        else:
            old, new = composed(before), composed(after)
        given.append(next(change.reason for change in difference(old, new).changes if change.nbytes > 0))
    assert list(told) == given


def test_the_sentences_before_what_grew_are_in_the_guide():
    text = section_of("docs/guide/read-a-failure.md", "What grew").partition("Reasons:")[2]
    told = [cells[0] for cells in rows(text.partition("Autograd:")[2])]
    assert told[1:] == [change.sentence for change in GRAPH_CHANGES]


def composed(rows_of_it: list[Row]) -> Composition:
    return Composition(sum(row.nbytes for row in rows_of_it), tuple(rows_of_it))


def test_the_guide_has_every_column_of_what_grew():
    told = [
        cells[0] for cells in rows(section_of("docs/guide/read-a-failure.md", "What grew").partition("Reasons:")[0])
    ]
    change = difference(composed([activation(tensor=HALF)]), composed([activation(tensor=WHOLE)]))
    header = re.split("  +", part_lines(change_table(change, "si"))[0].strip())
    assert ", ".join(told[1:-1]) == ", ".join(header)
    assert told[-1] == "the last"


def test_the_reference_has_the_tolerance_of_gradients_of_every_precision():
    (header, *lines) = rows(section_of("docs/reference.md", "Fixture").partition("### `gpumem.assert_same")[2])
    assert header == ["precision", "default `rtol`"]
    told = {}
    for words, rtol in lines:
        told.update(dict.fromkeys(re.findall(r"`(.+?)`", words), float(rtol)))
    assert told == DEFAULT_TOLERANCES


def axes() -> dict[str, list[str]]:
    """The other cells of each axis' row: values, default, steps, meaning."""
    return named_rows(section_of("docs/reference.md", "Step configs").partition("\n### ")[0])


def test_the_reference_has_every_axis_of_a_step_config_with_its_default_and_steps():
    table = axes()
    assert list(table) == list(AXES)
    for name, (_, default, steps, _) in table.items():
        usual = getattr(StepConfig(), name)
        assert default == f"`{usual}`" if usual is not None else default in ("the model's own", "found", "none")
        kinds = [kind for kind in ("train_step", "infer_step") if name not in _NOT_IN[kind]]
        assert steps == (f"`{kinds[0]}`" if len(kinds) == 1 else "both")


@pytest.mark.parametrize(
    ("heading", "words"), [("Precision", PRECISIONS), ("Checkpointing", CHECKPOINTS), ("Optimizers", OPTIMIZERS)]
)
def test_the_reference_has_every_word_of_a_step_config(heading, words):
    table = rows(subsection_of("docs/reference.md", "Step configs", heading))
    assert re.findall(r"`(.+?)`", " ".join(cells[0] for cells in table)) == list(words)


@pytest.mark.parametrize(
    ("axis", "words"), [("zero_grad", ZERO_GRADS), ("compile", COMPILES), ("cache", CACHES), ("weights", WEIGHTS)]
)
def test_the_reference_has_every_value_of_a_step_config(axis, words):
    assert re.findall(r"`(.+?)`", axes()[axis][0]) == list(words)


def test_the_config_and_the_id_in_the_reference_belong_together():
    text = section_of("docs/reference.md", "Step configs")
    (written,) = re.findall(r'config="(.+?)"\n?\)', text)
    assert f"`{StepConfig.parse(written).id}`" in text


def test_step_configs_in_the_pages_are_step_configs():
    for page in PAGES:
        for text in re.findall(r'config="(.+?)"', read(page)):
            assert StepConfig.parse(text), page


def test_the_matrices_in_the_pages_make_configs():
    calls = [
        node
        for block in blocks("python")
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("gpumem_configs") and node.keywords
    ]
    assert len(calls) > 1
    for call in calls:
        given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        skip = given.pop("skip", ())
        assert len(combinations(given, [skip] if isinstance(skip, str) else skip)) > 1


@pytest.mark.parametrize("command", [ab, advise, doctor, fit, init, run], ids=lambda command: command.name)
def test_the_reference_has_every_option_of_a_command_with_its_default(command):
    table = named_rows(section_of("docs/reference.md", f"gpumem {command.name}"))
    told = {name: cells[0] for name, cells in table.items() if name.startswith("--")}
    expected = {}
    for option in command.params:
        # Those of the plugin have a section of their own.
        if option.param_type_name == "option" and not option.opts[0].startswith("--gpumem-") and not option.hidden:
            default = option.default[0] if isinstance(option.default, tuple) else option.default
            flag = ("on" if default is True else "off") if option.is_flag else None
            shown = flag or (f"`{default}`" if isinstance(default, str | int) else "none")
            expected[option.opts[0]] = shown
    assert told == expected


@pytest.mark.parametrize("command", [ab, advise, doctor, fit, init, run], ids=lambda command: command.name)
def test_the_reference_has_the_exit_codes_that_a_command_tells_of(command):
    table = rows(section_of("docs/reference.md", f"gpumem {command.name}"))
    told = [cells[0] for cells in table if cells[0].isdigit()]
    assert told == re.findall(r"\b(\d)\b", str(command.help).partition("Exit status:")[2])


def test_the_architecture_places_every_module():
    package = Path(pytest_gpumem.__file__).parent
    modules = {path.stem for path in [*package.glob("*.py"), *package.glob("*/__init__.py")]} - {"__init__"}
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    first_cells = " ".join(cells[0] for cells in rows(section_of("docs/architecture.md", "Modules")))
    assert modules | packages == set(re.findall(r"`(\w+)`", first_cells))


def files_named_in(page: str) -> set[str]:
    """The files in backticks, and those that links within the repository lead to, as they are written."""
    text = FENCE.sub("", without_recipes(read(page)))
    return {*FILE.findall(text), *re.findall(r"\]\((?!https://|#)([^)#]+)", text)}


@pytest.mark.parametrize(
    ("page", "least"), [("CONTRIBUTING.md", 50), ("docs/architecture.md", 50), ("docs/architecture-time.md", 5)]
)
def test_the_files_that_a_page_on_the_code_names_exist(page, least):
    # The site is there where `make docs` has made it.
    named = files_named_in(page) - {"build/site"}
    folders = [ROOT, (ROOT / page).parent, Path(pytest_gpumem.__file__).parent]
    missing = {name for name in named if not any((folder / name).exists() for folder in folders)}
    assert {name for name in missing if not name.startswith(MADE_BY_MAKE)} == set()
    assert len(named) > least


def test_contributing_names_targets_of_make_and_tests_that_there_are():
    text = read("CONTRIBUTING.md")
    targets = re.findall(r"^([\w-]+)(?: [\w-]+)*:(?!=)", read("Makefile"), flags=re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", text, flags=re.MULTILINE)) <= set(targets)
    tests = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
    assert tests
    assert all(f"def {test}(" in read(file) for file, test in tests)


def test_contributing_names_every_target_of_make_and_those_that_every_change_has_to_pass():
    text = section_of("CONTRIBUTING.md", "Set up")
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", read("Makefile"), flags=re.MULTILINE)
    assert phony
    targets = set(phony[1].replace("\\", " ").split())
    of_others = {"help", "cuda", "gpu-tests", "truth"}
    assert {name for name in targets - of_others if f"`make {name}`" not in text and f"`{name}`" not in text} == set()
    passed = text.partition("what every change has to\npass")[2].partition(".\n")[0]
    run = {
        name
        for names in re.findall(r"\bmake ([a-z -]+?)(?= &&| *$|;)", read(".ci/run"), flags=re.MULTILINE)
        for name in names.split()
    }
    assert set(re.findall(r"`make ([\w-]+)`", passed)) == run


def test_the_steps_of_the_tour_are_files_of_the_package_in_one_order():
    tour = section_of("CONTRIBUTING.md", "A training step, file by file")
    steps = re.findall(r"^(\d+)\. (.+?)(?=^\d+\. |^$)", tour, flags=re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    links = re.findall(r"\[([\w/.]+)\]\((.+?)\)", tour)
    assert [target for _, target in links] == [f"pytest_gpumem/{name}" for name, _ in links]
    assert len({name for name, _ in links}) == len(links)


def test_the_architecture_is_a_list_of_decisions_of_a_few_lines_each():
    text = read("docs/architecture.md") + read("docs/architecture-time.md")
    decisions = re.findall(r"^- \*\*.*(?:\n(?!- |\n|#).*)*", text, flags=re.MULTILINE)
    assert 50 < len(decisions) <= 95
    assert [one for one in decisions if one.count("\n") >= 8] == []
    assert max(map(len, text.splitlines())) <= 128


def first_lines() -> list[str]:
    """The first line of every docstring of the package, those of attributes included, with its place."""
    package = Path(pytest_gpumem.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            body = getattr(node, "body", None)
            for one in body if isinstance(body, list) else ():
                text = one.value.value if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) else None
                if isinstance(text, str):
                    found.append(f"{path.relative_to(package)}:{one.lineno}: {text.strip().splitlines()[0]}")
    return found


def test_first_lines_of_docstrings_say_what_the_thing_is():
    lines = first_lines()
    assert len(lines) > 2000
    assert [line for line in lines if re.search(r": (What|Who|Whose|Which|Whether|How|Why) ", line)] == []


def test_the_changelog_begins_with_this_version():
    assert re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), flags=re.MULTILINE)[0] == pytest_gpumem.__version__


def test_pages_agree_on_what_ran_on_a_gpu_and_for_how_long():
    trust = read("docs/trust.md")
    (minutes,) = re.findall(r"has run this, for (\d+ minutes)", trust)
    (row,) = [cells for cells in rows(section_of("CONTRIBUTING.md", "Set up")) if cells[0] == "`make gpu`"]
    assert minutes in row[-1]
    assert "not known" not in row[-1]
    assert "[One H100](docs/trust.md#what-is-not-shown) has run the CUDA device" in read("CHANGELOG.md")


def test_seconds_of_the_example_are_those_of_the_results():
    results = read("benchmarks/results/first-two-minutes.md")
    (row,) = [cells for cells in rows(section_of("CONTRIBUTING.md", "Set up")) if cells[0] == "`make example`"]
    for text in (row[-1], " ".join(read("Makefile").partition("make test ")[0].split())):
        (seconds,) = re.findall(r"(\d+) seconds", text)
        assert f"| gate | 2 min 17 s | {seconds} s, " in results
        assert re.search(r"(?:two|2) minutes(?: on the CPU)?", text)


def test_the_changelog_says_what_the_first_release_is_in_at_most_15_points():
    first = read("CHANGELOG.md").partition("## [0.1.0]")[2].partition("\n## ")[0]
    assert 0 < len(re.findall(r"^- ", first, flags=re.MULTILINE)) <= 15


TITLED = sorted(
    {
        (block.page, block.section)
        for block in blocks("python")
        # The README's has a test of its own, which the front page repeats, and so do those of docs/migrate.
        if block.file and not block.page.startswith(("docs/migrate/", "docs/index.md", "README.md"))
    }
)


@pytest.mark.parametrize(("page", "section"), TITLED, ids=[f"{page}-{section}" for page, section in TITLED])
def test_the_examples_run_on_the_cpu_and_are_measured(project, page, section):
    for block in blocks("python"):
        if (block.page, block.section) == (page, section) and block.file:
            (project.path / block.file).write_text(block.text, encoding="utf-8")
    if not list(project.path.glob("test_*.py")):
        project.write("@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1000)\n")
    result = project.run("--gpumem-update=new")
    tests = result.parseoutcomes()["passed"]
    result.assert_outcomes(passed=tests)
    *_, accounting = (line for line in result.outlines if line.startswith("gpumem: "))
    assert sum(map(int, re.findall(r"(\d+) (?:gated|recorded)", accounting))) == tests


def test_what_the_readme_and_the_policy_say_is_needed_is_what_is_declared():
    declared = read("pyproject.toml")
    (python,) = re.findall(r'^requires-python = ">=(.+)"$', declared, flags=re.MULTILINE)
    least = {"Python": python}
    for name in ("torch", "pytest"):
        (least[name],) = re.findall(rf'^    "{name}>=([\d.]+)",$', declared, flags=re.MULTILINE)[:1]
    needs = re.search(r"^Needs (.+?), or newer", read("README.md"), flags=re.MULTILINE)
    assert needs
    assert dict(re.findall(r"(\w+) ([\d.]*\d)", needs[1])) == least
    table = rows(section_of("docs/versions.md", "What it runs on"))[1:]
    assert {cells[0]: cells[1] for cells in table} == least
    tried = {cells[0]: cells[2] for cells in table}
    classifiers = re.findall(r"Python :: (3\.\d+)", declared)
    workflows = "".join(read(f".github/workflows/{name}.yml") for name in ("ci", "wheel"))
    in_matrix = re.findall(
        r'"(3\.\d+)"', "".join(re.findall(r"^ +(?:- \{)?python: .+$", workflows, flags=re.MULTILINE))
    )
    assert tried["Python"] == classifiers[-1] == max(in_matrix, key=_numbers)
    assert tried["torch"] == max(re.findall(r'torch: "(\d+\.\d+)\.', workflows), key=_numbers)
    (pytest_here,) = re.findall(r"^pytest==(\d+\.\d+)", read("constraints.txt"), flags=re.MULTILINE)
    assert tried["pytest"] == pytest_here


def test_a_python_that_has_ended_is_kept_as_long_as_the_page_says():
    ended, until, then = re.search(
        r"Python ([\d.]+) has got no fixes .*? keeps it in ([\d.]+)\.y, and\s+[\d.]+ needs Python ([\d.]+)\.",
        read("docs/versions.md"),
        flags=re.DOTALL,
    ).groups()
    (least,) = re.findall(r'^requires-python = ">=(.+)"$', read("pyproject.toml"), flags=re.MULTILINE)
    assert least == (ended if pytest_gpumem.__version__.startswith(f"{until}.") else then)


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def extras() -> set[str]:
    """The extras that are declared."""
    declared = read("pyproject.toml").partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", declared, flags=re.MULTILINE))


def test_the_guide_has_every_extra_with_its_command():
    table = rows(section_of("docs/guide/start.md", "Extras"))[1:]
    told = {name: cells[2] for cells in table for name in re.findall(r"`(\w+)`", cells[0])}
    assert set(told) == extras()
    for name in extras() - {"test", "dev"}:
        assert told[name] == f"`pip install 'pytest-gpumem[{name}]'`"


SOURCES = [
    path
    for folder in ("pytest_gpumem", "docs", ".github", "example_project")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yml", ".html", ".toml", ".txt")
] + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "Makefile")]
"""All texts that may say how something is installed."""


def test_every_extra_that_a_text_installs_is_declared():
    named = {
        name.strip()
        for path in SOURCES
        for names in re.findall(r"pytest-gpumem\[([^\]]*)\]", path.read_text(encoding="utf-8"))
        for name in names.split(",")
    }
    # What a store says, of its kind of URL.
    assert "{kind}" in named
    assert (named - {"{kind}"}) | set(url_backend.EXTRAS.values()) == extras() - {"dev"}


def test_the_readme_leads_to_a_red_test(project):
    start = [
        block
        for page, language in (("README.md", name) for name in ("python", "toml", "sh", "text"))
        for block in blocks(language)
        if (block.page, block.section) == (page, "Start with a test")
    ]
    source, settings, commands, failure = (block.text for block in start)
    project.settings(settings)
    (project.path / "test_mlp.py").write_text(source, encoding="utf-8")
    record, _, gate = commands.splitlines()
    project.run(*record.split()[1:], device=None).assert_outcomes(passed=2)
    project.run(*gate.split()[1:], device=None).assert_outcomes(passed=2)
    assert project.stored()
    assert source.count("2048") == 2
    (project.path / "test_mlp.py").write_text(source.replace("2048", "4096"), encoding="utf-8")
    result = project.run(*gate.split()[1:], device=None)
    result.assert_outcomes(failed=2)
    assert failure.strip() in result.outlines
    assert any(
        re.match("  accept: +pytest test_mlp.py::test_forward --gpumem-update=all", line) for line in result.outlines
    )


def test_start_here_has_every_test_of_the_start_and_gates_them(project):
    source = (ROOT / "example_project" / "start_here.py").read_text(encoding="utf-8")
    statements = {ast.dump(node) for node in ast.parse(source).body}
    shown = [
        block
        for page in ("README.md", "docs/index.md", "docs/guide/start.md")
        for block in blocks_of(page)
        if (block.file or "").startswith("test_")
    ]
    assert len(shown) == 3
    for block in shown:
        missing = [node for node in ast.parse(block.text).body if ast.dump(node) not in statements]
        assert [ast.unparse(node) for node in missing] == [], block
    path = project.path / "start_here.py"
    path.write_text(source, encoding="utf-8")
    project.run("start_here.py", "--gpumem-update=new").assert_outcomes(passed=5)
    path.write_text(
        source.replace("(512, 2048)", "(512, 4096)").replace("(2048, 512)", "(4096, 512)"), encoding="utf-8"
    )
    project.run("start_here.py", "--gpumem-baseline").assert_outcomes(passed=3, failed=2)


def test_the_failure_in_the_readme_is_a_part_of_that_in_the_guide():
    (shown,) = (
        block.text for block in blocks("text") if (block.page, block.section) == ("README.md", "What a failure says")
    )
    whole = read("docs/guide/read-a-failure.md").splitlines()
    assert [line for line in shown.splitlines() if line != "..." and line not in whole] == []


def test_the_figures_that_are_to_be_trusted_stand_in_the_results_that_their_section_links_to():
    sections = re.split(r"^## ", read("docs/trust.md"), flags=re.MULTILINE)[1:]
    seen = 0
    for section in sections:
        sources = "".join(
            (ROOT / "docs" / path).read_text(encoding="utf-8")
            for path in re.findall(r"\]\((\.\./benchmarks/results/[^)#]+)", section)
        )
        told = re.findall(
            r"(?<![\w.])[+-]?\d[\d,.]*\d %?|\d+ of \d+", "\n".join(" | ".join(row[1:]) for row in rows(section))
        )
        assert [figure for figure in told if figure.strip() not in sources] == [], section.splitlines()[0]
        seen += len(told)
    assert seen > 50


def test_there_are_examples_to_run():
    guide = {"start", "steps", "scripts-and-loops", "matrix", "relations"}
    others = {"docs/ci.md", "docs/reference.md"}
    assert {page for page, _ in TITLED} == others | {f"docs/guide/{name}.md" for name in guide}


def test_python_in_the_pages_is_python():
    for block in blocks("python"):
        ast.parse(block.text, str(block))


def test_settings_in_the_pages_are_settings(tmp_path):
    path = tmp_path / "pyproject.toml"
    for block in blocks("toml"):
        if "tool.gpumem" in block.text:
            path.write_text(block.text, encoding="utf-8")
            table = read_table(path)
            assert table, block
            assert settings_from_table(table, str(block)) != Settings(), block


def test_the_file_of_the_store_in_the_reference_is_one_that_would_be_written():
    (block,) = (block for block in blocks("toml") if "tool.gpumem" not in block.text)
    assert render(parse(block.text, "test_mlp.py")) == block.text


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", FENCE.sub("", read(page))):
            file, _, anchor = target.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            assert path.exists(), (page, target)
            if anchor:
                assert anchor in anchors(path.read_text(encoding="utf-8")), (page, target)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
