"""Options of the policy ``orchestrator``. Read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from arb_ternary.config.options import (
    LARGEST_INT64,
    Rule,
    non_negative,
    option,
    optional,
    positive,
    when,
)
from arb_ternary.optim.protocol import Planned
from arb_ternary_orchestrator.optim.config import at_least
from arb_ternary_orchestrator.validation import contradictions, planned_comparisons

_above_one = Rule("greater than 1", lambda value: value > 1, {"exclusiveMinimum": 1})
_share = Rule(
    "between 0 and 1, 1 excluded",
    lambda value: 0 <= value < 1,
    {"minimum": 0, "exclusiveMaximum": 1},
)


@frozen(kw_only=True)
class OrchestratorConfig:
    """Options of the policy ``orchestrator``; steps are steps of its loop."""

    decision_interval: int = option(
        500, "steps after the last decision until strategies are compared again", validator=positive
    )
    eval_horizon: int = option(100, "steps for which each candidate is tried", validator=positive)
    initial_strategy: str = option(
        "configured", "strategy at the start; configured = the optimizer as the run has it"
    )
    safety_strategy: str = option("spike_resistant", "strategy after a rollback")
    strategies: tuple[str, ...] | None = option(
        None,
        "strategies to choose among, in addition to the initial and the safety strategy; null = "
        "the built-in ones that fit the model",
    )
    max_candidates: int = option(
        3,
        "strategies that are tried in an evaluation, including the one in use",
        validator=at_least(2),
    )
    max_loss_increase: float = option(
        1.5,
        "multiple of the usual loss at which training counts as exploded and is rolled back",
        validator=_above_one,
    )
    hysteresis: int = option(
        200,
        "steps after a switch or an evaluation in which only a rollback may happen",
        validator=non_negative,
    )
    spike_window: int = option(100, "steps over which spikes are counted", validator=positive)
    spike_count: int = option(
        3, "spikes in the window that ask for an evaluation", validator=positive
    )
    phase_hold: int = option(
        20,
        "steps for which another phase of training has to last before it counts",
        validator=positive,
    )
    window: int = option(
        200,
        "steps over which the slope of the loss is taken, 5 at least",
        validator=at_least(5),
    )
    use_adagc: bool = option(
        False, "clip the gradients of float parameters by AdaGC under every strategy"
    )
    adagc_warmup: int = option(
        100,
        "steps in which AdaGC clips by the norm of all gradients",
        validator=positive,
        active_when=when("use_adagc"),
    )
    adagc_threshold: float = option(
        3.0,
        "largest norm of a parameter's gradient with AdaGC, as a multiple of its average",
        validator=at_least(1),
        active_when=when("use_adagc"),
    )
    use_nowcasting: bool = option(
        False, "move float parameters to their predicted values, under every strategy"
    )
    snapshot_memory: int | None = option(
        None,
        "bytes of snapshots in memory, others go to disk; null = a quarter of what is free",
        validator=optional(non_negative),
        largest=LARGEST_INT64,
    )
    snapshot_every: int = option(50, "steps between snapshots for rollbacks", validator=positive)
    snapshots: int = option(3, "snapshots for rollbacks that are kept", validator=positive)
    max_overhead: float = option(
        0.1,
        "largest fraction of all steps of the loop for candidates that are not kept",
        validator=_share,
    )
    probe_batches: int = option(
        2,
        "batches of training samples on which each candidate is evaluated at its end; 0 = none",
        validator=non_negative,
    )
    margin: float = option(
        0.1,
        "how much the reward of another strategy has to exceed that of the one in use; 0.1 is "
        "0.01 nats of the running mean of the loss",
        validator=non_negative,
    )
    exploration: float = option(
        2.0,
        "weight of rarely tried strategies against known rewards; 0 = only rewards count",
        validator=non_negative,
    )
    telemetry_every: int = option(
        10,
        "steps between measurements per module: gradient, flips, change of the weights",
        validator=positive,
    )

    def validate_in_run(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Yield contradictions; see ``arb_ternary.optim.protocol.Planned``."""
        return contradictions(self, run, planned)

    def note_in_phase(self, run: Any, phase: Any, planned: Planned | None) -> str | None:
        """Say how many comparisons ``phase`` will make; see ``policy_notes`` of the loop."""
        return planned_comparisons(self, run, phase, planned)
