"""The table of configs and cards: what each takes, and by how much a card is too small for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.reports.layout import columns
from pytest_gpumem.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.advice.search_order import Tried
    from pytest_gpumem.step_config.config import StepConfig


@dataclass(frozen=True, slots=True)
class CardTrials:
    """Trials on a card: its name, the bytes that a step may take there, what was tried, and the one that is recommended."""

    name: str
    limit: int
    tried: tuple[Tried, ...]
    chosen: Tried | None
    lacking: str | None = None
    """The reason why peaks may be too low, as a clause."""


def card_table(cards: Sequence[CardTrials]) -> list[str]:
    """Return lines: a config in each row, those that are recommended first, and a card in each column.

    Of more cards than configs each has a row.
    """
    configs = dict.fromkeys(one.chosen.config for one in cards if one.chosen is not None)
    configs |= dict.fromkeys(one.config for card in cards for one in card.tried)
    titles = [f"{card.name} ({format_bytes(card.limit)})" for card in cards]
    rows = [[_cell(card, config) for card in cards] for config in configs]
    words = [str(config) for config in configs]
    if len(cards) > len(words):
        header, named = ["card", *words], [[title, *cells] for title, *cells in zip(titles, *rows, strict=True)]
    else:
        header, named = ["config", *titles], [[word, *cells] for word, cells in zip(words, rows, strict=True)]
    return [*columns(header, named, left=(0,)), *_reasons(cards)]


def conclusions(cards: Sequence[CardTrials]) -> list[str]:
    """Return a line for each card: what is recommended for it, or what comes closest."""
    return [_conclusion(card) for card in cards]


def _cell(card: CardTrials, config: StepConfig) -> str:
    one = next((one for one in card.tried if one.config == config), None)
    if one is None:
        return ""
    if one.peak is None:
        return "cannot run"
    mark = " *" if card.chosen is not None and card.chosen.config == config else ""
    if one.fits(card.limit):
        return f"{format_bytes(one.peak)}{mark}"
    return f"lacks {format_bytes(one.peak - card.limit)}"


def _reasons(cards: Sequence[CardTrials]) -> list[str]:
    """Return a line for each reason why something cannot run, or is slow, with the cards and configs it is true of."""
    found: dict[str, list[str]] = {}
    for card in cards:
        for one in card.tried:
            if one.why_not or one.slow:
                found.setdefault(one.why_not or one.slow, []).append(f"{one.config} on {card.name}")
    every = {one.name: len(one.tried) for one in cards if one.tried}

    def where(mine: Sequence[str]) -> str:
        names = [name for name, count in every.items() if sum(one.endswith(f" on {name}") for one in mine) == count]
        rest = [one for one in mine if not any(one.endswith(f" on {name}") for name in names)]
        return ", ".join([*names, *rest])

    lines = [f"  {where(mine)}: {why}" for why, mine in found.items()]
    if any(card.chosen is not None for card in cards):
        lines.insert(0, "  reserved by PyTorch's allocator; * is recommended")
    return lines


def _conclusion(card: CardTrials) -> str:
    of = f" of {format_bytes(card.limit)}"
    if card.chosen is not None:
        return f"{card.name}: {card.chosen.config}, {format_bytes(card.chosen.peak or 0)}{of}"
    smallest = min((one for one in card.tried if one.peak is not None), key=lambda one: one.peak or 0, default=None)
    if smallest is None:
        return f"{card.name}: nothing could be measured"
    lacks = format_bytes((smallest.peak or 0) - card.limit)
    return f"{card.name}: nothing fits; the smallest, {smallest.config}, lacks {lacks}{of}"
