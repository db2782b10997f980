"""Several optimizers that step together, each over its own part of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Several optimizers that step together.

    Its groups are those of its parts, the same objects: a rate that is set here is set there.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        if not parts:
            raise ValueError("a joined optimizer needs at least one part")
        self.parts = dict(parts)
        groups = [group for part in self.parts.values() for group in part.param_groups]
        # Optimizer.__init__ copies the groups; afterwards both sides share the same dictionaries.
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
        """Whether a part may defer its step."""
        return any(map(may_defer, self.parts.values()))

    def __getstate__(self) -> dict[str, Any]:
        return copied_attributes(self)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, **signals: Any
    ) -> StepOutcome:
        """Step every part; keyword arguments (``loss_signal``) go to the parts that take them.

        A wrapper among the parts steps, defers its step and drops a micro-batch independently. If
        another part skips its update, no part steps: parts with a method ``may_step`` are asked
        first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not is_finite(loss):
            return self.skip_update()

        # The first part looks at its own gradients before it moves.
        _, *others = self.parts.values()
        for part in others:
            if not part_may_step(part, signals):
                return self.skip_update()

        outcomes: list[StepOutcome] = []
        self._stepped = set()
        for name, part in self.parts.items():
            result = part.step(**signals) if takes_loss_signal(part) else part.step()
            outcome = as_outcome(result, part)
            if outcome.skipped and not isinstance(part, Wraps):
                self.skip_update(but=part)
                return outcome
            outcomes.append(outcome)
            if outcome.stepped:
                self._stepped.add(name)
        return _joined(outcomes)

    def skip_update(self, but: Optimizer | None = None) -> StepOutcome:
        """Drop an update in every part except ``but``, which has dropped it already."""
        self._stepped = set()
        for part in self.parts.values():
            if part is but:
                continue
            for each in inner_optimizers(part):
                if isinstance(each, TernaryOptimizer):
                    each.skip_update()
        self.zero_grad()
        return StepOutcome(stepped=False, skipped=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and statistics, except what a part keeps for a step that it deferred."""
        for name, part in self.parts.items():
            if name in self._stepped or not isinstance(part, Wraps):
                part.zero_grad(set_to_none)
            else:
                Optimizer.zero_grad(part, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError once the optimizer is built: groups are added to one of its parts."""
        if getattr(self, "_complete", False):
            raise ValueError("add the group to one of the parts: " + ", ".join(self.parts))
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every part under its name."""
        return {"parts": {name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, part in self.parts.items():
            part.load_state_dict(dict(state_dict["parts"][name]))
        # Loading gives a part new group dictionaries.
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]


def part_may_step(part: Optimizer, signals: Mapping[str, Any]) -> bool:
    """Return whether ``part`` would take a step now, as far as it can say."""
    ask = getattr(part, "may_step", None)
    if ask is None:
        return True
    return bool(ask(**signals) if takes_loss_signal(part) else ask())


def _joined(outcomes: Sequence[StepOutcome]) -> StepOutcome:
    """Return the outcome of a step, given those of the parts."""
    stepped = any(outcome.stepped for outcome in outcomes)
    squares = [each.grad_norm * each.grad_norm for each in outcomes if each.grad_norm is not None]
    statistics: dict[str, float] = {}
    for outcome in outcomes:
        statistics |= outcome.statistics
    return StepOutcome(
        stepped=stepped,
        skipped=not stepped and any(outcome.skipped for outcome in outcomes),
        draws=max(outcome.draws for outcome in outcomes),
        grad_norm=sum(squares) ** 0.5 if squares else None,
        flips=sum(outcome.flips for outcome in outcomes),
        exponent_moves=sum(outcome.exponent_moves for outcome in outcomes),
        statistics=statistics,
    )
