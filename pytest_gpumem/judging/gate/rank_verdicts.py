"""Merge the verdicts of all ranks on a test, so the worst verdict on any rank counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpumem.facts.values.rank import Rank, in_words, without_rank
from pytest_gpumem.judging.gate.verdict import TestVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judging.gate.verdict import Verdict


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of a test on one rank in a distributed job."""

    how: Literal["judged", "raised", "skipped", "followed"]
    """``judged``: the gate judged the test. ``raised``: the test raised an exception. ``skipped``: the test was skipped.
    ``followed``: the test ended on this rank only because it had ended on another rank."""
    verdict: TestVerdict | None = None
    why: str = ""
    """The exception in one line, or the reason for the skip."""
    when: str = ""
    """The phase in which the test raised the exception: ``set-up`` or ``call``."""
    text: str = ""
    """The exception and its traceback, as pytest shows them."""

    @property
    def failure(self) -> str:
        """A line with the phase and the exception, followed by pytest's text. Empty if the test raised no exception."""
        return f"in its {self.when}: {self.why}\n\n{self.text}" if self.how == "raised" else ""


def verdict_of_all(ends: Sequence[RankEnd], nothing: TestVerdict) -> TestVerdict | None:
    """Return the verdict on a test, merged from all ranks in a job.

    Args:
        ends: How the test ended on each rank, by rank number.
        nothing: A verdict on the test without measurements. If a rank did not judge the test, the result is this verdict with
            the ``failure``.

    Returns:
        A verdict with the measurements from all ranks. If some ranks failed by themselves or skipped the test, the verdict has
        no measurements, and its ``failure`` names these ranks. The result is ``None`` if every rank skipped the test.
    """
    if {end.how for end in ends} == {"skipped"}:
        return None
    failure = failure_of_ranks(ends)
    if failure is not None:
        clause = failure.partition("\n")[0]
        return replace(nothing, unmeasured=clause, failed_by_itself=True, failure=failure)
    return _merged([end.verdict for end in ends if end.verdict is not None])


def failure_of_ranks(ends: Sequence[RankEnd]) -> str | None:
    """Return a text on the ranks that failed or skipped a test; ``None`` if all ranks judged it, or if all skipped it."""
    world = len(ends)
    raised = [number for number, end in enumerate(ends) if end.how == "raised"]
    skipped = [number for number, end in enumerate(ends) if end.how == "skipped"]
    if raised:
        why, _, text = ends[raised[0]].failure.partition("\n\n")
        lines = [f"{Rank(raised[0], world)} failed by itself {why}"]
        lines += [f"  rank {number} failed, too: {ends[number].why}" for number in raised[1:]]
        unjudged = [number for number in range(world) if number not in raised]
        if unjudged:
            lines.append(f"  {in_words(unjudged)}: not judged, because another rank failed")
        return "\n".join([*lines, "", text])
    if skipped and len(skipped) < world:
        return (
            f"{in_words(skipped)} of {world} skipped the test, and the others ran it: {ends[skipped[0]].why}\n\n"
            "  mend:     skip it on every rank, or on none: a rank that is not measured is not gated"
        )
    followed = next((end for end in ends if end.how == "followed"), None)
    return None if followed is None else followed.why


def _merged(verdicts: Sequence[TestVerdict]) -> TestVerdict:
    """Merge the verdicts from all ranks. Measurements with the same name follow each other, in the order of their ranks."""
    by_name: dict[str, list[Verdict]] = {}
    for test in verdicts:
        for verdict in test.verdicts:
            by_name.setdefault(without_rank(verdict.measurement.name), []).append(verdict)
    return replace(
        verdicts[0],
        verdicts=tuple(verdict for verdicts_of_name in by_name.values() for verdict in verdicts_of_name),
        unmeasured=_clauses([test.unmeasured for test in verdicts], len(verdicts)),
        missing=tuple(dict.fromkeys(name for test in verdicts for name in test.missing)),
        missing_on=tuple(dict.fromkeys(slug for test in verdicts for slug in test.missing_on)),
        gpu_uses=tuple(use for test in verdicts for use in test.gpu_uses),
        jobs_beside_torch=dict(item for test in verdicts for item in test.jobs_beside_torch.items()),
        unmeasured_processes=tuple(dict.fromkeys(clause for test in verdicts for clause in test.unmeasured_processes)),
    )


def _clauses(unmeasured: Sequence[str | None], world: int) -> str | None:
    """Return a clause with the reasons why ranks measured nothing. If all ranks have the same reason, no rank is named."""
    ranks: dict[str, list[int]] = {}
    for number, why in enumerate(unmeasured):
        if why is not None:
            ranks.setdefault(why, []).append(number)
    clauses = [
        why if len(numbers) == world else f"on {in_words(numbers)} of {world}: {why}" for why, numbers in ranks.items()
    ]
    return "; ".join(clauses) or None
