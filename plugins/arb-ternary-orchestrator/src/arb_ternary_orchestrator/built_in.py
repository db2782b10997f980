"""Names and summaries of what the plugin registers, for its hooks and for its components."""

from __future__ import annotations

from typing import Final

STRATEGIES: Final = {
    "configured": "the optimizer, rates and clipping of the config, as they stand",
    "conservative_adamw": "steadies a run that wavers: AdamW with a long memory, half the rate, "
    "global clipping",
    "aggressive_adamw": "faster while all is well: AdamW with a short memory, twice the rate, "
    "hardly any clipping",
    "sgd_escape": "off a plateau or out of a sharp minimum: SGD with momentum; votes at four times "
    "the rate, clipped",
    "spike_resistant": "through an unstable stretch and after a rollback: a quarter of the rate, "
    "hard clipping",
    "lion_conservative": "steps of one size, whatever the gradient: Lion at half its usual rate; "
    "clipped votes",
    "conservative_votes": "half the rate of votes; float parameters keep their rule, a little "
    "slower",
    "aggressive_votes": "twice the rate of votes; float parameters keep their rule, a little "
    "faster",
}
