"""``[tool.gpumem.gpus.NAME]``: the GPU that each makes, what is said of mistakes, and which commands know them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.errors import SettingsError
from pytest_gpumem.emulating.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulating.emulation import load
from pytest_gpumem.emulating.emulation.gpus import described, emulated_gpu
from pytest_gpumem.plugin.config.settings import settings_from_table
from pytest_gpumem.tools.main import main

GB = 10**9
PLAIN = {"memory": "20GB", "capability": "8.9"}


def made(**gpus):
    return settings_from_table({"gpus": gpus}, "here").gpus


def test_memory_and_capability_suffice_and_the_first_such_gpu_gives_the_rest():
    first = emulated_gpu("l4")
    assert made(mine=PLAIN) == {"mine": replace(first, word="mine", title="mine", name="mine", total_bytes=20 * GB)}


def test_what_it_is_like_has_what_it_does_not_say():
    more = {"memory": "47GiB", "sms": 150, "l2": "48MiB", "name": "NVIDIA L40S of ours"}
    like = emulated_gpu("l40s")
    assert made(big={"like": "l40s", **more})["big"] == replace(
        like,
        word="big",
        title="big",
        name="NVIDIA L40S of ours",
        total_bytes=47 * 2**30,
        multiprocessors=150,
        l2_bytes=48 * 2**20,
    )
    assert made(part={"like": "h100-80gb-mig-1g.10gb"})["part"].multiprocessors == 16


@pytest.mark.parametrize("capability", ["8.7", 8.7])
def test_another_capability_has_limits_of_its_own(capability):
    gpu = made(orin={"like": "l4", "capability": capability})["orin"]
    assert (gpu.capability, gpu.shared_per_multiprocessor) == ((8, 7), 164 * 1024)
    assert gpu.multiprocessors == emulated_gpu("l4").multiprocessors
    assert made(orin={"memory": "60GB", "capability": capability})["orin"].blocks_per_multiprocessor == 16


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        ([], "here: gpus is [], expected a table"),
        ({"mine": 3}, "here: gpus.mine is 3, expected a table: [tool.gpumem.gpus.mine]"),
        ({"mine": {}}, 'here: gpus.mine needs memory; write memory = "48GB", or like = "l40s"'),
        ({"mine": {"memory": "1GB"}}, 'here: gpus.mine needs capability; write capability = "8.9", or'),
        ({"mine": {**PLAIN, "memroy": "1GB"}}, "here: gpus.mine: unknown key 'memroy'; did you mean 'memory'?"),
        ({"mine": {"like": "l41"}}, "here: gpus.mine.like: 'l41' is no GPU that can be emulated; did you mean"),
        (
            {"mine": {"like": "l4x2"}},
            "here: gpus.mine.like is 'l4x2', expected a single GPU; emulated:NAMEx2 emulates 2 such GPUs",
        ),
        ({"mine": {"like": 4}}, "here: gpus.mine.like is 4, expected a string"),
        (
            {"mine": {**PLAIN, "capability": "new"}},
            "here: gpus.mine.capability is 'new', expected a compute capability with",
        ),
        ({"mine": {**PLAIN, "capability": "3.5"}}, "with known limits: 7.0, 7.5, 8.0"),
        ({"mine": {**PLAIN, "capability": True}}, "here: gpus.mine.capability is True, expected"),
        ({"mine": {**PLAIN, "memory": 48}}, "here: gpus.mine.memory is 48, expected a string: '48GB'"),
        ({"mine": {**PLAIN, "memory": "48"}}, "here: gpus.mine.memory: '48' has no unit"),
        ({"mine": {**PLAIN, "memory": "500MB"}}, "here: gpus.mine.memory is '500MB', expected 545.26 MB to 8.80 TB"),
        ({"mine": {**PLAIN, "memory": "9TB"}}, "here: gpus.mine.memory is '9TB', expected 545.26 MB to"),
        ({"mine": {**PLAIN, "l2": "3GiB"}}, "here: gpus.mine.l2 is '3GiB', expected 1 B to 2.15 GB"),
        ({"mine": {**PLAIN, "sms": 0}}, "here: gpus.mine.sms is 0, expected a whole number from 1 to 4096"),
        ({"mine": {**PLAIN, "sms": True}}, "here: gpus.mine.sms is True, expected a whole number"),
        ({"mine": {**PLAIN, "name": "x" * 201}}, "expected a string of 1 to 200 bytes"),
        ({"l4": PLAIN}, "here: gpus.l4: emulated:l4 already means L4; choose another name"),
        ({"a100-80gb": PLAIN}, "here: gpus.a100-80gb: emulated:a100-80gb already means A100 80GB"),
        ({"h100x8": PLAIN}, "here: gpus.h100x8: emulated:h100x8 already means H100 80GB"),
        (
            {"l4-mig-1g.6gb": PLAIN},
            "here: gpus.l4-mig-1g.6gb: 'l4-mig-1g.6gb' cannot be the name of a GPU; write small letters",
        ),
        ({"all": PLAIN}, "here: gpus.all: 'all' cannot be the name of a GPU"),
        ({"24gb": PLAIN}, "here: gpus.24gb: '24gb' cannot be the name of a GPU"),
        ({"Mine": PLAIN}, "here: gpus.Mine: 'Mine' cannot be the name of a GPU; write small letters, digits, - and ."),
        (
            {"rtx-5090": PLAIN},
            "here: gpus.rtx-5090: its baselines would be in the same folder as the baselines of rtx5090; choose another name",
        ),
        (
            {"a.b": PLAIN, "a-b": PLAIN},
            "here: gpus.a-b: its baselines would be in the same folder as the baselines of a.b; choose another name",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence_with_its_key(gpus, message):
    with pytest.raises(SettingsError, match=re.escape(message)) as caught:
        settings_from_table({"gpus": gpus}, "here")
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder within one whose settings have a card; nothing is compiled."""
    monkeypatch.setattr(load, "stand_ins", lambda torch: ())
    monkeypatch.setattr(load, "installed_torch", lambda: None)
    monkeypatch.delenv(DESCRIPTION, raising=False)
    (tmp_path / "pyproject.toml").write_text('[tool.gpumem.gpus.mine]\nlike = "l4"\nmemory = "9GB"\n', encoding="utf-8")
    within = tmp_path / "within"
    within.mkdir()
    (within / "pyproject.toml").write_text("[project]\nname = 'gpumem-none'\n", encoding="utf-8")
    monkeypatch.chdir(within)
    return within


def test_commands_find_it_in_the_nearest_settings_and_tell_their_children(folder, monkeypatch):
    called = []
    monkeypatch.setattr("os.execvpe", lambda *given: called.append(given[2]))
    result = CliRunner().invoke(main, ["emulate", "minex2", "--", "true"])
    assert result.exit_code == 0, result.output
    assert called[0]["GPUMEM_EMULATED"] == "emulated:minex2"
    mine = replace(emulated_gpu("l4"), word="mine", title="mine", name="mine", total_bytes=9 * GB)
    assert called[0][DESCRIPTION] == described(mine)


def test_a_name_that_is_misspelt_is_told_beside_those_of_ones_own(folder):
    for command in (
        ["emulate", "mein", "--", "true"],
        ["fit", "--device", "mein", "t.py"],
        ["advise", "hf:x", "--device", "emulated:mein"],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == (1 if command[0] == "emulate" else 2)
        near = "emulated:mine" if command[0] == "advise" else "mine"
        assert f"did you mean '{near}'?" in result.output
        assert "and from [tool.gpumem.gpus] mine; each of them with" in result.output


def test_a_mistake_in_them_is_told_by_commands_with_the_file(folder):
    (folder / "pyproject.toml").write_text("[tool.gpumem.gpus.mine]\n", encoding="utf-8")
    result = CliRunner().invoke(main, ["fit", "t.py"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: {folder / 'pyproject.toml'}: [tool.gpumem]: gpus.mine needs memory; write" in result.output
