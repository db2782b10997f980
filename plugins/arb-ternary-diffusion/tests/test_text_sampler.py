"""Drawing hidden tokens with a model that knows the truth, against enumerated distributions."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary_diffusion.text_sampler import Filling, Predict, predictor
from arb_ternary_text.models.generate import seeded_generator

#: Ids of the data, and the mask.
IDS = 3
MASK = 3
POSITIONS = 3
TEXTS = list(product(range(IDS), repeat=POSITIONS))
STATES = list(product(range(IDS + 1), repeat=POSITIONS))

#: A Markov chain in which a token is rarely followed by itself, so that neighbours must not be
#: drawn independently.
FIRST = np.array([0.5, 0.3, 0.2])
NEXT = np.array([[0.1, 0.6, 0.3], [0.7, 0.1, 0.2], [0.45, 0.45, 0.1]])
CHAIN = np.array([FIRST[a] * NEXT[a, b] * NEXT[b, c] for a, b, c in TEXTS])


def answers(state: tuple[int, ...]) -> np.ndarray:
    """Return the distribution of each token given the visible ones, ``[S, V]``."""
    agrees = np.array(
        [all(s in {MASK, t} for s, t in zip(state, text, strict=True)) for text in TEXTS]
    )
    weight = CHAIN * agrees
    table = np.zeros((POSITIONS, IDS + 1))
    for text, share in zip(TEXTS, weight / weight.sum(), strict=True):
        for place, token in enumerate(text):
            table[place, token] += share
    return table


ORACLE = {state: answers(state) for state in STATES}


def oracle(tokens: Tensor) -> Tensor:
    """Return the logits of a model that knows the chain; the mask has the largest."""
    rows = np.stack([ORACLE[tuple(row)] for row in tokens.tolist()])
    logits = np.log(np.maximum(rows, 1e-30))
    logits[..., MASK] = 50.0
    return torch.from_numpy(logits)


def ends_of_ancestral_steps(start: tuple[int, ...], steps: int) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of texts after ``steps`` equal steps of the reverse process."""
    current = {start: 1.0}
    for step in range(steps):
        time = 1 - step / steps
        after = 1 - (step + 1) / steps
        reveal = (time - after) / time
        following: dict[tuple[int, ...], float] = {}
        for state, share in current.items():
            answer = ORACLE[state]
            places = [place for place in range(POSITIONS) if state[place] == MASK]
            for chosen in product(range(IDS + 1), repeat=len(places)):
                weight = share
                new = list(state)
                for place, token in zip(places, chosen, strict=True):
                    weight *= 1 - reveal if token == MASK else reveal * answer[place, token]
                    new[place] = token
                if weight:
                    following[tuple(new)] = following.get(tuple(new), 0.0) + weight
        current = following
    return current


def drawn(
    filling: Filling, rows: int, start: tuple[int, ...] = (MASK,) * POSITIONS, seed: int = 0
) -> Tensor:
    tokens = torch.tensor([start]).repeat(rows, 1)
    return filling.fill(oracle, tokens, tokens == MASK, MASK, seeded_generator(seed))


def chi_square(texts: Tensor, expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Return the statistic and the number of texts."""
    assert abs(sum(expected.values()) - 1) < 1e-9
    seen = dict.fromkeys(expected, 0)
    for row in texts.tolist():
        seen[tuple(row)] += 1
    total = len(texts)
    return sum(
        (seen[text] - total * share) ** 2 / (total * share) for text, share in expected.items()
    ), len(expected)


def limit(freedom: int) -> float:
    """Return the value that chi-square exceeds less than once in 100,000 times.

    Wilson and Hilferty (1931), with 4.27 standard deviations.
    """
    freedom -= 1
    return freedom * (1 - 2 / (9 * freedom) + 4.27 * math.sqrt(2 / (9 * freedom))) ** 3


# --- ancestral


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_texts_have_the_distribution_of_the_reverse_process(steps: int) -> None:
    expected = ends_of_ancestral_steps((MASK,) * POSITIONS, steps)
    statistic, freedom = chi_square(drawn(Filling(steps=steps), 1500), expected)
    assert freedom == IDS**POSITIONS
    assert statistic < limit(freedom)


def test_many_steps_draw_the_data_distribution() -> None:
    chain = dict(zip(TEXTS, CHAIN.tolist(), strict=True))
    statistic, freedom = chi_square(drawn(Filling(steps=60), 1500, seed=1), chain)
    assert statistic < limit(freedom)
    statistic, _ = chi_square(drawn(Filling(steps=1), 1500, seed=1), chain)
    assert statistic > 5 * limit(freedom)


def test_gaps_are_filled_from_both_sides() -> None:
    start = (2, MASK, 1)
    expected = {(2, token, 1): ORACLE[start][1, token] for token in range(IDS)}
    statistic, freedom = chi_square(drawn(Filling(steps=4), 1000, start), expected)
    assert statistic < limit(freedom)


def test_temperature_sharpens_the_distribution() -> None:
    start = (MASK, 0, 1)
    answer = ORACLE[start][0, :IDS] ** 2
    expected = {(token, 0, 1): float(share) for token, share in enumerate(answer / answer.sum())}
    statistic, freedom = chi_square(drawn(Filling(steps=2, temperature=0.5), 1000, start), expected)
    assert statistic < limit(freedom)


def test_top_k_leaves_out_unlikely_tokens() -> None:
    start = (MASK, 0, 1)
    least = int(ORACLE[start][0, :IDS].argmin())
    tokens = drawn(Filling(steps=1, top_k=2), 300, start)[:, 0]
    assert set(tokens.tolist()) == set(range(IDS)) - {least}


# --- confidence


def test_confident_tokens_come_first_in_equal_steps() -> None:
    # Position p predicts token p % 3 with a probability that falls from left to right.
    sure = torch.linspace(0.95, 0.4, 10)
    logits = ((1 - sure) / 2).log().unsqueeze(1).repeat(1, IDS + 1)
    logits[torch.arange(10), torch.arange(10) % IDS] = sure.log()
    tokens = torch.full((1, 10), MASK)
    filling = Filling(steps=4, order="confidence", temperature=0)
    seen = [
        hidden[0].tolist()
        for _, hidden in filling.states(
            lambda _: logits.unsqueeze(0), tokens, tokens == MASK, MASK, seeded_generator(0)
        )
    ]
    assert seen == [[place >= revealed for place in range(10)] for revealed in (3, 5, 8, 10)]


def test_confidence_does_not_depend_on_temperature() -> None:
    texts = drawn(Filling(steps=3, order="confidence", temperature=0), 1)
    # By hand: in each step take the most likely token of all positions.
    state = [MASK] * POSITIONS
    for _ in range(POSITIONS):
        answer = ORACLE[tuple(state)].copy()
        answer[:, MASK] = 0
        answer[[place for place in range(POSITIONS) if state[place] != MASK]] = 0
        place, token = np.unravel_index(answer.argmax(), answer.shape)
        state[place] = int(token)
    assert texts[0].tolist() == state


# --- both


@pytest.mark.parametrize("order", ["ancestral", "confidence"])
@pytest.mark.parametrize("steps", [1, 3, 50])
def test_prompt_stays_and_no_mask_is_left(order: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, IDS, (7, 20), generator=generator)
    hidden = torch.rand(7, 20, generator=generator) < torch.linspace(0, 1, 7).unsqueeze(1)
    before = tokens.clone()
    hidden_before = hidden.clone()
    calls = []

    def uniform(seen: Tensor) -> Tensor:
        calls.append(seen)
        assert torch.equal(seen[~hidden], tokens[~hidden]), "the model sees the prompt"
        return torch.zeros(*seen.shape, IDS + 1)

    filled = Filling(steps=steps, order=order).fill(
        uniform, tokens, hidden, MASK, seeded_generator(0)
    )
    assert torch.equal(filled[~hidden], tokens[~hidden])
    assert bool((filled < IDS).all())
    assert 1 <= len(calls) <= steps
    assert torch.equal(calls[0] == MASK, hidden)
    assert torch.equal(tokens, before)
    assert torch.equal(hidden, hidden_before)


@pytest.mark.parametrize("order", ["ancestral", "confidence"])
def test_same_seed_draws_the_same_text(order: Any) -> None:
    filling = Filling(steps=3, order=order)
    assert torch.equal(drawn(filling, 50, seed=4), drawn(filling, 50, seed=4))
    assert not torch.equal(drawn(filling, 50, seed=4), drawn(filling, 50, seed=5))


def test_text_without_hidden_tokens_is_unchanged() -> None:
    tokens = torch.tensor([[0, 1, 2]])

    def never(_: Tensor) -> Tensor:
        raise AssertionError("the model was evaluated")

    for order in ("ancestral", "confidence"):
        filling = Filling(steps=3, order=order)  # type: ignore[arg-type]
        assert torch.equal(
            filling.fill(never, tokens, tokens == MASK, MASK, seeded_generator(0)), tokens
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: must be at least 1, not 0"),
        (
            {"steps": 1, "order": "confident"},
            "order: must be ancestral or confidence, not 'confident'",
        ),
        ({"steps": 1, "temperature": -1.0}, "temperature: must be a finite number"),
        ({"steps": 1, "top_p": 0.0}, "top_p: must be above 0"),
    ],
)
def test_filling_refuses_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        Filling(**options)


# --- models


class Timed(nn.Module):
    """Returns the time as logits of six ids."""

    takes_time = True

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        return time[:, None, None].expand(*tokens.shape, 6)


def test_model_with_time_gets_the_hidden_share() -> None:
    tokens = torch.tensor([[0, MASK, 1, MASK], [MASK, MASK, MASK, 2]])
    predict: Predict = predictor(Timed(), MASK, IDS + 1, torch.device("cpu"))
    logits = predict(tokens)
    assert logits.shape == (2, 4, IDS + 1), "ids that the data does not have are cut off"
    assert logits[:, 0, 0].tolist() == [0.5, 0.75]
