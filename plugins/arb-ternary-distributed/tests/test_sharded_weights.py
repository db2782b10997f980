"""Ranks with sharded weights train as one process does, in less memory."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from arb_ternary.backends import reference
from arb_ternary.backends.decode_cache import DecodeCache
from arb_ternary.backends.select import use_backend
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary_distributed.exchange import exchange_votes
from arb_ternary_distributed.process_group import ProcessGroup
from arb_ternary_distributed.sharded_weights import ShardedWeights
from arb_ternary_distributed.shards import gather_rows, shard_rows
from arb_ternary_distributed.sums import OrderedSums
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.audit import audit
from arb_ternary_train.model_state import ModelState
from arb_ternary_train.world import SingleProcess, World
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_test_support.ranks import on_ranks

MICROBATCHES = 3
STEPS = 12
VOCABULARY = 37
# Exponents that do not learn leave it to the flips to say that a decoded weight is stale.
TIED = {
    "layers": 1,
    "tie_embeddings": True,
    "float_parts": ("norms",),
    "learned_norms": True,
    "scale_rule": "frozen",
}
VECTORS = {
    "layers": 2,
    "row_scales": True,
    "learned_norms": True,
    "vector_trits": 4,
    "scale_rule": "frozen",
}
EXPERTS = {"layers": 3, "experts": 4, "learned_norms": True}


def decoder(options: dict[str, Any]) -> Decoder:
    torch.manual_seed(0)
    with use_backend("torch"):
        model = Decoder(
            DecoderConfig(**{"width": 32, "heads": 2, "max_length": 8, **options}), VOCABULARY
        )
    seed_votes(model, 7)
    return model


def trained(world: World, options: dict[str, Any], recompute: bool) -> dict[str, Any]:
    """Losses, flips and the state after steps of three micro-batches; that of index 1 has no finite
    loss in step 5.
    """
    # The cache of the process holds decoded weights of earlier tests until they are collected.
    with patch.object(reference, "CACHE", DecodeCache()) as cache:
        return trained_with(cache, world, options, recompute)


def trained_with(
    cache: DecodeCache, world: World, options: dict[str, Any], recompute: bool
) -> dict[str, Any]:
    model = decoder(options)
    model.set_activation_checkpointing(recompute)
    optimizer = ScaledVotes(collect_trainable(model).ternary, lr=0.5)
    modules = [module for _, module in ternary_modules(model)]
    for module in modules:
        module.sum_votes()
    weights = rounds = None
    if isinstance(world, ProcessGroup):
        weights = ShardedWeights(model, world)
        shard_rows(model, world)
        rounds = weights.round_exchange(modules)
        exchange_votes(optimizer, world, rounds)
    losses = []
    flips = []
    for step in range(STEPS):
        total = OrderedSums(world) if isinstance(world, ProcessGroup) else None
        for first in range(0, MICROBATCHES, world.size):
            index = first + world.rank
            if finite := index < MICROBATCHES:
                for module in modules:
                    module.begin_microbatch(index)
                ids = torch.randint(
                    0,
                    VOCABULARY,
                    (2, 8),
                    generator=torch.Generator().manual_seed(step * MICROBATCHES + index),
                )
                loss = (
                    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
                    / MICROBATCHES
                )
                losses.append((step, index, float(loss.detach())))
                if finite := (step, index) != (5, 1):
                    loss.backward()
            if weights is not None and rounds is not None:
                weights.end_round()
                rounds.end_round(last=first + world.size >= MICROBATCHES)
            if total is not None:
                parts = [
                    part
                    for m in modules
                    for part in (m.sums.stats, m.sums.magnitudes)
                    if part is not None
                ]
                total.add_round(parts, [finite] * len(parts))
                for part in parts:
                    part.zero_()
            for module in modules:
                module.end_microbatch()
        if total is not None:
            sums = iter(total.finish())
            for module in modules:
                module.stats.copy_(next(sums))
                if module.magnitudes is not None:
                    module.magnitudes.copy_(next(sums))
        flips.append(optimizer.step().flips)
        optimizer.zero_grad()
        if step == 10 and world.rank == 0:  # the only batch of an evaluation is that of rank 0
            model.eval()
            with torch.no_grad():
                losses.append((step, -1, float(model(torch.arange(8).view(1, 8)).square().mean())))
            model.train()
        if step == 10 and weights is not None:
            weights.end_evaluation_round()
    found = {
        "losses": sorted(loss for rank in world.gather(losses) for loss in rank),
        "flips": flips,
        "held": sum(held_bytes(module.weight) for module in modules),
        "decoded": cache.nbytes,
        "state": {
            name: tensor for part in ModelState(model).parts() for name, tensor in part.items()
        },
        "outlines": [
            (name, tuple(tensor.shape), tensor.dtype)
            for name, tensor in ModelState(model).outlines()
        ],
        "floats": sorted(collect_trainable(model).floats),
    }
    if weights is not None and world.rank == 0:
        with (
            weights.main_process_only(),
            pytest.raises(ConfigError, match="one rank alone asks for weights"),
        ):
            model(torch.arange(8).view(1, 8))
        with (
            weights.main_process_only(),
            pytest.raises(ConfigError, match="one rank alone asks for weights"),
        ):
            modules[0].trits()
    gather_rows(model)
    if weights is not None:
        weights.gather_full()
    found["audit"] = audit(model)
    found["kinds"] = [type(module).__name__ for module in modules]
    found["names"] = [name for name, _ in model.named_buffers()]
    if world.rank == 0:  # it needs no other rank for this any more
        model.eval()
        with torch.no_grad():
            found["logits"] = model(torch.arange(8).view(1, 8))
        found["trits"] = sum(int(module.trits().sum()) for module in modules)
    return found


def held_bytes(weight: Tensor) -> int:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.untyped_storage().size()


@pytest.mark.parametrize(
    ("options", "recompute", "size"),
    [
        (TIED, True, 2),
        (VECTORS, False, 2),
        pytest.param(EXPERTS, False, 2, marks=pytest.mark.slow),
        pytest.param(TIED, False, 3, marks=pytest.mark.slow),
    ],
    ids=["tied-2", "vectors-2", "experts-2", "tied-3"],
)
def test_sharded_weights_train_as_one_process_does(
    options: dict[str, Any], recompute: bool, size: int
) -> None:
    wanted = trained(SingleProcess(), options, recompute)
    assert sum(wanted["flips"]) > 100
    assert wanted["decoded"] > 0
    for rank, found in enumerate(on_ranks(size, trained, options, recompute)):
        assert found["losses"] == wanted["losses"]
        assert found["flips"] == wanted["flips"]
        assert found["decoded"] == wanted["decoded"]
        assert found["floats"] == wanted["floats"]
        assert found["outlines"] == wanted["outlines"]
        assert found["audit"] == wanted["audit"]
        assert found["kinds"] == wanted["kinds"]
        assert found["names"] == wanted["names"]
        assert list(found["state"]) == list(wanted["state"])
        for name, tensor in wanted["state"].items():
            assert torch.equal(found["state"][name], tensor), name
        if rank == 0:
            assert torch.equal(found["logits"], wanted["logits"])
            assert found["trits"] == wanted["trits"]
        rows = [module.shape for _, module in ternary_modules(decoder(options))]
        assert found["held"] == sum(
            math.ceil(each.out_features / size) * -(-each.in_features // 4) for each in rows
        )
