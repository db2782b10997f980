from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import nn

from arb_ternary import TernaryLinear
from arb_ternary.config.fields import unused_options
from arb_ternary.errors import ArbError, ConfigError
from arb_ternary.optim.protocol import StepOutcome
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import IdTokenizer
from arb_ternary_train.config import RanksConfig
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.precision import scaler_for
from arb_ternary_train.step import StepReport
from arb_ternary_train.world import SingleProcess
from arb_ternary_votes.sign_votes import SignVotes

VOCABULARY = 7


class Net(nn.Module):
    """A float bigram model that gives a loss that is not finite on request."""

    def __init__(self, poisoned: tuple[int, ...] = ()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.poisoned = poisoned
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits = self.table[tokens]
        return logits * math.nan if self.calls in self.poisoned else logits


class Context:
    """A minimal training context for a loop."""

    def __init__(self, model: nn.Module, make: Callable[[list[nn.Parameter]], Any]) -> None:
        self.model = model
        self.make = make
        self.device = torch.device("cpu")
        self.seed = 1
        self.step = self.phase_index = 0
        self.vocabulary_size = VOCABULARY
        self.masking = CausalMasking()
        stream = np.random.default_rng(0).integers(0, VOCABULARY, 400)
        self.data = StreamSource("fake", IdTokenizer(VOCABULARY), stream, stream)
        self.config = SimpleNamespace(optimizer=SimpleNamespace(name="fake"), ranks=RanksConfig())
        self.evaluation_shape: tuple[int, int] | None = None
        self.skips: list[tuple[str, int]] = []
        self.activity = 0
        self.logbook = SimpleNamespace(count_training=self.count_training)
        self.files = SimpleNamespace(exists=lambda: False)
        self.world = SingleProcess()
        self.tokens = 0

    def make_optimizer(self, choice: None = None, factors: object = None) -> Any:
        return self.make(list(self.model.parameters()))

    def mark_progress(self) -> None:
        self.activity += 1

    def count_training(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens

    def record_skip(self, what: str, value: float, microbatch: int) -> None:
        self.skips.append((what, microbatch))


class Uneven(CausalMasking):
    """Batches differ in the number of predictions that count; every fourth or so has none."""

    def apply(self, batch: Batch, *_: object) -> MaskedBatch:
        masked = super().apply(batch, *_)  # type: ignore[arg-type]
        return evolve(masked, loss_mask=masked.inputs < int(batch.sample_ids[0]) % 4)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def loop_of(
    make: Callable[[list[nn.Parameter]], Any] = sgd, poisoned: tuple[int, ...] = (), **options: Any
) -> tuple[TrainingLoop, Context]:
    context = Context(Net(poisoned), make)
    given = {"steps": 20, "batch_size": 4, "block_size": 5, "lr_schedule": "constant", **options}
    return TrainingLoop(context, LoopOptions(**given), "phase 0"), context  # type: ignore[arg-type]


def step(loop: TrainingLoop) -> StepReport:
    """Train to the end of the next step."""
    while (report := loop.train_microbatch()) is None:
        pass
    return report


def table(context: Context) -> torch.Tensor:
    return context.model.table.detach().clone()  # type: ignore[union-attr,operator]


class Deferring(torch.optim.SGD):
    """An optimizer that steps at every third call only, as a wrapper does."""

    defers = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.5)
        self.calls = 0
        self.zeroed: list[int] = []
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> bool:  # type: ignore[override]
        self.calls += 1
        self.rates.append(self.param_groups[0]["lr"])
        if self.calls % 3:
            return False
        super().step()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed.append(self.calls)
        super().zero_grad(set_to_none)


def test_one_step_descends_the_gradient_of_the_mean_loss() -> None:
    loop, context = loop_of()
    before = table(context)
    report = step(loop)
    assert report.step == loop.step == 1
    assert report.tokens == 20
    assert report.metrics()["lr"] == 0.5
    # The same in closed form: the gradient of softmax cross entropy is softmax minus one-hot.
    batch = loop.batches.sampler.batch(0)
    gradient = np.zeros((VOCABULARY, VOCABULARY))
    losses = []
    for window in batch:
        tokens = context.data.train[window * 5 : window * 5 + 6]
        for now, then in pairwise(tokens):
            p = torch.softmax(before[now].double(), 0).numpy()
            losses.append(-math.log(p[then]))
            gradient[now] += p - np.eye(VOCABULARY)[then]
    assert report.loss == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(
        table(context).numpy(), before.numpy() - 0.5 * gradient / 20, atol=1e-6
    )


def test_accumulated_micro_batches_are_averaged() -> None:
    loop, context = loop_of(gradient_accumulation_steps=4)
    assert [loop.train_microbatch() is None for _ in range(4)] == [True, True, True, False]
    together, other = loop_of(batch_size=16)
    # Four micro-batches of four samples are one batch of sixteen of them.
    together.batches.sampler.batch = lambda cursor: np.concatenate(
        [loop.batches.sampler.batch(i) for i in range(4)]
    )  # type: ignore[method-assign]
    step(together)
    torch.testing.assert_close(table(context), table(other))


@pytest.mark.parametrize("lost", [None, 2])
def test_a_step_is_the_mean_over_all_predictions(lost: int | None) -> None:
    loop, context = loop_of(gradient_accumulation_steps=5, poisoned=(lost,) if lost else ())
    context.masking = Uneven()
    before = table(context)
    loop.schedule.draw(loop, 0)
    drawn = [each.masked for each in loop.drawn]
    counts = [int(each.loss_mask.sum()) for each in drawn]
    assert (min(counts), len(set(counts))) == (0, 4)
    # The same in closed form: the gradient of softmax cross entropy is softmax minus one-hot.
    gradient = np.zeros((VOCABULARY, VOCABULARY))
    losses = []
    for number, masked in enumerate(drawn, start=1):
        if number == lost:
            continue
        pairs = zip(masked.inputs[masked.loss_mask], masked.targets[masked.loss_mask], strict=True)
        for now, then in pairs:
            p = torch.softmax(before[now].double(), 0).numpy()
            losses.append(-math.log(p[then]))
            gradient[now] += p - np.eye(VOCABULARY)[then]
    report = step(loop)
    assert (report.tokens, report.draws) == (len(losses), 4 if lost else 5)
    assert report.loss == pytest.approx(np.mean(losses), rel=1e-5)
    # What a lost micro-batch predicts stays in the divisor.
    np.testing.assert_allclose(
        table(context).numpy(), before.numpy() - 0.5 * gradient / sum(counts), atol=1e-6
    )


def test_deferred_step_keeps_gradient_weights_and_schedule() -> None:
    loop, context = loop_of(Deferring, lr_schedule="linear", lr=1.0, min_lr=0.0, steps=11)
    before = table(context)
    optimizer: Any = loop.optimizer
    assert [loop.train_microbatch() for _ in range(2)] == [None, None]
    assert torch.equal(table(context), before)
    assert context.model.table.grad is not None  # type: ignore[union-attr]
    report = loop.train_microbatch()
    assert report is not None
    assert report.tokens == 60
    assert not torch.equal(table(context), before)
    step(loop)
    assert optimizer.zeroed == [3, 6]
    assert optimizer.rates == pytest.approx([1.0] * 3 + [0.9] * 3)


def test_loss_of_deferred_step_is_mean_of_microbatches() -> None:
    single, _ = loop_of(lr=1e-12)
    losses = [step(single).loss for _ in range(3)]
    deferred, _ = loop_of(Deferring)
    assert step(deferred).loss == pytest.approx(sum(losses) / 3)


def test_nonfinite_loss_keeps_its_index_without_gradient() -> None:
    loop, context = loop_of(poisoned=(2,), gradient_accumulation_steps=2)
    before = table(context)
    loop.train_microbatch()
    kept = context.model.table.grad.clone()  # type: ignore[union-attr,operator]
    report = loop.train_microbatch()
    assert context.skips == [("loss", 2)]
    assert report is not None
    assert (report.draws, report.tokens, loop.skipped, loop.microbatches) == (1, 20, 1, 2)
    # The step is that of the other one, whose loss counts half as it would have with both.
    torch.testing.assert_close(table(context), before - 0.5 * kept)
    whole, _ = loop_of()
    assert report.loss == step(whole).loss
    half, third = loop_of(lr=0.25)
    step(half)
    torch.testing.assert_close(table(context), table(third))


def test_no_step_without_any_finite_loss() -> None:
    loop, context = loop_of(poisoned=(1, 2, 5), gradient_accumulation_steps=2)
    before = table(context)
    assert [loop.train_microbatch() for _ in range(2)] == [None, None]
    assert torch.equal(table(context), before)
    assert (loop.step, loop.microbatches, context.skips) == (0, 2, [("loss", 1), ("loss", 2)])
    assert loop.train_microbatch() is None
    report = loop.train_microbatch()
    assert report is not None
    # What was lost has left nothing: the step is that of two batches later.
    later, other = loop_of(gradient_accumulation_steps=2)
    later.batches.sampler.cursor = 2
    assert step(later).loss == report.loss
    assert torch.equal(table(context), table(other))
    assert step(loop).draws == 1


def test_lasting_nonfinite_loss_ends_the_run() -> None:
    loop, context = loop_of(poisoned=tuple(range(1, 100)), max_skipped=5)
    before = table(context)
    with pytest.raises(
        ArbError, match="step 1: 5 micro-batches in a row had no finite loss; the last was nan"
    ):
        step(loop)
    assert torch.equal(table(context), before)


def test_skipped_loss_and_gradient_are_both_recorded() -> None:
    class Refusing(torch.optim.SGD):
        def step(self, closure: Any = None) -> StepOutcome:  # type: ignore[override]
            self.zero_grad()
            return StepOutcome(stepped=False, skipped=True, grad_norm=math.inf)

    loop, context = loop_of(
        lambda p: Refusing(p, lr=0.5), poisoned=(2, 4), gradient_accumulation_steps=2, max_skipped=4
    )
    for _ in range(3):
        assert loop.train_microbatch() is None
    assert context.skips == [("loss", 2), ("gradient", 2)]
    with pytest.raises(
        ArbError, match="4 micro-batches in a row had no finite gradient; the last was inf"
    ):
        loop.train_microbatch()
    assert context.skips[2:] == [("loss", 4), ("gradient", 4)]


def test_update_skipped_by_the_optimizer_is_counted() -> None:
    class Skipping(torch.optim.SGD):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, lr=0.5)
            self.calls = 0

        def step(self, closure: Any = None) -> StepOutcome:  # type: ignore[override]
            self.calls += 1
            if self.calls == 1:
                return StepOutcome(stepped=False, skipped=True)
            super().step()
            return StepOutcome(flips=4, statistics={"threshold": 2})

    loop, context = loop_of(Skipping)
    assert loop.train_microbatch() is None
    report = loop.train_microbatch()
    assert report is not None
    assert (report.metrics()["flips"], report.metrics()["threshold"]) == (4, 2.0)
    assert context.skips == [("gradient", 1)]


def test_the_gradient_is_clipped_to_its_norm_which_is_reported() -> None:
    loop, context = loop_of(grad_clip=0.01)
    before = table(context)
    report = step(loop)
    assert report.grad_norm is not None
    assert report.grad_norm > 0.01
    assert float((table(context) - before).norm()) == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_clipping_is_refused_with_an_optimizer_that_defers() -> None:
    with pytest.raises(ConfigError, match="grad_clip: the optimizer 'fake' decides over sums"):
        loop_of(Deferring, grad_clip=1.0)


class Signalled(torch.optim.SGD):
    takes_loss_signal = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.5)
        self.signals: list[float] = []

    def step(self, closure: Any = None, *, loss_signal: float | None = None) -> None:  # type: ignore[override]
        assert loss_signal is not None
        self.signals.append(loss_signal)
        super().step()


def test_loss_signal_is_the_mean_of_microbatches() -> None:
    loop, _ = loop_of(Signalled, gradient_accumulation_steps=2)
    report = step(loop)
    optimizer: Any = loop.optimizer
    assert optimizer.signals == [report.loss]


@pytest.mark.parametrize("make", [sgd, Deferring, lambda p: torch.optim.AdamW(p, lr=0.1)])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("masking", [CausalMasking, Uneven])
def test_a_loop_continues_exactly_from_any_micro_batch(
    make: Any, accumulate: int, masking: Any
) -> None:
    def made() -> tuple[TrainingLoop, Context]:
        loop, context = loop_of(
            make, gradient_accumulation_steps=accumulate, lr_schedule="cosine", poisoned=(2, 7)
        )
        context.masking = masking()
        return loop, context

    whole, context = made()
    reports = [whole.train_microbatch() for _ in range(14)]
    for stop in range(14):
        first, broken = made()
        for _ in range(stop):
            first.train_microbatch()
        state = first.state_dict()
        weights = {k: v.clone() for k, v in broken.model.state_dict().items()}
        calls = getattr(first.optimizer, "calls", 0)
        second, resumed = made()
        resumed.model.load_state_dict(weights)
        resumed.model.calls = stop  # type: ignore[assignment]
        second.load_state_dict(state)
        if calls:
            second.optimizer.calls = calls  # type: ignore[attr-defined]
        assert [second.train_microbatch() for _ in range(stop, 14)] == reports[stop:]
        assert torch.equal(table(resumed), table(context))


class Seeding:
    """Batches that seed the global generator at every second one, as a dataloader may."""

    def __init__(self, batches: Any) -> None:
        self.inner = batches

    def __next__(self) -> Batch:
        if self.inner.sampler.cursor % 2:
            torch.manual_seed(self.inner.sampler.cursor)
        return next(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_batches_drawn_again_leave_global_generators() -> None:
    def made() -> TrainingLoop:
        torch.manual_seed(0)
        loop, context = loop_of(gradient_accumulation_steps=3)
        loop.batches = Seeding(loop.batches)
        context.model.register_forward_hook(lambda _, __, logits: logits * torch.rand(()))
        return loop

    whole = made()
    reports = [whole.train_microbatch() for _ in range(6)]
    for stop in (1, 2, 4):
        first = made()
        for _ in range(stop):
            first.train_microbatch()
        weights = copy.deepcopy(first.model.state_dict())
        state = first.state_dict()
        second = made()
        second.model.load_state_dict(weights)
        second.load_state_dict(state)
        assert [second.train_microbatch() for _ in range(stop, 6)] == reports[stop:]


def test_overflowing_gradient_skips_and_lowers_the_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from arb_ternary_train import loop as module

    first = step(loop_of()[0]).loss
    monkeypatch.setattr(
        module, "scaler_for", lambda *_: torch.amp.GradScaler("cpu", init_scale=1024.0)
    )
    loop, context = loop_of()
    before = table(context)
    overflows = iter([math.inf, 1.0, 1.0])
    context.model.table.register_hook(lambda gradient: gradient * next(overflows))  # type: ignore[union-attr,operator]
    assert loop.train_microbatch() is None
    assert torch.equal(table(context), before)
    assert context.model.table.grad is None  # type: ignore[union-attr]
    assert context.skips == [("gradient", 1)]
    state = loop.state_dict()
    assert state["scaler"]["scale"] == 512.0
    again, other = loop_of()
    again.load_state_dict(state)
    assert again.state_dict()["scaler"] == state["scaler"]
    report = step(loop)
    assert report == step(again)
    assert torch.equal(table(context), table(other))
    assert report.loss != first  # the batch that overflowed is not part of the step
    # Scaled and unscaled: the step is the one that the plain loss takes.
    plain, third = loop_of()
    plain.batches.sampler.cursor = 1
    step(plain)
    torch.testing.assert_close(table(third), table(context))


def test_compiled_model_runs_and_plain_model_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[nn.Module] = []

    def compile_(model: nn.Module) -> Callable[..., Any]:
        compiled.append(model)
        return lambda tokens: model(tokens) * 1.0

    monkeypatch.setattr(torch, "compile", compile_)
    loop, context = loop_of(compile_model=True)
    plain, other = loop_of()
    assert step(loop) == step(plain)
    assert compiled == [context.model]
    assert torch.equal(table(context), table(other))


def test_masks_do_not_depend_on_the_global_generator() -> None:
    seen: list[torch.Tensor] = []

    class Recording(CausalMasking):
        def apply(self, batch: Any, generator: torch.Generator, context: Any) -> Any:
            seen.append(torch.rand(3, generator=generator))
            return super().apply(batch, generator, context)

    for noise in (0, 5):
        loop, context = loop_of()
        context.masking = Recording()
        for _ in range(3):
            torch.rand(noise)
            step(loop)
    for a, b in zip(seen[:3], seen[3:], strict=True):
        assert torch.equal(a, b)
    assert len({tuple(draw.tolist()) for draw in seen}) == 3


@pytest.mark.parametrize(
    ("option", "method"),
    [
        ({"activation_checkpointing": True}, "set_activation_checkpointing"),
        ({"preserve_state": True}, "set_state_preservation"),
    ],
)
def test_an_option_that_the_model_cannot_do_is_refused(
    option: dict[str, bool], method: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(option))}: the model Net has no {method}"):
        loop_of(**option)


def test_bfloat16_training_keeps_the_parameters_in_bfloat16() -> None:
    loop, context = loop_of(dtype="bfloat16")
    step(loop)
    assert table(context).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"gradient_accumulation_steps": 4097},
            "'gradient_accumulation_steps' must be 1 to 4096, not 4097",
        ),
        (
            {"gradient_accumulation_steps": 0},
            "'gradient_accumulation_steps' must be 1 to 4096, not 0",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoopOptions(**options)


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"lr_schedule": "none", "warmup_steps": 5}, "warmup_steps", "'lr_schedule' is none"),
        ({"lr_schedule": "none", "min_rate": 0.1}, "min_rate", "'lr_schedule' is none"),
        ({"lr_schedule": "constant", "min_lr": 0.1}, "min_lr", "'lr_schedule' is constant"),
        (
            {"activation_checkpoint_threshold": 5},
            "activation_checkpoint_threshold",
            "'activation_checkpointing' is false",
        ),
        ({"amp_dtype": "float16"}, "amp_dtype", "'use_amp' is false"),
        (
            {"eval_every": 0, "eval_batches": 4},
            "eval_batches",
            "no evaluation is made with 'eval_every': 0",
        ),
    ],
)
def test_options_without_effect_are_named(options: dict[str, Any], name: str, reason: str) -> None:
    message = f"has no effect because {reason}; remove it"
    assert list(unused_options(LoopOptions(**options))) == [(name, message)]


def test_subclass_may_override_mask_and_predict_only() -> None:
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    class Backwards(TrainingLoop):
        def mask(self, batch: Batch) -> MaskedBatch:
            inputs = batch.data[:, 1:].clone()
            return MaskedBatch(
                inputs, batch.data[:, :-1].clone(), torch.ones_like(inputs, dtype=torch.bool)
            )

        def predict(self, batch: Batch, masked: MaskedBatch) -> torch.Tensor:
            seen.append((self.microbatches, batch.sample_ids, masked.inputs))
            return super().predict(batch, masked)

    context = Context(Net(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    loop = Backwards(context, LoopOptions(steps=3, batch_size=2, block_size=4), "key")  # type: ignore[arg-type]
    for _ in range(3):
        step(loop)
    assert [number for number, _, _ in seen] == [1, 2, 3]
    for _, ids, inputs in seen:
        for row, sample in enumerate(ids.tolist()):
            assert (
                inputs[row].tolist() == context.data.train[4 * sample + 1 : 4 * sample + 5].tolist()
            )


def test_a_loop_may_judge_and_set_rates_in_another_way() -> None:
    seen: list[int] = []

    class Squared(TrainingLoop):
        def loss(self, batch: Batch, masked: MaskedBatch, output: torch.Tensor) -> torch.Tensor:
            seen.extend(masked.inputs.flatten().tolist())
            return output.square().sum()

        def set_rates(self) -> dict[str, float]:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.25 / (self.step + 1)
            return {"lr": self.optimizer.param_groups[0]["lr"]}

    context = Context(Net(), sgd)
    loop = Squared(context, LoopOptions(steps=2, batch_size=1, block_size=4), "key")  # type: ignore[arg-type]
    before = table(context)
    report = step(loop)
    counts = torch.tensor([seen.count(each) for each in range(VOCABULARY)], dtype=torch.float32)
    assert report.loss == pytest.approx(float((counts[:, None] * before.square()).sum()))
    assert torch.allclose(table(context), before * (1 - 0.25 * 2 * counts[:, None]))
    assert report.rates == {"lr": 0.25}
    assert step(loop).rates == {"lr": 0.125}


class TernaryNet(nn.Module):
    """A bigram model whose table is ternary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.table = TernaryLinear(16, VOCABULARY, group_size=32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(self.embed(tokens))
        return logits


def ternary_loop(
    monkeypatch: pytest.MonkeyPatch, overflows: tuple[int, ...]
) -> tuple[TrainingLoop, TernaryNet]:
    """A loop with a scaler whose gradients overflow at some micro-batches; two make a step."""
    from arb_ternary_train import loop as module

    monkeypatch.setattr(
        module, "scaler_for", lambda *_: torch.amp.GradScaler("cpu", init_scale=1024.0)
    )
    model = TernaryNet()
    calls = iter(range(1, 100))
    context = Context(model, lambda _: None)
    context.make_optimizer = lambda choice=None, factors=None: JoinedOptimizer(  # type: ignore[method-assign]
        {
            "ternary": SignVotes({"table": model.table}),
            "float": torch.optim.SGD(model.embed.parameters(), lr=0.1),
        }
    )
    model.embed.weight.register_hook(
        lambda gradient: gradient * (math.inf if next(calls) in overflows else 1.0)
    )
    options: Any = {
        "batch_size": 4,
        "block_size": 5,
        "gradient_accumulation_steps": 2,
        "lr_schedule": "constant",
    }
    return TrainingLoop(context, LoopOptions(steps=20, **options), "phase 0"), model  # type: ignore[arg-type]


def test_a_step_that_the_scaler_drops_takes_its_votes_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, model = ternary_loop(monkeypatch, (4,))
    step(loop)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loop.train_microbatch()
    assert model.table.sums is not None
    assert model.table.sums.votes.any()
    loop.train_microbatch()
    assert not model.table.sums.votes.any()
    assert (loop.step, loop.skipped) == (1, 1)
    assert [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ] == []
    assert step(loop).step == 2


def test_votes_are_dropped_with_a_resumed_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = []
    for resumed in (False, True):
        loop, model = ternary_loop(monkeypatch, (4,))
        for _ in range(3):
            loop.train_microbatch()
        if resumed:
            state = copy.deepcopy(loop.state_dict())
            weights = copy.deepcopy(model.state_dict())
            loop, model = ternary_loop(monkeypatch, (1,))
            model.load_state_dict(weights)
            loop.load_state_dict(state)
        loop.train_microbatch()
        assert loop.skipped == 1
        ends.append(model.state_dict())
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_without_float_gradients_no_accumulators_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from arb_ternary_train import loop as module

    assert ternary_loop(monkeypatch, ())[1].table.undoable
    monkeypatch.setattr(module, "scaler_for", scaler_for)
    context = Context(TernaryNet(), lambda _: None)
    context.model.requires_grad_(False)
    table: Any = {"table": context.model.table}
    context.make_optimizer = lambda choice=None, factors=None: SignVotes(table)  # type: ignore[method-assign]
    TrainingLoop(context, LoopOptions(steps=1, batch_size=4, block_size=5), "phase 0")  # type: ignore[arg-type,call-arg]
    assert not context.model.table.undoable  # type: ignore[union-attr]
