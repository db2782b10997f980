"""The bench's own recipes: float32 as the bound that every rule is measured against, and plain sign
votes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Final

from arb_ternary_bench.quality.protocol import Recipe, rate_for
from arb_ternary_bench.quality.sizes import BATCH

# : Rates of scaled votes, and learning rates of the float parts beside them, for 2,560 steps. With
# the width the latter : fall sooner than the former: the last pair is for wider models.
_VOTE_RATES: Final = (0.07, 0.1, 0.14, 0.09)
_FLOAT_RATES: Final = (4e-3, 4e-3, 4e-3, 2.2e-3)

# : Options of the model: gains of all norms and factors of rows are float, beside embedding and
# head.
_FLOAT_VECTORS: Final[Mapping[str, Any]] = {
    "float_parts": ["embedding", "head", "norms"],
    "inner_gains": True,
    "row_scales": True,
}

#: Learning rates of the float parts beside sign votes, and schedules, in every combination.
_RATES: Final = (4e-3, 8e-3)
_SCHEDULES: Final = ("cosine", "linear")


def float32(steps: int) -> Recipe:
    """Every part in float32, activations included, trained by AdamW."""
    return Recipe(
        overrides={
            "model": {
                "float_parts": ["embedding", "head", "norms", "linears"],
                "activations": "float",
            },
            "optimizer": {"name": "adamw"},
        },
        trials=tuple(
            {"optimizer": {"lr": rate_for(steps, lr)}, "phase": {"lr_schedule": schedule}}
            for lr, schedule in (
                (2e-3, "cosine"),
                (4e-3, "cosine"),
                (4e-3, "linear"),
                (8e-3, "linear"),
            )
        ),
        without=("model.group_size", "model.scale_rule"),
    )


def scaled_votes(steps: int) -> Recipe:
    """The default rule."""
    return _scaled_votes(steps)


def scaled_votes_reset(steps: int) -> Recipe:
    """The default rule without the carry: an accumulator starts again in the middle of its cell."""
    return _scaled_votes(steps, ternary={"carry": False})


def scaled_votes_orthogonal(steps: int) -> Recipe:
    """The default rule with gradients of which half is orthogonalised: more time a step, as many
    bits of state.
    """
    return _scaled_votes(
        steps,
        ternary={"orthogonal": True},
        rates=(0.1, 0.14, 0.1, 0.14),
        float_rates=(4e-3, 4e-3, 5.6e-3, 5.6e-3),
    )


def scaled_votes_gains(steps: int) -> Recipe:
    """Votes of orthogonalised gradients, and float vectors by AdamW: gains of all norms, factors of
    rows.
    """
    return _scaled_votes(
        steps,
        model=_FLOAT_VECTORS,
        ternary={"orthogonal": True},
        decay=0.1,
        rates=(0.1, 0.14, 0.1, 0.14),
        float_rates=(4e-3, 4e-3, 2.8e-3, 2.8e-3),
    )


def scaled_votes_exact(steps: int) -> Recipe:
    """The default rule in integers alone: int8 gradients, and votes by shifts."""
    return _scaled_votes(steps, exact=True)


def scaled_votes_4bit(steps: int) -> Recipe:
    """The default rule with 4-bit accumulators: six bits a weight, in half as many steps of twice
    the batch.
    """
    # What is rounded away is as much in a step of any batch: fewer, larger steps lose less of it.
    halved = {"batch_size": 2 * BATCH, "steps": steps // 2} if steps % 2 == 0 else {}
    return _scaled_votes(
        steps,
        model={"vote_bits": 4},
        ternary={"carry": False},
        phase=halved,
        rates=(0.07, 0.1, 0.14, 0.2),
        float_rates=(5.6e-3,) * 4,
    )


def scaled_votes_4bit_clipped(steps: int) -> Recipe:
    """4-bit accumulators, gradients with a clipped spectrum, and a batch that doubles after half of
    the tokens.
    """
    return _four_bits_clipped(steps, {})


def scaled_votes_4bit_gains(steps: int) -> Recipe:
    """The same, and float vectors by AdamW: gains of all norms, factors of rows."""
    return _four_bits_clipped(steps, _FLOAT_VECTORS, decay=0.1)


def _four_bits_clipped(steps: int, model: Mapping[str, Any], decay: float = 0.0) -> Recipe:
    # Half of as many batches in steps of one, half in steps of two; the share is of the steps.
    doubled = {"batch_doublings": [0.66667], "steps": steps // 4 * 3} if steps % 4 == 0 else {}
    return _scaled_votes(
        steps,
        model={"vote_bits": 4, **model},
        ternary={"carry": False, "spectral_clip": True},
        phase=doubled,
        decay=decay,
        rates=(0.07, 0.1, 0.1, 0.14),
        float_rates=(4e-3, 4e-3, 5.6e-3, 5.6e-3),
    )


def scaled_votes_2bit(steps: int) -> Recipe:
    """The default rule with no accumulator: a flip is drawn from the votes of one step."""
    return _scaled_votes(
        steps, model={"vote_bits": 2}, rates=(0.005, 0.01, 0.02, 0.04), float_rates=(4e-3,) * 4
    )


def scaled_votes_pure(steps: int) -> Recipe:
    """The default rule for embedding and head too: no float parameter is left."""
    return _pure(steps, {"logit_scale": 1}, {})


def scaled_votes_pure_trits(steps: int) -> Recipe:
    """Votes of orthogonalised gradients for everything, with vectors of trits: gains of all norms,
    factors of rows.
    """
    vectors = {"learned_norms": True, "inner_gains": True, "row_scales": True, "vector_trits": 8}
    return _pure(steps, vectors, {"orthogonal": True})


def _pure(steps: int, model: Mapping[str, Any], votes: Mapping[str, Any]) -> Recipe:
    recipe = _scaled_votes(
        steps, model={"float_parts": [], "embedding_scale_rule": "frozen", **model}
    )
    return Recipe(
        overrides={**recipe.overrides, "optimizer": {"name": "scaled_votes", **votes}},
        trials=tuple(
            {"optimizer": {"lr": rate_for(steps, rate)}} for rate in (0.07, 0.1, 0.14, 0.2)
        ),
        without=("phase.grad_clip",),
    )


def _scaled_votes(
    steps: int,
    *,
    model: Mapping[str, Any] | None = None,
    ternary: Mapping[str, Any] | None = None,
    phase: Mapping[str, Any] | None = None,
    exact: bool = False,
    decay: float = 0.0,
    rates: Sequence[float] = _VOTE_RATES,
    float_rates: Sequence[float] = _FLOAT_RATES,
) -> Recipe:
    overrides: dict[str, Any] = {
        "optimizer": {
            "name": "split",
            "ternary": {"name": "scaled_votes", **(ternary or {})},
            "float": {"name": "adamw", "weight_decay": decay},
        },
        "phase": {"lr_schedule": "linear", **(phase or {})},
    }
    if model is not None:
        overrides["model"] = dict(model)
    if exact:
        overrides["exact"] = True
    trials = tuple(
        {
            "optimizer": {
                "ternary": {"lr": rate_for(steps, rate)},
                "float": {"lr": rate_for(steps, float_rate)},
            }
        }
        for rate, float_rate in zip(rates, float_rates, strict=True)
    )
    return Recipe(overrides=overrides, trials=trials)


def sign_votes_3(steps: int) -> Recipe:
    """Sign votes with a threshold of 3."""
    return _sign_votes(3)


def sign_votes_8(steps: int) -> Recipe:
    """Sign votes with a threshold of 8."""
    return _sign_votes(8)


def sign_votes_32(steps: int) -> Recipe:
    """Sign votes with a threshold of 32."""
    return _sign_votes(32)


def _sign_votes(threshold: int) -> Recipe:
    return Recipe(
        overrides={
            "optimizer": {
                "name": "split",
                "ternary": {"name": "sign_votes", "accum_threshold": threshold},
                "float": {"name": "adamw"},
            }
        },
        trials=tuple(
            {"optimizer": {"float": {"lr": lr}}, "phase": {"lr_schedule": schedule}}
            for lr, schedule in product(_RATES, _SCHEDULES)
        ),
    )


def momentum_votes(steps: int) -> Recipe:
    """Accumulators as momentum. The share of flips falls with the square of the rate, as that of
    scaled votes does.
    """
    return Recipe(
        overrides={
            "optimizer": {
                "name": "split",
                "ternary": {"name": "momentum_votes", "power": 2.0},
                "float": {"name": "adamw", "lr": 8e-3, "weight_decay": 0.0},
            },
            "phase": {"lr_schedule": "linear"},
        },
        trials=tuple(
            {"optimizer": {"ternary": {"flip_rate": flip_rate, "decay": decay}}}
            for flip_rate, decay in ((0.005, 0.05), (0.01, 0.05), (0.02, 0.05), (0.01, 0.02))
        ),
    )
