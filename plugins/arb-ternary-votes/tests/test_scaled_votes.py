import copy
import math
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arb_ternary.config.fields import unused_options
from arb_ternary.counters.hashing import HASH_USES, MICRO_BITS, USE_VOTE_ROUNDING, stream_id
from arb_ternary.optim.protocol import Planned
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import seed_votes
from arb_ternary_testing.restatement import counter_hash_uniform
from arb_ternary_train.audit import audit
from arb_ternary_votes.config import ScaledVotesConfig
from arb_ternary_votes.scaled_votes import ScaledVotes

N = 3
K = 5
SEED = 7


def layer(**options):
    module = TernaryLinear(
        K, N, group_size="row", activations="float", scale_rule="frozen", **options
    )
    model = torch.nn.ModuleDict({"layer": module})
    seed_votes(model, SEED)
    return module


def cast(module, gradient):
    """Give the module exactly this integer weight gradient."""
    y = module(torch.eye(K))
    y.backward(torch.tensor(gradient.T, dtype=torch.float32))


def noise(step, micro, use):
    stream = stream_id("layer") * HASH_USES + use
    word = (step << MICRO_BITS) + micro
    return np.array([counter_hash_uniform(i, SEED, word, stream) for i in range(N * K)]).reshape(
        N, K
    )


def mitchell(x):
    mantissa, exponent = np.frexp(x.astype(np.float32))
    return np.floor((exponent - 1 + 2 * mantissa - 1) * 256).astype(int)


class Restated:
    """The rule restated in numpy, in its simplest form."""

    def __init__(self, trits, *, lr, clip, carry, cell=64, decay=0.98):
        self.trits = trits.astype(int)
        self.votes = np.zeros((N, K), int)
        self.lr = lr
        self.clip = clip
        self.carry = carry
        self.cell = cell
        self.decay = decay
        self.row = self.column = None
        self.step = 0

    def update(self, gradient):
        if self.row is not None:
            quanta = self.lr * self.cell
            row = np.exp2(-(self.row - self.row.sum() // N) / 256) * quanta * math.sqrt(2 / math.pi)
            column = np.exp2(-self.column / 256)
            limit = round(256 * self.clip * quanta) / 256
            scaled = (gradient * row[:, None].astype(np.float32)) * column.astype(np.float32)
            vote = np.floor(np.clip(scaled, -limit, limit) + noise(self.step, 0, USE_VOTE_ROUNDING))
            self.votes = np.clip(self.votes - vote.astype(int), -127, 127)
        now = [
            mitchell(np.abs(gradient).sum(axis)) - round(256 * math.log2(count))
            for axis, count in ((1, K), (0, N))
        ]
        if self.row is None:
            self.row, self.column = now
        else:
            share = round(65536 * max(1 - self.decay, 1 / (self.step + 1)))
            self.row, self.column = (
                old + (((new - old) * share + 2**15) >> 16)
                for old, new in zip((self.row, self.column), now, strict=True)
            )
        crossed = (self.votes >= self.cell).astype(int) - (self.votes <= -self.cell)
        after = np.clip(self.trits + crossed, -1, 1)
        moved = after != self.trits
        if self.carry:
            rail = np.sign(self.votes) * (self.cell // 2)
            self.votes = np.where(
                crossed == 0, self.votes, np.where(moved, self.votes - self.cell * crossed, rail)
            )
        else:
            self.votes = np.where(crossed == 0, self.votes, 0)
        self.trits = after
        self.step += 1
        return int(moved.sum())


@pytest.mark.parametrize(("bits", "cell"), [(8, 64), (4, 7)])
def test_spread_accumulators_turn_no_trit(bits: int, cell: int) -> None:
    module = layer(vote_bits=bits)
    trits = module.trits()
    ScaledVotes({"layer": module}, spread=True)
    u = [counter_hash_uniform(i, SEED, 0, stream_id("layer") * HASH_USES + 7) for i in range(N * K)]
    wanted = np.floor(np.array(u).reshape(N, K) * (2 * cell - 1)) - (cell - 1)
    assert np.array_equal(module.logical_votes().numpy(), wanted)
    assert torch.equal(module.trits(), trits)


def test_accumulators_that_hold_something_are_not_spread() -> None:
    module = layer()
    votes = torch.zeros(N, K, dtype=torch.int8)
    votes[1, 2] = -1
    module.set_votes(votes)
    ScaledVotes({"layer": module}, spread=True)
    assert torch.equal(module.logical_votes(), votes)


def test_spread_accumulators_turn_trits_with_first_votes() -> None:
    turned = {}
    for spread in (False, True):
        module = TernaryLinear(64, 64, group_size="row", activations="float", scale_rule="frozen")
        seed_votes(torch.nn.ModuleDict({"layer": module}), SEED)
        optimizer = ScaledVotes({"layer": module}, lr=0.1, leak=0.0, spread=spread)
        for _ in range(2):  # the first step casts none
            module(torch.eye(64)).backward(torch.ones(64, 64))
            turned[spread] = optimizer.step().flips
            optimizer.zero_grad()
    # A gradient of ones is sqrt(2 / pi) deviations: 5.1 quanta, and 4 % of 127 values are as near
    # to a flip as that. A third of those trits are at -1 already.
    assert turned[False] == 0
    assert 0.01 < turned[True] / 64**2 < 0.06


@pytest.mark.parametrize("carry", [True, False])
def test_the_rule_is_the_restated_one(carry):
    torch.manual_seed(0)
    module = layer()
    optimizer = ScaledVotes({"layer": module}, lr=0.6, clip=2.5, carry=carry, leak=0.0)
    restated = Restated(module.trits().numpy(), lr=0.6, clip=2.5, carry=carry)
    rng = np.random.default_rng(3)
    drift = rng.integers(-30, 31, (N, K))
    flips = 0
    for _ in range(30):
        gradient = drift + rng.integers(-40, 41, (N, K))
        gradient[0] += gradient[0] == 0
        cast(module, gradient)
        outcome = optimizer.step()
        optimizer.zero_grad()
        assert outcome.flips == restated.update(gradient)
        np.testing.assert_array_equal(module.trits().numpy(), restated.trits)
        np.testing.assert_array_equal(module.logical_votes().numpy(), restated.votes)
        flips += outcome.flips
    assert flips > 10


@pytest.mark.parametrize("rate", [0.05, 0.3, 2.0])
def test_votes_of_the_tail_are_cast_beyond_a_quantile(rate):
    torch.manual_seed(1)
    size = 512
    cell = 7
    votes = {}
    for tail in (True, False):
        module = TernaryLinear(
            size,
            size,
            group_size="row",
            activations="float",
            scale_rule="frozen",
            vote_bits=4 if tail else 8,
        )
        optimizer = ScaledVotes({"layer": module}, lr=rate / cell, tail=tail, cell=cell, clip=100.0)
        gradient = torch.randn(size, size, generator=torch.Generator().manual_seed(5))
        for _ in range(2):
            module(torch.eye(size)).backward(gradient.T.contiguous())
            if optimizer.updates == 0:
                optimizer.step()
                optimizer.zero_grad()
        votes[tail] = -module.logical_votes().float()
    # Quanta of one standard deviation are `rate`; a normal number is beyond tau as often as its
    # size is on average.
    share = min(rate, 1.0) * math.sqrt(2 / math.pi)
    # The running logarithm of a column's mean, sqrt(2 / pi), is too small by what Mitchell's
    # approximation is.
    mean = math.sqrt(2 / math.pi)
    tau = NormalDist().inv_cdf(1 - share / 2) * 2 ** (float(mitchell(np.array(mean))) / 256) / mean
    cast = votes[True]
    assert cast.unique().tolist() == [-1, 0, 1]
    # Noise is a quarter of a vote wide: none below 3/4 of the quantile, all above 5/4. Those of
    # rows are estimates.
    assert not bool(cast[gradient.abs() < 0.55 * tau].any())
    assert torch.equal(
        cast[gradient.abs() > 1.6 * tau], gradient.sign()[gradient.abs() > 1.6 * tau]
    )
    # The soft edge adds some where the tail falls steeply.
    edge = [NormalDist().cdf(-tau * (0.75 + (i + 0.5) / 2000)) * 2 for i in range(1000)]
    assert float(cast.abs().mean()) == pytest.approx(sum(edge) / len(edge), rel=0.05)
    if rate < 1:
        assert share < float(cast.abs().mean()) < 1.6 * share
        assert float(votes[False].abs().mean()) == pytest.approx(mean * rate, rel=0.08)


def test_votes_of_the_tail_are_default_for_4_bits_and_floats():
    def shifts(**options):
        module = TernaryLinear(K, N, group_size="row", scale_rule="frozen", **options)
        optimizer = ScaledVotes({"layer": module})
        module(torch.randn(4, K)).sum().backward()
        optimizer.step()
        return module.limits.noise_shift

    assert [shifts(vote_bits=bits) for bits in (8, 4, 2)] == [0, 2, 0]
    assert shifts(vote_bits=4, gradients="int8") == 0


def test_votes_of_the_tail_refuse_exact_integers():
    module = TernaryLinear(K, N, group_size="row", gradients="int8", scale_rule="frozen")
    with pytest.raises(
        ValueError, match="tail: true does not fit 'layer', whose gradients are int8"
    ):
        ScaledVotes({"layer": module}, tail=True)


def test_the_first_step_casts_no_votes_and_the_second_does():
    module = layer()
    optimizer = ScaledVotes({"layer": module})
    for expected in (False, True):
        cast(module, np.full((N, K), 5))
        assert bool(module.logical_votes().any()) is expected
        optimizer.step()
        optimizer.zero_grad()


def test_votes_are_spread_thinner_over_more_microbatches():
    module = layer()
    optimizer = ScaledVotes({"layer": module})
    gradient = np.full((N, K), 5)
    scales = []
    for draws in (1, 5, 2, 1):
        for draw in range(draws):
            scales.append(float(module.vote_scale[0]))
            cast(module, gradient)
            if draw < draws - 1:
                optimizer.defer_step()
        optimizer.step()
        optimizer.zero_grad()
    # 1 / max(of the last step, in this step), of a gradient that is always as large; none before
    # the first magnitudes.
    parts = [0, 1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 5, 1 / 5, 1 / 2]
    # The logarithm of 5 is rounded to 1/256, and weighs a fiftieth.
    np.testing.assert_allclose(np.array(scales) / scales[1], parts, rtol=2e-3)


def test_spread_of_votes_survives_a_save_within_a_step():
    module = layer()
    optimizer = ScaledVotes({"layer": module})
    cast(module, np.full((N, K), 5))
    optimizer.step()
    for _ in range(3):
        cast(module, np.full((N, K), 5))
        optimizer.defer_step()
    other = layer()
    restored = ScaledVotes({"layer": other})
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(other.vote_scale, module.vote_scale)
    assert other.limits == module.limits


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_votes_do_not_depend_on_the_size_of_the_loss(size):
    votes = []
    for factor in (1.0, size):
        torch.manual_seed(1)
        module = layer()
        optimizer = ScaledVotes({"layer": module}, leak=0.0)
        gradient = np.random.default_rng(0).normal(0, 1, (N, K))
        for _ in range(2):
            cast(module, gradient * factor)
            optimizer.step()
            optimizer.zero_grad()
        votes.append(module.logical_votes().to(torch.int32) + 64 * module.trits().to(torch.int32))
    # The logarithms of other sizes round differently, by up to 0.0861 and 1/256 each.
    assert (votes[0] - votes[1]).abs().max() <= 4


def test_a_rate_of_zero_casts_nothing_and_flips_nothing():
    module = layer()
    optimizer = ScaledVotes({"layer": module})
    optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(module.state_dict())
    for _ in range(3):
        cast(module, np.full((N, K), 5))
        optimizer.step()
        optimizer.zero_grad()
    for name in ("weight", "votes"):
        assert torch.equal(module.state_dict()[name], before[name])


def test_the_rate_of_a_scheduler_scales_the_votes():
    sums = {}
    for rate in (0.1, 0.4):
        torch.manual_seed(2)
        module = TernaryLinear(256, 64, group_size="row", activations="float", scale_rule="frozen")
        optimizer = ScaledVotes({"layer": module}, lr=0.4, leak=0.0)
        optimizer.param_groups[0]["lr"] = rate
        gradient = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            module(torch.eye(256)).backward(gradient.T.contiguous())
            if optimizer.updates == 0:
                optimizer.step()
                optimizer.zero_grad()
        sums[rate] = float(module.logical_votes().abs().float().mean())
    assert sums[0.4] == pytest.approx(4 * sums[0.1], rel=0.05)


def test_a_leak_decays_accumulators_by_its_share_on_average():
    module = TernaryLinear(256, 256, group_size="row", activations="float", scale_rule="frozen")
    optimizer = ScaledVotes({"layer": module}, lr=0.5, leak=0.125)
    module.set_trits(module.trits(), votes=torch.full((256, 256), 48, dtype=torch.int8))
    optimizer.step()
    # A sixteenth of 48 is 3: stochastic rounding has nothing to round.
    assert module.logical_votes().unique().tolist() == [45]
    module.set_trits(module.trits(), votes=torch.full((256, 256), -40, dtype=torch.int8))
    optimizer.step()
    left = module.logical_votes().float()
    assert left.unique().tolist() == [-38, -37]
    # A sixteenth of 40 is 2.5: the mean of 65536 roundings is within five standard errors.
    assert float(left.mean()) == pytest.approx(-37.5, abs=5 * math.sqrt(0.25 / 65536))


def decaying(leak_every, leak=0.125, cells=48):
    module = TernaryLinear(64, 64, group_size="row", activations="float", scale_rule="frozen")
    optimizer = ScaledVotes({"layer": module}, lr=0.5, leak=leak, leak_every=leak_every)
    module.set_trits(module.trits(), votes=torch.full((64, 64), cells, dtype=torch.int8))
    return module, optimizer


def test_leak_of_every_fourth_update_is_four_times_as_large():
    module, optimizer = decaying(4)
    held = []
    for _ in range(9):
        optimizer.step()
        held.append(module.logical_votes().unique().tolist())
    # Four sixteenths of 48 are 12 and of 36 are 9, exactly.
    assert held == [[48], [48], [48], [36], [36], [36], [36], [27], [27]]


def test_a_leak_never_takes_more_than_there_is():
    module, optimizer = decaying(40)
    for _ in range(40):
        optimizer.step()
    assert not module.logical_votes().any()


def test_a_resumed_run_leaks_in_the_same_updates():
    module, optimizer = decaying(3)
    for _ in range(2):
        optimizer.step()
    resumed, other = decaying(3)
    resumed.load_state_dict(copy.deepcopy(module.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        optimizer.step()
        other.step()
        assert torch.equal(module.logical_votes(), resumed.logical_votes())
    assert module.logical_votes().max() < 48


def test_leak_of_every_update_equals_the_default():
    module, optimizer = decaying(1, cells=41)
    plain, other = decaying(1, cells=41)
    for group in other.param_groups:
        del group["leak_every"]
    for _ in range(3):
        optimizer.step()
        other.step()
    assert torch.equal(module.logical_votes(), plain.logical_votes())
    assert module.logical_votes().unique().numel() > 1


def test_a_leak_every_so_often_needs_a_leak():
    with pytest.raises(ValueError, match="leak_every: 8 has no effect with leak: 0"):
        decaying(8, leak=0.0)


@pytest.mark.parametrize(
    ("options", "bits", "found"),
    [
        ({"leak": 0.0, "leak_every": 8}, 8, "nothing decays with a leak of 0"),
        ({"leak_every": 8}, 2, "accumulators of 2 bits keep nothing after a step"),
        ({"leak_every": 8}, 8, None),
        ({"leak": 0.0}, 8, None),
    ],
)
def test_leak_every_needs_a_leak(options, bits, found):
    run = SimpleNamespace(optimizer=SimpleNamespace(options=None))
    planned = Planned(kinds=frozenset({"ternary"}), vote_bits=bits)
    faults = list(unused_options(ScaledVotesConfig(**options), run, planned))
    expected = []
    if found is not None:
        expected = [("leak_every", f"has no effect because {found}; remove it")]
    assert faults == expected


def test_accumulators_of_2_bits_cannot_be_spread():
    run = SimpleNamespace(optimizer=SimpleNamespace(options=None))
    planned = Planned(kinds=frozenset({"ternary"}), vote_bits=2)
    (fault,) = unused_options(ScaledVotesConfig(spread=True), run, planned)
    assert fault == (
        "spread",
        "has no effect because accumulators of 2 bits keep nothing after a step; remove it",
    )


def test_state_is_integer_and_counted():
    module = TernaryLinear(384, 192, group_size="row", scale_rule="frozen")
    optimizer = ScaledVotes({"layer": module})
    counted = audit(module, optimizer)
    assert counted.optimizer_bytes == 2 * (384 + 192)
    assert counted.float_parameters == counted.float_buffers == 0
    # 2 + 8 bits, two bytes per row of exponents, two bytes per row and per column of magnitudes,
    # and the control words.
    assert counted.state_bits_per_parameter == pytest.approx(
        10 + 8 * (2 * 192 + 2 * (384 + 192) + 8 * 4 + 1) / (384 * 192), abs=1e-9
    )


@pytest.mark.parametrize(("bits", "cell"), [(8, 64), (4, 7), (2, 1)])
def test_a_full_cell_flips_a_trit_whatever_its_bits(bits, cell):
    module = layer(vote_bits=bits)
    optimizer = ScaledVotes({"layer": module}, lr=1.0, leak=0.0, tail=False)
    for _ in range(6):
        cast(module, np.full((N, K), 5))
        optimizer.step()
        optimizer.zero_grad()
        assert int(module.logical_votes().abs().max()) < cell
    assert bool((module.trits() == -1).all())


def test_a_cell_too_large_for_its_accumulators_is_refused():
    with pytest.raises(
        ValueError,
        match="cell: 8 does not fit the 4-bit accumulators of 'layer', which hold up to 7",
    ):
        ScaledVotes({"layer": layer(vote_bits=4)}, cell=8)


def test_exact_runs_vote_by_shifts():
    module = TernaryLinear(K, N, group_size="row", gradients="int8", scale_rule="frozen")
    ScaledVotes({"layer": module})
    assert module.vote_scale is not None
    assert module.vote_scale.dtype == torch.int32


def test_exponents_follow_the_gradient_of_their_scale():
    module = TernaryLinear(64, 2, group_size="row", activations="float")
    optimizer = ScaledVotes({"layer": module}, lr=0.05, exponent_rate=0.2)
    start = module.exponent.clone()
    for _ in range(60):
        trits = module.trits().float()
        # Row 0 wants to be larger, row 1 smaller: the gradient of log2 |w| has the sign of g * w.
        module(torch.eye(64)).backward((trits * torch.tensor([[-1.0], [1.0]])).T.contiguous())
        optimizer.step()
        optimizer.zero_grad()
    assert int(module.exponent[0]) > int(start[0])
    assert int(module.exponent[1]) < int(start[1])
