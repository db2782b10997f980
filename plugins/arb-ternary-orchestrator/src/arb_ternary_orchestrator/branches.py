"""Comparison of candidates: each is tried from the same snapshot on the same microbatches, and the
steps of the best one are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.protocols.data import BatchRequest
from arb_ternary.ternary.models import reset_runtime_state
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.loop_state import weighted_losses
from arb_ternary_train.precision import autocast_for
from arb_ternary_train.seeding import derive_seed, preserved_global_rng
from arb_ternary_train.step import Diverged, StepResult

if TYPE_CHECKING:
    from arb_ternary.protocols.data import Batch
    from arb_ternary_orchestrator.snapshots import Kept, SnapshotMemory
    from arb_ternary_orchestrator.switching import Strategies
    from arb_ternary_orchestrator.telemetry import Meter, Monitor, Observation
    from arb_ternary_train.loop import TrainingLoop

#: Weights in the reward: per nat of progress, per spike, and per nat of loss on the probe.
_PROGRESS: Final = 10.0
_SPIKE: Final = 0.1
_PROBE: Final = 0.1
#: Microbatches between signs of life on the screen.
_SHOWN_EVERY: Final = 10


def reward(loss_start: float, loss_end: float, spikes: int, probe: float | None) -> float:
    """Return ``10 * (loss_start - loss_end) - 0.1 * spikes - 0.1 * probe``, with losses in nats."""
    return _PROGRESS * (loss_start - loss_end) - _SPIKE * spikes - _PROBE * (probe or 0.0)


@frozen
class Trial:
    """The result of trying a candidate.

    Attributes:
        name: name of the strategy.
        reward: see :func:`reward`; None if it failed.
        loss_start: running mean of the loss before the first step, in nats; None if unknown.
        loss_end: the same after the last step.
        spikes: spikes of losses and gradients during the trial.
        probe: loss on training samples that were not trained on; None without a probe.
        failed: why it failed; None if it did not.
        steps: steps that it took.
    """

    name: str
    reward: float | None
    loss_start: float | None
    loss_end: float | None
    spikes: int
    probe: float | None
    failed: str | None
    steps: int


@frozen(eq=False)
class Branch:
    """A tried candidate, with its microbatches, the observation of each if there is one, and the
    loop at its end.
    """

    trial: Trial
    drawn: Sequence[StepResult]
    seen: Sequence[Observation | None]
    end: Kept | None


@frozen(eq=False)
class Comparison:
    """The trials of all candidates in order, and the best branch; None if all failed."""

    trials: tuple[Trial, ...]
    winner: Branch | None


@frozen(eq=False, kw_only=True)
class Setting:
    """The common setting of the candidates of a comparison.

    Attributes:
        base: snapshot of the loop before the first step.
        current: the strategy in use at the start.
        strategies: switches between strategies.
        monitor: what had been observed before; it is not changed.
        meter: measures the steps.
        memory: keeps the loop as the best candidate left it.
        microbatches: how many each candidate draws.
        probe: training samples that each candidate is evaluated on at its end.
        margin: how much the reward of another strategy has to exceed that of the current one.
    """

    base: Kept
    current: str
    strategies: Strategies
    monitor: Monitor
    meter: Meter
    memory: SnapshotMemory
    microbatches: int
    probe: Sequence[Batch]
    margin: float


def compare(
    loop: TrainingLoop, names: Sequence[str], setting: Setting, note: Callable[[str], None]
) -> Comparison | None:
    """Try the strategies ``names`` one after another from where the loop is, and keep the best.

    Afterwards the loop is at the end of the winner's branch, bit for bit as if there had been no
    other candidate. It is back at the start if there is no winner, or if the run was asked to stop;
    in the latter case the result is None. ``note`` shows the user what is tried.
    """
    strategies = setting.strategies
    trials: list[Trial] = []
    best: Branch | None = None
    stopped = False
    for number, name in enumerate(names, start=1):
        note(f"trying {name} ({number} of {len(names)})")
        branch = _try_out(loop, name, setting)
        if branch is None:
            stopped = True
            break
        trials.append(branch.trial)
        worse = branch
        if _is_better(branch, best, setting):
            best, worse = branch, best
        _release(worse)

    if best is None or stopped:
        _release(best)
        strategies.put_back(loop, setting.base, setting.current)
    else:
        assert best.end is not None
        strategies.put_back(loop, best.end, best.trial.name)
        _release(best)
    return None if stopped else Comparison(tuple(trials), best)


def _release(branch: Branch | None) -> None:
    if branch is not None and branch.end is not None:
        branch.end.release()


def _is_better(branch: Branch, best: Branch | None, setting: Setting) -> bool:
    """Return whether ``branch`` did better than ``best``; of two equal ones the earlier stays.

    The current strategy gets the margin: a lower rate lowers the loss at once and costs something
    only later, which a few steps cannot show.
    """
    ours = branch.trial.reward
    theirs = None if best is None else best.trial.reward
    if ours is None or best is None or theirs is None:
        return ours is not None
    if branch.trial.name == setting.current:
        ours += setting.margin
    if best.trial.name == setting.current:
        theirs += setting.margin
    return ours > theirs


def _try_out(loop: TrainingLoop, name: str, setting: Setting) -> Branch | None:
    """Try a strategy from the start; return None if the run was asked to stop."""
    setting.strategies.put_back(loop, setting.base, setting.current)
    monitor = setting.monitor.copy()
    first = loop.step
    loss_start = monitor.telemetry.ema
    drawn: list[StepResult] = []
    seen: list[Observation | None] = []
    spikes = 0
    failed: str | None = None
    try:
        setting.strategies.switch(loop, name)
        while len(drawn) < setting.microbatches and failed is None:
            drawn.append(loop.train_step())
            observation = observe(loop, drawn[-1], setting.meter, monitor)
            seen.append(observation)
            if observation is not None:
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
    except (Diverged, ConfigError) as error:
        failed = error.what

    loss_end = monitor.telemetry.ema
    end = None
    probe = None
    gained = None
    if failed is None:
        end = setting.memory.take(loop)
        probe = probe_loss(loop, setting.probe) if setting.probe else None
        if loss_end is None:
            failed = f"it took no step in {len(drawn)} micro-batches"
        else:
            gained = reward(loss_end if loss_start is None else loss_start, loss_end, spikes, probe)
    if gained is not None and not math.isfinite(gained):
        failed = f"its loss on further training samples is {probe}"
        gained = None
    trial = Trial(name, gained, loss_start, loss_end, spikes, probe, failed, loop.step - first)
    return Branch(trial, drawn, seen, end)


# --- loss on further training samples


def observe(
    loop: TrainingLoop, drawn: StepResult, meter: Meter, monitor: Monitor
) -> Observation | None:
    """Return the observation of a microbatch that has just been drawn; None if there is none.

    A microbatch whose loss is not finite was skipped, so it has changed nothing. It is observed
    only if the model is at fault and not the batch.
    """
    seen = meter.after(loop, drawn)
    if seen is not None and drawn.report is None and is_good(loop, monitor):
        return None
    return seen


def is_good(loop: TrainingLoop, monitor: Monitor) -> bool:
    """Return whether the model is as good on further training samples as ``monitor`` has seen."""
    probe = draw_probe(loop, max(1, monitor.config.probe_batches))
    return probe_loss(loop, probe) <= monitor.allowed


def draw_probe(loop: TrainingLoop, batches: int) -> list[Batch]:
    """Draw batches of training samples, in an order that depends on the loop's step alone.

    Held-out samples are not used: choosing how to train is a part of training.
    """
    options = loop.options
    context = loop.context
    seed = derive_seed(context.seed, loop.key, "probe", loop.step)
    source = context.data.batches(BatchRequest(options.batch_size, options.block_size, seed))
    try:
        return [next(source) for _ in range(batches)]
    finally:
        source.close()


@torch.no_grad()
def probe_loss(loop: TrainingLoop, batches: Sequence[Batch]) -> float:
    """Return the loop's own loss over the predictions of ``batches``; no vote is cast.

    What the model remembers of the last batch (``preserve_state``) is lost; restore a snapshot if
    it matters.
    """
    options = loop.options
    context = loop.context
    votes = bool(collect_trainable(loop.model).ternary)
    autocast = autocast_for(context.device, options.use_amp, options.amp_dtype, ternary=votes)
    losses = []
    predictions = []
    with preserved_global_rng(context.device), evaluation_mode(loop.model):
        for batch in batches:
            reset_runtime_state(loop.model)
            masked = loop.mask(batch).to(context.device)
            predictions.append(loop.count_predictions(masked))
            with autocast():
                output = loop.predict(batch, masked)
            losses.append(float(loop.loss(batch, masked, output)))
        reset_runtime_state(loop.model)
    return sum(weighted_losses(losses, predictions)) / len(losses)
