"""Progressive training in Python: the phase ``progressive`` on any builder and any dataloader."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch
from torch.optim import Optimizer

from arb_ternary.backends.select import Selection, current_backend
from arb_ternary.config.choice import Choice
from arb_ternary.errors import CheckpointError, UsageProblem
from arb_ternary.optim.protocol import Trainable, build_optimizer
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import (
    DataSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PhaseSpec,
    Spec,
    resolve,
)
from arb_ternary_progressive.config import GrowthConfig, ProgressivePhaseConfig
from arb_ternary_progressive.growth import Stage
from arb_ternary_progressive.history import StackRecord
from arb_ternary_progressive.loader_source import LoaderSource, batches_per_epoch
from arb_ternary_progressive.masking import TimeStepMasking
from arb_ternary_progressive.objectives import ObjectiveMasking
from arb_ternary_progressive.phase import ProgressivePhase
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore
from arb_ternary_train.config import CheckpointConfig, RunConfig
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.logbook import Logbook
from arb_ternary_train.metrics import NoMetrics
from arb_ternary_train.observers import RunObservers
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.progress import Silent
from arb_ternary_train.run_state import Checkpointer, RunState
from arb_ternary_train.signals import StopRequest

if TYPE_CHECKING:
    from arb_ternary.protocols.runs import Phase
    from arb_ternary_progressive.builder import ProgressiveRackBuilder
    from arb_ternary_progressive.stackwise import StackWiseConfig
    from arb_ternary_train.step import StepReport

#: Steps between checkpoints if only the end is saved.
_NEVER: Final = 2**31 - 1

_LOG = logging.getLogger(__name__)


def default_optimizer(lr: float, rate: float) -> Callable[[Trainable], Optimizer]:
    """Return a factory of ``adamw`` for float parameters and ``scaled_votes`` for ternary modules.

    Args:
        lr: learning rate of float parameters.
        rate: rate of integer weights.
    """

    def part(name: str, lr: float, trainable: Trainable) -> Optimizer:
        spec: Any = manager().registry.get("optimizer", name).spec
        choice = Choice(name, resolve(spec.config)(lr=lr), frozenset({"lr"}), spec)
        return build_optimizer("optimizer", choice, trainable)

    def make(trainable: Trainable) -> Optimizer:
        parts = {}
        if trainable.ternary:
            parts["ternary"] = part("scaled_votes", rate, attrs.evolve(trainable, floats={}))
        if trainable.floats:
            parts["float"] = part("adamw", lr, attrs.evolve(trainable, ternary={}))
        return JoinedOptimizer(parts)

    return make


class ProgressiveTrainer:
    """Grows a rack stack by stack according to ``config.training``.

    It runs the phase ``progressive`` in memory, on the rack of a builder and on a dataloader. The
    dataloader is iterated again for every epoch of every stack. To be resumable it must give the
    same batches in the same order whenever it is iterated in the same epoch; torch's global
    generator is seeded before each epoch.

    Args:
        config: model and training; it is read when training begins.
        folder: folder of checkpoints; None = none are written.
        checkpoint_every: optimizer steps between checkpoints; 0 = one after each stack.
        device: device to train on.
        on_step: called after each optimizer step with the index of the stack, in the order of
            building, and the report of the step.
    """

    def __init__(
        self,
        config: StackWiseConfig,
        *,
        folder: str | Path | None = None,
        checkpoint_every: int = 0,
        device: torch.device | str = "cpu",
        on_step: Callable[[int, StepReport], None] | None = None,
    ) -> None:
        self.config = config
        # In the config of a run, 0 means no checkpoints at all.
        every = 0 if folder is None else checkpoint_every or _NEVER
        self.checkpoints = CheckpointConfig(every=every)
        self.store: CheckpointStore | None = None
        if folder is not None:
            self.store = CheckpointStore(Path(folder), keep=self.checkpoints.keep)
        self.device = torch.device(device)
        self.on_step = on_step
        self.history: list[StackRecord] = []

    def train_rack(
        self,
        rack_builder: ProgressiveRackBuilder,
        dataloader: Iterable[Any],
        target_stacks: int,
        *,
        resume: bool = False,
    ) -> list[StackRecord]:
        """Grow the rack of ``rack_builder`` to ``target_stacks``.

        Stacks that the builder has already are the trunk, unchanged. With ``enabled: false`` all
        stacks are made at once and trained end to end, for as many steps as they would have been
        trained one after another.

        Args:
            rack_builder: its rack grows. One made without a config takes that of this trainer.
            dataloader: anything that ``ProgressiveDataLoader`` reads.
            target_stacks: stacks of the finished rack.
            resume: continue from the newest good checkpoint in ``folder``, on a builder without
                stacks; start if there is none.

        Returns:
            The history: one record per stack, or one in all with ``enabled: false``.

        Raises:
            ConfigError: options contradict each other.
            UsageProblem: the rack has that many stacks already, or cannot have them.
            CheckpointError: the checkpoint belongs to another config.
        """
        self.config.validate()
        rack_builder.adopt(self.config)
        checkpoint = self._newest() if resume else None
        if checkpoint is None:
            done = len(rack_builder.build_rack().ordered_stacks)
        else:
            done = _stacks_in(checkpoint)
        self._check_target(target_stacks, done, resumed=checkpoint is not None)

        phase = _BuilderPhase(self._phase_config(dataloader, target_stacks), rack_builder, self)
        context = self._context(rack_builder, dataloader, phase)
        if checkpoint is not None:
            RunState.of(checkpoint).restore(context, checkpoint)
        context.phase = cast("Phase", phase)
        phase.run(context)
        self.history = phase.records
        return self.history

    #: The guide's other name.
    train_progressively = train_rack

    def _check_target(self, target_stacks: int, done: int, *, resumed: bool) -> None:
        most = self.config.training.progressive.max_stacks
        if target_stacks > most:
            raise UsageProblem(
                f"target_stacks: {target_stacks} is more than max_stacks, {most}",
                "Ask for fewer stacks, or raise training.progressive.max_stacks.",
            )
        # A finished training can be resumed: it does nothing.
        if done > target_stacks or (done == target_stacks and not resumed):
            raise UsageProblem(
                f"target_stacks: the rack has {done} stacks already, so there is nothing to train "
                f"up to {target_stacks}",
                "Ask for more stacks, or give a new builder.",
            )

    def _phase_config(
        self, dataloader: Iterable[Any], target_stacks: int
    ) -> ProgressivePhaseConfig:
        """Return the options of the phase."""
        training = self.config.training
        steps = training.steps_per_stack
        if steps is None:
            steps = training.epochs_per_stack * batches_per_epoch(dataloader)
        growth = {
            field.name: getattr(training.progressive, field.name)
            for field in attrs.fields(GrowthConfig)
        }
        return ProgressivePhaseConfig(
            **growth,
            target_stacks=target_stacks,
            steps_per_stack=steps,
            train_first=False,
            lr_schedule="none",
            eval_every=0,
        )

    def _context(
        self, builder: ProgressiveRackBuilder, dataloader: Iterable[Any], phase: _BuilderPhase
    ) -> TrainingContext:
        """Return the run of the phase, which is in memory except for its checkpoints."""
        training = self.config.training
        rack = builder.build_rack()
        masking = ObjectiveMasking(
            TimeStepMasking(self.config),
            training.progressive.training_objective,
        )
        data = LoaderSource(dataloader, rack.vocabulary_size)
        config = RunConfig(
            seed=training.progressive.seed,
            data=_choice(DataSpec, "dataloader", lambda: data),
            model=_choice(ModelSpec, "rack", lambda _: rack),
            masking=_choice(MaskingSpec, "time_step", lambda: masking),
            optimizer=_choice(
                OptimizerSpec,
                "optimizer",
                default_optimizer(training.lr, training.rate),
                accepts={"ternary", "float"},
            ),
            phases=(_choice(PhaseSpec, "progressive", phase),),
            checkpoint=self.checkpoints,
        )
        store = self.store or CheckpointStore(Path())
        return TrainingContext(
            config=config,
            device=self.device,
            backend=Selection(current_backend(self.device.type), "the backend in use"),
            model=rack,
            data=data,
            masking=masking,
            observers=RunObservers({}),
            stop=StopRequest(),
            files=RunDirectory(store.root),
            logbook=Logbook(NoMetrics(), _LoggingReporter()),
            checkpointer=Checkpointer(store, self._identity()),
        )

    def _newest(self) -> Checkpoint | None:
        if self.store is None:
            raise UsageProblem(
                "resume: there is no folder of checkpoints",
                "Give ProgressiveTrainer(..., folder=...).",
            )
        checkpoint, _ = self.store.newest_good()
        mine = self._identity()["options"]
        # Checkpoints of a config with more options have another key, and are not compared.
        if checkpoint is not None and checkpoint.identity.get("options", mine) != mine:
            raise CheckpointError(
                f"{checkpoint.path}: it was written by a training with another config",
                "Restore the config, or give another folder.",
            )
        return checkpoint

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint must match: a digest of the config."""
        plain = attrs.asdict(self.config, filter=lambda field, _: not field.name.startswith("_"))

        def name(function: Any) -> str:
            return f"{function.__module__}:{function.__name__}"

        text = json.dumps(plain, sort_keys=True, default=name)
        return {"options": hashlib.sha256(text.encode()).hexdigest()}


class _BuilderPhase(ProgressivePhase):
    """The phase on the rack of a builder."""

    def __init__(
        self,
        config: ProgressivePhaseConfig,
        builder: ProgressiveRackBuilder,
        trainer: ProgressiveTrainer,
    ) -> None:
        super().__init__(config)
        self._given = builder
        self._trainer = trainer
        # The phase stands for its options in the run's config, and is its own factory.
        self.added_parts = config.added_parts

    def __call__(self) -> _BuilderPhase:
        return self

    def make_builder(self, context: TrainingContext) -> ProgressiveRackBuilder:
        return self._given

    def after_step(
        self, context: TrainingContext, stage: Stage, report: StepReport, steps: int
    ) -> None:
        super().after_step(context, stage, report, steps)
        if self._trainer.on_step is not None:
            self._trainer.on_step(stage.index, report)

    def after_stack(self, context: TrainingContext, record: StackRecord, summary: str) -> None:
        _LOG.info(summary)
        context.save_checkpoint()


class _LoggingReporter(Silent):
    """Sends the notes of a run to the log of this module."""

    def note(self, text: str) -> None:
        _LOG.warning(text)


def _choice(spec: type[Spec], name: str, factory: Callable[..., Any], **facts: Any) -> Choice[Any]:
    """Return the choice of a component that ``factory`` makes; it is not registered."""
    return Choice(name, factory, frozenset(), spec(name=name, target=f"{__name__}:call", **facts))


def call(factory: Callable[..., Any], *args: Any) -> Any:
    """Call ``factory``: the target of the choices of a trainer."""
    return factory(*args)


def _stacks_in(checkpoint: Checkpoint) -> int:
    structure = RunState.of(checkpoint).structures[0]
    assert structure is not None
    return len(structure["stacks"])
