"""A decoder in another basis: norm gains folded into linears, residual stream and values rotated.

All of it keeps the function. A norm without a gain commutes with a rotation ``Q`` of the residual
stream: with rows as vectors ``x' = x Q``, embeddings become ``E Q``, linears that read the stream
``W Q``, and linears that write to it ``Q^T W``. The values of key head ``g`` are rotated by
``R_g``, and the columns of ``output`` for its query heads are rotated back.

Shapes: ``D`` width, ``G`` key heads, ``H`` query heads, ``C`` features of a value head, ``V``
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.seeding import derived_generator
from arb_ternary_upcycle.rotation import random_rotation

#: Norms of a block, and the linears that read them.
_READERS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention.norm": ("attention.query", "attention.key", "attention.value"),
    "feed_forward.norm": ("feed_forward.gate", "feed_forward.up"),
    "attention.output_norm": ("attention.output",),
    "feed_forward.hidden_norm": ("feed_forward.down",),
}
#: Linears that write to the residual stream; the readers of these norms read it.
_WRITERS: Final = ("attention.output", "feed_forward.down")
_STREAM_NORMS: Final = ("attention.norm", "feed_forward.norm")
#: Rows of embedding and head that are multiplied at a time.
_ROWS: Final = 4096


@frozen(eq=False)
class Basis:
    """A change of basis of a decoder.

    Attributes:
        config: the decoder's options.
        fold: gains go into the linears that read the norms.
        residual: ``Q``, float64 ``[D, D]``; None = the residual stream is not rotated.
        seed: of the rotations of value heads; None = they are not rotated.
    """

    config: DecoderConfig
    fold: bool
    residual: Tensor | None
    seed: int | None

    def block(self, number: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Change the tensors of a block, given by their names inside it; float32."""
        wide = {name: tensor.double() for name, tensor in tensors.items()}
        if self.fold:
            for norm, readers in _READERS.items():
                _fold_gain(wide, norm, readers)
        if self.residual is not None:
            for norm in _STREAM_NORMS:
                for name in _READERS[norm]:
                    if name in wide:
                        wide[name] = wide[name] @ self.residual
            for name in _WRITERS:
                wide[name] = self.residual.T @ wide[name]
        if self.seed is not None:
            self._rotate_values(number, self.seed, wide)
        return {name: tensor.float() for name, tensor in wide.items()}

    def ends(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Change embedding, final norm and head, float32; folding unties the head."""
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
        rotations_GCC = torch.stack([random_rotation(features, generator) for _ in range(heads)])
        rows = value.view(heads, features, -1)
        wide["attention.value"] = (rotations_GCC.mT @ rows).flatten(0, 1)
        bias = wide.get("attention.biases.value")
        if bias is not None:
            rotated = rotations_GCC.mT @ bias.view(heads, features, 1)
            wide["attention.biases.value"] = rotated.flatten()
        shared = output.shape[1] // (heads * features)
        columns = output.view(-1, heads, shared, features)
        rotated = torch.einsum("dgsc,gce->dgse", columns, rotations_GCC)
        wide["attention.output"] = rotated.reshape(output.shape)


def without_preset(config: DecoderConfig) -> DecoderConfig:
    """Return the same options with what the architecture decides written out."""
    return evolve(
        config,
        architecture=None,
        activation=config.feed_forward_activation,
        sub_norms=config.has_sub_norms,
        query_key_norm=config.has_query_key_norm,
        tie_embeddings=config.tied,
    )


def untied(config: DecoderConfig) -> DecoderConfig:
    """Return the options of the same decoder with a head of its own."""
    # The preset `bitnet` ties the head.
    return evolve(without_preset(config), tie_embeddings=False) if config.tied else config


def in_basis(table_VD: Tensor, gain_D: Tensor | None, residual_DD: Tensor | None) -> Tensor:
    """Return ``E diag(gain) Q``, float32, computed in float64 some rows at a time."""
    made = torch.empty_like(table_VD, dtype=torch.float32)
    for start in range(0, len(table_VD), _ROWS):
        rows = table_VD[start : start + _ROWS].double()
        if gain_D is not None:
            rows = rows * gain_D
        if residual_DD is not None:
            rows = rows @ residual_DD
        made[start : start + _ROWS] = rows
    return made


def _fold_gain(wide: dict[str, Tensor], norm: str, readers: tuple[str, ...]) -> None:
    """Multiply the columns of the linears that read a norm by its gain, and set the gain to 1."""
    gain = wide.get(norm)
    if gain is None:
        return
    for name in readers:
        if name in wide:
            wide[name] = wide[name] * gain
    wide[norm] = torch.ones_like(gain)
