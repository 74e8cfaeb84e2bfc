"""The format of store files: convert TOML text to entries and back. Pure. Every error names the key.

A store file contains the baselines of a single test file on a single device. Its entries are sorted, so equal entries have
equal text. The table for a measurement is ``tests.<node id without the file>.<name of the measurement>``. The node id does not
contain pytest-xdist's ``@group``. Bytes and counts are integers. Times are in seconds. Times and ratios have four digits. A
store file has at most 34 MB. A key has at most 16 parts, separated by dots.

A step on several GPUs has an additional table for each GPU. The name of the table and its ``step`` contain the device::

    [tests."TestTrain::test_step[amp-bf16]"."train_step on cuda:1"]
    environment = "torch-2.11.0-5d2c9f"
    recorded = "2026-11-02"
    step = "on cuda:1"
    peak_allocated = 4060000000

An entry is not rewritten if only lines of code move. Its composition and the operators behind its counts explain growth, but
do not decide a verdict. So they are rewritten only together with bytes or counts. For a count of 0, no operators are stored.

An invalid file is a usage error that names the file and the key. It is never overwritten. A file is invalid if it is not a
regular file (for example a FIFO), if it is truncated, or if it has another ``format``, an unknown key, a value with a wrong
type, a number with more than 64 bits, deep nesting or merge-conflict marks. A file is also invalid if the device's folder name
in its ``slug`` differs from the folder that contains the file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pytest_gpumem.base.errors import CompositionError, FormatError
from pytest_gpumem.base.toml import read_toml
from pytest_gpumem.base.units import nearest
from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.facts.values.composition import Composition, Row, row_from_text
from pytest_gpumem.facts.values.module_calls import Calls, calls_from_text
from pytest_gpumem.facts.values.operator_counts import (
    MADE_OF_OPERATORS,
    MOST_PLACES,
    Tally,
    from_texts,
    to_texts,
    total,
)
from pytest_gpumem.judging.baselines.backend import LARGEST
from pytest_gpumem.judging.gate.baseline import Baseline, Key
from pytest_gpumem.judging.times.comparison import Runs

FORMAT = 1

Entries = Mapping[tuple[str, str], Baseline]
"""The entries in a file, by (test, measurement name)."""

_WORKLOAD: dict[str, type] = {"step": str, "config": str, "parameters": int, "batch": str}
_OPTIONAL = ("commit", "reason", "named_device")
_GRAPH = ("no_grad", "no_backward")
_COMPOSITION_PEAK = "composition_peak"
"""The key for the peak of the step that the composition describes, if another step has a higher peak."""
_COMPOSITION = ("composition", _COMPOSITION_PEAK, "phase", "other_phases", "recomputed", *_GRAPH)
_RUNS = ("step_times", "step_cycles")
_BYTES = ("workspaces", "unused_before", "gained_before")
_STEP_PEAKS = "step_peaks"
_PACKAGES = "packages"
_AT = {f"{metric}_at": metric for metric in MADE_OF_OPERATORS}
_ON = "on "
_ON_ONE_GPU = re.compile(rf"{_ON}\w+:\d+")
"""The value of ``step`` in a table for a single GPU, for example ``on cuda:1``. Measured steps have other names, so a table
with such a value cannot be a measurement."""
FILE_KEYS = {
    "format": f"The format number: {FORMAT}.",
    "environments": "A table for each environment, by its name. These tables come last, so a truncated file is recognized.",
    "tests": "A table for each measurement, by the test and the measurement's name.",
}
"""The top-level keys in a file, with their descriptions for the reference page."""
ENTRY_KEYS = {
    "environment": "The name of an environment in the same file.",
    "recorded": "The date of the recording, in UTC.",
    "commit": "The abbreviated hash of the commit that was checked out during the recording. If a change and its baseline are "
    "committed together, this is the commit before the change. Absent without git.",
    "reason": "The reason for accepting the entry (`--gpumem-reason`). It belongs to the last change of bytes, "
    "counts, workload or speed. A further change without a reason removes this reason, but further times do not. "
    "The reason may be edited by hand.",
    "named_device": "The device that the test's marker names. Absent if the test was measured on the session's device. From "
    "this key, sessions on other devices know that the test is measured on this device.",
    "workspaces": "`Measurement.workspaces`. Only on CUDA, and absent in entries from older versions.",
    "unused_before": "`Measurement.unused_before`. Only on CUDA, and absent in entries from older versions.",
    "gained_before": "`Measurement.gained_before`. Absent for 0.",
    _STEP_PEAKS: "The peak of each step in bytes, in order, if the peaks differ. `peak_allocated` is the highest of them.",
    "step_times": "The step time in each of the last accepted runs, the latest last: the median over the run's steps, in "
    "seconds. `step_time` is the median of these times. Only times from the same `machine` are compared. Absent if other "
    "work disturbed the runs too much.",
    "step_cycles": "The same medians in clock cycles.",
    "composition": "The largest rows at the peak, as `Composition.kept` selects them, with a text for each row: `category | "
    "module | operator | line | library's line | count x dtype[shape] | bytes`. Unknown parts are empty, and "
    "`block` means memory in which no tensor was seen. Absent if no composition was recorded.",
    _COMPOSITION_PEAK: "The peak, in bytes, of the step that the composition describes. Present only if another step has a "
    "higher peak.",
    "phase": "The phase in which the step has its peak.",
    "other_phases": "The rows at the peaks of other phases, if such a peak has at least half of the bytes of the step's peak. "
    "The phase comes before each row: `forward | activation | ...`. The step's peak may move to such a phase.",
    "recomputed": 'The modules that checkpointing ran again in backward, with the number of calls: `"4 x blocks.*"`.',
    "no_grad": "The modules and functions that ran with grad mode off, with the number of such calls among all calls: "
    '`"1 of 1 x teacher"`. A module is left out if its share of such calls is the same as in the module around it. The first '
    "line, `(all)`, counts all calls together.",
    "no_backward": 'The modules and functions whose calls backward did not reach, in the same form: `"4 of 11 x '
    'step()"`.',
    **{
        key: f"The calls that `{metric}` consists of, with a text for each place: `module | line | library's line | "
        f"4 addmm, 8 mm`. The {MOST_PLACES} places with the largest numbers are stored. Calls at other places are stored only "
        "by operator, and a failure shows them at `(other lines)`."
        for key, metric in _AT.items()
    },
}
"""The keys in a measurement's table, with their descriptions for the reference page. Metrics and the fields of `Workload` are
described elsewhere."""
_INTEGER_LIMIT = 2**63
_CONFLICT_MARKS = ("<<<<<<<", ">>>>>>>", "|||||||")


def parse(text: str, file: str, slug: str | None = None) -> dict[Key, Baseline]:
    """Return the entries in the text of a store file.

    Args:
        text: The text of the store file.
        file: The path of the test file, which becomes a part of each key.
        slug: The name of the store file's folder, which must be the ``slug`` in the text; ``None`` if the folder is unknown.

    Raises:
        FormatError: The text is not valid.
    """
    try:
        return _parse(text, file, slug)
    except FormatError:
        raise
    except RecursionError:
        raise FormatError("is nested too deeply; restore it from version control") from None
    except (ValueError, OverflowError) as error:
        # Python raises ValueError for a decimal number with more than 4,300 digits.
        raise FormatError(f"has a number that is too large ({error}); restore it from version control") from None


def _parse(text: str, file: str, slug: str | None) -> dict[Key, Baseline]:
    if len(text) > LARGEST:
        raise FormatError(f"has more than {LARGEST} characters; restore it from version control")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith(_CONFLICT_MARKS):
            raise FormatError(f"line {number} is a merge-conflict mark; keep one version of the conflicting lines")
    try:
        document = read_toml(text)
    except ValueError as error:
        raise FormatError(f"not TOML: {error}; restore the file from version control") from None
    version = document.pop("format", None)
    if version != FORMAT or isinstance(version, bool):
        raise FormatError(f"format is {version!r}, but this version of pytest-gpumem reads only format {FORMAT}")
    if not text.endswith("\n"):
        raise FormatError("the last line has no newline: the file is truncated; restore it from version control")
    environments = {
        name: _environment(table, f"environments.{name}", slug)
        for name, table in _table(document.pop("environments", {}), "environments").items()
    }
    entries = {
        Key(file, test, name): _entry(table, f"tests.{test}.{name}", environments)
        for test, tables in _table(document.pop("tests", {}), "tests").items()
        for name, table in _table(tables, f"tests.{test}").items()
    }
    entries = _with_devices(entries)
    if not entries:
        raise FormatError("has no baselines: the file is truncated; restore it from version control, or delete it")
    for unknown in document:
        raise FormatError(f"unknown key {unknown!r}; {nearest(unknown, list(FILE_KEYS))}")
    return entries


def _with_devices(entries: Mapping[Key, Baseline]) -> dict[Key, Baseline]:
    """Merge each table for a single GPU into the entry for the whole step."""
    merged = {key: entry for key, entry in entries.items() if not _ON_ONE_GPU.fullmatch(entry.workload.step)}
    for key, entry in entries.items():
        if key in merged:
            continue
        device = entry.workload.step.removeprefix(_ON)
        name = key.name.removesuffix(f" {_ON}{device}")
        step_key = replace(key, name=name)
        if name == key.name or step_key not in merged:
            raise FormatError(
                f"tests.{key.test}.{key.name}.step is {entry.workload.step!r}, but the table of the whole step is missing; "
                "restore the file from version control"
            )
        metrics = {metric: int(value) for metric, value in entry.metrics.items()}
        peaks = {device: entry.step_peaks} if entry.step_peaks else {}
        merged[step_key] = replace(
            merged[step_key],
            by_device={**merged[step_key].by_device, device: metrics},
            step_peaks_by_device={**merged[step_key].step_peaks_by_device, **peaks},
        )
    return merged


def render(entries: Mapping[Key, Baseline]) -> str:
    """Return the text of a store file with these entries. The text is sorted, so equal entries have equal text."""
    import tomli_w

    environments: dict[str, dict[str, Any]] = {}
    tests: dict[str, dict[str, dict[str, Any]]] = {}
    for key, entry in sorted(entries.items()):
        environment = _environment_table(entry.environment)
        name = _environment_name(environment)
        environments[name] = environment
        metrics = {metric: entry.metrics[metric] for metric in METRICS if metric in entry.metrics}
        table = {
            "environment": name,
            "recorded": entry.recorded,
            **{key: getattr(entry, key) for key in _OPTIONAL},
            **asdict(entry.workload),
            **metrics,
            **{key: getattr(entry, key) for key in _BYTES},
            **_step_peaks_table(entry.step_peaks),
            **_runs_table(entry.runs),
            **_composition_table(entry),
            **{
                key: to_texts(entry.by_operator[metric]) or None
                for key, metric in _AT.items()
                if metric in entry.by_operator
            },
        }
        of_test = tests.setdefault(key.test, {})
        of_test[key.name] = {k: value for k, value in table.items() if value is not None}
        for device, device_metrics in entry.by_device.items():
            of_test[f"{key.name} {_ON}{device}"] = {
                "environment": name,
                "recorded": entry.recorded,
                "step": f"{_ON}{device}",
                **{metric: device_metrics[metric] for metric in METRICS if metric in device_metrics},
                **_step_peaks_table(entry.step_peaks_by_device.get(device, ())),
            }
    # The environments come last. So if a file is truncated, an entry names a missing environment, which makes it invalid.
    document = {"format": FORMAT, "tests": tests, "environments": dict(sorted(environments.items()))}
    return tomli_w.dumps(document)


def _environment_table(environment: Environment) -> dict[str, Any]:
    packages = {_PACKAGES: dict(environment.packages)} if environment.packages else {}
    return {"device": environment.device, "slug": environment.slug, **environment.details, **packages}


def _environment_name(environment: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(repr(sorted(environment.items())).encode()).hexdigest()[:6]
    return f"torch-{environment.get('torch', 'unknown')}-{digest}"


def _environment(table: object, where: str, expected: str | None) -> Environment:
    values = dict(_table(table, where))
    device = _value(values, "device", str, where)
    slug = _value(values, "slug", str, where)
    if expected is not None and slug != expected:
        # With a wrong slug, these figures would be compared with measurements from another device.
        raise FormatError(
            f"{where}.slug is {slug!r}, but the file is in the folder {expected!r}; restore the file from version control, "
            f"or move it into the folder {slug!r}"
        )
    packages = _table(values.pop(_PACKAGES, {}), f"{where}.{_PACKAGES}")
    return Environment(
        slug,
        device,
        {name: _typed(value, (str, int), f"{where}.{name}") for name, value in values.items()},
        {name: _typed(value, (str,), f"{where}.{_PACKAGES}.{name}") for name, value in packages.items()},
    )


def _entry(table: object, where: str, environments: Mapping[str, Environment]) -> Baseline:
    values = dict(_table(table, where))
    name = _value(values, "environment", str, where)
    if name not in environments:
        raise FormatError(f"{where}.environment is {name!r}, which is missing in [environments]")
    recorded = _value(values, "recorded", str, where)
    optional = {key: _value(values, key, str, where) for key in _OPTIONAL if key in values}
    workload = Workload(
        **{
            field: _value(values, field, kind, where)
            for field, kind in _WORKLOAD.items()
            if field == "step" or field in values
        }
    )
    nbytes = {key: _value(values, key, int, where) for key in _BYTES if key in values}
    composed = {key: values.pop(key) for key in _COMPOSITION if key in values}
    tallies = {key: values.pop(key) for key in _AT if key in values}
    runs = _runs({key: values.pop(key) for key in _RUNS if key in values}, where)
    step_peaks = values.pop(_STEP_PEAKS, None)
    metrics: dict[str, float] = {}
    for key, value in values.items():
        if key not in METRICS:
            valid_keys = [*METRICS, *_WORKLOAD, *ENTRY_KEYS]
            raise FormatError(f"{where}.{key}: unknown key; {nearest(key, valid_keys)}")
        kinds: tuple[type, ...] = (int,) if METRICS[key].unit in WHOLE else (int, float)
        metrics[key] = _typed(value, kinds, f"{where}.{key}")
        if metrics[key] < 0:
            raise FormatError(f"{where}.{key} is {value!r}; {METRICS[key].title} cannot be negative")
        if not math.isfinite(metrics[key]):
            raise FormatError(f"{where}.{key} is {value!r}, expected a finite number")
    if "peak_allocated" not in metrics:
        raise FormatError(f"{where} has no peak_allocated: it is truncated; restore the file from version control")
    composition = _composition(composed, int(metrics["peak_allocated"]), where)
    phases = _phases(composed.get("other_phases", []), composition, f"{where}.other_phases")
    by_operator = {_AT[key]: _tallies(texts, metrics.get(_AT[key]), f"{where}.{key}") for key, texts in tallies.items()}
    return Baseline(
        workload,
        environments[name],
        metrics,
        recorded,
        composition=composition,
        runs=runs,
        by_operator=by_operator,
        other_phases=phases,
        **optional,
        **nbytes,
        step_peaks=_step_peaks(step_peaks, int(metrics["peak_allocated"]), f"{where}.{_STEP_PEAKS}"),
    )


def _step_peaks_table(peaks: tuple[int, ...]) -> dict[str, list[int]]:
    return {_STEP_PEAKS: list(peaks)} if peaks else {}


def _step_peaks(value: object, highest: int, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value:
        raise FormatError(f"{where} is {value!r}, expected an array of whole numbers")
    peaks = tuple(_typed(peak, (int,), where) for peak in value)
    if min(peaks) < 0 or max(peaks) != highest:
        raise FormatError(
            f"{where} are between {min(peaks)} and {max(peaks)} bytes, but peak_allocated, the highest of them, is {highest}; "
            f"remove {_STEP_PEAKS}, or restore the file from version control"
        )
    return peaks


def _runs_table(runs: Runs | None) -> dict[str, list[float]]:
    if runs is None:
        return {}
    return {name: list(values) for name, values in zip(_RUNS, (runs.seconds, runs.cycles), strict=True) if values}


def _runs(table: Mapping[str, object], where: str) -> Runs | None:
    if not table:
        return None
    if "step_times" not in table:
        raise FormatError(
            f"{where}.step_cycles exists, but step_times is missing; restore the file from version control"
        )
    numbers = {name: _positive_numbers(value, f"{where}.{name}") for name, value in table.items()}
    try:
        return Runs(numbers["step_times"], numbers.get("step_cycles", ()))
    except ValueError as error:
        raise FormatError(f"{where}.step_cycles: {error}") from None


def _positive_numbers(value: object, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise FormatError(f"{where} is {value!r}, expected an array of numbers")
    numbers = tuple(_typed(number, (int, float), where) for number in value)
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise FormatError(f"{where} is {value!r}, expected finite numbers above zero")
    return numbers


def _composition_table(entry: Baseline) -> dict[str, Any]:
    composition = entry.composition
    if composition is None:
        return {}
    is_highest = composition.total == entry.metrics["peak_allocated"]
    table: dict[str, Any] = {} if is_highest else {_COMPOSITION_PEAK: composition.total}
    table["composition"] = [row.text() for row in composition.rows]
    if composition.phase:
        table["phase"] = composition.phase
    if entry.other_phases:
        table["other_phases"] = [
            f"{phase} | {row.text()}" for phase, live in sorted(entry.other_phases.items()) for row in live.rows
        ]
    if composition.recomputed:
        table["recomputed"] = [f"{calls} x {path}" for path, calls in composition.recomputed.items()]
    for key in _GRAPH:
        calls_of: Mapping[str, Calls] = getattr(composition, key)
        if calls_of:
            table[key] = [calls.text(path) for path, calls in calls_of.items()]
    return table


def _composition(table: Mapping[str, object], total: int, where: str) -> Composition | None:
    if "composition" not in table:
        for key in table:
            raise FormatError(
                f"{where}.{key} exists, but composition is missing; restore the file from version control"
            )
        return None
    peak_key = _COMPOSITION_PEAK if _COMPOSITION_PEAK in table else "peak_allocated"
    total = _typed(table.get(_COMPOSITION_PEAK, total), (int,), f"{where}.{_COMPOSITION_PEAK}")
    calls: dict[str, int] = {}
    for text in _strings(table.get("recomputed", []), f"{where}.recomputed"):
        count, times, path = text.partition(" x ")
        if not times or not count.isdecimal():
            raise FormatError(f"{where}.recomputed: {text!r} is not a count of calls; write for example '4 x blocks.*'")
        calls[path] = int(count)
    try:
        composition = Composition(
            total,
            tuple(row_from_text(text) for text in _strings(table["composition"], f"{where}.composition")),
            calls,
            no_grad=_calls(table.get("no_grad", []), f"{where}.no_grad"),
            no_backward=_calls(table.get("no_backward", []), f"{where}.no_backward"),
            phase=_typed(table.get("phase", ""), (str,), f"{where}.phase"),
        )
    except CompositionError as error:
        raise FormatError(f"{where}.composition: {error}") from None
    if composition.rest < 0:
        raise FormatError(
            f"{where}.composition: its rows have {total - composition.rest} bytes, more than {peak_key} ({total}); "
            "restore the file from version control"
        )
    return composition


def _phases(texts: object, peak: Composition | None, where: str) -> dict[str, Composition]:
    """Return a composition for each phase in ``texts``. Its total is the sum over its rows."""
    rows: dict[str, list[Row]] = {}
    for text in _strings(texts, where):
        phase, _, row = text.partition(" | ")
        try:
            rows.setdefault(phase, []).append(row_from_text(row))
        except CompositionError as error:
            raise FormatError(f"{where}: {phase} | {error}") from None
    return {
        phase: replace(peak, total=sum(row.nbytes for row in phase_rows), rows=tuple(phase_rows), phase=phase)
        for phase, phase_rows in rows.items()
        if peak is not None
    }


def _tallies(texts: object, count: float | None, where: str) -> tuple[Tally, ...]:
    metric = _AT[where.rpartition(".")[2]]
    try:
        tallies = from_texts(_strings(texts, where))
    except ValueError as error:
        raise FormatError(str(error) if isinstance(error, FormatError) else f"{where}: {error}") from None
    if count is None:
        raise FormatError(f"{where} exists, but {metric} is missing; restore the file from version control")
    if total(tallies) != count:
        raise FormatError(
            f"{where} adds up to {total(tallies)}, but {metric} is {count}; remove the wrong key, or restore the file"
        )
    return tallies


def _calls(texts: object, where: str) -> dict[str, Calls]:
    try:
        return dict(map(calls_from_text, _strings(texts, where)))
    except ValueError as error:
        raise FormatError(str(error) if isinstance(error, FormatError) else f"{where}: {error}") from None


def _strings(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise FormatError(f"{where} is {value!r}, expected an array of strings")
    return value


def _table(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {value!r}, expected a table")
    return value


def _value(values: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if key not in values:
        raise FormatError(f"{where} has no {key}")
    return _typed(values.pop(key), (kind,), f"{where}.{key}")


def _typed(value: Any, kinds: tuple[type, ...], where: str) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise FormatError(f"{where} is {value!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    if isinstance(value, int) and not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise FormatError(f"{where} has more than 64 bits, the limit of TOML's whole numbers")
    return value
