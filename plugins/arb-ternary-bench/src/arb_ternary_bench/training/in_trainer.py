"""A small Llama that transformers' ``Trainer`` trains on the built-in text, by one of four methods.

The program of a process of the study ``trainer``: it answers with loss, speed, memory and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from attrs import asdict, frozen
from torch import Tensor, nn

from arb_ternary_bench.child import answer, ask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

Method = Literal["adamw", "adamw8", "qat", "votes"]
#: Float parts of the model that no method rounds.
_FLOAT: Final = ("lm_head", "model.embed_tokens")


@frozen(kw_only=True)
class TrainerRun:
    """The training of one process.

    Attributes:
        method: how weights learn: ``adamw`` and ``adamw8`` in float32, with states of 32 and 8
            bits, ``qat`` by BitNet's straight-through estimator, ``votes`` without masters.
        rate: rate of AdamW, or of votes.
        float_rate: rate of the float parameters beside votes.
        seed: of the initial weights and the order of the windows.
        steps: optimizer steps.
        batch: windows of a step.
        length: tokens of a window.
        width: features of the model, a multiple of 64.
        layers: blocks of the model.
        windows: validation windows, from the beginning of the text.
        threads: of torch.
    """

    method: Method
    rate: float
    float_rate: float
    seed: int
    steps: int
    batch: int
    length: int
    width: int
    layers: int
    windows: int
    threads: int

    @property
    def title(self) -> str:
        """The run in words."""
        return f"{self.method}, rate {self.rate:g}, seed {self.seed}"


class StraightThroughLinear(nn.Linear):
    """A linear whose float weight and inputs are rounded in forward, as in onebitllms.

    Weights are rounded to ``{-1, 0, 1} * mean(|W|)``, inputs to 8 bits per token. Gradients pass
    the rounding unchanged. Source: BitNet b1.58, https://arxiv.org/abs/2402.17764.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]``."""
        rounded_x = x + (round_inputs(x) - x).detach()
        rounded_weight = self.weight + (round_weight(self.weight) - self.weight).detach()
        return nn.functional.linear(rounded_x, rounded_weight, self.bias)


def round_weight(weight: Tensor) -> Tensor:
    """Return ``clip(round(W / m), -1, 1) * m`` with ``m = mean(|W|)``."""
    scale = weight.abs().mean().clamp(min=1e-5)
    return (weight / scale).round().clamp(-1, 1) * scale


def round_inputs(x: Tensor) -> Tensor:
    """Return ``x`` in steps of a 127th of the largest element of each row."""
    scale = 127 / x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


class Windows(torch.utils.data.Dataset[Mapping[str, Tensor]]):
    """Neighbouring windows of a text as samples of a causal language model."""

    def __init__(self, ids: Tensor, length: int) -> None:
        count = len(ids) // length
        self.rows = ids[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row}


def measure(run: TrainerRun) -> dict[str, Any]:
    """Train in a process of its own, and return its figures.

    Raises:
        ArbError: the process failed; the end of its log is the hint.
    """
    return ask(__name__, asdict(run), title=run.title, threads=run.threads)


def respond(request: Mapping[str, Any]) -> dict[str, Any]:
    """Train in this process."""
    import transformers

    from arb_ternary_bench.memory import peak_bytes, resident_bytes
    from arb_ternary_text.data.shakespeare import ShakespeareConfig, build

    run = TrainerRun(**request)
    torch.set_num_threads(run.threads)
    transformers.set_seed(run.seed)
    source = build(ShakespeareConfig(tokenizer="characters"))
    train = Windows(torch.from_numpy(source.train).long(), run.length)
    held_out = torch.from_numpy(source.validation).long()[: run.windows * run.length]
    before = resident_bytes()
    model = new_model(run, source.vocabulary_size)
    weights = sum(linear.weight.numel() for linear in rounded_linears(model))
    with TemporaryDirectory() as folder:
        trainer = new_trainer(run, model, train, Windows(held_out, run.length), folder)
        found = trainer.train()
        peak = peak_bytes()
        loss = trainer.evaluate()["eval_loss"]
        (checkpoint,) = Path(folder).glob("checkpoint-*")
        sizes = {file.name: file.stat().st_size for file in checkpoint.iterdir()}
    return {
        "loss": loss,
        "train_loss": found.training_loss,
        "tokens_per_second": run.steps * run.batch * run.length / found.metrics["train_runtime"],
        "memory_bytes": peak - before,
        "model_bytes": sizes["model.safetensors"],
        "optimizer_bytes": sizes["optimizer.pt"],
        "weights": weights,
    }


def new_model(run: TrainerRun, vocabulary_size: int) -> PreTrainedModel:
    """Return a Llama with random float weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=run.width,
        intermediate_size=2 * run.width,
        num_hidden_layers=run.layers,
        num_attention_heads=run.width // 32,
        max_position_embeddings=run.length,
    )
    return LlamaForCausalLM(config)


def rounded_linears(model: nn.Module) -> list[nn.Linear]:
    """Return the linears whose weights QAT and votes round."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in _FLOAT
    ]


def new_trainer(
    run: TrainerRun, model: PreTrainedModel, train: Windows, held_out: Windows, folder: str
) -> Trainer:
    """Return the ``Trainer`` of a run; ``model`` is changed for QAT and votes."""
    from transformers import Trainer, TrainingArguments

    optimizer = None
    if run.method == "qat":
        for linear in rounded_linears(model):
            linear.__class__ = StraightThroughLinear
    if run.method == "votes":
        import arb_ternary

        arb_ternary.ternarize(model, exclude=_FLOAT, init="random")
        optimizer = arb_ternary.make_optimizer(
            model,
            lr=run.rate,
            float_lr=run.float_rate,
            votes_options={"orthogonal": True},
            seed=run.seed,
        )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=run.steps,
        per_device_train_batch_size=run.batch,
        per_device_eval_batch_size=run.batch,
        learning_rate=run.rate,
        lr_scheduler_type="linear",
        warmup_steps=min(run.steps // 10, 20),
        optim="adamw_bnb_8bit" if run.method == "adamw8" else "adamw_torch",
        weight_decay=0.01,
        seed=run.seed,
        save_steps=run.steps,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        model, arguments, train_dataset=train, eval_dataset=held_out, optimizers=(optimizer, None)
    )


if __name__ == "__main__":
    answer(lambda request, _orders: [respond(request)])
