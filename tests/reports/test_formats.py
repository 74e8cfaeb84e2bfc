"""Reports as files: in folders that are made, and nothing beside them. tests/baselines/test_backend.py has more of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.reporting.reports.files import write_report
from pytest_gpumem.reporting.reports.formats import FORMATS
from pytest_gpumem.reporting.reports.json_report import from_json, to_json
from pytest_gpumem.reporting.reports.markdown import markdown
from tests.reports.sessions import OK, REGRESSED, session

REPORT = session(OK, REGRESSED)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.suffix)
def test_every_format_renders_a_session(form):
    assert "tests/test_gpt.py" in form.render(REPORT)


def test_suffixes_and_options_are_known_without_loading_a_renderer_or_its_needs():
    heavy = [*(form.renderer.partition(":")[0] for form in FORMATS), "jinja2", "torch"]
    imports = "import sys, pytest_gpumem.plugin.config.options, pytest_gpumem.reporting.reports.formats"
    asks = f"{imports}; print([one for one in {heavy} if one in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_report_is_written_in_the_format_of_its_suffix_into_a_folder_that_is_made(tmp_path):
    for name in ("new/deep/a.json", "new/deep/a.md"):
        write_report(tmp_path / name, REPORT)
    assert (tmp_path / "new/deep/a.json").read_bytes() == to_json(REPORT).encode()
    assert (tmp_path / "new/deep/a.md").read_bytes() == markdown(REPORT).encode()
    assert from_json((tmp_path / "new/deep/a.json").read_text(encoding="utf-8"), "a.json") == REPORT
    assert sorted(path.name for path in (tmp_path / "new/deep").iterdir()) == ["a.json", "a.md"]


def test_a_folder_in_the_way_stays_and_nothing_is_left_beside_it(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_report(tmp_path / "a.json", REPORT)
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_a_path_that_no_file_can_have_is_an_error_of_the_system(tmp_path):
    (tmp_path / "a").write_text("x", encoding="utf-8")
    with pytest.raises(OSError):
        write_report(tmp_path / "a" / "b.json", REPORT)
    with pytest.raises(OSError):
        write_report(tmp_path / "a\0.json", REPORT)


def test_line_ends_stay_and_a_lone_surrogate_is_written_as_python_writes_it(tmp_path):
    write_atomically(tmp_path / "a.txt", "a\r\nb\nc\ud800")
    assert (tmp_path / "a.txt").read_bytes() == b"a\r\nb\nc\\ud800"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.txt", "new\ud800", errors="strict")
    assert (tmp_path / "a.txt").read_bytes() == b"a\r\nb\nc\\ud800"
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]
