"""Every library makes of the same batches the bits of a plain loop, also from its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

#: Trains ``llama``, or resumes from the checkpoint that the whole training left in the folder.
Train = Callable[..., nn.Module]


def with_accelerate(llama: Any, folder: Path, *, resume: bool) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=llama.MICRO, cpu=True)
    net = llama.model(seed=resume)
    own = llama.optimizer(net)
    loader = torch.utils.data.DataLoader(llama.rows(), batch_size=llama.ROWS)
    prepared = accelerator.prepare(net, own, loader, llama.schedule(own))
    model, optimizer, batches, scheduler = prepared
    if resume:
        accelerator.load_state(folder / "half")
    for epoch in range(int(resume), llama.EPOCHS):
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), llama.CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if not epoch:
            accelerator.save_state(folder / "half")
    return net


def with_lightning(llama: Any, folder: Path, *, resume: bool, manual: bool) -> nn.Module:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.model = llama.model(seed=resume)

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.model(**batch).loss
            if manual:
                self.manual_backward(loss / llama.MICRO)
                if (index + 1) % llama.MICRO == 0:
                    optimizer = self.optimizers()
                    self.clip_gradients(optimizer, llama.CLIP, "norm")
                    optimizer.step()
                    self.lr_schedulers().step()
                    optimizer.zero_grad()
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = llama.optimizer(self.model)
            schedule = {"scheduler": llama.schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    automatic = {"accumulate_grad_batches": llama.MICRO, "gradient_clip_val": llama.CLIP}
    name = "resumed-{epoch}" if resume else "whole-{epoch}"
    trainer = lightning.Trainer(
        max_epochs=llama.EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, name, save_top_k=-1)],
        **({} if manual else automatic),
    )
    module = Module()
    loader = torch.utils.data.DataLoader(llama.rows(), batch_size=llama.ROWS)
    trainer.fit(module, loader, ckpt_path=folder / "whole-epoch=0.ckpt" if resume else None)
    return module.model


def with_trainer(llama: Any, folder: Path, *, resume: bool, **options: Any) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    model = llama.model(seed=resume)
    trainer = Trainer(
        model,
        TrainingArguments(folder, **llama.arguments(), **options),
        train_dataset=llama.rows(),
        optimizers=(llama.optimizer(model), None),
    )
    trainer.train(resume_from_checkpoint=llama.checkpoint(folder) if resume else None)
    return model


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
VARIANTS = {
    "lightning-manual": partial(with_lightning, manual=True),
    "trainer-checkpointing": partial(with_trainer, activation_checkpointing=True),
    "trainer-compiled": partial(with_trainer, **COMPILED),
}
LIBRARIES = [
    pytest.param(with_accelerate, id="accelerate"),
    pytest.param(partial(with_lightning, manual=False), id="lightning"),
    pytest.param(with_trainer, id="trainer"),
    *(pytest.param(way, id=name, marks=pytest.mark.extended) for name, way in VARIANTS.items()),
]


def test_the_plain_loop_learns_to_near_the_entropy_of_the_text(llama: Any) -> None:
    # A model that ignores its input has log(12) = 2.48.
    assert llama.loss(llama.model()) > 2.4
    assert llama.loss(llama.plain()) < llama.kit.Bigram.entropy + 0.05


@pytest.mark.parametrize("train", LIBRARIES)
def test_a_library_whole_or_resumed_has_the_bits_of_a_plain_loop(
    llama: Any, expected: dict[str, Tensor], tmp_path: Path, train: Train
) -> None:
    for resume in (False, True):
        model = train(llama, tmp_path, resume=resume)
        state = model.state_dict()
        differ = [name for name in expected if not torch.equal(state[name], expected[name])]
        assert not differ, f"resumed: {resume}"
        assert llama.loss(model) < llama.kit.Bigram.entropy + 0.05
