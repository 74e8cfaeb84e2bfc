"""Texts of `gpumem advise`: the table of configs and devices, what is recommended, and what its peak is made of. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.advice.results import configs_in_order, shares_of
from pytest_gpumem.reports.explanation import PLURALS
from pytest_gpumem.reports.layout import columns
from pytest_gpumem.reports.matrix import MatrixRow, matrix_cells, matrix_table
from pytest_gpumem.units import agreeing, counted, format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.advice.largest import Largest, Sought
    from pytest_gpumem.advice.results import Advice, DeviceTrials, Recommended
    from pytest_gpumem.advice.search_order import Tried
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.values.composition import Composition

MOST_MODULES = 3
"""The most modules of a category that are named; the others are one line together."""
LEGEND = "reserved by PyTorch's allocator; * is recommended"


def lines(advice: Advice) -> list[str]:
    """Return everything that was found, for a terminal."""
    text = [*([advice.title] if advice.title else []), *attention_lines(advice), *advice.notes]
    if any(device.tried for device in advice.devices):
        text += ["", *_table(advice), ""] if text else [*_table(advice), ""]
    text += [line for why in lacking(advice) for line in (why, "")]
    text += [*warning_lines(advice), ""] if advice.warnings else []
    text += conclusions(advice)
    for one in advice.recommended:
        several = len(advice.recommended) > 1
        text += ["", *([f"{one.config}:"] if several else []), *(f"    {line}".rstrip() for line in one.code)]
    for one in advice.recommended:
        text += ["", *composition_lines(one)]
    return text


def lacking(advice: Advice) -> list[str]:
    """Return why peaks may be too low, each reason once."""
    return [
        f"peaks may be too low: {why}"
        for why in sorted({one.lacking for one in advice.devices if one.lacking is not None})
    ]


def attention_lines(advice: Advice) -> list[str]:
    """Return a line with the attention implementation, because the memory depends on it."""
    return [f"attention: {advice.attention}, as the model's configuration has it"] if advice.attention else []


def warning_lines(advice: Advice) -> list[str]:
    """Return a line for each warning."""
    return [f"warning: {warning}" for warning in advice.warnings]


def _table(advice: Advice) -> list[str]:
    if advice.emulated:
        return card_table(advice.devices)
    return [
        *matrix_table("config", matrix_rows(advice.devices[0]), "si"),
        *(f"  {line}" for line in slow(advice.devices[0])),
    ]


def slow(device: DeviceTrials) -> list[str]:
    """Return a line for each config that is slow on a device, with the reason."""
    return [f"{one.config}: {one.slow}" for one in device.tried if one.slow]


def matrix_rows(device: DeviceTrials) -> list[MatrixRow]:
    """Return the rows of a table of one device: a config, its peak and its time."""
    return [MatrixRow(str(one.config), one.peak, one.time, one.why_not) for one in device.tried]


def card_table(cards: Sequence[DeviceTrials]) -> list[str]:
    """Return lines: a config in each row, those that are recommended first, and a card in each column.

    Of more cards than configs each has a row.
    """
    header, rows = card_cells(cards)
    legend = [f"  {LEGEND}"] if any(card.chosen is not None for card in cards) else []
    return [*columns(header, rows, left=(0,)), *legend, *(f"  {line}" for line in reasons(cards))]


def table_cells(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the table's columns and its rows, for formats that lay it out themselves."""
    if advice.emulated:
        return card_cells(advice.devices)
    header, rows = matrix_cells(matrix_rows(advice.devices[0]), "si")
    return ["config", *header], rows


def card_cells(cards: Sequence[DeviceTrials]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows of `card_table`."""
    configs = configs_in_order(cards)
    titles = [f"{card.name} ({format_bytes(card.limit or 0)})" for card in cards]
    rows = [[_cell(card, config) for card in cards] for config in configs]
    words = [str(config) for config in configs]
    if len(cards) > len(words):
        return ["card", *words], [[title, *cells] for title, *cells in zip(titles, *rows, strict=True)]
    return ["config", *titles], [[word, *cells] for word, cells in zip(words, rows, strict=True)]


def _cell(card: DeviceTrials, config: StepConfig) -> str:
    one = next((one for one in card.tried if one.config == config), None)
    if one is None:
        return ""
    if one.peak is None:
        return "cannot run"
    mark = " *" if card.chosen is not None and card.chosen.config == config else ""
    limit, largest = card.limit or 0, card.largest.get(config)
    most = "" if largest is None else f", at most {largest.size:,}"
    figure = f"{format_bytes(one.peak)}{mark}" if one.fits(limit) else f"lacks {format_bytes(one.peak - limit)}"
    return figure + most


def reasons(cards: Sequence[DeviceTrials]) -> list[str]:
    """Return a line for each reason why something cannot run, or is slow, with the cards and configs it is true of."""
    found: dict[str, list[tuple[str, str]]] = {}
    for card in cards:
        for one in card.tried:
            if one.why_not or one.slow:
                found.setdefault(one.why_not or one.slow, []).append((card.name, str(one.config)))
    every = {card.name: len(card.tried) for card in cards}

    def where(mine: Sequence[tuple[str, str]]) -> str:
        names = [name for name, count in every.items() if count and sum(one == name for one, _ in mine) == count]
        return ", ".join([*names, *(f"{config} on {name}" for name, config in mine if name not in names)])

    return [f"{where(mine)}: {why}" for why, mine in found.items()]


def conclusions(advice: Advice) -> list[str]:
    """Return a line for each device: what is recommended for it, or what comes closest."""
    if advice.emulated:
        ends = [[_of_card(card), *_largest_lines(card, advice.sought)] for card in advice.devices]
        return [
            *(line for lines_of_card in ends for line in lines_of_card),
            *([] if advice.finished else ["not finished"]),
        ]
    (device,) = advice.devices
    return [*_of_here(device, finished=advice.finished), *_largest_lines(device, advice.sought)]


def _of_here(device: DeviceTrials, *, finished: bool) -> list[str]:
    ended = [] if finished and device.chosen is not None else [_of_device(device, finished=finished)]
    if device.chosen is None:
        return ended
    within = "" if device.limit is None else f" of {format_bytes(device.limit)}"
    time = "" if device.chosen.time is None else f", {format_seconds(device.chosen.time)} a step"
    return [*ended, f"recommended: {device.chosen.config}: {format_bytes(device.chosen.peak or 0)}{within}{time}"]


def _largest_lines(device: DeviceTrials, sought: Sought | None) -> list[str]:
    """Return a line for each config whose largest batch, or longest sequence, was looked for."""
    return [
        f"{device.name}: {config}: {_largest(one, sought or 'samples', config.accumulate)}"
        for config, one in device.largest.items()
    ]


def _largest(one: Largest, sought: Sought, accumulate: int) -> str:
    unit = accumulate if sought == "samples" else 1
    if not one.is_known:
        return f"at least {one.size:,} {sought} fit" if one.size else f"it is not known how many {sought} fit"
    why = f": {one.why_not_more}" if one.why_not_more else ""
    if not one.size:
        return f"not even {unit} {agreeing(unit, 'fits', 'fit')}{why}"
    return f"at most {one.size:,} {sought} fit, with {format_bytes(one.peak or 0)}; {one.size + unit:,} do not{why}"


def _of_card(card: DeviceTrials) -> str:
    limit = card.limit or 0
    of = f" of {format_bytes(limit)}"
    if card.chosen is not None:
        return f"{card.name}: {card.chosen.config}, {format_bytes(card.chosen.peak or 0)}{of}"
    if card.smallest is None:
        return f"{card.name}: nothing could be measured"
    lacks = format_bytes((card.smallest.peak or 0) - limit)
    return f"{card.name}: nothing fits; the smallest, {card.smallest.config}, lacks {lacks}{of}"


def _of_device(device: DeviceTrials, *, finished: bool) -> str:
    """Return the line where nothing fits into one device, or where not everything was tried."""
    measured = [one for one in device.tried if one.peak is not None]
    if not finished:
        none = ", none of them fits" if measured and device.chosen is None else ""
        return f"not finished: {counted(len(measured), 'config')} measured{none}"
    if device.limit is None:
        return "nothing could be measured"
    return f"nothing fits into {format_bytes(device.limit)}{_closest(device.smallest)}"


def _closest(smallest: Tried | None) -> str:
    return "" if smallest is None else f"; the smallest is {format_bytes(smallest.peak or 0)} with {smallest.config}"


def composition_lines(recommended: Recommended) -> list[str]:
    """Return what the peak of a config is made of, by category and then by module, as a table."""
    if recommended.explanation is None:
        return [recommended.why_not] if recommended.why_not else []
    return [
        *columns([composition_title(recommended), "bytes", "of all"], parts_of(recommended), left=(0,)),
        *(f"note: {note}" for note in recommended.explanation.peak.notes),
    ]


def composition_title(recommended: Recommended) -> str:
    """Return the title of the table of what a config's peak is made of."""
    assert recommended.explanation is not None, "only of what was explained"
    peak = recommended.explanation.peak
    during = f" in {peak.phase}" if peak.phase else ""
    return f"{recommended.config} on {recommended.device}: {format_bytes(peak.total)} allocated at the peak{during}"


def parts_of(recommended: Recommended, indent: str = "  ") -> list[tuple[str, str, str]]:
    """Return rows of each category, and beneath it of its largest modules: a name, bytes, and their share of all."""
    assert recommended.explanation is not None, "only of what was explained"
    peak = recommended.explanation.peak
    return [
        (name, format_bytes(nbytes), format_ratio(nbytes / peak.total).lstrip("+"))
        for name, nbytes in _sizes(peak, indent)
    ]


def _sizes(peak: Composition, indent: str) -> Iterator[tuple[str, int]]:
    for share in shares_of(peak):
        yield PLURALS.get(share.category, share.category), share.nbytes
        if len(share.modules) == 1 and not share.modules[0][0]:
            continue
        yield from ((f"{indent}{module or '(no module)'}", nbytes) for module, nbytes in share.modules[:MOST_MODULES])
        others = share.modules[MOST_MODULES:]
        if others:
            yield f"{indent}{counted(len(others), 'other module')}", sum(nbytes for _, nbytes in others)
    if peak.rest:
        yield "the rest", peak.rest
