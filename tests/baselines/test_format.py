"""The text of a file of the store: it can be read back whole, looks the same for the same, and is refused when broken."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.errors import FormatError
from pytest_gpumem.facts.measurement import Environment, Workload
from pytest_gpumem.facts.metrics import METRICS, WHOLE
from pytest_gpumem.facts.values.categories import CATEGORIES
from pytest_gpumem.facts.values.composition import Composition, Row
from pytest_gpumem.facts.values.module_calls import Calls
from pytest_gpumem.facts.values.operator_counts import MADE_OF_OPERATORS, OperatorSite, Tally, sum_tallies, total
from pytest_gpumem.judging.baselines.format import FORMAT, parse, render
from pytest_gpumem.judging.gate.baseline import Baseline, Key
from pytest_gpumem.judging.times.comparison import Runs
from tests.hostile import TEXTS as HOSTILE

if TYPE_CHECKING:
    import random

unhurried = settings(deadline=None)
FILE = "tests/test_gpt.py"

H100 = Environment(
    "nvidia-h100-80gb-hbm3",
    "NVIDIA H100 80GB HBM3",
    {"total_memory": 85_017_100_288, "torch": "2.11.0", "cuda": "13.0", "allocator": "default"},
)
TRAIN = Baseline(
    Workload("train_step", "fp32", 124_439_808, "int64[8, 1024]"),
    H100,
    {"peak_allocated": 8_120_000_000, "peak_reserved": 9_000_000_000, "step_time": 0.01231, "throughput": 649.9},
    "2026-11-02",
    "abc1234",
)
CALL = Baseline(Workload("call"), H100, {"peak_allocated": 512, "retained": 0}, "2026-11-02")
TRAIN_KEY = Key(FILE, "TestTrain::test_step[amp-bf16]", "train_step")
ENTRIES = {Key(FILE, "test_generate", "call"): CALL, TRAIN_KEY: TRAIN}
TEXT = """\
format = 1

[tests."TestTrain::test_step[amp-bf16]".train_step]
environment = "torch-2.11.0-23af2a"
recorded = "2026-11-02"
commit = "abc1234"
step = "train_step"
config = "fp32"
parameters = 124439808
batch = "int64[8, 1024]"
peak_allocated = 8120000000
peak_reserved = 9000000000
step_time = 0.01231
throughput = 649.9

[tests.test_generate.call]
environment = "torch-2.11.0-23af2a"
recorded = "2026-11-02"
step = "call"
peak_allocated = 512
retained = 0

[environments."torch-2.11.0-23af2a"]
device = "NVIDIA H100 80GB HBM3"
slug = "nvidia-h100-80gb-hbm3"
allocator = "default"
cuda = "13.0"
torch = "2.11.0"
total_memory = 85017100288
"""

# Test ids: anything that pytest may make of a parameter, which is never a newline and never half of a character.
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n\r"), max_size=12)
IDS = TEXTS | st.sampled_from(
    [
        "test_a[b]",
        'test_a["b"]',
        "test_a['b']",
        "test_a[b\\n]",
        "test_é[日本]",
        "a.b.c",
        "TestA::test_b",
        "[tests]",
        "=",
    ]
)
SIZES = st.integers(0, 2**50)
TIMES = st.floats(0, 1e9, allow_nan=False)
ENVIRONMENTS = st.builds(
    Environment,
    slug=st.sampled_from(["cpu-x86_64", "nvidia-h100-80gb-hbm3"]),
    device=TEXTS,
    details=st.dictionaries(
        st.sampled_from(["torch", "cuda", "driver"]) | TEXTS.filter(lambda name: name not in ("device", "slug")),
        TEXTS | st.integers(-(2**63), 2**63 - 1),
        max_size=4,
    ),
)
WORKLOADS = st.builds(
    Workload,
    step=TEXTS,
    config=st.none() | TEXTS,
    parameters=st.none() | SIZES,
    batch=st.none() | TEXTS,
)
KINDS_OF_VALUES = {name: SIZES if metric.unit in WHOLE else TIMES for name, metric in METRICS.items()}
METRIC_VALUES = st.fixed_dictionaries(
    {"peak_allocated": KINDS_OF_VALUES.pop("peak_allocated")}, optional=KINDS_OF_VALUES
)
# A name in a row never has an upright stroke, which its text would show as a slash.
NAMES = TEXTS.map(lambda text: text.replace("|", "/"))
ROWS = st.builds(
    Row,
    st.sampled_from([*CATEGORIES]),
    SIZES,
    NAMES,
    NAMES,
    NAMES,
    NAMES,
    NAMES.filter(lambda text: text != "block"),
    st.integers(0, 999),
)
SHARES = st.tuples(st.integers(0, 99), st.integers(0, 99)).map(lambda two: Calls(two[0], sum(two)))
COMPOSITIONS = st.none() | st.builds(
    Composition,
    SIZES,
    st.lists(ROWS, max_size=3).map(tuple),
    st.dictionaries(NAMES, st.integers(1, 99), max_size=2),
    no_grad=st.dictionaries(NAMES, SHARES, max_size=2),
    no_backward=st.dictionaries(NAMES, SHARES, max_size=2),
    phase=NAMES,
)
PHASES = st.dictionaries(
    st.sampled_from(["forward", "backward", "optimizer"]), st.lists(ROWS, min_size=1, max_size=3), max_size=2
)


def with_phases(entry: Baseline, phases: dict[str, list[Row]]) -> Baseline:
    """An entry that keeps what was live at the peaks of these phases."""
    if entry.composition is None:
        return entry
    peaks = {
        phase: replace(entry.composition, total=sum(row.nbytes for row in rows), rows=tuple(rows), phase=phase)
        for phase, rows in phases.items()
    }
    return replace(entry, other_phases=peaks)


def entry_with(entry: Baseline, composition: Composition | None) -> Baseline:
    """An entry with a composition whose rows, and what its total says as their rest, are together its peak."""
    if composition is None:
        return entry
    total = sum(row.nbytes for row in composition.rows) + composition.total
    metrics = {**entry.metrics, "peak_allocated": total}
    return replace(entry, metrics=metrics, composition=replace(composition, total=total))


# Of an operator's name, what separates one from the next.
OPERATORS = TEXTS.map(lambda text: text.replace("|", "/").replace(",", ";"))
TALLIES = st.lists(
    st.builds(Tally, OPERATORS, st.integers(1, 99), st.builds(OperatorSite, NAMES, NAMES, NAMES)), max_size=3
)


def made_of(entry: Baseline, by_operator: dict[str, list[Tally]]) -> Baseline:
    """An entry whose counts are made of these."""
    tallies = {name: sum_tallies(found) for name, found in by_operator.items()}
    metrics = {**entry.metrics, **{name: total(found) for name, found in tallies.items()}}
    return replace(entry, metrics=metrics, by_operator=tallies)


FILES_ENTRIES = st.dictionaries(
    st.builds(Key, st.just(FILE), IDS, IDS),
    st.builds(
        lambda entry, composition, phases, tallies: made_of(
            with_phases(entry_with(entry, composition), phases), tallies
        ),
        st.builds(Baseline, WORKLOADS, ENVIRONMENTS, METRIC_VALUES, TEXTS, st.none() | TEXTS, reason=st.none() | TEXTS),
        COMPOSITIONS,
        PHASES,
        st.dictionaries(st.sampled_from(MADE_OF_OPERATORS), TALLIES, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@unhurried
@given(FILES_ENTRIES)
@example({Key(FILE, "test_a[\u2028<<<<<<< ours]", "call"): CALL})
def test_what_was_written_is_read_back_whole_and_sorted(entries):
    back = parse(render(entries), FILE)
    assert back == entries
    assert list(back) == sorted(entries)


@unhurried
@given(FILES_ENTRIES, st.randoms(use_true_random=False))
def test_the_order_of_entries_does_not_show(entries, random_order: random.Random):
    shuffled = list(entries.items())
    random_order.shuffle(shuffled)
    assert render(dict(shuffled)) == render(entries)


def test_a_file_is_made_to_be_read_in_a_diff():
    assert render(ENTRIES) == TEXT
    assert parse(TEXT, FILE) == ENTRIES


SPLIT = replace(
    CALL,
    metrics={"peak_allocated": 640, "retained": 9},
    workspaces=0,
    by_device={"cuda:0": {"peak_allocated": 512, "retained": 9}, "cuda:1": {"peak_allocated": 640, "retained": 0}},
)
SPLIT_TEXT = """\
[tests.test_split.call]
environment = "torch-2.11.0-23af2a"
recorded = "2026-11-02"
step = "call"
peak_allocated = 640
retained = 9
workspaces = 0

[tests.test_split."call on cuda:0"]
environment = "torch-2.11.0-23af2a"
recorded = "2026-11-02"
step = "on cuda:0"
peak_allocated = 512
retained = 9

[tests.test_split."call on cuda:1"]
environment = "torch-2.11.0-23af2a"
recorded = "2026-11-02"
step = "on cuda:1"
peak_allocated = 640
retained = 0
"""


def test_the_bytes_of_each_gpu_are_tables_that_a_reader_of_entries_reads():
    entries = {**ENTRIES, Key(FILE, "test_split", "call"): SPLIT}
    assert SPLIT_TEXT in render(entries)
    assert parse(render(entries), FILE) == entries
    assert render(parse(render(entries), FILE)) == render(entries)


def test_a_measurement_named_like_a_part_of_another_stays_separate():
    entries = {Key(FILE, "test_a", name): CALL for name in ("call", "call on cuda:1")}
    assert parse(render(entries), FILE) == entries


def test_the_bytes_of_a_gpu_without_the_entry_that_they_belong_to_are_told():
    text = render({Key(FILE, "test_split", "call"): SPLIT})
    first = text.index("[tests.test_split.call]")
    with pytest.raises(FormatError, match=r"tests\.test_split\.call on cuda:0\.step is 'on cuda:0', .* is missing"):
        parse(text[:first] + text[text.index('[tests.test_split."call on cuda:0') :], FILE)


DIFFERING = replace(
    SPLIT,
    step_peaks=(512, 640, 600),
    step_peaks_by_device={"cuda:1": (500, 640, 600)},
)


def test_the_peaks_of_steps_that_differ_stand_below_the_metrics():
    entries = {**ENTRIES, Key(FILE, "test_split", "call"): DIFFERING}
    text = render(entries)
    assert "workspaces = 0\nstep_peaks = [\n    512,\n    640,\n    600,\n]\n" in text
    assert parse(text, FILE) == entries


def test_a_composition_of_another_step_has_its_own_peak():
    rows = Composition(600, (Row("activation", 500, count=1), Row("other", 100, count=1)))
    entries = {**ENTRIES, Key(FILE, "test_split", "call"): replace(DIFFERING, composition=rows)}
    assert "composition_peak = 600\n" in render(entries)
    assert parse(render(entries), FILE) == entries
    with pytest.raises(FormatError, match=r"rows have 600 bytes, more than composition_peak \(599\)"):
        parse(render(entries).replace("composition_peak = 600", "composition_peak = 599"), FILE)


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ("[]", r"step_peaks is \[\], expected an array of whole numbers"),
        ("7", "step_peaks is 7, expected an array of whole numbers"),
        ("[1.5]", "step_peaks is 1.5, expected int"),
        ("[1, 2]", "between 1 and 2 bytes, but peak_allocated, the highest of them, is 640"),
        ("[-1, 640]", "between -1 and 640 bytes"),
    ],
)
def test_peaks_of_steps_that_are_none_are_told(peaks, said):
    entries = {**ENTRIES, Key(FILE, "test_split", "call"): replace(SPLIT, by_device={}, step_peaks=(640,))}
    with pytest.raises(FormatError, match=said):
        parse(render(entries).replace("step_peaks = [\n    640,\n]", f"step_peaks = {peaks}"), FILE)


def test_a_reason_stands_behind_the_commit_in_one_line():
    entries = {key: replace(entry, reason='attention "off"\nuntil #12') for key, entry in ENTRIES.items()}
    text = render(entries)
    assert 'commit = "abc1234"\nreason = "attention \\"off\\"\\nuntil #12"\nstep = ' in text
    assert parse(text, FILE) == entries


@pytest.mark.parametrize(
    "name", ["quotes", "newlines", "controls", "noncharacters", "wide", "json", "toml", "spaces", "nothing", "long"]
)
def test_any_reason_is_read_back_whole(name):
    reason = HOSTILE[name]
    entries = {key: replace(entry, reason=reason) for key, entry in ENTRIES.items()}
    assert parse(render(entries), FILE) == entries


def test_an_environment_that_entries_share_stands_once():
    assert TEXT.count("NVIDIA H100 80GB HBM3") == 1
    other = Environment(H100.slug, H100.device, {**H100.details, "driver": "580"})
    mixed = {**ENTRIES, Key(FILE, "test_z", "call"): Baseline(CALL.workload, other, CALL.metrics, CALL.recorded)}
    assert render(mixed).count("NVIDIA H100 80GB HBM3") == 2


def test_one_entry_more_changes_only_its_own_lines():
    more = {**ENTRIES, Key(FILE, "test_z", "call"): CALL}
    tests, environments = TEXT[: TEXT.index("[environments.")], TEXT[TEXT.index("[environments.") :]
    assert render(more).startswith(tests)
    assert render(more).endswith(environments)


def test_a_file_without_entries_is_truncated_since_none_is_ever_written():
    with pytest.raises(FormatError, match="has no baselines: the file is truncated"):
        parse(f"format = {FORMAT}\n", FILE)


def test_a_file_with_the_line_ends_of_windows_is_read_alike():
    assert parse(TEXT.replace("\n", "\r\n"), FILE) == ENTRIES


@pytest.mark.parametrize("details", [{"compiled": True}, {"nothing": None}, {"device": "another"}, {"slug": "another"}])
def test_an_environment_that_could_not_be_read_back_is_not_written(details):
    with pytest.raises((TypeError, ValueError)):
        render({Key(FILE, "test_a", "call"): Baseline(Workload("call"), Environment("slug", "GPU", details), {}, "")})


# What counts are made of

MADE = replace(
    TRAIN,
    metrics={**TRAIN.metrics, "flops": 3000, "operators": 15, "syncs": 0},
    by_operator={
        "flops": (
            Tally("addmm", 1000, OperatorSite("h.*", "m.py:9")),
            Tally("mm", 2000, OperatorSite("h.*", "m.py:9")),
        ),
        "operators": (
            Tally("addmm", 4, OperatorSite("h.*", "m.py:9")),
            Tally("mm", 8, OperatorSite("h.*", "m.py:9")),
            Tally("sum", 2, OperatorSite("head", "m.py:30", "lib/gpt.py:3")),
            Tally("add", 1),
        ),
    },
)
MADE_ENTRIES = {**ENTRIES, TRAIN_KEY: MADE}
MADE_OF = """\
flops_at = [
    "h.* | m.py:9 |  | 1000 addmm, 2000 mm",
]
operators_at = [
    "h.* | m.py:9 |  | 4 addmm, 8 mm",
    "head | m.py:30 | lib/gpt.py:3 | 2 sum",
    " |  |  | 1 add",
]
"""


def test_what_counts_are_made_of_is_a_line_a_place_and_nothing_for_a_count_of_0():
    text = render(MADE_ENTRIES)
    assert MADE_OF in text
    assert "syncs_at" not in text
    assert parse(text, FILE) == MADE_ENTRIES
    assert MADE.by_operator["syncs"] == ()


def test_an_entry_of_an_older_version_does_not_say_what_its_counts_are_made_of():
    text = render(MADE_ENTRIES).replace(MADE_OF, "")
    entry = parse(text, FILE)[TRAIN_KEY]
    assert entry == replace(MADE, by_operator={})
    assert entry.by_operator == {"syncs": ()}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flops = 3000\n", "", "flops_at exists, but flops is missing"),
        (
            "operators = 15",
            "operators = 16",
            "operators_at adds up to 15, but operators is 16; remove the wrong key",
        ),
        (
            "4 addmm, 8 mm",
            "4 addmm, mm",
            "operators_at: 'h.* | m.py:9 |  | 4 addmm, mm': 'mm' is no count of an operator",
        ),
        ("m.py:9 |  | 4", "m.py:9 | 4", "operators_at: 'h.* | m.py:9 | 4 addmm, 8 mm' has 3 parts, expected 4: module"),
        (MADE_OF, "operators_at = 5\n", "operators_at is 5, expected an array of strings"),
    ],
)
def test_what_counts_cannot_be_made_of_is_told_by_its_key(old, new, message):
    text = render(MADE_ENTRIES)
    assert old in text
    with pytest.raises(FormatError, match=re.escape(f"tests.TestTrain::test_step[amp-bf16].train_step.{message}")):
        parse(text.replace(old, new), FILE)


# Broken texts

NAME = "torch-2.11.0-23af2a"
STEP = "tests.TestTrain::test_step[amp-bf16].train_step"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "format is 2, but this version of pytest-gpumem reads only format 1"),
        ("format = 1", "format = true", "format is True, but this version of pytest-gpumem reads only format 1"),
        ("format = 1", "format = 1\nenvironment = 5", "unknown key 'environment'; did you mean 'environments'?"),
        ("format = 1", "format = 1\nzebra = 5", "unknown key 'zebra'; valid: format, environments, tests"),
        ("total_memory = 85017100288", "total_memory = 1.5", f"environments.{NAME}.total_memory is 1.5, "),
        ('cuda = "13.0"', "cuda = true", f"environments.{NAME}.cuda is True, expected str or int"),
        ('device = "NVIDIA H100 80GB HBM3"\n', "", f"environments.{NAME} has no device"),
        ('slug = "nvidia-h100-80gb-hbm3"', "slug = 100", f"environments.{NAME}.slug is 100, expected str"),
        (f'environment = "{NAME}"\n', "", f"{STEP} has no environment"),
        (
            f'environment = "{NAME}"',
            'environment = "torch-2"',
            f"{STEP}.environment is 'torch-2', which is missing in [environments]",
        ),
        ('recorded = "2026-11-02"\n', "", f"{STEP} has no recorded"),
        ('commit = "abc1234"', "commit = 1234567", f"{STEP}.commit is 1234567, expected str"),
        ('step = "train_step"\n', "", f"{STEP} has no step"),
        ("parameters = 124439808", 'parameters = "124M"', f"{STEP}.parameters is '124M', expected int"),
        ("peak_allocated = 8120000000", "peak_allocated = 8.12", f"{STEP}.peak_allocated is 8.12, expected int"),
        (
            "peak_allocated = 8120000000",
            "peak_allocated = -1",
            f"{STEP}.peak_allocated is -1; peak allocated cannot be negative",
        ),
        ("step_time = 0.01231", 'step_time = "12 ms"', f"{STEP}.step_time is '12 ms', expected int or float"),
        (
            "peak_allocated = 8120000000",
            "peak_alocated = 8120000000",
            f"{STEP}.peak_alocated: unknown key; did you mean 'peak_allocated'?",
        ),
        ("peak_allocated = 8120000000", "zebra = 5", f"{STEP}.zebra: unknown key; valid: peak_allocated, "),
    ],
)
def test_a_broken_entry_is_told_by_its_key(old, new, message):
    assert old in TEXT
    with pytest.raises(FormatError, match=f"^{re.escape(message)}"):
        parse(TEXT.replace(old, new, 1), FILE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = 1\ntests = 5\n", "tests is 5, expected a table"),
        ("format = 1\nenvironments = []\n", "environments is [], expected a table"),
        ("format = 1\n[tests]\ntest_a = 5\n", "tests.test_a is 5, expected a table"),
        ("format = 1\n[tests.test_a]\ncall = 5\n", "tests.test_a.call is 5, expected a table"),
        ("format = 1\n[environments]\ncpu = 5\n", "environments.cpu is 5, expected a table"),
        ("format = 1\nformat = 1\n", "not TOML: "),
    ],
)
def test_a_text_of_another_shape_is_told_by_its_key(text, message):
    with pytest.raises(FormatError, match=f"^{re.escape(message)}"):
        parse(text, FILE)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_time_that_is_no_number_is_told_by_its_key(value):
    with pytest.raises(FormatError, match=re.escape(f"{STEP}.step_time")):
        parse(TEXT.replace("step_time = 0.01231", f"step_time = {value}"), FILE)


def test_a_merge_conflict_is_told_by_its_line():
    ours, theirs = "peak_allocated = 512", "peak_allocated = 1024"
    conflict = f"<<<<<<< HEAD\n{ours}\n=======\n{theirs}\n>>>>>>> feature\n"
    text = TEXT.replace(f"{ours}\n", conflict)
    line = text.splitlines().index("<<<<<<< HEAD") + 1
    with pytest.raises(
        FormatError, match=f"^line {line} is a merge-conflict mark; keep one version of the conflicting lines$"
    ):
        parse(text, FILE)


@pytest.mark.parametrize("mark", ["<<<<<<< HEAD", "||||||| base"])
def test_what_a_careless_merge_leaves_behind_is_told_by_its_line(mark):
    with pytest.raises(FormatError, match=r"^line 1 is a merge-conflict mark"):
        parse(f"{mark}\n{TEXT}", FILE)


# Runs

TIMED = replace(TRAIN, runs=Runs((0.01231, 0.01228), (21_820_000.0, 21_790_000.0)))
TIMED_ENTRIES = {**ENTRIES, TRAIN_KEY: TIMED}
STEP_TIMES = """\
step_times = [
    0.01231,
    0.01228,
]
"""
STEP_CYCLES = """\
step_cycles = [
    21820000.0,
    21790000.0,
]
"""
TIMED_TEXT = TEXT.replace("throughput = 649.9\n", f"throughput = 649.9\n{STEP_TIMES}{STEP_CYCLES}")


def test_the_accepted_runs_are_a_line_each_the_latest_last():
    assert render(TIMED_ENTRIES) == TIMED_TEXT
    assert parse(TIMED_TEXT, FILE) == TIMED_ENTRIES


def test_runs_whose_clock_was_not_read_have_no_cycles():
    entries = {Key(FILE, "test_a", "train_step"): replace(TRAIN, runs=Runs((0.01231,)))}
    assert "step_cycles" not in render(entries)
    assert parse(render(entries), FILE) == entries


def test_whole_numbers_are_times_too():
    text = TIMED_TEXT.replace("0.01231,", "1,").replace("21820000.0,", "21820000,")
    runs = parse(text, FILE)[TRAIN_KEY].runs
    assert runs == Runs((1, 0.01228), (21_820_000, 21_790_000.0))


@unhurried
@given(st.lists(st.tuples(st.floats(1e-9, 1e6), st.floats(1.0, 1e15)), min_size=1, max_size=10), st.booleans())
def test_runs_that_were_written_are_read_back_whole(runs, clock):
    seconds, cycles = zip(*runs, strict=True)
    entries = {Key(FILE, "test_a", "train_step"): replace(TRAIN, runs=Runs(seconds, cycles if clock else ()))}
    assert parse(render(entries), FILE) == entries


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (STEP_TIMES, "", "step_cycles exists, but step_times is missing"),
        (STEP_TIMES, "step_times = 0.5\n", "step_times is 0.5, expected an array of numbers"),
        ("0.01228,", '"12 ms",', "step_times is '12 ms', expected int or float"),
        ("0.01228,", "0.0,", "step_times is [0.01231, 0.0], expected finite numbers above zero"),
        ("0.01228,", "inf,", "step_times is [0.01231, inf], expected finite numbers above zero"),
        ("21790000.0,", "0,", "step_cycles is [21820000.0, 0], expected finite numbers above zero"),
        ("    21790000.0,\n", "", "step_cycles: there are seconds for 2 runs, but cycles for 1"),
        ("step_times =", "step_time_s =", "step_cycles exists, but step_times is missing"),
        (STEP_CYCLES, "step_cycle = []\n", "step_cycle: unknown key; did you mean 'step_cycles'?"),
    ],
)
def test_broken_runs_are_told_by_their_key(old, new, message):
    assert old in TIMED_TEXT
    with pytest.raises(FormatError, match=f"^{re.escape(STEP)}\\.{re.escape(message)}"):
        parse(TIMED_TEXT.replace(old, new, 1), FILE)


# Compositions

SOFTMAX = Row(
    "activation",
    5_100_000_000,
    module="blocks.*.attn",
    site="model.py:88",
    operator="_softmax",
    tensor="float32[8, 12, 1024, 1024]",
    count=24,
)
COMPOSED = replace(
    TRAIN,
    composition=Composition(
        8_120_000_000,
        (Row("parameter", 498, "wte"), SOFTMAX),
        {"blocks.*": 4, "head": 1},
        no_grad={"(all)": Calls(7, 21), "teacher": Calls(1, 1)},
        no_backward={"probe": Calls(1, 2)},
    ),
)
COMPOSED_ENTRIES = {**ENTRIES, TRAIN_KEY: COMPOSED}
COMPOSITION = """\
composition = [
    "activation | blocks.*.attn | _softmax | model.py:88 |  | 24 x float32[8, 12, 1024, 1024] | 5100000000",
    "parameter | wte |  |  |  | 1 x block | 498",
]
"""
RECOMPUTED = """\
recomputed = [
    "4 x blocks.*",
    "1 x head",
]
"""
GRAPH = """\
no_grad = [
    "7 of 21 x (all)",
    "1 of 1 x teacher",
]
no_backward = [
    "1 of 2 x probe",
]
"""
COMPOSED_TEXT = TEXT.replace("throughput = 649.9\n", f"throughput = 649.9\n{COMPOSITION}{RECOMPUTED}{GRAPH}")


def test_a_composition_is_a_line_for_each_row_the_largest_first():
    assert render(COMPOSED_ENTRIES) == COMPOSED_TEXT
    assert parse(COMPOSED_TEXT, FILE) == COMPOSED_ENTRIES


def test_what_was_live_at_peaks_of_other_phases_is_a_line_a_row_with_its_phase():
    peak = replace(COMPOSED.composition, phase="backward")
    forward = replace(peak, total=498, rows=(Row("parameter", 498, "wte"),), phase="forward")
    entries = {
        Key(FILE, "test_a", "train_step"): replace(COMPOSED, composition=peak, other_phases={"forward": forward})
    }
    text = render(entries)
    assert (
        'phase = "backward"\nother_phases = [\n    "forward | parameter | wte |  |  |  | 1 x block | 498",\n]\n' in text
    )
    assert parse(text, FILE) == entries
    line = '"forward | parameter | wte |  |  |  | 1 x block | 498"'
    for wrong, told in (('"forward | wte"', "has 1 parts"), (line.replace("498", "x"), "'x' is no number")):
        with pytest.raises(FormatError, match=rf"test_a\.train_step\.other_phases: forward \| .*{told}"):
            parse(text.replace(line, wrong), FILE)


def test_what_is_not_recomputed_and_what_runs_with_grad_takes_no_line():
    plain = replace(TRAIN, composition=Composition(8_120_000_000, (SOFTMAX,)))
    text = render({Key(FILE, "test_a", "train_step"): plain})
    assert "composition" in text
    assert not any(key in text for key in ("recomputed", "no_grad", "no_backward"))


def test_the_total_of_a_composition_is_the_peak_and_what_was_not_kept_its_rest():
    entry = parse(COMPOSED_TEXT, FILE)[TRAIN_KEY]
    assert entry.composition.total == 8_120_000_000
    assert entry.composition.rest == 8_120_000_000 - 5_100_000_000 - 498


def test_a_composition_with_somebody_elses_bytes_missing_can_be_read_back():
    # What was kept of it, never more: tests/values/test_composition.py.
    rows = (Row("activation", 60), Row("gradient", 50), Row("unattributed", -10))
    entry = replace(CALL, metrics={"peak_allocated": 100}, composition=Composition(100, rows).kept())
    entries = {Key(FILE, "test_a", "call"): entry}
    assert parse(render(entries), FILE) == entries


def test_an_empty_composition_is_not_the_same_as_none():
    entry = replace(CALL, composition=Composition(512, ()))
    entries = {Key(FILE, "test_a", "call"): entry}
    assert "composition = []" in render(entries)
    assert parse(render(entries), FILE) == entries


ROW = '"parameter | wte |  |  |  | 1 x block | 498"'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (COMPOSITION, "composition = 5\n", "composition is 5, expected an array of strings"),
        (COMPOSITION, 'composition = "x"\n', "composition is 'x', expected an array of strings"),
        (COMPOSITION, "", "recomputed exists, but composition is missing"),
        (RECOMPUTED, "recomputed = true\n", "recomputed is True, expected an array of strings"),
        (
            '"4 x blocks.*"',
            '"blocks.*"',
            "recomputed: 'blocks.*' is not a count of calls; write for example '4 x blocks.*'",
        ),
        (COMPOSITION + RECOMPUTED, "", "no_grad exists, but composition is missing"),
        (GRAPH, "no_grad = 5\n", "no_grad is 5, expected an array of strings"),
        (
            '"1 of 1 x teacher"',
            '"teacher"',
            "no_grad: 'teacher' is no share of a module's calls, like '6 of 12 x blocks.*'",
        ),
        ('"1 of 2 x probe"', '"3 of 2 x probe"', "no_backward: '3 of 2 x probe' is no share of a module's calls"),
        (ROW, ROW.replace("parameter", "param"), f"composition: {ROW[1:-1].replace('parameter', 'param')!r}: 'param'"),
        (ROW, ROW.replace("498", "4.98"), f"composition: {ROW[1:-1].replace('498', '4.98')!r}: '4.98' is no number"),
        (
            ROW,
            ROW.replace("498", "3020000001"),
            "composition: its rows have 8120000001 bytes, more than peak_allocated (8120000000)",
        ),
        ("composition = [", "compositon = [", "compositon: unknown key; did you mean 'composition'?"),
    ],
)
def test_a_broken_composition_is_told_by_its_key(old, new, message):
    assert old in COMPOSED_TEXT
    with pytest.raises(FormatError, match=f"^{re.escape(STEP)}\\.{re.escape(message)}"):
        parse(COMPOSED_TEXT.replace(old, new, 1), FILE)


@unhurried
@given(st.integers(0, len(COMPOSED_TEXT) - 1), st.sampled_from(string.printable.replace("|", "")))
def test_a_composition_with_one_wrong_character_is_refused_or_means_what_it_says(position, character):
    result = read_or_message(COMPOSED_TEXT[:position] + character + COMPOSED_TEXT[position + 1 :])
    assert isinstance(result, str) or parse(render(result), FILE) == result


def read_or_message(text):
    """The entries in a text, or the message of the `FormatError`; anything else goes up."""
    try:
        return parse(text, FILE)
    except FormatError as error:
        return str(error)


@pytest.mark.parametrize(
    "cut", ['recorded = "2026', "peak_allocated =", "[tests.test_generate", 'device = "NVIDIA H100 80GB HBM3"']
)
def test_a_file_that_was_cut_off_is_refused(cut):
    with pytest.raises(FormatError):
        parse(TEXT[: TEXT.index(cut) + len(cut)], FILE)


@unhurried
@given(st.integers(0, len(TEXT) - 1), st.sampled_from(string.printable))
def test_a_file_with_one_wrong_character_is_refused_or_means_what_it_says(position, character):
    result = read_or_message(TEXT[:position] + character + TEXT[position + 1 :])
    assert isinstance(result, str) or parse(render(result), FILE) == result


@unhurried
@given(st.text() | st.from_regex(r"(\[[a-z.\"]*\]\n([a-z]+ = [0-9\"a-z.\[\]{}-]*\n){0,3}){0,4}"))
def test_any_text_is_entries_or_a_format_error(text):
    result = read_or_message(f"format = {FORMAT}\n{text}")
    assert isinstance(result, dict) or len(result) > 0


def test_a_text_that_lacks_its_end_is_no_file_unless_every_entry_is_whole():
    whole = {key: entry.metrics for key, entry in ENTRIES.items()}
    for length in range(len(TEXT)):
        result = read_or_message(TEXT[:length])
        assert isinstance(result, str) or {key: entry.metrics for key, entry in result.items()} == whole
