"""The pages of the marker, the fixture and the values, made from docstrings, signatures and the table of arguments."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, get_args, get_type_hints

import pytest_gpumem
from pytest_gpumem.facts.measurement import Workload
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.composition import Holder, Row
from pytest_gpumem.facts.values.interference import Slowdown
from pytest_gpumem.facts.values.module_calls import Caller, Calls
from pytest_gpumem.facts.values.operator_counts import OperatorSite, Tally
from pytest_gpumem.facts.values.process import ProcessDetails
from pytest_gpumem.facts.values.step_peaks import StepPeaks
from pytest_gpumem.facts.values.timeline import OverTime, PhaseSpan
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.plugin.config.marker_arguments import (
    CONFIG_MARKER_DETAILS,
    MARKER_ARGUMENTS,
    MARKER_DETAILS,
    SKIP_HELP,
)
from pytest_gpumem.plugin.fixture import Gpumem, Region
from pytest_gpumem.plugin.relations.estimate import Estimate
from pytest_gpumem.plugin.relations.state import Share, StateBytes
from pytest_gpumem.plugin.runtest.launching import Launched
from pytest_gpumem.plugin.runtest.loading import Loading
from pytest_gpumem.plugin.runtest.stepping import MeasuredLoop
from reference.markdown import attribute_docstrings, docstring, page, paragraphs, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONCEPTS = (
    "Pages on the concepts: [measuring a peak](../concepts/measuring.md), [composition](../concepts/composition.md), "
    "[step time](../concepts/step-time.md)."
)
OVERVIEW = (
    "Measurements, their parts, devices and errors. The first names are imported from `pytest_gpumem`. The other classes are "
    "attributes and results of these."
)
OF_CATEGORIES = (
    "The first rule that holds decides the category of a block. Parameters, buffers, gradients and optimizer state are looked "
    "for when the recording begins and ends, at the boundaries of phases, after `backward()` and around an optimizer's step. "
    "The category holds for the whole life of the block."
)
MODEL = """The examples use this model and batch:

```python
class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


batch = torch.ones(16, 64)


def test_gpt(gpumem):
    gpumem.train_step(GPT, batch)
```"""
RETURNED = (
    *(Workload, Times, Sample, Round, Slowdown, StepPeaks, ProcessDetails, Tally, OperatorSite),
    *(Holder, OverTime, PhaseSpan, Calls, Caller),
    *(Estimate, StateBytes, Share, Launched, Loading, Region, MeasuredLoop),
)
"""Classes of values that a public value or a method of the fixture leads to, and that nobody imports."""


def marker_page() -> str:
    """Return the page of the markers and their arguments."""
    rows = [(f"[`{name}`](#{name})", _limited(one.target)) for name, one in MARKER_ARGUMENTS.items()]
    entries = [f"### `{name}`\n\n`{name}={one.example}`\n\n{one.help}" for name, one in MARKER_ARGUMENTS.items()]
    return page(
        "Markers",
        "A marker measures a test and sets its budget, and another one runs a test under several step configs.",
        f"## `@pytest.mark.gpumem`\n\n{MARKER_DETAILS.strip()}",
        table(("argument", "limits"), rows),
        *entries,
        f"## `@pytest.mark.gpumem_configs`\n\n{CONFIG_MARKER_DETAILS.strip()}",
        f'### `skip`\n\n`skip=["fp16,checkpoint=ops"]`\n\n{SKIP_HELP}',
    )


def _limited(target: str) -> str:
    timed = {"tolerance": "`peak_allocated`", "max_slowdown": "`step_time`", "min_throughput": "`throughput`"}
    return f"`{target}`" if target in METRICS else timed.get(target, "")


def fixture_page() -> str:
    """Return the page of the fixture's attribute and methods."""
    members = {name: member for name, member in vars(Gpumem).items() if not name.startswith("_")}
    return page(
        "The fixture `gpumem`",
        docstring(_text(Gpumem)),
        CONCEPTS,
        MODEL,
        *(_member("gpumem", name, member, level=2) for name, member in members.items()),
    )


def _member(owner: str, name: str, member: object, level: int) -> str:
    """Return the entry of a method, or of an attribute with a docstring of its own."""
    signature = "" if isinstance(member, property) else f"\n\n`{owner}.{name}{_signature(member)}`"
    return f"{'#' * level} `{owner}.{name}`{signature}\n\n{docstring(_text(member))}"


def _text(member: object) -> str:
    return (inspect.getdoc(member) or "").replace("`Gpumem.", "`gpumem.")


def _signature(member: object) -> str:
    """Return a signature without ``self``, types, and ``**unknown``, which only takes wrong arguments."""
    function: Callable[..., object] = getattr(member, "__func__", member)  # type: ignore[assignment]
    signature = inspect.signature(function)
    shown = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in signature.parameters.items()
        if name not in ("self", "cls", "unknown")
    ]
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))


def values_page() -> str:
    """Return the page of the public names, and of the values that they lead to."""
    public = [getattr(pytest_gpumem, name) for name in pytest_gpumem.__all__ if name not in ("Gpumem", "__version__")]
    errors = [one for one in public if issubclass(one, Exception)]
    imported = ", ".join(sorted([*(one.__name__ for one in public), "Gpumem"]))
    return page(
        "Values and errors",
        OVERVIEW,
        f"`from pytest_gpumem import {imported}`",
        CONCEPTS,
        "## `__version__`\n\nThe version of pytest-gpumem, a text.",
        "## `Gpumem`\n\nThe class of [the fixture `gpumem`](fixture.md), for annotations: `def test_it(gpumem: Gpumem)`.",
        *(_class(one) for one in (*public, *RETURNED) if one not in errors),
        "## Errors",
        *(f"### `{one.__name__}`\n\n`{one.__base__.__name__}`: {docstring(_text(one))}" for one in errors),
    )


def _class(owner: type) -> str:
    name = owner.__name__
    parts = [f"## `{name}`", docstring(_text(owner))]
    if owner is StepConfig:
        parts = [parts[0], "The settings of a step. Its fields are the [axes of a step config](step-configs.md)."]
    attributes = [f"- `{one}`{kind}: {_flat(text)}" for one, kind, text in attributes_of(owner)]
    if attributes and owner is not StepConfig:
        parts += ["**Attributes**", "\n".join(attributes)]
    elif owner is StepConfig:
        parts += ["**Attributes**", "\n".join(line for line in attributes if not _is_field(owner, line))]
    methods = list(methods_of(owner))
    if inspect.isabstract(owner):
        parts += [
            "**Members**",
            "\n".join(f"- `{one}{_signature(method)}`: {_first(method)}" for one, method in methods),
        ]
    else:
        parts += [_member(name, one, method, level=3) for one, method in methods]
    if owner is Row:
        rows = [(f"`{category}`", rule) for category, rule in CATEGORIES.items()]
        parts += [
            "### Categories",
            OF_CATEGORIES,
            table(("category", "rule"), rows),
        ]
    return "\n\n".join(parts)


def _is_field(owner: type, line: str) -> bool:
    return any(line.startswith(f"- `{field.name}`") for field in fields(owner))  # type: ignore[arg-type]


def _flat(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", paragraphs(text))


def _first(member: object) -> str:
    return _flat(_text(member).split("\n\n", 1)[0])


def attributes_of(owner: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type in parentheses and the docstring of each public attribute of a class, fields first."""
    helps: dict[str, str] = attribute_docstrings(owner)
    if is_dataclass(owner):
        names = [field.name for field in fields(owner)]
    else:
        names = list(getattr(owner, "_fields", [name for name in helps if not name.startswith("_")]))
    annotations = _annotations(owner)
    for name in names:
        yield name, _kind(annotations.get(name)), helps.get(name, "")
    for name, member in vars(owner).items():
        if isinstance(member, property | cached_property) and not name.startswith("_"):
            getter = member.fget if isinstance(member, property) else member.func
            yield name, _kind(_annotations(getter).get("return")), _text(member)  # type: ignore[arg-type]


def _annotations(owner: object) -> dict[str, object]:
    """Return the annotations, with aliases and ``Annotated`` resolved if they do not need names for type checkers alone."""
    try:
        return get_type_hints(owner)
    except NameError:
        return inspect.get_annotations(owner)  # type: ignore[arg-type]


def _kind(annotation: object) -> str:
    """Return a type in parentheses, as people read it: without the modules of its names."""
    if annotation is None:
        return ""
    written = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    if "Form(" in written:
        return ""
    written = re.sub(r"[a-z_]+\.(?=[a-zA-Z_.]*[A-Z])", "", written)
    written = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", written)  # as newer Pythons write it
    return f" (`{written}`)"


def methods_of(owner: type) -> Iterator[tuple[str, object]]:
    """Yield the public methods of a class in its order."""
    for name, member in vars(owner).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, classmethod)):
            yield name, member
