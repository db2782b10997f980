"""Scores of the bandit, compared with values computed by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from arb_ternary.errors import CheckpointError
from arb_ternary_orchestrator.bandit import Bandit

NAMES = ["calm", "bold", "sgd", "lion"]


def bandit(**rewards: list[float]) -> Bandit:
    made = Bandit(NAMES)
    for name, values in rewards.items():
        for value in values:
            made.reward(name, value)
    return made


def test_score_is_mean_plus_bound() -> None:
    made = bandit(calm=[1.0, 2.0, 3.0], bold=[0.5], sgd=[-1.0, -2.0])
    # N = 6: ln 7 = 1.945910149
    assert made.score("calm") == pytest.approx(2.0 + math.sqrt(2 * 1.945910149 / 3))
    assert made.score("bold") == pytest.approx(0.5 + 1.972769702, rel=1e-8)
    assert made.score("sgd") == pytest.approx(-1.5 + 1.394959, abs=1e-6)
    assert made.score("lion") == math.inf


def test_mean_covers_the_last_twenty_rewards() -> None:
    made = bandit(calm=[100.0] * 5 + [1.0] * 10 + [2.0] * 10)
    assert made.mean("calm") == 1.5
    assert made.tried["calm"] == 25
    assert made.score("calm") == pytest.approx(1.5 + math.sqrt(2 * math.log(26) / 25))


def test_exploration_scales_the_bound() -> None:
    made = Bandit(["a", "b"], exploration=0.5)
    made.reward("a", 1.0)
    assert made.score("a") == pytest.approx(1.0 + math.sqrt(0.5 * math.log(2)))


def test_untried_strategies_come_first() -> None:
    made = bandit(calm=[1.0], bold=[3.0], sgd=[2.0])
    assert made.choose(2, "bold", {}) == ["lion", "bold"]
    made.reward("lion", 2.5)
    assert made.choose(4, "bold", {}) == ["bold", "lion", "sgd", "calm"]


def test_few_trials_outweigh_a_lower_mean() -> None:
    made = bandit(calm=[1.0] * 12, bold=[0.5])
    # N = 13: the bounds are 0.663 and 2.297
    assert made.choose(4, "calm", {})[2:] == ["bold", "calm"]


def test_current_strategy_is_always_chosen() -> None:
    made = bandit(calm=[-5.0], bold=[3.0], sgd=[2.0], lion=[2.5])
    assert made.choose(3, "calm", {}) == ["bold", "lion", "calm"]
    assert made.choose(3, "sgd", {}) == ["bold", "lion", "sgd"]
    assert made.choose(1, "calm", {}) == ["calm"]


@pytest.mark.parametrize("mean", [-20.0, -1.5, 0.0, 4.0])
def test_multiplier_raises_scores_of_either_sign(
    mean: float,
) -> None:
    made = bandit(calm=[mean], bold=[0.0])
    plain = made.score("calm")
    assert made.score("calm", 1.5) == pytest.approx(plain + 0.5 * abs(plain))
    assert made.score("calm", 0.5) == pytest.approx(plain - 0.5 * abs(plain))


def test_suitable_strategy_is_preferred() -> None:
    made = bandit(calm=[-10.0], bold=[-9.9], sgd=[-20.0], lion=[-20.0])
    assert made.choose(1, "bold", {}) == ["bold"]
    assert made.choose(2, "sgd", {})[0] == "bold"
    assert made.choose(2, "sgd", {"calm": 1.25})[0] == "calm"
    assert Bandit(NAMES).choose(2, "calm", {"sgd": 1.25})[0] == "sgd"


def test_failed_trial_counts_but_keeps_the_mean() -> None:
    made = bandit(calm=[1.0, 2.0], bold=[-3.0, -4.0])
    before = made.score("calm")
    made.fail("calm")
    assert made.mean("calm") == 1.5
    assert (made.tried["calm"], made.failed["calm"]) == (3, 1)
    assert made.score("calm") == pytest.approx(1.5 + math.sqrt(2 * math.log(6) / 3))
    assert made.score("calm") < before


def test_strategy_that_only_failed_gets_the_lowest_mean() -> None:
    made = bandit(calm=[1.0], bold=[-3.0])
    made.fail("lion")
    assert made.mean("lion") is None
    assert made.score("lion") == pytest.approx(-3.0 + math.sqrt(2 * math.log(4)))
    alone = Bandit(["lion"])
    alone.fail("lion")
    assert alone.score("lion") == pytest.approx(math.sqrt(2 * math.log(2)))


def test_generator_only_breaks_ties() -> None:
    def order(made: Bandit, seed: int) -> tuple[str, ...]:
        return tuple(made.choose(4, "calm", {}, torch.Generator().manual_seed(seed)))

    untried = Bandit(NAMES)
    orders = {order(untried, seed) for seed in range(40)}
    assert len(orders) > 10
    assert {each[0] for each in orders} == set(NAMES)
    assert order(untried, 7) == order(Bandit(NAMES), 7)
    known = bandit(calm=[1.0], bold=[2.0], sgd=[3.0], lion=[4.0])
    assert {order(known, seed) for seed in range(10)} == {("lion", "sgd", "bold", "calm")}
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    untried.choose(2, "calm", {}, generators[0])
    known.choose(3, "bold", {}, generators[1])
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


def test_state_roundtrip_and_refusal_of_other_strategies() -> None:
    first = bandit(calm=[0.1, 0.2] * 15, sgd=[1.0])
    second = Bandit(NAMES)
    first.fail("bold")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for made in (first, second):
        made.reward("calm", 0.7)
    assert first.state_dict() == second.state_dict()
    assert [first.score(name) for name in NAMES] == [second.score(name) for name in NAMES]
    with pytest.raises(CheckpointError, match="bold, calm, lion, sgd"):
        Bandit(["calm", "bold"]).load_state_dict(first.state_dict())
