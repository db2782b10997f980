"""Kernels whose sizes are constants, as on CUDA, compiled as C++: several words are read at once.

Expectations are the torch kernels' that define the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state
from arb_ternary_tilelang import casting, flipping, lookups, products, storage
from arb_ternary_tilelang.backend import build
from arb_ternary_tilelang.lane import Lane, cpu_lane

Kernels = Mapping[str, Callable[..., Tensor]]


@cache
def _fixed_lane() -> Lane:
    lane = cpu_lane()
    return Lane("c", "", lane.T, fixed=True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    for module in (casting, flipping, lookups, products, storage):
        monkeypatch.setattr(module, "lane_of", lambda _device: _fixed_lane())
    return build().kernels  # type: ignore[return-value]


@pytest.fixture(scope="module")
def wanted() -> Kernels:
    return reference.build().kernels  # type: ignore[return-value]


def numbers(low: int, high: int, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size) + high)
    return torch.randint(low, high + 1, size, generator=generator).to(torch.int8)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("group", [32, pytest.param(64, marks=SLOW), pytest.param(256, marks=SLOW)])
@pytest.mark.parametrize("rows", [2, 7])
def test_products_of_several_words_are_exact(
    rows: int, group: int, kernels: Kernels, wanted: Kernels
) -> None:
    shape = WeightShape(40, 256, group)
    trits = numbers(-1, 1, 40, 256)
    exponent = numbers(-6, 0, 40, shape.groups)
    scale = torch.rand(rows, generator=torch.Generator().manual_seed(rows))
    x = numbers(-127, 127, rows, 256)
    linear = (x, scale)
    rest = (exponent, None, shape, torch.float32)
    got = kernels["linear"](*linear, kernels["pack"](trits), *rest)
    assert torch.equal(got, wanted["linear"](*linear, wanted["pack"](trits), *rest))
    grad = (numbers(-127, 127, rows, 40), torch.tensor(2.0**-9))
    last = (exponent, shape, torch.float32)
    back = kernels["linear_grad_input"](*grad, kernels["pack"](trits), *last)
    assert torch.equal(back, wanted["linear_grad_input"](*grad, wanted["pack"](trits), *last))


@SLOW
def test_a_thread_takes_four_outputs_of_a_large_weight(kernels: Kernels, wanted: Kernels) -> None:
    shape = WeightShape(2051, 64, 64)
    trits = numbers(-1, 1, 2051, 64)
    exponent = numbers(-6, 0, 2051, 1)
    arguments = (exponent, None, shape, torch.float32)
    x = numbers(-127, 127, 1, 64)
    scale = torch.ones(1)
    got = kernels["linear"](x, scale, kernels["pack"](trits), *arguments)
    assert torch.equal(got, wanted["linear"](x, scale, wanted["pack"](trits), *arguments))


def _state(pack: Callable[..., Tensor], scale: Tensor | None) -> VoteState:
    shape = WeightShape(48, 64, 32)
    state = new_state(
        shape,
        pack(numbers(-1, 1, 48, 64)),
        numbers(-3, 0, 48, 2),
        numbers(-127, 127, 48, 64),
        "",
    )
    if scale is None:
        return state
    limits = torch.tensor(VoteLimits(vote_limit=900, exponent_shift=3))
    return state._replace(magnitudes=torch.zeros(48 + 64), vote_scale=scale, limits=limits)


#: By which gradients become votes: nothing, factors, and shifts to both sides.
SCALES = {
    "signs": None,
    "factors": torch.full((48 + 64,), 2.0**-8),
    "shifts": numbers(3, 9, 48 + 64).to(torch.int32),
    "shifts to the left": numbers(-3, 0, 48 + 64).to(torch.int32),
    "large shifts": numbers(12, 17, 48 + 64).to(torch.int32),
}


#: On every run of the tests. The rest is part of `make gpu-compile`.
ALWAYS = ("signs", "shifts to the left")


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(scale, id=name, marks=() if name in ALWAYS else SLOW)
        for name, scale in SCALES.items()
    ],
)
def test_votes_of_whole_words_are_exact(
    scale: Tensor | None, kernels: Kernels, wanted: Kernels
) -> None:
    grad = numbers(-127, 127, 40, 48)
    x = numbers(-127, 127, 40, 64)
    unit = torch.tensor(0.5)
    made = []
    for ops in (kernels, wanted):
        state = _state(ops["pack"], scale)
        if scale is None:
            ops["cast_votes"](grad, x, unit, state)
            moved = ops["apply_votes"](state, 100, 2)
        else:
            ops["cast_scaled_votes"](grad, x, unit, state)
            moved = ops["apply_scaled_votes"](state, 100, 4000, True)
        trits = ops["unpack"](state.weight, state.shape)
        made.append((state.votes, state.exponent_votes, trits, moved))
    for ours, reference_s in zip(*made, strict=True):
        assert torch.equal(ours, reference_s)
    # Otherwise equal results would say little.
    assert int(made[1][3]) > 100


#: Thresholds of flips, and shares by which accumulators decay: none, little, much, all.
DECAYS = [(100, 0, False), (100, 0, True), (64, 1, True), (127, 4000, False), (1, 65536, True)]
#: Thresholds of flips, and leaks.
LEAKS = [(100, 0), (127, 1), (1, 128), (64, 127)]


def _accumulators(pack: Callable[..., Tensor]) -> VoteState:
    """A state whose accumulators are all numbers of 8 bits in turn."""
    state = _state(pack, SCALES["factors"])
    state.votes.copy_(torch.arange(48 * 64).view(48, 64).to(torch.int8))
    return state


def _flipped(op: str, settings: tuple[int, ...], ops: Kernels) -> tuple[Tensor, Tensor, Tensor]:
    state = _accumulators(ops["pack"])
    moved = ops[op](state, *settings)
    return state.votes, ops["unpack"](state.weight, state.shape), moved


@pytest.mark.parametrize("settings", DECAYS)
def test_words_of_accumulators_decay_exactly(
    settings: tuple[int, int, bool], kernels: Kernels, wanted: Kernels
) -> None:
    ours = _flipped("apply_scaled_votes", settings, kernels)
    for got, expected in zip(ours, _flipped("apply_scaled_votes", settings, wanted), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("settings", LEAKS)
def test_words_of_accumulators_leak_exactly(
    settings: tuple[int, int], kernels: Kernels, wanted: Kernels
) -> None:
    ours = _flipped("apply_votes", settings, kernels)
    for got, expected in zip(ours, _flipped("apply_votes", settings, wanted), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("noise_shift", [0, 3, 16])
@pytest.mark.parametrize("factor", [2.0**-8, 3.3e37, torch.inf, torch.nan])
def test_votes_by_factors_of_any_size_are_exact(
    factor: float, noise_shift: int, kernels: Kernels, wanted: Kernels
) -> None:
    grad = numbers(-127, 127, 40, 48)
    x = numbers(-127, 127, 40, 64)
    factors = torch.full((48 + 64,), 2.0**-4)
    factors[::3] = factor
    limits = torch.tensor(VoteLimits(vote_limit=32512, noise_shift=noise_shift))
    made = []
    for ops in (kernels, wanted):
        state = _state(ops["pack"], factors)._replace(limits=limits)
        ops["cast_scaled_votes"](grad, x, torch.tensor(0.5), state)
        made.append((state.votes, state.learned, state.scaling[0], state.stats))
    (*ours, our_stats), (*reference_s, reference_stats) = made
    for got, expected in zip(ours, reference_s, strict=True):
        assert torch.equal(got, expected)
    # Their sums of floats are taken in another order.
    assert torch.allclose(our_stats, reference_stats, rtol=1e-6)
    assert len(set(ours[0].flatten().tolist())) > 100


def test_sizes_of_large_gradients_are_summed_exactly(kernels: Kernels, wanted: Kernels) -> None:
    # As many rows as are served: two gradients are just below 2**32 together.
    grad = torch.full((casting.MOST_ROWS, 48), -127, dtype=torch.int8)
    x = torch.full((casting.MOST_ROWS, 64), 127, dtype=torch.int8)
    x[:, ::2] = -127
    made = []
    for ops in (kernels, wanted):
        state = _state(ops["pack"], SCALES["large shifts"])
        ops["cast_scaled_votes"](grad, x, torch.tensor(0.5), state)
        made.append((state.votes, state.scaling[0]))
    for got, expected in zip(*made, strict=True):
        assert torch.equal(got, expected)
