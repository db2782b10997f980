"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from arb_ternary.optim.protocol import StepOutcome, as_outcome, copied_attributes, takes_loss_signal


class JoinedOptimizer(Optimizer):
    """Several optimizers that step together, with one list of param groups that schedulers can drive.

    The groups are the inner optimizers' own dictionaries, so a rate set here is the rate that they read.

    Args:
        parts: inner optimizers by name.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        if not parts:
            raise ValueError("a joined optimizer needs at least one part")
        self.parts = dict(parts)
        groups = [group for part in self.parts.values() for group in part.param_groups]
        # Optimizer.__init__ copies the groups; they are put back so that both sides share the same dictionaries.
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self._complete = True

    @property
    def takes_loss_signal(self) -> bool:
        """Whether there are parts of ternary modules, and all of them take it."""
        ternary = [part for part in self.parts.values() if _is_ternary(part)]
        return bool(ternary) and all(map(takes_loss_signal, ternary))

    def __getstate__(self) -> dict[str, Any]:
        return copied_attributes(self)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, **signals: Any
    ) -> StepOutcome:
        """Step every part; keyword arguments (``loss_signal``) go to the parts of ternary modules.

        When a part skips its update because of a non-finite signal, no later part steps either.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        outcomes = []
        for part in self.parts.values():
            outcome = as_outcome(part.step(**signals) if _is_ternary(part) else part.step(), part)
            if outcome.skipped:
                self.zero_grad()
                return outcome
            outcomes.append(outcome)
        norms = [outcome.grad_norm for outcome in outcomes if outcome.grad_norm is not None]
        return StepOutcome(
            stepped=any(outcome.stepped for outcome in outcomes),
            draws=max(outcome.draws for outcome in outcomes),
            grad_norm=sum(norm * norm for norm in norms) ** 0.5 if norms else None,
            flips=sum(outcome.flips for outcome in outcomes),
            exponent_moves=sum(outcome.exponent_moves for outcome in outcomes),
            statistics={key: value for outcome in outcomes for key, value in outcome.statistics.items()},
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and working statistics of every part."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is built: parameters belong to a part, so the group must be added there."""
        if getattr(self, "_complete", False):
            raise ValueError("add the group to one of the parts: " + ", ".join(self.parts))
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of every part under its name."""
        return {"parts": {name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        for name, part in self.parts.items():
            part.load_state_dict(dict(state_dict["parts"][name]))
        # Loading gives a part new group dictionaries.
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]


def _is_ternary(part: Optimizer) -> bool:
    return any(group.get("kind") == "ternary" for group in part.param_groups)
