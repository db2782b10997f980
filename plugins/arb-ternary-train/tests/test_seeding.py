from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import torch

from arb_ternary_train.checkpoint_format import decode_state, encode_state
from arb_ternary_train.seeding import (
    derive_seed,
    derived_generator,
    deterministic_algorithms,
    global_rng_state,
    preserved_global_rng,
    restore_global_rng,
    seed_everything,
)

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [
        random.random(),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(1)),
    ]


def test_a_derived_seed_is_the_head_of_a_sha_256() -> None:
    digest = hashlib.sha256(b"int:7\x1fstr:mask\x1fint:0").digest()
    assert derive_seed(7, "mask", 0) == int.from_bytes(digest[:8], "big") // 2


def test_derived_seeds_tell_parts_types_and_order_apart() -> None:
    seeds = [
        derive_seed(*parts)
        for parts in ((1, 2), (2, 1), (12,), ("1", 2), (1, "2"), ("1", "2"), (1, 2, 0), ())
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_derived_generator_is_independent_of_earlier_draws() -> None:
    first = torch.rand(4, generator=derived_generator(1, "mask"))
    torch.rand(100)
    assert torch.equal(first, torch.rand(4, generator=derived_generator(1, "mask")))


def test_seeding_makes_every_global_generator_repeat() -> None:
    seed_everything(5)
    first = draw()
    seed_everything(5)
    assert draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_global_generators_continue_from_a_stored_state() -> None:
    seed_everything(1)
    draw()  # numpy now holds half of a pair of normal numbers
    tree, tensors = encode_state(global_rng_state(CPU))
    expected = [draw(), draw()]
    seed_everything(2)
    restore_global_rng(decode_state(json.loads(json.dumps(tree)), tensors), CPU)
    assert [draw(), draw()] == expected


def test_draws_inside_the_guard_leave_no_trace() -> None:
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with preserved_global_rng(CPU):
        seed_everything(9)
        draw()
    assert draw() == expected


def test_deterministic_algorithms_only_within_the_block() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    for wanted in (True, False):
        with deterministic_algorithms(wanted):
            assert torch.are_deterministic_algorithms_enabled() is wanted
        assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
