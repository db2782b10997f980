"""Ternary modules: their state, in flight and at rest."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from arb_ternary import (
    TernaryEmbedding,
    TernaryLinear,
    TernaryRMSNorm,
    reset_runtime_state,
)
from arb_ternary.counters.hashing import SEED, STREAM
from arb_ternary.errors import CheckpointError, UsageProblem
from arb_ternary.ternary.models import seed_votes
from arb_ternary.ternary.module import initial_trits


@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from([32, 64, 128, 256, "row"]),
    st.integers(0, 2**31),
)
def test_a_state_dict_is_at_rest_and_restores_every_bit(
    n: int, k: int, group: int | str, seed: int
) -> None:
    torch.manual_seed(seed)
    source = TernaryLinear(k, n, group_size=group, bias=True)  # type: ignore[arg-type]
    source.votes.random_(-128, 128)
    state = source.state_dict()
    assert state["weight"].shape == (n, -(-k // 5))
    assert state["votes"].shape == (n, k)
    target = TernaryLinear(k, n, group_size=group, bias=True)  # type: ignore[arg-type]
    target.load_state_dict(state)
    for (name, one), (_, other) in zip(source.named_buffers(), target.named_buffers(), strict=True):
        assert torch.equal(one, other), name


def test_a_damaged_weight_is_refused_by_name() -> None:
    model = nn.Sequential(TernaryLinear(10, 3))
    state = model.state_dict()
    state["0.weight"][1, 0] = 255
    with pytest.raises(CheckpointError, match=r"0\.weight: byte 255 at offset 2"):
        model.load_state_dict(state)


def test_exponents_of_their_own_survive_a_state_dict() -> None:
    source = TernaryLinear(64, 2, group_size=32)
    source.set_trits(source.trits(), torch.tensor([[-3, -4], [-5, -2]], dtype=torch.int8))
    target = TernaryLinear(64, 2, group_size=32)
    target.load_state_dict(source.state_dict())
    assert target.exponent_origin.tolist() == [[-3, -4], [-5, -2]]
    back = TernaryLinear(64, 2, group_size=32)
    target.load_state_dict(back.state_dict())
    assert target.exponent_origin.shape == (1, 1)


def test_set_trits_refuses_bad_input_and_changes_nothing() -> None:
    layer = TernaryLinear(8, 2)
    before = copy.deepcopy(layer.state_dict())
    for bad in (
        torch.full((2, 8), 2, dtype=torch.int8),
        torch.zeros(2, 7, dtype=torch.int8),
        torch.zeros(2, 8),
    ):
        with pytest.raises(ValueError, match="trits must be"):
            layer.set_trits(bad)
    with pytest.raises(ValueError, match="exponents must lie"):
        layer.set_trits(
            torch.zeros(2, 8, dtype=torch.int8), torch.full((2, 1), -127, dtype=torch.int8)
        )
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])


def test_the_dense_weight_is_trits_times_powers_of_two() -> None:
    layer = TernaryLinear(40, 2, group_size=32)
    trits = torch.randint(-1, 2, (2, 40), dtype=torch.int8)
    layer.set_trits(trits, torch.tensor([[-3, 2], [0, -1]], dtype=torch.int8))
    scale = torch.tensor([[0.125] * 32 + [4.0] * 8, [1.0] * 32 + [0.5] * 8])
    assert torch.equal(layer.dense_weight(), trits * scale)
    assert torch.equal(layer.dense_weight(torch.bfloat16).float(), trits * scale)


@pytest.mark.parametrize("fan_in", [16, 64, 256, 1024])
def test_initial_weights_keep_unit_variance(fan_in: int) -> None:
    layer = TernaryLinear(fan_in, 512, activations="float")
    y = layer(torch.randn(256, fan_in)).detach()
    # The nearest power of two is off by at most sqrt(2) in scale, 2 in variance; sampling adds a
    # few percent.
    assert 0.45 < float(y.var()) < 2.2


def test_initial_trits_have_the_density_of_a_rounded_gaussian() -> None:
    trits = initial_trits(400, 400)
    density = float((trits != 0).float().mean())
    exact = 1 - torch.erf(torch.tensor(0.5 * (2 / torch.pi) ** 0.5 / 2**0.5)).item()
    assert abs(density - exact) < 5 * (exact * (1 - exact) / 160_000) ** 0.5
    assert abs(float(trits.float().mean())) < 5 * (exact / 160_000) ** 0.5


def test_a_norm_starts_with_unit_gain_and_equals_torch() -> None:
    x = torch.randn(3, 48)
    for learned in (True, False):
        norm = TernaryRMSNorm(48, learned=learned)
        torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (48,), eps=1e-6))


def test_a_norm_gain_scales_features_and_casts_votes() -> None:
    norm = TernaryRMSNorm(4)
    norm.set_trits(
        torch.tensor([[1, 0, -1, 1]], dtype=torch.int8), torch.tensor([[1]], dtype=torch.int8)
    )
    x = torch.randn(3, 4)
    y = nn.functional.rms_norm(x, (4,), eps=1e-6)
    torch.testing.assert_close(norm(x), y * torch.tensor([2.0, 0.0, -2.0, 2.0]))
    g = torch.randn(3, 4)
    norm(x).backward(g)
    assert torch.equal(norm.votes[0], -(g * y).sum(0).sign().to(torch.int8))


def test_the_correlation_rule_scales_by_two_to_the_minus_mean() -> None:
    table = TernaryEmbedding(3, 4, scale_rule="correlation", kappa=4.0)
    assert table.correlation is not None
    assert table.steps is not None
    table.correlation[1, 0] = -3
    table.steps[1, 0] = 2
    rows = table(torch.tensor([0, 1]))
    plain = table.dense_weight()
    torch.testing.assert_close(rows[0], plain[0])
    torch.testing.assert_close(rows[1], plain[1] * 2 ** (4.0 * 3 / (2 * 4)))


def test_embedding_rows_equal_the_dense_rows() -> None:
    table = TernaryEmbedding(11, 70, group_size=32)
    ids = torch.tensor([[10, 0], [3, 3]])
    assert torch.equal(table(ids), table.dense_weight()[ids])


def test_resetting_reaches_every_module_that_carries_state() -> None:
    class Carrier(nn.Module):
        state = 1

        def reset_runtime_state(self) -> None:
            self.state = 0

    model = nn.Sequential(nn.Sequential(Carrier()), Carrier())
    reset_runtime_state(model)
    assert [module.state for module in model.modules() if isinstance(module, Carrier)] == [0, 0]


def test_seeding_gives_each_module_its_stream() -> None:
    model = nn.Sequential(TernaryLinear(4, 4), TernaryLinear(4, 4))
    seed_votes(model, 11)
    assert [int(m.control[SEED]) for m in model] == [11, 11]
    assert int(model[0].control[STREAM]) != int(model[1].control[STREAM])


def test_modules_copy_and_pickle() -> None:
    layer = TernaryLinear(6, 3, bias=True)
    layer(torch.randn(2, 6)).sum().backward()
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    for other in (copy.deepcopy(layer), torch.load(stream, weights_only=False)):
        for one, two in zip(layer.buffers(), other.buffers(), strict=True):
            assert torch.equal(one, two)
        other(torch.randn(2, 6)).sum().backward()


def test_half_precision_models_keep_integer_state() -> None:
    layer = TernaryLinear(8, 3).to(torch.bfloat16)
    assert layer.votes.dtype == torch.int8
    assert layer(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_statistics_are_not_in_the_state_dict() -> None:
    layer = TernaryLinear(8, 3)
    assert not any(value.is_floating_point() for value in layer.state_dict().values())


def test_votes_are_not_cast_in_the_copies_of_data_parallel() -> None:
    layer = TernaryLinear(8, 4)
    layer._is_replica = True  # type: ignore[assignment]
    with pytest.raises(UsageProblem, match="DataParallel: its copies of a model are thrown away"):
        layer(torch.ones(2, 8))
    with torch.no_grad():
        layer(torch.ones(2, 8))


def test_half_keeps_integers_and_a_cast_of_everything_is_refused() -> None:
    layer = TernaryLinear(8, 4)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer.half()
    with pytest.raises(UsageProblem, match="trits and accumulators are integers") as error:
        layer.type(torch.float16)
    assert "model.half()" in error.value.hint
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name
        assert buffer.dtype == before[name].dtype


def test_votes_are_not_cast_inside_of_distributed_data_parallel(tmp_path: Path) -> None:
    layer = TernaryLinear(8, 4)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), layer))
        with pytest.raises(UsageProblem, match="those of rank 0") as error:
            model(torch.ones(2, 8))
        assert "torchrun --nproc_per_node N -m arb_ternary train CONFIG" in error.value.hint
        # Evaluated or frozen it casts none, and outside the wrapper nothing is changed.
        with torch.no_grad():
            model(torch.ones(2, 8))
        layer.frozen = True
        model(torch.ones(2, 8)).sum().backward()
        layer.frozen = False
        layer(torch.ones(2, 8)).sum().backward()
        assert layer.logical_votes().any()
    finally:
        torch.distributed.destroy_process_group()
