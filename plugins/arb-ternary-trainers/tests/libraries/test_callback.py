from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainerCallback, TrainingArguments

import arb_ternary
from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary.specs import resolve


class Recorder(TrainerCallback):
    """Notes trits after each step, and what a tracker is given."""

    def __init__(self, model: nn.Module) -> None:
        self.trits = [self.read(model, "trits")]
        self.logged: list[dict[str, Any]] = []
        self.saturated: list[float] = []

    def read(self, model: nn.Module, what: str) -> Tensor:
        layers = [m.ternary for m in model.modules() if hasattr(m, "ternary")]
        return torch.cat([getattr(ternary, what)().flatten() for ternary in layers])

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.trits.append(self.read(parts["model"], "trits"))

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.logged.append(dict(parts["logs"]))
        votes = self.read(parts["model"], "logical_votes").to(torch.int16)
        self.saturated.append(float((votes.abs() >= 127).double().mean()))


def trainer_of(llama: Any, folder: Path, model: nn.Module, **options: Any) -> Trainer:
    arguments = {**llama.arguments(), "save_strategy": "no", **options.pop("arguments", {})}
    return Trainer(
        model, TrainingArguments(folder, **arguments), train_dataset=llama.rows(), **options
    )


def test_logs_have_flips_saturation_and_bits(llama: Any, tmp_path: Path) -> None:
    model = llama.model()
    recorder = Recorder(model)
    optimizer = llama.optimizer(model)
    trainer = trainer_of(
        llama,
        tmp_path,
        model,
        optimizers=(optimizer, None),
        callbacks=[arb_ternary.TernaryCallback(), recorder],
    )
    trainer.train()
    history = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert len(history) == 4
    shares = [
        float((after != before).double().mean())
        for before, after in zip(recorder.trits, recorder.trits[1:], strict=False)
    ]
    state = [leaf for leaf in tree_leaves(optimizer.state_dict()) if isinstance(leaf, Tensor)]
    stored = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *state))
    parameters = sum(p.numel() for p in model.parameters()) + recorder.trits[0].numel()
    for number, logs in enumerate(history):
        window = shares[8 * number : 8 * number + 8]
        assert logs["flips"] == pytest.approx(sum(window) / 8)
        assert logs["flips"] > 0
        assert logs["saturated"] == recorder.saturated[number]
        assert logs["bits_per_parameter"] == pytest.approx(8 * stored / parameters)
        # A tracker that comes after sees the same.
        assert {name: recorder.logged[number][name] for name in logs if name != "step"} == {
            name: value for name, value in logs.items() if name != "step"
        }
    assert "flips" not in trainer.state.log_history[-1]  # the summary of the run


def test_a_trainer_whose_optimizer_leaves_votes_is_refused(llama: Any, tmp_path: Path) -> None:
    model = llama.model()
    trainer = trainer_of(llama, tmp_path, model, callbacks=[arb_ternary.TernaryCallback()])
    with pytest.raises(UsageProblem, match="AdamW, which never applies the votes") as caught:
        trainer.train()
    assert "optimizers=(arb_ternary.make_optimizer(model), None)" in caught.value.hint

    other = (llama.optimizer(llama.model()), None)
    trainer = trainer_of(
        llama, tmp_path, model, callbacks=[arb_ternary.TernaryCallback()], optimizers=other
    )
    with pytest.raises(UsageProblem, match="15 ternary weights of its model are not those of its"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_n_gpu", 2, "copy the model to 2 GPUs with DataParallel"),
        ("deepspeed", "zero2.json", "deepspeed: nothing exchanges the votes"),
        ("fsdp", ["full_shard"], "fsdp: nothing exchanges the votes"),
    ],
)
def test_several_devices_are_refused(tmp_path: Path, name: str, value: Any, words: str) -> None:
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    assert arguments.n_gpu < 2
    setattr(arguments, name, value)
    for event in ("on_init_end", "on_train_begin"):
        with pytest.raises(UsageProblem, match=words) as caught:
            getattr(arb_ternary.TernaryCallback(), event)(arguments, None, None)
        assert "torchrun --nproc_per_node N -m arb_ternary train" in caught.value.hint


def test_the_best_checkpoint_is_loaded_at_the_end(llama: Any, tmp_path: Path) -> None:
    """The largest loss is that of the first epoch."""
    model = llama.model()
    best = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    held_out = [{"input_ids": row, "labels": row} for row in llama.held_out]
    trainer = trainer_of(
        llama,
        tmp_path,
        model,
        arguments=best,
        eval_dataset=held_out,
        optimizers=(llama.optimizer(model), None),
    )
    trainer.train()
    losses = [logs["eval_loss"] for logs in trainer.state.log_history if "eval_loss" in logs]
    assert losses[0] > losses[1]
    assert trainer.state.best_model_checkpoint == str(llama.checkpoint(tmp_path))
    assert llama.loss(model) == pytest.approx(losses[0], rel=1e-5)


def test_a_trainer_that_makes_its_own_optimizer_warns(llama: Any, tmp_path: Path) -> None:
    trainer = trainer_of(llama, tmp_path, llama.model(), arguments={"max_steps": 1})
    with pytest.warns(UserWarning, match="15 ternary weights have cast votes that no optimizer"):
        trainer.train()


def test_without_transformers_the_name_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "arb_ternary_trainers.callback", raising=False)
    with pytest.raises(EnvironmentProblem, match="not installed: transformers") as caught:
        resolve("arb_ternary_trainers.callback:TernaryCallback")
    assert "transformers>=5.0" in caught.value.hint
