"""Write the texts in the output of `gpumem advise`: the table of configs, the recommendations, and their peaks. Pure
functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.base.units import counted, format_bytes, format_ratio, format_seconds, word_form
from pytest_gpumem.reporting.reports.explanation import PLURALS
from pytest_gpumem.reporting.reports.layout import columns
from pytest_gpumem.reporting.reports.matrix import MatrixRow, matrix_cells, matrix_table
from pytest_gpumem.tools.advise.results import configs_in_order, shares_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpumem.facts.values.composition import Composition
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.largest import Largest, SizeAxis
    from pytest_gpumem.tools.advise.results import Advice, DeviceTrials, Recommendation
    from pytest_gpumem.tools.advise.search_order import Trial

MOST_MODULES = 3
"""For each category, at most this many modules have a line of their own. A further line adds up the other modules."""
LEGEND = "reserved by PyTorch's allocator; * is recommended"


def lines(advice: Advice) -> list[str]:
    """Return all results of `gpumem advise` as lines for a terminal."""
    text = [*([advice.title] if advice.title else []), *attention_lines(advice), *advice.notes]
    if any(device.tried for device in advice.devices):
        text += ["", *_table(advice), ""] if text else [*_table(advice), ""]
    text += [line for why in lacking(advice) for line in (why, "")]
    text += [*warning_lines(advice), ""] if advice.warnings else []
    text += conclusions(advice)
    for recommended in advice.recommended:
        several = len(advice.recommended) > 1
        text += [
            "",
            *([f"{recommended.config}:"] if several else []),
            *(f"    {line}".rstrip() for line in recommended.code),
        ]
    for recommended in advice.recommended:
        text += ["", *composition_lines(recommended)]
    return text


def lacking(advice: Advice) -> list[str]:
    """Return a line for each distinct reason why peaks may be too low."""
    return [
        f"peaks may be too low: {why}"
        for why in sorted({device.lacking for device in advice.devices if device.lacking is not None})
    ]


def attention_lines(advice: Advice) -> list[str]:
    """Return a line with the model's attention implementation, on which memory depends."""
    return [f"attention: {advice.attention}, from the model's configuration"] if advice.attention else []


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
    """Return a line for each config whose precision is slow on a device, with the reason."""
    return [f"{trial.config}: {trial.slow}" for trial in device.tried if trial.slow]


def matrix_rows(device: DeviceTrials) -> list[MatrixRow]:
    """Return a table row for each trial, with its config, peak and time."""
    return [MatrixRow(str(trial.config), trial.peak, trial.time, trial.why_not) for trial in device.tried]


def card_table(cards: Sequence[DeviceTrials]) -> list[str]:
    """Return a table with a row for each config and a column for each card. Recommended configs come first.

    If there are more cards than configs, each card has a row instead.

    Example: ::

        config                      H100 80GB (84.48 GB)  B200 (190.96 GB)
        bf16,checkpoint=blocks                83.00 GB *
        amp-bf16                         lacks 104.69 GB       189.17 GB *
    """
    header, rows = card_cells(cards)
    legend = [f"  {LEGEND}"] if any(card.chosen is not None for card in cards) else []
    return [*columns(header, rows, left=(0,)), *legend, *(f"  {line}" for line in reasons(cards))]


def table_cells(advice: Advice) -> tuple[list[str], list[list[str]]]:
    """Return the table's column titles and rows, for formats with their own layout."""
    if advice.emulated:
        return card_cells(advice.devices)
    header, rows = matrix_cells(matrix_rows(advice.devices[0]), "si")
    return ["config", *header], rows


def card_cells(cards: Sequence[DeviceTrials]) -> tuple[list[str], list[list[str]]]:
    """Return the column titles and the rows for `card_table`."""
    configs = configs_in_order(cards)
    titles = [f"{card.name} ({format_bytes(card.limit or 0)})" for card in cards]
    rows = [[_cell(card, config) for card in cards] for config in configs]
    words = [str(config) for config in configs]
    if len(cards) > len(words):
        return ["card", *words], [[title, *cells] for title, *cells in zip(titles, *rows, strict=True)]
    return ["config", *titles], [[word, *cells] for word, cells in zip(words, rows, strict=True)]


def _cell(card: DeviceTrials, config: StepConfig) -> str:
    trial = next((trial for trial in card.tried if trial.config == config), None)
    if trial is None:
        return ""
    if trial.peak is None:
        return "cannot run"
    mark = " *" if card.chosen is not None and card.chosen.config == config else ""
    limit, largest = card.limit or 0, card.largest.get(config)
    most = "" if largest is None else f", at most {largest.size:,}"
    figure = f"{format_bytes(trial.peak)}{mark}" if trial.fits(limit) else f"lacks {format_bytes(trial.peak - limit)}"
    return figure + most


def reasons(cards: Sequence[DeviceTrials]) -> list[str]:
    """Return a line for each reason why configs cannot run or are slow. A line begins with the cards and configs concerned."""
    cases_by_reason: dict[str, list[tuple[str, str]]] = {}
    for card in cards:
        for trial in card.tried:
            if trial.why_not or trial.slow:
                cases_by_reason.setdefault(trial.why_not or trial.slow, []).append((card.name, str(trial.config)))
    trial_counts = {card.name: len(card.tried) for card in cards}

    def where(cases: Sequence[tuple[str, str]]) -> str:
        names = [
            name
            for name, count in trial_counts.items()
            if count and sum(card_name == name for card_name, _ in cases) == count
        ]
        return ", ".join([*names, *(f"{config} on {name}" for name, config in cases if name not in names)])

    return [f"{where(cases)}: {why}" for why, cases in cases_by_reason.items()]


def conclusions(advice: Advice) -> list[str]:
    """Return a line for each device with the recommended config. If no config fits, the line names the config with the smallest
    peak.
    """
    if advice.emulated:
        card_lines = [[_card_line(card), *_largest_lines(card, advice.size_axis)] for card in advice.devices]
        return [
            *(line for lines_for_card in card_lines for line in lines_for_card),
            *([] if advice.finished else ["not finished"]),
        ]
    (device,) = advice.devices
    return [*_device_lines(device, finished=advice.finished), *_largest_lines(device, advice.size_axis)]


def _device_lines(device: DeviceTrials, *, finished: bool) -> list[str]:
    ended = [] if finished and device.chosen is not None else [_problem_line(device, finished=finished)]
    if device.chosen is None:
        return ended
    within = "" if device.limit is None else f" of {format_bytes(device.limit)}"
    time = "" if device.chosen.time is None else f", {format_seconds(device.chosen.time)} a step"
    return [*ended, f"recommended: {device.chosen.config}: {format_bytes(device.chosen.peak or 0)}{within}{time}"]


def _largest_lines(device: DeviceTrials, size_axis: SizeAxis | None) -> list[str]:
    """Return a line for each config with the largest batch, or the longest sequence, that fits."""
    return [
        f"{device.name}: {config}: {_largest_text(largest, size_axis or 'samples', config.accumulate)}"
        for config, largest in device.largest.items()
    ]


def _largest_text(largest: Largest, size_axis: SizeAxis, accumulate: int) -> str:
    unit = accumulate if size_axis == "samples" else 1
    if not largest.is_known:
        return (
            f"at least {largest.size:,} {size_axis} fit"
            if largest.size
            else f"it is not known how many {size_axis} fit"
        )
    why = f": {largest.why_not_more}" if largest.why_not_more else ""
    if not largest.size:
        return f"not even {unit} {word_form(unit, 'fits', 'fit')}{why}"
    peak = format_bytes(largest.peak or 0)
    return f"at most {largest.size:,} {size_axis} fit, with {peak}; {largest.size + unit:,} do not{why}"


def _card_line(card: DeviceTrials) -> str:
    limit = card.limit or 0
    of = f" of {format_bytes(limit)}"
    if card.chosen is not None:
        return f"{card.name}: {card.chosen.config}, {format_bytes(card.chosen.peak or 0)}{of}"
    if card.smallest is None:
        return f"{card.name}: no config could be measured"
    lacks = format_bytes((card.smallest.peak or 0) - limit)
    return f"{card.name}: no config fits; the smallest, {card.smallest.config}, lacks {lacks}{of}"


def _problem_line(device: DeviceTrials, *, finished: bool) -> str:
    """Return the line for a device into which no config fits, or whose trials were interrupted."""
    measured = [trial for trial in device.tried if trial.peak is not None]
    if not finished:
        none_fits = ", none of them fits" if measured and device.chosen is None else ""
        return f"not finished: {counted(len(measured), 'config')} measured{none_fits}"
    if device.limit is None:
        return "no config could be measured"
    return f"no config fits into {format_bytes(device.limit)}{_smallest_text(device.smallest)}"


def _smallest_text(smallest: Trial | None) -> str:
    return "" if smallest is None else f"; the smallest is {format_bytes(smallest.peak or 0)} with {smallest.config}"


def composition_lines(recommended: Recommendation) -> list[str]:
    """Return the composition of a config's peak as a table by category and module."""
    if recommended.explanation is None:
        return [recommended.why_not] if recommended.why_not else []
    return [
        *columns([composition_title(recommended), "bytes", "of all"], parts_of(recommended), left=(0,)),
        *(f"note: {note}" for note in recommended.explanation.peak.notes),
    ]


def composition_title(recommended: Recommendation) -> str:
    """Return the title of the table with a peak's composition."""
    assert recommended.explanation is not None, "the caller has checked for an explanation"
    peak = recommended.explanation.peak
    during = f" in {peak.phase}" if peak.phase else ""
    return f"{recommended.config} on {recommended.device}: {format_bytes(peak.total)} allocated at the peak{during}"


def parts_of(recommended: Recommendation, indent: str = "  ") -> list[tuple[str, str, str]]:
    """Return table rows with a name, bytes, and a share of the peak. The row for a category is followed by rows for its largest
    modules.
    """
    assert recommended.explanation is not None, "the caller has checked for an explanation"
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
        other_modules = share.modules[MOST_MODULES:]
        if other_modules:
            yield f"{indent}{counted(len(other_modules), 'other module')}", sum(nbytes for _, nbytes in other_modules)
    if peak.rest:
        yield "the rest", peak.rest
