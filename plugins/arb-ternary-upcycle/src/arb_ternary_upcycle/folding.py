"""A decoder in another basis: norm gains in the linears behind them, residual stream and value
heads rotated.

All of it keeps the function. A norm without a gain commutes with a rotation ``Q`` of the residual
stream, so that with rows as vectors ``x' = x Q``: embeddings become ``E Q``, linears that read the
stream ``W Q``, linears that write to it ``Q^T W``. Values of key head ``g`` turn by ``R_g``, and
the columns of ``output`` behind its query heads turn back.

Shapes: ``D`` width, ``G`` key heads, ``H`` query heads, ``C`` features of a value head, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import evolve, frozen
from torch import Tensor

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.seeding import derived_generator
from arb_ternary_upcycle.rotation import random_rotation

_READS_ATTENTION = ("query", "key", "value")
_READS_FEED_FORWARD = ("gate", "up")
#: Rows of embedding and head that are multiplied at a time.
_ROWS = 4096


@frozen(eq=False)
class Basis:
    """What is done to the tensors of a decoder of ``config``.

    Attributes:
        config: the decoder's options.
        fold: gains go into the linears behind them.
        residual: ``Q``, float64 ``[D, D]``; None = the residual stream stays.
        seed: of the rotations of value heads; None = they stay.
    """

    config: DecoderConfig
    fold: bool
    residual: Tensor | None
    seed: int | None

    def block(self, number: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of block ``number`` by their names inside it, float32."""
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        if self.fold:
            _fold_gain(wide, "attention.norm", [f"attention.{name}" for name in _READS_ATTENTION])
            _fold_gain(
                wide, "feed_forward.norm", [f"feed_forward.{name}" for name in _READS_FEED_FORWARD]
            )
            _fold_gain(wide, "attention.output_norm", ["attention.output"])
            _fold_gain(wide, "feed_forward.hidden_norm", ["feed_forward.down"])
        if self.residual is not None:
            readers = [f"attention.{name}" for name in _READS_ATTENTION]
            readers += [f"feed_forward.{name}" for name in _READS_FEED_FORWARD]
            for name in readers:
                if name in wide:
                    wide[name] = wide[name] @ self.residual
            for name in ("attention.output", "feed_forward.down"):
                wide[name] = self.residual.T @ wide[name]
        if self.seed is not None:
            self._rotate_values(number, self.seed, wide)
        return {name: tensor.float() for name, tensor in wide.items()}

    def ends(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Embedding, final norm and head, float32; a head of its own where one was tied and the
        basis is another.
        """
        found = dict(tensors)
        if self.fold:
            gain = found["final_norm"].double()
            found["head"] = in_basis(found.get("head", found["embedding"]), gain, self.residual)
            found["final_norm"] = torch.ones_like(found["final_norm"])
            found["embedding"] = in_basis(found["embedding"], None, self.residual)
        return found

    def _rotate_values(self, number: int, seed: int, wide: dict[str, Tensor]) -> None:
        heads = self.config.key_heads
        value = wide["attention.value"]
        output = wide["attention.output"]
        features = value.shape[0] // heads
        generator = derived_generator(seed, "values", number)
        turns_GCC = torch.stack([random_rotation(features, generator) for _ in range(heads)])
        wide["attention.value"] = (turns_GCC.mT @ value.view(heads, features, -1)).flatten(0, 1)
        bias = wide.get("attention.biases.value")
        if bias is not None:
            wide["attention.biases.value"] = (
                turns_GCC.mT @ bias.view(heads, features, 1)
            ).flatten()
        shared = output.shape[1] // (heads * features)
        columns = output.view(-1, heads, shared, features)
        wide["attention.output"] = torch.einsum("dgsc,gce->dgse", columns, turns_GCC).reshape(
            output.shape
        )


def without_preset(config: DecoderConfig) -> DecoderConfig:
    """The same options, with what the architecture decides written out."""
    return evolve(
        config,
        architecture=None,
        activation=config.feed_forward_activation,
        sub_norms=config.has_sub_norms,
        query_key_norm=config.has_query_key_norm,
        tie_embeddings=config.tied,
    )


def untied(config: DecoderConfig) -> DecoderConfig:
    """The options of the same decoder with a head of its own."""
    # The preset `bitnet` ties the head.
    return evolve(without_preset(config), tie_embeddings=False) if config.tied else config


def in_basis(table_VD: Tensor, gain_D: Tensor | None, residual_DD: Tensor | None) -> Tensor:
    """``E diag(gain) Q``, float32, computed in float64 some rows at a time."""
    made = torch.empty_like(table_VD, dtype=torch.float32)
    for start in range(0, len(table_VD), _ROWS):
        rows = table_VD[start : start + _ROWS].double()
        rows = rows if gain_D is None else rows * gain_D
        made[start : start + _ROWS] = rows if residual_DD is None else rows @ residual_DD
    return made


def _fold_gain(wide: dict[str, Tensor], norm: str, linears: list[str]) -> None:
    """Multiply the columns of what reads a norm with its gain, and make the gain 1."""
    gain = wide.get(norm)
    if gain is None:
        return
    for name in linears:
        if name in wide:
            wide[name] = wide[name] * gain
    wide[norm] = torch.ones_like(gain)
