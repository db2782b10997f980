"""Options of the checks of a student beside its teacher, and of the phase ``verify``. Imported
without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

from attrs import frozen

from arb_ternary.config.choice import Choice
from arb_ternary.config.options import Rule, fraction, non_negative, option, optional, positive
from arb_ternary.specs import CheckSpec

TEACHER_HELP: Final = (
    "folder of a float model, or a run directory with one; null = the run's own, the newest of "
    "prepared and teacher"
)

_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_label = Rule(
    "letters, digits, dots, hyphens and underscores, for it names a file",
    lambda value: _LABEL.fullmatch(value) is not None,
    {"pattern": f"^{_LABEL.pattern}$"},
)


@frozen(kw_only=True)
class _CheckConfig:
    """What every check has that compares with a teacher."""

    teacher: Path | None = option(None, TEACHER_HELP)
    fail_fast: bool = option(
        True, "a check that has not passed fails the run; false = it is only reported"
    )
    label: str | None = option(
        None,
        "name of the report, verify/LABEL.json in the run; null = the check's own",
        validator=optional(_label),
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``: two reports in one file are a fault."""
        names = [choice.options.label or choice.name for choice in _checks_of(run)]
        own = next(
            (n for n, choice in zip(names, _checks_of(run), strict=True) if choice.options is self),
            None,
        )
        if own is not None and names.count(own) > 1:
            yield (
                "label",
                f"{names.count(own)} checks of this run write verify/{own}.json; name each: label: "
                f"{own}-2",
            )


def _checks_of(run: Any) -> list[Choice[CheckSpec]]:
    """The checks with reports of a run: those of its end, and those of its phases."""
    nested = [choice for phase in run.phases for choice in getattr(phase.options, "checks", ())]
    return [choice for choice in (*run.checks, *nested) if isinstance(choice.options, _CheckConfig)]


def held_out_contradictions(run: Any, block_size: int | None) -> Iterator[tuple[str, str]]:
    """Option and what is wrong with it, where samples of ``block_size`` do not fit the model."""
    longest = getattr(run.model.options, "max_length", None)
    if block_size is not None and longest is not None and block_size > longest:
        yield (
            "block_size",
            f"{block_size} exceeds the context of the model: max_length is {longest}",
        )


@frozen(kw_only=True)
class SampledConfig(_CheckConfig):
    """What the checks have that read held-out samples; ``null`` sizes are those of the run's latest
    training loop.
    """

    batches: int = option(
        5, "batches of held-out samples, spread over all of them", validator=positive
    )
    batch_size: int | None = option(
        None, "samples in a batch; null = as the run evaluates", validator=optional(positive)
    )
    block_size: int | None = option(
        None,
        "predictions in a sample, in tokens; null = as the run evaluates",
        validator=optional(positive),
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        yield from _CheckConfig.validate_in_run(self, run, planned)
        yield from held_out_contradictions(run, self.block_size)


@frozen(kw_only=True)
class Limits:
    """How far numbers of teacher and student may be apart; null = any distance."""

    max_mean_l1: float | None = option(
        None, "largest mean of the absolute differences", validator=optional(non_negative)
    )
    max_max_l1: float | None = option(
        None, "largest absolute difference of all", validator=optional(non_negative)
    )

    def __attrs_post_init__(self) -> None:
        if self.max_mean_l1 is None and self.max_max_l1 is None:
            raise ValueError(
                "'max_mean_l1' or 'max_max_l1' must be given: without a limit there is nothing to "
                "judge"
            )


@frozen(kw_only=True)
class CompareConfig(SampledConfig):
    """Options of the check ``compare``."""

    attention: Limits | None = option(
        None, "limits of what the attention layers give, over all of them; null = not compared"
    )
    logits: Limits | None = option(None, "limits of the logits; null = not compared")

    def __attrs_post_init__(self) -> None:
        if self.attention is None and self.logits is None:
            raise ValueError(
                "'attention' or 'logits' must be given: {max_mean_l1: 0.05, max_max_l1: 0.25}"
            )


@frozen(kw_only=True)
class FidelityConfig(SampledConfig):
    """Options of the check ``fidelity``."""

    max_delta_nll: float | None = option(
        None,
        "largest loss of the student less the teacher's, nats a token; may be negative; null = any",
    )
    max_ppl_ratio: float | None = option(
        None,
        "largest perplexity of the student over the teacher's; null = any",
        validator=optional(positive),
    )

    def __attrs_post_init__(self) -> None:
        if self.max_delta_nll is None and self.max_ppl_ratio is None:
            raise ValueError(
                "'max_delta_nll' or 'max_ppl_ratio' must be given, such as max_ppl_ratio: 1.05"
            )


@frozen(kw_only=True)
class EvalConfig(_CheckConfig):
    """Options of the check ``eval``."""

    tasks: Path | None = option(
        None,
        "file of questions, one JSON object a line: prompt, and choices with the number of the "
        "right one as answer, or answer alone, a text; null = 48 questions about the built-in text",
    )
    min_student_accuracy: float | None = option(
        None,
        "smallest share of questions that the student answers rightly; null = any",
        validator=optional(fraction),
    )
    max_accuracy_drop: float | None = option(
        None, "largest share of the teacher less the student's; may be negative; null = any"
    )
    batch_size: int = option(8, "texts in a pass", validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.min_student_accuracy is None and self.max_accuracy_drop is None:
            raise ValueError(
                "'min_student_accuracy' or 'max_accuracy_drop' must be given, from 0 to 1"
            )


@frozen(kw_only=True)
class KvCacheConfig(_CheckConfig):
    """Options of the check ``kvcache``."""

    min_reduction_ratio: float = option(
        help="smallest number of bytes of keys and values a token of the teacher over those of the "
        "student",
        validator=positive,
    )


@frozen(kw_only=True)
class VerifyConfig:
    """Options of the phase ``verify``."""

    no_training: ClassVar[bool] = True

    checks: tuple[Choice[CheckSpec], ...] = option(
        help="checks in the order in which they are made, as in the run's own checks"
    )

    def __attrs_post_init__(self) -> None:
        if not self.checks:
            raise ValueError(
                "'checks' must have at least one entry, such as {name: fidelity, max_ppl_ratio: "
                "1.5}"
            )
