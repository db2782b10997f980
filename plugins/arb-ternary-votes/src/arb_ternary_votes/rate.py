"""``lr: auto`` of scaled votes: a rate from the length of a run, its batch, its schedule and its model's width.

A power law through the rates that were tuned in this project's own studies (decoders of 64 to 512 columns, 200 to 2,560
steps of 512 to 4,096 tokens, on the built-in text; ``docs/explanation/scaled-votes.md`` has the table)::

    rate = 0.14 * (2400 / steps) ** (1/8) * (tokens / 2048) ** (1/4) * (128 / width) ** (1/5) / (2 * mean)

``mean`` is the schedule's mean over the run, as a fraction of its peak: what a trit can travel is the sum of the rates.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["AUTO", "rate_of"]

#: The value of ``lr`` that asks for it.
AUTO: Final = "auto"


def rate_of(course: Any) -> float:
    """The peak rate of a run, to three digits.

    Args:
        course: ``steps`` of the run, ``tokens`` of a step, ``mean_rate`` of the schedule, ``width`` of the model.
    """
    length = (2400 / course.steps) ** (1 / 8)
    batch = (course.tokens / 2048) ** (1 / 4)
    width = (128 / course.width) ** (1 / 5)
    return float(f"{0.14 * length * batch * width / (2 * course.mean_rate):.3g}")
