"""What `make release-check` finds in a wheel and an sdist."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "check_dist.py"
CHECK = runpy.run_path(str(SCRIPT))
CLEAN = "See [it](https://github.com/acme/it) and ![a picture](https://acme.example/a.png), or mail [us](mailto:a@acme.example).\n"
CARRIED = (
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "docs/guide/start.md",
    "docs/_templates/pages.html",
    "docs/conf.py",
    "action.yml",
    "comment/action.yml",
    "pytest_gpumem/tools/init/workflows/cpu.yml",
    "pytest_gpumem/reporting/reports/html/plotly/plotly-basic.min.js",
    "benchmarks/replays/conv3d_bfloat16.toml",
    "benchmarks/results/replays.md",
    "benchmarks/results/cpu-x86_64/time-samples.json",
)
"""Files of each kind that an sdist has."""


def wheel(folder: Path, page: str) -> Path:
    path = folder / "it-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("it/__init__.py", "")
        made.writestr("it-1.dist-info/METADATA", f"Metadata-Version: 2.4\nName: it\nVersion: 1\n\n{page}")
    return path


def sdist(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "it-1.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(f"it-1/{name}")
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def checked(monkeypatch, capsys):
    """Run the script's ``main`` on archives: its exit status, and what it printed."""

    def check(*arguments: str | Path) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        status = CHECK["main"]()
        return status, capsys.readouterr().err.splitlines()

    return check


def test_the_script_ends_with_what_it_found(tmp_path):
    built = wheel(tmp_path, "[history](history.md)")
    done = subprocess.run([sys.executable, SCRIPT, built], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_a_release_without_faults_passes(checked, tmp_path):
    files = {"README.md": CLEAN.encode(), "docs/a.png": b"\x89PNG\xff", "help.md": b"[--repository OWNER/NAME]"}
    # They have the words that they look for.
    files |= {name: (ROOT / name).read_bytes() for name in CHECK["NAMES_THEM"]}
    assert checked(wheel(tmp_path, CLEAN), sdist(tmp_path, files), "--release") == (0, [])


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("[the guide](docs/index.md)", "docs/index.md"),
        ("[history](history.md)", "history.md"),
        ("[a section](#start)", "#start"),
        ("[over two\nlines](docs/ci.md#gitlab)", "docs/ci.md#gitlab"),
        ("![a picture](docs/images/a.png)", "docs/images/a.png"),
        ("[![a picture](https://acme.example/a.png)](docs/ci.md)", "docs/ci.md"),
        ("[spaced]( <docs/ci.md> )", "docs/ci.md"),
        ("See [it].\n\n[it]: docs/ci.md", "docs/ci.md"),
        ('<img src="docs/images/a.png">', "docs/images/a.png"),
        ("<a href='docs/ci.md'>it</a>", "docs/ci.md"),
    ],
)
def test_a_link_of_the_wheels_page_that_leads_nowhere_on_the_index_is_found(checked, tmp_path, link, target):
    built = wheel(tmp_path, f"{CLEAN}\n{link}\n")
    assert checked(built) == (1, [f"{built.name}: the package index would show a link to {target}"])


def test_an_sdist_has_the_data_that_its_tests_and_pages_read():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = [*table["tool"]["hatch"]["build"]["targets"]["sdist"]["include"], "pyproject.toml"]
    assert all((ROOT / name).is_file() for name in CARRIED)
    assert [name for name in CARRIED if not any(name == one or name.startswith(f"{one}/") for one in included)] == []


def test_the_substitutions_leave_the_readme_no_link_within_the_repository():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(CHECK["links_within"](page)) > 10
    for one in table["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(one["pattern"], one["replacement"].replace("$HFPR_VERSION", "1"), page)
    assert CHECK["links_within"](page) == []


PLANTED = {
    "an account": "https://github.com/OWNER/pytest-gpumem",
    "an account's pages": "https://OWNER.github.io/pytest-gpumem/",
    "no index": "Not on PyPI yet: clone it",
    "no index, over two lines": "It is not on\n  PyPI yet",
    "no release": "Until the\nfirst release, install",
    "no date": "## [0.1.0] - unreleased",
}


@pytest.mark.parametrize("placeholder", PLANTED.values(), ids=PLANTED)
def test_a_placeholder_in_any_file_that_is_shipped_is_refused_in_a_release(checked, tmp_path, placeholder):
    for name in CARRIED:
        built = sdist(tmp_path, {"clean.md": CLEAN.encode(), name: f"first\n{placeholder}\n".encode()})
        assert checked(built) == (0, [])
        code, (told,) = checked(built, "--release")
        assert code == 1
        assert told.startswith(f"{built.name}: {name}:2: ")
    built = wheel(tmp_path, placeholder)
    assert checked(built) == (0, [])
    code, (told,) = checked(built, "--release")
    assert (code, told.startswith(f"{built.name}: it-1.dist-info/METADATA:")) == (1, True)
