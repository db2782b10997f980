"""The weights of a decoder as exporters write them: the value and the scale at each path.

Other programs have no option for some things that the decoder does. They are put into the weights
here:

* ``2**residual_scale``, the factor of updates, into ``output`` and ``down``;
* ``2**logit_scale`` into ``final_norm``;
* the eps of an inner norm that is not ``norm_eps`` into the linear before the norm. A norm takes
  the scale of its input away, except for its eps: ``norm(x, e) = norm(s x, s^2 e)``;
* a norm without a gain gets a gain of ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, Protocol, runtime_checkable

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary.ternary.embedding import StoredEps, TernaryRMSNorm
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_interchange.decoder.scales import EXPONENTS
from arb_ternary_interchange.decoder.tensors import is_bias
from arb_ternary_text.models.attention import Attention, Biases
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.experts import Experts
from arb_ternary_text.models.parts import TiedHead
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear

#: The norm that reads what a linear computes.
_NORM_AFTER: Final = {
    "query": "attention.query_norm",
    "key": "attention.key_norm",
    "value": "attention.output_norm",
    "up": "feed_forward.hidden_norm",
}


@frozen(eq=False)
class TernaryWeight:
    """A ternary matrix: ``W[n, k] = scale * row_scale[n] * trits[n, k] * 2**exponent[n, k //
    group_size]``.

    Attributes:
        trits: int8 ``[N, K]``.
        exponent: int8 ``[N, J]``.
        group_size: columns that share an exponent; ``K`` if a row does.
        scale: a further factor of the whole matrix.
        row_scale: float32 ``[N]``, numbers that float16 holds; None = 1.
    """

    trits: Tensor
    exponent: Tensor
    group_size: int
    scale: float = 1.0
    row_scale: Tensor | None = None

    def rows(self, which: slice | Tensor) -> TernaryWeight:
        """Return some of the rows, or all of them in another order."""
        factors = None if self.row_scale is None else self.row_scale[which]
        return evolve(
            self, trits=self.trits[which], exponent=self.exponent[which], row_scale=factors
        )

    def dense(self) -> Tensor:
        """Return ``W`` as float32 ``[N, K]``. It is exact if ``scale`` is a power of two and no
        number is subnormal.
        """
        exponent = self.exponent.to(torch.int32).repeat_interleave(self.group_size, dim=1)
        weight = torch.ldexp(self.trits.to(torch.float32), exponent[:, : self.trits.shape[1]])
        if self.row_scale is not None:
            weight = weight * self.row_scale.unsqueeze(1)
        return weight if self.scale == 1.0 else weight * self.scale


@runtime_checkable
class HoldsTernaryWeight(Protocol):
    """A linear of another distribution that multiplies by a ternary matrix."""

    def ternary_weight(self) -> TernaryWeight:
        """Return the matrix that a forward pass multiplies by."""


def exported_weights(model: Decoder) -> Iterator[tuple[str, TernaryWeight | Tensor]]:
    """Yield the path and the value of every weight of ``model``, one weight at a time.

    Raises:
        ConfigError: the model has a part that cannot be exported.
    """
    for path in weight_paths(model):
        yield path, exported_weight(model, path)


def weight_paths(model: Decoder) -> Iterator[str]:
    """Yield the path of every weight that an export of ``model`` writes. A tied head is left out,
    as are norms and gates that the model lacks.

    Raises:
        ConfigError: the model has experts or decoupled attention.
    """
    yield "embedding"
    for number, block in enumerate(model.blocks):
        if not isinstance(block, Block) or isinstance(block.feed_forward, Experts):
            raise ConfigError(
                f"model: block {number} is not a plain block of the decoder, and exporters know no "
                f"other",
                "The nearest preset is `architecture: llama`, without experts.",
            )
        if not isinstance(block.attention, Attention):
            raise ConfigError(
                f"model: block {number} has decoupled attention, which no other program computes",
                "Use `attention: standard`, or export to safetensors (`arb export RUN OUT --format "
                "safetensors`).",
            )
        for part in ("attention", "feed_forward"):
            for name, module in block.get_submodule(part).named_children():
                path = f"blocks.{number}.{part}.{name}"
                if isinstance(module, Biases):
                    yield from (f"{path}.{each}" for each, _ in module.named_parameters())
                elif not isinstance(module, nn.Identity):
                    yield path
    yield "final_norm"
    if not isinstance(model.head, TiedHead):
        yield "head"


def exported_weight(model: Decoder, path: str) -> TernaryWeight | Tensor:
    """Return the weight at ``path``, one of :func:`weight_paths`, as exporters write it.

    Raises:
        ConfigError: its module is of a kind that cannot be exported.
    """
    weight: TernaryWeight | Tensor
    if is_bias(path):
        weight = _floats(model.get_parameter(path))
    else:
        weight = weight_of(model.get_submodule(path))
    return _times(weight, _factor(model, path))


def weight_of(module: nn.Module) -> TernaryWeight | Tensor:
    """Return the weight of one module on the CPU: ternary as it is, else as float32.

    The weight of a norm is its gain ``[K]``; it is ones if the norm has none.

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
    if isinstance(module, RMSNorm) and module.gains is not None:
        return module.gains.values().cpu()
    if isinstance(module, RMSNorm) and module.weight is None:
        return torch.ones(module.normalized_shape)
    weight = getattr(module, "weight", None)
    if isinstance(module, RMSNorm | nn.Linear | nn.Embedding) and isinstance(weight, Tensor):
        return _floats(weight)
    raise ConfigError(
        f"model: the weight of a {type(module).__name__} has no form in other formats"
    )


def _factor(model: Decoder, path: str) -> float:
    """Return the factor by which the weight at ``path`` is multiplied; see the module's
    docstring.
    """
    if path == "final_norm":
        return 2.0**model.config.logit_scale
    if not path.startswith("blocks."):
        return 1.0
    _, number, *_, name = path.split(".")
    block: Any = model.get_submodule(f"blocks.{number}")
    if name in ("output", "down"):
        return float(block.residual_scale)
    if name not in _NORM_AFTER:
        return 1.0
    norm = block.get_submodule(_NORM_AFTER[name])
    if not isinstance(norm, StoredEps) or not norm.stored_eps:
        return 1.0
    scale = math.sqrt(model.config.norm_eps / norm.eps)
    # Without a gate, the norm reads relu(up)^2.
    squared = name == "up" and block.feed_forward.gate is None
    return math.sqrt(scale) if squared else scale


def _times(weight: TernaryWeight | Tensor, factor: float) -> TernaryWeight | Tensor:
    """Return ``weight`` times ``factor``. A factor that is a power of two goes into the exponents
    as far as these can hold it, any other into the scale.
    """
    if factor == 1.0:
        return weight
    if isinstance(weight, Tensor):
        return weight * factor
    mantissa, exponent = math.frexp(factor)
    if mantissa != 0.5:
        return evolve(weight, scale=weight.scale * factor)
    moved = weight.exponent.to(torch.int16) + (exponent - 1)
    if moved.numel() and not EXPONENTS[0] <= int(moved.min()) <= int(moved.max()) <= EXPONENTS[1]:
        return evolve(weight, scale=weight.scale * factor)
    return evolve(weight, exponent=moved.to(torch.int8))


def _floats(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float32)
