"""Advice as JSON, Markdown and a page: every figure, and no text that takes effect."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_gpumem.facts.values.composition import Composition, Explanation, Row
from pytest_gpumem.measuring.models.task import TRAINING
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise.formats import html, markdown, to_json
from pytest_gpumem.tools.advise.results import Advice, DeviceTrials, Recommendation, shares_of
from pytest_gpumem.tools.advise.search_order import Trial, recommended
from pytest_gpumem.tools.advise.texts import composition_lines, lines

GB = 10**9
FP32, BF16 = map(StepConfig.parse, ("fp32", "bf16"))
PEAK = Composition(
    10 * GB,
    (
        Row("parameter", 2 * GB, "model.layers.{0,1}.mlp"),
        Row("activation", 3 * GB, "model.layers.{0,1}.mlp", operator="mm"),
        Row("activation", 1 * GB, "model.layers.{0,1}.mlp", operator="silu"),
        Row("activation", 2 * GB, "lm_head"),
        *(Row("activation", GB // 4, f"part_{letter}") for letter in "abc"),
        Row("workspace", GB),
    ),
    notes=("recorded twice",),
    phase="backward",
)


def advice(*devices, subject="hf:model: Model, random weights; batch 1x8", explanation=None, why_not="", emulated=True):
    chosen = {one.chosen.config: one.name for one in devices if one.chosen is not None}
    recommendations = tuple(
        Recommendation(config, name, ("import torch",), explanation, why_not) for config, name in chosen.items()
    )
    return Advice(subject, TRAINING, emulated, devices, recommendations)


def device(name, limit, *tried):
    return DeviceTrials(name, limit, tried, recommended(tried, limit))


LARGE = device("H100 80GB", 80 * GB, Trial(FP32, 12 * GB, allocated=10 * GB))
SMALL = device("L4", 8 * GB, Trial(FP32, 12 * GB), Trial(BF16, why_not="it has no bfloat16"))


def test_a_peak_is_told_by_category_and_then_by_module_and_adds_up():
    shares = shares_of(PEAK)
    assert [(share.category, share.nbytes) for share in shares] == [
        ("activation", 6 * GB + 3 * (GB // 4)),
        ("parameter", 2 * GB),
        ("workspace", GB),
    ]
    assert shares[0].modules[:2] == (("model.layers.{0,1}.mlp", 4 * GB), ("lm_head", 2 * GB))
    assert composition_lines(Recommendation(FP32, "L4", (), Explanation(PEAK))) == [
        "fp32 on L4: 10.00 GB allocated at the peak in backward      bytes  of all",
        "activations                                               6.75 GB  67.5 %",
        "  model.layers.{0,1}.mlp                                  4.00 GB  40.0 %",
        "  lm_head                                                 2.00 GB  20.0 %",
        "  part_a                                                250.00 MB   2.5 %",
        "  2 other modules                                       500.00 MB   5.0 %",
        "parameters                                                2.00 GB  20.0 %",
        "  model.layers.{0,1}.mlp                                  2.00 GB  20.0 %",
        "workspaces                                                1.00 GB  10.0 %",
        "the rest                                                250.00 MB   2.5 %",
        "note: recorded twice",
    ]


def test_json_has_every_figure_in_bytes_and_why_there_is_none():
    plain = json.loads(to_json(advice(LARGE, SMALL, explanation=Explanation(PEAK)), 1))
    assert (plain["exit_status"], plain["emulated"], plain["finished"]) == (1, True, True)
    large, small = plain["devices"]
    assert large["recommended"] == "fp32"
    assert large["configs"] == [
        {
            "config": "fp32",
            "peak": 12 * GB,
            "peak_allocated": 10 * GB,
            "step_time": None,
            "fits": True,
            "why_not": None,
            "slow": None,
            "largest": None,
        }
    ]
    assert small["recommended"] is None
    assert [(one["fits"], one["why_not"]) for one in small["configs"]] == [(False, None), (None, "it has no bfloat16")]
    (told,) = plain["recommended"]
    assert (told["config"], told["device"], told["phase"]) == ("fp32", "H100 80GB", "backward")
    assert (told["made_of_bytes"], "peak_allocated" in told) == (10 * GB, False)
    assert told["made_of"][1] == {
        "category": "parameter",
        "bytes": 2 * GB,
        "modules": {"model.layers.{0,1}.mlp": 2 * GB},
    }


def test_a_peak_that_could_not_be_recorded_costs_nothing_else():
    found = advice(LARGE, why_not="the measured code could not be run again to explain its peak: RuntimeError: planted")
    assert lines(found)[-1].endswith("RuntimeError: planted")
    assert "RuntimeError: planted" in markdown(found)
    assert json.loads(to_json(found, 0))["recommended"][0]["made_of"] is None


def test_a_device_with_times_has_savings_and_costs_in_each_format():
    timed = device("NVIDIA L4", 24 * GB, Trial(FP32, 12 * GB, 0.2), Trial(BF16, 6 * GB, 0.1))
    found = advice(timed, emulated=False)
    assert "recommended: bf16: 6.00 GB of 24.00 GB, 100.00 ms a step" in lines(found)
    assert "| `bf16` | 6.00 GB | +50.0 % | 100.00 ms | -50.0 % | free | \\* |" in markdown(found)


def in_terminal(found):
    return "\n".join(lines(found))


def as_json(found):
    return to_json(found, 0)


@pytest.mark.parametrize("render", [in_terminal, as_json, markdown, html])
def test_every_format_has_each_warning_of_the_runs_once(render):
    slow, other = "transformers: the slow path is taken", "UserWarning: no gradients"
    shown = render(advice(replace(LARGE, warnings=(slow,)), replace(SMALL, warnings=(slow, other))))
    assert (shown.count(slow), shown.count(other)) == (1, 1)
    assert shown.index(LARGE.name) < shown.index(slow)


@pytest.mark.parametrize("render", [in_terminal, as_json, markdown, html])
def test_every_format_has_the_attention_implementation(render):
    with_attention = render(replace(advice(LARGE), attention="eager and sdpa"))
    assert with_attention.count("eager and sdpa") == 1
    assert "attention: " not in render(advice(LARGE)).replace('"attention": null', "")


@pytest.mark.parametrize("render", [markdown, html])
def test_no_text_takes_effect(render):
    text = "<img src=x onerror=alert(1)> @someone [a](http://a.example) | `\n::error::x"
    peak = Composition(GB, (Row("activation", GB, "<b>module</b>"),), notes=(text,))
    hostile = DeviceTrials(text, 8 * GB, (Trial(FP32, GB),), Trial(FP32, GB), text, warnings=(text,))
    shown = render(advice(hostile, subject=text, explanation=Explanation(peak)))
    assert "<img" not in shown
    assert "<b>module" not in shown
    if render is markdown:
        assert "\n::error" not in shown
