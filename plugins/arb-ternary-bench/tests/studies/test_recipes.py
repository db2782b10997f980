"""Recipes become configs: merged, checked, alike in everything that must be equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from arb_ternary.errors import ComponentError, ConfigError, UsageProblem
from arb_ternary_bench.quality.recipes import (
    TRIALS,
    chosen_recipes,
    load_recipes,
    merged,
    rate_for,
)
from arb_ternary_bench.quality.trials import SIZES, STEP_TOKENS, final_runs, tuning_runs

TINY = SIZES["tiny"]
RECIPES = load_recipes()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_recipe_gives_four_valid_configs(name, size):
    recipe = RECIPES[name]
    runs = tuning_runs(SIZES[size], [recipe], SIZES[size].tuning_tokens)
    assert len(runs) == len({run.digest for run in runs}) == TRIALS
    final_runs(SIZES[size], [(recipe, TRIALS - 1)], 2, SIZES[size].tokens)


def test_rates_fall_with_the_cube_root_of_the_length():
    assert rate_for(2560, 0.1) == 0.1
    assert rate_for(320, 0.1) == 0.2
    assert rate_for(16, 0.1) == 0.25
    assert rate_for(20480, 0.1) == 0.05
    assert rate_for(4096, 0.003) == 0.00256


@pytest.mark.parametrize("name", ["float32", "scaled_votes", "scaled_votes_pure", "bitnet"])
def test_short_trials_choose_among_the_same_multiples(name):
    def rates(tokens):
        found = []
        for run in tuning_runs(SIZES["small"], [RECIPES[name]], tokens):
            optimizer = run.config["optimizer"]
            parts = [optimizer] if "lr" in optimizer else [optimizer["ternary"], optimizer["float"]]
            found.append([part["lr"] for part in parts])
        return found

    short = rates(256 * STEP_TOKENS)
    long = rates(2048 * STEP_TOKENS)
    for few, many in zip(short, long, strict=True):
        assert few == pytest.approx([2 * rate for rate in many], rel=5e-3)


def test_recipes_share_all_that_must_be_equal():
    chosen = [(recipe, 0) for recipe in RECIPES.values()]
    for run in final_runs(TINY, chosen, 2, TINY.tokens):
        (phase,) = run.config["phases"]
        assert run.config["data"] == {"name": "shakespeare", "tokenizer": "bytes", "tuning": False}
        assert run.config["seed"] == run.labels["number"]
        assert run.config["model"]["width"] == 64
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


def test_merging_goes_key_by_key_and_keeps_its_arguments():
    base = {"a": {"b": 1, "c": [1]}, "d": 2}
    changes = {"a": {"c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert merged(base, changes) == {"a": {"b": 1, "c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert base == {"a": {"b": 1, "c": [1]}, "d": 2}


def test_a_trial_comes_after_the_overrides(make_recipe):
    recipe = make_recipe()
    recipe = make_recipe(
        overrides={**recipe.overrides, "phase": {"min_rate": 0.9}},
        trials={"phase.min_rate": [0.1, 0.2, 0.3, 0.4]},
    )
    runs = tuning_runs(TINY, [recipe], STEP_TOKENS)
    assert [run.config["phases"][0]["min_rate"] for run in runs] == [0.1, 0.2, 0.3, 0.4]


def test_fewer_steps_apply_where_they_divide_the_run():
    recipe = RECIPES["scaled_votes_4bit"]
    for steps, batch in ((8, 32), (7, 16)):
        (phase,) = tuning_runs(TINY, [recipe], steps * STEP_TOKENS)[0].config["phases"]
        assert phase["batch_size"] == batch
        assert phase["batch_size"] * phase["steps"] == 16 * steps


def test_half_of_the_steps_have_weight_decay():
    (run, *_) = tuning_runs(TINY, [RECIPES["bitnet_two_stage"]], 7 * STEP_TOKENS)
    assert run.config["optimizer"]["decay_steps"] == 4


@pytest.mark.parametrize("count", [3, 5])
def test_other_numbers_of_trials_are_refused(count, make_recipe):
    message = f"recipe 'one': it has {count} trials; every recipe has exactly 4"
    with pytest.raises(ComponentError, match=message):
        make_recipe(rates=(1e-3,) * count).check()


@pytest.mark.parametrize("section", ["seed", "data", "phases", "name", "masking"])
def test_a_recipe_cannot_change_what_must_be_equal(section, make_recipe):
    with pytest.raises(ComponentError, match=f"recipe 'one': it must not change '{section}'"):
        make_recipe(overrides={section: 1}).check()


def test_a_mistake_in_a_recipe_is_a_config_error_that_names_it(make_recipe):
    recipe = make_recipe(overrides={**make_recipe().overrides, "phase": {"min_rat": 0.1}})
    with pytest.raises(ConfigError, match=r"recipe 'one', tuning-one-0.*min_rat.*(?s:.*)min_rate"):
        tuning_runs(TINY, [recipe], STEP_TOKENS)


@pytest.mark.parametrize("path", ["model.colour", "data.tuning"])
def test_only_keys_of_the_base_config_can_be_left_out(path, make_recipe):
    message = f"the base config has no '{path}' that a recipe may leave out"
    with pytest.raises(ComponentError, match=message):
        tuning_runs(TINY, [make_recipe(without=(path,))], STEP_TOKENS)


def write(folder: Path, text: str) -> Path:
    file = folder / "recipes.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_adds_recipes_that_are_like_others(tmp_path):
    text = "leaky: {like: sign_votes_8, trials: {optimizer.ternary.leak: [16, 32, 64, 128]}}"
    recipe = load_recipes(write(tmp_path, text))["leaky"]
    runs = tuning_runs(TINY, [recipe], STEP_TOKENS)
    ternary = {"name": "sign_votes", "accum_threshold": 8, "leak": 16}
    assert runs[0].config["optimizer"]["ternary"] == ternary


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one: {like: two}", "there is no recipe 'two' for it to be like"),
        ("one: {trails: {}}", ".*unexpected keyword argument 'trails'"),
        ("one: {summary: x}", "it has no trials"),
    ],
)
def test_a_mistake_in_a_file_is_named(text, message, tmp_path):
    with pytest.raises(ComponentError, match=f"recipe 'one': {message}"):
        load_recipes(write(tmp_path, text))


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(UsageProblem, match="no recipe is called 'float23'") as caught:
        chosen_recipes(["float23"], RECIPES)
    assert "did you mean 'float32'?" in caught.value.hint
