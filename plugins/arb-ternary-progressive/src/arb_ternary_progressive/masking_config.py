"""Options of the masking strategies that hide tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from attrs import frozen

from arb_ternary.config.options import Condition, non_negative, option, optional, positive
from arb_ternary.config.options import fraction as is_fraction
from arb_ternary_progressive.config import (
    MAX_TIME_STEPS,
    ProgressivePhaseConfig,
    TimeInterpretation,
    TimeSampling,
)
from arb_ternary_progressive.time import check_fractions, depth_of

Schedule: TypeAlias = Literal["linear", "exponential", "cosine"]

_MASK_SHARE_HELP = "share of the hidden tokens that become the mask token"
_RANDOM_SHARE_HELP = (
    "share of the hidden tokens that become a random token; the rest stay unchanged"
)


# --- when options take effect


def _growing_phases(run: Any) -> Sequence[ProgressivePhaseConfig]:
    """Return the options of the phases of ``run`` that grow the model."""
    return [
        phase.options for phase in run.phases if isinstance(phase.options, ProgressivePhaseConfig)
    ]


def _other_phases(run: Any) -> Sequence[str]:
    """Return the names of the phases of ``run`` that do not grow the model."""
    return [
        phase.name for phase in run.phases if not isinstance(phase.options, ProgressivePhaseConfig)
    ]


def _has_unknown_phase(run: Any) -> bool:
    """Return whether a phase may train at any depth or time, or if there is no run yet."""
    return run is None or any(name != "standard" for name in _other_phases(run))


def _depths(run: Any) -> set[float]:
    """Return the depths that the phases of ``run`` train at; 1 is the whole model."""
    growing = _growing_phases(run)
    return {
        depth_of(stack, phase.target_stacks) for phase in growing for stack in phase.trained_stacks
    } | {1.0}


def _samples_draw_times(options: TimeStepConfig, run: Any, plan: Any) -> bool:
    """Return whether a phase leaves the time to the masking, or asks for one per sample."""
    if _has_unknown_phase(run) or _other_phases(run):
        return True
    return any(phase.draws_sample_times for phase in _growing_phases(run))


_grows = Condition(
    lambda options, run, plan: _has_unknown_phase(run) or _depths(run) != {1.0},
    "no phase trains a model that is not yet grown",
)
_has_depths_between = Condition(
    lambda options, run, plan: _has_unknown_phase(run) or _depths(run) != {0.0, 1.0},
    "every schedule is the same at the first stack and the last",
)
_masking_maps_time = Condition(
    lambda options, run, plan: _has_unknown_phase(run),
    "a phase that grows the model sets the time of a stack, by its own 'stack_time_mapping', and "
    "others know no stacks",
)
_masking_draws_times = (
    Condition(
        lambda options, run, plan: (
            _has_unknown_phase(run) or options.time_interpretation == "input"
        ),
        "'time_interpretation' is depth",
    ),
    Condition(_samples_draw_times, "the phase sets the time of a batch"),
)


# --- options


@frozen(kw_only=True)
class ReplacementOptions:
    """Options of every strategy that hides tokens: what stands in their place."""

    hides_tokens: ClassVar[bool] = True

    mask_token_id: int | None = option(
        None,
        "id of the mask token, which the data must not use; null = the last of the vocabulary",
        validator=optional(non_negative),
    )
    mask_share: float = option(1.0, _MASK_SHARE_HELP, validator=is_fraction)
    random_share: float = option(0.0, _RANDOM_SHARE_HELP, validator=is_fraction)

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
    # The shares of BERT.
    mask_share: float = option(0.8, _MASK_SHARE_HELP, validator=is_fraction)
    random_share: float = option(0.1, _RANDOM_SHARE_HELP, validator=is_fraction)


@frozen(kw_only=True)
class ProgressiveMaskingConfig(ReplacementOptions):
    """Options of the strategy ``progressive``."""

    schedule: Schedule = option(
        "linear", "how the share grows with depth", active_when=(_grows, _has_depths_between)
    )
    start: float = option(
        0.15,
        "share of the positions that is hidden with the first stack",
        validator=is_fraction,
        active_when=_grows,
    )
    end: float = option(
        0.90, "share of the positions that is hidden with the last stack", validator=is_fraction
    )


@frozen(kw_only=True)
class TimeStepConfig(ReplacementOptions):
    """Options of the strategy ``time_step``."""

    num_time_steps: int = option(
        8, "number of time steps", validator=positive, largest=MAX_TIME_STEPS
    )
    fractions: list[float] | dict[int, float] | None = option(
        None,
        "share of the positions that is hidden at each step; a list is spread over the steps, a "
        "mapping names steps, between them shares are interpolated; null = .15 to .85 evenly",
    )
    time_interpretation: TimeInterpretation = option(
        "depth",
        "where time comes from if the phase gives none: drawn anew (input), or the model's depth "
        "(depth)",
    )
    time_sampling: TimeSampling = option(
        "batch", "draw one time per batch or one per sample", active_when=_masking_draws_times
    )
    stack_time_mapping: Literal["linear", "exponential"] = option(
        "linear", "how the time step grows with depth", active_when=_masking_maps_time
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        try:
            check_fractions(self.fractions, self.num_time_steps)
        except ValueError as error:
            raise ValueError(f"'fractions' {error}") from error

    @property
    def draws_sample_times(self) -> bool:
        """Whether each sample has a time of its own."""
        return self.time_interpretation == "input" and self.time_sampling == "sample"
