"""The common part of the wrappers: accumulating micro-batches, and stepping."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import (
    StepOutcome,
    as_outcome,
    copied_attributes,
    inner_optimizers,
    takes_loss_signal,
)
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_gqc.errors import NonFiniteGradientError, PendingGradientError
from arb_ternary_gqc.gradients import (
    Gradients,
    as_number,
    float_parameters,
    on_host,
    ternary_modules_of,
)
from arb_ternary_gqc.parts import Draw, Portion, check_arguments, numbers_given
from arb_ternary_gqc.process_group import ProcessGroup
from arb_ternary_gqc.schedule import QuantitySchedule


class OptimizerWrapper(Optimizer):
    """Draws micro-batches until their mean gradient is good enough for a step.

    Call ``step()`` after every backward, and never ``zero_grad()``: the wrapper takes each gradient
    away from the parameters, and sets their mean when the inner optimizer steps. Votes of ternary
    modules stay in their accumulators; without a step no trit flips.

    Args:
        optimizer: the optimizer that steps. It must not need a closure.
        initial: initial value of the quantity that schedulers on the wrapper drive; None if they
            drive the learning rate of the inner optimizer.
        max_batch_draws: micro-batches after which it steps whatever their gradient.
        per_group: give each param group of the inner optimizer a quantity of its own.
        non_finite: what to do with a micro-batch whose gradient, loss or metric is not finite:
            ``"skip"`` drops and counts it, ``"raise"`` drops it and raises
            :class:`NonFiniteGradientError`. Votes cast by the finite elements of such a gradient
            stay in the accumulators.
        schedule: drives the quantity in place of a scheduler.
        process_group: of ``torch.distributed``, whose ranks all decide alike.
        local_gradients: backward runs under ``no_sync``, and the wrapper averages gradients over
            ``process_group``: after every draw if it decides on gradients, else before a step.
            False: gradients are averaged in backward.
        count_from: first number of batches and draws in :meth:`statistics`; 1 as in torch-gqc.

    Attributes:
        inner: the wrapped optimizer; ``optimizer`` is another name for it.
        num_batches: micro-batches seen.
        num_steps: steps of the inner optimizer.
        num_draws: micro-batches in the sum since the last step.
        num_dropped: micro-batches dropped because something was not finite.
        last_num_draws: micro-batches of the last step; None before the first.
        last_grad_norm: latest norm of the mean gradient; None before the first.
        last_optimizer_result: result of the inner optimizer's last ``step``.
        last_outcome: the latest decision with its numbers.

    Raises:
        ConfigError: an argument is outside its range, or the combination cannot work.
    """

    #: ``step`` may defer a step, and takes the loss (read by the training loop).
    defers: ClassVar[bool] = True
    takes_loss_signal: ClassVar[bool] = True
    #: A micro-batch may be dropped because of its gradient.
    refuses: ClassVar[bool] = True
    #: Whether decisions need the gradient of every micro-batch.
    decides_on_gradients: ClassVar[bool] = True
    #: GradScaler passes its scale instead of dividing the gradients, so that no draw is lost.
    _step_supports_amp_scaling: ClassVar[bool] = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        initial: float | None,
        max_batch_draws: int = 64,
        per_group: bool = False,
        non_finite: Literal["skip", "raise"] = "skip",
        schedule: QuantitySchedule | None = None,
        process_group: Any = None,
        local_gradients: bool = False,
        count_from: Literal[0, 1] = 0,
    ) -> None:
        self.inner = optimizer
        check_arguments(optimizer, max_batch_draws, non_finite)
        self.max_batch_draws = max_batch_draws
        self.non_finite = non_finite
        self.per_group = per_group
        self.schedule = schedule
        self.count_from = count_from
        self._initial = initial
        self._own: list[dict[str, Any]] | None = None
        self.defaults = optimizer.defaults
        if initial is not None:
            self.defaults = {"kind": "gqc", "lr": float(initial)}
            count = len(optimizer.param_groups) if per_group else 1
            self._own = [{"params": [], **self.defaults} for _ in range(count)]
        self.num_batches = 0
        self.num_steps = 0
        self.num_draws = 0
        self.num_dropped = 0
        self.last_num_draws: int | None = None
        self.last_grad_norm: float | None = None
        self.last_optimizer_result: Any = None
        self.last_outcome = StepOutcome(stepped=False, draws=0)
        self._sum = Gradients()
        self._signals: list[float] = []
        self._nothing_pending = False
        self._in_closure = False
        self._process_group = ProcessGroup.join(
            process_group, local_gradients, self._parameters, self._modules
        )
        # Optimizer.__init__ would make groups of its own and empty the inner optimizer's state.
        super().__setstate__({})

    # --- what a wrapper decides

    @abstractmethod
    def _wants_step(self, draw: Draw) -> bool:
        """Return whether the sum, which includes ``draw``, is good enough for a step."""

    def _most_draws(self) -> int:
        """Return the micro-batches after which it steps in any case."""
        return self.max_batch_draws

    def _before_step(self) -> None:
        """Change the sum before it becomes the mean that the inner optimizer sees."""

    def _after_step(self) -> None:
        """Forget the micro-batches of the step."""

    def _own_statistics(self) -> dict[str, Any]:
        """Return statistics of this kind of wrapper."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        """Return the state of this kind of wrapper."""
        return {}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`_own_state` returned."""

    # --- the surface of an optimizer

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer, by its name in torch-gqc."""
        return self.inner

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state, by parameter."""
        return self.inner.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups whose ``lr`` schedulers on the wrapper drive: its own, or the inner groups."""
        if self._own is None:
            return self.inner.param_groups
        for portion, group in zip(self._portions(), self._own, strict=True):
            group["params"] = portion.parameters
        return self._own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its gradients count from the next micro-batch on."""
        self.inner.add_param_group(param_group)
        if self.per_group and self._own is not None:
            assert self._initial is not None
            self._own.append({"params": [], "kind": "gqc", "lr": float(self._initial)})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing right after a step; refuse at any other time.

        In a closure of ``step`` it clears the gradients that the closure has computed so far.

        Raises:
            PendingGradientError: there are, or may be, gradients that no step has used.
        """
        if self._in_closure:
            Gradients.take(self._parameters, self._modules)
        elif not self._nothing_pending:
            raise PendingGradientError(
                f"{type(self).__name__}.zero_grad: the wrapper adds up the gradients of several "
                f"micro-batches ({self.num_draws} so far) and clears them itself when it steps; "
                "clearing them now would lose them",
                "Remove the call: the loop is backward(), step().",
            )

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, loss_signal: Tensor | float | None = None
    ) -> bool:
        """Add the gradients of the model as one micro-batch, and step if the sum is good enough.

        Args:
            closure: runs forward and backward and returns the loss; called once.
            loss_signal: loss of the micro-batch; its mean over a step is passed to an inner
                optimizer that takes it.

        Returns:
            whether the inner optimizer stepped.

        Raises:
            NonFiniteGradientError: under ``non_finite="raise"``.
        """
        return self._advance(closure, loss_signal, None)

    def planned_state_bytes(self) -> int:
        """Return the bytes of the sum of gradients between steps."""
        if self._most_draws() == 1:
            return 0
        total = sum(parameter.nbytes for parameter in self._parameters)
        for module in self._modules:
            total += module.stats.nbytes
            if module.magnitudes is not None:
                total += module.magnitudes.nbytes
        return total

    def statistics(self) -> dict[str, Any]:
        """Return counts and the quantities behind decisions, for logs and progress bars."""
        return {
            "batches": self.num_batches + self.count_from,
            "steps": self.num_steps,
            "num_draws": self.num_draws + self.count_from,
            **self._own_statistics(),
            "last_grad_norm": self.last_grad_norm,
            "last_num_draws": self.last_num_draws,
            "dropped": self.num_dropped,
        }

    # --- a micro-batch

    @torch.no_grad()
    def _advance(
        self,
        closure: Callable[[], Any] | None,
        loss_signal: Tensor | float | None,
        metric: Tensor | float | None,
    ) -> bool:
        given = numbers_given(self._run(closure), loss_signal, metric)
        for part in inner_optimizers(self.inner):
            # Otherwise a scheduler on the inner optimizer would warn before the first step.
            part._opt_called = True  # type: ignore[attr-defined]
        if self.schedule is not None and self._own is not None:
            assert self._initial is not None
            for group in self._own:
                group["lr"] = self.schedule.value(self._initial, self.num_batches)
        self.num_batches += 1
        parameters = self._parameters
        modules = self._modules
        gradients = Gradients.take(parameters, modules)
        found = self._unscale(gradients)
        if self._process_group.local_gradients and self.decides_on_gradients:
            self._process_group.average(gradients, parameters)
        # Everything that the decision needs in one transfer: the host waits for the device once.
        norm, nan, found, *values = on_host(
            [gradients.norm(parameters, modules), gradients.counted_nan(), found, *given.values()]
        )
        overflow = as_number(found) != 0
        numbers = [as_number(value) for value in values]
        fault = "the scaled loss" if overflow else self._fault(gradients, norm, nan, numbers)
        if self._process_group.any(fault is not None):
            for voter in self._voters:
                for module in voter.modules:
                    module.undo_votes()
            return self._drop(fault or "a gradient of another rank", as_number(norm), overflow)
        means = dict(zip(given, self._process_group.mean(numbers), strict=True))
        if "signal" in means:
            self._signals.append(means["signal"])
        self._sum.add(gradients)
        self.num_draws += 1
        self._nothing_pending = False
        wants = self._wants_step(Draw(gradients, norm, means.get("metric")))
        if self._process_group.all(wants or self.num_draws >= self._most_draws()):
            return self._take_step()
        for voter in self._voters:
            voter.defer_step()
            for module in voter.modules:
                module.commit_votes()
        self.last_outcome = self._outcome(StepOutcome(stepped=False, draws=self.num_draws))
        return False

    def _run(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        self._in_closure = True
        try:
            with torch.enable_grad():
                return closure()
        finally:
            self._in_closure = False

    def _unscale(self, gradients: Gradients) -> Tensor:
        """Divide by the loss scale of a GradScaler.

        Returns:
            a scalar that is not zero if the gradients have overflowed.
        """
        found = getattr(self, "found_inf", None)
        if found is None:
            return torch.zeros(())
        if self._process_group.local_gradients:
            raise ConfigError(
                "gqc: local_gradients: each rank's GradScaler would choose another scale",
                "Let DistributedDataParallel average, or use bfloat16, which needs no scaler.",
            )
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            gradients.multiply(scale.double().reciprocal().float())
        return torch.as_tensor(found).reshape(())

    def _fault(
        self, gradients: Gradients, norm: Tensor, nan: Tensor, numbers: list[float]
    ) -> str | None:
        if not all(map(math.isfinite, numbers)):
            return "the loss or metric"
        # A norm that is not finite proves nothing: squares may overflow although no gradient does.
        if math.isfinite(as_number(norm)) and as_number(nan) == 0:
            return None
        return gradients.first_fault(self._parameters, self._modules)

    def _drop(self, fault: str, norm: float, overflow: bool) -> bool:
        self.num_dropped += 1
        self._nothing_pending = True
        self.last_outcome = self._outcome(
            StepOutcome(stepped=False, draws=self.num_draws, skipped=True), norm=norm
        )
        if self.non_finite == "raise" and not overflow:
            raise NonFiniteGradientError(
                f"{type(self).__name__}: micro-batch {self.num_batches}: {fault} is not finite; "
                f"the micro-batch was dropped, and the {self.num_draws} before it are kept",
                'non_finite "skip" drops such micro-batches and counts them',
            )
        return False

    def _take_step(self) -> bool:
        draws = self.num_draws
        if self._process_group.local_gradients and not self.decides_on_gradients:
            self._process_group.average(self._sum, self._parameters)
        if not self.decides_on_gradients:
            self._measure(*on_host([self._sum.norm(self._parameters, self._modules)]))
        self._before_step()
        self._sum.divide(draws)
        self._sum.put_back()
        signals = {}
        if self._signals and takes_loss_signal(self.inner):
            signals["loss_signal"] = sum(self._signals) / len(self._signals)
        self.last_optimizer_result = self.inner.step(**signals)  # type: ignore[call-overload]
        result = as_outcome(self.last_optimizer_result, self.inner)
        if not isinstance(self.inner, OptimizerWrapper):
            self.inner.zero_grad()
        self._after_step()
        self._sum = Gradients()
        self._signals = []
        self.num_draws = 0
        self._nothing_pending = True
        self.last_num_draws = draws
        self.num_steps += result.stepped
        self.last_outcome = self._outcome(result, draws=draws)
        return result.stepped

    def _sum_norm(self, draw: Draw) -> Tensor:
        """Return the norm of the sum, which includes ``draw``."""
        return draw.norm if self.num_draws == 1 else self._sum.norm(self._parameters, self._modules)

    def _measure(self, norm_of_sum: Tensor) -> Tensor:
        """Return the norm of the mean gradient from that of the sum, and keep it as a statistic."""
        norm = norm_of_sum / self.num_draws
        self.last_grad_norm = as_number(norm)
        return norm

    def _outcome(
        self, result: StepOutcome, *, draws: int | None = None, norm: float | None = None
    ) -> StepOutcome:
        statistics = dict(result.statistics)
        for key, value in self._own_statistics().items():
            if isinstance(value, int | float):
                statistics[key] = float(value)
        return StepOutcome(
            stepped=result.stepped,
            draws=result.draws if draws is None else draws,
            grad_norm=self.last_grad_norm if norm is None else norm,
            flips=result.flips,
            exponent_moves=result.exponent_moves,
            skipped=result.skipped,
            statistics=statistics,
        )

    # --- what it wraps

    @property
    def _parameters(self) -> list[Tensor]:
        return [
            parameter for group in self.inner.param_groups for parameter in float_parameters(group)
        ]

    @property
    def _voters(self) -> list[TernaryOptimizer]:
        """All optimizers of ternary modules inside it, also inside other wrappers."""
        return [part for part in inner_optimizers(self.inner) if isinstance(part, TernaryOptimizer)]

    @property
    def _modules(self) -> list[TernaryModule]:
        return [
            module
            for group in self.inner.param_groups
            for module in ternary_modules_of(self.inner, group)
        ]

    def _portions(self) -> list[Portion]:
        """Return the parameters and modules of each of the wrapper's own groups."""
        assert self._own is not None
        if not self.per_group:
            return [Portion(self._own[0], self._parameters, self._modules)]
        return [
            Portion(own, float_parameters(group), ternary_modules_of(self.inner, group))
            for own, group in zip(self._own, self.inner.param_groups, strict=True)
        ]

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, own groups, counters and the pending sum."""
        own = None
        if self._own is not None:
            own = [
                {key: value for key, value in group.items() if key != "params"}
                for group in self._own
            ]
        return {
            "inner": self.inner.state_dict(),
            "groups": own,
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "sum": self._sum.state_dict(self._parameters, self._modules),
            "signals": list(self._signals),
            "own": self._own_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; gradients of the parameters are cleared.

        Raises:
            ConfigError: it is of a wrapper with another number of groups.
        """
        saved = state_dict["groups"]
        if (saved is None) != (self._own is None) or len(saved or ()) != len(self._own or ()):
            raise ConfigError(
                f"gqc: the saved state is not of a {type(self).__name__} with the same groups"
            )
        Gradients.take(self._parameters, self._modules)
        self.inner.load_state_dict(dict(state_dict["inner"]))
        for group, values in zip(self._own or [], saved or [], strict=True):
            group.update(values)
        for name in _COUNTERS:
            setattr(self, name, state_dict["counters"][name])
        self._sum = Gradients.from_state(state_dict["sum"], self._parameters, self._modules)
        self._signals = list(state_dict["signals"])
        self._nothing_pending = False
        self._load_own_state(state_dict["own"])

    def __getstate__(self) -> dict[str, Any]:
        return copied_attributes(self)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value}" for name, value in self.statistics().items())
        return f"{type(self).__name__}({type(self.inner).__name__}, {numbers})"


_COUNTERS: Final = (
    "num_batches",
    "num_steps",
    "num_draws",
    "num_dropped",
    "last_num_draws",
    "last_grad_norm",
)
