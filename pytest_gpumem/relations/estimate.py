"""State of a training step by formula and as measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.reports.layout import columns
from pytest_gpumem.units import UnitSystem, format_bytes, format_ratio

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.relations.state import Share, StateBytes

OFF = 0.02
"""Largest ratio by which a state may be off its formula without a finding."""
_COPY = 0.1
"""Largest distance to whole copies, as a ratio, at which bytes are called copies."""
_KINDS = ("parameters", "gradients", "gradient_buckets", "optimizer_state", "master_weights")


@dataclass(frozen=True, slots=True)
class Estimate:
    """The state of a training step by formula and as measured. ``print()`` shows its table."""

    measurement: Measurement
    """The measurement of the step."""
    state: StateBytes
    """Both sides of each state, the formula and the measurement."""
    findings: tuple[str, ...]
    """Sentences: each state that is more than 2 % off its formula, and memory that something else holds at rest."""

    @property
    def parameters(self) -> int:
        """Bytes by formula: elements x bytes of the precision's dtype. Under sharding they are the elements of this rank,
        with rows rounded up for ``fully_shard``. 0 with ``offload=params``.
        """
        return _formula(self.state.parameters)

    @property
    def gradients(self) -> int:
        """Bytes by formula, as for ``parameters``."""
        return _formula(self.state.gradients)

    @property
    def gradient_buckets(self) -> int:
        """Bytes by formula: those of the gradients under ``ddp`` and ``zero1``, otherwise 0."""
        return _formula(self.state.gradient_buckets)

    @property
    def optimizer_state(self) -> int:
        """Bytes by formula: two averages for Adam and AdamW, one with momentum for SGD, a row and a column for each matrix for
        Adafactor, a byte per value and scales for torchao's 8-bit Adam. For other optimizers, as measured.
        """
        return _formula(self.state.optimizer_state)

    @property
    def master_weights(self) -> int:
        """Bytes by formula: 0. Under AMP the float32 parameters are the master weights."""
        return _formula(self.state.master_weights)

    @property
    def activations(self) -> int:
        """Bytes as measured: the tensors that forward adds at its peak, saved tensors and temporaries."""
        return self.state.activations

    def table(self, units: UnitSystem = "si") -> list[str]:
        """Return the table's lines: a row for each state, by formula and as measured, then the findings.

        Args:
            units: ``"si"`` for kB, MB and GB, ``"iec"`` for KiB, MiB and GiB.
        """
        state = self.state
        shares = {name.replace("_", " "): getattr(state, name) for name in _KINDS}
        # Only DDP has them.
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
    """Return the parts that are more than `OFF` off their formula, or have none, each as a sentence."""
    found = []
    for name in _KINDS:
        share: Share = getattr(state, name)
        if share.formula is None or abs(share.measured - share.formula) <= OFF * share.formula:
            continue
        title = name.replace("_", " ")
        by = f" ({format_ratio(share.measured / share.formula - 1)})" if share.formula else ""
        found.append(
            f"{title}: {format_bytes(share.measured)} held, {format_bytes(share.formula)} by formula{by}"
            + _copies(title, share.measured, share.formula)
        )
    whole = max(_formula(share) for share in (state.optimizer_state, state.parameters))
    if state.other > OFF * whole and state.other > 0:
        extra = ""
        for name in ("optimizer_state", "parameters", "gradients"):
            formula = _formula(getattr(state, name))
            extra = extra or _copies(name.replace("_", " "), formula + state.other, formula)
        found.append(
            f"{format_bytes(state.other)} at rest belong to neither the model, the optimizer nor the batch{extra}"
        )
    return tuple(found)


def _copies(title: str, measured: int, formula: int) -> str:
    """Return ``": two copies of the optimizer state are alive"`` where the bytes are near a multiple of the formula's."""
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
