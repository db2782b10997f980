"""The policy ``orchestrator``: watches a loop, compares strategies where that is due, and takes
back disasters.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import asdict, fields

from arb_ternary.errors import ConfigError
from arb_ternary_orchestrator.bandit import Bandit
from arb_ternary_orchestrator.branches import Comparison, compare
from arb_ternary_orchestrator.control import ControlFile, SwitchRequest
from arb_ternary_orchestrator.decisions import DecisionBoundary, DecisionOptions, Trigger
from arb_ternary_orchestrator.monitor import Meter, Monitor, Observation, is_seen
from arb_ternary_orchestrator.probe import draw_probe, probe_loss
from arb_ternary_orchestrator.rollback import Recovery, Ring, without_gradient
from arb_ternary_orchestrator.snapshots import SnapshotMemory
from arb_ternary_orchestrator.story import Story
from arb_ternary_orchestrator.switching import Strategies
from arb_ternary_train.policy import Drawn
from arb_ternary_train.seeding import derived_generator

if TYPE_CHECKING:
    from arb_ternary_orchestrator.config import OrchestratorConfig
    from arb_ternary_train.loop import TrainingLoop

# : Steps over which the usual number of micro-batches a step is taken, where an optimizer decides
# it.
_DRAWS: Final = 50


class Orchestrator:
    """Decides, between two steps of a loop, by which strategy it goes on. See
    ``arb_ternary_train.policy.StepPolicy``.

    Between decisions it only looks on: the loop trains bit for bit as without it.

    Attributes:
        lost_steps: steps of candidates that were taken and not kept.
    """

    def __init__(self, config: OrchestratorConfig) -> None:
        self.config = config
        self.lost_steps = 0
        self._meter = Meter(config.telemetry_every)
        self._news: Literal["step", "skip"] | None = None
        self._last: Observation | None = None
        self._pending: Trigger | None = None
        self._draws: deque[int] = deque(maxlen=_DRAWS)
        self._rolled_back: tuple[int, int] | None = None
        self._rollbacks_in_a_row = 0
        self._obeyed: str | None = None
        self._put_off: str | None = None
        self._not_begun: set[str] = set()
        self._story: Story | None = None
        self._known_decisions: int | None = None
        self._before = 0  # steps of the run before those of the loop

    # --- the protocol of a policy

    def begin(self, loop: TrainingLoop) -> None:
        """Find the strategies, and go on with the initial one."""
        config = self.config
        directory = loop.context.directory
        self._strategies = Strategies(config, loop)
        self._monitor = Monitor(config, loop)
        options = {field.name: getattr(config, field.name) for field in fields(DecisionOptions)}
        self._boundary = DecisionBoundary(DecisionOptions(**options))
        self._bandit = Bandit(self._strategies.names, exploration=config.exploration)
        self._memory = SnapshotMemory(directory, loop.context.device, config.snapshot_memory)
        self._ring = Ring(self._memory, size=config.snapshots, every=config.snapshot_every)
        self._recovery = Recovery(config.hysteresis)
        self._control = ControlFile(directory)
        self._strategies.switch(loop, config.initial_strategy)

    def advance(self, loop: TrainingLoop) -> Sequence[Drawn]:
        """Train on a micro-batch; where strategies are compared, on as many as that takes."""
        self._before = loop.context.step - loop.step
        drawn = self._advance(loop)
        # nobody asks again: an explosion is taken back now or never
        if loop.step >= loop.options.steps:
            trigger = self._due(None)
            if trigger is not None and trigger.reason == "safety" and self._story is not None:
                self._roll_back(loop, self._story, trigger)
                self._news = None
        return drawn

    def _advance(self, loop: TrainingLoop) -> Sequence[Drawn]:
        story = self._story = self._story or Story(loop.context, self._known_decisions)
        request = self._asked(loop, story) if self._news == "step" else None
        trigger = self._pending or self._due(request)
        self._pending = None
        news = self._news
        self._news = None
        if trigger is not None and trigger.reason == "safety":
            self._roll_back(loop, story, trigger)
        else:
            if not len(self._ring) or (news == "step" and self._ring.due(loop.step)):
                self._ring.add(loop, self._strategies.current, self._monitor.state_dict())
            if trigger is not None and trigger.reason == "manual":
                assert request is not None
                self._obey(loop, story, trigger, request)
            elif news == "step" and (strategy := self._recovery.due(loop.step)) is not None:
                self._recover(loop, story, strategy)
            elif trigger is not None and self._may_compare(loop, story, trigger):
                return self._compare(loop, story, trigger)
        return self._draw(loop)

    def before_step(self, loop: TrainingLoop) -> None:
        """Measure the gradients."""
        self._meter.before_step(loop)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next; the snapshots for rollbacks are part of it."""
        return {
            "strategy": self._strategies.current,
            "news": self._news,
            "last": None if self._last is None else asdict(self._last),
            "pending": None if self._pending is None else asdict(self._pending),
            "draws": list(self._draws),
            "rolled_back": self._rolled_back,
            "rollbacks_in_a_row": self._rollbacks_in_a_row,
            "obeyed": self._obeyed,
            "not_begun": sorted(self._not_begun),
            "lost_steps": self.lost_steps,
            "decisions": self._known_decisions if self._story is None else self._story.log.sync(),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, loop: TrainingLoop, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; CheckpointError where the run had other strategies
        then.
        """
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self._strategies.resume(loop, state["strategy"])
        self._news = state["news"]
        self._last = None if state["last"] is None else Observation(**state["last"])
        self._pending = None if state["pending"] is None else Trigger(**state["pending"])
        self._draws = deque(state["draws"], maxlen=_DRAWS)
        self._rolled_back = state["rolled_back"]
        self._rollbacks_in_a_row = state["rollbacks_in_a_row"]
        self._obeyed = state["obeyed"]
        self._not_begun = set(state["not_begun"])
        self.lost_steps = state["lost_steps"]
        self._known_decisions = state["decisions"]

    def counts(self) -> dict[str, float]:
        """Steps that went to candidates which were not kept; see
        ``arb_ternary_train.policy.Counts``.
        """
        return {"lost_steps": float(self.lost_steps)}

    def close(self) -> None:
        """Give up the snapshots. A phase may save its last checkpoint after its last loop."""
        self._ring.clear()
        self._memory.close()
        if self._story is not None:
            self._story.log.close()

    # --- watching

    def _parts(self) -> dict[str, Any]:
        return {
            "monitor": self._monitor,
            "boundary": self._boundary,
            "bandit": self._bandit,
            "ring": self._ring,
            "recovery": self._recovery,
        }

    def _draw(self, loop: TrainingLoop) -> list[Drawn]:
        drawn = loop.draw()
        self._observe(drawn, self._meter.after(loop, drawn))
        return [drawn]

    def _observe(self, drawn: Drawn, seen: Observation | None) -> None:
        """Take in a micro-batch that is kept."""
        self._news = None
        if seen is None:
            return
        self._monitor.observe(seen)
        self._last = seen
        self._news = "skip" if drawn.report is None else "step"
        if drawn.report is not None:
            self._draws.append(seen.draws)

    def _due(self, request: SwitchRequest | None) -> Trigger | None:
        """Why a decision is due now; None where none is."""
        last = self._last
        if self._news is None or last is None:
            return None
        return self._boundary.decide(
            self._monitor.telemetry,
            self._monitor.losses,
            last.step,
            finite=last.finite,
            loss=last.loss,
            manual=None if request is None else request.name,
        )

    # --- a person asks

    def _asked(self, loop: TrainingLoop, story: Story) -> SwitchRequest | None:
        """What somebody asks for and has not been given yet."""
        try:
            request = self._control.read()
        except ValueError as error:
            story.note(str(error))
            return None
        if request is None:
            return None
        names = self._strategies.names
        if request.name not in names:
            story.note(
                f"asked to switch to {request.name!r}; this loop chooses among {', '.join(names)}"
            )
            self._control.remove(request)
            return None
        if request.id == self._obeyed:  # the process ended between the checkpoint and this
            self._control.remove(request)
            return None
        if self._put_off != request.id:
            self._put_off = request.id
            story.note(f"asked to switch to {request.name}")
        return request

    def _obey(
        self, loop: TrainingLoop, story: Story, trigger: Trigger, request: SwitchRequest
    ) -> None:
        started = time.monotonic()
        before = self._strategies.current
        try:
            self._strategies.switch(loop, request.name)
        except ConfigError as error:
            story.note(error.what)
            self._control.remove(request)
            return
        self._boundary.decided(loop.step)
        self._recovery.settled()
        self._obeyed = request.id
        self._tell(story, trigger, before, started)
        loop.context.save_checkpoint()
        self._control.remove(request)

    # --- disasters

    def _roll_back(self, loop: TrainingLoop, story: Story, trigger: Trigger) -> None:
        """Go back to the newest good moment, and on from there with the safety strategy, behind the
        offending data.

        A second time within the hysteresis it goes to the one before. But what the first step after
        a rollback finds is in the data: the state it started from has been found good. Where that
        goes on and on, the data have changed.
        """
        started = time.monotonic()
        before = self._strategies.current
        numbers = self._monitor.telemetry.numbers()
        at, to = self._rolled_back or (-math.inf, 0)
        since = loop.step - at
        if not since:
            return  # no step has been taken since the last rollback: there is nothing to take back
        self._rollbacks_in_a_row = self._rollbacks_in_a_row + 1 if since == 1 else 0
        if self._rollbacks_in_a_row >= loop.options.max_skipped:
            self._accept(loop, story, trigger)
            return
        if 1 < since <= self.config.hysteresis:
            self._ring.drop_since(to)
        while True:
            moment = self._ring.newest
            self._strategies.put_back(loop, moment.kept, moment.strategy, cursor=False)
            self._monitor.load_state_dict(moment.seen)
            if len(self._ring) == 1 or self._is_sound(loop):
                break
            self._ring.drop_since(moment.step)
        self._strategies.switch(loop, self.config.safety_strategy)
        self._rolled_back = (loop.step, moment.step)
        blameless = self._rollbacks_in_a_row > 0
        self._recovery.rolled_back(
            loop.step, before, self.config.safety_strategy, blameless=blameless
        )
        self._ring.wait(loop.step)
        self._boundary.decided(loop.step)
        story.decided(
            trigger,
            before,
            self._strategies.current,
            seconds=time.monotonic() - started,
            rolled_back_to=self._before + moment.step,
            untold=self._before + loop.step - loop.context.step,
            numbers=numbers,
        )

    def _recover(self, loop: TrainingLoop, story: Story, strategy: str) -> None:
        """Go back to the strategy that a rollback interrupted."""
        started = time.monotonic()
        before = self._strategies.current
        self._strategies.switch(loop, strategy)
        self._recovery.returned(strategy)
        self._boundary.decided(loop.step)
        trigger = Trigger("recovered", "steps since the rollback", self._recovery.since(loop.step))
        self._tell(story, trigger, before, started)

    def _tell(self, story: Story, trigger: Trigger, before: str, started: float) -> None:
        numbers = self._monitor.telemetry.numbers()
        current = self._strategies.current
        story.decided(trigger, before, current, seconds=time.monotonic() - started, numbers=numbers)

    def _accept(self, loop: TrainingLoop, story: Story, trigger: Trigger) -> None:
        """Take the loss for the usual one: every batch in a row has had it, also after a
        rollback.
        """
        if trigger.metric == "gradient norm":
            raise without_gradient(loop, trigger.value)
        current = self._strategies.current
        numbers = self._monitor.telemetry.numbers()
        self._monitor = Monitor(self.config, loop)
        self._rollbacks_in_a_row = 0
        self._boundary.decided(loop.step)
        text = (
            f"{loop.options.max_skipped} batches in a row have such a loss: it counts as usual "
            f"from now on"
        )
        story.decided(trigger, current, current, not_begun=text, numbers=numbers)

    def _is_sound(self, loop: TrainingLoop) -> bool:
        """Whether the model does on training samples as it did."""
        return (
            probe_loss(loop, draw_probe(loop, max(1, self.config.probe_batches)))
            <= self._monitor.allowed
        )

    # --- comparisons

    def _microbatches(self, loop: TrainingLoop) -> int:
        """Micro-batches that each candidate draws."""
        usual = (
            sum(self._draws) / len(self._draws)
            if self._draws
            else loop.options.gradient_accumulation_steps
        )
        return math.ceil(self.config.eval_horizon * usual)

    def _may_compare(self, loop: TrainingLoop, story: Story, trigger: Trigger) -> bool:
        """Whether a comparison can begin; the first time that it cannot is written down."""
        config = self.config
        options = loop.options
        count = min(config.max_candidates, len(self._strategies.names))
        # Where an optimizer decides how many micro-batches go into a step, a candidate may take
        # fewer for each.
        most = math.ceil(self._microbatches(loop) / options.gradient_accumulation_steps)
        left = options.steps - loop.step
        lost = self.lost_steps + (count - 1) * config.eval_horizon
        share = lost / (lost + options.steps)
        if count < 2:
            cause = "alone"
            text = f"{self._strategies.current} is the only strategy that fits the model"
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
            current = self._strategies.current
            numbers = self._monitor.telemetry.numbers()
            story.decided(trigger, current, current, not_begun=text, numbers=numbers)
        return False

    def _compare(self, loop: TrainingLoop, story: Story, trigger: Trigger) -> Sequence[Drawn]:
        """Try candidates, and keep what the best one did."""
        config = self.config
        started = time.monotonic()
        before = self._strategies.current
        generator = derived_generator(loop.context.seed, loop.key, "bandit", loop.step)
        suits = self._strategies.preferred(self._monitor.telemetry.phase)
        names = self._bandit.choose(config.max_candidates, before, suits, generator)
        microbatches = self._microbatches(loop)
        story.note(
            f"{trigger.reason} ({trigger.metric} {trigger.value:.4g}): {len(names)} strategies are "
            f"compared"
        )
        shared = self._ring.holds(loop)
        base = self._ring.newest.kept if shared else self._memory.take(loop)
        comparison = compare(
            loop,
            names,
            base=base,
            monitor=self._monitor,
            microbatches=microbatches,
            probe_batches=config.probe_batches,
            margin=config.margin,
            strategies=self._strategies,
            memory=self._memory,
            meter=self._meter,
            tell=story.note,
        )
        if not shared:
            base.release()
        if comparison is None:  # the comparison is made anew when the run goes on
            self._pending = trigger
            return [Drawn()]
        self._learn(loop, story, trigger, before, comparison, started)
        winner = comparison.winner
        if winner is None:
            return self._draw(loop)
        seen = iter(winner.seen)
        for drawn in winner.drawn:
            self._observe(drawn, next(seen) if is_seen(drawn) else None)
        return winner.drawn

    def _learn(
        self,
        loop: TrainingLoop,
        story: Story,
        trigger: Trigger,
        before: str,
        comparison: Comparison,
        started: float,
    ) -> None:
        """Draw the conclusions of a comparison; where all candidates failed, the safety strategy
        goes on.
        """
        for trial in comparison.trials:
            if trial.reward is None:
                self._bandit.fail(trial.name)
            else:
                self._bandit.reward(trial.name, trial.reward)
        winner = comparison.winner
        spent = sum(trial.steps for trial in comparison.trials) - (
            0 if winner is None else winner.trial.steps
        )
        self.lost_steps += spent
        if winner is None:
            self._strategies.switch(loop, self.config.safety_strategy)
        self._recovery.settled()
        self._boundary.decided(loop.step)
        story.decided(
            trigger,
            before,
            self._strategies.current,
            trials=comparison.trials,
            steps_spent=spent,
            seconds=time.monotonic() - started,
            numbers=self._monitor.telemetry.numbers(),
        )
