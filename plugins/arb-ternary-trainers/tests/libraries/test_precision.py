"""Mixed precision, and loss scales that libraries drive."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from transformers import Trainer, TrainingArguments


class Module(lightning.LightningModule):
    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.llama = llama
        self.model = llama.model()

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> dict[str, Any]:
        self.own = self.llama.optimizer(self.model)
        schedule = {"scheduler": self.llama.schedule(self.own), "interval": "step"}
        return {"optimizer": self.own, "lr_scheduler": schedule}


def fit(llama: Any, **options: Any) -> Module:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_epochs=llama.EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=llama.MICRO,
        gradient_clip_val=llama.CLIP,
        **options,
    )
    module = Module(llama)
    trainer.fit(module, torch.utils.data.DataLoader(llama.rows(), batch_size=llama.ROWS))
    return module


@pytest.mark.extended
def test_lightning_learns_in_bfloat16(llama: Any) -> None:
    module = fit(llama, precision="bf16-mixed")
    assert llama.loss(module.model) < llama.kit.Bigram.entropy + 0.05


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(
    ("exponent", "overflows"),
    [pytest.param(12, False, marks=pytest.mark.extended), (24, True)],
)
def test_lightning_clips_and_skips_with_a_loss_scale(
    llama: Any, exponent: int, overflows: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**exponent)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    module = fit(llama, plugins=[precision])
    steps = llama.STEPS * llama.EPOCHS
    skipped = module.own.skipped_updates
    assert scaler.get_scale() == 2.0 ** (exponent - skipped)
    assert module.own.rule.updates == steps - skipped
    assert (skipped > 0) == overflows
    assert llama.loss(module.model) < llama.kit.Bigram.entropy + 0.1


def test_accelerate_sees_that_a_step_was_skipped(llama: Any) -> None:
    Accelerator(cpu=True)
    model = llama.model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    own = llama.optimizer(model)
    optimizer = AcceleratedOptimizer(own, scaler=scaler)
    batch = llama.rows()[0]["input_ids"][None]
    for factor, skipped in ((1.0, False), (float("inf"), True), (1.0, False)):
        loss = model(input_ids=batch, labels=batch).loss * factor
        scaler.scale(loss).backward()
        optimizer.step()
        assert optimizer.step_was_skipped == skipped
        assert own.last_outcome.skipped == skipped
        model.zero_grad()
    assert own.rule.updates == 2
    assert scaler.get_scale() == 2.0**15


def test_trainer_learns_in_bfloat16(llama: Any, tmp_path: Any) -> None:
    model = llama.model()
    options = {**llama.arguments(), "save_strategy": "no"}
    trainer = Trainer(
        model,
        TrainingArguments(tmp_path, bf16=True, **options),
        train_dataset=llama.rows(),
        optimizers=(llama.optimizer(model), None),
    )
    trainer.train()
    assert llama.loss(model) < llama.kit.Bigram.entropy + 0.05
