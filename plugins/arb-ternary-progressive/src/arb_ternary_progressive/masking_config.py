"""Options of the strategies that hide tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeAlias

from attrs import frozen

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import fraction as is_fraction
from arb_ternary.config.options import non_negative, option, optional, positive
from arb_ternary_progressive.phase_config import ProgressivePhaseConfig
from arb_ternary_progressive.time import check_fractions, depth_of

Schedule: TypeAlias = Literal["linear", "exponential", "cosine"]
Interpretation: TypeAlias = Literal["input", "depth"]
Sampling: TypeAlias = Literal["batch", "sample"]

MASK_TOKEN_HELP = (
    "id that stands for a hidden token, which the data must not use; null = the last of the "
    "vocabulary"
)


@frozen(kw_only=True)
class ReplacementOptions:
    """Options of every strategy that hides tokens."""

    hides_tokens: ClassVar[bool] = True

    mask_token_id: int | None = option(None, MASK_TOKEN_HELP, validator=optional(non_negative))
    mask_share: float = option(
        1.0, "share of the hidden tokens that become the mask token", validator=is_fraction
    )
    random_share: float = option(
        0.0,
        "share of the hidden tokens that become a random token; the rest stay as they are",
        validator=is_fraction,
    )

    def __attrs_post_init__(self) -> None:
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"'random_share' must be at most 1 - mask_share; {self.random_share} and "
                f"{self.mask_share} exceed 1"
            )


@frozen(kw_only=True)
class MlmConfig(ReplacementOptions):
    """Options of the strategy ``mlm``."""

    fraction: float = option(0.15, "share of the positions that is hidden", validator=is_fraction)
    mask_share: float = option(
        0.8, "share of the hidden tokens that become the mask token", validator=is_fraction
    )
    random_share: float = option(
        0.1,
        "share of the hidden tokens that become a random token; the rest stay as they are",
        validator=is_fraction,
    )


@frozen(kw_only=True)
class ProgressiveMaskingConfig(ReplacementOptions):
    """Options of the strategy ``progressive``."""

    schedule: Schedule = option("linear", "how the share grows with depth")
    start: float = option(
        0.15, "share of the positions that is hidden with the first stack", validator=is_fraction
    )
    end: float = option(
        0.90, "share of the positions that is hidden with the last stack", validator=is_fraction
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``. Phases that are not known here may have any
        depth.
        """
        grown = [
            phase.options
            for phase in run.phases
            if isinstance(phase.options, ProgressivePhaseConfig)
        ]
        if len(grown) + sum(phase.name == "standard" for phase in run.phases) != len(run.phases):
            return
        depths = {
            depth_of(stack, each.target_stacks) for each in grown for stack in each.trained_stacks
        } | {1.0}
        if depths == {1.0}:
            yield from without_effect(
                self, "no phase trains a model that is not yet grown", "start", "schedule"
            )
        elif depths == {0.0, 1.0}:
            yield from without_effect(
                self, "every schedule is the same at the first stack and the last", "schedule"
            )


def _fractions(_: object, attribute: Any, value: Any) -> None:
    try:
        check_fractions(value)
    except ValueError as error:
        raise ValueError(f"'{attribute.name}' {error}") from error


@frozen(kw_only=True)
class TimeStepConfig(ReplacementOptions):
    """Options of the strategy ``time_step``."""

    num_time_steps: int = option(8, "number of time steps", validator=positive)
    fractions: list[float] | dict[int, float] | None = option(
        None,
        "share of the positions that is hidden at each step; a list is spread over the steps, a "
        "mapping names steps, between them shares are interpolated; null = .15 to .85 evenly",
        validator=_fractions,
    )
    time_interpretation: Interpretation = option(
        "depth",
        "where time comes from when the phase gives none: drawn anew (input), or the model's depth "
        "(depth)",
    )
    time_sampling: Sampling = option(
        "batch", "what shares a drawn time: a batch, or nothing but the sample"
    )
    stack_time_mapping: Literal["linear", "exponential"] = option(
        "linear", "how the time step grows with depth"
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        try:
            check_fractions(self.fractions, self.num_time_steps)
        except ValueError as error:
            raise ValueError(f"'fractions' {error}") from error

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``. Phases that are not known here may give any
        time or none.
        """
        grown = [
            phase.options
            for phase in run.phases
            if isinstance(phase.options, ProgressivePhaseConfig)
        ]
        others = [
            phase for phase in run.phases if not isinstance(phase.options, ProgressivePhaseConfig)
        ]
        if all(phase.name == "standard" for phase in others):
            reason = (
                "a phase that grows the model says the time of a stack, by its own "
                "'stack_time_mapping', and others "
            )
            yield from without_effect(self, reason + "know no stacks", "stack_time_mapping")
            drawn = [
                each
                for each in grown
                if (each.time_interpretation, each.time_sampling) == ("input", "sample")
            ]
            if self.time_interpretation == "depth":
                yield from without_effect(self, "'time_interpretation' is depth", "time_sampling")
            elif not (others or drawn):
                yield from without_effect(
                    self, "the phase gives the time of a batch", "time_sampling"
                )
