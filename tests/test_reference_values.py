"""The pages of `docs/reference/` have each public name, argument, metric, axis, word and key once."""

from __future__ import annotations

import doctest
import inspect
import json
import re
from collections import Counter
from dataclasses import fields

import pytest

import pytest_gpumem
from pytest_gpumem import Composition, Environment, Explanation, Gpumem, Measurement, Row, StepConfig, Tolerance
from pytest_gpumem.base.errors import CompositionError
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.composition import Holder, row_from_text
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.facts.values.times import Times
from pytest_gpumem.judging.baselines.format import ENTRY_KEYS, FILE_KEYS, parse, render
from pytest_gpumem.measuring.step_config.config import AXES, FORMS
from pytest_gpumem.plugin.config.marker_arguments import MARKER_ARGUMENTS
from pytest_gpumem.plugin.relations.estimate import Estimate
from pytest_gpumem.plugin.relations.gradients import DEFAULT_TOLERANCES
from pytest_gpumem.reporting.reports.formats import FORMATS
from tests.pages import FENCE, blocks_of, read


def page(name: str) -> str:
    """The text of a page of the reference without its code."""
    return FENCE.sub("", read(f"docs/reference/{name}.md"))


def entries(text: str) -> list[str]:
    """The headings that are code."""
    return re.findall(r"^#+ `([^`]+)`$", text, flags=re.MULTILINE)


def rows(text: str) -> list[tuple[str, str]]:
    """The first cell of each row that begins with code, and the rest of the row."""
    return re.findall(r"^\| \[?`([^`]+)`(?:\]\([^)]*\))? \|(.*)\|$", text, flags=re.MULTILINE)


def items(text: str) -> list[tuple[str, str]]:
    """The code that each item of a list begins with, and the rest of the item."""
    return re.findall(r"^- `([^`]+)`(.*)$", text, flags=re.MULTILINE)


def section(text: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or a higher one."""
    level = heading.partition(" ")[0]
    below = text.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


# Marker, fixture, values


def test_api_every_public_name_has_one_entry():
    headings = entries(page("values"))
    assert {name: headings.count(name) for name in pytest_gpumem.__all__} == dict.fromkeys(pytest_gpumem.__all__, 1)
    assert all(hasattr(pytest_gpumem, name) for name in pytest_gpumem.__all__)


def test_api_every_argument_of_a_marker_has_one_entry_with_its_help():
    text = page("marker")
    assert entries(text) == ["@pytest.mark.gpumem", *MARKER_ARGUMENTS, "@pytest.mark.gpumem_configs", "skip"]
    assert [name for name, _ in rows(text)] == list(MARKER_ARGUMENTS)
    assert all(f"`{name}={one.example}`" in text for name, one in MARKER_ARGUMENTS.items())


@pytest.mark.parametrize("name", MARKER_ARGUMENTS)
def test_api_the_example_of_a_marker_argument_is_a_value_that_it_reads(name):
    argument = MARKER_ARGUMENTS[name]
    assert argument.read(eval(argument.example)) is not None


def test_api_every_member_of_the_fixture_has_one_entry_with_its_signature():
    members = {name: member for name, member in vars(Gpumem).items() if not name.startswith("_")}
    text = page("fixture")
    assert entries(text) == [f"gpumem.{name}" for name in members]
    for name, member in members.items():
        if not isinstance(member, property):
            named = set(inspect.signature(member).parameters) - {"self", "unknown"}
            entry = section(text, f"## `gpumem.{name}`")
            assert entry.lstrip().startswith(f"`gpumem.{name}(")
            assert {argument for argument, _ in items(entry.partition("**Raises**")[0])} == named


@pytest.mark.parametrize(
    "owner",
    [Composition, Environment, Estimate, Explanation, Measurement, Row, Tolerance, Workload, StepPeaks, Times, Holder],
    ids=lambda one: one.__name__,
)
def test_api_every_attribute_and_method_of_a_value_is_told_once(owner):
    entry = section(page("values"), f"## `{owner.__name__}`")
    attributes = Counter(name for name, _ in items(entry.partition("\n### ")[0]))
    methods = Counter(heading.partition(".")[2] for heading in entries(entry))
    public = {name for name in dir(owner) if not name.startswith("_")}
    assert attributes + methods == Counter(public - (METRICS.keys() if owner is Measurement else set()))


def test_api_every_class_that_a_value_or_method_leads_to_has_an_entry():
    text = page("values")
    types = re.findall(r"^- `\w+` \(\[?`([^`]+)`", text, flags=re.MULTILINE)
    methods = [member for member in vars(Gpumem).values() if inspect.isfunction(member)]
    types += [str(inspect.signature(method).return_annotation) for method in methods]
    named = set(re.findall(r"\b(?<!torch\.)[A-Z]\w+", " ".join(types)))
    # The session gives these to a device; the steps read these from a config.
    internal = {"Alone", "DeviceLock", "Routing", "SharedBytes", "SharedMemory", "Checkpointing", "Sharding"}
    of_python = {"AbstractContextManager", "Generator", "Iterator", "Mapping", "NoReturn", "None", "Sequence"}
    assert {"Tally", "OverTime", "Loading", "Estimate"} <= named
    assert named - internal - of_python - set(entries(text)) == set()


def test_api_every_item_of_the_values_has_a_meaning():
    assert [name for name, rest in items(page("values")) if len(rest.rpartition(": ")[2].strip()) < 5] == []


def test_api_every_category_of_a_composition_has_a_row():
    assert [name for name, _ in rows(section(page("values"), "### Categories"))] == list(CATEGORIES)


def test_api_the_text_of_a_row_is_told_as_it_is_read():
    with pytest.raises(CompositionError) as refused:
        row_from_text("activation")
    form = str(refused.value).partition("expected 7: ")[2]
    assert f"`{form}`" in page("values")


def test_api_the_default_tolerance_of_gradients_is_told_for_each_precision():
    told = re.findall(r"(\d+e-\d+) for ((?:`[\w-]+`(?: and )?)+)", page("fixture"))
    assert {word: float(rtol) for rtol, words in told for word in re.findall(r"`(.+?)`", words)} == DEFAULT_TOLERANCES


# Metrics and step configs


def test_metrics_have_an_entry_and_a_row_each():
    text = page("metrics")
    assert entries(text) == [name for name, _ in rows(text)] == list(METRICS)
    assert all(f" {METRICS[name].unit} |" in rest for name, rest in rows(text))
    assert all(f"Unit: {metric.unit}." in section(text, f"## `{name}`") for name, metric in METRICS.items())


def test_api_every_axis_has_an_entry_and_every_word_of_it_a_row():
    text = page("step-configs")
    assert entries(text) == list(AXES)
    for name in AXES:
        entry = section(text, f"## `{name}`")
        usual = getattr(StepConfig(), name)
        assert (f"Default: `{usual}`." in entry) == (usual is not None)
        told = rows(entry)
        assert [word for word, _ in told] == list(FORMS.get(name, ()))
        assert all(len(meaning.strip()) > 5 for _, meaning in told)


EXAMPLES = [
    block
    for name in ("step-configs", "values")
    for block in blocks_of(f"docs/reference/{name}.md")
    if block.language == "pycon"
]


@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.text.splitlines()[0][4:34])
def test_api_a_session_in_a_page_prints_what_it_shows(block):
    names = {"StepConfig": StepConfig, "StepPeaks": StepPeaks, "Tolerance": Tolerance}
    test = doctest.DocTestParser().get_doctest(block.text, names, block.section, None, None)
    assert doctest.DocTestRunner().run(test).failed == 0


# Formats


def test_formats_of_reports_have_an_entry_each():
    assert entries(page("reports")) == [form.suffix for form in FORMATS]


def objects() -> dict[str, set[str]]:
    """The keys of each object in the schema of a report."""
    schema = json.loads(read("pytest_gpumem/reporting/reports/report.schema.json"))
    nodes = {"report": schema, **schema["$defs"]}
    return {name: set(node["properties"]) for name, node in nodes.items() if "properties" in node}


def test_formats_every_key_of_a_report_has_one_row_with_a_meaning():
    text = page("reports")
    headings = re.findall(r"^### The object `(\w+)`$", text, flags=re.MULTILINE)
    expected = objects()
    assert sorted(headings) == sorted(expected)
    for name, keys in expected.items():
        told = rows(section(text, f"### The object `{name}`"))
        assert Counter(key for key, _ in told) == Counter(keys), name
        assert [key for key, rest in told if len(rest.rpartition(" | ")[2].strip()) < 5] == [], name


def test_formats_every_key_of_a_timeline_has_a_row(project):
    project.write(
        "def test_it(gpumem):\n    gpumem.train_step(torch.nn.Linear(8, 8), torch.ones(8, 8), loss=lambda y, _: y.sum())\n"
    )
    project.run("--gpumem-explain=always", "--gpumem-artifacts=kept", "--no-gpumem-time").assert_outcomes(passed=1)
    (file,) = (project.path / "kept").iterdir()
    timeline = json.loads(file.read_text(encoding="utf-8"))
    told = [name for name, _ in rows(section(page("reports"), "## Timeline"))]
    assert told == [*timeline, *timeline["phases"][0]]
    assert set(timeline["categories"]) <= set(CATEGORIES)
    moments = zip(*timeline["categories"].values(), strict=True)
    assert [sum(moment) for moment in moments] == timeline["total"]
    assert timeline["total"][timeline["peak"]] == max(timeline["total"])


def test_formats_every_key_of_the_store_has_one_row():
    text = page("store-format")
    assert [name for name, _ in rows(section(text, "## Keys of a file"))] == list(FILE_KEYS)
    workload = [field.name for field in fields(Workload)]
    assert [name for name, _ in rows(section(text, "## Keys of a measurement"))] == [*workload, *ENTRY_KEYS]
    environment = {field.name for field in fields(Environment)} - {"details"}
    assert {name for name, _ in rows(section(text, "## Keys of an environment"))} == environment


def test_formats_a_file_of_the_store_has_no_other_keys(project):
    project.write(
        "def test_it(gpumem):\n    gpumem.train_step(torch.nn.Linear(8, 8), torch.ones(8, 8), loss=lambda y, _: y.sum())\n"
    )
    project.run("--gpumem-update=new").assert_outcomes(passed=1)
    (text,) = project.stored().values()
    keys = set(
        re.findall(r"^(\w+) = ", text.partition("[tests.")[2].partition("[environments.")[0], flags=re.MULTILINE)
    )
    assert (
        {"composition", "operators_at", "flops_at"}
        <= keys
        <= {field.name for field in fields(Workload)}
        | {
            *METRICS,
            *ENTRY_KEYS,
        }
    )


def test_formats_the_file_of_the_store_is_one_that_would_be_written():
    (block,) = (block for block in blocks_of("docs/reference/store-format.md") if block.text.startswith("format = "))
    assert render(parse(block.text, "test_mlp.py")) == block.text
