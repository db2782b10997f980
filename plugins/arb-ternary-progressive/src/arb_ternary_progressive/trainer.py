"""Progressive training in Python: a builder, any dataloader, and a loop over stacks."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import define
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ArbError, CheckpointError, UsageProblem
from arb_ternary.optim.joined import JoinedOptimizer
from arb_ternary.optim.protocol import Trainable, as_outcome, collect_trainable
from arb_ternary_progressive.activation_cache import ActivationCache
from arb_ternary_progressive.dataloader import ProgressiveDataLoader
from arb_ternary_progressive.growth import Stage, release, trunk_stream
from arb_ternary_progressive.history import Progress, StackRecord
from arb_ternary_progressive.masking_time_step import TimeStepMasking
from arb_ternary_progressive.objectives import objective_loss
from arb_ternary_progressive.trunk import TrunkStream
from arb_ternary_train.checkpoint import Checkpoint, CheckpointStore
from arb_ternary_train.init_from import load_state
from arb_ternary_train.optim.adamw import AdamWConfig
from arb_ternary_train.optim.adamw import build as build_adamw
from arb_ternary_train.seeding import derive_seed
from arb_ternary_votes.scaled_votes import ScaledVotesConfig
from arb_ternary_votes.scaled_votes import build as build_scaled_votes

if TYPE_CHECKING:
    from arb_ternary_progressive.builder import ProgressiveRackBuilder
    from arb_ternary_progressive.config import StackWiseConfig
    from arb_ternary_progressive.rack import Rack

__all__ = ["ProgressiveTrainer", "StepNumbers", "default_optimizer"]

_LOG = logging.getLogger(__name__)

#: Batches of one stack without a finite loss or gradient after which training gives up.
_MOST_SKIPPED = 100


@attrs.frozen
class StepNumbers:
    """One optimizer step, for who watches.

    Attributes:
        stack: index of the stack in the order of building.
        step: steps that the stack has taken.
        loss: of the batch, nats a token.
        tokens: positions that counted.
    """

    stack: int
    step: int
    loss: float
    tokens: int


@define(eq=False)
class _Training:
    """A stack in training."""

    stage: Stage
    loader: ProgressiveDataLoader
    optimizer: Optimizer
    progress: Progress
    skipped: int = 0

    def skip(self, what: str, value: float) -> None:
        """A batch was dropped: its ``what`` was ``value``.

        Raises:
            ArbError: there were too many of them.
        """
        self.skipped += 1
        if self.skipped >= _MOST_SKIPPED:
            raise ArbError(
                f"stack {self.stage.index}: {self.skipped} batches had no finite {what}; the last was {value}",
                "Lower the learning rate.",
            )


def default_optimizer(lr: float, rate: float) -> Callable[[Trainable], Optimizer]:
    """AdamW for float parameters, scaled votes for ternary modules; what there is of the two.

    Args:
        lr: learning rate of AdamW.
        rate: of the votes.
    """

    def make(trainable: Trainable) -> Optimizer:
        parts: dict[str, Optimizer] = {}
        if trainable.ternary:
            parts["ternary"] = build_scaled_votes(ScaledVotesConfig(lr=rate), attrs.evolve(trainable, floats={}))
        if trainable.floats:
            parts["float"] = build_adamw(AdamWConfig(lr=lr), attrs.evolve(trainable, ternary={}, stored={}))
        if not parts:
            raise UsageProblem("rack: nothing in it can be trained; every part is frozen")
        return JoinedOptimizer(parts)

    return make


class ProgressiveTrainer:
    """Grows a rack stack by stack, as ``config.training`` says.

    For each stack: add it, freeze the trunk or all of it but its adapters, mask the batches for its depth or time,
    train it, keep what the trunk computes. What learns when is said in ``growth``.

    The dataloader is passed over again for every epoch of every stack; to be resumed it must give the same batches in
    the same order each time that it is passed over in the same epoch.

    Args:
        config: model and training; what it says is read when training begins.
        folder: where checkpoints go; None = there are none.
        checkpoint_every: optimizer steps between checkpoints; 0 = one after each stack.
        keep: how many of the newest checkpoints stay.
        make_optimizer: what trains a stack; None = :func:`default_optimizer` with the config's rates.
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
        self.checkpoint_every = checkpoint_every
        self.make_optimizer = make_optimizer
        self.device = torch.device(device)
        self.cache = cache
        self.on_step = on_step
        self.history: list[StackRecord] = []
        self._began_with = 0

    def train_rack(
        self,
        rack_builder: ProgressiveRackBuilder,
        dataloader: Iterable[Any],
        target_stacks: int,
        *,
        resume: bool = False,
    ) -> list[StackRecord]:
        """Grow the rack of ``rack_builder`` to ``target_stacks`` and return the history, one entry a stack.

        Stacks that the builder has already are the trunk, as they stand. With ``enabled: false`` all stacks are made at
        once and trained end to end, for as many steps as they would have been trained one after the other; the history
        then has one entry.

        Args:
            rack_builder: its rack grows; made by keywords, it takes the config of this trainer.
            dataloader: anything that ``ProgressiveDataLoader`` reads.
            target_stacks: stacks of the finished rack.
            resume: continue from the newest good checkpoint in ``folder``, on a builder without stacks; where there is
                none, start.

        Raises:
            ConfigError: options contradict each other.
            UsageProblem: the rack has that many stacks already, or could not have them.
            CheckpointError: the checkpoint belongs to another config.
        """
        self.config.validate()
        rack_builder.adopt(self.config)
        checkpoint = self._newest() if resume else None
        existing = self._restore(rack_builder, checkpoint)
        progressive = self.config.training.progressive
        if existing is None:
            existing = self._began_with = len(rack_builder.build_rack().ordered_stacks)
        elif existing == target_stacks:
            return self.history
        if target_stacks > progressive.max_stacks:
            raise UsageProblem(
                f"target_stacks: {target_stacks} is more than max_stacks, {progressive.max_stacks}",
                "Ask for fewer stacks, or raise training.progressive.max_stacks.",
            )
        if existing >= target_stacks:
            raise UsageProblem(
                f"target_stacks: the rack has {existing} stacks already, so that there is nothing to train up to "
                f"{target_stacks}",
                "Ask for more stacks, or give a new builder.",
            )
        cache = self._cache()
        try:
            if progressive.enabled:
                for index in range(existing, target_stacks):
                    self._train_stack(rack_builder, dataloader, index, target_stacks, cache, checkpoint)
                    checkpoint = None
            else:
                self._train_at_once(rack_builder, dataloader, target_stacks, existing, checkpoint)
        finally:
            if cache is not None and cache is not self.cache:
                cache.close()
        release(rack_builder.build_rack())
        return self.history

    #: The guide's other name.
    train_progressively = train_rack

    # --- one stack ---

    def _train_stack(
        self,
        builder: ProgressiveRackBuilder,
        dataloader: Iterable[Any],
        index: int,
        target: int,
        cache: ActivationCache | None,
        checkpoint: Checkpoint | None,
    ) -> None:
        progressive = self.config.training.progressive
        if len(builder.build_rack().ordered_stacks) == index:
            builder.add_stack()
        rack = self._placed(builder)
        stage = Stage.enter(builder, progressive.trunk_strategy)
        if cache is not None and index and stage.streams:
            _LOG.warning("stack %d: the activation cache is not used: %s", index, stage.streams)
        stream = trunk_stream(stage, cache, progressive.cache_dtype)
        training = self._begin(stage, dataloader, target, stream, rack, checkpoint)
        self._run(builder, training, stream, self._steps(1, dataloader))
        self.history.append(self._record(training))
        self._save(builder, None)

    def _train_at_once(
        self,
        builder: ProgressiveRackBuilder,
        dataloader: Iterable[Any],
        target: int,
        existing: int,
        checkpoint: Checkpoint | None,
    ) -> None:
        while len(builder.build_rack().ordered_stacks) < target:
            builder.add_stack()
        rack = self._placed(builder)
        release(rack)
        newest = rack.newest
        stage = Stage(rack, target - 1, rack.position(newest.stack_id), "none")
        training = self._begin(stage, dataloader, target, None, rack, checkpoint)
        self._run(builder, training, None, self._steps(target - existing, dataloader))
        self.history.append(self._record(training))
        self._save(builder, None)

    def _placed(self, builder: ProgressiveRackBuilder) -> Rack:
        rack = builder.build_rack()
        rack.to(self.device)
        return rack

    def _begin(
        self,
        stage: Stage,
        dataloader: Iterable[Any],
        target: int,
        stream: TrunkStream | None,
        rack: Rack,
        checkpoint: Checkpoint | None,
    ) -> _Training:
        training = self.config.training
        loader = ProgressiveDataLoader(
            dataloader,
            TimeStepMasking(self.config, final_depth=target),
            stage.index,
            stream,
            stream is not None and stream.cache is not None,
            final_depth=target,
            vocabulary_size=rack.vocabulary_size,
        )
        make = self.make_optimizer or default_optimizer(training.lr, training.rate)
        optimizer = make(collect_trainable(rack))
        made = _Training(stage, loader, optimizer, Progress())
        if checkpoint is not None and (state := checkpoint.state["training"]) is not None:
            loader.load_state_dict(state["loader"])
            optimizer.load_state_dict(state["optimizer"])
            made.progress = Progress.from_state(state["progress"])
            made.skipped = state["skipped"]
        return made

    def _run(
        self,
        builder: ProgressiveRackBuilder,
        training: _Training,
        stream: TrunkStream | None,
        steps: int | None,
    ) -> None:
        """Train for ``steps`` steps; None = for the epochs that the config asks for."""
        batches = self._batches(training.loader, steps)
        while steps is None or training.progress.steps < steps:
            batch = next(batches, None)
            if batch is None:
                return
            self._step(training, stream, batch)
            if self.checkpoint_every and training.progress.steps % self.checkpoint_every == 0:
                self._save(builder, training)

    def _batches(self, loader: ProgressiveDataLoader, steps: int | None) -> Iterator[dict[str, Any]]:
        """Epoch after epoch. A dataloader that shuffles by torch's global generator finds it in the same state."""
        seed, epochs = self.config.training.progressive.seed, self.config.training.epochs_per_stack
        while True:
            torch.manual_seed(derive_seed(seed, "epoch", loader.stack_idx, loader.next_epoch))
            yield from loader
            if steps is None and loader.epoch + 1 >= epochs:
                return

    def _step(self, training: _Training, stream: TrunkStream | None, batch: Mapping[str, Any]) -> None:
        rack = training.stage.rack
        rack.train()
        on_device = {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        inputs_BS, hidden_BSD = on_device["input_ids"], on_device["trunk_activations"]
        if stream is None or hidden_BSD is None:
            time = on_device["time"] if rack.time_embedding is not None else None
            logits_BSV = rack(inputs_BS, time=time)
        else:
            logits_BSV = rack(inputs_BS, hidden=hidden_BSD, from_stack=training.stage.position)
        loss = objective_loss(logits_BSV, on_device)
        value, tokens = float(loss.detach()), int(on_device["loss_mask"].sum())
        if not math.isfinite(value):
            training.skip("loss", value)
            return
        loss.backward()  # type: ignore[no-untyped-call]
        outcome = as_outcome(training.optimizer.step(), training.optimizer)
        if outcome.skipped:
            training.skip("gradient", math.nan)
        if not outcome.stepped:
            return
        training.optimizer.zero_grad()
        training.progress.add(value, tokens)
        if self.on_step is not None:
            self.on_step(StepNumbers(training.stage.index, training.progress.steps, value, tokens))

    def _steps(self, stacks: int, dataloader: Iterable[Any]) -> int | None:
        """Steps of the training of so many stacks; None = the epochs decide."""
        training = self.config.training
        if training.steps_per_stack is not None:
            return training.steps_per_stack * stacks
        if stacks == 1:
            return None
        if not isinstance(dataloader, Sized):
            raise UsageProblem(
                "dataloader: it has no length, so that the steps of an end-to-end training cannot be counted",
                "Set training.steps_per_stack, or give a dataloader with a length.",
            )
        return len(dataloader) * training.epochs_per_stack * stacks

    def _record(self, training: _Training) -> StackRecord:
        stage = training.stage
        strategy: Any = training.loader.masking_strategy
        is_depth = strategy.time_interpretation == "depth"
        return stage.record(
            training.progress,
            time_step=strategy.get_time_step_for_stack(stage.index) if is_depth else None,
            skipped=training.skipped,
        )

    def _cache(self) -> ActivationCache | None:
        progressive = self.config.training.progressive
        if not progressive.enabled or not progressive.cache_activations:
            return None
        if self.cache is not None:
            return self.cache
        return ActivationCache(progressive.cache_bytes, progressive.cache_folder, progressive.cache_dtype)

    # --- checkpoints ---

    def _save(self, builder: ProgressiveRackBuilder, training: _Training | None) -> None:
        """Write a checkpoint: in the middle of a stack, or, with ``training`` None, after one."""
        if self.store is None:
            return
        rack = builder.build_rack()
        done = sum(record.steps for record in self.history)
        state = {
            "structure": builder.structure(),
            "history": [record.to_json() for record in self.history],
            "training": None
            if training is None
            else {
                "loader": training.loader.state_dict(),
                "optimizer": training.optimizer.state_dict(),
                "progress": training.progress.state_dict(),
                "skipped": training.skipped,
            },
            "began_with": self._began_with,
        }
        step = done + (0 if training is None else training.progress.steps)
        self.store.save(step, rack.state_dict(), state, self._identity())

    def _newest(self) -> Checkpoint | None:
        if self.store is None:
            raise UsageProblem("resume: there is no folder of checkpoints", "Give ProgressiveTrainer(..., folder=...).")
        checkpoint, _ = self.store.newest_good()
        if checkpoint is not None and checkpoint.identity != self._identity():
            raise CheckpointError(
                f"{checkpoint.path}: it was written by a training with another config",
                "Restore the config, or give a folder of its own.",
            )
        return checkpoint

    def _restore(self, builder: ProgressiveRackBuilder, checkpoint: Checkpoint | None) -> int | None:
        """Give the builder's rack what the checkpoint holds; the index of the stack that is trained next."""
        if checkpoint is None:
            self.history = []
            return None
        state = checkpoint.state
        builder.restore(dict(state["structure"]))
        rack = builder.build_rack()
        load_state(rack, checkpoint.model, str(checkpoint.path / "model.safetensors"))
        self.history = [StackRecord.from_json(record) for record in state["history"]]
        stacks = len(rack.ordered_stacks)
        self._began_with = state["began_with"]
        if not self.config.training.progressive.enabled:
            return self._began_with if state["training"] is not None else stacks
        return stacks if state["training"] is None else stacks - 1

    def _identity(self) -> dict[str, Any]:
        plain = attrs.asdict(self.config, filter=lambda field, _: not field.name.startswith("_"))
        text = json.dumps(plain, sort_keys=True, default=lambda function: f"{function.__module__}:{function.__name__}")
        return {"config": hashlib.sha256(text.encode()).hexdigest()}
