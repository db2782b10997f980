"""Options of the checks of a student against its teacher, and of the phase ``verify``.

Imported without torch.
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
from arb_ternary_upcycle.stage_options import TEACHER_HELP, too_long

_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_label = Rule(
    "letters, digits, dots, hyphens and underscores because it names a file",
    lambda value: _LABEL.fullmatch(value) is not None,
    {"pattern": f"^{_LABEL.pattern}$"},
)


@frozen(kw_only=True)
class CheckConfig:
    """Options of every check that compares with a teacher."""

    teacher: Path | None = option(None, TEACHER_HELP)
    fail_fast: bool = option(
        True, "a check that has not passed fails the run; false = it is only reported"
    )
    label: str | None = option(
        None,
        "name of the report, verify/LABEL.json in the run; null = the name of the check",
        validator=optional(_label),
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """Refuse two reports with the same name; see ``arb_ternary.optim.protocol.Planned``."""
        labels = []
        own = None
        for choice in _checks_of(run):
            label = choice.options.label or choice.name
            labels.append(label)
            if choice.options is self:
                own = label
        count = labels.count(own)
        if count > 1:
            yield (
                "label",
                f"{count} checks of this run write verify/{own}.json; name each: label: {own}-2",
            )


def _checks_of(run: Any) -> Iterator[Choice[CheckSpec]]:
    """Yield the checks with reports: those at the end of a run, and those of its phases."""
    choices = list(run.checks)
    for phase in run.phases:
        choices += getattr(phase.options, "checks", ())
    for choice in choices:
        if isinstance(choice.options, CheckConfig):
            yield choice


@frozen(kw_only=True)
class SampledConfig(CheckConfig):
    """Options of the checks that read held-out samples.

    Sizes that are null are those of the run's latest training loop.
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
        yield from CheckConfig.validate_in_run(self, run, planned)
        yield from too_long(run, self.block_size)


@frozen(kw_only=True)
class Limits:
    """Largest differences between teacher and student; null = any."""

    max_mean_l1: float | None = option(
        None, "largest mean of the absolute differences", validator=optional(non_negative)
    )
    max_max_l1: float | None = option(
        None, "largest absolute difference of all", validator=optional(non_negative)
    )

    def __attrs_post_init__(self) -> None:
        if self.max_mean_l1 is None and self.max_max_l1 is None:
            raise ValueError("'max_mean_l1' or 'max_max_l1' must be given")


@frozen(kw_only=True)
class CompareConfig(SampledConfig):
    """Options of the check ``compare``."""

    attention: Limits | None = option(
        None, "limits for the outputs of all attention layers; null = not compared"
    )
    logits: Limits | None = option(None, "limits for the logits; null = not compared")

    def __attrs_post_init__(self) -> None:
        if self.attention is None and self.logits is None:
            raise ValueError(
                "'attention' or 'logits' must be given, such as {max_mean_l1: 0.05, max_max_l1: "
                "0.25}"
            )


@frozen(kw_only=True)
class FidelityConfig(SampledConfig):
    """Options of the check ``fidelity``."""

    max_delta_nll: float | None = option(
        None,
        "largest loss of the student minus the teacher's, in nats per token; may be negative; null "
        "= any",
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
class EvalConfig(CheckConfig):
    """Options of the check ``eval``."""

    tasks: str = option(
        help="names of tasks of lm-evaluation-harness, separated by commas; or a file of "
        "questions, one JSON object per line: prompt, and either choices with the number of the "
        "right one as answer, or a text as answer",
    )
    include: Path | None = option(None, "folder with task files of your own; null = none")
    limit: int | None = option(
        None,
        "questions of each task, from its beginning; null = all",
        validator=optional(positive),
    )
    min_student_accuracy: float | None = option(
        None,
        "smallest share of questions that the student answers right; null = any",
        validator=optional(fraction),
    )
    max_accuracy_drop: float | None = option(
        None, "largest share of the teacher minus the student's; may be negative; null = any"
    )

    def __attrs_post_init__(self) -> None:
        if self.min_student_accuracy is None and self.max_accuracy_drop is None:
            raise ValueError(
                "'min_student_accuracy' or 'max_accuracy_drop' must be given, from 0 to 1"
            )


@frozen(kw_only=True)
class KvCacheConfig(CheckConfig):
    """Options of the check ``kvcache``."""

    min_reduction_ratio: float = option(
        help="smallest ratio of the teacher's bytes of keys and values per token to the student's",
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
