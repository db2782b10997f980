"""The step policy ``orchestrator``: it watches a loop, compares strategies when a decision is due,
and rolls back after an explosion.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import asdict

from arb_ternary.errors import ConfigError
from arb_ternary_orchestrator.bandit import Bandit
from arb_ternary_orchestrator.branches import (
    Comparison,
    Setting,
    compare,
    draw_probe,
    is_good,
    observe,
)
from arb_ternary_orchestrator.control import ControlFile, SwitchRequest
from arb_ternary_orchestrator.decisions import DecisionBoundary, Trigger
from arb_ternary_orchestrator.report import DecisionLog
from arb_ternary_orchestrator.rollback import Recovery, Ring, without_gradient
from arb_ternary_orchestrator.snapshots import SnapshotMemory
from arb_ternary_orchestrator.state import restore_state, state_of
from arb_ternary_orchestrator.switching import Strategies
from arb_ternary_orchestrator.telemetry import Meter, Monitor
from arb_ternary_orchestrator.validation import share_lost
from arb_ternary_train.seeding import derived_generator
from arb_ternary_train.step import StepResult

if TYPE_CHECKING:
    from arb_ternary_orchestrator.config import OrchestratorConfig
    from arb_ternary_orchestrator.telemetry import Observation
    from arb_ternary_train.loop import TrainingLoop

#: Steps over which microbatches per step are averaged, if an optimizer decides their number.
_DRAWS: Final = 50
#: Attributes whose state is part of the policy's.
_STATE: Final = (
    "_monitor",
    "_boundary",
    "_bandit",
    "_ring",
    "_recovery",
    "_news",
    "_draws",
    "_rolled_back",
    "_rollbacks_in_a_row",
    "_obeyed",
    "_not_begun",
    "lost_steps",
)


class Orchestrator:
    """Decides between two steps of a loop which strategy continues; see
    ``arb_ternary_train.policy.StepPolicy``.

    Between decisions it only observes: the loop trains bit for bit as without it.

    Attributes:
        lost_steps: steps of candidates that were not kept.
    """

    def __init__(self, config: OrchestratorConfig) -> None:
        self.config = config
        self.lost_steps = 0
        self._meter = Meter(config.telemetry_every)
        self._news: Literal["step", "skip"] | None = None  # what the last microbatch brought
        self._pending: Trigger | None = None
        self._draws: deque[int] = deque(maxlen=_DRAWS)
        self._rolled_back: Sequence[int] | None = None  # steps before and after the last rollback
        self._rollbacks_in_a_row = 0
        self._obeyed: str | None = None
        self._postponed: str | None = None
        self._not_begun: set[str] = set()
        self._log: DecisionLog | None = None
        self._known_decisions: int | None = None
        self._before = 0  # steps of the run before those of the loop

    # --- the protocol of a policy

    def begin(self, loop: TrainingLoop) -> None:
        """Find the strategies, and switch to the initial one."""
        config = self.config
        directory = loop.context.directory
        self._loop = loop
        self._strategies = Strategies(config, loop)
        self._monitor = Monitor(config, loop)
        self._boundary = DecisionBoundary(config)
        self._bandit = Bandit(self._strategies.names, exploration=config.exploration)
        self._memory = SnapshotMemory(directory, loop.context.device, config.snapshot_memory)
        self._ring = Ring(self._memory, size=config.snapshots, every=config.snapshot_every)
        self._recovery = Recovery(config.hysteresis)
        self._control = ControlFile(directory)
        self._strategies.switch(loop, config.initial_strategy)

    def advance(self, loop: TrainingLoop) -> Sequence[StepResult]:
        """Train on one microbatch, or on all that a comparison of strategies takes."""
        if self._log is None:
            self._log = DecisionLog(loop.context, self._known_decisions)
        self._before = loop.context.step - loop.step
        drawn = self._advance()
        # This is the last call, so an explosion has to be rolled back now.
        if loop.step >= loop.options.steps:
            trigger = self._due(None)
            if trigger is not None and trigger.reason == "safety":
                self._roll_back(trigger)
                self._news = None
        return drawn

    def _advance(self) -> Sequence[StepResult]:
        loop = self._loop
        request = self._request() if self._news == "step" else None
        trigger = self._pending or self._due(request)
        stepped = self._news == "step"
        self._pending = None
        self._news = None
        if trigger is not None and trigger.reason == "safety":
            self._roll_back(trigger)
            return self._draw()

        if not len(self._ring) or (stepped and self._ring.due(loop.step)):
            self._ring.add(loop, self._strategies.current, self._monitor.state_dict())
        interrupted = self._recovery.due(loop.step) if stepped else None
        if trigger is not None and trigger.reason == "manual":
            assert request is not None
            self._obey(trigger, request)
        elif interrupted is not None:
            self._recover(interrupted)
        elif trigger is not None and self._may_compare(trigger):
            return self._compare(trigger)
        return self._draw()

    def before_step(self, loop: TrainingLoop) -> None:
        """Measure the gradients."""
        self._meter.before_step(loop)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides how the loop continues, including the snapshots."""
        decisions = self._known_decisions if self._log is None else self._log.sync()
        return {
            **state_of(self, _STATE),
            "strategy": self._strategies.current,
            "pending": None if self._pending is None else asdict(self._pending),
            "decisions": decisions,
        }

    def load_state_dict(self, loop: TrainingLoop, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: the run had other strategies then.
        """
        restore_state(self, _STATE, state)
        self._strategies.resume(loop, state["strategy"])
        self._pending = None if state["pending"] is None else Trigger(**state["pending"])
        self._known_decisions = state["decisions"]

    def counts(self) -> dict[str, float]:
        """Return the steps of candidates that were not kept; see
        ``arb_ternary_train.policy.add_counts``.
        """
        return {"lost_steps": float(self.lost_steps)}

    def close(self) -> None:
        """Release the snapshots. A phase may save its last checkpoint after its last loop."""
        if self._log is not None:
            self._log.close()
        self._ring.clear()
        self._memory.close()

    # --- observing

    @property
    def log(self) -> DecisionLog:
        """The log of decisions, which is opened when the loop advances for the first time."""
        assert self._log is not None
        return self._log

    def _draw(self) -> list[StepResult]:
        drawn = self._loop.train_step()
        self._observe(drawn, observe(self._loop, drawn, self._meter, self._monitor))
        return [drawn]

    def _observe(self, drawn: StepResult, seen: Observation | None) -> None:
        """Record a microbatch that is kept."""
        self._news = None
        if seen is None:
            return
        self._monitor.observe(seen)
        self._news = "skip" if drawn.report is None else "step"
        if drawn.report is not None:
            self._draws.append(seen.draws)

    def _due(self, request: SwitchRequest | None) -> Trigger | None:
        """Return why a decision is due now; None if none is."""
        if self._news is None:
            return None
        name = None if request is None else request.name
        return self._boundary.decide(self._monitor.telemetry, self._monitor.losses, name)

    def _report(self, trigger: Trigger, before: str, started: float, **facts: Any) -> None:
        """Report a decision that has been carried out, and start the hysteresis."""
        self._boundary.decided(self._loop.step)
        facts.setdefault("numbers", self._monitor.telemetry.numbers())
        self.log.decided(
            trigger,
            before,
            self._strategies.current,
            seconds=time.monotonic() - started,
            **facts,
        )

    # --- requests of a user

    def _request(self) -> SwitchRequest | None:
        """Return the request that waits; one that cannot be obeyed is removed."""
        try:
            request = self._control.read()
        except ValueError as error:
            self.log.note(str(error))
            return None
        if request is None:
            return None
        names = self._strategies.names
        if request.name not in names:
            choice = f"this loop chooses among {', '.join(names)}"
            self.log.note(f"asked to switch to {request.name!r}; {choice}")
            self._control.remove(request)
            return None
        if request.id == self._obeyed:  # the process was killed after its checkpoint
            self._control.remove(request)
            return None
        if self._postponed != request.id:
            self._postponed = request.id
            self.log.note(f"asked to switch to {request.name}")
        return request

    def _obey(self, trigger: Trigger, request: SwitchRequest) -> None:
        started = time.monotonic()
        before = self._strategies.current
        try:
            self._strategies.switch(self._loop, request.name)
        except ConfigError as error:
            self.log.note(error.what)
            self._control.remove(request)
            return
        self._recovery.cancel()
        self._obeyed = request.id
        self._report(trigger, before, started)
        self._loop.context.save_checkpoint()
        self._control.remove(request)

    # --- rollbacks

    def _roll_back(self, trigger: Trigger) -> None:
        """Return to the newest good moment, and continue from there with the safety strategy, after
        the data that exploded.

        A second rollback within the hysteresis returns to the moment before. But if the first step
        after a rollback explodes, the data are the cause, because the state is known to be good. If
        that happens again and again, the data have changed.
        """
        started = time.monotonic()
        loop = self._loop
        safety = self.config.safety_strategy
        before = self._strategies.current
        numbers = self._monitor.telemetry.numbers()
        at, to = self._rolled_back or (-math.inf, 0)
        since = loop.step - at
        if not since:
            return  # no step was taken since the last rollback
        self._rollbacks_in_a_row = self._rollbacks_in_a_row + 1 if since == 1 else 0
        if self._rollbacks_in_a_row >= loop.options.max_skipped:
            self._accept(trigger)
            return

        if 1 < since <= self.config.hysteresis:
            self._ring.drop_since(int(to))
        while True:
            moment = self._ring.newest
            self._strategies.put_back(loop, moment.kept, moment.strategy, cursor=False)
            self._monitor.load_state_dict(moment.seen)
            if len(self._ring) == 1 or is_good(loop, self._monitor):
                break
            self._ring.drop_since(moment.step)

        self._strategies.switch(loop, safety)
        self._rolled_back = (loop.step, moment.step)
        blameless = self._rollbacks_in_a_row > 0
        self._recovery.rolled_back(loop.step, before, safety, blameless=blameless)
        self._ring.wait(loop.step)
        self._report(
            trigger,
            before,
            started,
            rolled_back_to=self._before + moment.step,
            pending_steps=self._before + loop.step - loop.context.step,
            numbers=numbers,
        )

    def _recover(self, strategy: str) -> None:
        """Return to the strategy that a rollback interrupted."""
        started = time.monotonic()
        before = self._strategies.current
        self._strategies.switch(self._loop, strategy)
        self._recovery.returned(strategy)
        since = self._recovery.since(self._loop.step)
        self._report(Trigger("recovered", "steps since the rollback", since), before, started)

    def _accept(self, trigger: Trigger) -> None:
        """Accept a high loss as the usual one: every batch has it, also after a rollback."""
        started = time.monotonic()
        if trigger.metric == "gradient norm":
            raise without_gradient(self._loop, trigger.value)
        numbers = self._monitor.telemetry.numbers()
        self._monitor = Monitor(self.config, self._loop)
        self._rollbacks_in_a_row = 0
        text = (
            f"{self._loop.options.max_skipped} batches in a row have such a loss: it counts as "
            f"usual from now on"
        )
        current = self._strategies.current
        self._report(trigger, current, started, not_begun=text, numbers=numbers)

    # --- comparisons

    def _microbatches(self) -> int:
        """Return how many microbatches each candidate draws."""
        per_step: float = self._loop.options.gradient_accumulation_steps
        if self._draws:
            per_step = sum(self._draws) / len(self._draws)
        return math.ceil(self.config.eval_horizon * per_step)

    def _candidates(self, trigger: Trigger) -> int:
        """Return how many strategies a comparison tries; fewer than configured if only so a rate
        that is far too high can be lowered within ``max_overhead``.
        """
        count = min(self.config.max_candidates, len(self._strategies.names))
        if trigger.reason == "flips":
            while count > 2 and self._share_lost(count) > self.config.max_overhead:
                count -= 1
        return count

    def _share_lost(self, count: int) -> float:
        """Return the share of all steps that are lost after a comparison of ``count`` strategies
        more.
        """
        lost = self.lost_steps + (count - 1) * self.config.eval_horizon
        return share_lost(lost, self._loop.options.steps)

    def _may_compare(self, trigger: Trigger) -> bool:
        """Return whether a comparison can begin; report each reason against it once."""
        config = self.config
        options = self._loop.options
        current = self._strategies.current
        count = self._candidates(trigger)
        # If an optimizer decides how many microbatches a step takes, a candidate may take fewer.
        most = math.ceil(self._microbatches() / options.gradient_accumulation_steps)
        left = options.steps - self._loop.step
        share = self._share_lost(count)
        if count < 2:
            cause = "alone"
            text = f"{current} is the only strategy that fits the model"
        elif trigger.reason == "flips" and not self._strategies.slower():
            cause = "slowest"
            text = f"no strategy has a lower rate of votes than {current}: lower that of the config"
        elif most > left:
            cause = "end"
            text = f"that may take {most} steps, and {left} are left"
        elif share > config.max_overhead:
            cause = "overhead"
            text = (
                f"it would waste {share:.0%} of all steps, and max_overhead is "
                f"{config.max_overhead:.0%}"
            )
        else:
            return True
        if cause not in self._not_begun:
            self._not_begun.add(cause)
            numbers = self._monitor.telemetry.numbers()
            self.log.decided(trigger, current, current, not_begun=text, numbers=numbers)
        return False

    def _compare(self, trigger: Trigger) -> Sequence[StepResult]:
        """Try candidates, and keep the steps of the best one."""
        started = time.monotonic()
        config = self.config
        loop = self._loop
        before = self._strategies.current
        generator = derived_generator(loop.context.seed, loop.key, "bandit", loop.step)
        if trigger.reason == "flips":
            suits = self._strategies.slower()
        else:
            suits = self._strategies.preferred(self._monitor.telemetry.phase)
        names = self._bandit.choose(self._candidates(trigger), before, suits, generator)
        self.log.note(
            f"{trigger.reason} ({trigger.metric} {trigger.value:.4g}): {len(names)} strategies are "
            f"compared"
        )

        base = self._memory.take(loop)
        setting = Setting(
            base=base,
            current=before,
            strategies=self._strategies,
            monitor=self._monitor,
            meter=self._meter,
            memory=self._memory,
            microbatches=self._microbatches(),
            probe=draw_probe(loop, config.probe_batches),
            margin=config.margin,
        )
        comparison = compare(loop, names, setting, self.log.note)
        base.release()
        if comparison is None:  # a resumed run repeats the comparison
            self._pending = trigger
            return [StepResult()]

        self._learn(trigger, before, comparison, started)
        winner = comparison.winner
        if winner is None:
            return self._draw()
        for drawn, seen in zip(winner.drawn, winner.seen, strict=True):
            self._observe(drawn, seen)
        return winner.drawn

    def _learn(self, trigger: Trigger, before: str, comparison: Comparison, started: float) -> None:
        """Record the results of a comparison; if all candidates failed, switch to the safety
        strategy.
        """
        spent = 0
        for trial in comparison.trials:
            spent += trial.steps
            if trial.reward is None:
                self._bandit.fail(trial.name)
            else:
                self._bandit.reward(trial.name, trial.reward)
        if comparison.winner is None:
            self._strategies.switch(self._loop, self.config.safety_strategy)
        else:
            spent -= comparison.winner.trial.steps
        self.lost_steps += spent
        self._recovery.cancel()
        self._report(trigger, before, started, trials=comparison.trials, steps_spent=spent)
