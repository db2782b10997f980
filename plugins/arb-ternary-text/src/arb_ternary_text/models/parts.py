"""Make the parts of a decoder, ternary or float as ``float_parts`` says.

Parts are initialised for an input of unit variance: linears with variance 1 / fan_in, which keeps
it; the embedding with variance 1, or 1 / width if it is the head as well; gains with 1. Float parts
are Gaussian. Ternary parts take the nearest power of two as their scale.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arb_ternary.ternary.embedding import TernaryEmbedding, TernaryRMSNorm
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.config import DecoderConfig, FloatPart
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear


class FloatLinear(nn.Linear):
    """A float linear without bias, whose input may be rounded to int8 as in a ternary linear.

    Rounding is per token: ``s = max|x| / 127``, ``q = round_half_even(x / s)``. A zero row stays
    zero. The gradient passes straight through.

    Args:
        in_features: ``K``.
        out_features: ``N``.
        activations: ``int8`` rounds the input.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activations: Literal["int8", "float"] = "float",
    ) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.activations = activations
        nn.init.normal_(self.weight, std=1 / math.sqrt(in_features))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        """Map ``x [..., K]`` to ``[..., N]``."""
        return self.product(input)

    def product(self, x: Tensor) -> Tensor:
        """Multiply ``x`` by the weight.

        Subclasses with another ``forward`` call it too, so that a subclass that multiplies in
        another way overrides this method only.
        """
        return F.linear(rounded_to_int8(x) if self.activations == "int8" else x, self.weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activations={self.activations}"


def rounded_to_int8(x: Tensor) -> Tensor:
    """Round ``x`` as :class:`FloatLinear` describes; the gradient is that of ``x``."""
    with torch.no_grad():
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = wide.abs().amax(dim=-1, keepdim=True) / 127
        codes = torch.round(wide / scale.clamp_min(torch.finfo(wide.dtype).tiny))
        rounded = (codes * scale).to(x.dtype)
    # x - x.detach() is exactly 0, so the value is the rounded one and the gradient that of x.
    return rounded + (x - x.detach())


class TiedHead(nn.Module):
    """A head that reads the embedding's weights: ``logits = x @ W.T``.

    It holds the embedding outside the module tree, so that the weights are listed, saved and
    updated once, by the embedding. The votes of a ternary head go to the embedding's accumulators,
    as a second set per micro-batch.
    """

    def __init__(
        self, embedding: nn.Embedding | TernaryEmbedding, activations: Literal["int8", "float"]
    ) -> None:
        super().__init__()
        self.activations = activations
        self._embedding = (embedding,)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., D]`` to ``[..., V]``."""
        (table,) = self._embedding
        if isinstance(table, nn.Embedding):
            return F.linear(rounded_to_int8(x) if self.activations == "int8" else x, table.weight)
        return table.multiply(x, self.activations)


def make_linear(
    config: DecoderConfig, in_features: int, out_features: int, *, part: FloatPart = "linears"
) -> FloatLinear | TernaryLinear:
    """Make a linear as the config says.

    Args:
        config: the options of the model.
        in_features: ``K``.
        out_features: ``N``.
        part: the entry of ``float_parts`` that makes this linear float.
    """
    if part in config.float_parts:
        return FloatLinear(in_features, out_features, activations=config.activations)
    options: dict[str, Any] = {
        "group_size": config.exponent_groups,
        "activations": config.activations,
        "gradients": config.gradients,
        "scale_rule": config.scale_rule,
        "vote_bits": config.vote_bits,
    }
    if config.row_scales:
        options |= {"factors": "rows", "trits": config.vector_trits}
    elif config.linear_scales:
        options |= {"factors": "constant"}
    else:
        return TernaryLinear(in_features, out_features, **options)
    return ScaledTernaryLinear(in_features, out_features, **options)


def make_embedding(config: DecoderConfig, vocabulary_size: int) -> nn.Embedding | TernaryEmbedding:
    """Make the token embedding, ``ids[...] -> [..., D]``."""
    if "embedding" in config.float_parts:
        embedding = nn.Embedding(vocabulary_size, config.width)
        nn.init.normal_(embedding.weight, std=1 / math.sqrt(config.width) if config.tied else 1.0)
        return embedding
    return TernaryEmbedding(
        vocabulary_size,
        config.width,
        gradients=config.gradients,
        scale_rule=config.embedding_scale_rule,
        vote_bits=config.vote_bits,
        exponent_offset=-round(math.log2(config.width) / 2) if config.tied else 0,
    )


def make_head(
    config: DecoderConfig, vocabulary_size: int, embedding: nn.Embedding | TernaryEmbedding
) -> FloatLinear | TernaryLinear | TiedHead:
    """Make the output projection, ``x[..., D] -> [..., V]``.

    A head that starts at zero gets a gradient in the first step. The parts below it get one as soon
    as the head is not zero.
    """
    if config.tied:
        return TiedHead(embedding, config.activations)
    head = make_linear(config, config.width, vocabulary_size, part="head")
    if config.zero_head:
        make_zero(head)
    return head


@torch.no_grad()
def make_zero(linear: nn.Module) -> None:
    """Set the weight of a ternary or float linear to zero; leave other modules as they are."""
    if isinstance(linear, TernaryModule) and not linear.weight.is_meta:
        linear.set_trits(torch.zeros_like(linear.trits()))
    elif isinstance(linear, nn.Linear):
        nn.init.zeros_(linear.weight)


def make_norm(
    config: DecoderConfig, features: int, *, gain: bool, stored_eps: bool = False
) -> RMSNorm | TernaryRMSNorm:
    """Make an RMSNorm over the last dimension.

    Args:
        config: the options of the model.
        features: size of the last dimension.
        gain: whether this norm has a learned gain if the config asks for gains (``learned_norms``,
            or norms among the float parts). Otherwise it has neither parameters nor buffers.
        stored_eps: whether its eps is saved with the weights.
    """
    if gain and config.ternary_gains and config.vector_trits is None:
        return TernaryRMSNorm(
            features,
            eps=config.norm_eps,
            stored_eps=stored_eps,
            gradients=config.gradients,
            scale_rule=config.scale_rule,
            vote_bits=config.vote_bits,
        )
    return RMSNorm(
        features,
        eps=config.norm_eps,
        gain=gain and (config.ternary_gains or "norms" in config.float_parts),
        trits=config.vector_trits if config.ternary_gains else None,
        gradients=config.gradients,
        stored_eps=stored_eps,
    )


def make_sub_norm(config: DecoderConfig, features: int) -> RMSNorm | TernaryRMSNorm | nn.Identity:
    """Make the norm in front of an output or down projection; Identity without sub-norms."""
    if not config.has_sub_norms:
        return nn.Identity()
    return make_norm(config, features, gain=config.inner_gains, stored_eps=config.stored_eps)


def make_head_norm(config: DecoderConfig) -> RMSNorm | TernaryRMSNorm | nn.Identity:
    """Make the norm of each head's queries or keys; Identity without such norms."""
    if not config.has_query_key_norm:
        return nn.Identity()
    return make_norm(
        config, config.key_features, gain=config.inner_gains, stored_eps=config.stored_eps
    )
