"""Strategies change the configured optimizer at any depth, and never build one."""

from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import UsageProblem
from arb_ternary_orchestrator.built_in import STRATEGIES
from arb_ternary_orchestrator.strategies import (
    Strategy,
    chosen,
    effect,
    find_strategy,
    with_options,
    wrap_floats,
)
from arb_ternary_orchestrator.strategies.lookup import strategies_of
from arb_ternary_testing.component import make_choice


def optimizer(name: str, **options: Any) -> Any:
    return make_choice("optimizer", name, options)


def plain(choice: Any) -> Any:
    return to_plain(choice, given=False)


def test_every_leaf_of_split_is_changed_by_its_kind() -> None:
    strategy = Strategy(
        name="x",
        summary="x",
        float_leaf=lambda leaf: with_options(leaf, beta2=0.5),
        ternary_leaf=lambda leaf: with_options(leaf, clip=1.25),
    )
    configured = optimizer(
        "split", ternary={"name": "scaled_votes", "leak": 0.5}, float={"name": "adamw", "lr": 0.25}
    )
    changed = strategy.optimizer(configured)
    assert changed.name == "split"
    ternary = changed.options.ternary
    floats = changed.options.float
    assert (ternary.options.clip, ternary.options.leak, ternary.given) == (
        1.25,
        0.5,
        {"leak", "clip"},
    )
    assert (floats.options.beta2, floats.options.lr, floats.given) == (0.5, 0.25, {"lr", "beta2"})
    # The configured choice is not changed.
    assert (configured.options.ternary.options.clip, configured.options.float.options.beta2) == (
        2.5,
        0.95,
    )


def test_leaves_are_found_in_wrappers_and_lists() -> None:
    strategy = Strategy(
        name="x", summary="x", ternary_leaf=lambda leaf: with_options(leaf, clip=1.25)
    )
    votes = {"name": "scaled_votes"}
    assert strategy.optimizer(optimizer("scaled_votes")).options.clip == 1.25
    wrapped = strategy.optimizer(
        optimizer("gqc.gnts", threshold=3.0, inner={"name": "split", "ternary": votes})
    )
    assert (wrapped.name, wrapped.options.threshold) == ("gqc.gnts", 3.0)
    assert wrapped.options.inner.options.ternary.options.clip == 1.25
    parts = strategy.optimizer(optimizer("split", ternary={"name": "gqc.gnts", "inner": votes}))
    assert parts.options.ternary.options.inner.options.clip == 1.25
    nest = strategy.optimizer(
        optimizer("nest", eggs=[votes, {"name": "gqc.gnts", "inner": votes}], twigs=4)
    )
    assert nest.options.twigs == 4
    assert (
        nest.options.eggs[0].options.clip == nest.options.eggs[1].options.inner.options.clip == 1.25
    )


def test_configured_changes_nothing() -> None:
    configured = find_strategy("configured")
    given = optimizer("gqc.gnts", inner={"name": "split"})
    assert configured.optimizer(given) is given
    adjustment = configured.adjustment(given)
    assert (adjustment.float_rate, adjustment.ternary_rate, adjustment.grad_clip) == (
        1.0,
        1.0,
        "configured",
    )


def test_replaced_rules_keep_rate_and_decay() -> None:
    configured = optimizer("adamw", lr=0.01, weight_decay=0.05, beta1=0.5)
    lion = find_strategy("lion_conservative")
    after = lion.optimizer(configured)
    assert (after.name, after.options.lr) == ("lion", 0.01)
    factor = lion.adjustment(configured).float_rate
    assert factor == pytest.approx(0.5 * 0.3)
    assert factor * after.options.weight_decay == pytest.approx(0.5 * 0.05)
    # The other way round.
    back = find_strategy("conservative_adamw")
    assert back.optimizer(after).name == "adamw"
    assert back.optimizer(after).options.weight_decay == pytest.approx(0.05)
    assert back.adjustment(after).float_rate == pytest.approx(0.5 / 0.3)
    assert back.adjustment(configured).float_rate == 0.5
    # A rule that is configured already keeps its other options.
    stays = back.optimizer(configured)
    assert (stays.options.lr, stays.options.weight_decay, stays.options.beta1) == (0.01, 0.05, 0.9)


def test_unknown_rules_only_follow_the_rates() -> None:
    strategy = find_strategy("conservative_adamw")
    configured = optimizer("split", ternary={"name": "bird_votes"}, float={"name": "bird_floats"})
    assert strategy.optimizer(configured) is configured
    adjustment = strategy.adjustment(configured)
    assert (adjustment.float_rate, adjustment.ternary_rate) == (0.5, 0.5)
    lion = find_strategy("lion_conservative")
    assert lion.optimizer(configured) is configured
    both = optimizer("signgsd")
    assert lion.optimizer(both) is both


def test_clipping_stays_for_deferring_optimizers() -> None:
    strategy = find_strategy("conservative_adamw")
    inner = {"name": "adamw"}
    assert strategy.adjustment(optimizer("adamw")).grad_clip == 1.0
    assert strategy.adjustment(optimizer("gqc.gnts", inner=inner)).grad_clip == "configured"
    assert strategy.adjustment(optimizer("gqc.gnr", inner=inner)).grad_clip == 1.0
    split = optimizer("split", float={"name": "gqc.gnts", "inner": inner})
    assert strategy.adjustment(split).grad_clip == "configured"
    # The same if the strategy defers.
    summing = Strategy(
        name="summing",
        summary="",
        grad_clip=1.0,
        float_leaf=lambda leaf: wrap_floats(leaf, "gqc.gnts", threshold=2.0),
    )
    assert summing.adjustment(optimizer("adamw")).grad_clip == "configured"


def test_float_leaves_are_wrapped_once() -> None:
    configured = optimizer(
        "gqc.gnts", inner={"name": "split", "float": {"name": "adamw", "lr": 0.25}}
    )
    wrapped = wrap_floats(configured, "gqc.gnr", target_norm=2.0)
    inside = wrapped.options.inner.options.float
    assert (inside.name, inside.options.target_norm, inside.options.inner.options.lr) == (
        "gqc.gnr",
        2.0,
        0.25,
    )
    assert wrapped.options.inner.options.ternary == configured.options.inner.options.ternary
    assert wrap_floats(wrapped, "gqc.gnr") == wrapped
    votes = optimizer("scaled_votes")
    assert wrap_floats(votes, "gqc.gnr") is votes
    assert wrap_floats(optimizer("adamw"), "gqc.gnr").options.inner.name == "adamw"


def test_chosen_equals_a_choice_of_a_config() -> None:
    assert plain(chosen("lion", lr=0.5)) == plain(optimizer("lion", lr=0.5))
    assert chosen("lion", lr=0.5) == optimizer("lion", lr=0.5)
    with pytest.raises(UsageProblem, match="no optimizer is called 'lyon'"):
        chosen("lyon")
    same = optimizer("lion", lr=0.5)
    assert with_options(same, lr=0.5) is same


def test_unknown_strategy_suggests_the_nearest() -> None:
    with pytest.raises(UsageProblem, match="no strategy is called 'agressive_adamw'") as error:
        find_strategy("agressive_adamw")
    assert "did you mean 'aggressive_adamw'?" in str(error.value.hint)
    assert all(name in str(error.value.hint) for name in (*STRATEGIES, "soar", "dive"))


def test_third_party_strategy() -> None:
    soar = find_strategy("soar")
    assert soar.optimizer(optimizer("bird_floats")).options.lr == 7.0
    assert soar.adjustment(optimizer("bird_votes")).ternary_rate == 3.0
    with pytest.raises(Exception, match="birds:dive is no Strategy of this name"):
        find_strategy("dive")


def test_effect_depends_on_the_trained_parts() -> None:
    conservative = find_strategy("conservative_adamw")
    votes = find_strategy("conservative_votes")
    mixed = optimizer("split")
    configured = find_strategy("configured")
    assert effect(conservative, mixed, {"ternary"}) == effect(votes, mixed, {"ternary"})
    assert effect(conservative, mixed, {"ternary", "float"}) != effect(
        votes, mixed, {"ternary", "float"}
    )
    pure = optimizer("scaled_votes")
    assert effect(conservative, pure, {"ternary"}) == effect(votes, pure, {"ternary"})
    only_clip = Strategy(name="x", summary="x", grad_clip=0.5, float_rate=3.0)
    assert effect(only_clip, pure, {"ternary"}) == effect(configured, pure, {"ternary"})
    assert effect(only_clip, mixed, {"ternary", "float"}) != effect(
        configured, mixed, {"ternary", "float"}
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("split", {"ternary", "float"}), ("scaled_votes", {"ternary"}), ("adamw", {"float"})],
)
def test_applicable_strategies_differ(name: str, kinds: set[str]) -> None:
    configured = optimizer(name)
    first = [find_strategy(each) for each in STRATEGIES]
    found = strategies_of("configured", "configured", None, configured, kinds)
    assert found[0].name == "configured"
    effects = [effect(each, configured, kinds) for each in found]
    assert all(one not in effects[:index] for index, one in enumerate(effects))
    assert all(effect(each, configured, kinds) in effects for each in first)
    assert len(found) >= 5
