"""The recipe docs/development/add-a-checkpointing-kind.md: the new kind checkpoints a model, and is known wherever kinds are."""

from __future__ import annotations

import pytest

from tests.recipes.recipes import copy_of_the_package, files_of, write_tests

MODEL = """
    import pytest
    import torch

    from pytest_gpumem import ConfigError, StepConfig


    class Model(torch.nn.Module):
        def __init__(self, count=4):
            super().__init__()
            block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
            self.h = torch.nn.ModuleList(block() for _ in range(count))

        def forward(self, hidden):
            for block in self.h:
                hidden = hidden + block(hidden)
            return hidden.square().mean()


    def batch():
        return torch.ones(512, 64)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    assert len(files_of("add-a-checkpointing-kind")) == 1
    return copy_of_the_package(tmp_path_factory.mktemp("package"), "add-a-checkpointing-kind")


@pytest.mark.thorough
def test_the_new_kind_recomputes_saves_memory_and_learns_the_same(package, tmp_path):
    write_tests(
        tmp_path,
        MODEL
        + """

    @pytest.mark.parametrize("count", [1, 3])
    def test_it_saves(gpumem, count):
        config = StepConfig.parse(f"fp32,checkpoint=first:{count},blocks=h")
        plain = gpumem.train_step(Model, batch, config="fp32", name="plain")
        first = gpumem.train_step(Model, batch, config=config, name="first")
        assert plain.recomputed == 0
        # A block, its two linear layers and what is between them.
        assert first.recomputed == 4 * count
        assert first.saves(plain) > 0.09 * count


    def test_it_learns_the_same(gpumem):
        gpumem.assert_same_gradients(Model, batch, "fp32", "fp32,checkpoint=first:2")


    def test_what_is_not_there_is_told(gpumem):
        with pytest.raises(ConfigError, match="^the first 5 blocks are more than the 4 that there are$"):
            gpumem.train_step(Model, batch, config="fp32,checkpoint=first:5")


    @pytest.mark.gpumem_configs(checkpoint=["none", "first:2"])
    def test_matrix(gpumem, gpumem_config):
        gpumem.train_step(Model, batch, config=gpumem_config)
    """,
    )
    done = package.pytest(tmp_path, "--no-gpumem-time", "-v")
    assert "6 passed" in done.stdout, done.stdout + done.stderr
    assert "test_matrix[ckpt-first2] PASSED" in done.stdout


WRONG = """
from pytest_gpumem import ConfigError, StepConfig

for word in ("fist:2", "first", "first:0"):
    try:
        StepConfig(checkpoint=word)
    except ConfigError as error:
        print(error)
"""


def test_messages_list_it_in_its_place_and_say_how_it_is_written(package, tmp_path):
    done = package.run(tmp_path, "-c", WRONG)
    valid = "none, blocks, every:N, sequential:S, sqrt, first:N, modules:PATTERN, ops, offload, budget:F"
    assert done.stdout.splitlines() == [
        f"unknown checkpoint 'fist:2'; did you mean 'first:N'? Valid: {valid}",
        "checkpoint=first: write checkpoint=first:N",
        "checkpoint=first:0: expected a whole number, 1 or more",
    ], done.stderr
