"""The bytes of a training step's state (parameters, gradients, optimizer), by formula and as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import UnitSystem, format_bytes, format_ratio
from pytest_gpumem.reporting.reports.layout import columns

if TYPE_CHECKING:
    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.plugin.relations.state import Share, StateBytes

MOST_DIFFERENCE = 0.02
"""The largest relative difference between a state's bytes and its formula that is not a finding."""
_COPY = 0.1
"""If the bytes differ from a multiple of the formula by at most this ratio, the state counts as several copies."""
_KINDS = ("parameters", "gradients", "gradient_buckets", "optimizer_state", "master_weights")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A training step's state by formula and as measured. ``print()`` shows its table."""

    measurement: Measurement
    """The step's measurement."""
    state: StateBytes
    """Each state by formula and as measured."""
    findings: tuple[str, ...]
    """A sentence for each state that differs from its formula by more than 2 %, and for memory between steps without owner."""

    @property
    def parameters(self) -> int:
        """Bytes by formula: elements x bytes per element in the precision's dtype.

        With sharding, only this rank's elements count, with rows rounded up for ``fully_shard``. The result is 0 with
        ``offload=params``.

        Example: 858,880 parameters in float32 take 3,435,520 bytes.
        """
        return _formula(self.state.parameters)

    @property
    def gradients(self) -> int:
        """Bytes by formula, as for ``parameters``."""
        return _formula(self.state.gradients)

    @property
    def gradient_buckets(self) -> int:
        """Bytes by formula: equal to the gradients under ``ddp`` and ``zero1``, otherwise 0."""
        return _formula(self.state.gradient_buckets)

    @property
    def optimizer_state(self) -> int:
        """Bytes by formula, or as measured for an optimizer without a formula.

        Adam and AdamW keep two averages for each parameter, SGD keeps one with momentum, Adafactor keeps a row and a column for
        each matrix, and torchao's 8-bit Adam keeps a byte for each value with scales.
        """
        return _formula(self.state.optimizer_state)

    @property
    def master_weights(self) -> int:
        """Bytes by formula: 0. Under AMP the float32 parameters are the master weights."""
        return _formula(self.state.master_weights)

    @property
    def activations(self) -> int:
        """Bytes as measured: saved and temporary tensors at forward's peak."""
        return self.state.activations

    def table(self, units: UnitSystem = "si") -> list[str]:
        """Return the table's lines, with a row for each state, and the findings.

        Args:
            units: ``"si"`` for kB, MB and GB, ``"iec"`` for KiB, MiB and GiB.
        """
        state = self.state
        shares = {name.replace("_", " "): getattr(state, name) for name in _KINDS}
        # Only DDP has gradient buckets.
        rows = [
            _row(title, share, units)
            for title, share in shares.items()
            if share is not state.gradient_buckets or share.formula
        ]
        measured = {"buffers": state.buffers, "batch": state.batch, "other at rest": state.other}
        rows += [(name, "", format_bytes(size, units), "") for name, size in measured.items() if size]
        rows.append(("activations in forward", "", format_bytes(state.activations, units), ""))
        rows.append(("peak", "", format_bytes(state.peak, units), ""))
        header = (self.measurement.workload.config or "", "formula", "measured", "off")
        return [*columns(header, rows), *self.findings]

    def __str__(self) -> str:
        return "\n".join(self.table())


def findings_of(state: StateBytes) -> tuple[str, ...]:
    """Return a sentence for each state that differs from its formula by more than 2 %, and for other memory at rest.

    Example: ``"optimizer state: 13.74 MB held, 6.87 MB by formula (+100.0 %): two copies of the optimizer state are alive"``.
    """
    sentences = []
    for name in _KINDS:
        share: Share = getattr(state, name)
        if share.formula is None or abs(share.measured - share.formula) <= MOST_DIFFERENCE * share.formula:
            continue
        title = name.replace("_", " ")
        by = f" ({format_ratio(share.measured / share.formula - 1)})" if share.formula else ""
        sentences.append(
            f"{title}: {format_bytes(share.measured)} held, {format_bytes(share.formula)} by formula{by}"
            + _copies(title, share.measured, share.formula)
        )
    largest = max(_formula(share) for share in (state.optimizer_state, state.parameters))
    if state.other > MOST_DIFFERENCE * largest and state.other > 0:
        extra = ""
        for name in ("optimizer_state", "parameters", "gradients"):
            formula = _formula(getattr(state, name))
            extra = extra or _copies(name.replace("_", " "), formula + state.other, formula)
        sentences.append(
            f"{format_bytes(state.other)} at rest belong to neither the model, the optimizer nor the batch{extra}"
        )
    return tuple(sentences)


def _copies(title: str, measured: int, formula: int) -> str:
    """Return a clause such as ``": two copies of the optimizer state are alive"``; empty if the bytes are near no multiple."""
    if not formula:
        return ""
    copies = round(measured / formula)
    if copies < 2 or abs(measured - copies * formula) > _COPY * formula:
        return ""
    number = {2: "two", 3: "three", 4: "four"}.get(copies, str(copies))
    return f": {number} copies of the {title} are alive"


def _formula(share: Share) -> int:
    return share.measured if share.formula is None else share.formula


def _row(title: str, share: Share, units: UnitSystem) -> tuple[str, str, str, str]:
    formula = "no formula" if share.formula is None else format_bytes(share.formula, units)
    off = format_ratio(share.measured / share.formula - 1) if share.formula else ""
    return title, formula, format_bytes(share.measured, units), off
