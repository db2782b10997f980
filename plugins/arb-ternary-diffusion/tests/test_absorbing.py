"""The masking strategy ``absorbing`` against the enumerated loss of models of any order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_diffusion.absorbing import AbsorbingMasking
from arb_ternary_diffusion.absorbing_config import AbsorbingConfig
from arb_ternary_testing import MaskingSuite
from arb_ternary_train.loading import load_config

HIDINGS = ("count", "independent")
#: Number of ids of the data in the small examples, and the mask.
IDS = 3
MASK = 3


class TestCount(MaskingSuite):
    component = "absorbing"


class TestIndependent(MaskingSuite):
    component = "absorbing"
    options: Mapping[str, Any] = {"hiding": "independent", "mask_token_id": 2}


def masked(tokens: Any, *, seed: int = 0, hiding: Any = "count", **changes: Any) -> MaskedBatch:
    """Apply the strategy to rows of tokens."""
    rows = torch.as_tensor(tokens)
    batch = Batch(torch.cat((rows, rows[:, :1]), dim=1), torch.arange(len(rows)))
    context = MaskContext(step=0, seed=5, vocabulary_size=IDS + 1)
    strategy = AbsorbingMasking(AbsorbingConfig(hiding=hiding, **changes))
    return strategy.apply(batch, torch.Generator().manual_seed(seed), context)


# --- hiding


def test_counts_of_hidden_positions_are_evenly_spaced() -> None:
    for seed in range(5):
        made = masked(torch.zeros(12, 12, dtype=torch.int64), seed=seed)
        counts = (made.inputs == MASK).sum(dim=1)
        assert sorted(counts.tolist()) == list(range(1, 13))
        assert torch.equal(made.times, (counts / 12).float()), (
            "times are the shares of hidden positions"
        )


def test_independent_hiding_follows_the_time() -> None:
    made = masked(torch.zeros(40, 5000, dtype=torch.int64), hiding="independent")
    share = (made.inputs == MASK).float().mean(dim=1)
    assert made.times is not None
    # One standard deviation of a share of 5000 is at most 0.5 / sqrt(5000) = 0.0071.
    assert float((share - made.times).abs().max()) < 5 * 0.0071
    assert np.allclose(np.diff(np.sort(made.times.numpy())), 1 / 40, atol=1e-6), (
        "times are spread evenly"
    )


@pytest.mark.parametrize("hiding", HIDINGS)
def test_times_and_hidden_positions_are_uniform(hiding: str) -> None:
    counts = np.zeros(4)
    hidden = np.zeros((4, 4))
    for seed in range(400):
        made = masked(torch.zeros(4, 4, dtype=torch.int64), seed=seed, hiding=hiding)
        assert made.times is not None
        counts[int(made.times[2] * 4 - 1e-6)] += 1
        hidden += (made.inputs == MASK).numpy()
    # Chi-square with 3 degrees of freedom exceeds 21.1 once in 10,000 times.
    assert ((counts - 100) ** 2 / 100).sum() < 21.1
    # The hidden share is uniform. Its mean is 1/2 if positions are independent, and 5/8 if at least
    # one of four is hidden.
    mean = {"count": 5 / 8, "independent": 1 / 2}[hiding]
    assert np.abs(hidden / 400 - mean).max() < 5 * 0.5 / np.sqrt(400)


def test_only_hidden_tokens_change() -> None:
    tokens = torch.randint(0, IDS, (6, 20), generator=torch.Generator().manual_seed(1))
    made = masked(tokens)
    assert torch.equal(made.targets, tokens)
    assert bool(made.loss_mask.all())
    hidden = made.inputs == MASK
    assert torch.equal(made.inputs[~hidden], tokens[~hidden])


def test_mask_token_in_the_data_is_refused() -> None:
    with pytest.raises(DataError, match="token id 3 at position 1 is the mask token") as caught:
        masked([[0, 3, 1]])
    assert "with_mask_token" in caught.value.hint


def test_mask_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="mask_token_id: 9 is outside the vocabulary of 4 ids"):
        masked([[0, 1]], mask_token_id=9)


# --- the loss


def table_of(seed: int, positions: int) -> np.ndarray:
    """Return random predictions ``[state, position, id]`` for :func:`state_of`."""
    logits = np.random.default_rng(seed).normal(0, 1.5, ((IDS + 1) ** positions, positions, IDS))
    return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)


def state_of(tokens: Any) -> Any:
    """Return the state of tokens ``[..., S]``: a number in base ``IDS + 1``."""
    tokens = np.asarray(tokens)
    return tokens @ (IDS + 1) ** np.arange(tokens.shape[-1])


def any_order(row: tuple[int, ...], table: np.ndarray) -> float:
    """Return the mean over all orders of the negative log-likelihood of writing ``row``."""
    total = 0.0
    orders = list(permutations(range(len(row))))
    for order in orders:
        seen = [MASK] * len(row)
        for place in order:
            total -= np.log(table[state_of(seen), place, row[place]])
            seen[place] = row[place]
    return total / len(orders)


@pytest.mark.parametrize("hiding", HIDINGS)
def test_expected_loss_is_that_of_any_order(hiding: str) -> None:
    row = (2, 0, 1, 1)
    rows = 40_000
    table = table_of(3, len(row))
    made = masked([row] * rows, hiding=hiding)
    # The mask itself gets most of the probability, which must not count.
    logits = torch.from_numpy(np.log(table[state_of(made.inputs)]))
    logits = torch.cat((logits, torch.full((*logits.shape[:2], 1), 7.0)), dim=-1)
    losses = AbsorbingMasking().losses(logits, made)
    assert losses.shape == (rows * len(row),)
    assert losses.dtype == torch.float32
    sums = losses.view(rows, len(row)).sum(dim=1).double()
    # Rows with evenly spaced times vary less than independent rows, for which this is 5 sigma.
    assert abs(float(sums.mean()) - any_order(row, table)) < 5 * float(sums.std()) / rows**0.5


def test_loss_matches_computation_by_hand() -> None:
    targets = torch.tensor([[0, 1, 2], [2, 2, 0]])
    inputs = torch.tensor([[0, MASK, 2], [MASK, 2, MASK]])
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(2))
    made = MaskedBatch(
        inputs, targets, torch.ones(2, 3, dtype=torch.bool), torch.tensor([1 / 3, 2 / 3])
    )
    losses = AbsorbingMasking().losses(logits, made).view(2, 3)
    # The model has one id more than the data: 4.
    allowed = np.delete(logits.double().numpy(), MASK, axis=2)
    entropy = np.log(np.exp(allowed).sum(axis=2))[..., None] - allowed
    expected = np.zeros((2, 3))
    expected[0, 1] = 3 * entropy[0, 1, 1]
    expected[1, 0] = 1.5 * entropy[1, 0, 2]
    expected[1, 2] = 1.5 * entropy[1, 2, 0]
    assert np.allclose(losses.numpy(), expected, rtol=1e-5)


def test_visible_tokens_and_the_mask_have_no_gradient() -> None:
    made = masked([[0, 1, 2, 0, 1, 2]], seed=4)
    logits = torch.randn(
        1, 6, IDS + 1, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    AbsorbingMasking().losses(logits, made).sum().backward()
    assert logits.grad is not None
    hidden = (made.inputs == MASK)[0]
    assert 0 < int(hidden.sum()) < 6
    assert bool((logits.grad[0, ~hidden] == 0).all())
    assert bool((logits.grad[0, hidden][:, :IDS] != 0).all())
    assert bool((logits.grad[..., MASK] == 0).all())


def test_batch_without_hidden_tokens_has_loss_0() -> None:
    targets = torch.tensor([[0, 1]])
    made = MaskedBatch(targets, targets, torch.ones(1, 2, dtype=torch.bool), torch.tensor([0.001]))
    assert AbsorbingMasking().losses(torch.zeros(1, 2, 4), made).tolist() == [0.0, 0.0]


def test_counts_have_the_smaller_second_moment() -> None:
    row = (2, 0, 1, 1)
    table = table_of(3, len(row))
    spread = {}
    for hiding in HIDINGS:
        made = masked([row] * 20_000, hiding=hiding)
        logits = torch.from_numpy(np.log(table[state_of(made.inputs)]))
        logits = torch.cat((logits, torch.zeros(*logits.shape[:2], 1)), dim=-1)
        spread[hiding] = float(AbsorbingMasking().losses(logits, made).view(-1, 4).sum(dim=1).std())
    assert spread["count"] < 0.7 * spread["independent"]


# --- configs


def test_config_refuses_causal_models_and_characters(
    tmp_path: Any,
) -> None:
    text = """
name: causal
data: shakespeare
model: {name: decoder, width: 32, layers: 1, heads: 4, max_length: 32}
masking: absorbing
optimizer: scaled_votes
phases: [{name: standard, steps: 1, batch_size: 2, block_size: 32}]
"""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="masking: predicts tokens from both sides"):
        load_config(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(
        text.replace("max_length: 32", "max_length: 32, causal: false")
    )
    assert load_config(tmp_path / "config.yaml").config.masking.name == "absorbing"
    characters = text.replace(
        "data: shakespeare", "data: {name: shakespeare, tokenizer: characters}"
    )
    (tmp_path / "config.yaml").write_text(
        characters.replace("max_length: 32", "max_length: 32, causal: false")
    )
    with pytest.raises(ConfigError, match="masking: needs an id that the text does not use"):
        load_config(tmp_path / "config.yaml")
