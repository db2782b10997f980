"""Wrappers that all strategies of a run have in common."""

from __future__ import annotations

from typing import Any

import pytest

ADAMW = "{name: adamw}"


@pytest.mark.parametrize(
    ("options", "wrapped"),
    [
        (
            {"use_adagc": True, "adagc_warmup": 3, "adagc_threshold": 1.01},
            f"{{name: adagc, warmup: 3, threshold: 1.01, inner: {ADAMW}}}",
        ),
        pytest.param(
            {"use_nowcasting": True},
            f"{{name: nowcasting, inner: {ADAMW}}}",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adagc", "nowcasting"],
)
def test_common_wrappers_surround_float_optimizers(
    options: dict[str, Any], wrapped: str, tiny: Any, equal: Any
) -> None:
    bare = tiny.run("bare", "phases.0.steps=12")
    by_config = tiny.run(
        "config",
        "phases.0.steps=12",
        f"optimizer={{name: split, ternary: {{name: scaled_votes}}, float: {wrapped}}}",
    )
    by_policy = tiny.run("policy", "phases.0.steps=12", policy={"eval_horizon": 4, **options})
    equal(by_policy.trained, by_config.trained)
    if "use_adagc" in options:
        assert by_policy.steps != bare.steps, "nothing was clipped"
