"""Fill a decoder with the tensors of a published model, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import DataError
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_interchange.decoder.published import PublishedModel, ScaledTrits
from arb_ternary_interchange.decoder.scales import split_scales, ternary_rows
from arb_ternary_interchange.decoder.tensors import is_bias
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear

#: Rows of a ternary matrix that are made dense at a time.
_ROWS: Final = 1024


@frozen
class Placement:
    """The tensors that a decoder is filled with.

    Attributes:
        matrices: paths of the matrices that are read from the published model.
        vectors: final gains and biases, float64, by path.
        eps: eps of the inner norms that have one of their own, by path.
        scales: float factors of linears, by path; those left out are 1.
    """

    matrices: Collection[str]
    vectors: Mapping[str, Tensor]
    eps: Mapping[str, float]
    scales: Mapping[str, float]


def check_shape(path: str, found: Tensor | ScaledTrits, shape: tuple[int, ...]) -> None:
    """Raise DataError if a tensor that was read does not have the shape ``shape``."""
    there = tuple(found.trits.shape if isinstance(found, ScaledTrits) else found.shape)
    if there != shape:
        raise DataError(f"{path}: of shape {there}; the model's sizes make it {shape}")


@torch.no_grad()
def fill(published: PublishedModel, placement: Placement, model: nn.Module) -> None:
    """Give ``model``, a decoder, its weights; matrices are read one at a time.

    Raises:
        DataError: the published model has changed since it was looked at.
    """
    for path in placement.matrices:
        _fill_matrix(path, published.read(path), model.get_submodule(path))
    for path, vector in placement.vectors.items():
        # A norm whose gain is 1 throughout has no gain in the model.
        held = model.get_parameter(path) if is_bias(path) else model.get_submodule(path).weight
        if isinstance(held, Tensor):
            held.copy_(vector)
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm) and module.stored_eps:
            module.eps = placement.eps.get(path, module.eps)
        if isinstance(module, ScaledTernaryLinear) and module.scale is not None:
            module.scale.fill_(placement.scales.get(path, 1.0))


def _fill_matrix(path: str, found: Tensor | ScaledTrits, module: nn.Module) -> None:
    if isinstance(module, TernaryModule):
        _fill_ternary(path, found, module)
        return
    weight = module.get_parameter("weight")
    check_shape(path, found, tuple(weight.shape))
    if isinstance(found, Tensor):
        weight.copy_(found)
    else:
        _fill_dense(weight, found)


def _fill_ternary(path: str, found: Tensor | ScaledTrits, module: TernaryModule) -> None:
    shape = module.shape
    check_shape(path, found, (shape.out_features, shape.in_features))
    if isinstance(found, Tensor):
        trits, exponent, votes = ternary_rows(found, shape.group_size, shape.vote_bits)
        module.set_trits(trits, exponent, votes)
        return
    split = split_scales(path, found)
    exponent = split.exponents(shape.out_features, shape.group_size, shape.groups)
    module.set_trits(split.trits, exponent)
    row_scale = module.row_scale if isinstance(module, ScaledTernaryLinear) else None
    if row_scale is not None and split.row_factors is not None:
        row_scale.copy_(split.row_factors)


def _fill_dense(weight: Tensor, found: ScaledTrits) -> None:
    """Write the product of trits and scales into ``weight``, some rows at a time."""
    scale = found.scale.view(1, 1) if found.scale.numel() == 1 else found.scale
    for start in range(0, weight.shape[0], _ROWS):
        some = slice(start, start + _ROWS)
        factor = scale if scale.shape[0] == 1 else scale[some]
        if factor.shape[1] > 1:
            factor = factor.repeat_interleave(found.group_size, dim=1)[:, : weight.shape[1]]
        weight[some] = found.trits[some] * factor
