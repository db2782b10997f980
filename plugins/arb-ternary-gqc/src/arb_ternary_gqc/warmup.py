"""Inverted warm-up for schedules of norms: from high to the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from arb_ternary.errors import ConfigError


class NormWarmupScheduler(LRScheduler):
    """Overrides the first values of another schedule.

    In step ``t < num_warmup_steps`` each group has ``initial_lr * (warmup_start + t /
    num_warmup_steps * (warmup_end - warmup_start))``, and from then on the value of the wrapped
    schedule for step ``t``. The wrapped schedule advances once per step from the beginning, and
    finds its own last values in the groups, so that recursive schedules (``CosineAnnealingLR``)
    are not disturbed.

    Args:
        scheduler: schedule of the wrapper's quantity, just constructed.
        num_warmup_steps: steps of the warm-up; 0 for none.
        warmup_start: multiple of the initial value at step 0.
        warmup_end: multiple of the initial value at the end of the warm-up.
        warmup_steps: another name of ``num_warmup_steps``.

    Raises:
        ConfigError: the number of steps is missing, given twice or negative.
    """

    def __init__(
        self,
        scheduler: Any,
        num_warmup_steps: int | None = None,
        warmup_start: float = 10.0,
        warmup_end: float = 1.0,
        *,
        warmup_steps: int | None = None,
    ) -> None:
        given = [each for each in (num_warmup_steps, warmup_steps) if each is not None]
        if len(given) != 1 or given[0] < 0:
            raise ConfigError(
                "NormWarmupScheduler: give num_warmup_steps, 0 or more, once; "
                f"got num_warmup_steps={num_warmup_steps}, warmup_steps={warmup_steps}"
            )
        # LRScheduler.__init__ would patch the optimizer and advance the schedule a second time.
        self.wrapped_scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self.num_warmup_steps = given[0]
        self.warmup_start = warmup_start
        self.warmup_end = warmup_end
        self.base_lrs = [
            float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups
        ]
        self.last_epoch = 0
        self._wrapped_values = self._values()
        self._override()

    def step(self, *arguments: Any) -> None:
        """Advance by one step.

        Args:
            arguments: for the wrapped schedule (``ReduceLROnPlateau`` takes a metric).
        """
        for group, value in zip(self.optimizer.param_groups, self._wrapped_values, strict=True):
            group["lr"] = value
        self.wrapped_scheduler.step(*arguments)
        self._wrapped_values = self._values()
        self.last_epoch += 1
        self._override()

    def _values(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _override(self) -> None:
        if self.last_epoch < self.num_warmup_steps:
            progress = self.last_epoch / self.num_warmup_steps
            factor = self.warmup_start + progress * (self.warmup_end - self.warmup_start)
            for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
                group["lr"] = base * factor
        self._last_lr = self._values()

    def state_dict(self) -> dict[str, Any]:
        """Return position, values and the state of the wrapped schedule."""
        own = {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("optimizer", "wrapped_scheduler")
        }
        return {**own, "wrapped_scheduler": self.wrapped_scheduler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        own = dict(state_dict)
        self.wrapped_scheduler.load_state_dict(own.pop("wrapped_scheduler"))
        self.__dict__.update(own)
