"""The study of quality: tuning chooses, finals measure, finished runs stay finished."""

from __future__ import annotations

import math
import os
import re
import signal

import pytest

from arb_ternary.errors import ArbError, ComponentError, Interrupted, UsageProblem
from arb_ternary_bench.quality.trials import STEP_TOKENS
from arb_ternary_bench.runs import choose, read_outcome
from arb_ternary_train.directory import locked

TUNING = [f"tuning-one-{number}" for number in range(4)]


def losses(function):
    return staticmethod(function)


def test_the_least_loss_is_chosen_and_the_first_of_equals():
    assert choose([2.0, 1.0, math.inf, 1.0]) == 1
    assert choose([math.inf, math.inf, 3.0, math.inf]) == 2
    assert choose([math.inf] * 4) is None


def test_a_rule_is_tuned_and_then_trained_with_every_seed(fake, run_quality, make_recipe):
    result = run_quality(make_recipe(rates=(4e-3, 1e-3, 2e-3, 8e-3)))

    assert fake.started == [*TUNING, "final-one-0", "final-one-1"]
    (rule,) = result["rules"]
    assert rule["chosen"] == 1
    assert rule["settings"] == {"optimizer": {"lr": 1e-3}}
    assert [trial["loss"] for trial in rule["tuning"]] == pytest.approx(
        [10.004, 10.001, 10.002, 10.008]
    )
    assert rule["validation_losses"] == pytest.approx([0.001, 0.011])
    assert rule["validation_loss_mean"] == pytest.approx(0.006)
    assert rule["validation_loss_stdev"] == pytest.approx(0.01 / math.sqrt(2))
    assert rule["state_bits_per_linear_weight"] == 96.0
    assert rule["stored_gradient_bytes"] == 20
    assert rule["curves"][0] == [[STEP_TOKENS, 1.001], [8 * STEP_TOKENS, 0.001]]
    assert (result["tokens"], result["tuning_tokens"]) == (8 * STEP_TOKENS, 4 * STEP_TOKENS)


def test_settings_of_the_result_are_those_of_the_final_runs(run_quality, make_recipe):
    # Tuning takes 4 steps, a final run 8; rates are for 8 and fall with the cube root.
    recipe = make_recipe(rates=(4e-3, 1e-3, 2e-3, 8e-3), rates_for=8)
    (rule,) = run_quality(recipe)["rules"]
    assert rule["settings"] == {"optimizer": {"lr": 1e-3}}
    assert rule["tuning"][rule["chosen"]]["settings"] == {"optimizer": {"lr": 1.26e-3}}


def test_tuning_holds_out_training_text_and_has_its_own_seed(run_quality, tmp_path):
    run_quality()
    for path in (tmp_path / "study" / "trials").glob("*.json"):
        outcome = read_outcome(path)
        tuning = outcome["stage"] == "tuning"
        assert outcome["config"]["data"]["tuning"] is tuning
        assert outcome["config"]["seed"] == (1000 if tuning else outcome["number"])


def test_the_recipes_take_turns(fake, run_quality, make_recipe):
    run_quality(make_recipe("one"), make_recipe("two"), rules=("two", "one"), seeds=1)
    assert fake.started[:4] == ["tuning-two-0", "tuning-one-0", "tuning-two-1", "tuning-one-1"]
    assert fake.started[8:] == ["final-two-0", "final-one-0"]


def test_finished_runs_are_not_repeated(fake, run_quality):
    first = run_quality()
    fake.started.clear()
    assert run_quality()["rules"] == first["rules"]
    assert fake.started == []
    run_quality(seeds=3)
    assert fake.started == ["final-one-2"]


def test_a_changed_recipe_repeats_what_it_changed(fake, run_quality, make_recipe):
    run_quality(make_recipe(rates=(1e-3, 2e-3, 3e-3, 4e-3)))
    fake.started.clear()
    said = []
    result = run_quality(make_recipe(rates=(1e-3, 2e-3, 5e-4, 4e-3)), said=said)
    assert result["rules"][0]["chosen"] == 2
    assert fake.started == ["tuning-one-2", "final-one-0", "final-one-1"]
    assert "one, trial 2: its config has changed since it was run; it is run again" in said


def test_checkpoints_are_removed_once_the_outcome_is_safe(run_quality, tmp_path):
    run_quality()
    assert len(list((tmp_path / "study" / "runs").glob("*/metrics.jsonl"))) == 6
    assert not list((tmp_path / "study" / "runs").glob("*/checkpoints"))


def test_a_trial_that_fails_or_diverges_is_never_chosen(fake, run_quality):
    def loss(config):
        rate = config["optimizer"]["lr"]
        if rate == 1e-3:
            raise SystemExit(1)
        return math.nan if rate == 2e-3 else rate

    fake.loss = losses(loss)
    (rule,) = run_quality()["rules"]
    assert rule["chosen"] == 2
    assert [trial["loss"] for trial in rule["tuning"]] == [None, None, 3e-3, 4e-3]
    failures = ["error: it did not work", "the loss is nan", None, None]
    assert [trial["failure"] for trial in rule["tuning"]] == failures
    fake.started.clear()
    run_quality()
    assert fake.started == []


def test_a_rule_without_a_finite_loss_does_not_stop_others(fake, run_quality, make_recipe):
    fake.loss = losses(lambda config: math.inf if config["optimizer"]["lr"] == 0.5 else 1.0)
    bad, good = run_quality(make_recipe("one", (0.5,) * 4), make_recipe("two"))["rules"]
    assert bad["chosen"] is None
    assert bad["validation_losses"] == []
    assert good["validation_losses"] == [1.0, 1.0]


def test_a_seed_that_fails_leaves_no_mean(fake, run_quality):
    fake.loss = losses(lambda config: math.nan if config["seed"] == 1 else 1.0)
    (rule,) = run_quality()["rules"]
    assert rule["validation_losses"] == [1.0, None]
    assert rule["validation_loss_mean"] is None


@pytest.mark.parametrize(
    ("code", "message"), [(2, "ended with 2"), (3, "ended with 3"), (-9, "killed by SIGKILL")]
)
def test_a_run_that_cannot_be_carried_out_stops_the_study(
    fake, run_quality, tmp_path, code, message
):
    def loss(config):
        raise SystemExit(code)

    fake.loss = losses(loss)
    with pytest.raises(ArbError, match=message) as caught:
        run_quality()
    assert "it did not work" in caught.value.hint
    assert not list((tmp_path / "study" / "trials").glob("*"))


def test_a_continued_run_that_fails_is_started_again_once(fake, run_quality, tmp_path):
    run_quality(seeds=1)
    (tmp_path / "study" / "trials" / "final-one-0.json").unlink()
    fake.started.clear()
    attempts = []

    def loss(config):
        attempts.append(config)
        if len(attempts) == 1:
            raise SystemExit(1)
        return 7.0

    fake.loss = losses(loss)
    said = []
    (rule,) = run_quality(seeds=1, said=said)["rules"]
    assert fake.started == ["final-one-0", "final-one-0"]
    assert rule["validation_losses"] == [7.0]
    assert "one, seed 0: could not be continued, and is started again" in said


def test_other_tokens_are_refused_before_anything_runs(fake, run_quality, make_recipe):
    recipe = make_recipe()
    wider = make_recipe(overrides={**recipe.overrides, "phase": {"batch_size": 32}})
    with pytest.raises(ComponentError, match=r"is 16,384 tokens, not 8,192"):
        run_quality(wider)
    assert fake.started == []


def test_a_run_on_other_tokens_than_planned_is_an_error(fake, run_quality, make_recipe):
    fake.loss = losses(lambda config: 1.0)
    fewer = {"of": 2, "take": 1, "overrides": {"phase": {"batch_size": 32, "warmup_steps": 0}}}
    with pytest.raises(ComponentError, match="trained on 4,096 tokens, not 8,192"):
        # The fake run counts steps of the base batch.
        run_quality(make_recipe(fewer_steps=fewer))
    assert fake.started == ["tuning-one-0"]


def test_another_study_in_the_same_folder_is_refused(run_quality):
    run_quality()
    message = "a study with other settings is here: size tiny, tokens 16384"
    with pytest.raises(UsageProblem, match=message):
        run_quality(tokens=9 * STEP_TOKENS)


def test_two_studies_at_once_in_one_folder_are_refused(run_quality, tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    with (
        locked(folder, UsageProblem("")),
        pytest.raises(UsageProblem, match="another process works here"),
    ):
        run_quality()


def test_fewer_tokens_than_a_step_takes_are_refused(run_quality):
    with pytest.raises(UsageProblem, match="tuning_tokens: an optimizer step alone takes 2048"):
        run_quality(tuning_tokens=STEP_TOKENS - 1)


def test_a_signal_stops_the_study_between_two_runs(fake, run_quality):
    def loss(config):
        if len(fake.started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    fake.loss = losses(loss)
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        run_quality()
    assert fake.started == TUNING[:2]
    fake.loss = losses(lambda config: 1.0)
    run_quality()
    assert fake.started == [*TUNING, "final-one-0", "final-one-1"]


def test_a_damaged_outcome_is_named(run_quality, tmp_path):
    run_quality()
    (tmp_path / "study" / "trials" / "tuning-one-1.json").write_text("{}")
    with pytest.raises(ArbError, match=re.escape("tuning-one-1.json: not the outcome of a run")):
        run_quality()


def test_messages_state_losses_and_how_many_runs_are_left(run_quality):
    said = []
    run_quality(said=said)
    assert said[0] == "one, trial 0: loss 10.0010, 1,000 tokens/s; 3 runs to go"
    assert said[4] == "one: trial 0 chosen"
    assert said[6] == "one, seed 1: loss 0.0110, 1,000 tokens/s; 0 runs to go"
