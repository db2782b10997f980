"""The base class of wrappers of an optimizer of float parameters.

A wrapper changes the gradients before the step, or the parameters after it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from attrs import evolve, fields_dict
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import (
    StepOutcome,
    Trainable,
    as_outcome,
    build_optimizer,
    copied_attributes,
    may_defer,
    takes_loss_signal,
)
from arb_ternary.optim.ternary import is_finite
from arb_ternary_orchestrator.optim.config import WrapperConfig
from arb_ternary_orchestrator.optim.gradients import (
    check_float,
    global_norm,
    gradient_norms,
    with_gradient,
)


class FloatWrapper(Optimizer):
    """Base of the wrappers: it has the groups of the wrapped optimizer and steps with it.

    A schedule, gradient clipping or a loss scaler acts on the groups as without the wrapper.

    Args:
        inner: the optimizer that steps, of float parameters only.

    Attributes:
        inner: the wrapped optimizer.
        state: the wrapper's own state, by parameter.

    Raises:
        ConfigError: ``inner`` is not an optimizer, or does not only train float parameters.
    """

    #: Whether a gradient that is not finite drops the update before any state has changed.
    refuses: ClassVar[bool] = False
    #: Why it wraps optimizers of float parameters only.
    only_floats: ClassVar[str] = (
        "ternary modules cast votes in backward, and have no gradient that could be changed"
    )

    def __init__(self, inner: Optimizer) -> None:
        if not isinstance(inner, Optimizer):
            raise ConfigError(
                f"{type(self).__name__} wraps a torch.optim.Optimizer, not a {type(inner).__name__}"
            )
        for number, group in enumerate(inner.param_groups):
            check_float(type(self).__name__, number, group["params"], self.only_floats)
        self.inner = inner
        self.defaults = dict(inner.defaults)
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        # Not Optimizer.__init__: it would make groups of its own.
        super().__setstate__({})

    @classmethod
    def build(cls, config: WrapperConfig, trainable: Trainable) -> Self:
        """Build the wrapper and the optimizer that it wraps; errors are those of the latter."""
        inner = build_optimizer("optimizer.inner", config.inner, trainable)
        options = {name: getattr(config, name) for name in fields_dict(type(config))}
        del options["inner"]
        return cls(inner, **options)

    # --- what a wrapper does

    def _before(self, parameters: list[Tensor], norms: list[float]) -> None:
        """Change the gradients of ``parameters``; ``norms`` is empty unless the wrapper refuses."""

    def _after(self) -> None:
        """Act after a step of the inner optimizer."""

    def _statistics(self) -> dict[str, float]:
        """Return numbers for the metrics file."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        """Return state that is not in ``state``."""
        return {}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`_own_state` returned."""

    def planned_state_bytes(self) -> int:
        """Return the most bytes of tensors that the wrapper itself will keep; see
        ``arb_ternary_train.optim.planned_state.planned_state_bytes``.
        """
        return 0

    # --- the surface of an optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer."""
        return self.inner.param_groups

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, group by group."""
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    @property
    def takes_loss_signal(self) -> bool:
        """Whether the wrapped optimizer takes a loss signal."""
        return takes_loss_signal(self.inner)

    @property
    def defers(self) -> bool:
        """Whether the wrapped optimizer may defer a step."""
        return may_defer(self.inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.inner.zero_grad(set_to_none)

    def may_step(self, loss_signal: Tensor | float | None = None) -> bool:
        """Return whether a step now would not be skipped."""
        if self.refuses and not math.isfinite(global_norm(gradient_norms(self.parameters))):
            return False
        ask = getattr(self.inner, "may_step", None)
        return ask is None or bool(ask(**self._signals(loss_signal)))

    def _signals(self, loss_signal: Tensor | float | None) -> dict[str, Any]:
        return {"loss_signal": loss_signal} if self.takes_loss_signal else {}

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, loss_signal: Tensor | float | None = None
    ) -> Any:
        """Take one step.

        Args:
            closure: computes the gradients and returns the loss. It is called once.
            loss_signal: passed to a wrapped optimizer that takes it.

        Returns:
            What ``closure`` returned; without one a ``StepOutcome``.

        Raises:
            ConfigError: a gradient is sparse; nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outcome = self._advance(self._signals(loss_signal))
        return outcome if loss is None else loss

    def _advance(self, signals: Mapping[str, Any]) -> StepOutcome:
        found = with_gradient(type(self).__name__, self.param_groups)
        parameters = [parameter for group in found for parameter in group]
        norms = gradient_norms(parameters) if self.refuses else []
        norm = global_norm(norms)
        if not math.isfinite(norm):
            for parameter in parameters:
                parameter.grad = None
            return StepOutcome(stepped=False, skipped=True, grad_norm=norm)
        # Otherwise the wrapped optimizer drops the update, and no state may change.
        if is_finite(signals.get("loss_signal")):
            self._before(parameters, norms)
        result = as_outcome(self.inner.step(**signals), self.inner)
        if result.stepped:
            self._after()
        known = norm if self.refuses and result.grad_norm is None else result.grad_norm
        statistics = {**result.statistics, **self._statistics()}
        return evolve(result, grad_norm=known, statistics=statistics)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both optimizers; the wrapper's is by position of the parameter."""
        kept = {
            index: dict(self.state[p]) for index, p in enumerate(self.parameters) if p in self.state
        }
        return {"inner": self.inner.state_dict(), "state": kept, "own": self._own_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.inner.load_state_dict(dict(state_dict["inner"]))
        parameters = self.parameters
        self.state = defaultdict(dict)
        for index, kept in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {name: _on(parameter, value) for name, value in kept.items()}
        self._load_own_state(state_dict["own"])

    def __getstate__(self) -> dict[str, Any]:
        return copied_attributes(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


def _on(parameter: Tensor, value: Any) -> Any:
    """Copy ``value`` to the device of ``parameter``."""
    if isinstance(value, Tensor):
        return value.to(parameter.device, copy=True)
    return [_on(parameter, each) for each in value] if isinstance(value, list) else value
