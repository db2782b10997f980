"""Candidates, each tried from the same snapshot on the same micro-batches; the best one's steps are
kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, frozen

from arb_ternary.errors import ConfigError
from arb_ternary_orchestrator.probe import draw_probe, probe_loss
from arb_ternary_train.policy import Diverged, Drawn

if TYPE_CHECKING:
    from arb_ternary.protocols.data import Batch
    from arb_ternary_orchestrator.monitor import Meter, Monitor, Observation
    from arb_ternary_orchestrator.snapshots import Kept, SnapshotMemory
    from arb_ternary_orchestrator.switching import Strategies
    from arb_ternary_train.loop import TrainingLoop

#: What a nat of progress, a spike and a nat of loss on the probe are worth.
_PROGRESS = 10.0
_SPIKE = 0.1
_PROBE = 0.1
#: Micro-batches between signs of life on the screen.
_SHOWN_EVERY: Final = 10


def reward(loss_start: float, loss_end: float, spikes: int, probe: float | None) -> float:
    """``10 * (loss_start - loss_end) - 0.1 * spikes - 0.1 * probe``, losses in nats; None = it was
    not probed.
    """
    return _PROGRESS * (loss_start - loss_end) - _SPIKE * spikes - _PROBE * (probe or 0.0)


@frozen
class Trial:
    """What became of a candidate.

    Attributes:
        name: of the strategy.
        reward: see :func:`reward`; None where it failed.
        loss_start: running mean of the loss before the first step, nats; None where nothing was
            known of it.
        loss_end: the same after the last step.
        spikes: of losses and gradients on the way.
        probe: loss on training samples that were not trained on; None where it was not asked for.
        failed: why it failed; None where it did not.
        steps: that it took.
    """

    name: str
    reward: float | None
    loss_start: float | None
    loss_end: float | None
    spikes: int
    probe: float | None
    failed: str | None
    steps: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@frozen(eq=False)
class Branch:
    """A candidate that has been tried: what it drew and what was seen of it, and the loop at its
    end.
    """

    trial: Trial
    drawn: Sequence[Drawn]
    seen: Sequence[Observation]
    end: Kept | None


@frozen(eq=False)
class Comparison:
    """Candidates side by side.

    Attributes:
        trials: of all, in the order in which they were tried.
        winner: the best one; None where all failed.
    """

    trials: tuple[Trial, ...]
    winner: Branch | None


@frozen(eq=False)
class Setting:
    """What all candidates of a comparison share.

    Attributes:
        base: the loop before the first step, under the strategy ``strategy``.
        monitor: what had been seen by then.
        microbatches: that each of them draws.
        probe: training samples on which they are judged in the end.
        margin: see :func:`compare`.
    """

    base: Kept
    strategy: str
    monitor: Monitor
    microbatches: int
    probe: list[Batch]
    margin: float


def compare(
    loop: TrainingLoop,
    names: Sequence[str],
    *,
    base: Kept,
    monitor: Monitor,
    microbatches: int,
    probe_batches: int,
    margin: float,
    strategies: Strategies,
    memory: SnapshotMemory,
    meter: Meter,
    tell: Callable[[str], None],
) -> Comparison | None:
    """Try ``names`` one after another, each for ``microbatches`` from where the loop is, and keep
    the best.

    Afterwards the loop stands at the end of the winner's branch, bit for bit as if there had been
    no other; where there is no winner, and where somebody asked the run to stop (then None is
    returned), where it stood before.

    Args:
        loop: between two steps.
        names: of the candidates.
        base: a snapshot of the loop as it is now.
        monitor: what has been seen so far; it is left as it is.
        microbatches: how many each candidate draws.
        probe_batches: batches of training samples that each is judged on in the end.
        margin: by how much the reward of another strategy has to exceed that of the one in use.
        strategies: switches.
        memory: keeps the loop as the best candidate left it.
        meter: what measures the loop's steps.
        tell: shows a person what is tried.
    """
    setting = Setting(
        base, strategies.current, monitor, microbatches, draw_probe(loop, probe_batches), margin
    )
    trials: list[Trial] = []
    best: Branch | None = None
    for place, name in enumerate(names, start=1):
        tell(f"trying {name} ({place} of {len(names)})")
        branch = _try_out(loop, name, setting, strategies, memory, meter)
        if branch is None:
            if best is not None and best.end is not None:
                best.end.release()
            strategies.put_back(loop, base, setting.strategy)
            return None
        trials.append(branch.trial)
        worse = branch
        if _is_better(branch, best, setting):
            best, worse = branch, best
        if worse is not None and worse.end is not None:
            worse.end.release()
    if best is None:
        strategies.put_back(loop, base, setting.strategy)
    else:
        assert best.end is not None
        strategies.put_back(loop, best.end, best.trial.name)
        best.end.release()
    return Comparison(tuple(trials), best)


def _is_better(branch: Branch, best: Branch | None, setting: Setting) -> bool:
    """Whether ``branch`` has done better than ``best``; of two that are alike the earlier one
    stays.

    The strategy in use counts for more: a lower rate lowers the loss at once, and costs something
    only later, which is more than a few steps can show.
    """
    if branch.trial.reward is None or best is None or best.trial.reward is None:
        return branch.trial.reward is not None
    ours, theirs = (
        (each.trial.reward or 0.0)
        + (setting.margin if each.trial.name == setting.strategy else 0.0)
        for each in (branch, best)
    )
    return ours > theirs


def _try_out(
    loop: TrainingLoop,
    name: str,
    setting: Setting,
    strategies: Strategies,
    memory: SnapshotMemory,
    meter: Meter,
) -> Branch | None:
    """The branch of ``name``; None where somebody asked the run to stop."""
    strategies.put_back(loop, setting.base, setting.strategy)
    monitor = setting.monitor.copy()
    first = loop.step
    loss_start = monitor.telemetry.ema
    drawn: list[Drawn] = []
    seen: list[Observation] = []
    spikes = 0
    failed: str | None = None
    try:
        strategies.switch(loop, name)
        while len(drawn) < setting.microbatches and failed is None:
            drawn.append(loop.draw())
            observation = meter.after(loop, drawn[-1])
            if observation is not None:
                seen.append(observation)
                allowed = monitor.allowed
                spikes += monitor.observe(observation)
                if observation.loss > allowed:
                    failed = f"its loss exploded in step {loop.step - first}"
                if not observation.finite:
                    what = "loss" if drawn[-1].report is None else "gradient"
                    failed = f"its {what} was not finite after {loop.step - first} steps"
            if loop.context.stop_requested:
                return None
            if len(drawn) % _SHOWN_EVERY == 0:
                loop.context.logbook.reporter.evaluating(len(drawn))
    except Diverged as error:
        failed = error.what
    except ConfigError as error:
        failed = error.what
    loss_end = monitor.telemetry.ema
    end = None if failed else memory.take(loop)
    probe = probe_loss(loop, setting.probe) if setting.probe and not failed else None
    gained = None
    if failed is None and loss_end is not None:
        gained = reward(loss_end if loss_start is None else loss_start, loss_end, spikes, probe)
        if not math.isfinite(gained):
            failed = f"its loss on further training samples is {probe}"
            gained = None
    if failed is None and gained is None:
        failed = f"it took no step in {len(drawn)} micro-batches"
    trial = Trial(name, gained, loss_start, loss_end, spikes, probe, failed, loop.step - first)
    return Branch(trial, drawn, seen, end)
