"""Momentum votes against a numpy restatement; servo, state, errors and runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary.counters.hashing import HASH_USES, MICRO_BITS, stream_id
from arb_ternary.errors import ConfigError
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import seed_votes
from arb_ternary_testing.restatement_votes import Draw, apply_scaled_votes, float_votes
from arb_ternary_train.audit import audit
from arb_ternary_train.loading import load_config
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_votes import MomentumVotes, MomentumVotesConfig
from arb_ternary_votes.scaled_votes import ScaledVotes

N = 6
K = 10
SEED = 7


def layer(rows: int = N, columns: int = K, **options: Any) -> TernaryLinear:
    torch.manual_seed(0)
    given = {"group_size": "row", "activations": "float", "scale_rule": "frozen", **options}
    module = TernaryLinear(columns, rows, **given)
    seed_votes(torch.nn.ModuleDict({"layer": module}), SEED)
    return module


def optimizer_of(module: Any, **options: Any) -> MomentumVotes:
    return MomentumVotes({"layer": module}, MomentumVotesConfig(**options))


def cast(module: Any, gradient: Any) -> None:
    """Give the module exactly this integer weight gradient."""
    gradient = torch.as_tensor(gradient, dtype=torch.float32)
    module(torch.eye(gradient.shape[1])).backward(gradient.T.contiguous())


# --- the rule


def mitchell(x: Any) -> Any:
    mantissa, exponent = np.frexp(x.astype(np.float32))
    return np.floor((exponent - 1 + 2 * mantissa - 1) * 256).astype(int)


class Restated:
    """The rule restated in numpy and Python integers."""

    def __init__(
        self, trits: Any, bits: int, *, flip_rate: float, power: float, decay: float, carry: bool
    ) -> None:
        self.trits = trits.astype(int)
        self.votes = np.zeros(trits.shape, int)
        self.bits = bits
        self.largest = {8: 127, 4: 7}[bits]
        self.flip_rate = flip_rate
        self.power = power
        self.decay = decay
        self.carry = carry
        self.spread = {8: 24.0, 4: 1.5}[bits]
        self.quanta = self.spread * math.sqrt(1 - (1 - decay) ** 2)
        # A threshold is 2**e * (1 + m / 4096) with the level 4096 * e + m.
        start = max(1, min(round(3 * self.spread), self.largest))
        self.level = next(level for level in range(28609) if self.theta(level) == start)
        self.row = self.column = None
        self.step = 0

    @staticmethod
    def theta(level: int) -> float:
        return 2.0 ** (level // 4096) * (1 + level % 4096 / 4096)

    def update(self, gradient: Any, rate: float) -> int:
        draw = Draw(SEED, self.step << MICRO_BITS, stream_id("layer") * HASH_USES)
        voted = self.row is not None
        if self.row is not None:
            row = np.exp2(np.float32(self.row - self.row.sum() // N) / np.float32(-256))
            row *= np.float32(self.quanta * math.sqrt(2 / math.pi))
            scale = np.concatenate([row, np.exp2(np.float32(self.column) / np.float32(-256))])
            limit = min(round(256 * 2.5 * self.quanta), 256 * self.largest)
            vote = float_votes(gradient, scale, limit, draw)
            self.votes = np.clip(self.votes - vote, -self.largest, self.largest)
        now = [
            mitchell(np.abs(gradient).sum(axis)) - round(256 * math.log2(count))
            for axis, count in ((1, K), (0, N))
        ]
        if self.row is None:
            self.row, self.column = now
        else:
            share = round(65536 * max(1 - 0.98, 1 / (self.step + 1)))
            self.row, self.column = (
                old + (((new - old) * share + 2**15) >> 16)
                for old, new in zip((self.row, self.column), now, strict=True)
            )
        fraction = (self.step * 40503 % 65536) / 65536
        threshold = min(self.largest, math.floor(self.theta(self.level) + fraction))
        # One micro-batch has been cast since the last step.
        word = Draw(SEED, (self.step << MICRO_BITS) + 1, stream_id("layer") * HASH_USES)
        decay = round(65536 * self.decay)
        self.trits, self.votes, flips = apply_scaled_votes(
            self.trits, self.votes, threshold, decay, carry=self.carry, draw=word
        )
        if voted:
            wanted = N * K * round(2**32 * min(1, self.flip_rate * rate**self.power))
            error = min((flips * 2**40 + wanted // 2) // wanted, 8 * 256) - 256
            if abs(error) > round(256 * 0.05):
                # The gain is 1/16 octave for an error of 1: one level of 1/4096 octave for 1/256.
                self.level = min(max(self.level + error, 0), {8: 28608, 4: 11264}[self.bits])
        self.step += 1
        return flips


@pytest.mark.parametrize(
    ("bits", "decay", "carry", "power"),
    [(8, 0.05, True, 1.0), (8, 0.2, False, 2.0), (4, 0.1, True, 1.0)],
)
def test_the_rule_is_the_restated_one(bits: int, decay: float, carry: bool, power: float) -> None:
    module = layer(vote_bits=bits)
    optimizer = optimizer_of(module, flip_rate=0.05, power=power, decay=decay, carry=carry)
    restated = Restated(
        module.trits().numpy(), bits, flip_rate=0.05, power=power, decay=decay, carry=carry
    )
    rng = np.random.default_rng(3)
    drift = rng.integers(-20, 21, (N, K))
    flips = 0
    thresholds = set()
    for step in range(60):
        rate = min(1.0, (step + 1) / 10) if step < 40 else 0.5
        optimizer.param_groups[0]["lr"] = rate
        gradient = drift + rng.integers(-40, 41, (N, K))
        gradient[0] += gradient[0] == 0
        cast(module, gradient)
        outcome = optimizer.step()
        optimizer.zero_grad()
        assert outcome.flips == restated.update(gradient, rate)
        np.testing.assert_array_equal(module.trits().numpy(), restated.trits)
        np.testing.assert_array_equal(module.logical_votes().numpy(), restated.votes)
        assert optimizer.thresholds() == [restated.theta(restated.level)]
        assert outcome.statistics["flip_threshold"] == restated.theta(restated.level)
        flips += outcome.flips
        thresholds.add(restated.level)
    assert flips > 30
    assert len(thresholds) > 30


def test_momentum_of_a_constant_gradient() -> None:
    module = layer(16, 16)
    optimizer = optimizer_of(module, decay=0.25, quanta=16.0, flip_rate=1e-6, clip=2.0)
    for _ in range(40):
        cast(module, np.full((16, 16), 5))
        optimizer.step()
        optimizer.zero_grad()
    # |g| is its own mean: a vote is 16 * sqrt(2 / pi) = 12.77 quanta.
    # Decayed once, the sum is 12.77 * 0.75 / 0.25.
    assert float(module.logical_votes().float().mean()) == pytest.approx(
        -16 * math.sqrt(2 / math.pi) * 3, abs=1
    )


def test_votes_depend_on_the_rate_only_at_zero() -> None:
    votes = {}
    for rate in (0.0, 0.01, 1.0):
        module = layer()
        optimizer = optimizer_of(module)
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(2):
            optimizer.zero_grad()
            cast(module, np.arange(N * K).reshape(N, K) - 30)
            if not optimizer.updates:
                optimizer.step()
        votes[rate] = module.logical_votes()
    assert torch.equal(votes[0.01], votes[1.0])
    assert votes[1.0].any()
    assert not votes[0.0].any()


def test_exponents_follow_the_schedule_in_powers_of_two() -> None:
    shifts = []
    for rate in (1.0, 0.5, 0.25):
        module = layer(8, 64, scale_rule="residual")
        optimizer = optimizer_of(module, quanta=8.0, exponent_rate=0.0625)
        optimizer.param_groups[0]["lr"] = rate
        cast(module, np.ones((8, 64)))
        optimizer.step()
        shifts.append(module.limits.exponent_shift)
    # A score of one standard deviation is 8 * sqrt(64) = 64 quanta; 0.0625 of the threshold 32 is
    # 2.
    assert shifts == [5, 6, 7]


def test_exponents_learn() -> None:
    module = layer(2, 64, scale_rule="residual")
    optimizer = optimizer_of(module, exponent_rate=0.2, flip_rate=0.001)
    start = module.exponent.clone()
    moves = 0
    for _ in range(60):
        cast(module, module.trits().float() * torch.tensor([[-1.0], [1.0]]))
        moves += optimizer.step().exponent_moves
        optimizer.zero_grad()
    assert int(module.exponent[0]) > int(start[0])
    assert int(module.exponent[1]) < int(start[1])
    assert moves >= 2


# --- the servo


@pytest.mark.parametrize(
    ("bits", "flip_rate", "decay", "mode"),
    [
        (8, 0.01, 0.05, "float"),
        (8, 0.001, 0.02, "float"),
        (8, 0.05, 1.0, "float"),
        (4, 0.01, 0.05, "float"),
        (8, 0.01, 0.05, "int8"),
    ],
)
def test_the_share_of_flips_is_the_wanted_one(
    bits: int, flip_rate: float, decay: float, mode: str
) -> None:
    module = layer(64, 128, vote_bits=bits, activations=mode, gradients=mode)
    optimizer = optimizer_of(module, flip_rate=flip_rate, decay=decay)
    generator = torch.Generator().manual_seed(1)
    shares = []
    for step in range(300):
        # Halved in the second half.
        optimizer.param_groups[0]["lr"] = 1.0 if step < 150 else 0.5
        cast(module, torch.randn(64, 128, generator=generator))
        shares.append(optimizer.step().flips / 8192)
        optimizer.zero_grad()
    assert np.mean(shares[50:150]) == pytest.approx(flip_rate, rel=0.1)
    assert np.mean(shares[200:]) == pytest.approx(flip_rate / 2, rel=0.1)


def test_the_threshold_stays_where_a_module_has_no_gradient() -> None:
    module = layer()
    optimizer = optimizer_of(module)
    (start,) = optimizer.thresholds()
    assert start == 72.0
    for _ in range(3):
        optimizer.step()
    cast(module, np.ones((N, K)))
    optimizer.step()
    # The first step with a gradient has magnitudes, but no votes yet.
    assert optimizer.thresholds() == [start]
    optimizer.zero_grad()
    cast(module, np.ones((N, K)))
    optimizer.step()
    assert optimizer.thresholds() != [start]


def test_embeddings_flip_at_their_share_too() -> None:
    torch.manual_seed(0)
    module = TernaryEmbedding(32, 64, scale_rule="frozen")
    optimizer = MomentumVotes({"embedding": module}, MomentumVotesConfig(flip_rate=0.01))
    generator = torch.Generator().manual_seed(1)
    shares = []
    for _ in range(200):
        module(torch.arange(32)).backward(torch.randn(32, 64, generator=generator))
        shares.append(optimizer.step().flips / 2048)
        optimizer.zero_grad()
    assert np.mean(shares[50:]) == pytest.approx(0.01, rel=0.1)


# --- state


@pytest.mark.parametrize(("bits", "most"), [(8, 10.5), (4, 6.5)])
def test_state_is_integer_and_counted(bits: int, most: float) -> None:
    module = TernaryLinear(384, 192, group_size="row", scale_rule="frozen", vote_bits=bits)
    optimizer = MomentumVotes({"layer": module})
    counted = audit(module, optimizer)
    assert counted.optimizer_bytes == 2 * (384 + 192) + 2
    assert counted.float_parameters == counted.float_buffers == 0
    # Trits and accumulators, two bytes per row of exponents, and the magnitudes, the level and the
    # control words.
    expected = 2 + bits + 8 * (2 * 192 + 2 * (384 + 192) + 2 + 8 * 4 + 1) / (384 * 192)
    assert counted.state_bits_per_parameter == pytest.approx(expected, abs=1e-9)
    assert counted.state_bits_per_parameter <= most


def test_restored_optimizer_continues_bitwise() -> None:
    module = layer()
    other = layer()
    rng = np.random.default_rng(0)
    gradients = [rng.integers(-9, 10, (N, K)) for _ in range(40)]
    first, second = (optimizer_of(m, flip_rate=0.05) for m in (module, other))
    for step, gradient in enumerate(gradients):
        if step == 20:
            other.load_state_dict(module.state_dict())
            second.load_state_dict(first.state_dict())
        for m, optimizer in ((module, first), (other, second))[: 1 if step < 20 else 2]:
            cast(m, gradient)
            optimizer.step()
            optimizer.zero_grad()
    assert first.thresholds() == second.thresholds() != optimizer_of(layer()).thresholds()
    for (name, a), b in zip(module.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_state_of_other_modules_is_refused() -> None:
    saved = optimizer_of(layer()).state_dict()
    with pytest.raises(ValueError, match="do not fit"):
        optimizer_of(layer(K, N)).load_state_dict(saved)
    saved["levels"] = [torch.zeros(2, dtype=torch.int16)]
    with pytest.raises(ValueError, match="another number of modules"):
        optimizer_of(layer()).load_state_dict(saved)


# --- errors


def test_two_bits_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the accumulators, and those of 'layer' have 2 bits\n.*vote_bits 8 or 4"
    ):
        optimizer_of(layer(vote_bits=2))


def test_quanta_that_no_accumulator_holds_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="quanta: 8 do not fit the 4-bit accumulators of 'layer', which hold up to 7",
    ):
        optimizer_of(layer(vote_bits=4), quanta=8.0)


@pytest.mark.parametrize("rule", [MomentumVotes, ScaledVotes])
def test_an_embedding_whose_scale_follows_the_correlation_learns(
    rule: type[MomentumVotes] | type[ScaledVotes],
) -> None:
    table = TernaryEmbedding(8, 8, scale_rule="correlation")
    optimizer = rule({"table": table})
    flips = 0
    for _ in range(60):
        table(torch.arange(8)).square().sum().backward()
        flips += optimizer.step().flips
        optimizer.zero_grad()
    assert flips > 0
    assert table.steps is not None
    assert table.steps.eq(60).all()
    assert table.correlation is not None
    # The gradient of a square has the weight's sign, so that a smaller scale lowers the loss, and
    # so does a zero.
    assert table.correlation.gt(0).any()
    assert table.trits().count_nonzero() < 8


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("flip_rate", 0.0),
        ("flip_rate", 1.5),
        ("power", -1.0),
        ("decay", 0.0),
        ("decay", 1.1),
        ("quanta", 0.0),
        ("quanta", 128.0),
        ("clip", 0.0),
        ("carry", 1),
        ("gain", 0.001),
        ("gain", 2.0),
        ("dead_band", 1.0),
        ("dead_band", -0.1),
        ("magnitude_decay", 1.0),
        ("exponent_rate", 0.0),
        ("band", -1),
    ],
)
def test_options_outside_their_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=option):
        MomentumVotesConfig(**{option: value})


# --- runs


def write(path: Path, *, steps: int, model: str = "", **rule: Any) -> Path:
    (path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    lines = [
        "name: momentum",
        f"data: {{name: text, path: {path / 'text.txt'}, tokenizer: characters}}",
        "model: {name: decoder, width: 32, layers: 1, heads: 2, max_length: 16, group_size: row, "
        "scale_rule: frozen, "
        f"float_parts: [embedding, head]{model}}}",
        "optimizer:",
        "  name: split",
        f"  ternary: {json.dumps({'name': 'momentum_votes', **rule})}",
        "  float: {name: adamw, lr: 0.004}",
        "checkpoint: {every: 8, keep: 9}",
        f"phases: [{{name: standard, steps: {steps}, batch_size: 4, block_size: 16, eval_every: "
        f"1000, "
        "lr_schedule: linear, warmup_steps: 5, gradient_accumulation_steps: 2}]",
    ]
    (path / "config.yaml").write_text("\n".join(lines))
    return path / "config.yaml"


@pytest.mark.parametrize("model", ["", ", vote_bits: 4, gradients: int8"])
def test_a_run_learns_and_writes_its_threshold(tmp_path: Path, model: str) -> None:
    config = load_config(write(tmp_path, steps=60, model=model, flip_rate=0.02)).config
    report = train(config, RunRequest(directory=tmp_path / "run"))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "flips" in line]
    # The text has 16 characters: log 16 = 2.77 nats is chance.
    assert report.validation_loss < 1.5
    assert sum(line["flips"] for line in steps) > 0
    assert len({line["flip_threshold"] for line in steps}) > 10


def test_resumed_run_is_bitwise(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, steps=16)).config
    train(config, RunRequest(directory=tmp_path / "whole"))
    checkpoints = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2
    before = {file.name: file.read_bytes() for file in checkpoints[1].iterdir()}
    for file in checkpoints[1].iterdir():
        file.unlink()
    checkpoints[1].rmdir()
    train(config, RunRequest(directory=None, resume=str(checkpoints[0])))
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        assert (checkpoints[1] / name).read_bytes() == before[name], name
