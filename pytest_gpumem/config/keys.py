"""The table ``[tool.gpumem]`` in the ``pyproject.toml`` of pytest's root directory.

An unknown key or a wrong value is a usage error (exit code 4). A table above the root directory has no effect, for example if
``packages/a/pytest.ini`` makes ``packages/a`` the root directory. The header of each run points out such a table, and so does
the end of a run that measures something. Both also point out a mistyped table such as ``[tool.gpumen]``, and a section of
``pytest.ini``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpumem.config import kinds
from pytest_gpumem.values.option_words import ROUTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping


class Key(NamedTuple):
    """A key of ``[tool.gpumem]``, or of a table in it."""

    kind: kinds.Kind
    help: str
    """One or two sentences, as Markdown."""
    default: str | None = None
    '""The default in words, as Markdown, if no field of `Settings` has it. ``None`` in a table within: there is '
    'none.""'
    details: str = ""
    """Further Markdown."""


BUDGET_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "tests": Key(
            kinds.TEXT,
            "Pattern for the node id of a test, or for a file or class that contains the test.",
            "needed",
        ),
    }
)
"""The keys of an entry of ``budget``, beside the arguments of the marker."""

GPU_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "like": Key(kinds.TEXT, 'Another card, or a MIG slice, which has all other figures: `"l40s"`.'),
        "memory": Key(
            kinds.TEXT,
            'Size of the memory, as `torch.cuda.get_device_properties(0).total_memory` says it: `"44GB"`. It must be '
            "above 545 MB, which the CUDA context takes.",
            "that of `like`; needed without it",
        ),
        "capability": Key(
            kinds.TEXT,
            'Compute capability, with its limits: `"8.9"`.',
            "that of `like`; needed without it",
        ),
        "sms": Key(
            kinds.Kind(int, "a whole number"),
            "Number of multiprocessors: `96`.",
            "that of `like`, or of the first card with this capability",
        ),
        "l2": Key(
            kinds.TEXT, 'Size of the L2 cache: `"48MiB"`.', "that of `like`, or of the first card with this capability"
        ),
        "name": Key(kinds.TEXT, 'Name that `torch.cuda.get_device_name()` returns, before "(emulated)".', "`NAME`"),
    }
)
"""The keys of ``[tool.gpumem.gpus.NAME]``."""

MODEL_KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "model": Key(
            kinds.TEXT,
            "Name of a model of transformers, timm, torchvision or diffusers, as [`gpumem advise`](command-advise.md)"
            " takes it: `hf:ORG/NAME`, `hf-tiny:ORG/NAME`, `timm:NAME`. A path of a folder or of a `config.json` "
            "starts in the root directory.",
            "needed",
        ),
        "batch": Key(
            kinds.TEXT,
            'Samples and tokens of each sample, `"4x128"`, or samples alone, `"32"`.',
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
            "Number of tokens: measures their generation after the prompt, as `--generate` of [`gpumem "
            "advise`](command-advise.md) does.",
        ),
        "lora": Key(
            kinds.TEXT,
            'Settings of LoRA, `"r=8"`: trains the adapters alone, as `--lora` of [`gpumem '
            "advise`](command-advise.md) does. A model that is not from transformers needs `targets=`.",
        ),
    }
)
"""The keys of an entry of ``models``, beside the arguments of the marker."""

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

For each limit, the marker wins over the entries, and the first entry with this limit wins over later ones. An entry
limits measured tests. It does not make a test measured.

In a pattern, `*` and `?` are wildcards, `*` also matches `/` and `::`, and brackets are ordinary characters.

A run of whole folders ends with a sentence about an entry without effect: its tests are not measured, or it has
`max_slowdown` or `min_throughput` for tests without the fixture `gpumem`. A pattern that matches no test is named if
the run has collected all tests that the pattern could match. A run of the `testpaths` has. A run of folders has if they
contain the part of the pattern before its first `*`, `?` or `::`. Runs with `--ignore`, `--ignore-glob`, `--lf` or
`--stepwise` name no pattern.
"""
_MARK = """
Patterns are those of `budget`. Matching test functions get the marker before `-m` and `-k` select tests, so `-m gpumem`
finds them. Doctests and items of other plugins do not get it. A pattern that matches no test is named as for `budget`.
"""
_ROUTING = """
A real GPU and the CPU compute this choice, so the key has no effect there. The [step config](step-configs.md)
`routing=` is the same for one step. [Routing of experts](../concepts/emulated-gpu.md#routing-of-experts) explains both words.
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

`emulated:our-l40s` is then a device, `emulated:our-l40sx2` are two of them, and the baselines are in the folder
`emulated-our-l40s`. `gpumem fit` without `--device` tries your own cards after the others, and so does `emulated:all`.

A session reads the cards from the `pyproject.toml` of pytest's root directory. A command reads them from the nearest
`pyproject.toml` with a table `[tool.gpumem]`, in the current folder or in a folder around it.

A name has small letters, digits, `-` and `.`, and begins with a letter. A word that already means a card is refused.
"""
_MODELS = """
```toml
[[tool.gpumem.models]]
model = "hf-tiny:openai-community/gpt2"
batch = "4x128"
config = ["fp32", "amp-bf16", "bf16,checkpoint=blocks"]
max_gb = 6.5
```

This entry makes three tests, `pyproject.toml::hf-tiny:openai-community/gpt2[4x128-fp32]` and two more. Each test
measures one step. It is judged, explained and reported as a test with the fixture `gpumem`, and the project's fixtures
and hooks apply. An entry may have any argument of the [marker](marker.md), such as `max_gb`.

The model has random weights in the config's precision, its batch has random values that are the same in each run, and
the loss is the model's own. Code that a configuration names is not run. No library is imported before its first test
runs.

## Ids and selection

An id has the batch if the entry has one, then `infer`, `generate-64` or `lora-r8`, then the config. Another batch is
another test. Patterns, `-k`, `-m gpumem`, `--deselect` and pytest-xdist treat these tests as all others.

pytest collects them with the `pyproject.toml` of the root directory: in a run of the root directory or of the
`testpaths`, and with `pytest pyproject.toml`. `pytest tests` does not collect them.

## Models on the command line

`--gpumem-model=NAME` measures a model in one session. If an entry of `models` has this name, the entry's settings
apply. Otherwise the test measures one sample in `fp32`. A relative path starts in the folder in which pytest was
started.

Without a path on the command line, only these models are measured. With a path, or if the option is in `addopts`, they
are added to the other tests. The baseline is the same for a typed model and for an entry that only has `model`.

## Errors

A name, batch or config that cannot be read is a usage error. A test fails, with a sentence, if its model, batch or loss
cannot be made: the hub does not know the name, the configuration [names code](command-advise.md), or there is no
network. With `HF_HUB_OFFLINE=1` a model in the hub's cache needs no network.

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
            "Unit of sizes in output and reports: `si` (1 GB is 10⁹ bytes) or `iec` (1 GiB is 2³⁰ bytes).",
        ),
        "time_budget": Key(
            kinds.DURATION,
            "Time for the first samples of a test's step time, such as `2 s` or `500 ms`. The second samples, if the "
            "times have to be taken again, have the same budget once more. A sample takes about half of the time that"
            " is left.",
        ),
        "tolerance": Key(
            kinds.TABLE,
            "Allowed increase over the baseline, as a percentage for each metric.",
            "the default of each [metric](metrics.md)",
            details=_TOLERANCE,
        ),
        "budget": Key(
            kinds.TABLES,
            "Limits for all measured tests that match a pattern. An entry has `tests` and any arguments of the "
            "[marker](marker.md).",
            details=_BUDGET,
        ),
        "mark": Key(
            kinds.PATTERNS,
            "Patterns of tests that are measured as if they had `@pytest.mark.gpumem`.",
            details=_MARK,
        ),
        "gpus": Key(
            kinds.TABLE,
            "Cards of your own that can be emulated, a table for each name.",
            details=_GPUS,
        ),
        "models": Key(
            kinds.TABLES,
            "Models that are tests without a test file. Each entry names a model of transformers, timm, torchvision "
            "or diffusers, and makes one test for each of its configs.",
            details=_MODELS,
        ),
    }
)
"""The keys of ``[tool.gpumem]`` that are no options."""
