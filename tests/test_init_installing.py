"""The requirements that the proposed workflow installs: pip can install them."""

from __future__ import annotations

import sys

import pytest

from pytest_gpumem.init.installing import Sources, lines_of, unfit_of
from pytest_gpumem.init.workflow import gate_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = '[build-system]\nbuild-backend = "uv_build"\n[project]\nname = "net"\nversion = "1"\n'
PLAIN = '[project]\nname = "net"\nversion = "1"\n'


def lines(settings="", release="2.13.0", **more):
    return list(lines_of(Sources(tomllib.loads(settings), **more), release))


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (PACKAGE, {"folders": ["net", "data"]}),
        (PLAIN, {"folders": ["net", "tests", "docs", ".git", "not-a-name"]}),
        (PLAIN, {"folders": ["src", "data", "images"]}),
        (PLAIN + '[tool.setuptools.packages.find]\nwhere = ["pkg"]\n', {"folders": ["pkg", "data"]}),
        ('[project]\nname = "net"\ndynamic = ["version"]\n', {}),
        ('[tool.poetry]\nname = "net"\n', {}),
        ("", {"has_setup_py": True, "folders": ["net", "data"]}),
        ("", {"setup_cfg": "[metadata]\nname = net\n"}),
    ],
)
def test_a_package_is_installed(settings, more):
    assert lines(settings, **more) == ["-e ."]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ("", {}),
        ("[tool.black]\nline-length = 100\n", {"folders": ["net"]}),
        ('[build-system]\nrequires = ["setuptools"]\n', {}),
        ('[project]\nname = "net"\n', {}),
        (PLAIN, {"folders": ["net", "data"]}),
        (PLAIN + "[tool.uv]\npackage = false\n", {}),
        ('[tool.poetry]\nname = "net"\npackage-mode = false\n', {}),
        ("", {"setup_cfg": "[tool:pytest]\ntestpaths = tests\n"}),
        ("", {"setup_cfg": "no section\n"}),
    ],
)
def test_a_project_that_is_no_package_is_not_installed(settings, more):
    assert lines(settings, **more) == []


def test_a_project_that_is_no_package_has_its_dependencies_installed():
    settings = f'{PLAIN}dependencies = ["torch>=2", "numpy"]\noptional-dependencies = {{test = ["timm"]}}\n'
    assert lines(settings, folders=["net", "data"]) == ["numpy", "timm"]


def test_files_of_requirements_are_used_by_their_names():
    files = {"requirements.txt": "numpy\n", "requirements-dev.txt": "timm\n", "tests/requirements.txt": "einops\n"}
    assert lines(files=files) == ["-r requirements.txt", "-r requirements-dev.txt", "-r tests/requirements.txt"]


def test_the_extra_and_the_group_of_its_tests_are_installed():
    settings = f'{PACKAGE}optional-dependencies = {{dev = ["x"], docs = ["y"]}}\n'
    groups = '[dependency-groups]\ndev = ["tokenizers", {include-group = "docs"}]\ndocs = ["z"]\n'
    assert lines(settings) == ["-e .[dev]"]
    assert lines(settings + groups) == ["-e .[dev]", "tokenizers"]


def test_an_extra_that_asks_for_another_release_of_torch_stands_there_line_by_line():
    settings = (
        f'{PACKAGE}optional-dependencies = {{test = ["pytest", "torch==2.4.0", "torchvision==0.19.0", "timm"]}}\n'
    )
    assert lines(settings) == ["-e .", "pytest", "timm"]
    assert lines(settings, release="2.4.0") == ["-e .[test]"]
    assert lines(settings, release=None) == ["-e .[test]"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch==2.4.0", ["torch==2.4.0"]),
        ("torch<2.6; sys_platform == 'no such'", []),
        ("torch>=2.2", []),
        ("torchvision==0.19.0", []),
        ("# torch==2.4.0", []),
    ],
)
def test_a_requirement_of_another_release_of_torch_is_told(line, expected):
    sources = Sources(files={"requirements.txt": f"{line}\n"})
    assert [one for _, one in unfit_of(sources, "2.13.0")] == expected
    package = Sources(
        tomllib.loads(f"{PACKAGE}dependencies = [{line!r}]\n" if '"' not in line and "'" not in line else PACKAGE)
    )
    assert [one for _, one in unfit_of(package, "2.13.0")] == expected


def test_no_line_is_there_twice():
    assert gate_lines("2.13.0", ["pytest", "timm"])[-2:] == [gate_lines("2.13.0", [])[-1], "timm"]
