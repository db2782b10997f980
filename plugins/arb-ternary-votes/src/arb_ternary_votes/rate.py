"""``lr: auto`` of scaled votes: a rate from the length of a run, its batch, its schedule and its
model's width.

A power law through the rates that were tuned in this project's own studies (decoders of 64 to 640
columns, 150 to 2,560 steps of 512 to 4,096 tokens, of three texts;
``docs/explanation/scaled-votes.md`` has the table)::

    rate = 0.115 * (2400 / (steps * 2 * mean)) ** (1/4)
           * (tokens / 2048) ** (1/8) * (128 / width) ** (1/5)

``mean`` is the schedule's mean over the run, as a fraction of its peak: one that falls sooner
begins higher.
"""

from __future__ import annotations

from typing import Any, Final

#: The value of ``lr`` that asks for it.
AUTO: Final = "auto"


def rate_of(plan: Any) -> float:
    """The peak rate of a run, to three digits.

    Args:
        plan: ``steps`` of the run, ``tokens`` of a step, ``mean_rate`` of the schedule, ``width``
            of the model.
    """
    length = (2400 / (plan.steps * 2 * plan.mean_rate)) ** (1 / 4)
    batch = (plan.tokens / 2048) ** (1 / 8)
    width = (128 / plan.width) ** (1 / 5)
    return float(f"{0.115 * length * batch * width:.3g}")
