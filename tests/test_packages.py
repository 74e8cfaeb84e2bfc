"""Packages whose code ran in a step: kept by its baseline, named in its rows, and told first when their release is another."""

from __future__ import annotations

import re

import pytest

MODEL = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

    def forward(self, x):
        return self.layers(x)
"""
KEEPS_DOUBLES = MODEL.replace(
    "return self.layers(x)", "self.kept = self.layers(x).double()\n        return self.kept.float()"
)
TEST = """import torch
from tinymodels import Net


def test_it(gpumem):
    gpumem.train_step(Net(), torch.ones(512, 64), loss=lambda out, _: out.square().mean())
"""


@pytest.fixture
def two_releases(project):
    """A project that uses an installed package, of which there are two releases in folders of their own."""
    for release, text in (("1.0", MODEL), ("2.0", KEEPS_DOUBLES)):
        folder = project.path / release / "site-packages"
        (folder / "tinymodels").mkdir(parents=True)
        (folder / "tinymodels" / "__init__.py").write_text(text, encoding="utf-8")
        info = folder / f"tinymodels-{release}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: tinymodels\nVersion: {release}\n", encoding="utf-8"
        )
    (project.path / "test_it.py").write_text(TEST, encoding="utf-8")

    def run(release, *options):
        return project.run("-o", f"pythonpath={release}/site-packages", *options, "test_it.py")

    return run


def test_a_regression_with_another_release_says_so_first_and_names_the_packages_line(project, two_releases):
    two_releases("1.0", "--gpumem-update=new").assert_outcomes(passed=1)
    (stored,) = (project.path / "gpumem-baselines").rglob("*.toml")
    # Beside what torch needs, as a build for CUDA does.
    assert re.search(r'packages\]\n(\S+ = .*\n)*tinymodels = "1.0"\n', stored.read_text(encoding="utf-8"))
    two_releases("1.0", "--gpumem-baseline").assert_outcomes(passed=1)
    result = two_releases("2.0", "--gpumem-baseline")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Memory regressed: peak *, allowed +2.8 %; tinymodels 2.0, was 1.0",
            "*tinymodels 2.0: __init__.py:10 (from test_it.py:6)*",
            "  bisect:   gpumem bisect --packages test_it.py::test_it*",
        ]
    )
    result.stdout.no_fnmatch_line("*site-packages*")


def test_every_report_names_the_package_and_no_path_of_its_environment(project, two_releases):
    two_releases("1.0", "--gpumem-update=new").assert_outcomes(passed=1)
    reports = [f"--gpumem-report=r.{suffix}" for suffix in ("json", "html", "md", "sarif")]
    two_releases("2.0", "--gpumem-baseline", "--junitxml=r.xml", *reports).assert_outcomes(failed=1)
    for suffix in ("json", "html", "md", "xml"):
        text = (project.path / f"r.{suffix}").read_text(encoding="utf-8")
        assert "tinymodels 2.0: __init__.py:10" in text, suffix
        assert "site-packages/tinymodels" not in text, suffix
    assert "tinymodels 2.0, was 1.0" in (project.path / "r.sarif").read_text(encoding="utf-8")
