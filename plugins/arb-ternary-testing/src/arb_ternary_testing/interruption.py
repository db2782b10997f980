"""A tracker that interrupts a run after a given step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.choice import Choice
from arb_ternary.specs import TrackerSpec

#: ``stop`` requests a stop, as a signal does; ``crash`` ends the run without notice.
How = Literal["stop", "crash"]


class Crash(BaseException):
    """Simulated death of the process: no error handler catches it and nothing is saved."""


@frozen(kw_only=True)
class InterruptionConfig:
    """Options: the step after which the run is interrupted, and how."""

    step: int
    how: How


class Interruption:
    """Interrupts a run at the end of a step."""

    def __init__(self, config: InterruptionConfig) -> None:
        self.config = config

    @hookimpl
    def arb_step_end(self, context: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Interrupt the run if this is the configured step."""
        if step != self.config.step:
            return
        if self.config.how == "crash":
            raise Crash(f"step {step}")
        context.request_stop("the conformance kit")


def interruption(step: int, how: How) -> Choice[TrackerSpec]:
    """Return the tracker as a config would hold it."""
    return Choice[TrackerSpec](
        name="interruption",
        options=InterruptionConfig(step=step, how=how),
        given=frozenset({"step", "how"}),
        spec=TrackerSpec(
            name="interruption",
            target="arb_ternary_testing.interruption:Interruption",
            config="arb_ternary_testing.interruption:InterruptionConfig",
        ),
    )
