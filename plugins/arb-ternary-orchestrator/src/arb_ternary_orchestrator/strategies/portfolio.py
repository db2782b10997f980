"""The built-in strategies; what they are for is in ``built_in``, and what they do in a table of
docs/how-to/orchestrate.md.
"""

from __future__ import annotations

from typing import Any

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary_orchestrator.strategies.strategy import RATES, Strategy
from arb_ternary_orchestrator.strategies.transform import (
    LeafChange,
    chosen,
    with_options,
    wrap_floats,
)


def _rule(name: str, **options: Any) -> LeafChange:
    """Return the change to the rule ``name``: it replaces another known rule, or gets ``options``
    if it is configured already.

    The rate is the configured one, and rate times decay stays the same.
    """

    def change(leaf: OptimizerChoice) -> OptimizerChoice:
        if leaf.name == name:
            return with_options(leaf, **options)
        if leaf.name not in RATES:
            return leaf
        decay = getattr(leaf.options, "weight_decay", 0.0) * RATES[leaf.name] / RATES[name]
        if name == "sgd":  # its decay is part of the gradients that momentum sums up
            decay *= 1.0 - options["momentum"]
        return chosen(name, lr=_rate(leaf), weight_decay=decay, **options)

    return change


def _clipped(leaf: OptimizerChoice) -> OptimizerChoice:
    """Return AdamW with gradients clipped per parameter; an unknown rule is clipped too."""
    return wrap_floats(_rule("adamw", beta1=0.9, beta2=0.999)(leaf), "adagc", max_norm=0.25)


def _rate(leaf: OptimizerChoice) -> float:
    return float(getattr(leaf.options, "lr", None) or leaf.options.adam_lr)


def _narrow(leaf: OptimizerChoice) -> OptimizerChoice:
    """Return scaled votes clipped at one standard deviation, or lower if so configured.

    Apart from the rate, it was the only setting of votes that made training steadier; other rules
    follow the rate alone.
    """
    if leaf.name != "scaled_votes":
        return leaf
    return with_options(leaf, clip=min(leaf.options.clip, 1.0))


configured = Strategy(name="configured")
conservative_adamw = Strategy(
    name="conservative_adamw",
    suits=("early", "unstable"),
    float_rate=0.5,
    ternary_rate=0.5,
    grad_clip=1.0,
    float_leaf=_rule("adamw", beta1=0.9, beta2=0.999),
)
aggressive_adamw = Strategy(
    name="aggressive_adamw",
    suits=("converging",),
    float_rate=2.0,
    ternary_rate=2.0,
    grad_clip=10.0,
    float_leaf=_rule("adamw", beta1=0.9, beta2=0.9),
)
sgd_escape = Strategy(
    name="sgd_escape",
    suits=("plateau", "late"),
    ternary_rate=4.0,
    grad_clip=1.0,
    float_leaf=_rule("sgd", momentum=0.9),
    ternary_leaf=_narrow,
)
spike_resistant = Strategy(
    name="spike_resistant",
    suits=("unstable",),
    float_rate=0.25,
    ternary_rate=0.25,
    float_leaf=_clipped,
    ternary_leaf=_narrow,
)
lion_conservative = Strategy(
    name="lion_conservative",
    float_rate=0.5,
    grad_clip=1.0,
    float_leaf=_rule("lion", beta1=0.9, beta2=0.99),
    ternary_leaf=_narrow,
)
conservative_votes = Strategy(
    name="conservative_votes",
    suits=("early", "unstable"),
    float_rate=0.7,
    ternary_rate=0.5,
)
aggressive_votes = Strategy(
    name="aggressive_votes",
    suits=("converging",),
    float_rate=1.4,
    ternary_rate=2.0,
)
