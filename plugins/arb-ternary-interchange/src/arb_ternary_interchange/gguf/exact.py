"""Which type a weight is written in: one that holds it exactly, or, for floats, one that was asked
for.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.weights import TernaryWeight
from arb_ternary_interchange.gguf.chunks import chunks
from arb_ternary_interchange.gguf.float_blocks import FLOAT_TYPES, holds, largest
from arb_ternary_interchange.gguf.tensor_types import (
    BF16,
    F16,
    F32,
    Q2_0,
    Q4_0,
    Q8_0,
    TQ1_0,
    TQ2_0,
    TensorType,
)
from arb_ternary_interchange.gguf.trit_blocks import EXPONENTS, TERNARY_TYPES

#: Types by the name of the option ``type``.
CHOICES: Final = {
    "f32": F32,
    "f16": F16,
    "bf16": BF16,
    "tq1_0": TQ1_0,
    "tq2_0": TQ2_0,
    "q2_0": Q2_0,
    "q4_0": Q4_0,
}

#: Types by the name of the option ``float_type``.
_ROUNDED: Final = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0}

#: What ``auto`` takes: the first that holds the weight exactly. TQ2_0 is read faster than TQ1_0.
_TERNARY_ORDER: Final = (TQ2_0, Q2_0, Q4_0, F16, F32)
_FLOAT_ORDER: Final = (F16, BF16, F32)


def choose_type(
    name: str, weight: TernaryWeight | Tensor, choice: str, float_choice: str = "auto"
) -> TensorType:
    """The type in which the tensor ``name`` is written.

    Vectors are float32. A float matrix is rounded to ``float_choice``. Where that is ``auto``, it
    is written in the float type that ``choice`` names, and under ``auto`` or a ternary type in the
    smallest that holds it exactly.

    Raises:
        ConfigError: the chosen type does not hold it exactly, or ``float_choice`` cannot round it;
            the message says why, and which types do.
    """
    if isinstance(weight, Tensor) and weight.dim() == 1:
        return F32
    if isinstance(weight, Tensor) and float_choice != "auto":
        return _rounded(name, weight, float_choice)
    order = _FLOAT_ORDER if isinstance(weight, Tensor) else _TERNARY_ORDER
    chosen = CHOICES.get(choice)
    if chosen is None or (isinstance(weight, Tensor) and chosen in TERNARY_TYPES):
        return next(kind for kind in order if _obstacle(weight, kind) is None)
    obstacle = _obstacle(weight, chosen)
    if obstacle is None:
        return chosen
    every = FLOAT_TYPES if isinstance(weight, Tensor) else (*TERNARY_TYPES, *FLOAT_TYPES)
    others = [
        option
        for option, kind in CHOICES.items()
        if kind in every and _obstacle(weight, kind) is None
    ]
    raise ConfigError(
        f"type: {choice} cannot hold {name} exactly: {obstacle}",
        f"Types that hold it: {', '.join(others)}. With `--type auto` every tensor gets the "
        f"smallest that does.",
    )


def _rounded(name: str, weight: Tensor, choice: str) -> TensorType:
    kind = _ROUNDED[choice]
    columns = weight.shape[1]
    size = float(weight.abs().max())
    if columns % kind.block:
        obstacle = f"{kind.name} stores {kind.block} columns together, and it has {columns}"
    elif not size <= largest(kind):
        obstacle = f"{kind.name} ends at {largest(kind):.5g}, and it has {size:.5g}"
    else:
        return kind
    raise ConfigError(
        f"float_type: {choice} cannot hold {name}: {obstacle}",
        "Take `-o float_type=bf16`, or `auto`, which rounds nothing.",
    )


def block_exponents(weight: TernaryWeight, block: int) -> NDArray[np.int8] | None:
    """The exponent of each block of ``block`` columns, int8 ``[N, B]``; None where a block has
    several.

    ``block`` divides the columns.
    """
    columns = weight.trits.shape[1]
    exponent = weight.exponent
    if weight.group_size % block == 0 or weight.group_size >= columns:
        group = torch.arange(0, columns, block) // weight.group_size
        return np.asarray(exponent[:, group])
    if block % weight.group_size:
        return None
    grouped = exponent.reshape(len(exponent), columns // block, block // weight.group_size)
    return np.asarray(grouped[..., 0]) if bool((grouped == grouped[..., :1]).all()) else None


def _obstacle(weight: TernaryWeight | Tensor, kind: TensorType) -> str | None:
    """Why ``kind`` cannot hold ``weight`` exactly; None where it can."""
    if isinstance(weight, Tensor):
        return (
            None
            if all(holds(kind, part) for part in chunks(weight.numpy()))
            else f"its numbers need more than {kind.name}"
        )
    least = int(weight.exponent.min())
    most = int(weight.exponent.max())
    outside = next((e for e in (least, most) if e not in EXPONENTS), None)
    if weight.row_scale is not None and kind is not F32:
        powers = torch.ldexp(torch.ones(weight.exponent.shape), weight.exponent.to(torch.int32))
        products = powers * weight.row_scale.unsqueeze(1)
        dtype = torch.bfloat16 if kind is BF16 else torch.float16
        if not torch.equal(products.to(dtype).float(), products):
            return (
                f"its rows have factors, and {kind.name} rounds their products with powers of two"
            )
    if kind in FLOAT_TYPES:
        return None if kind is not F16 or outside is None else _outside(outside)
    columns = weight.trits.shape[1]
    if columns % kind.block:
        return f"{kind.name} stores {kind.block} columns together, and it has {columns}"
    if outside is not None:
        return _outside(outside)
    if block_exponents(weight, kind.block) is None:
        return (
            f"{kind.name} has one scale for {kind.block} columns, and it has an exponent for "
            f"{weight.group_size}"
        )
    return None


def _outside(exponent: int) -> str:
    return (
        f"it has the exponent {exponent}, and float16 holds 2^{EXPONENTS[0]} to 2^{EXPONENTS[-1]}"
    )
