"""Models that nobody here wrote (GPT-2 and ViT of transformers), measured on the CPU with the plugin itself.

They are built from small configurations with random weights: nothing is downloaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.models.architectures import (
    GPT2,
    NEEDS_TRANSFORMERS,
    ON_THE_CPU,
    SCALARS,
    VIT,
    VOCABULARY,
    bytes_of,
)

if TYPE_CHECKING:
    from pytest_gpumem.plugin.fixture import Gpumem
    from tests.models.architectures import Architecture

pytestmark = NEEDS_TRANSFORMERS
UNTIMED = pytest.mark.usefixtures("_untimed")
"""Where the claim is about bytes. That these are the same beside times is a claim of those that are timed."""

FLOAT = 4


@pytest.fixture(params=[GPT2, VIT], ids=["gpt2", "vit"])
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return request.param


def sizes_of(model: torch.nn.Module) -> list[int]:
    """Bytes of each trainable parameter; tied ones count once."""
    return [parameter.numel() * FLOAT for parameter in model.parameters() if parameter.requires_grad]


def resident(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the parameters and buffers of a model, and of its batch."""
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def adamw_state(sizes: list[int]) -> int:
    """Bytes that AdamW keeps: two averages of each parameter's size, and a step counter of one float each."""
    return sum(2 * size + FLOAT for size in sizes)


def adamw_temporaries(sizes: list[int]) -> int:
    """Bytes of a root and a quotient of one parameter's size, while the variable still holds the quotient before it.

    ``denom`` in torch/optim/adam.py, ``_single_tensor_adam``.
    """
    return max(before + 2 * size for before, size in zip([0, *sizes], sizes, strict=False))


@ON_THE_CPU
@UNTIMED
def test_an_inference_step_gives_the_same_bytes_again_with_other_weights_and_data(
    gpumem: Gpumem, architecture: Architecture
) -> None:
    seen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        seen.append(gpumem.infer_step(architecture.build(), architecture.batch()))
    assert seen[0].settled
    assert seen[0].retained == 0
    assert seen[0].peak_allocated > 0
    assert bytes_of(seen[0]) == bytes_of(seen[1])


@ON_THE_CPU
@UNTIMED
def test_gradients_and_optimizer_state_add_up_to_the_byte(gpumem: Gpumem, architecture: Architecture) -> None:
    model, batch = architecture.build(), architecture.batch()
    sizes = sizes_of(model)
    loss = FLOAT
    without_state = resident(model, batch) + sum(sizes) + loss

    sgd = gpumem.train_step(model, batch, optimizer=torch.optim.SGD)
    assert sgd.peak_optimizer == without_state

    momentum = gpumem.train_step(model, batch, optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9))
    assert 0 <= momentum.peak_optimizer - without_state - sum(sizes) < SCALARS

    adamw = gpumem.train_step(model, batch, optimizer=torch.optim.AdamW)
    expected = without_state + adamw_state(sizes) + adamw_temporaries(sizes)
    assert 0 <= adamw.peak_optimizer - expected < SCALARS


@ON_THE_CPU
def test_generating_text_gives_the_same_bytes_when_repeated(gpumem: Gpumem) -> None:
    model, prompt = GPT2.build().eval(), torch.randint(3, VOCABULARY, (2, 8))

    def generate() -> None:
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=8, max_new_tokens=8, do_sample=False
        )

    measured = [gpumem.measure(generate, name=name) for name in ("first", "second")]
    assert bytes_of(measured[0]) == bytes_of(measured[1])
    with gpumem.track("region") as region:
        generate()
    assert region.measurement.peak_allocated > 0
    assert region.measurement.retained == 0


# Both orders are hard: training leaves gradients on the model that the inference after it has no use for.
SHARED = """
from transformers import GPT2Config, GPT2LMHeadModel


@pytest.fixture(scope="module")
def model():
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=512, bos_token_id=0, eos_token_id=1)
    )


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(512, (4, 32))


@pytest.mark.gpumem
def test_trains(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters())
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


@pytest.mark.gpumem
def test_infers(model, tokens):
    model.eval()
    with torch.inference_mode():
        model(input_ids=tokens)


def test_train_step(gpumem, model, tokens):
    gpumem.train_step(model, {"input_ids": tokens, "labels": tokens})
"""
TESTS = ["test_trains", "test_infers", "test_train_step"]


def test_tests_that_share_a_model_measure_the_same_alone_and_in_every_order(project: Any) -> None:
    project.write(SHARED)
    expected = {test: project.figures(f"test_it.py::{test}")[test] for test in TESTS}
    assert all(expected.values())
    for order in (TESTS, TESTS[::-1]):
        assert project.figures(*(f"test_it.py::{test}" for test in order)) == expected, order
