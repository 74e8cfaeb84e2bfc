"""The keys of the table ``[tool.gpumem]``, in the ``pyproject.toml`` of pytest's root directory.

An unknown key or a wrong value is a usage error (exit code 4). A table in a folder above the root directory has no effect.
For example, ``packages/a/pytest.ini`` makes ``packages/a`` the root directory, so a table in the repository's top folder is
not read. A mistyped table such as ``[tool.gpumen]``, or a section in ``pytest.ini``, has no effect either. pytest's header
warns about tables and sections without effect, and so does the end of a run with measured tests.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.facts.values.option_words import ROUTINGS
from pytest_gpumem.plugin.config import kinds

if TYPE_CHECKING:
    from collections.abc import Mapping


class Key(NamedTuple):
    """A key in ``[tool.gpumem]``, or in a table inside it."""

    kind: kinds.Kind
    help: str
    """One or two sentences for the settings' page, as Markdown."""
    default: str | None = None
    """The default in words, as Markdown. ``None`` if the page takes the default from the field in `Settings`, or, in a table
    inside ``[tool.gpumem]``, if the key has no default."""
    details: str = ""
    """Further Markdown for the settings' page."""


BUDGET_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "tests": Key(
            kinds.TEXT,
            "Pattern for a test's node id, or for its file or class.",
            "needed",
        ),
    }
)
"""The keys for an entry in ``[[tool.gpumem.budget]]``, in addition to the marker's arguments."""

GPU_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "like": Key(kinds.TEXT, 'Another card, or a MIG slice, from which all other figures are taken: `"l40s"`.'),
        "memory": Key(
            kinds.TEXT,
            'Memory size, as in `torch.cuda.get_device_properties(0).total_memory`: `"44GB"`. It must be '
            "above 545 MB, which the CUDA context takes.",
            "that of `like`; needed without it",
        ),
        "capability": Key(
            kinds.TEXT,
            'Compute capability, which also sets limits such as the threads on a multiprocessor: `"8.9"`.',
            "that of `like`; needed without it",
        ),
        "sms": Key(
            kinds.Kind(int, "a whole number"),
            "Number of multiprocessors: `96`.",
            "that of `like`, or of the first card with this capability",
        ),
        "l2": Key(kinds.TEXT, 'L2 cache size: `"48MiB"`.', "that of `like`, or of the first card with this capability"),
        "name": Key(kinds.TEXT, 'Name that `torch.cuda.get_device_name()` returns, before "(emulated)".', "`NAME`"),
    }
)
"""The keys in ``[tool.gpumem.gpus.NAME]``."""

MODEL_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "model": Key(
            kinds.TEXT,
            "Name of a model from transformers, timm, torchvision or diffusers, as for [`gpumem advise`](command-advise.md):"
            " `hf:ORG/NAME`, `hf-tiny:ORG/NAME`, `timm:NAME`. A path to a folder or a `config.json` "
            "starts in the root directory.",
            "needed",
        ),
        "batch": Key(
            kinds.TEXT,
            'Samples and tokens per sample, `"4x128"`, or only samples, `"32"`.',
            "one sample of a usual length",
        ),
        "config": Key(
            kinds.Kind((str, list), "a string or an array of strings"),
            "A [step config](step-configs.md), or an array of them. Each config is a test.",
            '`"fp32"`',
        ),
        "train": Key(kinds.FLAG, "`false` measures an inference step in place of a training step.", "`true`"),
        "generate": Key(
            kinds.Kind(int, "a whole number"),
            "Number of tokens to generate after the prompt. The test then measures the generation, like `--generate` of "
            "[`gpumem advise`](command-advise.md).",
        ),
        "lora": Key(
            kinds.TEXT,
            'LoRA settings, `"r=8"`. The test then trains only the adapters, like `--lora` of [`gpumem '
            "advise`](command-advise.md). Models from other libraries than transformers need `targets=`.",
        ),
    }
)
"""The keys for an entry in ``[[tool.gpumem.models]]``, in addition to the marker's arguments."""

_TOLERANCE = """
```toml
[tool.gpumem.tolerance]
peak_allocated = "1 %"
peak_reserved = "5 %"
```

A tolerance in the settings replaces the metric's whole default, including its absolute part. With `retained = "10 %"`,
a baseline of 0 bytes allows 0 bytes.
"""
_BUDGET = """
```toml
[[tool.gpumem.budget]]
tests = "tests/test_gpt.py::TestTrain::*"
max_memory = "20 GiB"

[[tool.gpumem.budget]]
tests = "tests/*"
max_gb = 40
max_retained = "1 MB"
```

For each limit, the test's marker takes precedence over the entries. Among the entries, the first entry with the limit
applies. An entry only limits measured tests. It does not cause a test to be measured.

In a pattern, `*` and `?` are wildcards, `*` also matches `/` and `::`, and brackets are ordinary characters.

If pytest collects only whole folders, the run ends with a warning about each entry without effect. An entry has no effect
if its tests are not measured, or if it has `max_slowdown` or `min_throughput` for tests without the fixture `gpumem`. A run
also warns about a pattern without a matching test, if the run has collected all tests that the pattern could match. It has
collected them if it ran the `testpaths`, or a folder that contains the path before the pattern's first `*`, `?` or `::`.
There is no such warning with `--ignore`, `--ignore-glob`, `--lf` or `--stepwise`.
"""
_MARK = """ Patterns work as for `budget`. Matching test functions and doctests get the marker before `-m` and `-k` select
tests, so `-m gpumem` finds them. Items from other plugins do not get the marker. As for `budget`, the run warns about a
pattern without a matching test.
"""
_ROUTING = """ On a real GPU and on the CPU, the key has no effect, because the router's choice is computed there. In a
[step config](step-configs.md), `routing=` makes the same assumption for a single step.
[Routing of experts](../concepts/emulated-gpu.md#routing-of-experts) explains `balanced` and `worst`.
"""
_GPUS = """
```toml
[tool.gpumem.gpus.our-l40s]
like = "l40s"
memory = "44GB"

[tool.gpumem.gpus.next-year]
memory = "48GB"
capability = "12.0"
sms = 96
```

With these tables, `--gpumem-device=emulated:our-l40s` emulates your card, and `emulated:our-l40sx2` emulates two of them.
The baselines are in the folder `emulated-our-l40s`. `gpumem fit` without `--device`, and `emulated:all`, try your own cards
after all other cards.

A session reads the cards from the `pyproject.toml` of pytest's root directory. A command reads them from the nearest
`pyproject.toml` with a table `[tool.gpumem]`, in the current folder or in a folder around it.

A name consists of small letters, digits, `-` and `.`, and begins with a letter. Using the name of another card is an error.
"""
_MODELS = """
```toml
[[tool.gpumem.models]]
model = "hf-tiny:openai-community/gpt2"
batch = "4x128"
config = ["fp32", "amp-bf16", "bf16,checkpoint=blocks"]
max_gb = 6.5
```

This entry defines three tests, one for each config. The first is
`pyproject.toml::hf-tiny:openai-community/gpt2[4x128-fp32]`. Each test measures one step. It is judged, explained and
reported like a test with the fixture `gpumem`, and the project's fixtures and hooks apply to it. An entry may have any
argument of the [marker](marker.md), such as `max_gb`.

The model has random weights in the config's precision, and computes its own loss. The batch has random values, which are
the same in each run. If a model's configuration refers to code in its repository, this code is not run. A library such as
transformers is imported when the first test that needs it runs.

## Ids and selection

The brackets in a test's id contain the batch if the entry has one, then `infer`, `generate-64` or `lora-r8`, and then the
config. If you change the batch, the id changes, so the test needs a new baseline. Patterns, `-k`, `-m gpumem`, `--deselect`
and pytest-xdist treat these tests like all other tests.

pytest collects these tests if it collects the root directory, the `testpaths`, or the file itself with
`pytest pyproject.toml`. `pytest tests` does not collect them.

## Models on the command line

`--gpumem-model=NAME` measures a model in one session. If an entry in `models` has this name, the entry's settings
apply. Otherwise the test measures one sample in `fp32`. A relative path starts in the folder in which pytest was
started.

Without a path on the command line, only these models are measured. With a path, or if the option is in `addopts`, they
are added to the other tests. A typed model and an entry with only the key `model` have the same baseline.

## Errors

A name, batch or config with a mistake is a usage error. A test fails with a sentence if its model, batch or loss cannot be
created, for example because the hub does not know the name, the configuration [names code](command-advise.md), or there is
no network. With `HF_HUB_OFFLINE=1` a model in the hub's cache needs no network.

## Keys of an entry
"""

OTHER_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "routing": Key(
            kinds.one_of(tuple(ROUTINGS)),
            "Assumption about the experts of each token on an emulated GPU, which does not compute the router's "
            "choice: `balanced` gives all experts the same share, `worst` gives all tokens to the same few experts.",
            details=_ROUTING,
        ),
        "units": Key(
            kinds.one_of(("si", "iec")),
            "Units for sizes in output and reports: `si` (1 GB is 10⁹ bytes) or `iec` (1 GiB is 2³⁰ bytes).",
        ),
        "time_budget": Key(
            kinds.DURATION,
            "Time limit for timing all steps in a test once, such as `2 s` or `500 ms`. If steps have to be timed again, "
            "a second limit of the same length begins. Timing a step takes about half of the remaining time.",
        ),
        "tolerance": Key(
            kinds.TABLE,
            "Allowed increase over the baseline, as a percentage for each metric.",
            "the default of each [metric](metrics.md)",
            details=_TOLERANCE,
        ),
        "budget": Key(
            kinds.TABLES,
            "Limits for all measured tests with a matching id. An entry has the key `tests` and any arguments of the "
            "[marker](marker.md).",
            details=_BUDGET,
        ),
        "mark": Key(
            kinds.PATTERNS,
            "Patterns for tests to measure as if they had `@pytest.mark.gpumem`.",
            details=_MARK,
        ),
        "gpus": Key(
            kinds.TABLE,
            "Your own cards for emulation, with a table for each name.",
            details=_GPUS,
        ),
        "models": Key(
            kinds.TABLES,
            "Models to measure without a test file. Each entry names a model from transformers, timm, torchvision "
            "or diffusers, and makes one test for each of its configs.",
            details=_MODELS,
        ),
    }
)
"""The keys in ``[tool.gpumem]`` without a ``--gpumem-*`` option of the same name."""
