"""Options of the phase ``projection``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import frozen
from attrs.validators import in_, optional

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import non_negative, option, positive
from arb_ternary.optim.protocol import Planned

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

Policy = Literal["absmean", "ls", "gptq", "gptq_cd"]
ActivationOrder = Literal["auto", "always", "never"]


@frozen(kw_only=True)
class ProjectionConfig:
    """How float weights become ternary. What shares an exponent is the model's ``group_size``."""

    policy: Policy = option(
        "gptq_cd",
        "absmean = powers of two nearest to the mean size, ls = of the least squared error, gptq = "
        "each column's error is made up for by the next ones, gptq_cd = then each weight becomes "
        "the best one given all others",
        validator=in_(("absmean", "ls", "gptq", "gptq_cd")),
    )
    correction: bool = option(
        True, "weights make up for the errors that earlier layers leave in their inputs"
    )
    damping: float = option(
        0.01,
        "added to the squares of inputs, as a share of their mean; more fits them less",
        validator=positive,
    )
    activation_order: ActivationOrder = option(
        "auto",
        "round columns from the strongest input to the weakest; auto = where that leaves less "
        "error in a row",
        validator=in_(("auto", "always", "never")),
    )
    descent_passes: int = option(
        4, "most rounds over all weights that gptq_cd makes", validator=non_negative
    )
    calibration_tokens: int = option(
        8192, "training tokens that weights are fitted to", validator=positive
    )
    held_out_tokens: int = option(
        2048, "held-out tokens that errors are also measured on", validator=positive
    )
    block_size: int = option(
        128,
        "tokens in a sample of them; its first ones are unlike all others, and are learned from "
        "few long samples badly",
        validator=positive,
    )
    residue: bool = option(
        True, "accumulators start with what the rounding left over; false = they start empty"
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
        None, "chooses the calibration samples; null = the run's", validator=optional(non_negative)
    )

    def validate_in_run(self, run: RunConfig, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if self.policy in ("absmean", "ls"):
            yield from without_effect(
                self, f"'policy': {self.policy} looks at weights alone", "activation_order"
            )
            if not self.correction:
                yield from without_effect(self, "nothing is fitted to inputs", "damping")
        if self.policy != "gptq_cd":
            yield from without_effect(
                self, f"'policy': {self.policy} has no descent", "descent_passes"
            )
        if planned is not None and "ternary" not in planned.kinds | planned.idle:
            yield "policy", "the model has no ternary part; leave linears out of its 'float_parts'"
        longest = getattr(run.model.options, "max_length", None)
        if longest is not None and self.block_size > longest:
            yield (
                "block_size",
                f"{self.block_size} exceeds the context of the model: max_length is {longest}",
            )
