"""The pages of the formats: reports, made from their renderers and the schema, and the files of the store."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import TYPE_CHECKING

from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.facts.values.timeline import OverTime, PhaseSpan
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.format import ENTRY_KEYS, FILE_KEYS
from pytest_gpumem.judging.baselines.store import Store
from pytest_gpumem.measuring.explain.artifacts import TIMELINE_KEYS, Artifacts
from pytest_gpumem.plugin.runtest.recorded_verdict import record_verdict
from pytest_gpumem.reporting.reports.files import ReportFiles
from pytest_gpumem.reporting.reports.formats import FORMATS, Format
from reference.markdown import attribute_docstrings, docstring, flat, page, paragraphs, table
from reference.schema import report_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_gpumem.facts.values.plain import Schema

EXAMPLE = """```toml
format = 1

[tests.test_forward.call]
environment = "torch-2.13.0+cpu-b67355"
recorded = "2026-11-21"
step = "call"
peak_allocated = 13641728
retained = 0
cyclic_garbage = 0
composition = [
    "parameter | Sequential.* |  |  |  | 1 x float32[2048, 512] | 4194304",
    "parameter | Sequential.* |  |  |  | 1 x float32[512, 2048] | 4194304",
    "activation | Sequential.* | addmm | test_mlp.py:14 |  | 1 x float32[256, 2048] | 2097152",
    "activation | Sequential.* | gelu | test_mlp.py:14 |  | 1 x float32[256, 2048] | 2097152",
    "activation | Sequential.* | addmm | test_mlp.py:14 |  | 1 x float32[256, 512] | 524288",
]

[tests.test_train_step.train_step]
environment = "torch-2.13.0+cpu-b67355"
recorded = "2026-11-21"
step = "train_step"
config = "fp32"
parameters = 2099712
batch = "float32[256, 512]"
peak_allocated = 42516512
peak_forward = 30963744
peak_backward = 36732952
peak_optimizer = 42516512
retained = 0
cyclic_garbage = 0
flops = 2684354560
operators = 56
syncs = 0
step_time = 0.03431
throughput = 7460.0
composition = [
    "optimizer state | Sequential.* |  | test_mlp.py:18 |  | 2 x float32[2048, 512] | 8388608",
    "optimizer state | Sequential.* |  | test_mlp.py:18 |  | 2 x float32[512, 2048] | 8388608",
    "gradient | Sequential.* | AddmmBackward0 | test_mlp.py:18 |  | 1 x float32[2048, 512] | 4194304",
    "gradient | Sequential.* | AddmmBackward0 | test_mlp.py:18 |  | 1 x float32[512, 2048] | 4194304",
    "parameter | Sequential.* |  |  |  | 1 x float32[2048, 512] | 4194304",
    "parameter | Sequential.* |  |  |  | 1 x float32[512, 2048] | 4194304",
    "temporary |  | div | test_mlp.py:18 |  | 1 x float32[512, 2048] | 4194304",
    "temporary |  | sqrt | test_mlp.py:18 |  | 1 x float32[512, 2048] | 4194304",
]

[environments."torch-2.13.0+cpu-b67355"]
device = "CPU (x86_64)"
slug = "cpu-x86_64"
cpu_capability = "AVX512"
machine = "AMD EPYC 9575F, 8 cores"
torch = "2.13.0+cpu"
```"""
"""A file of the store, as a run wrote it."""


def reports_page() -> str:
    """Return the page of the formats of reports, of the timeline and of exports."""
    from pytest_gpumem.reporting.reports import github

    return page(
        "Report formats",
        "`--gpumem-report=FILE` writes a report in the format that the file's suffix names.",
        _rest(_text(ReportFiles)),
        *(_format(one) for one in FORMATS),
        "## Keys of the JSON report",
        *json_tables(),
        f"## GitHub Actions\n\n{paragraphs(github.__doc__ or '')}",
        "## JUnit XML\n\nA test's verdict is in its `user_properties`, which `--junitxml` writes as `<property>` elements.",
        _rest(_text(record_verdict)),
        "## Timeline\n\n`--gpumem-artifacts=DIR` keeps the recording of each step that is explained.",
        _rest(_text(Artifacts)),
        table(("key", "meaning"), _rows(TIMELINE_KEYS | attribute_docstrings(OverTime))),
        table(("key of a phase", "meaning"), _rows(attribute_docstrings(PhaseSpan))),
        "## Other tools\n\n`gpumem export` writes the figures in JSON reports for Bencher, Prometheus, TensorBoard and "
        "github-action-benchmark, and its page has these formats.",
    )


def _text(member: object) -> str:
    return inspect.getdoc(member) or ""


def _format(form: Format) -> str:
    module, _, function = form.renderer.partition(":")
    renderer = getattr(__import__(module, fromlist=[function]), function)
    return f"## `{form.suffix}`\n\nPurpose: {form.title}.\n\n{_summary(renderer)}"


def _summary(function: Callable[..., object]) -> str:
    """Return the text of a docstring without its arguments and errors, for who reads the file."""
    text = docstring(re.split(r"^(?:Args|Raises):$", _text(function), flags=re.MULTILINE)[0]).removeprefix("Return ")
    return text[0].upper() + text[1:]


def _rest(text: str) -> str:
    """Return a docstring without its first paragraph, which is for who reads the code."""
    return docstring(text.partition("\n\n")[2])


def _rows(texts: Mapping[str, str], none: str = "`null`") -> list[tuple[str, str]]:
    return [(f"`{name}`", flat(text, none)) for name, text in texts.items()]


def json_tables() -> Iterator[str]:
    """Yield a table of keys for each object of a JSON report, the report first."""
    schema = report_schema()
    for name, node in {"report": schema, **schema["$defs"]}.items():
        if "properties" in node:
            rows = [
                (f"`{key}`", _kind(value, schema["$defs"]), value["description"])
                for key, value in node["properties"].items()
            ]
            yield f"### The object `{name}`\n\n{table(('key', 'type', 'meaning'), rows)}"


_NAMED = {"metric_name": "name of a metric", "counted_metric": "name of a metric", "number": "number"}
"""Definitions with a name for people."""


def _kind(node: Schema, definitions: Mapping[str, Schema]) -> str:
    """Return the type of a value in words, with a link to the table of an object."""
    kinds = partial(_kinds, definitions=definitions)
    name = node.get("$ref", "").rpartition("/")[2]
    if name:
        link = f"[{name}](#the-object-{name})" if "properties" in definitions[name] else None
        return _NAMED.get(name) or link or _kind(definitions[name], definitions)
    if "enum" in node:
        return "integer" if isinstance(node["enum"][0], int) else "string"
    if "prefixItems" in node:
        return f"[{', '.join(kinds(node['prefixItems']))}]"
    if node.get("type") == "array":
        return f"array of {_kind(node['items'], definitions)}"
    if node.get("type") == "object":
        values = [*node.get("patternProperties", {}).values(), node["additionalProperties"]]
        return f"object of {' or '.join(kinds(values))}"
    return " or ".join(kinds(node["anyOf"])) if "anyOf" in node else node["type"]


def _kinds(nodes: Iterable[Schema], definitions: Mapping[str, Schema]) -> list[str]:
    return [_kind(node, definitions) for node in nodes]


def store_page() -> str:
    """Return the page of the files of the store."""
    from pytest_gpumem.judging.baselines import format as baseline_format

    workload, environment = attribute_docstrings(Workload), attribute_docstrings(Environment)
    details = environment.pop("details")
    return page(
        "Format of the store",
        "The store is a folder of TOML files with the baselines of each device and test file.",
        "The page on the concept: [the store](../concepts/store.md).",
        f"## The folder\n\n{_rest(_text(Store))}",
        _rest(_text(Folder)),
        f"## A file\n\n{_rest(_text(baseline_format))}",
        "This file comes from `pytest --gpumem-update=new` with two tests of the [README](../../README.md#start-with-a-test):",
        EXAMPLE,
        f"## Keys of a file\n\n{table(('key', 'meaning'), _rows(FILE_KEYS))}",
        "## Keys of a measurement",
        "Each [metric](metrics.md) that the measurement has is a key as well.",
        table(("key", "meaning"), _rows(workload | ENTRY_KEYS, "Absent")),
        f"## Keys of an environment\n\n{table(('key', 'meaning'), _rows(environment))}",
        f"The other keys are the environment's details. {flat(details.partition('.')[2])}",
    )
