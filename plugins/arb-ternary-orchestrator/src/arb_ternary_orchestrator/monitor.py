"""What can be seen of a step from outside the optimizer, and what has been seen of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor, nn

from arb_ternary.optim.ternary import to_host
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_orchestrator.decisions import allowed_loss
from arb_ternary_orchestrator.spikes import SpikeDetector
from arb_ternary_orchestrator.telemetry import PhaseLimits, Telemetry

if TYPE_CHECKING:
    from arb_ternary_orchestrator.config import OrchestratorConfig
    from arb_ternary_train.loop import TrainingLoop
    from arb_ternary_train.policy import Drawn

#: Standard deviations from which a loss, or a gradient's norm, is a spike.
_LOSS_SPIKES = 3.0
_GRADIENT_SPIKES = 4.0
# : Most elements of a float parameter whose change is measured: evenly spread, so that no copy of
# it is made.
_SAMPLED: Final = 1024


@frozen
class Observation:
    """A step, or a micro-batch whose loss was not finite.

    Attributes:
        step: steps that the loop has taken.
        loss: nats a prediction.
        grad_norm: of all gradients before clipping, votes' among them; None where there was no
            step.
        modules: likewise for each top-level module; empty where they were not measured.
        update_ratio: length of the change of the float parameters over their own; None where it was
            not measured.
        lr: rate of the first float group, or of the first ternary group.
        flips: trits that changed in each ternary module; empty where they were not counted.
        draws: micro-batches in the step.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    modules: Mapping[str, float] = field(factory=dict)
    update_ratio: float | None = None
    lr: float | None = None
    flips: Mapping[str, int] = field(factory=dict)
    draws: int = 0

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are."""
        return math.isfinite(self.loss) and (
            self.grad_norm is None or math.isfinite(self.grad_norm)
        )


class Meter:
    """Measures a loop's steps and changes nothing.

    Args:
        every: steps between measurements of each module; losses, rates and the norm of all
            gradients are always known.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._norm: float | None = None
        self._modules: dict[str, float] = {}
        self._floats: list[tuple[nn.Parameter, Tensor]] = []
        self._trits: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_step(self, loop: TrainingLoop) -> None:
        """Gradients are there, and the step has not been taken."""
        self._norm = None
        self._modules = {}
        self._floats = []
        self._trits = {}
        if loop.options.use_amp and loop.options.amp_dtype == "float16":
            return  # gradients have a scale that changes from step to step
        if (loop.step + 1) % self._every:
            (square,) = to_host([_square_sum(loop.model)])
            self._norm = math.sqrt(square)
            return
        parts = {name: _square_sum(child) for name, child in loop.model.named_children()}
        (square, *squares) = to_host([_square_sum(loop.model), *parts.values()])
        self._norm = math.sqrt(square)
        self._modules = {name: math.sqrt(part) for name, part in zip(parts, squares, strict=True)}
        self._floats = [
            (p, _sample(p).clone()) for p in loop.model.parameters() if p.grad is not None
        ]
        self._trits = {
            name: module.trits()
            for name, module in ternary_modules(loop.model)
            if not module.frozen
        }

    @torch.no_grad()
    def after(self, loop: TrainingLoop, drawn: Drawn) -> Observation | None:
        """What was seen of a micro-batch that ended in a step, or in a loss that is not finite;
        None of another.
        """
        report = drawn.report
        if report is None:
            skip = drawn.skip
            return (
                Observation(loop.step, skip.value)
                if skip is not None and skip.what == "loss"
                else None
            )
        rates = report.rates
        return Observation(
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm if self._norm is None else self._norm,
            modules=self._modules,
            update_ratio=self._update_ratio(),
            lr=rates.get("lr", rates.get("rate")),
            flips=self._flips(loop.model),
            draws=report.draws,
        )

    def _update_ratio(self) -> float | None:
        if not self._floats:
            return None
        changes = [(_sample(p) - before).float().square().sum() for p, before in self._floats]
        lengths = [before.float().square().sum() for _, before in self._floats]
        change, length = to_host([torch.stack(changes).sum(), torch.stack(lengths).sum()])
        return math.sqrt(change / length) if length else None

    def _flips(self, model: nn.Module) -> dict[str, int]:
        modules = dict(ternary_modules(model))
        names = [name for name in self._trits if name in modules]
        counts = to_host([(modules[name].trits() != self._trits[name]).sum() for name in names])
        return dict(zip(names, counts, strict=True))


class Monitor:
    """The running numbers of a loop: telemetry, and the spikes of its losses and of its gradients.

    Attributes:
        telemetry: of the steps.
        losses: the detector that sees the losses.
        gradients: the one that sees the norms of gradients.
    """

    def __init__(self, config: OrchestratorConfig, loop: TrainingLoop) -> None:
        self._config = config
        self._loop = loop
        options = loop.options
        shapes = {name: module.shape for name, module in ternary_modules(loop.model)}
        weights = {name: shape.out_features * shape.in_features for name, shape in shapes.items()}
        self.telemetry = Telemetry(
            config.window,
            limits=PhaseLimits(warmup_steps=options.warmup_steps, planned_steps=options.steps),
            weights=weights,
        )
        memory = max(config.spike_window, config.eval_horizon, 1000)
        self.losses = SpikeDetector(_LOSS_SPIKES, memory=memory)
        self.gradients = SpikeDetector(_GRADIENT_SPIKES, memory=memory)

    def observe(self, seen: Observation) -> int:
        """Take in a step; how many spikes it brought: of the loss, and of the gradients."""
        self.telemetry.observe(
            seen.step,
            seen.loss,
            grad_norm=seen.grad_norm,
            modules=seen.modules,
            update_ratio=seen.update_ratio,
            lr=seen.lr,
            flips=seen.flips,
        )
        spikes = int(self.losses.observe(seen.loss))
        if seen.grad_norm is not None:
            spikes += int(self.gradients.observe(seen.grad_norm))
        return spikes

    @property
    def allowed(self) -> float:
        """The loss from which training counts as exploded; infinite while nothing is known."""
        return allowed_loss(self.losses, self._config.max_loss_increase)

    def copy(self) -> Monitor:
        """Another one that has seen the same."""
        made = Monitor(self._config, self._loop)
        made.load_state_dict(self.state_dict())
        return made

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            name: getattr(self, name).state_dict() for name in ("telemetry", "losses", "gradients")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)


def _square_sum(module: nn.Module) -> Tensor:
    """Sum of squares of all gradients in ``module``, float32 scalar."""
    terms = list(_terms(module))
    if not terms:
        return torch.zeros(())
    device = terms[0].device
    return torch.stack([term.to(device) for term in terms]).sum()


def _terms(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        if parameter.grad is not None:
            yield parameter.grad.float().square().sum()
    for _, ternary in ternary_modules(module):
        yield ternary.gradient_square_sum()


def _sample(parameter: nn.Parameter) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, math.ceil(flat.numel() / _SAMPLED))]


def is_seen(drawn: Drawn) -> bool:
    """Whether a meter has something to say of it."""
    return drawn.report is not None or (drawn.skip is not None and drawn.skip.what == "loss")
