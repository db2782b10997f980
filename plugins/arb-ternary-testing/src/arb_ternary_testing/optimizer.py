"""The suite of an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.optim.protocol import (
    StepOutcome,
    Trainable,
    as_outcome,
    collect_trainable,
    takes_loss_signal,
)
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import OptimizerSpec
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_testing.component import ComponentCase
from arb_ternary_train.audit import audit
from arb_ternary_train.schedules import scheduled_groups
from arb_ternary_train.update import ternary_update

#: Input features of the suite's models.
_FEATURES = 64


def _layers(part: str) -> list[nn.Module]:
    """Return the layers of the suite's models: "float", "ternary" or "mixed"."""
    if part == "float":
        return [
            nn.Linear(_FEATURES, 8),
            nn.Tanh(),
            nn.Linear(8, 4),
        ]
    if part == "ternary":
        return [TernaryLinear(_FEATURES, 4, group_size=32, activations="float")]
    return [
        nn.Linear(_FEATURES, 32),
        TernaryLinear(32, 16, group_size=32, activations="float"),
        nn.Linear(16, 4),
    ]


class _Saved(NamedTuple):
    """Contents of a checkpoint."""

    weights: dict[str, Any]
    optimizer: dict[str, Any]
    gradients: dict[str, Tensor]


class OptimizerSuite(ComponentCase):
    """Tests that every optimizer must pass, whether it is for float or ternary parts or both.

    Subclass it and set ``component`` to the registered name (or override :meth:`make_optimizer` and
    set ``parts``). If the optimizer is a wrapper, its param groups may be those of its attribute
    ``inner``.

    Attributes:
        parts: models that the optimizer is tried on, among "float", "ternary" and "mixed"; by
            default those that its spec accepts.
        draws: largest number of micro-batches that the optimizer takes for one step; more than 1
            for a wrapper that defers steps.
        learning_steps: number of steps after which the loss of a small regression must be lower.
        learning_share: share of the loss by which it must be lower.
        flip_share: largest mean share of the trits that may flip in a step. The built-in rules
            flip about one in a hundred on the models of the suite.
    """

    kind: ClassVar[str] = "optimizer"
    parts: ClassVar[tuple[str, ...]] = ()
    draws: ClassVar[int] = 1
    learning_steps: ClassVar[int] = 250
    learning_share: ClassVar[float] = 0.1
    flip_share: ClassVar[float] = 0.2

    def make_optimizer(self, trainable: Trainable) -> Optimizer:
        """Return a new instance of the optimizer under test."""
        optimizer: Optimizer = self.build(trainable)
        return optimizer

    def make_model(self, part: str) -> nn.Module:
        """Return a model ``[..., 64] -> [..., 4]``.

        Override it for an optimizer whose models the suite does not have.
        """
        return nn.Sequential(*_layers(part))

    @classmethod
    def accepted_parts(cls) -> tuple[str, ...]:
        """Return the names of the models that the optimizer is tried on."""
        if cls.parts:
            return cls.parts
        spec = manager().registry.get("optimizer", cls.component).spec
        assert isinstance(spec, OptimizerSpec)
        if len(spec.accepts) == 2:
            return ("mixed",)
        return tuple(spec.accepts)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test once per model."""
        if "part" in metafunc.fixturenames:
            metafunc.parametrize("part", self.accepted_parts())

    # --- running the optimizer

    def _start(self, part: str, seed: int = 0) -> tuple[nn.Module, Optimizer]:
        """Return a new model and its optimizer."""
        torch.manual_seed(seed)
        model = self.make_model(part)
        trainable = collect_trainable(model)
        return model, self.make_optimizer(trainable)

    def _loss(self, model: nn.Module, step: int | None = None) -> Tensor:
        """Return the mean squared error on the sixteen rows of a micro-batch, or on all rows."""
        x, y = _regression()
        if step is not None:
            generator = torch.Generator().manual_seed(step)
            rows = torch.randperm(64, generator=generator)[:16]
            x = x[rows]
            y = y[rows]
        error: Tensor = model(x) - y
        return error.square().mean()

    def _backward(self, model: nn.Module, step: int) -> float:
        """Run forward and backward of a micro-batch and return its loss."""
        loss = self._loss(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _advance(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        start: int,
        stop: int,
    ) -> list[StepOutcome]:
        """Train on micro-batches ``start`` to ``stop - 1``, as the training loop does."""
        outcomes = []
        for step in range(start, stop):
            loss = self._backward(model, step)
            outcome = self._step(optimizer, loss)
            outcomes.append(outcome)
            if outcome.stepped:
                optimizer.zero_grad()
        return outcomes

    def _step(self, optimizer: Optimizer, loss: float = 1.0) -> StepOutcome:
        """Take a step; pass the loss of the micro-batch if the optimizer takes one."""
        signals = {"loss_signal": loss} if takes_loss_signal(optimizer) else {}
        returned = optimizer.step(**signals)  # type: ignore[call-overload]
        return as_outcome(returned, optimizer)

    # --- the object

    def test_is_a_torch_optimizer_that_a_schedule_can_drive(self, part: str) -> None:
        _, optimizer = self._start(part)
        assert isinstance(optimizer, Optimizer)
        for group in scheduled_groups(optimizer):
            assert group["kind"] in ("float", "ternary")
            assert group["lr"] > 0
        halved = [0.5 * group["lr"] for group in optimizer.param_groups]
        assert halved

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        self._step(optimizer)
        schedule.step()

        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == halved

    def test_every_trainable_part_is_in_exactly_one_group(self, part: str) -> None:
        model, optimizer = self._start(part)
        trainable = collect_trainable(model)
        grouped: dict[str, list[int]] = {"float": [], "ternary": []}
        for group in scheduled_groups(optimizer):
            grouped[group["kind"]] += [id(parameter) for parameter in group["params"]]

        floats = [id(parameter) for parameter in trainable.floats.values()]
        assert sorted(grouped["float"]) == sorted(floats)
        ternary = grouped["ternary"]
        assert len(ternary) == len(set(ternary)) == len(trainable.ternary)

    # --- learning

    def test_loss_of_a_regression_falls(self, part: str) -> None:
        model, optimizer = self._start(part)
        before = float(self._loss(model).detach())
        self._advance(model, optimizer, 0, self.learning_steps)
        model.zero_grad()
        after = float(self._loss(model).detach())
        limit = before * (1 - self.learning_share)
        assert after < limit, f"the loss went from {before:.4g} to {after:.4g}"

    def test_steps_within_the_declared_number_of_micro_batches(self, part: str) -> None:
        model, optimizer = self._start(part)
        outcomes = self._advance(model, optimizer, 0, 3 * self.draws)
        assert sum(outcome.stepped for outcome in outcomes) >= 3
        assert not any(outcome.skipped for outcome in outcomes)

    def test_without_a_step_no_weight_changes(self, part: str) -> None:
        model, optimizer = self._start(part)
        for step in range(4 * self.draws):
            before = _weights(model)
            self._backward(model, step)
            _assert_equal(_weights(model), before)
            if self._step(optimizer).stepped:
                optimizer.zero_grad()
            else:
                _assert_equal(_weights(model), before)

    def test_reported_flips_are_the_trits_that_changed(self, part: str) -> None:
        model, optimizer = self._start(part)
        total = 0
        before = _codes(model)
        ternary = bool(before)
        for step in range(self.learning_steps * self.draws):
            (outcome,) = self._advance(model, optimizer, step, step + 1)
            after = _codes(model)
            changed = 0
            for new, old in zip(after, before, strict=True):
                changed += int((new != old).sum())
            assert outcome.flips == changed
            before = after
            total += changed
            enough = total > 0 or not ternary
            if enough and step >= 20 * self.draws:
                break
        assert total > 0 or not ternary, "no trit ever flipped"

    def test_few_trits_flip_in_a_step(self, part: str) -> None:
        """A rule that flips half of all trits in every step keeps nothing of what it learned."""
        model, optimizer = self._start(part)
        trits = sum(codes.numel() for codes in _codes(model))
        if not trits:
            pytest.skip("no ternary weights")
        outcomes = self._advance(model, optimizer, 0, self.learning_steps)
        steps = sum(outcome.stepped for outcome in outcomes)
        share = sum(outcome.flips for outcome in outcomes) / (steps * trits)
        assert share <= self.flip_share, (
            f"{share:.0%} of the trits flip in a step: lower the rate or raise the threshold"
        )

    def test_with_a_rate_of_zero_nothing_learns(self, part: str) -> None:
        model, optimizer = self._start(part)
        for group in scheduled_groups(optimizer):
            group["lr"] = 0.0
        before = _weights(model)
        self._advance(model, optimizer, 0, 10 * self.draws)
        _assert_equal(_weights(model), before)

    def test_without_a_gradient_nothing_learns(self, part: str) -> None:
        model, optimizer = self._start(part)
        before = _weights(model)
        for _ in range(3 * self.draws):
            self._step(optimizer)
        _assert_equal(_weights(model), before)

    def test_zero_grad_clears_gradients_and_statistics(self, part: str) -> None:
        model, optimizer = self._start(part)
        stepped = False
        while not stepped:
            self._backward(model, 0)
            stepped = self._step(optimizer).stepped
        optimizer.zero_grad()
        for parameter in model.parameters():
            assert parameter.grad is None or not parameter.grad.any()
        for module in model.modules():
            if isinstance(module, TernaryModule):
                assert not module.stats.any()

    def test_a_step_is_the_same_whoever_clears_the_gradients(self, part: str) -> None:
        weights = []
        for cleared_by in ("optimizer", "model", "nobody"):
            model, optimizer = self._start(part)
            for step in range(10 * self.draws):
                self._backward(model, step)
                stepped = self._step(optimizer).stepped
                if stepped and cleared_by == "optimizer":
                    optimizer.zero_grad()
                # Float gradients add up by torch's own rule until somebody clears them.
                elif stepped and (cleared_by == "model" or part != "ternary"):
                    model.zero_grad()
            weights.append(_weights(model))
        _assert_equal(weights[1], weights[0])
        _assert_equal(weights[2], weights[0])

    def test_a_pure_model_stays_pure(self, part: str) -> None:
        model, optimizer = self._start(part)
        before = audit(model)
        self._advance(model, optimizer, 0, 5 * self.draws)
        after = audit(model)
        assert after.pure == before.pure
        assert after.float_parameters == before.float_parameters
        assert after.float_buffers == before.float_buffers

    def test_non_finite_loss_leaves_every_buffer_unchanged(self, part: str) -> None:
        model, optimizer = self._start(part)
        if not isinstance(optimizer, TernaryOptimizer):
            pytest.skip("not an optimizer of ternary modules alone")
        self._advance(model, optimizer, 0, 3 * self.draws)
        before = copy.deepcopy(model.state_dict())
        loss = self._loss(model, 4) * float("nan")
        outcome = ternary_update(model, optimizer, loss)
        assert outcome.skipped
        assert not outcome.stepped
        _assert_equal(model.state_dict(), before)

    def test_skip_after_backward_leaves_no_trace(self, part: str) -> None:
        """The state is unchanged, and the next steps are those of a run without the skip."""
        ends = []
        for poisoned in (True, False):
            model, optimizer = self._start(part)
            if not takes_loss_signal(optimizer):
                pytest.skip("takes no loss")
            self._advance(model, optimizer, 0, 3 * self.draws)
            if poisoned:
                before = _everything(model)
                self._backward(model, 4)
                outcome = self._step(optimizer, float("nan"))
                assert outcome.skipped
                assert not outcome.stepped
                _assert_equal(_everything(model), before)
            outcomes = self._advance(model, optimizer, 5, 5 + 3 * self.draws)
            assert any(outcome.stepped for outcome in outcomes)
            ends.append(_everything(model))
        _assert_equal(*ends)

    # --- reproducing

    def test_two_runs_end_with_the_same_bits(self, part: str) -> None:
        ends = []
        for _ in range(2):
            model, optimizer = self._start(part)
            self._advance(model, optimizer, 0, 12)
            ends.append(model.state_dict())
        _assert_equal(*ends)

    def test_restored_run_equals_an_uninterrupted_run(self, part: str) -> None:
        model, optimizer = self._start(part)
        stops = (0, 1, 5, 38)
        more = 4 * max(self.draws, 4)
        ends = [stop + more for stop in stops]
        saved: dict[int, _Saved] = {}
        final: dict[int, dict[str, Any]] = {}
        reached = 0
        for step in sorted({*stops, *ends}):
            self._advance(model, optimizer, reached, step)
            reached = step
            if step in stops:
                saved[step] = _save(model, optimizer)
            if step in ends:
                final[step] = copy.deepcopy(model.state_dict())

        for stop, state in saved.items():
            model, optimizer = self._start(part, seed=99)
            model.load_state_dict(state.weights)
            optimizer.load_state_dict(state.optimizer)
            for name, parameter in model.named_parameters():
                parameter.grad = state.gradients.get(name)
            end = stop + more
            self._advance(model, optimizer, stop, end)
            _assert_equal(model.state_dict(), final[end])

    def test_state_is_plain(self, part: str) -> None:
        model, optimizer = self._start(part)
        self._advance(model, optimizer, 0, 3)
        _assert_plain(optimizer.state_dict(), "state_dict")


@cache
def _regression() -> tuple[Tensor, Tensor]:
    """Return the inputs of the regression, and its targets: the outputs of a ternary layer."""
    generator = torch.Generator().manual_seed(77)
    x = torch.randn(64, _FEATURES, generator=generator)
    trits = torch.randint(-1, 2, (4, _FEATURES), generator=generator)
    weight = trits.float() / 8
    return x, x @ weight.t()


def _save(model: nn.Module, optimizer: Optimizer) -> _Saved:
    """Return the contents of a checkpoint of this model and optimizer."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    saved = _Saved(
        weights=model.state_dict(),
        optimizer=optimizer.state_dict(),
        gradients=gradients,
    )
    return copy.deepcopy(saved)


def _codes(model: nn.Module) -> list[Tensor]:
    """Return copies of the integer weights of each module that has them."""
    codes = [module.trits() for module in model.modules() if isinstance(module, TernaryModule)]
    return [each.clone() for each in codes]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's weights: its state without accumulators and counters."""
    working = ("votes", "control", "correlation", "steps")
    weights = {}
    for name, value in model.state_dict().items():
        if not name.endswith(working):
            weights[name] = value.clone()
    return weights


def _everything(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's state and of the buffers outside the state that backward fills."""
    found = copy.deepcopy(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, TernaryModule):
            found[f"{name}.stats"] = module.stats.clone()
            if module.magnitudes is not None:
                found[f"{name}.magnitudes"] = module.magnitudes.clone()
    return found


def _assert_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert list(first) == list(second)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"different: {different}"


def _assert_plain(value: Any, path: str) -> None:
    """Assert that a checkpoint can store a value.

    Checkpoints hold nested dicts, lists and tuples of tensors, numbers, strings, booleans and None.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            assert isinstance(key, str | int), f"{path}: the key {key!r} is no string or integer"
            _assert_plain(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _assert_plain(item, f"{path}[{index}]")
    elif value is not None:
        plain = isinstance(value, Tensor | int | float | str | bool)
        assert plain, f"{path}: a {type(value).__name__} cannot be stored in a checkpoint"
