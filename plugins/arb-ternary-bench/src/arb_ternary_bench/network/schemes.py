"""The transfers per step of each way to train, and the training state per GPU.

With votes, float parts are summed in the order of micro-batches, in float32. In the other schemes
weights and gradients are bfloat16, two bytes, and AdamW's state is 16 bytes per parameter (bfloat16
weight and gradient, float32 master weight and two moments).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from attrs import frozen

from arb_ternary_bench.network.collectives import (
    Sent,
    across_nodes,
    all_gather,
    all_reduce,
    all_to_all,
    inside_node,
)
from arb_ternary_bench.network.config import ClusterConfig, NetworkConfig, SchemeName
from arb_ternary_bench.network.model import Model

#: Largest digits on the wire, and their bits: 5, 3, 2 or 1 share a byte, or one takes two bytes.
_DIGITS: Final = ((1, 8 / 5), (2, 8 / 3), (7, 4.0), (127, 8.0), (32767, 16.0))
#: Bytes per flip; a block of this many weights has two bytes more for its number of flips.
_FLIP_BYTES: Final = 2
_FLIP_BLOCK: Final = 32768
#: Largest sum of the votes that a micro-batch has for an exponent.
_EXPONENT_VOTE: Final = 127
#: Bits of a packed trit; of a word of dense digits.
_TRIT_BITS: Final = 2
_WORD_BITS: Final = 64
_BF16 = 2
_FLOAT32 = 4
_ADAM_STATE = 16
#: Bytes of the sum of a step's votes for a weight. Every rank has one for all weights, unless
#: weights are sharded.
_SUM_BYTES: Final = 2

SUMMARIES: Final[Mapping[SchemeName, str]] = {
    "votes": "votes to the owners of rows, flips back",
    "votes_node_sums": "the same, votes summed inside a machine first",
    "trit_gathers": "what sharded weights send in addition: two gathers per micro-batch, votes "
    "in every round",
    "ddp": "DDP, gradients in bfloat16",
    "fsdp2": "FSDP2: two gathers per micro-batch and a reduce-scatter, bfloat16",
    "hsdp": "HSDP: FSDP2 inside a machine, an all-reduce of the shards between them",
    "powersgd": "PowerSGD: low-rank factors in float32 (Vogels et al. 2019)",
    "one_bit_adam": "1-bit Adam, mean over warm-up and compressed steps (Tang et al. 2021)",
}


@frozen
class Transfer:
    """One collective of a step, or the same one several times."""

    what: str
    sent: Sent


def bits_in_bytes(limit: int) -> float:
    """Return the bits of a digit from ``-limit`` to ``limit`` on the wire, packed into bytes.

    Raises:
        ValueError: the limit is larger than an int16.
    """
    for largest, bits in _DIGITS:
        if limit <= largest:
            return bits
    raise ValueError(f"{limit} does not fit an int16")


def bits_in_words(limit: int) -> float:
    """Return the bits per digit from ``-limit`` to ``limit``, packed into 64-bit words."""
    return _WORD_BITS / math.floor(_WORD_BITS / math.log2(2 * limit + 1))


def transfers(
    scheme: SchemeName, config: NetworkConfig, model: Model, cluster: ClusterConfig
) -> list[Transfer]:
    """Return what a GPU sends per step."""
    return _TRANSFERS[scheme](config, model, cluster)


def state_bytes(
    scheme: SchemeName, config: NetworkConfig, model: Model, cluster: ClusterConfig
) -> float:
    """Return the bytes of weights, optimizer state and gradients or sums of votes on one GPU."""
    if scheme in ("votes", "votes_node_sums", "trit_gathers"):
        votes = config.votes
        exponents = model.exponents(votes.group_size) * (1 + (votes.scale_rule == "residual"))
        shards = cluster.ranks if scheme == "trit_gathers" else 1
        trits = model.weights * _TRIT_BITS / 8 / shards
        # Without an accumulator from step to step there is one within a step, of the same size.
        owned = model.weights * votes.vote_bits / 8 / cluster.ranks
        sums = _SUM_BYTES * model.weights / shards
        return (
            trits
            + owned
            + sums
            + exponents
            + _FLOAT32 * model.edges / 2
            + _ADAM_STATE * model.float_parameters
        )
    shards = {"fsdp2": cluster.ranks, "hsdp": cluster.gpus}.get(scheme, 1)
    return _ADAM_STATE * model.parameters / shards


def _limit(config: NetworkConfig, cluster: ClusterConfig) -> int:
    """Return the largest sum of votes of one GPU."""
    return cluster.rounds * config.votes.largest(cluster.batches)


def _with_votes(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    """Return ordered sums of floats and what exponents learn by, the same for all ways of votes."""
    # Statistics and magnitudes of rows and columns, and a float sum of each matrix; then gradients
    # of float parts.
    floats = _FLOAT32 * (2 * model.edges + model.count + model.float_parameters)
    found = [
        Transfer(
            "float sums to owners, in order", all_to_all(floats, cluster).times(cluster.rounds)
        ),
        Transfer("float sums back", all_gather(floats, cluster)),
    ]
    if config.votes.scale_rule == "residual":
        count = model.exponents(config.votes.group_size)
        bits = bits_in_bytes(_EXPONENT_VOTE * cluster.rounds)
        found.append(
            Transfer("votes of exponents to owners", all_to_all(count * bits / 8, cluster))
        )
        found.append(Transfer("accumulators of exponents back", all_gather(count, cluster)))
    return found


def _flips(config: NetworkConfig, model: Model) -> float:
    counts = math.ceil(model.weights / _FLIP_BLOCK)
    return _FLIP_BYTES * (counts + model.weights * config.votes.flip_share)


def _votes(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    digits = model.weights * bits_in_bytes(_limit(config, cluster)) / 8
    return [
        Transfer("votes to owners", all_to_all(digits, cluster)),
        Transfer("flips back", all_gather(_flips(config, model), cluster)),
        *_with_votes(config, model, cluster),
    ]


def _votes_node_sums(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    limit = _limit(config, cluster)
    digits = model.weights * bits_in_bytes(limit) / 8
    bits_of = bits_in_words if config.votes.sums_in == "words" else bits_in_bytes
    bits = bits_of(limit * cluster.gpus)
    sums = model.weights * bits / 8 / cluster.gpus
    flips = _flips(config, model)
    return [
        Transfer("votes to sums of the machine", inside_node(digits, cluster)),
        Transfer("sums to owners", across_nodes(sums, cluster)),
        Transfer("flips back between machines", across_nodes(flips / cluster.gpus, cluster)),
        Transfer("flips back inside a machine", inside_node(flips, cluster)),
        *_with_votes(config, model, cluster),
    ]


def _trit_gathers(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    gathers = all_gather(model.weights * _TRIT_BITS / 8, cluster).times(2 * cluster.rounds)
    found = [Transfer("packed trits, forward and backward", gathers)]
    if cluster.rounds > 1:
        often = cluster.rounds * bits_in_bytes(config.votes.largest(cluster.batches))
        once = _limit(config, cluster)
        bits = model.weights * (often - bits_in_bytes(once))
        if config.votes.scale_rule == "residual":
            in_rounds = cluster.rounds * bits_in_bytes(_EXPONENT_VOTE)
            more = in_rounds - bits_in_bytes(_EXPONENT_VOTE * cluster.rounds)
            bits += model.exponents(config.votes.group_size) * more
        found.append(
            Transfer("votes in every round, beyond those sent once", all_to_all(bits / 8, cluster))
        )
    return found


def _ddp(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    return [Transfer("gradients", all_reduce(_BF16 * model.parameters, cluster))]


def _fsdp2(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    whole = all_gather(_BF16 * model.parameters, cluster)
    return [
        Transfer("weights, forward and backward", whole.times(2 * cluster.rounds)),
        Transfer("gradients to shards", whole),
    ]


def _hsdp(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    whole = inside_node(_BF16 * model.parameters, cluster)
    shard = across_nodes(_BF16 * model.parameters / cluster.gpus, cluster)
    return [
        Transfer("weights, forward and backward", whole.times(2 * cluster.rounds)),
        Transfer("gradients to shards", whole),
        Transfer("gradients of shards between machines", shard.times(2)),
    ]


def _powersgd(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    rank = config.powersgd_rank
    factors = sum(
        min(rank * (each.rows + each.columns), each.rows * each.columns) * each.count
        for each in model.matrices
    )
    return [Transfer("factors", all_reduce(_FLOAT32 * (factors + model.float_parameters), cluster))]


def _one_bit_adam(config: NetworkConfig, model: Model, cluster: ClusterConfig) -> list[Transfer]:
    warmup = config.one_bit_warmup
    bits = model.parameters / 8
    return [
        Transfer(
            "gradients while warming up",
            all_reduce(_BF16 * model.parameters, cluster).times(warmup),
        ),
        Transfer("signs of momenta to servers", all_to_all(bits, cluster).times(1 - warmup)),
        Transfer("signs of means back", all_gather(bits, cluster).times(1 - warmup)),
    ]


_TRANSFERS: Final[
    Mapping[SchemeName, Callable[[NetworkConfig, Model, ClusterConfig], list[Transfer]]]
] = {
    "votes": _votes,
    "votes_node_sums": _votes_node_sums,
    "trit_gathers": _trit_gathers,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "powersgd": _powersgd,
    "one_bit_adam": _one_bit_adam,
}
