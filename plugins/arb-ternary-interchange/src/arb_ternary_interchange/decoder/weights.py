"""The weights of a decoder as exporters write them, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary.ternary.embedding import StoredEps, TernaryRMSNorm
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.attention import Attention, Biases
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.experts import Experts
from arb_ternary_text.models.feed_forward import FeedForward
from arb_ternary_text.models.parts import TiedHead
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear

#: What int8 exponents may be; -127 and -128 have no normal float32.
_EXPONENTS = (-126, 127)


@frozen(eq=False)
class TernaryWeight:
    """A ternary matrix: ``W[n, k] = scale * row_scale[n] * trits[n, k] * 2**exponent[n, k //
    group_size]``.

    Attributes:
        trits: int8 ``[N, K]``.
        exponent: int8 ``[N, J]``.
        group_size: columns that share an exponent; ``K`` where a row does.
        scale: a further factor of the whole matrix.
        row_scale: float32 ``[N]``, numbers that float16 holds; None = 1.
    """

    trits: Tensor
    exponent: Tensor
    group_size: int
    scale: float = 1.0
    row_scale: Tensor | None = None

    def rows(self, which: slice | Tensor) -> TernaryWeight:
        """Some of its rows, or all in another order."""
        factors = None if self.row_scale is None else self.row_scale[which]
        return evolve(
            self, trits=self.trits[which], exponent=self.exponent[which], row_scale=factors
        )

    def dense(self) -> Tensor:
        """``W`` as float32 ``[N, K]``; exact where ``scale`` is a power of two and no number is
        subnormal.
        """
        exponent = self.exponent.to(torch.int32).repeat_interleave(self.group_size, dim=1)
        weight = torch.ldexp(self.trits.to(torch.float32), exponent[:, : self.trits.shape[1]])
        if self.row_scale is not None:
            weight = weight * self.row_scale.unsqueeze(1)
        return weight if self.scale == 1.0 else weight * self.scale

    def one_exponent(self) -> int | None:
        """The exponent of the whole matrix, or None where its groups have different ones."""
        first = int(self.exponent.flatten()[0])
        return first if bool((self.exponent == first).all()) else None


@runtime_checkable
class HoldsTernaryWeight(Protocol):
    """A linear of another distribution whose products are those of a ternary matrix."""

    def ternary_weight(self) -> TernaryWeight:
        """The matrix that a pass computes with."""


def weight_of(module: nn.Module) -> TernaryWeight | Tensor:
    """The weight of one module on the CPU: ternary as it is, else float32.

    A norm's is its gain ``[K]``, ones where it has none.

    Raises:
        ConfigError: the module is of a kind that has no weight to export.
    """
    if isinstance(module, TernaryRMSNorm):
        return module.dense_weight().view(-1).cpu()
    if isinstance(module, TernaryModule):
        scale = 1.0
        rows = None
        if isinstance(module, ScaledTernaryLinear):
            if module.scale is None:
                rows = module.factors().cpu()
            else:
                scale = float(module.scale)
        return TernaryWeight(
            module.trits().cpu(), module.exponent.cpu(), module.shape.group_size, scale, rows
        )
    if isinstance(module, HoldsTernaryWeight):
        return module.ternary_weight()
    if isinstance(module, RMSNorm):
        if module.gains is not None:
            return module.gains.values().cpu()
        return (
            torch.ones(module.normalized_shape) if module.weight is None else _floats(module.weight)
        )
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear | nn.Embedding) and isinstance(weight, Tensor):
        return _floats(weight)
    raise ConfigError(
        f"model: the weight of a {type(module).__name__} has no form in other formats"
    )


def exported_weights(model: Decoder) -> Iterator[tuple[str, TernaryWeight | Tensor]]:
    """Every tensor that an export of ``model`` needs, by the path of its module, one at a time.

    What other programs have no option for is in the weights: ``2**residual_scale`` in ``output``
    and ``down``, ``2**logit_scale`` in ``final_norm``, and the eps of an inner norm where it is not
    ``norm_eps`` in the scale of the linear before it. Norms without gains are ones. A tied head is
    left out, as are norms and gates that the model lacks.

    Raises:
        ConfigError: the model has experts or decoupled attention, or a part of a kind that cannot
            be exported.
    """
    yield "embedding", weight_of(model.embedding)
    for number, block in enumerate(model.blocks):
        if not isinstance(block, Block) or isinstance(block.feed_forward, Experts):
            raise ConfigError(
                f"model: block {number} is no plain block of the decoder, and exporters know no "
                f"other",
                "The nearest preset is `architecture: llama`, without experts.",
            )
        if not isinstance(block.attention, Attention):
            raise ConfigError(
                f"model: block {number} has decoupled attention, which no other program computes",
                "Use `attention: standard`, or export to safetensors (`arb export RUN OUT --format "
                "safetensors`).",
            )
        yield from _block_weights(
            f"blocks.{number}", block, block.attention, block.feed_forward, model
        )
    yield "final_norm", _times(weight_of(model.final_norm), 2.0**model.config.logit_scale)
    if not isinstance(model.head, TiedHead):
        yield "head", weight_of(model.head)


def _block_weights(
    path: str, block: Block, attention: Attention, feed_forward: FeedForward, model: Decoder
) -> Iterator[tuple[str, TernaryWeight | Tensor]]:
    # A norm takes the scale of what it reads away, but for its eps: norm(x, e) = norm(s x, s^2 e).
    before_eps = {
        "attention.query": _eps_scale(attention.query_norm, model),
        "attention.key": _eps_scale(attention.key_norm, model),
        "attention.value": _eps_scale(attention.output_norm, model),
        "feed_forward.up": _eps_scale(feed_forward.hidden_norm, model),
    }
    if feed_forward.gate is None:
        # What the norm reads is relu(up)^2.
        before_eps["feed_forward.up"] = math.sqrt(before_eps["feed_forward.up"])
    for part, layer in (("attention", attention), ("feed_forward", feed_forward)):
        for name, module in layer.named_children():
            where = f"{part}.{name}"
            if isinstance(module, nn.Identity):
                continue
            if isinstance(module, Biases):
                for each, bias in module.named_parameters():
                    yield f"{path}.{where}.{each}", _floats(bias) * before_eps[f"attention.{each}"]
                continue
            factor = (
                block.residual_scale if name in ("output", "down") else before_eps.get(where, 1.0)
            )
            yield f"{path}.{where}", _times(weight_of(module), factor)


def _eps_scale(norm: nn.Module, model: Decoder) -> float:
    if isinstance(norm, StoredEps) and norm.stored_eps:
        return math.sqrt(model.config.norm_eps / norm.eps)
    return 1.0


def _times(weight: TernaryWeight | Tensor, factor: float) -> TernaryWeight | Tensor:
    """``weight`` times ``factor``, in the exponents where it is a power of two that they hold, else
    in the scale.
    """
    if factor == 1.0:
        return weight
    if isinstance(weight, Tensor):
        return weight * factor
    mantissa, exponent = math.frexp(factor)
    moved = weight.exponent.to(torch.int16) + (exponent - 1)
    inside = not moved.numel() or (
        _EXPONENTS[0] <= int(moved.min()) and int(moved.max()) <= _EXPONENTS[1]
    )
    if mantissa != 0.5 or not inside:
        return evolve(weight, scale=weight.scale * factor)
    return evolve(weight, exponent=moved.to(torch.int8))


def _floats(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float32)
