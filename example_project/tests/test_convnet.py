"""The memory of the convolutional network: steps with two optimizers, a loop of the test's own, and evaluation."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ConvNet
from tiny_models.data import image_batch
from torch.nn import functional as F  # noqa: N812 - as PyTorch's own code calls it


@pytest.fixture(scope="module")
def images(device):
    """32 images of 64 x 64, and the class of each."""
    pixels, labels = image_batch(32, 64)
    return pixels.to(device), labels.to(device)


@pytest.fixture
def convnet(device):
    return ConvNet().to(device)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_train_step(gpumem, convnet, images, optimizer):
    pixels, labels = images

    def loss(logits, _):
        return F.cross_entropy(logits, labels)

    gpumem.train_step(convnet, pixels, loss=loss, optimizer=optimizer)


# Any function that repeats, here a step with gradients of two halves of the batch added up.


def test_accumulating_gradients_saves_memory(gpumem, convnet, images):
    pixels, labels = images

    def step(parts):
        for some_pixels, some_labels in zip(pixels.chunk(parts), labels.chunk(parts), strict=True):
            F.cross_entropy(convnet(some_pixels), some_labels).backward()
        convnet.zero_grad(set_to_none=True)

    whole = gpumem.measure(lambda: step(1), items=len(pixels), name="whole")
    halves = gpumem.measure(lambda: step(2), items=len(pixels), name="halves")
    assert halves.saves(whole) > 0.3


# A region that runs once, within a test that does more than what is to be measured.


def test_evaluation(gpumem, convnet, images):
    pixels, labels = images
    convnet.eval()
    with gpumem.track("evaluate") as region, torch.inference_mode():
        assert convnet(pixels).argmax(dim=1).shape == labels.shape
    assert region.measurement.retained == 0
