"""Names and summaries of the built-in strategies."""

from __future__ import annotations

from typing import Final

STRATEGIES: Final = {
    "configured": "the optimizer, rates and clipping of the config, as they stand",
    "conservative_adamw": "for unsteady runs: AdamW with a long memory, half the rate, "
    "global clipping",
    "aggressive_adamw": "for faster progress: AdamW with a short memory, twice the rate, "
    "hardly any clipping",
    "sgd_escape": "to leave a plateau or a sharp minimum: SGD with momentum; votes at four times "
    "the rate, clipped",
    "spike_resistant": "for unstable training and after a rollback: a quarter of the rate, "
    "hard clipping",
    "lion_conservative": "steps of one size, for any gradient: Lion at half its usual rate; "
    "clipped votes",
    "conservative_votes": "half the rate of votes; float parameters keep their rule, a little "
    "slower",
    "aggressive_votes": "twice the rate of votes; float parameters keep their rule, a little "
    "faster",
}
