"""The check ``eval``: tasks of lm-evaluation-harness that teacher and student answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from attrs import define

from arb_ternary.errors import DataError
from arb_ternary_text.data.tokenizers import attached_tokenizer
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.capabilities import attachments
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.protocols import CheckResult
from arb_ternary_train.seeding import preserved_global_rng
from arb_ternary_train.task_results import find_evaluate_tasks
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import EvalConfig
from arb_ternary_upcycle.verification.pair import open_pair
from arb_ternary_upcycle.verification.questions import write_tasks
from arb_ternary_upcycle.verification.reports import judge

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define(eq=False)
class EvalCheck:
    """Has both models answer the same tasks, one model after the other."""

    config: EvalConfig

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``; the report has the results of each task."""
        config = self.config
        evaluate_tasks = find_evaluate_tasks("check eval")
        pair = open_pair(context, config.teacher)
        data = context.data
        tokenizer = attached_tokenizer(attachments(data), f"data {data.name}")
        with TemporaryDirectory() as folder, preserved_global_rng(context.device):
            tasks = [name.strip() for name in config.tasks.split(",")]
            include = config.include
            questions = Path(config.tasks)
            if questions.suffix == ".jsonl" or questions.is_file():
                tasks = write_tasks(questions, Path(folder))
                include = Path(folder)

            def results_of(model: Decoder) -> dict[str, Any]:
                with evaluation_mode(model):
                    found = evaluate_tasks(
                        model,
                        tasks,
                        tokenizer=tokenizer,
                        include=include,
                        limit=config.limit,
                        device=str(context.device),
                    )
                return dict(found["tasks"])

            teacher = results_of(pair.teacher.decoder().to(context.device))
            student = results_of(pair.student)

        teacher_accuracy, _ = _accuracy(teacher)
        student_accuracy, count = _accuracy(student)
        drop = teacher_accuracy - student_accuracy
        judged = [
            *judge(
                "student accuracy", student_accuracy, config.min_student_accuracy, at_most=False
            ),
            *judge("accuracy drop", drop, config.max_accuracy_drop),
        ]
        metrics = {
            "teacher_accuracy": teacher_accuracy,
            "student_accuracy": student_accuracy,
            "accuracy_drop": drop,
            "questions": float(count),
        }
        details = {
            "teacher": str(pair.teacher.path),
            "tasks": {"teacher": teacher, "student": student},
        }
        return conclude(context, "eval", config, judged, metrics, details)


def _accuracy(results: Mapping[str, Any]) -> tuple[float, int]:
    """Return the share of right answers in all tasks together, and how many questions there were.

    Raises:
        DataError: a task measures something else.
    """
    right = 0.0
    questions = 0
    for name, result in results.items():
        samples = result["samples"]
        if samples is None:  # a group, whose tasks are there too
            continue
        metrics = result["metrics"]
        shares = [
            value for key, value in metrics.items() if key.split(",")[0] in ("acc", "exact_match")
        ]
        if not shares:
            raise DataError(
                f"check eval: the task {name} has no share of right answers; it measures "
                f"{', '.join(metrics)}",
                "Name tasks that measure acc or exact_match.",
            )
        right += samples * shares[0]
        questions += samples
    return right / questions, questions
