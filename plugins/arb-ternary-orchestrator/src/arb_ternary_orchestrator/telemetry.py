"""Measurements of a training loop: of each step, and running numbers over all steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from attrs import asdict, field, fields_dict, frozen
from torch import Tensor, nn

from arb_ternary.optim.ternary import to_host
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_orchestrator.moments import Moments
from arb_ternary_orchestrator.spikes import SpikeDetector, explosion_limit
from arb_ternary_orchestrator.state import Stateful

if TYPE_CHECKING:
    from arb_ternary_orchestrator.config import OrchestratorConfig
    from arb_ternary_orchestrator.training_phases import Phase
    from arb_ternary_train.loop import TrainingLoop
    from arb_ternary_train.step import StepResult

#: Fewest losses that a line is fitted to.
LEAST_POINTS: Final = 5
#: Standard deviations from which a loss, or the norm of gradients, is a spike.
_LOSS_SPIKES: Final = 3.0
_GRADIENT_SPIKES: Final = 4.0
#: Fractions of the planned steps that are early, and after which steps are late.
_EARLY: Final = 0.2
_LATE: Final = 0.8
#: Standard errors of the slope above which training is unstable, and that it has to be below zero
#: not to be a plateau.
_RISING: Final = 3.0
_FLAT: Final = 2.0
#: Multiple of the noise that the loss has to fall over the window to be converging.
_STEEP: Final = 2.0
#: Most elements of a float parameter whose change is measured, so that it is not copied whole.
_SAMPLED: Final = 1024


# --- one step


@frozen
class Observation:
    """Measurements of a step, or of a microbatch whose loss was not finite.

    Attributes:
        step: steps that the loop has taken.
        loss: nats per prediction.
        grad_norm: norm of all gradients before clipping, including those of votes; None without a
            step.
        modules: the same per top-level module; empty if not measured.
        update_ratio: norm of the change of the float parameters over their own norm; None if not
            measured.
        lr: rate of the first float group, or of the first ternary group.
        flips: number of changed trits per ternary module; empty if not counted.
        draws: microbatches in the step.
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
        """Whether loss and gradients are finite."""
        known = self.grad_norm is None or math.isfinite(self.grad_norm)
        return known and math.isfinite(self.loss)


class Meter:
    """Measures the steps of a loop, and changes nothing.

    Args:
        every: steps between measurements per module; losses, rates and the norm of all gradients
            are measured at each step.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._norm: float | None = None
        self._modules: dict[str, float] = {}
        self._floats: list[tuple[nn.Parameter, Tensor]] = []
        self._trits: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_step(self, loop: TrainingLoop) -> None:
        """Measure the gradients of the step that is about to be taken."""
        self._norm = None
        self._modules = {}
        self._floats = []
        self._trits = {}
        if loop.options.use_amp and loop.options.amp_dtype == "float16":
            return  # gradients have a scale that changes from step to step
        every_module = (loop.step + 1) % self._every == 0
        parts = dict(loop.model.named_children()) if every_module else {}
        sums = [_square_sum(loop.model), *map(_square_sum, parts.values())]
        norm, *norms = map(math.sqrt, to_host(sums))
        self._norm = norm
        if not every_module:
            return
        self._modules = dict(zip(parts, norms, strict=True))
        self._floats = [
            (parameter, _sample(parameter).clone())
            for parameter in loop.model.parameters()
            if parameter.grad is not None
        ]
        self._trits = {
            name: module.trits()
            for name, module in ternary_modules(loop.model)
            if not module.frozen
        }

    @torch.no_grad()
    def after(self, loop: TrainingLoop, drawn: StepResult) -> Observation | None:
        """Return the observation of a microbatch that ended in a step or in a non-finite loss.

        It is None for any other microbatch.
        """
        report = drawn.report
        if report is None:
            if drawn.skip is None or drawn.skip.what != "loss":
                return None
            return Observation(loop.step, drawn.skip.value)
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
        changes = [
            (_sample(parameter) - before).float().square().sum()
            for parameter, before in self._floats
        ]
        lengths = [before.float().square().sum() for _, before in self._floats]
        change, length = to_host([torch.stack(changes).sum(), torch.stack(lengths).sum()])
        return math.sqrt(change / length) if length else None

    def _flips(self, model: nn.Module) -> dict[str, int]:
        modules = dict(ternary_modules(model))
        names = [name for name in self._trits if name in modules]
        counts = to_host([(modules[name].trits() != self._trits[name]).sum() for name in names])
        return dict(zip(names, counts, strict=True))


def _square_sum(module: nn.Module) -> Tensor:
    """Return the sum of squares of all gradients in ``module``, a float32 scalar."""
    terms = list(_square_terms(module))
    if not terms:
        return torch.zeros(())
    device = terms[0].device
    return torch.stack([term.to(device) for term in terms]).sum()


def _square_terms(module: nn.Module) -> Iterator[Tensor]:
    for parameter in module.parameters():
        if parameter.grad is not None:
            yield parameter.grad.float().square().sum()
    for _, ternary in ternary_modules(module):
        yield ternary.gradient_square_sum()


def _sample(parameter: nn.Parameter) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, math.ceil(flat.numel() / _SAMPLED))]


# --- all steps


@frozen
class Trend:
    """A line fitted to the last losses by ordinary least squares.

    Attributes:
        slope: change of the loss per step.
        error: standard error of the slope.
        noise: standard deviation of the losses about the line.
        span: steps from the first to the last of these losses.
    """

    slope: float
    error: float
    noise: float
    span: int

    @property
    def significance(self) -> float:
        """Slope in standard errors; about normal with variance 1 if the loss is only noise."""
        if self.error:
            return self.slope / self.error
        return math.copysign(math.inf, self.slope) if self.slope else 0.0

    @property
    def fall(self) -> float:
        """How much the line falls over the span; negative if it rises."""
        return -self.slope * self.span


class Telemetry(Stateful):
    """Running numbers of a training loop. Losses that are not finite enter no statistics.

    Args:
        window: number of losses that the trend is fitted to, at least five.
        decay: decay of the exponential weights of mean and variance of the loss.
        warmup_steps: warm-up steps of the learning rate.
        planned_steps: steps of the whole loop; without a plan no step is early or late.
        weights: number of ternary weights per module, for flip rates.
        without_memory: modules whose votes are cleared by each step, because their accumulators
            have 2 bits. Their trits flip by chance, also at a good rate.

    Attributes:
        last: the last observation; its step is 0 before the first.
        best: lowest finite loss so far; ``inf`` before the first.
        best_step: the step that reached it.
    """

    state_names: ClassVar[tuple[str, ...]] = (
        "_moments",
        "_points",
        "_since_finite_only",
        "best",
        "best_step",
    )

    def __init__(
        self,
        window: int = 200,
        *,
        decay: float = 0.99,
        warmup_steps: int = 0,
        planned_steps: int | None = None,
        weights: Mapping[str, int] | None = None,
        without_memory: Collection[str] = (),
    ) -> None:
        self.window = window
        self.warmup_steps = warmup_steps
        self.planned_steps = planned_steps
        self.weights = dict(weights or {})
        self.without_memory = frozenset(without_memory)
        self._moments = Moments(decay)
        self._points: deque[tuple[int, float]] = deque(maxlen=window)
        self._since_finite_only = window
        self.last = Observation(0, math.nan)
        self.best = math.inf
        self.best_step = 0

    def observe(self, seen: Observation) -> None:
        """Add a step, or a microbatch whose loss is not finite."""
        self.last = seen
        if not math.isfinite(seen.loss):
            self._since_finite_only = 0
            return
        self._since_finite_only = min(self._since_finite_only + 1, self.window)
        self._points.append((seen.step, seen.loss))
        self._moments.add(seen.loss)
        if seen.loss < self.best:
            self.best = seen.loss
            self.best_step = seen.step

    @property
    def ema(self) -> float | None:
        """Exponentially weighted mean of the loss, without bias; None before the first loss."""
        return self._moments.mean if self._moments.count else None

    @property
    def trend(self) -> Trend | None:
        """The line through the losses in the window; None below five losses, or if all are at one
        step.
        """
        n = len(self._points)
        if n < LEAST_POINTS:
            return None
        middle = math.fsum(step for step, _ in self._points) / n
        mean = math.fsum(loss for _, loss in self._points) / n
        spread = math.fsum((step - middle) ** 2 for step, _ in self._points)
        if spread == 0:
            return None
        slope = math.fsum((step - middle) * (loss - mean) for step, loss in self._points) / spread
        squares = math.fsum(
            (loss - mean - slope * (step - middle)) ** 2 for step, loss in self._points
        )
        variance = squares / (n - 2)
        span = self._points[-1][0] - self._points[0][0]
        return Trend(slope, math.sqrt(variance / spread), math.sqrt(variance), span)

    @property
    def phase(self) -> Phase:
        """The first of these phases whose condition holds.

        * unstable: a loss within the window was not finite, or the loss rises by more than 3
          standard errors
        * warm-up: at most ``warmup_steps`` steps, or fewer than five losses
        * converging: over the window the loss falls significantly, and by more than twice its noise
        * plateau: the window is full and the slope is not 2 standard errors below zero
        * early: at most 20 % of the planned steps
        * late: more than 80 % of the planned steps
        * mid: anything else
        """
        trend = self.trend
        rises = trend is not None and trend.significance > _RISING
        if rises or self._since_finite_only < self.window:
            return "unstable"
        if self.last.step <= self.warmup_steps or trend is None:
            return "warm-up"
        falls = trend.significance < -_FLAT
        if falls and trend.fall > _STEEP * trend.noise:
            return "converging"
        if not falls and len(self._points) == self.window:
            return "plateau"
        if not self.planned_steps:
            return "mid"
        done = self.last.step / self.planned_steps
        if done <= _EARLY:
            return "early"
        return "late" if done > _LATE else "mid"

    @property
    def flip_rate(self) -> float | None:
        """Share of the trits with a memory of votes that flipped in the last step; None if they
        were not counted.
        """
        counted = self.last.flips.keys() - self.without_memory
        trits = sum(self.weights.get(name, 0) for name in counted)
        return sum(self.last.flips[name] for name in counted) / trits if trits else None

    def numbers(self) -> dict[str, Any]:
        """Return everything as plain values, for reports."""
        last = self.last
        trend = self.trend
        rates = {
            name: count / self.weights[name]
            for name, count in last.flips.items()
            if self.weights.get(name)
        }
        return {
            "loss": last.loss,
            "ema": self.ema,
            "variance": self._moments.variance,
            "slope": None if trend is None else trend.slope,
            "best": self.best if math.isfinite(self.best) else None,
            "training_phase": self.phase,
            "grad_norm": last.grad_norm,
            "module_grad_norms": dict(last.modules),
            "update_ratio": last.update_ratio,
            "lr": last.lr,
            "flips": dict(last.flips),
            "flip_rates": rates,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {**super().state_dict(), **asdict(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.last = Observation(
            **{name: state[name] for name in fields_dict(Observation) if name in state}
        )


class Monitor(Stateful):
    """The running numbers of a loop, and the spikes of its losses and gradients.

    Attributes:
        config: the options of the policy.
        telemetry: running numbers.
        losses: spikes of the losses.
        gradients: spikes of the norm of all gradients.
    """

    state_names: ClassVar[tuple[str, ...]] = ("telemetry", "losses", "gradients")

    def __init__(self, config: OrchestratorConfig, loop: TrainingLoop) -> None:
        self.config = config
        self._loop = loop
        options = loop.options
        shapes = {name: module.shape for name, module in ternary_modules(loop.model)}
        self.telemetry = Telemetry(
            config.window,
            warmup_steps=options.warmup_steps,
            planned_steps=options.steps,
            weights={
                name: shape.out_features * shape.in_features for name, shape in shapes.items()
            },
            without_memory=[name for name, shape in shapes.items() if shape.vote_bits == 2],
        )
        memory = max(config.spike_window, config.eval_horizon, 1000)
        self.losses = SpikeDetector(_LOSS_SPIKES, memory=memory)
        self.gradients = SpikeDetector(_GRADIENT_SPIKES, memory=memory)

    def observe(self, seen: Observation) -> int:
        """Add a step; return how many spikes it has: of the loss, and of the gradients."""
        self.telemetry.observe(seen)
        spikes = int(self.losses.observe(seen.loss))
        if seen.grad_norm is not None:
            spikes += self.gradients.observe(seen.grad_norm)
        return spikes

    @property
    def allowed(self) -> float:
        """The loss above which training counts as exploded."""
        return explosion_limit(self.losses, self.config.max_loss_increase)

    def copy(self) -> Monitor:
        """Return another monitor that has seen the same."""
        copied = Monitor(self.config, self._loop)
        copied.load_state_dict(self.state_dict())
        return copied
