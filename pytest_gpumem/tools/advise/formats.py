"""Format the results of `gpumem advise` as JSON, Markdown or an HTML page. Pure functions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.reporting.reports.escaping import block, code, code_in_table, plain, table
from pytest_gpumem.reporting.reports.explanation import composition_table
from pytest_gpumem.reporting.reports.html.charts import over_time_chart
from pytest_gpumem.reporting.reports.html.document import document
from pytest_gpumem.tools.advise.results import shares_of
from pytest_gpumem.tools.advise.texts import (
    LEGEND,
    attention_lines,
    composition_title,
    conclusions,
    lacking,
    parts_of,
    reasons,
    slow,
    table_cells,
    warning_lines,
)

if TYPE_CHECKING:
    from pytest_gpumem.tools.advise.results import Advice, DeviceTrials, Recommendation
    from pytest_gpumem.tools.advise.search_order import Trial

FORMAT = 1
"""The version number of the JSON format, which is the first field in the output."""
_MOST_ROWS = 30
"""The HTML page shows at most this many rows from a peak's composition."""


def to_json(advice: Advice, status: int) -> str:
    """Return the results as JSON. Sizes are in bytes, and times in seconds. ``status`` is the command's exit status."""
    plain_values = {
        "format": FORMAT,
        "exit_status": status,
        "finished": advice.finished,
        "subject": advice.subject,
        "step": advice.task.kind,
        "new_tokens": advice.task.new_tokens,
        "lora": None if advice.task.lora is None else str(advice.task.lora),
        "attention": advice.attention or None,
        "emulated": advice.emulated,
        "shard": None if advice.sharding is None else str(advice.sharding),
        "largest_of": advice.size_axis,
        "devices": [_plain_device(device) for device in advice.devices],
        "recommended": [_plain_recommended(recommended) for recommended in advice.recommended],
        "notes": [*advice.notes, *lacking(advice)],
        "warnings": list(advice.warnings),
    }
    return json.dumps(plain_values, indent=2) + "\n"


def _plain_device(device: DeviceTrials) -> dict[str, Any]:
    return {
        "device": device.name,
        "limit": device.limit,
        "recommended": None if device.chosen is None else str(device.chosen.config),
        "configs": [_plain_trial(trial, device) for trial in device.tried],
    }


def _plain_trial(trial: Trial, device: DeviceTrials) -> dict[str, Any]:
    limit, largest = device.limit, device.largest.get(trial.config)
    return {
        "config": str(trial.config),
        "peak": trial.peak,
        "peak_allocated": trial.allocated,
        "step_time": trial.time,
        "fits": None if limit is None or trial.peak is None else trial.fits(limit),
        "why_not": trial.why_not or None,
        "slow": trial.slow or None,
        "largest": None if largest is None else asdict(largest),
    }


def _plain_recommended(recommended: Recommendation) -> dict[str, Any]:
    peak = None if recommended.explanation is None else recommended.explanation.peak
    return {
        "config": str(recommended.config),
        "device": recommended.device,
        "code": list(recommended.code),
        # The composition comes from a separate, recorded run, so its total can differ from `peak_allocated`.
        "made_of_bytes": None if peak is None else peak.total,
        "phase": None if peak is None else peak.phase or None,
        "made_of": None
        if peak is None
        else [
            {"category": share.category, "bytes": share.nbytes, "modules": dict(share.modules)}
            for share in shares_of(peak)
        ],
        "why_not": recommended.why_not or None,
    }


def markdown(advice: Advice) -> str:
    """Return the results in GitHub's Markdown, for example for a comment on a pull request."""
    parts = [f"### {plain(_title(advice))}"]
    if any(device.tried for device in advice.devices):
        header, rows = table_cells(advice)
        parts.append(table([*map(plain, header)], [[code_in_table(row[0]), *map(plain, row[1:])] for row in rows]))
    parts += [plain(line) for line in [*_remarks(advice), *conclusions(advice)]]
    for recommended in advice.recommended:
        parts += [f"{code(str(recommended.config))}:", block("\n".join(recommended.code), "python")]
        if recommended.explanation is not None:
            peak_rows = [
                [plain(name), plain(size), plain(share)] for name, size, share in parts_of(recommended, indent="— ")
            ]
            parts.append(table([plain(composition_title(recommended)), "bytes", "of all"], peak_rows))
        elif recommended.why_not:
            parts.append(plain(recommended.why_not))
    return "\n\n".join(parts) + "\n"


def html(advice: Advice) -> str:
    """Return the results as an HTML page, with a chart of memory over time for each recommended config."""
    header, rows = table_cells(advice) if any(device.tried for device in advice.devices) else ([], [])
    return document(
        "advice.html.jinja",
        title=_title(advice),
        header=header,
        rows=rows,
        remarks=_remarks(advice),
        conclusions=conclusions(advice),
        recommended=[_panel(recommended) for recommended in advice.recommended],
    )


def _panel(recommended: Recommendation) -> dict[str, Any]:
    explanation = recommended.explanation
    over_time = None if explanation is None else explanation.over_time
    return {
        "config": str(recommended.config),
        "device": recommended.device,
        "code": "\n".join(recommended.code),
        "title": recommended.why_not if explanation is None else composition_title(recommended),
        "parts": [] if explanation is None else parts_of(recommended),
        "chart": None if over_time is None or not over_time.time_ns else over_time_chart(over_time, None, "si"),
        "table": None
        if explanation is None
        else composition_table(
            f"What the peak is made of: {format_bytes(explanation.peak.total)}", explanation.peak, "si", _MOST_ROWS
        ),
        "notes": [] if explanation is None else explanation.peak.notes,
    }


def _title(advice: Advice) -> str:
    kind = "A training step" if advice.task.trains else "An inference step"
    return advice.title if advice.subject else "; ".join(filter(None, (f"{kind} of a function's model", advice.title)))


def _remarks(advice: Advice) -> list[str]:
    legend = [LEGEND] if advice.emulated and any(device.chosen is not None for device in advice.devices) else []
    device_remarks = reasons(advice.devices) if advice.emulated else slow(advice.devices[0])
    return [*attention_lines(advice), *advice.notes, *legend, *device_remarks, *lacking(advice), *warning_lines(advice)]
