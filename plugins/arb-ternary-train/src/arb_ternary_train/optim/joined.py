"""Several optimizers that step together, each over its own part of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from arb_ternary.optim.protocol import (
    StepOutcome,
    Wraps,
    as_outcome,
    copied_attributes,
    inner_optimizers,
    may_defer,
    takes_loss_signal,
)
from arb_ternary.optim.ternary import TernaryOptimizer, is_finite


class JoinedOptimizer(Optimizer):
    """Several optimizers that step together. Its groups are theirs, the same objects: a rate set
    here is theirs.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        if not parts:
            raise ValueError("a joined optimizer needs at least one part")
        self.parts = dict(parts)
        groups = [group for part in self.parts.values() for group in part.param_groups]
        # Optimizer.__init__ copies the groups; they are put back so that both sides share the same
        # dictionaries.
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self._complete = True
        self._stepped: set[str] = set()

    @property
    def takes_loss_signal(self) -> bool:
        """Whether a part takes it."""
        return any(map(takes_loss_signal, self.parts.values()))

    @property
    def defers(self) -> bool:
        """Whether a part may put its step off."""
        return any(map(may_defer, self.parts.values()))

    def __getstate__(self) -> dict[str, Any]:
        return copied_attributes(self)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, **signals: Any
    ) -> StepOutcome:
        """Step every part; keyword arguments (``loss_signal``) go to the parts that take it.

        A wrapper among them steps, puts its step off and drops a micro-batch for itself. Where
        another part skips its update, none steps: those that have a method ``may_step`` are asked
        first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not is_finite(loss):
            return self.skip_update()
        for index, part in enumerate(self.parts.values()):
            ask = getattr(part, "may_step", None)
            # The first part looks at its own gradients before it moves.
            if (
                index
                and ask is not None
                and not ask(**(signals if takes_loss_signal(part) else {}))
            ):
                return self.skip_update()
        outcomes: list[StepOutcome] = []
        self._stepped = set()
        for name, part in self.parts.items():
            outcome = as_outcome(
                part.step(**signals) if takes_loss_signal(part) else part.step(), part
            )
            if outcome.skipped and not isinstance(part, Wraps):
                self.skip_update(but=part)
                return outcome
            outcomes.append(outcome)
            if outcome.stepped:
                self._stepped.add(name)
        norms = [outcome.grad_norm for outcome in outcomes if outcome.grad_norm is not None]
        return StepOutcome(
            stepped=bool(self._stepped),
            skipped=not self._stepped and any(outcome.skipped for outcome in outcomes),
            draws=max(outcome.draws for outcome in outcomes),
            grad_norm=sum(norm * norm for norm in norms) ** 0.5 if norms else None,
            flips=sum(outcome.flips for outcome in outcomes),
            exponent_moves=sum(outcome.exponent_moves for outcome in outcomes),
            statistics={
                key: value for outcome in outcomes for key, value in outcome.statistics.items()
            },
        )

    def skip_update(self, but: Optimizer | None = None) -> StepOutcome:
        """Drop an update in every part; ``but`` one that has dropped it already."""
        self._stepped = set()
        for part in self.parts.values():
            for each in () if part is but else inner_optimizers(part):
                if isinstance(each, TernaryOptimizer):
                    each.skip_update()
        self.zero_grad()
        return StepOutcome(stepped=False, skipped=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and working statistics; what a part has drawn for a step that it put off
        stays.
        """
        for name, part in self.parts.items():
            if name in self._stepped or not isinstance(part, Wraps):
                part.zero_grad(set_to_none)
            else:
                Optimizer.zero_grad(part, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is built: parameters belong to a part, so the group must be
        added there.
        """
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
