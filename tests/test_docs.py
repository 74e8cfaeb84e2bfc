"""The documentation is true: it names what there is and nothing else, and its examples run.

A Python block below a line with the name of its file is a whole file. Such blocks of one section are one project.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import click
import pytest

import pytest_gpumem
from pytest_gpumem import Composition, Row, StepConfig
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.composition import REST
from pytest_gpumem.facts.values.module_calls import Calls
from pytest_gpumem.judging.baselines import bucket
from pytest_gpumem.judging.gate.difference import difference
from pytest_gpumem.judging.gate.graph_changes import GraphChange
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.measuring.step_config.config import (
    combinations,
)
from pytest_gpumem.plugin.config.options import OPTIONS
from pytest_gpumem.plugin.config.settings import Settings, read_table, settings_from_table
from pytest_gpumem.reporting.reports.explanation import change_table, part_lines
from pytest_gpumem.tools.main import main
from tests.pages import FENCE, HEADING, PAGES, ROOT, SITE, blocks, blocks_of, read
from tests.recipes.recipes import files_of

FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+|[\w-]+\.(?:py|c|toml|json|yml|md))`")
"""A path with a folder, or the name of a file."""
MADE_BY_MAKE = (".venv/", "build/", "dist/")


DEVELOPMENT = [page for page in SITE if page.startswith("docs/development/")]
AS_IT_IS = [page for page in PAGES if not page.startswith("docs/development/add-")]
"""All pages but recipes, which speak of the options, commands and files that their patches add."""


def section_of(page: str, heading: str) -> str:
    """The text under a second-level heading."""
    return re.split(rf"^## {re.escape(heading)}$", read(page), flags=re.MULTILINE)[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in ``text``, row by row, headers included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def named_rows(text: str) -> dict[str, list[str]]:
    """The other cells of each row, by the name in backticks in its first cell."""
    return {cells[0].strip("`"): cells[1:] for cells in rows(text) if cells[0].startswith("`")}


@pytest.mark.parametrize("page", ["docs/ci.md"])
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
    said = {option for page in AS_IT_IS for option in re.findall(r"--gpumem-[a-z]+(?:-[a-z]+)*", read(page))}
    assert said <= {option.flag for option in OPTIONS}


COMMAND = re.compile(r"^(?:- run: |\$ |\s)*gpumem (?=[a-z]+ )(.+?)(?: {2,}#.*)?$", flags=re.MULTILINE)
GUIDE_COMMANDS = sorted(
    {
        line
        for page in AS_IT_IS
        for fence in FENCE.finditer(read(page))
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


def test_the_guide_says_what_to_do_about_every_verdict():
    table = named_rows(section_of("docs/guide/verdicts.md", "What to do about each verdict"))
    assert list(table) == [outcome.words for outcome in Outcome]


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


def test_the_architecture_places_every_house_and_its_rooms():
    houses = {path.parent for path in Path(pytest_gpumem.__file__).parent.glob("*/__init__.py")}
    assert len(houses) == 9
    cells = [row for row in rows(section_of("docs/architecture.md", "Modules")) if len(row) == 3]
    described = {name.strip("`"): set(re.findall(r"`(\w+)`", names)) for name, _, names in cells[1:]}
    assert described == {house.name: rooms_of(house) for house in houses} | {"torch_support": set()}
    assert all((house / "README.md").is_file() for house in houses)


def rooms_of(house: Path) -> set[str]:
    """The folders and modules of a house."""
    folders = {path.parent.name for path in house.glob("*/__init__.py")}
    return folders | {path.stem for path in house.glob("*.py")} - {"__init__"}


def files_named_in(page: str) -> set[str]:
    """The files in backticks, and those that links within the repository lead to, as they are written."""
    text = FENCE.sub("", read(page))
    return {*FILE.findall(text), *re.findall(r"\]\((?!https://|#)([^)#]+)", text)}


ON_THE_CODE = ["CONTRIBUTING.md", *DEVELOPMENT, "docs/architecture.md", "docs/architecture-time.md"]


@pytest.mark.parametrize("page", ON_THE_CODE)
def test_the_files_that_a_page_on_the_code_names_exist(page):
    # Files that commands make, that the patch of a recipe adds, and those of the reader.
    patches = (ROOT / "tests/recipes").glob("*.patch")
    made = {"build/site", "out.json", "tests/test_NAME.py"}.union(*(files_of(patch.stem) for patch in patches))
    folders = [ROOT, (ROOT / page).parent, Path(pytest_gpumem.__file__).parent]
    named = files_named_in(page)
    missing = {name for name in named - made if not any((folder / name).exists() for folder in folders)}
    assert {name for name in missing if not name.startswith(MADE_BY_MAKE)} == set()
    assert named


def test_pages_for_development_name_targets_of_make_and_tests_that_there_are():
    text = "".join(map(read, ["CONTRIBUTING.md", *DEVELOPMENT]))
    targets = re.findall(r"^([\w-]+)(?: [\w-]+)*:(?!=)", read("Makefile"), flags=re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", text, flags=re.MULTILINE)) <= set(targets)
    tests = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
    assert tests
    assert all(f"def {test}(" in read(file) for file, test in tests)


def test_make_alone_lists_every_target():
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", read("Makefile"), flags=re.MULTILINE)
    told = "\n".join(re.findall(r"^\t@echo (.*)", read("Makefile"), flags=re.MULTILINE))
    assert phony
    targets = set(phony[1].replace("\\", " ").split()) - {"help", "cuda"}
    assert {name for name in targets if not re.search(rf"\b{name}\b", told)} == set()


def test_the_architecture_is_a_list_of_decisions_of_a_few_lines_each():
    text = read("docs/architecture.md") + read("docs/architecture-time.md")
    decisions = re.findall(r"^- \*\*.*(?:\n(?!- |\n|#).*)*", text, flags=re.MULTILINE)
    assert 50 < len(decisions) <= 95
    assert [one for one in decisions if one.count("\n") >= 8] == []
    assert max(len(line) for line in text.splitlines() if not line.startswith("| ")) <= 128, "a table's row has a line"


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
    assert f"[{minutes}](../trust.md#what-is-not-shown) on an H100" in read("docs/development/tests.md")
    assert "[One H100](docs/trust.md#what-is-not-shown) has run the CUDA device" in read("CHANGELOG.md")


def test_seconds_of_the_example_are_those_of_the_results():
    results = read("benchmarks/results/first-two-minutes.md")
    text = " ".join(read("Makefile").partition("make test ")[0].split())
    (seconds,) = re.findall(r"(\d+) seconds", text)
    assert f"| gate | 2 min 17 s | {seconds} s, " in results
    assert "two minutes on the CPU" in text


def test_the_changelog_says_what_the_first_release_is_in_at_most_15_points():
    first = read("CHANGELOG.md").partition("## [0.1.0]")[2].partition("\n## ")[0]
    assert 0 < len(re.findall(r"^- ", first, flags=re.MULTILINE)) <= 15


TITLED = sorted(
    {
        (block.page, block.section)
        for block in blocks("python")
        # The README's has a test of its own, which the front page repeats, and so do those of docs/migrate.
        # Servers and jobs need a GPU: tests/emulated/test_guide_of_servers.py.
        if block.file
        and not block.page.startswith(("docs/migrate/", "docs/index.md", "docs/guide/servers", "README.md"))
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
    # What a bucket says, if obstore is not installed.
    assert "{EXTRA}" in named
    assert (named - {"{EXTRA}"}) | {bucket.EXTRA} == extras() - {"dev"}


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


def test_figures_on_the_trust_page_are_in_the_results_linked_by_their_section():
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
    others = {"docs/ci.md", "docs/concepts/measuring.md"}
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
