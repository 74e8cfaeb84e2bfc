"""Trainers of other packages, measured as they are and with a callback. Those that are not installed are not needed here."""

from __future__ import annotations

import importlib.util

import pytest

TRANSFORMERS = """
def train(tmp_path, steps, callback, accumulate):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64))
    data = [{"input_ids": torch.arange(32) % 7, "labels": torch.arange(32) % 7}] * 400
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=accumulate, report_to=[],
        max_steps=10**4, save_strategy="no", disable_tqdm=True, use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[steps.callback()] if callback else [])
    trainer.train()
    return trainer.state.global_step
"""
LIGHTNING = """
def train(tmp_path, steps, callback, accumulate):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(64, 64)

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4096, 64)), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False, accumulate_grad_batches=accumulate, default_root_dir=tmp_path,
        callbacks=[steps.callback()] if callback else [],
    )
    trainer.fit(Module(), data)
    return trainer.global_step
"""
TEST = """
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("callback", [False, True])
def test_train(gpumem, tmp_path, callback, accumulate):
    made = None
    with gpumem.loop(8) as steps:
        made = train(tmp_path, steps, callback, accumulate)
    # With a callback, training ends in its own way.
    assert (made is not None) == callback
    assert made is None or 8 <= made < 20
    assert steps.measurement.growth == 0
"""


@pytest.mark.parametrize(
    ("package", "needs", "source"),
    [("transformers", "accelerate", TRANSFORMERS), ("lightning", "lightning", LIGHTNING)],
    ids=["transformers", "lightning"],
)
def test_a_trainer_has_the_same_figures_with_and_without_a_callback(project, package, needs, source):
    # Not importorskip: lightning sets a variable that torch reads, and every later command would load torch anew.
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"the Trainer of {package} needs {needs}")
    project.write(source + TEST)
    found = project.figures("-p", "no:warnings", separate=True)
    assert set(found) == {f"test_train[{callback}-{n}]" for callback in (False, True) for n in (1, 4)}
    for n in (1, 4):
        # The callback comes later than the optimizer's step: a scalar more or less is alive.
        assert found[f"test_train[False-{n}]"] == pytest.approx(found[f"test_train[True-{n}]"], abs=64)
    assert found["test_train[True-4]"]["loop.flops"] == 4 * found["test_train[True-1]"]["loop.flops"]
