"""The phase ``projection``: the weights of the newest stage become the trits of the run's model."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from arb_ternary.config.fields import to_plain
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import TiedHead
from arb_ternary_upcycle.calibration import calibration_tokens, held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.projection.config import ProjectionConfig
from arb_ternary_upcycle.projection.filling import check_projectable, fill
from arb_ternary_upcycle.projection.sequential import Plan, SequentialProjection
from arb_ternary_upcycle.stages import find_stage
from arb_ternary_upcycle.store import Store, save_json

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Predictions per batch of the evaluation at the end if no training loop has said how many.
_EVALUATED = 2048


class ProjectionPhase:
    """Rounds embedding, blocks and head, in this order.

    Finished blocks are kept in ``RUN/stages/projection``: a run that is resumed, or restarted after
    a kill, continues after the last one and ends with the same bits. The folder is deleted at the
    end; ``RUN/stages/projection.json`` keeps the errors.
    """

    name = "projection"

    def __init__(self, config: ProjectionConfig) -> None:
        self.config = config
        self._recorded = 0

    def run(self, context: TrainingContext) -> PhaseResult:
        """Round what is not rounded yet; see ``Phase``."""
        config = self.config
        source = find_stage(context, config.source, ("teacher", "prepared", "surgery"))
        teacher = find_stage(context, config.teacher, ("teacher", "prepared"))
        student = check_projectable(context.model, source.config)
        plan = self._plan(context, student)
        stages = context.directory / "stages"
        store = Store(
            stages / "projection",
            {
                "options": to_plain(config),
                "student": to_plain(student.config),
                "source": source.digest,
                "teacher": teacher.digest,
                "tokens": [_digest(plan.calibration), _digest(plan.held_out)],
            },
        )
        projection = SequentialProjection(source, teacher, plan, store)

        embedding = self._fill_ends(student, projection)
        errors = self._blocks(context, student, projection, embedding)
        if not isinstance(student.head, TiedHead):
            errors += self._head(context, student, projection)

        medians = {
            f"{which}_error": _median(errors, which)
            for which in ("calibration", "held_out", "rounding")
        }
        report = {
            "options": to_plain(config),
            "source": _stage(source),
            "teacher": _stage(teacher),
            "medians": medians,
            "linears": errors,
        }
        save_json(stages / "projection.json", report)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in medians.items())
        context.note(f"projection: {shown}")
        if context.evaluation_shape is None:
            context.evaluation_shape = (max(1, _EVALUATED // config.block_size), config.block_size)
        context.mark_progress()
        context.save_checkpoint()
        store.remove()
        return PhaseResult(steps=0, metrics=medians)

    def state_dict(self) -> dict[str, Any]:
        """Return how many blocks are in the metrics file; finished blocks are on disk."""
        return {"recorded": self._recorded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what is on disk when the phase runs."""
        self._recorded = state["recorded"]

    def _plan(self, context: TrainingContext, student: Decoder) -> Plan:
        config = self.config
        calibration = calibration_tokens(
            context,
            tokens=config.calibration_tokens,
            block_size=config.block_size,
            seed=context.seed if config.seed is None else config.seed,
        )
        held_out = held_out_tokens(
            context, tokens=config.held_out_tokens, block_size=config.block_size
        )
        return Plan(
            config=config,
            grouping=student.config.group_size,
            activations=student.config.activations,
            calibration=calibration,
            held_out=held_out[:, : config.block_size],
        )

    def _fill_ends(self, student: Decoder, projection: SequentialProjection) -> Tensor | None:
        """Fill embedding and final norm; return a ternary embedding as float32."""
        ends = projection.source.ends()
        rounded = {}
        if not isinstance(student.embedding, nn.Embedding):
            rounded = {"embedding": projection.embedding(ends["embedding"])}
        tensors = {name: ends[name] for name in ("embedding", "final_norm")}
        fill(student, tensors, rounded, residue=self.config.residue)
        return rounded["embedding"].dense() if rounded else None

    def _blocks(
        self,
        context: TrainingContext,
        student: Decoder,
        projection: SequentialProjection,
        embedding: Tensor | None,
    ) -> list[dict[str, Any]]:
        """Round the blocks that are not finished, and return the errors of all linears."""
        store = projection.store
        layers = len(student.blocks)
        # The file of errors is the last that a block writes.
        done = sum(_errors_file(number) in store for number in range(layers))
        if done == 0:
            projection.start(embedding)
        reporter = context.logbook.reporter
        reporter.start(self.name, layers, done)
        errors: list[dict[str, Any]] = []
        for number, block in enumerate(student.blocks):
            if number < done:
                block.load_state_dict(store.tensors(_block_file(number)))
                found = store.json(_errors_file(number))["linears"]
            else:
                found = self._block(number, block, projection)
                worst = max(found, key=lambda error: error["held_out"])
                numbers = {
                    "held_out_error": _median(found, "held_out"),
                    f"of {worst['name']}": worst["held_out"],
                }
                reporter.step(number + 1, numbers, True)
            errors += found
            if number >= self._recorded:
                context.record("projection", {"block": number, "errors": found})
                self._recorded = number + 1
                context.mark_progress()
            context.stop_if_requested()
        reporter.stop()
        return errors

    def _block(
        self, number: int, block: nn.Module, projection: SequentialProjection
    ) -> list[dict[str, Any]]:
        """Round a block, and keep it and the errors of its linears."""
        store = projection.store
        name = f"blocks.{number}."
        projection.keep_only(number)
        rounded, found = projection.block(number)
        weights = projection.source.block_weights(number)
        fill(block, weights, rounded, residue=self.config.residue)
        # Sorted by key, as they are after a resumption, which reads them from the file.
        errors = [dict(sorted(error.to_json(name).items())) for error in found]
        store.write_tensors(_block_file(number), block.state_dict())
        store.write_json(_errors_file(number), {"linears": errors})
        return errors

    def _head(
        self, context: TrainingContext, student: Decoder, projection: SequentialProjection
    ) -> list[dict[str, Any]]:
        """Fill the head, which is ternary or float; return the error of a ternary one."""
        ends = projection.source.ends()
        weight = ends.get("head", ends["embedding"])
        if "head" in student.config.float_parts:
            fill(student, {"head": weight}, {}, residue=False)
            return []
        gains = (ends["final_norm"], projection.teacher.ends()["final_norm"])
        rounded, error = projection.head(weight, gains)
        fill(student, {"head": weight}, {"head": rounded}, residue=self.config.residue)
        context.note(f"head: error {error.held_out:.4f} on held-out tokens")
        return [error.to_json()]


def _block_file(number: int) -> str:
    return f"block-{number:05d}.safetensors"


def _errors_file(number: int) -> str:
    return f"errors-{number:05d}.json"


def _median(errors: list[dict[str, Any]], which: str) -> float:
    return float(statistics.median(error[which] for error in errors))


def _stage(model: FloatModel) -> dict[str, str]:
    return {"stage": model.path.name, "digest": model.digest}


def _digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.contiguous().numpy().data).hexdigest()
