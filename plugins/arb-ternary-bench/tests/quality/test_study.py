"""A study: tuning chooses, finals measure, finished runs stay finished."""

from __future__ import annotations

import json
import math
import re

import pytest

from arb_ternary.errors import ArbError, ComponentError, Interrupted, UsageProblem
from arb_ternary_bench.quality.outcomes import read_outcome
from arb_ternary_bench.quality.sizes import STEP_TOKENS
from arb_ternary_bench.quality.study import choose, run_study
from arb_ternary_train.directory import locked

TUNING = [f"tuning-one-{number}" for number in range(4)]


def test_the_least_loss_is_chosen_and_the_first_of_equals():
    assert choose([2.0, 1.0, math.inf, 1.0]) == 1
    assert choose([math.inf, math.inf, 3.0, math.inf]) == 2
    assert choose([math.inf] * 4) is None


def test_every_rule_is_tuned_with_four_trials_and_trained_with_every_seed(
    register, fake, study, float_recipe
):
    register(one=lambda steps: float_recipe((4e-3, 1e-3, 2e-3, 8e-3)))
    result = run_study(study())

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
    assert json.loads((study().folder / "result.json").read_text()) == json.loads(
        json.dumps(result)
    )
    for name in ("table.md", "loss.png", "frontier.png"):
        assert (study().folder / name).exists()


def test_the_settings_of_the_result_are_those_of_the_final_runs(
    register, fake, study, float_recipe
):
    # Tuning takes 4 steps, a final run 8.
    register(
        one=lambda steps: float_recipe([rate * 4 / steps for rate in (4e-3, 1e-3, 2e-3, 8e-3)])
    )
    (rule,) = run_study(study())["rules"]
    assert rule["settings"] == {"optimizer": {"lr": 5e-4}}
    assert rule["tuning"][rule["chosen"]]["settings"] == {"optimizer": {"lr": 1e-3}}


def test_tuning_holds_out_training_text_under_a_seed_of_its_own(
    register, fake, study, float_recipe
):
    register(one=lambda steps: float_recipe())
    run_study(study())

    for path in (study().folder / "trials").glob("*.json"):
        outcome = read_outcome(path)
        assert outcome["config"]["data"]["tuning"] is (outcome["stage"] == "tuning")
        assert outcome["config"]["seed"] == (
            1000 if outcome["stage"] == "tuning" else outcome["number"]
        )


def test_the_recipes_take_turns(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe(), two=lambda steps: float_recipe())
    run_study(study(rules=("two", "one"), seeds=1))

    assert fake.started[:4] == ["tuning-two-0", "tuning-one-0", "tuning-two-1", "tuning-one-1"]
    assert fake.started[8:] == ["final-two-0", "final-one-0"]


def test_finished_runs_are_not_repeated(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe())
    first = run_study(study())
    fake.started.clear()

    assert run_study(study())["rules"] == first["rules"]
    assert fake.started == []
    run_study(study(seeds=3))
    assert fake.started == ["final-one-2"]


def test_a_changed_recipe_runs_again_what_it_changed_and_says_so(
    register, fake, study, float_recipe
):
    rates = [1e-3, 2e-3, 3e-3, 4e-3]
    register(one=lambda steps: float_recipe(rates))
    run_study(study())
    fake.started.clear()
    rates[2] = 5e-4
    said = []

    assert run_study(study(), said.append)["rules"][0]["chosen"] == 2
    assert fake.started == ["tuning-one-2", "final-one-0", "final-one-1"]
    assert "one, trial 2: its config has changed since it was run; it is run again" in said


def test_checkpoints_go_once_the_outcome_is_safe(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe())
    run_study(study())

    assert len(list((study().folder / "runs").glob("*/metrics.jsonl"))) == 6
    assert not list((study().folder / "runs").glob("*/checkpoints"))


def test_a_trial_that_fails_or_diverges_has_no_loss_and_is_never_chosen(
    register, fake, study, monkeypatch, float_recipe
):
    def loss(config):
        rate = config["optimizer"]["lr"]
        if rate == 1e-3:
            raise SystemExit(1)
        return math.nan if rate == 2e-3 else rate

    register(one=lambda steps: float_recipe())
    monkeypatch.setattr(fake, "loss", staticmethod(loss))
    (rule,) = run_study(study())["rules"]

    assert rule["chosen"] == 2
    assert [trial["loss"] for trial in rule["tuning"]] == [None, None, 3e-3, 4e-3]
    assert [trial["failure"] for trial in rule["tuning"]] == [
        "error: it did not work",
        "the loss is nan",
        None,
        None,
    ]
    fake.started.clear()
    run_study(study())
    assert fake.started == []


def test_a_rule_without_a_finite_loss_is_reported_and_the_others_go_on(
    register, fake, study, monkeypatch, float_recipe
):
    register(one=lambda steps: float_recipe((0.5,) * 4), two=lambda steps: float_recipe())
    monkeypatch.setattr(
        fake,
        "loss",
        staticmethod(lambda config: math.inf if config["optimizer"]["lr"] == 0.5 else 1.0),
    )
    bad, good = run_study(study(rules=("one", "two")))["rules"]

    assert bad["chosen"] is None
    assert bad["validation_losses"] == []
    assert good["validation_losses"] == [1.0, 1.0]
    assert "| one | failed |" in (study().folder / "table.md").read_text()


def test_a_seed_that_fails_leaves_no_mean(register, fake, study, monkeypatch, float_recipe):
    register(one=lambda steps: float_recipe())
    monkeypatch.setattr(
        fake, "loss", staticmethod(lambda config: math.nan if config["seed"] == 1 else 1.0)
    )
    (rule,) = run_study(study())["rules"]

    assert rule["validation_losses"] == [1.0, None]
    assert rule["validation_loss_mean"] is None


@pytest.mark.parametrize(
    ("code", "message"), [(2, "ended with 2"), (3, "ended with 3"), (-9, "killed by SIGKILL")]
)
def test_a_run_that_could_not_be_carried_out_stops_the_study(
    register, fake, study, monkeypatch, code, message, float_recipe
):
    def loss(config):
        raise SystemExit(code)

    register(one=lambda steps: float_recipe())
    monkeypatch.setattr(fake, "loss", staticmethod(loss))
    with pytest.raises(ArbError, match=message) as caught:
        run_study(study())
    assert "it did not work" in caught.value.hint
    assert not list((study().folder / "trials").glob("*"))


def test_a_continued_run_that_fails_is_started_again_once(
    register, fake, study, monkeypatch, float_recipe
):
    register(one=lambda steps: float_recipe())
    run_study(study(seeds=1))
    (study().folder / "trials" / "final-one-0.json").unlink()
    fake.started.clear()
    attempts = []

    def loss(config):
        attempts.append(config)
        if len(attempts) == 1:
            raise SystemExit(1)
        return 7.0

    monkeypatch.setattr(fake, "loss", staticmethod(loss))
    said = []
    (rule,) = run_study(study(seeds=1), said.append)["rules"]

    assert fake.started == ["final-one-0", "final-one-0"]
    assert rule["validation_losses"] == [7.0]
    assert "one, seed 0: could not be continued, and is started again" in said


def test_a_recipe_that_trains_on_other_tokens_is_refused_before_anything_runs(
    register, fake, study, float_recipe
):
    register(one=lambda steps: float_recipe(batch_size=32))
    with pytest.raises(ComponentError, match=r"is 16,384 tokens, not 8,192"):
        run_study(study())
    assert fake.started == []


def test_a_recipe_may_trade_steps_for_a_larger_batch(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe(batch_size=32, steps=steps // 2, warmup_steps=0))
    fake.loss = staticmethod(lambda config: 1.0)
    with pytest.raises(ComponentError, match="trained on 4,096 tokens, not 8,192"):
        run_study(study())  # the fake run counts steps of the base batch
    assert fake.started == ["tuning-one-0"]


def test_another_study_in_the_same_folder_is_refused(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe())
    run_study(study())
    with pytest.raises(
        UsageProblem, match="a study with other settings is here: size tiny, tokens 16384"
    ):
        run_study(study(tokens=9 * STEP_TOKENS))


def test_two_studies_at_once_in_one_folder_are_refused(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe())
    study().folder.mkdir()
    with (
        locked(study().folder, UsageProblem("")),
        pytest.raises(UsageProblem, match="another study is at work here"),
    ):
        run_study(study())


def test_fewer_tokens_than_a_step_takes_are_refused(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe())
    with pytest.raises(
        UsageProblem, match="--tuning-tokens: an optimizer step alone takes 2048 tokens"
    ):
        run_study(study(tuning_tokens=STEP_TOKENS - 1))


def test_a_signal_stops_the_study_between_two_runs(
    register, fake, study, monkeypatch, float_recipe
):
    import os
    import signal

    def loss(config):
        if len(fake.started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    register(one=lambda steps: float_recipe())
    monkeypatch.setattr(fake, "loss", staticmethod(loss))
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        run_study(study())
    assert fake.started == TUNING[:2]
    monkeypatch.setattr(fake, "loss", staticmethod(lambda config: 1.0))
    run_study(study())
    assert fake.started == [*TUNING, "final-one-0", "final-one-1"]


def test_a_damaged_outcome_is_named(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe())
    run_study(study())
    (study().folder / "trials" / "tuning-one-1.json").write_text("{}")
    with pytest.raises(ArbError, match=re.escape("tuning-one-1.json: not the outcome of a trial")):
        run_study(study())


def test_messages_tell_the_losses_and_what_is_left(register, fake, study, float_recipe):
    register(one=lambda steps: float_recipe())
    said = []
    run_study(study(), said.append)

    assert said[0].startswith("one, trial 0: loss 10.0010, 1,000 tokens/s; 5 runs to go, about ")
    assert said[4] == "one: trial 0 chosen"
    assert said[6].startswith("one, seed 1: loss 0.0110, 1,000 tokens/s; 0 runs to go")
