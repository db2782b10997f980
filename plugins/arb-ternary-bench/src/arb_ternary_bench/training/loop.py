"""The loop that ``arb train`` trains with, on random tokens and without a run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field, frozen

from arb_ternary.backends.select import Selection, current_backend
from arb_ternary.errors import ArbError
from arb_ternary.protocols.data import Batch, Batches, BatchRequest
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
    """A data source whose batches are all the same one, drawn at random: every step has the same
    work.
    """

    vocabulary_size: int
    name: str = "random tokens"

    def fingerprint(self) -> str:
        """Nothing resumes from it."""
        return self.name

    def batches(self, request: BatchRequest) -> Batches:
        """The batch, endlessly."""
        generator = torch.Generator().manual_seed(0)
        size = (request.batch_size, request.block_size + 1)
        tokens = torch.randint(0, self.vocabulary_size, size, generator=generator)
        return _SameBatch(Batch(tokens, torch.arange(request.batch_size)))

    def samples_per_epoch(self, block_size: int) -> int:
        """One batch has no epochs."""
        return 1

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Nothing is held out."""
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
        """There is one batch."""

    def close(self) -> None:
        """Nothing reads ahead."""


@define(eq=False)
class Learner:
    """A model in training.

    Attributes:
        way: how.
        size: what.
        seed: of its weights.
    """

    way: TrainWay
    size: TrainSize
    seed: int = 0
    loop: TrainingLoop = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        config = self.way.config(self.size, self.seed)
        device = torch.device("cpu")
        backend = self.way.backend or current_backend("cpu")
        nowhere = Path("bench")  # nothing is written where no run directory is
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
        """Forward, loss, backward, update; returns the loss."""
        report = self.loop.train_step().report
        if report is None:
            raise ArbError(
                f"{self.way.name}: a step was not taken: the loss or the gradient is not finite"
            )
        return report.loss

    def check(self) -> list[float]:
        """Take steps until the loss has fallen; the losses.

        Raises:
            ArbError: it does not, or no weight changes.
        """
        before = self.fingerprint()
        losses = [self.step()]
        while len(losses) < _LEARNS_WITHIN:
            losses.append(self.step())
            if losses[-1] < losses[0] * (1 - _FALL) and len(losses) > 2:
                break
        else:
            raise ArbError(
                f"{self.way.name}: the loss of one batch went from {losses[0]:.4f} to "
                f"{losses[-1]:.4f} in {len(losses)} steps, and should have fallen"
            )
        if self.fingerprint() == before:
            raise ArbError(
                f"{self.way.name}: {len(losses)} steps left every weight and vote as it was"
            )
        return losses

    def fingerprint(self) -> tuple[float, ...]:
        """Numbers that change when weights or their votes do."""
        model = self.loop.model
        tensors = [*model.parameters(), *model.buffers()]
        return tuple(float(tensor.detach().to(torch.float64).abs().sum()) for tensor in tensors)

    def facts(self) -> dict[str, Any]:
        """Learnable numbers, and the bytes that training keeps for them, gradients that a step
        stores among them.
        """
        model = self.loop.model
        counted = audit(model, self.loop.optimizer)
        gradients = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        return {
            "parameters": counted.parameters,
            "pure": counted.pure,
            "state_bytes": counted.state_bytes + gradients,
        }
