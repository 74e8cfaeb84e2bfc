"""The page of the verdicts and of pytest's exit codes."""

from __future__ import annotations

from pytest_gpumem.judging.gate.verdict import ALWAYS_FAILING, FAILING, PASSING, Outcome
from pytest_gpumem.plugin.session import exit_status
from pytest_gpumem.reporting.reports.session_report import SessionReport
from reference.markdown import attribute_docstrings, page, paragraphs, table


def verdicts_page() -> str:
    """Return the page of the verdicts, in the order of their weight, and of the exit codes."""
    texts = attribute_docstrings(Outcome)
    weight = table(
        ["Verdict", "fails its test", "with ``--gpumem-baseline``", "with ``--gpumem-strict``"],
        [(f"`{outcome.value}`", *("yes" if fails else "no" for fails in _fails(outcome))) for outcome in Outcome],
    )
    codes = table(["Code", "Meaning"], [(f"`{int(code)}`", text) for code, text in exit_status.EXIT_CODES.items()])
    return page(
        "Verdicts",
        paragraphs(str(Outcome.__doc__)),
        weight,
        *(f"## `{outcome.value}`\n\n{paragraphs(texts[outcome.name])}" for outcome in Outcome),
        "## Exit codes of pytest",
        codes,
        "### Red sessions",
        "In these cases a session ends with 1 even if no test failed, and a sentence says why.",
        paragraphs(str(SessionReport.problems.__doc__).partition("\n\n")[2]),
        "### Exit code 0",
        paragraphs(str(exit_status.__doc__)),
    )


def _fails(outcome: Outcome) -> tuple[bool, bool, bool]:
    return outcome in ALWAYS_FAILING, outcome in FAILING, outcome not in PASSING
