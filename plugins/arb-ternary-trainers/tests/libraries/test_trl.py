"""TRL's SFTTrainer and DPOTrainer have the bits of a plain loop over their losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import arb_ternary

# dill, by which datasets makes fingerprints, warns of classes that it cannot find by name.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot locate reference")

PAIRS = 128


@pytest.fixture(scope="module")
def tokenizer(llama: Any) -> PreTrainedTokenizerFast:
    """Words are the numbers of the tokens."""
    words = {str(token): token for token in range(llama.kit.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="0")


@pytest.fixture(scope="module")
def pairs(llama: Any) -> Dataset:
    """Answers with the likelier next tokens are chosen, those with the others are rejected."""
    rows = []
    for first in llama.text[:PAIRS, 0].tolist():
        chosen = [first]
        rejected = [first]
        for _ in range(8):
            chosen.append((5 * chosen[-1] + 3) % llama.kit.VOCABULARY)
            rejected.append((rejected[-1] + 6) % llama.kit.VOCABULARY)
        answers = {"chosen": chosen[1:], "rejected": rejected[1:]}
        texts = {name: "".join(f" {token}" for token in found) for name, found in answers.items()}
        rows.append({"prompt": str(first), **texts})
    return Dataset.from_list(rows)


def plain(llama: Any, trainer: Any, model: nn.Module, items: int | None) -> dict[str, torch.Tensor]:
    """Train with the loss of a Trainer that does not train; returns the state of the model."""
    optimizer = llama.optimizer(model)
    steps = len(trainer.get_train_dataloader()) // llama.MICRO
    horizon = llama.EPOCHS * steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / horizon)
    model.train()
    for _ in range(llama.EPOCHS):
        for index, batch in enumerate(trainer.get_train_dataloader(), 1):
            if items is None:
                (trainer.compute_loss(model, batch) / llama.MICRO).backward()
            else:
                trainer.compute_loss(model, batch, num_items_in_batch=items).backward()
            if index % llama.MICRO == 0:
                nn.utils.clip_grad_norm_(model.parameters(), llama.CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return model.state_dict()


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def test_sft_trainer_whole_or_resumed_has_the_bits_of_a_plain_loop(
    llama: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    texts = Dataset.from_list([{"input_ids": row.tolist()} for row in llama.text])

    def trainer_of(model: nn.Module) -> SFTTrainer:
        options = {"bf16": False, "activation_checkpointing": False, **llama.arguments()}
        return SFTTrainer(
            model,
            SFTConfig(tmp_path, **options),
            train_dataset=texts,
            processing_class=tokenizer,
            optimizers=(llama.optimizer(model), None),
        )

    model = llama.model()
    items = llama.MICRO * llama.ROWS * (llama.text.shape[1] - 1)
    expected = plain(llama, trainer_of(model), model, items)
    assert llama.loss(model) < llama.kit.Bigram.entropy + 0.05
    for resume in (False, True):
        model = llama.model(seed=resume)
        checkpoint = llama.checkpoint(tmp_path) if resume else None
        trainer_of(model).train(resume_from_checkpoint=checkpoint)
        assert_same(model, expected)


def test_dpo_trainer_whole_or_resumed_has_the_bits_of_a_plain_loop(
    llama: Any, tokenizer: PreTrainedTokenizerFast, pairs: Dataset, tmp_path: Path
) -> None:
    def trainer_of(model: nn.Module, **options: Any) -> DPOTrainer:
        reference = None
        if not options:
            reference = arb_ternary.frozen_copy(llama.model())
        plan = {
            **llama.arguments(),
            "per_device_train_batch_size": 8,
            "logging_steps": 1,
            **options,
        }
        return DPOTrainer(
            model,
            reference,
            DPOConfig(tmp_path, bf16=False, activation_checkpointing=False, **plan),
            train_dataset=pairs,
            processing_class=tokenizer,
            optimizers=(llama.optimizer(model), None),
        )

    model = llama.model()
    expected = plain(llama, trainer_of(model), model, None)
    steps = PAIRS // 8 // llama.MICRO
    ways: list[tuple[bool, dict[str, Any]]] = [
        (False, {}),
        (True, {}),
        (False, {"precompute_ref_log_probs": True, "save_strategy": "no"}),
    ]
    for resume, options in ways:
        model = llama.model(seed=resume)
        trainer = trainer_of(model, **options)
        checkpoint = tmp_path / f"checkpoint-{steps}" if resume else None
        trainer.train(resume_from_checkpoint=checkpoint)
        assert_same(model, expected)
        losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
        # The loss of a model that equals its reference.
        assert losses[0] == pytest.approx(math.log(2))
        assert losses[-1] < 0.05
