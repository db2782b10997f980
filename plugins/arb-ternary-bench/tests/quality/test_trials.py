"""Recipes become configs: merged, checked, alike in everything that must be equal."""

from __future__ import annotations

from itertools import product

import pytest
from attrs import evolve

from arb_ternary.errors import ComponentError, ConfigError, UsageProblem
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.quality.protocol import TRIALS, Recipe, rate_for
from arb_ternary_bench.quality.sizes import SIZES, STEP_TOKENS
from arb_ternary_bench.quality.trials import final_trials, make_recipe, merged, tuning_trials

TINY = SIZES["tiny"]


@pytest.mark.parametrize(("rule", "size"), [*product(manager().registry.names("recipe"), SIZES)])
def test_every_registered_recipe_gives_valid_configs(rule, size):
    trials = tuning_trials(SIZES[size], [rule], SIZES[size].tuning_tokens)
    assert len(trials) == TRIALS
    assert len({trial.digest for trial in trials}) == TRIALS
    final_trials(SIZES[size], {rule: TRIALS - 1}, range(2), SIZES[size].tokens)


def test_rates_fall_with_the_cube_root_of_the_length():
    assert rate_for(2560, 0.1) == 0.1
    assert rate_for(320, 0.1) == 0.2
    assert rate_for(16, 0.1) == 0.25
    assert rate_for(20480, 0.1) == 0.05
    assert rate_for(4096, 0.003) == 0.00256


@pytest.mark.parametrize("rule", ["float32", "scaled_votes", "scaled_votes_pure", "bitnet"])
def test_short_trials_choose_among_the_same_multiples(rule):
    def rates(tokens):
        found = []
        for trial in tuning_trials(SIZES["small"], [rule], tokens):
            optimizer = trial.config["optimizer"]
            parts = [optimizer] if "lr" in optimizer else [optimizer["ternary"], optimizer["float"]]
            found.append([part["lr"] for part in parts])
        return found

    short = rates(256 * STEP_TOKENS)
    long = rates(2048 * STEP_TOKENS)
    for few, many in zip(short, long, strict=True):
        assert few == pytest.approx([2 * rate for rate in many], rel=5e-3)


def test_recipes_share_all_that_must_be_equal():
    rules = manager().registry.names("recipe")
    for trial in final_trials(TINY, dict.fromkeys(rules, 0), range(2), TINY.tokens):
        (phase,) = trial.config["phases"]
        assert trial.config["data"] == {
            "name": "shakespeare",
            "tokenizer": "bytes",
            "tuning": False,
        }
        assert trial.config["seed"] == trial.number
        assert trial.config["model"]["width"] == 64
        accumulated = phase.get("gradient_accumulation_steps", 1)
        # From each share of the steps on a batch is twice as large.
        ends = [int(share * phase["steps"]) for share in phase.get("batch_doublings", ())]
        batches = sum(2 ** sum(end <= step for end in ends) for step in range(phase["steps"]))
        assert batches * phase["batch_size"] * phase["block_size"] * accumulated == TINY.tokens


@pytest.mark.parametrize(("name", "weights"), [("small", 1_105_920), ("medium", 4_096_000)])
def test_the_sizes_are_what_they_are_called_for(name, weights):
    size = SIZES[name]
    # Four projections of attention, three of a gated feed-forward layer.
    assert size.layers * (4 * size.width**2 + 3 * size.width * size.feed_forward) == weights
    assert size.width % size.heads == 0


def test_merging_goes_key_by_key_and_leaves_its_arguments_alone():
    base = {"a": {"b": 1, "c": [1]}, "d": 2}
    changes = {"a": {"c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert merged(base, changes) == {"a": {"b": 1, "c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert base == {"a": {"b": 1, "c": [1]}, "d": 2}


def test_a_trial_comes_after_the_overrides(register, float_recipe):
    recipe = evolve(
        float_recipe(), trials=[{"phase": {"min_rate": rate}} for rate in (0.1, 0.2, 0.3, 0.4)]
    )
    register(
        one=lambda steps: evolve(recipe, overrides={**recipe.overrides, "phase": {"min_rate": 0.9}})
    )
    trials = tuning_trials(TINY, ["one"], STEP_TOKENS)
    assert [trial.config["phases"][0]["min_rate"] for trial in trials] == [0.1, 0.2, 0.3, 0.4]


def test_a_factory_is_told_the_steps_of_each_stage(register, float_recipe):
    told = []
    register(one=lambda steps: told.append(steps) or float_recipe())
    tuning_trials(TINY, ["one"], 4 * STEP_TOKENS)
    final_trials(TINY, {"one": 0}, range(3), 9 * STEP_TOKENS)
    assert told == [4, 9]


@pytest.mark.parametrize("count", [0, 3, 5])
def test_a_recipe_with_more_or_fewer_trials_than_the_others_is_refused(
    register, count, float_recipe
):
    register(one=lambda steps: float_recipe((1e-3,) * count))
    with pytest.raises(
        ComponentError, match=f"recipe 'one': it has {count} trials; every recipe has exactly 4"
    ):
        make_recipe("one", 1)


@pytest.mark.parametrize("section", ["seed", "data", "phases", "name", "masking"])
def test_a_recipe_cannot_change_what_must_be_equal(register, section, float_recipe):
    register(one=lambda steps: evolve(float_recipe(), overrides={section: 1}))
    with pytest.raises(ComponentError, match=f"recipe 'one': it must not change '{section}'"):
        make_recipe("one", 1)


def test_a_mistake_in_a_recipe_is_a_config_error_that_names_it(register, float_recipe):
    register(one=lambda steps: float_recipe(min_rat=0.1))
    with pytest.raises(ConfigError, match=r"recipe 'one', tuning-one-0.*min_rat.*(?s:.*)min_rate"):
        tuning_trials(TINY, ["one"], STEP_TOKENS)


def test_leaving_out_what_is_not_there_is_a_mistake(register, float_recipe):
    register(one=lambda steps: evolve(float_recipe(), without=("model.colour",)))
    with pytest.raises(ComponentError, match=r"the base config has no 'model\.colour'"):
        tuning_trials(TINY, ["one"], STEP_TOKENS)


def test_the_data_cannot_be_left_out(register, float_recipe):
    register(one=lambda steps: evolve(float_recipe(), without=("data.tuning",)))
    with pytest.raises(ComponentError, match=r"no 'data\.tuning' that a recipe may leave out"):
        tuning_trials(TINY, ["one"], STEP_TOKENS)


def test_a_factory_that_fails_or_returns_something_else_is_named(register):
    register(one=lambda steps: 1 / 0, two=lambda steps: {"trials": ()})
    with pytest.raises(ComponentError, match="recipe 'one': its factory failed: ZeroDivisionError"):
        make_recipe("one", 1)
    with pytest.raises(
        ComponentError, match="recipe 'two': its factory returned a dict, not a Recipe"
    ):
        make_recipe("two", 1)


def test_an_unknown_recipe_is_explained_by_the_registry():
    with pytest.raises(UsageProblem, match="no recipe is called 'float23'") as caught:
        make_recipe("float23", 1)
    assert "did you mean 'float32'?" in caught.value.hint


def test_trials_may_be_given_as_a_list():
    assert Recipe(overrides={}, trials=[{}, {}]).trials == ({}, {})
