"""``@pytest.mark.gpumem_configs(...)``: a test for each combination, and what is said of markers that make none."""

from __future__ import annotations

import pytest

from pytest_gpumem.measuring.step_config.config import AXES

MODEL = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x.square().mean()


def batch():
    return torch.ones(8, 8)


"""
MATRIX = (
    MODEL
    + """
@pytest.mark.gpumem_configs({axes})
def test_matrix(gpumem, gpumem_config):
    gpumem.train_step(Model, batch, config=gpumem_config)
"""
)


def collected(project, *args: str) -> list[str]:
    """The ids of the collected tests, without the file."""
    lines = project.run("--collect-only", "-q", *args).outlines
    return [line.partition("::")[2] for line in lines if "::" in line]


# Tests of a matrix


def test_there_is_a_test_for_each_combination_with_the_config_in_its_id(project):
    project.write(MATRIX.format(axes="precision=['fp32', 'amp-bf16'], checkpoint=['none', 'every:2']"))
    assert collected(project) == [
        "test_matrix[fp32]",
        "test_matrix[fp32-ckpt-every2]",
        "test_matrix[amp-bf16]",
        "test_matrix[amp-bf16-ckpt-every2]",
    ]


def test_a_combination_can_be_left_out(project):
    axes = "precision=['fp32', 'amp-bf16'], checkpoint=['none', 'ops'], skip=['amp-bf16,checkpoint=ops']"
    project.write(MATRIX.format(axes=axes))
    assert collected(project) == ["test_matrix[fp32]", "test_matrix[fp32-ckpt-ops]", "test_matrix[amp-bf16]"]


def test_each_test_measures_its_own_config(project):
    project.write(MATRIX.format(axes="checkpoint=['none', 'blocks'], accumulate=[1, 2]"))
    project.run("--no-gpumem-time", "--junitxml=report.xml").assert_outcomes(passed=4)
    verdicts = project.verdicts()
    assert {name: one["verdicts"][0]["measurement"]["workload"]["config"] for name, one in verdicts.items()} == {
        "test_matrix[plain]": "fp32",
        "test_matrix[acc2]": "fp32,accumulate=2",
        "test_matrix[ckpt-blocks]": "fp32,checkpoint=blocks",
        "test_matrix[ckpt-blocks-acc2]": "fp32,checkpoint=blocks,accumulate=2",
    }
    assert [(one["cell"]["matrix"], one["cell"]["config"], one["cell"]["index"]) for one in verdicts.values()] == [
        ("test_it.py::test_matrix", "plain", 0),
        ("test_it.py::test_matrix", "accumulate=2", 1),
        ("test_it.py::test_matrix", "checkpoint=blocks", 2),
        ("test_it.py::test_matrix", "checkpoint=blocks,accumulate=2", 3),
    ]


def test_a_matrix_may_stand_beside_other_parameters(project):
    project.write(
        MODEL
        + """
@pytest.mark.parametrize("size", [2, 4], ids=["small", "fp32"])
@pytest.mark.gpumem_configs(precision=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["a"])
def test_matrix(gpumem, gpumem_config, size, name):
    gpumem.train_step(Model, lambda: torch.ones(size, 8), config=gpumem_config)
"""
    )
    project.run("--no-gpumem-time", "--junitxml=report.xml").assert_outcomes(passed=4)
    rows: dict[str, list[tuple[int, str]]] = {}
    for name, one in project.verdicts().items():
        # The parameter of the outermost decorator comes last.
        size = name.removesuffix("]").rpartition("-")[2]
        rows.setdefault(f"{size}: {one['cell']['matrix']}", []).append((one["cell"]["index"], one["cell"]["config"]))
    # Of each size the configs are compared with one another, in the order of the marker.
    assert {title: [config for _, config in sorted(found)] for title, found in rows.items()} == {
        "small: test_it.py::test_matrix[a-small]": ["fp32", "bf16"],
        "fp32: test_it.py::test_matrix[a-fp32]": ["fp32", "bf16"],
    }


def test_a_marker_on_a_class_leaves_tests_without_the_argument_alone(project):
    project.write(
        """
@pytest.mark.gpumem_configs(precision=["fp32", "bf16"])
class TestClass:
    def test_with(self, gpumem_config):
        assert gpumem_config.precision in ("fp32", "bf16")

    def test_without(self): ...

    @pytest.mark.gpumem_configs(accumulate=[2])
    def test_with_its_own(self, gpumem_config):
        assert str(gpumem_config) == "accumulate=2"
"""
    )
    project.run().assert_outcomes(passed=4)


# Markers that make no matrix


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("precisions=['fp32']", f": unknown axis 'precisions'; did you mean 'precision'? Valid: {', '.join(AXES)}"),
        (
            "precision='fp32', skip='bf16'",
            ": skip='bf16' leaves nothing out, because no combination has all settings in this text",
        ),
        (
            "['fp32']",
            " takes keyword arguments only, got ['fp32']; write precision=['fp32', 'amp-bf16'], say",
        ),
    ],
)
def test_a_marker_that_makes_no_config_is_a_usage_error(project, axes, message):
    project.write(MATRIX.format(axes=axes))
    result = project.run()
    assert result.ret != pytest.ExitCode.OK
    assert f"gpumem_configs{message}" in text_of(result)
    assert "test_it.py::test_matrix: " in text_of(result)
    result.assert_outcomes(errors=1)


def text_of(result: pytest.RunResult) -> str:
    return result.stdout.str() + result.stderr.str()


def test_a_marker_without_the_argument_is_a_usage_error(project):
    project.write(
        """
@pytest.mark.gpumem_configs(precision=["fp32"])
def test_matrix(gpumem): ...
"""
    )
    message = "test_it.py::test_matrix: @pytest.mark.gpumem_configs needs the argument gpumem_config"
    assert message in text_of(project.run())


def test_the_argument_without_a_marker_is_an_error_that_says_what_to_write(project):
    project.write("def test_matrix(gpumem_config): ...")
    result = project.run()
    result.assert_outcomes(errors=1)
    message = (
        "gpumem_config has no config: give the test @pytest.mark.gpumem_configs(precision=['fp32', 'amp-bf16'], ...)"
    )
    assert message in text_of(result)


# What a device cannot run


def test_what_the_device_cannot_run_is_skipped_with_the_reason(project):
    project.write(MATRIX.format(axes="precision=['fp32', 'tf32'], checkpoint=['none', 'offload']"))
    result = project.run("--no-gpumem-time", "-rs")
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(["SKIPPED [[]2[]] * gpumem: TF32 is a format of NVIDIA GPUs, and this is a CPU"])
    result.stdout.fnmatch_lines(
        ["SKIPPED [[]1[]] * gpumem: offloading moves tensors from a GPU to the host, and the CPU is the host"]
    )
    result.stdout.fnmatch_lines(["gpumem: 0 gated, 3 unmeasured (*TF32 is a format of NVIDIA GPUs*), 1 recorded*"])


def test_what_the_device_cannot_run_fails_a_strict_run(project):
    budget = "pytestmark = pytest.mark.gpumem(max_gb=1)\n\n\n"
    project.write(budget + MATRIX.format(axes="precision=['fp32', 'tf32']"))
    result = project.run("--no-gpumem-time", "--gpumem-strict")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*Not measured (required by --gpumem-strict): TF32 is a format of NVIDIA GPUs, and this is a CPU"]
    )


# Relations


def test_a_test_that_only_asserts_relations_is_gated(project):
    project.write(
        MODEL
        + """
def test_same(gpumem):
    gpumem.assert_same_gradients(Model, batch, "checkpoint=blocks", "fp32")


def test_grows(gpumem):
    gpumem.assert_no_growth(lambda: torch.ones(4), steps=4)


def test_nothing(gpumem): ...
"""
    )
    result = project.run("--junitxml=report.xml")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["gpumem: 2 gated, 1 unmeasured (it has the gpumem fixture but measured nothing with it)"]
    )
    assert {name: (one["relations"], one["unmeasured"] is None) for name, one in project.verdicts().items()} == {
        "test_same": (1, True),
        "test_grows": (1, True),
        "test_nothing": (0, False),
    }


def test_a_relation_that_does_not_hold_fails_the_test_by_itself(project):
    project.write(
        MODEL
        + """
class Detached(Model):
    def forward(self, x):
        return super().forward(x.detach() if not torch.is_autocast_enabled("cpu") else x) * (
            0.0 if torch.is_autocast_enabled("cpu") else 1.0
        )


def test_same(gpumem):
    gpumem.assert_same_gradients(Detached, batch, "amp-bf16", "fp32")
"""
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E * AssertionError: gradients differ: h.0.0.weight: *", "gpumem: 0 gated, 1 failed by itself"]
    )
