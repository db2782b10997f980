"""Options of the masking strategy ``absorbing``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from attrs import frozen

from arb_ternary.config.options import non_negative, option, optional

Hiding = Literal["count", "independent"]


@frozen(kw_only=True)
class AbsorbingConfig:
    """Options of the strategy ``absorbing``."""

    hides_tokens: ClassVar[bool] = True

    mask_token_id: int | None = option(
        None,
        "id that stands for a hidden token, which the data must not use; null = the last id of the "
        "vocabulary",
        validator=optional(non_negative),
    )
    hiding: Hiding = option(
        "count",
        "how many of S tokens are hidden at time t: count = exactly ceil(S t), independent = each "
        "with probability t; the expected loss is the same, its variance is smaller with count",
    )

    def validate_in_run(self, run: Any, planned: Any) -> Iterator[tuple[str, str]]:
        """See ``arb_ternary.optim.protocol.Planned``."""
        if getattr(run.model.options, "causal", False):
            yield (
                "",
                "predicts tokens from both sides, and the model sees only the tokens before; set "
                "causal: false in model",
            )
        if getattr(run.data.options, "tokenizer", None) == "characters":
            yield (
                "",
                "needs an id that the text does not use, and tokenizer: characters has only the "
                "characters of the text; use data: {name: with_mask_token, source: ...} of "
                "arb-ternary-progressive, or tokenizer: bytes",
            )
