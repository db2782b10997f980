"""Options of the phases that make stages. Imported without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal

from attrs import frozen

from arb_ternary.config.options import (
    LARGEST_INT64,
    Condition,
    non_negative,
    option,
    optional,
    positive,
    when,
)
from arb_ternary_text.models.config import DecoderConfig

FloatDtype = Literal["float32", "bfloat16"]
Policy = Literal["svd", "random", "fresh"]

#: Help of the option ``teacher`` of phases and checks that compare with a teacher.
TEACHER_HELP: Final = (
    "folder of a float model, or a run directory with one; null = the run's own, the newest of "
    "prepared and teacher"
)


def too_long(run: Any, block_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield the option ``block_size`` and what is wrong with it, if it exceeds the context."""
    longest = getattr(run.model.options, "max_length", None)
    if block_size is not None and longest is not None and block_size > longest:
        yield (
            "block_size",
            f"{block_size} exceeds the context of the model: max_length is {longest}",
        )


@frozen(kw_only=True)
class LoadTeacherConfig:
    """Options of the phase ``load_teacher``."""

    no_training: ClassVar[bool] = True

    teacher: str = option(
        help="a run directory or checkpoint, a folder of transformers, a GGUF file, or "
        "hf://org/name"
    )
    dtype: FloatDtype = option(
        "float32", "number format of its weights on disk: float32 or bfloat16"
    )
    max_nll: float | None = option(
        None,
        "highest loss on held-out text, in nats per token; null = the loss that the frequencies "
        "of its tokens give",
        validator=optional(positive),
    )
    max_perplexity: float | None = option(
        None,
        "highest perplexity on held-out text; null = no limit besides max_nll",
        validator=optional(positive),
    )
    probe_tokens: int = option(
        2048, "held-out tokens of that test; 0 = no test", validator=non_negative
    )


_ROTATES: Final = Condition(
    lambda options, run, plan: options.rotate or options.rotate_values, "nothing is rotated"
)


@frozen(kw_only=True)
class FoldRotateConfig:
    """Options of the phase ``fold_rotate``."""

    no_training: ClassVar[bool] = True

    fold: bool = option(
        True,
        "multiply the gains of norms into the linears that read them",
    )
    rotate: bool = option(
        True,
        "rotate the residual stream by a random orthogonal matrix",
    )
    rotate_values: bool = option(True, "rotate each value head by one, too")
    seed: int | None = option(
        None,
        "seed of the rotations; null = the run's seed",
        validator=optional(non_negative),
        active_when=_ROTATES,
        largest=LARGEST_INT64,
    )

    def __attrs_post_init__(self) -> None:
        if self.rotate and not self.fold:
            raise ValueError(
                "'rotate' needs 'fold': a gain in a norm does not commute with a rotation"
            )
        if not (self.fold or self.rotate_values):
            raise ValueError(
                "'fold' and 'rotate_values' are both false, so there is nothing to do; leave the "
                "phase out"
            )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        model = run.model.options
        if self.fold and getattr(model, "tied", False):
            yield (
                "fold",
                "gives the head weights of its own, and the model has 'tie_embeddings'; set that "
                "to false",
            )
        if self.rotate_values and not self.fold and getattr(model, "has_sub_norms", False):
            yield (
                "rotate_values",
                "needs 'fold' because the gain of a sub-norm stands between values and output",
            )


_FITS: Final = when("policy", "svd")


@frozen(kw_only=True)
class SurgeryConfig:
    """Options of the phase ``surgery``."""

    no_training: ClassVar[bool] = True

    policy: Policy = option(
        "svd",
        "queries and keys: svd = the teacher's in fewer features; random = drawn at random; fresh "
        "= drawn at random, values and output too",
    )
    calibration_tokens: int = option(
        4096,
        "training tokens that planes and bases are chosen by",
        validator=positive,
        active_when=_FITS,
    )
    block_size: int = option(
        256, "tokens per sample of them", validator=positive, active_when=_FITS
    )
    ridge: float = option(
        1e-3,
        "pull of the constants of dropped planes towards 1, as a share of the pairs' moments",
        validator=positive,
        active_when=_FITS,
    )
    seed: int | None = option(
        None,
        "seed of the samples and of what is drawn; null = the run's seed",
        validator=optional(non_negative),
        largest=LARGEST_INT64,
    )
    probe_tokens: int = option(
        2048,
        "held-out tokens on which the loss is compared with the teacher's; 0 = none",
        validator=non_negative,
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        model = run.model.options
        if not isinstance(model, DecoderConfig):
            return
        if model.attention != "decoupled":
            yield (
                "",
                "'surgery' makes decoupled attention; set 'attention': decoupled in the model, or "
                "leave the phase out",
            )
            return
        if self.policy != "svd":
            return
        head_dim = model.value_features
        if (model.geo_dim or 0) > head_dim:
            yield (
                "",
                f"'geo_dim' is {model.geo_dim}, but a head has {head_dim} features to keep; use "
                f"{head_dim} or less",
            )
        if model.rotary_features != head_dim:
            yield (
                "",
                f"'rotary_dim' must be that of the teacher's heads, {head_dim}, so that kept "
                f"planes turn at their frequencies; it is {model.rotary_features}",
            )
        if model.tie_query_key:
            yield (
                "policy",
                "svd finds keys that differ from queries, but the model has 'tie_query_key'; use "
                "random or fresh",
            )
        yield from too_long(run, self.block_size)
