"""Choose the hidden positions of a sample, and replace their tokens.

Both are pure functions of the sample's id, its time and the seed, by the counter hash of the core.
They are the same in any row of any batch, on every device, and in every epoch.

Shapes: ``B`` samples, ``S`` positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from arb_ternary.counters.hashing import counter_hash_rows, stream_id, uniform_
from arb_ternary.errors import ConfigError

# Streams of the hash: the order in which positions are hidden, the kind of replacement, and the
# random tokens.
_POSITIONS: Final = stream_id("arb_ternary_progressive.positions")
_REPLACEMENT: Final = stream_id("arb_ternary_progressive.replacement")
_RANDOM_TOKEN: Final = stream_id("arb_ternary_progressive.random_token")

#: Resolution of times: those that differ by less than 1 / _TIMES have the same masks.
_TIMES: Final = 1 << 20


def hidden_count(positions: int, share: float) -> int:
    """Return ``floor(positions share)``, with a tolerance for floating-point error."""
    return math.floor(positions * share + 1e-9)


def time_key(time: float | None) -> int:
    """Return the integer that stands for a time in the hash; 0 without a time."""
    return 0 if time is None else 1 + round(time * _TIMES)


def hidden_positions(
    sample_ids_B: Tensor, positions: int, shares: Sequence[float], keys: Sequence[int], seed: int
) -> Tensor:
    """Return bool ``[B, S]``, true at exactly ``floor(S share)`` positions of each row.

    Args:
        sample_ids_B: identity of each sample, int64.
        positions: ``S``.
        shares: share of hidden positions, one per row.
        keys: hash keys of the times, one per row; see :func:`time_key`.
        seed: seed of the run.
    """
    order_BS = _hash(sample_ids_B, positions, keys, seed, _POSITIONS)
    # The rank of each position in the order of the hashes. Ties go to the earlier position.
    rank_BS = order_BS.argsort(dim=1, stable=True).argsort(dim=1)
    counts_B = torch.tensor(
        [hidden_count(positions, share) for share in shares], device=rank_BS.device
    )
    return rank_BS < counts_B.unsqueeze(1)


def corrupt(
    tokens_BS: Tensor,
    hidden_BS: Tensor,
    sample_ids_B: Tensor,
    keys: Sequence[int],
    seed: int,
    *,
    vocabulary_size: int,
    mask_token: int,
    mask_share: float,
    random_share: float,
) -> Tensor:
    """Return ``tokens_BS`` with the hidden tokens replaced.

    A hidden token becomes the mask token or a random one, or it stays. The replacement does not
    depend on the token. A random token is uniform over all ids but the mask token.

    Args:
        tokens_BS: the samples, int64.
        hidden_BS: the positions that may change.
        sample_ids_B: identity of each sample.
        keys: as in :func:`hidden_positions`.
        seed: seed of the run.
        vocabulary_size: number of token ids, the mask token included.
        mask_token: id of the mask token.
        mask_share: probability of the mask token.
        random_share: probability of a random token.

    Raises:
        ConfigError: there is no token but the mask token to draw from.
    """
    positions = tokens_BS.shape[1]
    draw_BS = uniform_(_hash(sample_ids_B, positions, keys, seed, _REPLACEMENT))
    replaced_BS = tokens_BS.masked_fill(hidden_BS & (draw_BS < mask_share), mask_token)
    if random_share == 0.0:
        return replaced_BS
    if vocabulary_size < 2:
        raise ConfigError(
            f"random_share: a vocabulary of {vocabulary_size} has no token but the mask token"
        )
    random_BS = _hash(sample_ids_B, positions, keys, seed, _RANDOM_TOKEN).long() & 0x7FFFFFFF
    random_BS %= vocabulary_size - 1
    random_BS += random_BS >= mask_token
    is_random_BS = hidden_BS & (draw_BS >= mask_share) & (draw_BS < mask_share + random_share)
    return torch.where(is_random_BS, random_BS, replaced_BS)


def _hash(
    sample_ids_B: Tensor, positions: int, keys: Sequence[int], seed: int, stream: int
) -> Tensor:
    """Return int32 ``[B, S]``; row ``b`` depends on its sample id and key alone."""
    distinct = sorted(set(keys))
    if len(distinct) == 1:
        return counter_hash_rows(sample_ids_B, positions, seed, distinct[0], stream)
    bits_BS = torch.empty((len(keys), positions), dtype=torch.int32, device=sample_ids_B.device)
    keys_B = torch.tensor(keys, device=sample_ids_B.device)
    for key in distinct:
        rows_R = (keys_B == key).nonzero().squeeze(1)
        bits_BS[rows_R] = counter_hash_rows(sample_ids_B[rows_R], positions, seed, key, stream)
    return bits_BS
