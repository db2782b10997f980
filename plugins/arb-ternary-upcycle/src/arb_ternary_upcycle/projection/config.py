"""Options of the phase ``projection``. Imported without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

from arb_ternary.config.options import (
    LARGEST_INT64,
    Condition,
    non_negative,
    option,
    optional,
    positive,
    when,
)
from arb_ternary_upcycle.stage_options import too_long

if TYPE_CHECKING:
    from arb_ternary.optim.protocol import Planned

Policy = Literal["absmean", "ls", "gptq", "gptq_cd"]
ActivationOrder = Literal["auto", "always", "never"]


def _is_fitted(options: Any, run: Any, plan: Any) -> bool:
    return options.correction or options.policy in ("gptq", "gptq_cd")


_FITTED: Final = Condition(_is_fitted, "no weight is fitted to inputs")


@frozen(kw_only=True)
class ProjectionConfig:
    """How float weights become ternary. The model's ``group_size`` says what shares an exponent."""

    policy: Policy = option(
        "gptq_cd",
        "absmean = powers of two nearest to the mean size; ls = least squared error; gptq = the "
        "next columns compensate for each column's error; gptq_cd = gptq, then coordinate descent: "
        "each weight becomes the best one given all others",
    )
    correction: bool = option(
        True, "weights compensate for the errors of earlier layers in their inputs"
    )
    damping: float = option(
        0.01,
        "added to the squares of inputs, as a share of their mean; a larger value fits the "
        "calibration tokens less closely",
        validator=positive,
        active_when=_FITTED,
    )
    activation_order: ActivationOrder = option(
        "auto",
        "round columns from the strongest input to the weakest; auto = for each row whichever "
        "order leaves less error",
        active_when=when("policy", "gptq", "gptq_cd"),
    )
    descent_passes: int = option(
        4,
        "most passes over all weights in gptq_cd",
        validator=non_negative,
        active_when=when("policy", "gptq_cd"),
    )
    calibration_tokens: int = option(
        8192, "training tokens that weights are fitted to", validator=positive
    )
    held_out_tokens: int = option(
        2048, "held-out tokens that errors are also measured on", validator=positive
    )
    block_size: int = option(
        128,
        "tokens per sample; the first tokens of a sample are unlike all others, so that many short "
        "samples fit better than few long ones",
        validator=positive,
    )
    residue: bool = option(
        True, "accumulators start with the residue of rounding; false = they start empty"
    )
    source: str | None = option(
        None,
        "folder of a stage, or run, whose weights are rounded; null = the newest stage of this run",
    )
    teacher: str | None = option(
        None,
        "folder of a stage, or run, whose inputs weights are corrected towards; null = the newest "
        "of this run",
    )
    seed: int | None = option(
        None,
        "seed of the choice of calibration samples; null = the run's",
        validator=optional(non_negative),
        largest=LARGEST_INT64,
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if planned is not None and "ternary" not in planned.kinds | planned.idle:
            yield "policy", "the model has no ternary part; leave linears out of its 'float_parts'"
        yield from too_long(run, self.block_size)
