"""The hooks that other plugins and conftest files may implement."""

from __future__ import annotations

import pytest

MARKED = "@pytest.mark.gpumem\ndef test_it():\n    torch.ones({count})\n"
TOY = """
from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.facts.measurement import Environment


class Toy(CpuDevice):
    name = "toy"

    def environment(self):
        return Environment(slug={slug!r}, device="Toy 1")


def missing():
    raise DeviceUnavailable("no toy in the box")


def pytest_gpumem_devices(config):
    return {{"toy": Toy, "missing": missing}}
"""


def conftest(project, source):
    project.write(source, "conftest.py")


def test_every_measurement_is_seen(project):
    conftest(
        project,
        "def pytest_gpumem_measurement(item, measurement):\n"
        "    print('SEEN', item.name, measurement.name, measurement.peak_allocated)\n",
    )
    project.write(
        MARKED.format(count=1_000_000)
        + "\n\ndef test_two(gpumem):\n    for _ in '12':\n        gpumem.measure(lambda: torch.ones(10))\n"
    )
    project.run("-s").stdout.fnmatch_lines(
        ["*SEEN test_it call 4000000", "*SEEN test_two measure 40", "*SEEN test_two measure-2 40"]
    )


def test_the_environment_of_a_baseline_can_be_added_to(project):
    conftest(
        project,
        "def pytest_gpumem_environment(config, device):\n    return {'transformers': '9.9', 'device_name': device.name}\n",
    )
    project.write(MARKED.format(count=1000))
    project.run("--gpumem-update=new")
    (text,) = project.stored().values()
    assert 'transformers = "9.9"' in text
    assert 'device_name = "cpu"' in text


def test_a_tolerance_can_be_adjusted_for_a_test(project):
    project.write(MARKED.format(count=1_000_000))
    project.run("--gpumem-update=new")
    project.write(MARKED.format(count=1_500_000))
    project.run("--gpumem-baseline").assert_outcomes(failed=1)
    conftest(
        project,
        "from pytest_gpumem.facts.metrics import Tolerance\n\n\n"
        "def pytest_gpumem_tolerance(item, metric, tolerance):\n"
        "    return Tolerance(0.6) if metric == 'peak_allocated' and item.name == 'test_it' else None\n",
    )
    project.run("--gpumem-baseline").assert_outcomes(passed=1)


def test_a_device_can_be_added_and_is_measured_and_stored_by_its_own_name(project):
    conftest(project, TOY.format(slug="toy-1"))
    project.write(MARKED.format(count=1_000_000))
    result = project.run("--gpumem-update=new", device="toy")
    assert result.ret == 0
    assert list(project.stored()) == ["toy-1/test_it.py.toml"]
    project.run("--gpumem-baseline", device="toy").stdout.fnmatch_lines(["gpumem: 1 gated"])


def test_an_added_device_that_is_not_there_leaves_tests_unmeasured_with_its_reason(project):
    conftest(project, TOY.format(slug="toy-1"))
    project.write(MARKED.format(count=1000))
    project.run(device="missing").stdout.fnmatch_lines(["gpumem: 0 gated, 1 unmeasured (no toy in the box)"])


@pytest.mark.parametrize("result", ["Tolerance(float('nan'))", "Tolerance(0.1, -1)", "Tolerance('5 %')", "0"])
def test_a_tolerance_that_is_none_fails_the_test_and_names_the_hook_and_its_plugin(project, result):
    project.write(MARKED.format(count=1_000_000))
    project.run("--gpumem-update=new")
    conftest(
        project,
        "from pytest_gpumem.facts.metrics import Tolerance\n\n\n"
        f"def pytest_gpumem_tolerance(item, metric, tolerance):\n    return {result} if metric == 'retained' else None\n",
    )
    failed = project.run("--gpumem-baseline")
    failed.assert_outcomes(failed=1)
    right = "a Tolerance of finite ratios and amounts that are not negative, like Tolerance(relative=0.05)"
    failed.stdout.fnmatch_lines(
        [f"gpumem: pytest_gpumem_tolerance (*conftest.py) returned * for retained, expected None or {right}"]
    )


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("{'slug': '../../x'}", "returned 'slug', which is the device's own; give it another name"),
        ("{'fast': True}", "returned 'fast': True, expected a name and a string or an int"),
        ("'cuda'", "returned 'cuda', expected a mapping of names to strings or ints"),
    ],
)
def test_an_addition_to_the_environment_that_no_store_can_keep_fails_the_test(project, result, told):
    conftest(project, f"def pytest_gpumem_environment(config, device):\n    return {result}\n")
    project.write(MARKED.format(count=1000))
    failed = project.run("--gpumem-update=new")
    failed.assert_outcomes(errors=1)
    (line,) = {line for line in failed.outlines if line.startswith("gpumem: pytest_gpumem_environment (")}
    assert line.endswith(f"conftest.py) {told}")
    assert list(project.path.rglob("*.toml")) == []


@pytest.mark.parametrize("slug", ["../../outside", ""])
def test_a_device_whose_slug_is_no_name_of_a_folder_is_never_written(project, slug):
    conftest(project, TOY.format(slug=slug))
    project.write(MARKED.format(count=1000))
    result = project.run("--gpumem-update=new", device="toy")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"gpumem: the slug of a device is {slug!r}, but it must be the name of a folder*"])
    assert list(project.path.rglob("*.toml")) == []
