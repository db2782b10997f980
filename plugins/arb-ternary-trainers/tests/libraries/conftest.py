"""A small Llama, a text, and the bits that a plain loop makes of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import arb_ternary

#: Steps per epoch, epochs, micro-batches per step, rows per micro-batch.
STEPS, EPOCHS, MICRO, ROWS = 16, 2, 2, 16
#: Largest norm of the float gradients, which most steps exceed.
CLIP = 0.05
RATES = {"lr": 0.4, "float_lr": 0.02}
#: What libraries warn of in their own code, or in every short run.
WARNINGS = (
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*LeafSpec:UserWarning",
    "ignore:Checkpoint directory:UserWarning",
)


class Llama:
    """The same training for every library.

    Batches come in the order of the text, twice. The number of predictions per step is a power of
    two, so that a library may divide by it before or after a sum.
    """

    STEPS = STEPS
    EPOCHS = EPOCHS
    MICRO = MICRO
    ROWS = ROWS
    CLIP = CLIP

    def __init__(self, kit: SimpleNamespace) -> None:
        self.kit = kit
        self.text = kit.Bigram().batch(0, rows=STEPS * MICRO * ROWS)
        self.held_out = kit.Bigram().batch(10**6, rows=256)

    def float_model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.kit.VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )

    def model(self, seed: int = 0) -> nn.Module:
        model = self.float_model(seed)
        arb_ternary.ternarize(model, init="random", group_size=32, gradients="int8")
        return model

    def optimizer(self, model: nn.Module) -> Any:
        return arb_ternary.make_optimizer(model, **RATES)

    def schedule(self, optimizer: Any) -> Any:
        return get_linear_schedule_with_warmup(optimizer, 0, STEPS * EPOCHS)

    def arguments(self) -> dict[str, Any]:
        """Options of a ``TrainingArguments`` for the same training."""
        return {
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": MICRO,
            "max_grad_norm": CLIP,
            "lr_scheduler_type": "linear",
            "train_sampling_strategy": "sequential",
            "save_strategy": "epoch",
            "logging_steps": STEPS // 2,
            "report_to": [],
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
        }

    def checkpoint(self, folder: Path) -> Path:
        """Where a Trainer with these options saved the first epoch."""
        return folder / f"checkpoint-{STEPS}"

    def rows(self) -> list[dict[str, Tensor]]:
        return [{"input_ids": row, "labels": row} for row in self.text]

    def loss(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(model(input_ids=self.held_out, labels=self.held_out).loss)

    def plain(self) -> nn.Module:
        """Train in a plain loop."""
        model = self.model()
        optimizer = self.optimizer(model)
        schedule = self.schedule(optimizer)
        clipped = 0
        for _ in range(EPOCHS):
            for index, rows in enumerate(self.text.split(ROWS), 1):
                (model(input_ids=rows, labels=rows).loss / MICRO).backward()
                if index % MICRO:
                    continue
                clipped += nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        assert clipped > STEPS * EPOCHS / 2
        return model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore some warnings in the tests of this folder."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _libraries_start_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what libraries keep for the whole process: a variable, and the state of accelerate."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def llama(kit: SimpleNamespace) -> Llama:
    return Llama(kit)


@pytest.fixture(scope="session")
def expected(llama: Llama) -> dict[str, Tensor]:
    """The state of the model after the plain loop."""
    return llama.plain().state_dict()
