"""A tracker that interrupts a run after a given step, in the two ways in which runs end early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary.config.choice import Choice
from arb_ternary.specs import TrackerSpec


class Crash(BaseException):
    """Stands for the death of the process: nothing that handles errors sees it, nothing is
    saved.
    """


@frozen(kw_only=True)
class InterruptionConfig:
    """After which step of the run, and how: ``stop`` asks politely, as a signal does; ``crash``
    does not.
    """

    step: int
    how: Literal["stop", "crash"]


class Interruption:
    """Interrupts at the end of a step."""

    def __init__(self, config: InterruptionConfig) -> None:
        self.config = config

    @hookimpl
    def arb_step_end(self, context: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Act after the configured step."""
        if step == self.config.step:
            if self.config.how == "crash":
                raise Crash(f"step {step}")
            context.request_stop("the conformance kit")


def interruption(step: int, how: Literal["stop", "crash"]) -> Choice[TrackerSpec]:
    """The tracker as a config would hold it."""
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
