"""The rate of scaled votes with ``lr: auto``.

It is a power law of the length of a run, its batch, its schedule and the width of its model, fitted
to the rates that were tuned in this project's own studies (decoders of 64 to 640
columns, 150 to 2,560 steps of 512 to 4,096 tokens, of three texts;
``docs/explanation/scaled-votes.md`` has the table)::

    rate = 0.115 * (2400 / (steps * 2 * mean)) ** (1/4)
           * (tokens / 2048) ** (1/8) * (128 / width) ** (1/5)

``mean`` is the mean of the schedule over the run, as a fraction of its peak: a schedule that falls
sooner begins higher.
"""

from __future__ import annotations

from typing import Any, Final

#: The value of ``lr`` that asks for this rate.
AUTO: Final = "auto"


def rate_of(plan: Any) -> float:
    """Return the peak rate of a run, to three digits.

    Args:
        plan: an ``arb_ternary_train.auto_rate.TrainingPlan``: ``steps`` of the run, ``tokens``
            per step, ``mean_rate`` of the schedule, ``width`` of the model.
    """
    length = (2400 / (plan.steps * 2 * plan.mean_rate)) ** (1 / 4)
    batch = (plan.tokens / 2048) ** (1 / 8)
    width = (128 / plan.width) ** (1 / 5)
    return float(f"{0.115 * length * batch * width:.3g}")
