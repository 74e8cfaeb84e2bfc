"""Compare a training step's state (parameters, gradients, optimizer), as measured in bytes, with formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.base.units import UnitSystem, format_bytes, format_ratio
from pytest_gpumem.reporting.reports.layout import columns

if TYPE_CHECKING:
    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.plugin.relations.state import Share, StateBytes

MOST_DIFFERENCE = 0.02
"""If the measured bytes differ from the formula by more than this ratio, the difference is a finding."""
_COPY = 0.1
"""If the measured bytes are two or more times the formula, the finding says that several copies are alive. The bytes may
differ from the multiple by this part of the formula: 2.05 times the formula counts as two copies, and 2.5 times does not."""
_KINDS = ("parameters", "gradients", "gradient_buckets", "optimizer_state", "master_weights")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A training step's state in bytes, by formula and as measured. ``print()`` shows a table."""

    measurement: Measurement
    """The step's measurement."""
    state: StateBytes
    """Parameters, gradients and other state in bytes, by formula and as measured."""
    findings: tuple[str, ...]
    """A sentence for each kind of state that differs from its formula by more than 2 %, and a sentence on memory that stays
    allocated between steps without a known owner."""

    @property
    def parameters(self) -> int:
        """The parameters' bytes by formula: elements x bytes per element in the precision's dtype.

        With sharding, only the elements on this rank count. For ``fully_shard``, this rank's rows are rounded up. The result is
        0 with ``offload=params``.

        Example: 858,880 parameters in float32 take 3,435,520 bytes.
        """
        return _formula(self.state.parameters)

    @property
    def gradients(self) -> int:
        """The gradients' bytes by formula: the same as for ``parameters``, but only for trained parameters."""
        return _formula(self.state.gradients)

    @property
    def gradient_buckets(self) -> int:
        """The gradient buckets' bytes by formula: the same as for ``gradients`` under ``ddp`` and ``zero1``, otherwise 0."""
        return _formula(self.state.gradient_buckets)

    @property
    def optimizer_state(self) -> int:
        """The optimizer state's bytes by formula, or as measured if there is no formula for the optimizer.

        Adam and AdamW keep two averages for each parameter. SGD with momentum keeps one average. Adafactor keeps a row and a
        column for each matrix. torchao's 8-bit Adam keeps two averages with a byte for each value, and scales.
        """
        return _formula(self.state.optimizer_state)

    @property
    def master_weights(self) -> int:
        """The master weights' bytes by formula: always 0. Under AMP, the float32 parameters are the master weights."""
        return _formula(self.state.master_weights)

    @property
    def activations(self) -> int:
        """The measured bytes in saved and temporary tensors at forward's peak."""
        return self.state.activations

    def table(self, units: UnitSystem = "si") -> list[str]:
        """Return the table's lines, with a row for parameters, gradients and so on, followed by the findings.

        Args:
            units: ``"si"`` for kB, MB and GB, or ``"iec"`` for KiB, MiB and GiB.
        """
        state = self.state
        shares = {name.replace("_", " "): getattr(state, name) for name in _KINDS}
        # Only DDP and ZeRO-1 have gradient buckets, so leave out their row if the formula is 0.
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
    """Return a sentence for each kind of state that differs from its formula by more than 2 %, and a sentence on other memory.

    Other memory exists between two steps ("at rest"), but belongs to neither the model, the optimizer nor the batch.

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
    """Return a clause such as ``": two copies of the gradients are alive"``; empty if ``measured`` is no multiple."""
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
