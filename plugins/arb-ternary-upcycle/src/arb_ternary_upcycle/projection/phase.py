"""The phase ``projection``: the weights of the newest stage become the trits of the run's model."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arb_ternary.config.fields import to_plain
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import TiedHead
from arb_ternary_train.directory import write_json
from arb_ternary_upcycle.calibration import calibration_tokens, held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.projection.config import ProjectionConfig
from arb_ternary_upcycle.projection.filling import check_projectable, fill
from arb_ternary_upcycle.projection.rounded import Rounded
from arb_ternary_upcycle.projection.sequential import Plan, SequentialProjection
from arb_ternary_upcycle.projection.solve import Recipe
from arb_ternary_upcycle.projection.workspace import Workspace
from arb_ternary_upcycle.stages import find_stage

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext

#: Predictions in a batch of the evaluation at the end, where no training loop has said how many.
_EVALUATED = 2048


class ProjectionPhase:
    """Rounds embedding, blocks and head, in this order; see
    :mod:`arb_ternary_upcycle.projection.sequential`.

    What has been done lies in ``RUN/stages/projection``, with what it was made from: a run that is
    resumed, or started anew after a kill, goes on after the last whole block, and ends with the
    same bits. The folder is removed at the end; ``RUN/stages/projection.json`` keeps the errors.
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
        seed = context.seed if config.seed is None else config.seed
        sizes = {"block_size": config.block_size}
        plan = Plan(
            recipe=Recipe(
                policy=config.policy,
                grouping=student.config.group_size,
                damping=config.damping,
                activation_order=config.activation_order,
                descent_passes=config.descent_passes,
            ),
            correction=config.correction,
            activations=student.config.activations,
            calibration=calibration_tokens(
                context, tokens=config.calibration_tokens, seed=seed, **sizes
            ),
            held_out=held_out_tokens(context, tokens=config.held_out_tokens, **sizes)[
                :, : config.block_size
            ],
        )
        stages = context.directory / "stages"
        work = Workspace(
            stages / "projection",
            {
                "options": to_plain(config),
                "student": to_plain(student.config),
                "source": source.digest,
                "teacher": teacher.digest,
                "tokens": [_digest(plan.calibration), _digest(plan.held_out)],
            },
        )
        projection = SequentialProjection(source, teacher, plan, work.folder)
        ends = source.ends()
        embedding = (
            {}
            if isinstance(student.embedding, torch.nn.Embedding)
            else _embedding(projection, ends)
        )
        fill(
            student,
            {"embedding": ends["embedding"], "final_norm": ends["final_norm"]},
            embedding,
            residue=config.residue,
        )
        if work.done < 0:
            projection.start(embedding["embedding"].dense() if embedding else None)
            work.started()
        self._blocks(context, student, projection, work)
        errors = [error for block in work.errors for error in block]
        if not isinstance(student.head, TiedHead):
            errors += self._head(student, projection, ends, context)
        metrics = _summary(errors)
        stages.mkdir(exist_ok=True)
        write_json(stages / "projection.json", _report(config, source, teacher, errors, metrics))
        context.note(
            f"projection: {', '.join(f'{name} {value:.4f}' for name, value in metrics.items())}"
        )
        if context.evaluation_shape is None:
            context.evaluation_shape = (max(1, _EVALUATED // config.block_size), config.block_size)
        context.mark_progress()
        context.save_checkpoint()
        work.remove()
        return PhaseResult(steps=0, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """How many blocks the metrics file has; what has been done is on disk."""
        return {"recorded": self._recorded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what is on disk when the phase is run."""
        self._recorded = state["recorded"]

    def _blocks(
        self,
        context: TrainingContext,
        student: Decoder,
        projection: SequentialProjection,
        work: Workspace,
    ) -> None:
        layers = len(student.blocks)
        reporter = context.logbook.reporter
        reporter.start(self.name, layers, work.done)
        for number in range(layers):
            block = student.blocks[number]
            name = f"blocks.{number}."
            if number < work.done:
                block.load_state_dict(work.block(number))
                errors = work.errors[number]
            else:
                projection.forget(number)
                rounded, found = projection.block(number)
                fill(block, projection.source.weights(name), rounded, residue=self.config.residue)
                errors = [error.to_json(name) for error in found]
                work.finished(number, block.state_dict(), errors)
                worst = max(errors, key=lambda error: error["held_out"])
                numbers = {
                    "held_out_error": _median(errors, "held_out"),
                    "of " + worst["name"]: worst["held_out"],
                }
                reporter.step(number + 1, numbers, True)
            if number >= self._recorded:
                context.record(
                    "projection",
                    {"block": number, "errors": [dict(sorted(each.items())) for each in errors]},
                )
                self._recorded = number + 1
                context.mark_progress()
            context.stop_if_requested()
        reporter.stop()

    def _head(
        self,
        student: Decoder,
        projection: SequentialProjection,
        ends: Mapping[str, Tensor],
        context: TrainingContext,
    ) -> list[dict[str, Any]]:
        """Fill the head, which is ternary or float; the errors of a ternary one."""
        weight = ends.get("head", ends["embedding"])
        if "head" in student.config.float_parts:
            fill(student, {"head": weight}, {}, residue=False)
            return []
        gains = (ends["final_norm"], projection.teacher.ends()["final_norm"])
        rounded, error = projection.head(weight, gains)
        fill(student, {"head": weight}, {"head": rounded}, residue=self.config.residue)
        context.note(f"head: error {error.held_out:.4f} on held-out tokens")
        return [error.to_json()]


def _embedding(projection: SequentialProjection, ends: Mapping[str, Tensor]) -> dict[str, Rounded]:
    return {"embedding": projection.embedding(ends["embedding"])}


def _median(errors: list[dict[str, Any]], which: str) -> float:
    return float(statistics.median(error[which] for error in errors))


def _summary(errors: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{which}_error": _median(errors, which)
        for which in ("calibration", "held_out", "rounding")
    }


def _report(
    config: ProjectionConfig,
    source: FloatModel,
    teacher: FloatModel,
    errors: list[dict[str, Any]],
    medians: dict[str, float],
) -> dict[str, Any]:
    return {
        "options": to_plain(config),
        "source": {"stage": source.path.name, "digest": source.digest},
        "teacher": {"stage": teacher.path.name, "digest": teacher.digest},
        "medians": medians,
        "linears": errors,
    }


def _digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.contiguous().numpy().data).hexdigest()


def build(config: ProjectionConfig) -> ProjectionPhase:
    """The factory that the phase registers."""
    return ProjectionPhase(config)
