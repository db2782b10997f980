"""Options of the optimizers ``gqc.*``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import (
    Rule,
    fraction,
    non_negative,
    option,
    optional,
    positive,
    unless,
)
from arb_ternary.optim.protocol import Planned
from arb_ternary_gqc.schedule import QuantitySchedule

_inside = Rule(
    "between 0 and 1, both excluded",
    lambda value: 0 < value < 1,
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
)

#: Micro-batches per step. Each has random numbers of its own for its votes: 2**20 casts, 256 per
#: micro-batch.
_MOST_DRAWS: Final = 4096


def _max_batch_draws() -> Any:
    return option(64, "most micro-batches per step", validator=positive, largest=_MOST_DRAWS)


@frozen(kw_only=True)
class WrapperConfig:
    """Options of every wrapper.

    Attributes:
        defers: the wrapper may defer a step; see ``arb_ternary.optim.protocol.may_defer``.
    """

    defers: ClassVar[bool] = True

    inner: OptimizerChoice = option(help="the optimizer that steps")
    non_finite: Literal["skip", "raise"] = option(
        "skip", "a micro-batch whose gradient is not finite: skip = drop and count it, raise = fail"
    )


@frozen(kw_only=True)
class GNTSConfig(WrapperConfig):
    """Options of ``gqc.gnts``."""

    threshold: float = option(
        1.0, "norm of the mean gradient below which the optimizer steps", validator=positive
    )
    max_batch_draws: int = _max_batch_draws()
    per_group: bool = option(False, "each parameter group must meet the threshold separately")
    schedule: QuantitySchedule | None = option(
        None, "how the threshold changes; null = it is constant"
    )


@frozen(kw_only=True)
class GNRConfig(WrapperConfig):
    """Options of ``gqc.gnr``."""

    defers: ClassVar[bool] = False

    target_norm: float = option(1.0, "norm that gradients are scaled to", validator=positive)
    mode: Literal["global", "independent"] = option(
        "global", "global = one factor for all gradients, independent = one per parameter"
    )
    per_group: bool = option(
        False,
        "scale the gradients of each parameter group separately",
        active_when=unless(
            "mode", "independent", reason="mode independent scales each parameter separately"
        ),
    )
    schedule: QuantitySchedule | None = option(
        None, "how the target changes; null = it is constant"
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is not None and "float" not in planned.kinds:
            yield (
                "",
                "has no effect because votes do not depend on a gradient's norm, and no part of "
                "the model is float",
            )


@frozen(kw_only=True)
class SBCConfig(WrapperConfig):
    """Options of ``gqc.sbc``."""

    physical_batch_size: int = option(
        1,
        "samples per micro-batch, the phase's batch_size; 1 = logical batch sizes are in "
        "micro-batches",
        validator=positive,
    )
    initial_logical_batch_size: float | None = option(
        None, "initial samples per step; null = one micro-batch", validator=optional(positive)
    )
    max_batch_draws: int = _max_batch_draws()
    schedule: QuantitySchedule | None = option(
        None, "how the logical batch size changes; null = it is constant"
    )


@frozen(kw_only=True)
class MHTConfig(WrapperConfig):
    """Options of ``gqc.mht``; the metric is the loss."""

    confidence: float = option(
        0.98, "confidence level of the interval of the mean loss", validator=_inside
    )
    error_tolerance: float = option(
        0.03, "largest relative error of the mean loss", validator=non_negative
    )
    ema_alpha: float = option(
        0.01, "weight of a step in the running average of the loss", validator=fraction
    )
    max_batch_draws: int = _max_batch_draws()


@frozen(kw_only=True)
class GNSConfig(WrapperConfig):
    """Options of ``gqc.gns``."""

    noise_multiplier: float = option(
        1.0,
        "factor of the noise scale that is accepted; smaller accepts less noise",
        validator=positive,
    )
    max_batch_draws: int = _max_batch_draws()
    estimator: Literal["mccandlish", "norm_variance"] = option(
        "mccandlish", "estimator of the noise scale; norm_variance = as in torch-gqc 0.7.0"
    )
