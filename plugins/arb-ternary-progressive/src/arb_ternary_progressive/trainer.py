"""Progressive training in Python: the phase ``progressive`` on a builder's rack and any
dataloader.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from attrs import frozen
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
from arb_ternary_progressive.activation_cache import ActivationCache
from arb_ternary_progressive.growth import Stage
from arb_ternary_progressive.growth_config import GrowthConfig
from arb_ternary_progressive.history import StackRecord
from arb_ternary_progressive.masking_time_step import TimeStepMasking
from arb_ternary_progressive.objectives import ObjectiveMasking
from arb_ternary_progressive.passes import LoaderSource, batches_in_a_pass
from arb_ternary_progressive.phase import ProgressivePhase
from arb_ternary_progressive.phase_config import ProgressivePhaseConfig
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore
from arb_ternary_train.config import CheckpointConfig, RunConfig
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.logbook import Logbook
from arb_ternary_train.metrics import MetricsWriter
from arb_ternary_train.observers import RunObservers
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_train.progress import Silent
from arb_ternary_train.run_state import Checkpointer, RunState
from arb_ternary_train.signals import StopRequest

if TYPE_CHECKING:
    from arb_ternary.protocols.runs import Phase
    from arb_ternary_progressive.builder import ProgressiveRackBuilder
    from arb_ternary_progressive.config import StackWiseConfig
    from arb_ternary_train.step import StepReport

_LOG = logging.getLogger(__name__)


@frozen
class StepNumbers:
    """One optimizer step, for who watches.

    Attributes:
        stack: index of the stack in the order of building.
        step: steps that the stack has taken.
        loss: of the step, nats per token.
        tokens: positions that counted.
    """

    stack: int
    step: int
    loss: float
    tokens: int


def default_optimizer(lr: float, rate: float) -> Callable[[Trainable], Optimizer]:
    """What makes ``adamw`` for float parameters and ``scaled_votes`` for all that has integer
    weights.

    Args:
        lr: learning rate of float parameters.
        rate: rate of what has integer weights.
    """

    def make(trainable: Trainable) -> Optimizer:
        parts = {}
        if trainable.ternary or trainable.stored:
            parts["ternary"] = _optimizer("scaled_votes", rate, attrs.evolve(trainable, floats={}))
        if trainable.floats:
            parts["float"] = _optimizer("adamw", lr, attrs.evolve(trainable, ternary={}, stored={}))
        return JoinedOptimizer(parts)

    return make


def _optimizer(name: str, lr: float, trainable: Trainable) -> Optimizer:
    spec: Any = manager().registry.get("optimizer", name).spec
    options = resolve(spec.config)(lr=lr) if spec.config else None
    return build_optimizer("optimizer", Choice(name, options, frozenset({"lr"}), spec), trainable)


class ProgressiveTrainer:
    """Grows a rack stack by stack, as ``config.training`` says: the phase ``progressive`` on a rack
    and a dataloader.

    The dataloader is passed over again for every epoch of every stack; to be resumed it must give
    the same batches in the same order each time that it is passed over in the same epoch. Torch's
    global generator is seeded before each pass.

    Args:
        config: model and training; what it says is read when training begins.
        folder: where checkpoints go; None = there are none.
        checkpoint_every: optimizer steps between checkpoints; 0 = one after each stack.
        keep: how many of the newest checkpoints stay.
        make_optimizer: what trains a stack; None = :func:`default_optimizer` with the config's
            rates.
        device: where the rack is trained.
        cache: where a frozen trunk's hidden states are kept; None = one as the config says.
        on_step: called after each optimizer step.
    """

    def __init__(
        self,
        config: StackWiseConfig,
        *,
        folder: str | Path | None = None,
        checkpoint_every: int = 0,
        keep: int = 3,
        make_optimizer: Callable[[Trainable], Optimizer] | None = None,
        device: torch.device | str = "cpu",
        cache: ActivationCache | None = None,
        on_step: Callable[[StepNumbers], None] | None = None,
    ) -> None:
        self.config = config
        self.store = None if folder is None else CheckpointStore(Path(folder), keep=keep)
        # In a run's config 0 means none at all; here it means none before the end of a stack.
        self.checkpoints = CheckpointConfig(every=checkpoint_every or sys.maxsize, keep=keep)
        self.make_optimizer = make_optimizer
        self.device = torch.device(device)
        self.cache = cache
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
        """Grow the rack of ``rack_builder`` to ``target_stacks`` and return the history, one entry
        a stack.

        Stacks that the builder has already are the trunk, as they stand. With ``enabled: false``
        all stacks are made at once and trained end to end, for as many steps as they would have
        been trained one after the other; the history then has one entry.

        Args:
            rack_builder: its rack grows; made by keywords, it takes the config of this trainer.
            dataloader: anything that ``ProgressiveDataLoader`` reads.
            target_stacks: stacks of the finished rack.
            resume: continue from the newest good checkpoint in ``folder``, on a builder without
                stacks; where there is none, start.

        Raises:
            ConfigError: options contradict each other.
            UsageProblem: the rack has that many stacks already, or could not have them.
            CheckpointError: the checkpoint belongs to another config.
        """
        self.config.validate()
        rack_builder.adopt(self.config)
        checkpoint = self._newest() if resume else None
        done = len(
            rack_builder.build_rack().ordered_stacks if checkpoint is None else _stacks(checkpoint)
        )
        most = self.config.training.progressive.max_stacks
        if target_stacks > most:
            raise UsageProblem(
                f"target_stacks: {target_stacks} is more than max_stacks, {most}",
                "Ask for fewer stacks, or raise training.progressive.max_stacks.",
            )
        if done > target_stacks or (checkpoint is None and done == target_stacks):
            raise UsageProblem(
                f"target_stacks: the rack has {done} stacks already, so that there is nothing to "
                f"train up to {target_stacks}",
                "Ask for more stacks, or give a new builder.",
            )
        phase = _Phase(self._phase_config(dataloader, target_stacks), rack_builder, self)
        context = self._context(rack_builder, dataloader, phase)
        if checkpoint is not None:
            RunState.of(checkpoint).restore(context, checkpoint)
        context.phase = cast("Phase", phase)
        phase.run(context)
        self.history = phase.records
        return self.history

    #: The guide's other name.
    train_progressively = train_rack

    def _phase_config(
        self, dataloader: Iterable[Any], target_stacks: int
    ) -> ProgressivePhaseConfig:
        """The options of the phase that trains as the config says."""
        training = self.config.training
        steps = training.steps_per_stack or training.epochs_per_stack * batches_in_a_pass(
            dataloader
        )
        return ProgressivePhaseConfig(
            **{
                field.name: getattr(training.progressive, field.name)
                for field in attrs.fields(GrowthConfig)
            },
            target_stacks=target_stacks,
            steps_per_stack=steps,
            train_first=False,
            lr_schedule="none",
            eval_every=0,
        )

    def _context(
        self, builder: ProgressiveRackBuilder, dataloader: Iterable[Any], phase: _Phase
    ) -> TrainingContext:
        """The run that the phase takes part in: in memory, but for its checkpoints."""
        training = self.config.training
        rack = builder.build_rack()
        masking = TimeStepMasking(self.config, final_depth=phase.config.target_stacks)
        make = self.make_optimizer or default_optimizer(training.lr, training.rate)
        data = LoaderSource(dataloader, rack.vocabulary_size)
        objective = ObjectiveMasking(masking, training.progressive.training_objective)
        config = RunConfig(
            seed=training.progressive.seed,
            data=_given(DataSpec, "dataloader", lambda: data),
            model=_given(ModelSpec, "rack", lambda _: rack),
            masking=_given(MaskingSpec, "time_step", lambda: objective),
            optimizer=_given(
                OptimizerSpec, "optimizer", make, accepts={"ternary", "float", "stored"}
            ),
            phases=(_given(PhaseSpec, "progressive", phase),),
            checkpoint=self.checkpoints,
        )
        checkpointer = _NoCheckpoints if self.store is None else Checkpointer
        return TrainingContext(
            config=config,
            device=self.device,
            backend=Selection(current_backend(self.device.type), "the backend in use"),
            model=rack,
            data=data,
            masking=objective,
            observers=RunObservers({}),
            stop=StopRequest(),
            files=RunDirectory(Path() if self.store is None else self.store.root),
            logbook=Logbook(_NoMetrics(), _Log()),
            checkpointer=checkpointer(self.store or CheckpointStore(Path()), self._identity()),
        )

    def _newest(self) -> Checkpoint | None:
        if self.store is None:
            raise UsageProblem(
                "resume: there is no folder of checkpoints",
                "Give ProgressiveTrainer(..., folder=...).",
            )
        checkpoint, _ = self.store.newest_good()
        if checkpoint is not None and checkpoint.identity != self._identity():
            raise CheckpointError(
                f"{checkpoint.path}: it was written by a training with another config",
                "Restore the config, or give a folder of its own.",
            )
        return checkpoint

    def _identity(self) -> dict[str, Any]:
        plain = attrs.asdict(self.config, filter=lambda field, _: not field.name.startswith("_"))
        text = json.dumps(
            plain,
            sort_keys=True,
            default=lambda function: f"{function.__module__}:{function.__name__}",
        )
        return {"config": hashlib.sha256(text.encode()).hexdigest()}


class _Phase(ProgressivePhase):
    """The phase on a builder that is there already."""

    def __init__(
        self,
        config: ProgressivePhaseConfig,
        builder: ProgressiveRackBuilder,
        trainer: ProgressiveTrainer,
    ) -> None:
        super().__init__(config)
        self._given = builder
        self._trainer = trainer
        self.added_parts = config.added_parts

    def __call__(self) -> _Phase:
        """The factory of itself: it stands for its options in the run's config."""
        return self

    def make_builder(self, context: TrainingContext) -> ProgressiveRackBuilder:
        return self._given

    def open_cache(self) -> AbstractContextManager[ActivationCache | None]:
        given = self._trainer.cache
        config = self.config
        if given is None or not (config.enabled and config.cache_activations):
            return super().open_cache()
        return nullcontext(given)

    def after_step(self, context: TrainingContext, stage: Stage, report: StepReport) -> None:
        super().after_step(context, stage, report)
        if self._trainer.on_step is not None:
            self._trainer.on_step(StepNumbers(stage.index, report.step, report.loss, report.tokens))

    def after_stack(self, context: TrainingContext, record: StackRecord, summary: str) -> None:
        _LOG.info(summary)
        context.save_checkpoint()


class _Log(Silent):
    """What the run has to say goes to the log of this module."""

    def note(self, text: str) -> None:
        _LOG.warning(text)


class _NoMetrics(MetricsWriter):
    """Keeps nothing: the history says what was trained, ``on_step`` how."""

    def __init__(self) -> None:
        """There is no file."""

    def write(self, record: Any) -> None:
        """Nothing is written."""

    def sync(self) -> int:
        return 0


class _NoCheckpoints(Checkpointer):
    """Writes nothing: there is no folder."""

    def save(self, context: TrainingContext) -> Path:
        return context.directory


def _given(spec: type[Spec], name: str, factory: Callable[..., Any], **more: Any) -> Choice[Any]:
    """The choice of a component that is there already, or that ``factory`` makes."""
    return Choice(name, factory, frozenset(), spec(name=name, target=f"{__name__}:call", **more))


def call(factory: Callable[..., Any], *args: Any) -> Any:
    """The factory of a component that is there already."""
    return factory(*args)


def _stacks(checkpoint: Checkpoint) -> list[Any]:
    structure = RunState.of(checkpoint).structures[0]
    assert structure is not None
    stacks: list[Any] = structure["stacks"]
    return stacks
