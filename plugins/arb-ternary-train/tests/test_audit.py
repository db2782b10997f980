"""The audit of what a model stores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arb_ternary import TernaryEmbedding, TernaryLinear, TernaryRMSNorm
from arb_ternary_train.audit import audit


def test_the_audit_counts_what_is_there_and_nothing_else() -> None:
    pure = nn.ModuleDict(
        {
            "e": TernaryEmbedding(10, 20),
            "l": TernaryLinear(20, 10, bias=True),
            "n": TernaryRMSNorm(20),
        }
    )
    report = audit(pure)
    assert report.pure
    assert report.ternary_weights == 10 * 20 + 20 * 10 + 20
    assert report.parameters == report.ternary_weights + 10
    assert report.state_bytes == sum(b.nbytes for b in pure.buffers())
    mixed = nn.Sequential(pure["l"], nn.BatchNorm1d(10), nn.Linear(10, 3))
    mixed[2].weight.requires_grad_(False)
    report = audit(mixed)
    assert not report.pure
    assert (report.float_parameters, report.float_buffers) == (10 + 10 + 30 + 3, 20)
    frozen = {row.what: row.elements for row in report.rows}["float parameters, frozen"]
    assert frozen == 30


def test_audit_counts_moments_and_tied_tensors_once() -> None:
    layer = nn.Linear(8, 8, bias=False)
    tied = nn.Sequential(layer, layer)
    optimizer = torch.optim.AdamW(tied.parameters())
    tied(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    report = audit(tied, optimizer)
    assert report.parameters == 64
    assert report.optimizer_bytes == 2 * 64 * 4 + 4
    assert report.state_bytes == 3 * 64 * 4 + 4


def test_a_large_layer_takes_the_bits_of_the_format() -> None:
    layer = TernaryLinear(4096, 256, group_size=128)
    # 2 + 8 + 16 / 128 bits, and 33 bytes of control words and origin per layer.
    assert audit(layer).state_bits_per_parameter == pytest.approx(
        10.125 + 33 * 8 / (4096 * 256), abs=1e-9
    )


def test_audit_counts_2_bit_votes_as_working_memory() -> None:
    counted = {}
    for bits in (8, 4, 2):
        layer = TernaryLinear(4096, 256, vote_bits=bits)
        report = audit(layer)
        counted[bits] = report.state_bits_per_parameter
        working = 4 * (1 + 256 + 4096) + 3 * 8 + (256 * 4096 // 4 if bits == 2 else 0)
        assert report.working_bytes == working
        layer.use_scaled_votes()
        assert audit(layer).working_bytes == working + 2 * 4 * (256 + 4096)
        assert audit(layer).state_bytes == report.state_bytes
    assert counted[8] - counted[4] == pytest.approx(4.0)
    assert counted[4] - counted[2] == pytest.approx(4.0)
    assert counted[2] == pytest.approx(2.125 + 33 * 8 / (4096 * 256))


def test_the_names_that_training_adds_to_the_package() -> None:
    import arb_ternary
    from arb_ternary_train import update

    assert arb_ternary.audit is audit
    assert arb_ternary.ternary_update is update.ternary_update
    with pytest.raises(AttributeError, match="has no attribute 'adit'"):
        _ = arb_ternary.adit
