"""The check ``eval``: questions that teacher and student answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_text.data.tokenizers import Tokenizer, from_json
from arb_ternary_train.protocols import Attachments, CheckResult
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import EvalConfig
from arb_ternary_upcycle.verification.pair import open_pair
from arb_ternary_upcycle.verification.questions import answer, built_in_questions, read_questions
from arb_ternary_upcycle.verification.reports import Findings, Judgement

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class EvalCheck:
    """Has both models answer the same questions; ``drop`` is the teacher's accuracy less the
    student's.
    """

    def __init__(self, config: EvalConfig) -> None:
        self.config = config

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``; the report has what each chose."""
        config = self.config
        questions = built_in_questions() if config.tasks is None else read_questions(config.tasks)
        pair = open_pair(context, config.teacher)
        configs = [pair.teacher.model.config, pair.student.model.config]
        if not all(each.causal for each in configs):
            raise ConfigError(
                "eval: the model is not causal, and its logits tell nothing of the token that "
                "follows"
            )
        longest = min(each.max_length for each in configs)
        answers = answer(
            pair, _tokenizer(context), questions, batch_size=config.batch_size, longest=longest
        )
        teacher, student = (each.accuracy for each in answers)
        metrics = {
            "teacher_accuracy": teacher,
            "student_accuracy": student,
            "accuracy_drop": teacher - student,
            "questions": float(len(questions)),
        }
        judged = []
        if config.min_student_accuracy is not None:
            judged.append(
                Judgement("student accuracy", student, config.min_student_accuracy, at_most=False)
            )
        if config.max_accuracy_drop is not None:
            judged.append(
                Judgement("accuracy drop", metrics["accuracy_drop"], config.max_accuracy_drop)
            )
        said = [
            {
                "where": question.where,
                "right": question.right,
                "teacher": chosen[0],
                "student": chosen[1],
            }
            for question, *chosen in zip(
                questions, answers[0].chosen, answers[1].chosen, strict=True
            )
        ]
        details: dict[str, Any] = {"teacher": str(pair.teacher.model.path), "answers": said}
        return conclude(
            context, "eval", config, Findings(judged=judged, metrics=metrics, details=details)
        )


def _tokenizer(context: TrainingContext) -> Tokenizer:
    data = context.data
    found = data.attachments().get("tokenizer") if isinstance(data, Attachments) else None
    if found is None:
        raise DataError(
            f"data {data.name}: it has no tokenizer to read questions with",
            "Use `data: {name: text, ...}`.",
        )
    return from_json(found)


def build(config: EvalConfig) -> EvalCheck:
    """Factory of the check ``eval``."""
    return EvalCheck(config)
