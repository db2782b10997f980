"""The training loop of ``arb train``, on random tokens and without a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field, frozen

from arb_ternary.backends.select import Selection, current_backend
from arb_ternary.errors import ArbError
from arb_ternary.protocols.data import Batch, Batches, BatchRequest
from arb_ternary_bench.state import fingerprint, state_bytes
from arb_ternary_bench.training.sizes import TrainSize
from arb_ternary_bench.training.trainees import TrainWay
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_train.audit import audit
from arb_ternary_train.build import build_model
from arb_ternary_train.checkpoint import CheckpointStore
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.logbook import Logbook
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.metrics import NoMetrics
from arb_ternary_train.observers import RunObservers
from arb_ternary_train.progress import Silent
from arb_ternary_train.run_state import Checkpointer
from arb_ternary_train.signals import StopRequest

#: Steps in which the loss of one batch has to fall. The first of votes casts none.
_LEARNS_WITHIN: Final = 24
#: Share of its first value that the loss has to lose.
_FALL: Final = 1e-3


@frozen
class RandomTokens:
    """A data source with one random batch, which is every batch: every step has the same work."""

    vocabulary_size: int
    name: str = "random tokens"

    def fingerprint(self) -> str:
        """Return a constant: nothing resumes from it."""
        return self.name

    def batches(self, request: BatchRequest) -> Batches:
        """Return the batch, endlessly."""
        generator = torch.Generator().manual_seed(0)
        size = (request.batch_size, request.block_size + 1)
        tokens = torch.randint(0, self.vocabulary_size, size, generator=generator)
        return _SameBatch(Batch(tokens, torch.arange(request.batch_size)))

    def samples_per_epoch(self, block_size: int) -> int:
        """Return 1: one batch has no epochs."""
        return 1

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Return nothing: no batch is held out."""
        return iter(())


@define(eq=False)
class _SameBatch:
    batch: Batch
    continues: bool = False

    def __next__(self) -> Batch:
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is one batch."""

    def close(self) -> None:
        """Do nothing: nothing reads ahead."""


@define(eq=False)
class Learner:
    """A model in training.

    Attributes:
        way: how it trains.
        size: the decoder.
        seed: seed of its weights.
    """

    way: TrainWay
    size: TrainSize
    seed: int = 0
    loop: TrainingLoop = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        config = self.way.config(self.size, self.seed)
        device = torch.device("cpu")
        backend = self.way.backend or current_backend("cpu")
        nowhere = Path("bench")  # nothing is written there
        context = TrainingContext(
            config=config,
            device=device,
            backend=Selection(backend, "bench"),
            model=build_model(config, self.size.vocabulary, backend, device),
            data=RandomTokens(self.size.vocabulary),
            masking=CausalMasking(),
            observers=RunObservers({}),
            stop=StopRequest(),
            files=RunDirectory(nowhere),
            logbook=Logbook(NoMetrics(), Silent()),
            checkpointer=Checkpointer(CheckpointStore(nowhere), {}),
        )
        self.loop = TrainingLoop(context, config.phases[0].options, key="phase 0")

    def step(self) -> float:
        """Compute loss and gradients and update the model; return the loss."""
        report = self.loop.train_step().report
        if report is None:
            raise ArbError(
                f"{self.way.name}: a step was not taken: the loss or the gradient is not finite"
            )
        return report.loss

    def check(self) -> list[float]:
        """Take steps until the loss has fallen; return the losses.

        Raises:
            ArbError: it does not, or no weight changes.
        """
        before = fingerprint(self.loop.model)
        losses = [self.step(), self.step(), self.step()]
        while losses[-1] >= losses[0] * (1 - _FALL) and len(losses) < _LEARNS_WITHIN:
            losses.append(self.step())
        if losses[-1] >= losses[0] * (1 - _FALL):
            raise ArbError(
                f"{self.way.name}: the loss of one batch went from {losses[0]:.4f} to "
                f"{losses[-1]:.4f} in {len(losses)} steps, and should have fallen"
            )
        if fingerprint(self.loop.model) == before:
            raise ArbError(
                f"{self.way.name}: {len(losses)} steps left every weight and vote as it was"
            )
        return losses

    def facts(self) -> dict[str, Any]:
        """Return the number of parameters, and the bytes that training keeps for them."""
        model = self.loop.model
        optimizer = self.loop.optimizer
        counted = audit(model, optimizer)
        return {
            "parameters": counted.parameters,
            "pure": counted.pure,
            "state_bytes": state_bytes(model, optimizer),
        }
