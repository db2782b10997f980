"""Votes of three levels: sums of a step in quanta, and casts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.counters.hashing import HASH_USES, MICRO, MICRO_BITS, SEED, STEP, STREAM, stream_id
from arb_ternary.errors import ConfigError
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import seed_votes
from arb_ternary_testing.restatement import counter_hash_bits
from arb_ternary_votes.levels import USE_VOTE_SUM, in_quanta
from arb_ternary_votes.scaled_votes import ScaledVotes

SEED_OF_RUN = 7


def control(step=3, micro=0):
    words = torch.zeros(4, dtype=torch.int64)
    words[SEED] = SEED_OF_RUN
    words[STEP] = step
    words[STREAM] = stream_id("layer")
    words[MICRO] = micro
    return words


def restated(sums, unit, first_row=0, step=3):
    """Return ``stochastic_round(sum * unit)`` in Python integers."""
    rows, columns = sums.shape
    stream = stream_id("layer") * HASH_USES + USE_VOTE_SUM
    result = np.zeros((rows, columns), np.int64)
    for n in range(rows):
        for k in range(columns):
            index = (first_row + n) * columns + k
            noise = counter_hash_bits(index, SEED_OF_RUN, step << MICRO_BITS, stream) >> 8
            result[n, k] = (int(sums[n, k]) * round(unit * 2**24) + noise) >> 24
    return result


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_sums_become_quanta_on_any_rows(data):
    rows = data.draw(st.integers(1, 6))
    columns = data.draw(st.integers(1, 9))
    unit = data.draw(st.floats(0, 127))
    limit = data.draw(st.sampled_from([1, 4, 127, 2**15 - 1, 2**31 - 1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sums = rng.integers(-limit, limit + 1, (rows, columns))
    cut = data.draw(st.integers(0, rows))
    kind = torch.int16 if limit < 2**15 else torch.int32
    given_sums = torch.from_numpy(sums).to(kind)
    # The index of the micro-batch that a rank took last is not part of the hash.
    owned = [
        in_quanta(given_sums[:cut], unit, control(micro=5)),
        in_quanta(given_sums[cut:], unit, control(micro=9), cut),
    ]
    expected = restated(sums, unit).clip(-(2**31), 2**31 - 1)
    np.testing.assert_array_equal(torch.cat(owned).numpy(), expected)


@pytest.mark.parametrize("total", [127, -127, 128, -128])
def test_32_bits_hold_what_they_are_used_for(total):
    # The largest fraction there is, and 4096 noises: some of them are close to 1.
    unit = 3 + (2**24 - 1) / 2**24
    sums = np.full((64, 64), total)
    np.testing.assert_array_equal(
        in_quanta(torch.from_numpy(sums), unit, control()).numpy(), restated(sums, unit)
    )


@pytest.mark.parametrize(("total", "unit"), [(1, 0.3), (-3, 0.7), (5, 1.75), (-2, 16.0), (1, 1e-3)])
def test_the_mean_of_rounded_sums_is_the_sum_times_the_unit(total, unit):
    count = 1 << 16
    quanta = in_quanta(torch.full((256, 256), total), unit, control()).double()
    rest = total * unit - math.floor(total * unit)
    variance = rest * (1 - rest)
    assert float(quanta.mean()) == pytest.approx(
        total * unit, abs=5 * math.sqrt(variance / count) + 1e-6
    )
    assert float(quanta.var(correction=0)) == pytest.approx(variance, abs=0.01)


def test_steps_have_noise_of_their_own():
    sums = torch.ones(64, 64, dtype=torch.int16)
    one, other = (in_quanta(sums, 0.5, control(step)) for step in (3, 4))
    # Independent coins agree half of the time; five standard errors are 0.039.
    assert float((one == other).double().mean()) == pytest.approx(0.5, abs=0.04)


def layer(rows=256, columns=256, **options):
    options = {"group_size": "row", "activations": "float", "scale_rule": "frozen", **options}
    module = TernaryLinear(columns, rows, **options)
    seed_votes(torch.nn.ModuleDict({"layer": module}), SEED_OF_RUN)
    return module


def learn(module, optimizer, gradient):
    """Show the rule the magnitudes of a gradient; the next micro-batch casts votes."""
    module(torch.eye(gradient.shape[1])).backward(gradient.T.contiguous())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_votes_are_whole_clips_as_often_as_the_gradient_is_large(bits):
    torch.manual_seed(0)
    module = layer(vote_bits=bits)
    clip = 2.5
    optimizer = ScaledVotes({"layer": module}, vote_levels=3, clip=clip, leak=0.0)
    gradient = torch.randn(256, 256)
    # Every row and every column has the same magnitude, up to sampling.
    learn(module, optimizer, gradient)
    cast = torch.zeros(256, 256)
    for _ in range(8):
        module.sums.votes.zero_()
        module(torch.eye(256)).backward(gradient.T.contiguous())
        assert module.sums.votes.unique().tolist() == [-1, 0, 1]
        cast -= module.sums.votes
    # A share of E min(|z|, c) / c, and nowhere against the gradient. Mitchell's logarithm is up to
    # 6 % too small.
    z = np.linspace(0, 8, 80001)
    density = 2 * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    share = float((np.minimum(z, clip) * density).sum()) * 1e-4 / clip
    assert float(cast.abs().mean() / 8) == pytest.approx(share, rel=0.07)
    assert bool((cast * gradient >= 0).all())
    # Beyond the clip, and what estimates of rows and columns are off by, all but one in 256 are
    # cast.
    beyond = gradient.abs() > 1.3 * clip
    assert float(cast[beyond].abs().mean() / 8) == pytest.approx(255 / 256, abs=0.01)


def test_noise_never_rounds_a_clipped_gradient_up_to_two_votes():
    largest_noise = np.float32(1 - 2.0**-24)
    assert np.floor(np.float32(255 / 256) + largest_noise) == 1
    # What a limit of one vote would give.
    assert np.floor(np.float32(1) + largest_noise) == 2


def test_exact_runs_cast_three_levels_by_shifts():
    torch.manual_seed(0)
    module = layer(activations="int8", gradients="int8")
    optimizer = ScaledVotes({"layer": module}, vote_levels=3, leak=0.0)
    gradient = torch.randn(256, 256)
    learn(module, optimizer, gradient)
    module(torch.eye(256)).backward(gradient.T.contiguous())
    votes = -module.sums.votes
    assert votes.unique().tolist() == [-1, 0, 1]
    # Shifts are whole powers of two: a row's and a column's are off by half of one each, at most.
    share = float(votes.abs().float().mean())
    expected = math.sqrt(2 / math.pi) / 2.5
    assert expected / 2 < share < expected * 2
    assert float((votes * gradient).mean()) > 0.2


@pytest.mark.parametrize(
    ("rate", "casts", "unit"), [(0.1, 1, 16), (0.1, 4, 4), (0.05, 2, 4), (0.1, 16, 1)]
)
def test_value_of_a_vote_is_clip_times_rate_per_microbatch(rate, casts, unit):
    module = layer(8, 64)
    optimizer = ScaledVotes({"layer": module}, vote_levels=3)
    optimizer.param_groups[0]["lr"] = rate
    learn(module, optimizer, torch.ones(8, 64))
    sums = torch.arange(-3, 5, dtype=torch.int16).unsqueeze(1).expand(8, 64)
    module.sums.casts = casts
    votes = optimizer.whole_votes(module, sums, 0)
    # 64 quanta per trit, 2.5 deviations: whole numbers, so that there is nothing to round.
    assert torch.equal(votes, sums.to(torch.int32) * unit)


def test_more_microbatches_make_a_vote_smaller():
    module = layer(8, 64)
    optimizer = ScaledVotes({"layer": module}, vote_levels=3)
    learn(module, optimizer, torch.ones(8, 64))
    ones = torch.ones(8, 64, dtype=torch.int16)
    (group,) = optimizer.param_groups
    optimizer._magnitudes[module].casts = 8
    assert optimizer.whole_votes(module, ones, 0).unique().tolist() == [2]
    group["vote_rate"] = 0.0
    assert optimizer.whole_votes(module, ones, 0).unique().tolist() == [0]


@pytest.mark.parametrize(
    ("rate", "columns", "casts", "shift"),
    [(0.1, 64, 1, 1), (0.1, 64, 4, 3), (0.1, 1024, 1, 3), (0.0125, 64, 1, 4)],
)
def test_exponent_scores_are_shifted_less(rate, columns, casts, shift):
    module = layer(8, columns, scale_rule="residual")
    optimizer = ScaledVotes({"layer": module}, vote_levels=3)
    optimizer.param_groups[0]["lr"] = rate
    module(torch.eye(columns)).backward(torch.ones(columns, 8))
    module.end_microbatch()
    module.sums.casts = casts
    optimizer.step()
    # A score of one deviation, 6.4 sqrt(K) quanta, moves 1.6 of 32; a vote is worth 160 rate /
    # casts quanta.
    assert shift == round(math.log2(6.4 * math.sqrt(columns) / 1.6 / (160 * rate / casts)))
    assert module.limits.exponent_shift == shift


def trained(module, optimizer, orders, drift):
    """Take steps whose micro-batches come in some order, each with its own index."""
    flips = moves = 0
    for step, order in enumerate(orders):
        for index in order:
            rng = np.random.default_rng((step, index))
            gradient = drift + rng.integers(-40, 41, drift.shape)
            module.begin_microbatch(index)
            module(torch.eye(drift.shape[1])).backward(
                torch.tensor(gradient.T, dtype=torch.float32)
            )
            module.end_microbatch()
        outcome = optimizer.step()
        optimizer.zero_grad()
        flips = flips + outcome.flips
        moves = moves + outcome.exponent_moves
    return flips, moves


@given(
    st.lists(st.permutations(range(4)), min_size=6, max_size=6),
    st.sampled_from([8, 4, 2]),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_order_of_micro_batches_does_not_matter(orders, bits, exact):
    states = []
    for taken in (orders, [range(4)] * 6):
        torch.manual_seed(0)
        options = {"activations": "int8", "gradients": "int8"} if exact else {}
        module = layer(6, 16, vote_bits=bits, scale_rule="residual", **options)
        optimizer = ScaledVotes({"layer": module}, vote_levels=3, lr=0.4, exponent_rate=0.2)
        drift = np.random.default_rng(3).integers(-30, 31, (6, 16))
        moved = trained(module, optimizer, taken, drift)
        values = [value.tolist() for value in module.state_dict().values()]
        states.append([moved, *values])
    assert states[0] == states[1]
    assert states[0][0][0] > 0


@pytest.mark.parametrize(("bits", "cell"), [(8, 64), (4, 7), (2, 1)])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_adds_the_rounded_sum_and_clips_once(bits, cell, count):
    torch.manual_seed(0)
    module = layer(3, 5, vote_bits=bits)
    rate = 0.6
    clip = 2.5
    optimizer = ScaledVotes({"layer": module}, vote_levels=3, lr=rate, clip=clip, leak=0.0)
    drift = np.random.default_rng(3).integers(-30, 31, (3, 5))
    trits = module.trits().numpy().astype(int)
    votes = np.zeros((3, 5), int)
    largest = module.shape.largest_vote
    total = 0
    for step in range(12):
        for index in range(count):
            gradient = drift + np.random.default_rng((step, index)).integers(-40, 41, (3, 5))
            module.begin_microbatch(index)
            module(torch.eye(5)).backward(torch.tensor(gradient.T, dtype=torch.float32))
            module.end_microbatch()
        sums = module.sums.votes.numpy().astype(int)
        assert np.abs(sums).max() <= count
        assert bool(module.logical_votes().any()) == bool(votes.any())
        outcome = optimizer.step()
        optimizer.zero_grad()
        unit = 0.0 if step == 0 else clip * rate * cell / count
        votes = np.clip(votes + restated(sums, unit, step=step), -largest, largest)
        crossed = (votes >= cell).astype(int) - (votes <= -cell)
        after = np.clip(trits + crossed, -1, 1)
        moved = after != trits
        rail = np.sign(votes) * (cell // 2)
        votes = np.where(crossed == 0, votes, np.where(moved, votes - cell * crossed, rail))
        trits = after
        total = total + int(moved.sum())
        assert outcome.flips == int(moved.sum())
        np.testing.assert_array_equal(module.trits().numpy(), trits)
        np.testing.assert_array_equal(module.logical_votes().numpy(), votes)
    assert total > 5


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="tail: true does not go with vote_levels"):
        ScaledVotes({"layer": layer(4, 4)}, vote_levels=3, tail=True)
    with pytest.raises(ValueError, match="vote_levels"):
        ScaledVotes({"layer": layer(4, 4)}, vote_levels=5)
    with pytest.raises(ConfigError, match="vote_levels: votes are summed until a step is taken"):
        ScaledVotes({"layer": layer(4, 4)}, vote_levels=3).defer_step()


def test_vote_levels_exclude_votes_of_the_tail():
    module = layer(8, 64, vote_bits=4)
    optimizer = ScaledVotes({"layer": module}, vote_levels=3)
    learn(module, optimizer, torch.ones(8, 64))
    assert module.limits[::2] == (255, 0)
