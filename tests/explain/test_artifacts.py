"""What was recorded, as files: names for every file system, and a timeline that adds up at every moment."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.explain.artifacts import TIMELINE_FORMAT, Artifacts, artifact_name, timeline_to_plain
from pytest_gpumem.measuring.explain.recording import Recording
from pytest_gpumem.measuring.explain.trace import Label
from pytest_gpumem.plugin.config.settings import Settings
from tests.explain.stream import Stream

unhurried = settings(deadline=None)
NODEID = "tests/test_gpt.py::TestTrain::test_step[amp-bf16]"


def recorded(stream: Stream, own_bytes: int = 0) -> Recording:
    return Recording(stream.trace(), stream.timeline(), own_bytes, (), None, "calls")


def step() -> Recording:
    """A step of a model of 100 bytes, of which 30 more are not known one by one."""
    stream = Stream(before={1: 100}, own={1})
    stream.snapshot(Label(1, "parameter", "fc"))
    with stream.mark("phase", "forward"), stream.mark("module", "fc", "model.py:5"):
        stream.alloc(2, 40)
        stream.alloc(3, 8)
        stream.free(3)
    with stream.mark("phase", "backward"), stream.node("AddmmBackward0", 1):
        stream.alloc(4, 5)
        stream.free(2)
    stream.snapshot(Label(4, "gradient", "fc"))
    return recorded(stream, 130)


# Names

IDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=300)


@unhurried
@given(IDS, st.integers(1, 999))
def test_a_name_is_one_that_every_file_system_takes(nodeid, number):
    name = artifact_name(nodeid, number)
    assert re.fullmatch(r"[A-Za-z0-9._\-]+", name)
    assert len(f"{name}.snapshot.pickle") < 255
    assert not name.startswith((".", "-"))


@unhurried
@given(st.lists(st.tuples(IDS, st.integers(1, 99)), unique=True, max_size=5))
def test_different_recordings_have_different_names(recordings):
    names = [artifact_name(nodeid, number).lower() for nodeid, number in recordings]
    assert len(set(names)) == len(names)


def test_a_name_shows_which_test_and_which_recording_it_is_of():
    name = artifact_name(NODEID, 2)
    assert name.startswith("tests_test_gpt.py_TestTrain_test_step_amp-bf16-")
    assert name.endswith("-2")


def test_ids_that_differ_in_what_no_name_can_show_have_different_names():
    assert artifact_name("a.py::test[/]", 1) != artifact_name("a.py::test[:]", 1)


# Timelines


def test_a_timeline_tells_the_bytes_of_each_category_after_each_event():
    plain = timeline_to_plain(NODEID, step())
    assert plain["format"] == TIMELINE_FORMAT
    assert plain["test"] == NODEID
    assert plain["total"] == [130, 170, 178, 170, 175, 135]
    assert plain["peak"] == 2
    assert plain["categories"] == {
        "parameter": [100, 100, 100, 100, 100, 100],
        "activation": [0, 40, 40, 40, 40, 0],
        "temporary": [0, 0, 8, 0, 0, 0],
        "gradient": [0, 0, 0, 0, 5, 5],
        "unattributed": [30, 30, 30, 30, 30, 30],
    }


def test_a_timeline_that_never_rises_has_its_peak_at_the_beginning():
    stream = Stream(before={1: 100}, own={1})
    stream.free(1)
    plain = timeline_to_plain(NODEID, recorded(stream, 100))
    assert (plain["peak"], plain["total"]) == (0, [100, 0])


def test_a_step_that_allocates_nothing_has_a_timeline():
    with (stream := Stream()).mark("phase", "step"):
        pass
    plain = timeline_to_plain(NODEID, recorded(stream))
    assert (plain["total"], plain["categories"], plain["peak"]) == ([0], {}, 0)
    assert timeline_to_plain(NODEID, recorded(Stream(), 7))["categories"] == {"unattributed": [7]}


def test_phases_have_their_times_counted_from_the_first_event():
    plain = timeline_to_plain(NODEID, step())
    forward, backward = plain["phases"]
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    # A token a microsecond: the look's two come first.
    assert (forward["begin"], forward["end"]) == (2000, 8000)
    assert backward["begin"] == 9000
    assert plain["time_ns"] == [0, 4000, 5000, 6000, 11000, 12000]


ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(1, 100)), max_size=20)


@unhurried
@given(ACTIONS, st.dictionaries(st.integers(1, 5), st.integers(1, 100)), st.integers(-50, 50))
def test_categories_add_up_to_the_total_at_every_moment(actions, before, unknown):
    stream = Stream(before, {address for address in before if address % 2})
    for allocates, address, nbytes in actions:
        if allocates:
            with stream.mark("module", f"h.{address}"):
                stream.alloc(address, nbytes)
        else:
            stream.free(address)
    plain = timeline_to_plain(NODEID, recorded(stream, unknown))
    lines = list(plain["categories"].values())
    assert [sum(line[n] for line in lines) for n in range(len(plain["total"]))] == plain["total"]
    assert len(plain["time_ns"]) == len(plain["total"])
    assert plain["time_ns"] == sorted(plain["time_ns"])


# Files


def artifacts(folder: Path, artifacts: str | None = "recordings") -> Artifacts:
    return Artifacts(Settings(artifacts=artifacts, artifacts_base=folder).artifacts_folder, NODEID, CpuDevice())


def test_each_recording_of_a_test_is_a_file_in_the_folder_of_the_settings(tmp_path):
    kept = artifacts(tmp_path)
    assert kept.keep(step()) is None
    assert kept.keep(step()) is None
    names = sorted(path.name for path in (tmp_path / "recordings").iterdir())
    assert names == [f"{artifact_name(NODEID, number)}.timeline.json" for number in (1, 2)]
    text = (tmp_path / "recordings" / names[0]).read_text(encoding="utf-8")
    assert text.endswith("\n")
    assert json.loads(text) == timeline_to_plain(NODEID, step())


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert artifacts(tmp_path, None).keep(step()) is None
    assert list(tmp_path.iterdir()) == []


def test_an_absolute_folder_is_that_folder(tmp_path):
    artifacts(Path("elsewhere"), str(tmp_path / "there")).keep(step())
    assert len(list((tmp_path / "there").iterdir())) == 1


def full_disk(_descriptor):
    raise OSError(28, "No space left on device")


def test_on_a_full_disk_a_timeline_is_absent_and_not_an_earlier_one(tmp_path, monkeypatch):
    assert artifacts(tmp_path).keep(step()) is None
    monkeypatch.setattr("os.fsync", full_disk)
    trouble = artifacts(tmp_path).keep(step())
    assert trouble is not None
    assert "No space left on device" in trouble
    assert list((tmp_path / "recordings").iterdir()) == []


def test_a_snapshot_that_cannot_be_written_is_told_as_well(tmp_path):
    class FullDevice(CpuDevice):
        def keep_snapshot(self, path: Path) -> None:
            raise OSError(28, "No space left on device", str(path))

    kept = Artifacts(tmp_path / "recordings", NODEID, FullDevice())
    trouble = kept.keep(step())
    assert trouble is not None
    assert "No space left on device" in trouble
    assert ".snapshot.pickle" in trouble
