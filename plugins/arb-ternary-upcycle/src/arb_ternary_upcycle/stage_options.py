"""Options of the phases that make stages. Imported without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from attrs import frozen
from attrs.validators import in_, instance_of, optional

from arb_ternary.config.fields import without_effect
from arb_ternary.config.options import non_negative, option, positive
from arb_ternary_text.models.config import DecoderConfig

FloatDtype = Literal["float32", "bfloat16"]
Policy = Literal["svd", "random", "fresh"]


@frozen(kw_only=True)
class LoadTeacherConfig:
    """Options of the phase ``load_teacher``."""

    no_training: ClassVar[bool] = True

    teacher: str = option(
        help="a run directory or checkpoint, a folder of transformers, a GGUF file, or "
        "hf://org/name"
    )
    dtype: FloatDtype = option(
        "float32", "what its weights are kept in, on disk: float32 or bfloat16"
    )
    max_nll: float | None = option(
        None,
        "highest loss on held-out text, nats a token; null = what the frequencies of its tokens "
        "give",
        validator=optional(positive),
    )
    max_perplexity: float | None = option(
        None,
        "highest perplexity on held-out text; null = no limit beside max_nll",
        validator=optional(positive),
    )
    probe_tokens: int = option(
        2048, "held-out tokens of that test; 0 = no test", validator=non_negative
    )


@frozen(kw_only=True)
class FoldRotateConfig:
    """Options of the phase ``fold_rotate``."""

    no_training: ClassVar[bool] = True

    fold: bool = option(
        True, "gains of norms go into the linears behind them", validator=instance_of(bool)
    )
    rotate: bool = option(
        True, "the residual stream turns by a random orthogonal matrix", validator=instance_of(bool)
    )
    rotate_values: bool = option(True, "so does each value head", validator=instance_of(bool))
    seed: int | None = option(None, "chooses the rotations; null = the run's seed")

    def __attrs_post_init__(self) -> None:
        if self.rotate and not self.fold:
            raise ValueError(
                "'rotate' needs 'fold': a gain in a norm does not commute with a rotation"
            )
        if not (self.fold or self.rotate_values):
            raise ValueError(
                "'fold' and 'rotate_values' are both false, and nothing is left to do; leave the "
                "phase out"
            )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        del planned
        if self.fold and getattr(run.model.options, "tied", False):
            yield (
                "fold",
                "gives the head weights of its own, and the model has 'tie_embeddings'; set that "
                "to false",
            )
        if (
            self.rotate_values
            and not self.fold
            and getattr(run.model.options, "has_sub_norms", False)
        ):
            yield (
                "rotate_values",
                "needs 'fold', for the gain of a sub-norm stands between values and output",
            )
        if not (self.rotate or self.rotate_values):
            yield from without_effect(self, "nothing is rotated", "seed")


@frozen(kw_only=True)
class SurgeryConfig:
    """Options of the phase ``surgery``."""

    no_training: ClassVar[bool] = True

    policy: Policy = option(
        "svd",
        "queries and keys: svd = the teacher's in fewer features, random = drawn, fresh = drawn, "
        "values and output too",
        validator=in_(("svd", "random", "fresh")),
    )
    calibration_tokens: int = option(
        4096, "training tokens that planes and bases are chosen by", validator=positive
    )
    block_size: int = option(256, "tokens of a sample of them", validator=positive)
    ridge: float = option(
        1e-3,
        "pull of the constants of dropped planes towards 1, as a share of the pairs' moments",
        validator=positive,
    )
    seed: int | None = option(None, "chooses samples and what is drawn; null = the run's seed")
    probe_tokens: int = option(
        2048,
        "held-out tokens on which the loss is compared with the teacher's; 0 = none",
        validator=non_negative,
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        del planned
        model = run.model.options
        if not isinstance(model, DecoderConfig):
            return
        if model.attention != "decoupled":
            yield (
                "",
                "'surgery' makes decoupled attention; set 'attention': decoupled in the model, or "
                "leave it out",
            )
            return
        if self.policy != "svd":
            reason = f"'policy': {self.policy} looks at no text"
            yield from without_effect(self, reason, "calibration_tokens", "block_size", "ridge")
            return
        head_dim = model.value_features
        if (model.geo_dim or 0) > head_dim:
            yield (
                "",
                f"'geo_dim' is {model.geo_dim}, and a head has {head_dim} features to keep; use "
                f"{head_dim} or less",
            )
        if model.rotary_features != head_dim:
            text = (
                f"'rotary_dim' must be that of the teacher's heads, {head_dim}, for its "
                f"frequencies to stay"
            )
            yield "", f"{text}; it is {model.rotary_features}"
        if model.tie_query_key:
            yield (
                "policy",
                "svd finds other keys than queries, and the model has 'tie_query_key'; use random "
                "or fresh",
            )
        if self.block_size > model.max_length:
            yield (
                "block_size",
                f"{self.block_size} exceeds the context of the model: max_length is "
                f"{model.max_length}",
            )
