"""Which tensors a decoder needs, and how they get into it, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import DataError
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_interchange.decoder.published import PublishedModel, ScaledTrits
from arb_ternary_interchange.decoder.scales import split_scales, ternary_rows
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear

#: Rows of a ternary matrix that are made dense at a time.
_ROWS = 1024


@frozen
class Placement:
    """What a model is given.

    Attributes:
        matrices: those that are read from the published model.
        vectors: gains and biases as they are to be, float64.
        eps: of inner norms, where they have an eps of their own.
        scales: float factors of linears; those left out are 1.
    """

    matrices: Collection[str]
    vectors: Mapping[str, Tensor]
    eps: Mapping[str, float]
    scales: Mapping[str, float]


def expected_tensors(
    config: DecoderConfig, vocabulary_size: int, names: Collection[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of such a decoder and its shape; a layer has biases where ``names`` has one of
    its.
    """
    width = config.width
    hidden = config.hidden
    queries = config.heads * config.key_features
    keys = config.key_heads * config.key_features
    yield "embedding", (vocabulary_size, width)
    for number in range(config.layers):
        attention = f"blocks.{number}.attention."
        feed_forward = f"blocks.{number}.feed_forward."
        yield attention + "norm", (width,)
        linears = (("query", queries), ("key", keys), ("value", keys))
        yield from ((attention + name, (size, width)) for name, size in linears)
        if any(f"{attention}biases.{name}" in names for name, _ in linears):
            yield from ((f"{attention}biases.{name}", (size,)) for name, size in linears)
        if config.has_query_key_norm:
            yield attention + "query_norm", (config.key_features,)
            yield attention + "key_norm", (config.key_features,)
        if config.has_sub_norms:
            yield attention + "output_norm", (queries,)
            yield feed_forward + "hidden_norm", (hidden,)
        yield attention + "output", (width, queries)
        yield feed_forward + "norm", (width,)
        if config.feed_forward_activation != "relu2":
            yield feed_forward + "gate", (hidden, width)
        yield feed_forward + "up", (hidden, width)
        yield feed_forward + "down", (width, hidden)
    yield "final_norm", (width,)
    if not config.tied:
        yield "head", (vocabulary_size, width)


def check_shape(name: str, found: Tensor | ScaledTrits, shape: tuple[int, ...]) -> None:
    """DataError where a tensor that was read is not of ``shape``."""
    there = tuple(found.trits.shape if isinstance(found, ScaledTrits) else found.shape)
    if there != shape:
        raise DataError(f"{name}: of shape {there}; the model's sizes make it {shape}")


@torch.no_grad()
def fill(published: PublishedModel, placement: Placement, model: nn.Module) -> None:
    """Give ``model``, a decoder, its weights; matrices are read one at a time.

    Raises:
        DataError: the published model has changed since it was looked at.
    """
    for name in placement.matrices:
        _give(name, published.read(name), model.get_submodule(name))
    for name, vector in placement.vectors.items():
        where, _, last = name.rpartition(".")
        holder = model.get_submodule(where) if ".biases." in name else model.get_submodule(name)
        held = getattr(holder, last if ".biases." in name else "weight")
        # A norm whose gain is 1 throughout has none, and it is left so.
        if held is not None:
            held.copy_(vector)
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm) and module.stored_eps:
            module.eps = placement.eps.get(name, module.eps)
        if isinstance(module, ScaledTernaryLinear) and module.scale is not None:
            module.scale.fill_(placement.scales.get(name, 1.0))


def _give(name: str, found: Tensor | ScaledTrits, module: nn.Module) -> None:
    if isinstance(module, TernaryModule):
        shape = module.shape
        check_shape(name, found, (shape.out_features, shape.in_features))
        if isinstance(found, ScaledTrits):
            split = split_scales(name, found)
            module.set_trits(
                split.trits, split.exponents(shape.out_features, shape.group_size, shape.groups)
            )
            row_scale = module.row_scale if isinstance(module, ScaledTernaryLinear) else None
            if row_scale is not None and split.row_factors is not None:
                row_scale.copy_(split.row_factors)
        else:
            trits, exponent, votes = ternary_rows(found, shape.group_size, shape.vote_bits)
            module.set_trits(trits, exponent, votes)
        return
    weight = module.get_parameter("weight")
    check_shape(name, found, tuple(weight.shape))
    if isinstance(found, Tensor):
        weight.copy_(found)
        return
    scale = found.scale.view(1, 1) if found.scale.numel() == 1 else found.scale
    for start in range(0, weight.shape[0], _ROWS):
        some = slice(start, start + _ROWS)
        factor = scale if scale.shape[0] == 1 else scale[some]
        if factor.shape[1] > 1:
            factor = factor.repeat_interleave(found.group_size, dim=1)[:, : weight.shape[1]]
        weight[some] = found.trits[some] * factor
