"""Samples from the batches of any dataloader."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch
from arb_ternary_progressive.samples import as_samples, cache_keys, content_ids

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
IDS = torch.tensor([17, 4])


def test_a_mapping_may_have_further_keys() -> None:
    allowed = TOKENS > 2
    raw = {
        "input_ids": TOKENS.int(),
        "sample_ids": IDS,
        "targets": TOKENS + 1,
        "loss_mask": allowed,
        "name": ["a", "b"],
    }
    samples = as_samples(raw)
    assert samples.input_ids.dtype == torch.int64
    assert torch.equal(samples.input_ids, TOKENS)
    assert torch.equal(samples.sample_ids, IDS)
    assert torch.equal(samples.targets, TOKENS + 1)
    assert torch.equal(samples.loss_mask, allowed)
    assert samples.extras == {"name": ["a", "b"]}


def test_tensors_tuples_and_lists_are_inputs_and_targets() -> None:
    for raw in (TOKENS, (TOKENS,), [TOKENS]):
        assert torch.equal(as_samples(raw).input_ids, TOKENS)
    assert torch.equal(as_samples((TOKENS, TOKENS + 1)).targets, TOKENS + 1)


def test_a_batch_of_the_core_gives_its_inputs_and_ids() -> None:
    samples = as_samples(Batch(TOKENS, IDS, {"weight": torch.ones(2)}))
    assert samples.input_ids.tolist() == [[1, 2], [4, 5]]
    assert torch.equal(samples.sample_ids, IDS)
    assert list(samples.extras) == ["weight"]


def test_a_core_batch_keeps_the_inputs() -> None:
    batch = as_samples(
        {"input_ids": TOKENS, "sample_ids": IDS, "weight": torch.ones(2), "name": "x"}
    ).batch()
    assert torch.equal(batch.data[:, :-1], TOKENS)
    assert torch.equal(batch.sample_ids, IDS)
    assert list(batch.extras) == ["weight"]


def test_ids_by_content_are_a_digest_of_the_tokens() -> None:
    digest = hashlib.blake2b(np.array([1, 2, 3], dtype="<i8").tobytes(), digest_size=8).digest()
    assert content_ids(TOKENS)[0].item() == int.from_bytes(digest, "little") >> 1
    assert torch.equal(content_ids(TOKENS.flip(0)), content_ids(TOKENS).flip(0))
    assert torch.equal(as_samples(TOKENS).sample_ids, content_ids(TOKENS))
    rows = torch.randint(0, 9, (500, 12), generator=torch.Generator().manual_seed(0))
    assert len(content_ids(rows).unique()) == len(rows.unique(dim=0))


def test_cache_keys_are_ids_or_hashes_with_time() -> None:
    assert torch.equal(cache_keys(IDS), IDS)
    early = cache_keys(IDS, torch.tensor([0.1, 0.1]))
    late = cache_keys(IDS, torch.tensor([0.1, 0.4]))
    assert early[0] == late[0]
    assert early[1] != late[1]
    assert early[0] != early[1]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"inputs_ids": TOKENS}, "has no 'input_ids'; its keys are inputs_ids"),
        ({}, "has no 'input_ids'; its keys are none"),
        ("text", "must be a mapping, a tensor, a tuple of tensors or a batch of the core, not str"),
        ((TOKENS, TOKENS, TOKENS), "a tuple has inputs, or inputs and targets, not 3 items"),
        (TOKENS.float(), "token ids must be whole numbers [B, S], not torch.float32 [2, 3]"),
        (TOKENS[0], "token ids must be whole numbers [B, S], not torch.int64 [3]"),
        ({"input_ids": TOKENS, "sample_ids": IDS[:1]}, "'sample_ids' must be 2 whole numbers"),
        ({"input_ids": TOKENS, "targets": TOKENS[:, :2]}, "'targets' has the shape (2, 2)"),
        ({"input_ids": TOKENS, "loss_mask": TOKENS[:1]}, "'loss_mask' has the shape (1, 3)"),
    ],
)
def test_invalid_batches_are_errors(raw: object, message: str) -> None:
    with pytest.raises(DataError) as caught:
        as_samples(raw)
    assert caught.value.what.startswith("batch: ")
    assert message in caught.value.what


def test_a_misspelt_key_is_found() -> None:
    with pytest.raises(DataError, match="Rename 'inputs_ids' to 'input_ids'"):
        as_samples({"inputs_ids": TOKENS})
