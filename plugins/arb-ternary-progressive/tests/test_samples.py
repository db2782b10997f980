"""Samples from the batches of any dataloader."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch
from arb_ternary_progressive.samples import as_batch, content_ids

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
IDS = torch.tensor([17, 4])


def test_a_mapping_may_have_further_tensors() -> None:
    raw = {
        "input_ids": TOKENS.int(),
        "sample_ids": IDS,
        "targets": (TOKENS + 1).int(),
        "loss_mask": (TOKENS > 2).int(),
        "weight": torch.ones(2),
        "name": ["a", "b"],
    }
    batch = as_batch(raw)
    assert batch.data.dtype == torch.int64
    assert torch.equal(batch.data, torch.cat((TOKENS, TOKENS[:, -1:]), dim=1))
    assert torch.equal(batch.sample_ids, IDS)
    assert torch.equal(batch.extras["targets"], TOKENS + 1)
    assert torch.equal(batch.extras["loss_mask"], TOKENS > 2)
    assert sorted(batch.extras) == ["loss_mask", "targets", "weight"]


def test_tensors_tuples_and_lists_are_inputs_and_targets() -> None:
    for raw in (TOKENS, (TOKENS,), [TOKENS]):
        assert torch.equal(as_batch(raw).data[:, :-1], TOKENS)
    assert torch.equal(as_batch((TOKENS, TOKENS + 1)).extras["targets"], TOKENS + 1)


def test_a_batch_of_the_core_stays_as_it_is() -> None:
    batch = Batch(TOKENS, IDS, {"weight": torch.ones(2)})
    assert as_batch(batch) is batch


def test_ids_by_content_are_a_digest_of_the_tokens() -> None:
    digest = hashlib.blake2b(np.array([1, 2, 3], dtype="<i8").tobytes(), digest_size=8).digest()
    assert content_ids(TOKENS)[0].item() == int.from_bytes(digest, "little") >> 1
    assert torch.equal(content_ids(TOKENS.flip(0)), content_ids(TOKENS).flip(0))
    assert torch.equal(as_batch(TOKENS).sample_ids, content_ids(TOKENS))
    rows = torch.randint(0, 9, (500, 12), generator=torch.Generator().manual_seed(0))
    assert len(content_ids(rows).unique()) == len(rows.unique(dim=0))


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
        as_batch(raw)
    assert caught.value.what.startswith("batch: ")
    assert message in caught.value.what


def test_a_misspelt_key_is_found() -> None:
    with pytest.raises(DataError, match="Rename 'inputs_ids' to 'input_ids'"):
        as_batch({"inputs_ids": TOKENS})
