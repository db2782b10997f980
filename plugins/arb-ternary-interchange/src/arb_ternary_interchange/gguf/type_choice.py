"""Choose the type in which a weight is written: one that holds it exactly or, for floats, one that
the user has named.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.weights import TernaryWeight
from arb_ternary_interchange.gguf.blocks import EXPONENTS, chunks, holds, largest
from arb_ternary_interchange.gguf.tensor_types import (
    BF16,
    F16,
    F32,
    FLOAT_TYPES,
    Q2_0,
    Q4_0,
    Q8_0,
    TERNARY_TYPES,
    TQ1_0,
    TQ2_0,
    TensorType,
)
from arb_ternary_interchange.options import GgufConfig

#: Types by their names in the options.
_BY_NAME: Final = {
    "f32": F32,
    "f16": F16,
    "bf16": BF16,
    "tq1_0": TQ1_0,
    "tq2_0": TQ2_0,
    "q2_0": Q2_0,
    "q4_0": Q4_0,
    "q8_0": Q8_0,
}

#: With ``auto``, the first of these that holds the weight exactly. TQ2_0 is read faster than TQ1_0.
_TERNARY_ORDER: Final = (TQ2_0, Q2_0, Q4_0, F16, F32)
_FLOAT_ORDER: Final = (F16, BF16, F32)


def choose_type(name: str, weight: TernaryWeight | Tensor, config: GgufConfig) -> TensorType:
    """Return the type in which the tensor ``name`` is written.

    Vectors are float32. A float matrix is rounded to ``config.float_type``. If that is ``auto``, it
    is written in the float type that ``config.type`` names; if that is ``auto`` or a ternary type,
    in the smallest that holds it exactly.

    Raises:
        ConfigError: the chosen type does not hold it exactly, or ``config.float_type`` cannot round
            it; the message says why, and which types do.
    """
    is_float = isinstance(weight, Tensor)
    if isinstance(weight, Tensor):
        if weight.dim() == 1:
            return F32
        if config.float_type != "auto":
            return _rounded(name, weight, config.float_type)
    chosen = _BY_NAME.get(config.type)
    if chosen is None or (is_float and chosen in TERNARY_TYPES):
        order = _FLOAT_ORDER if is_float else _TERNARY_ORDER
        return next(kind for kind in order if _obstacle(weight, kind) is None)
    obstacle = _obstacle(weight, chosen)
    if obstacle is None:
        return chosen
    candidates = FLOAT_TYPES if is_float else (*FLOAT_TYPES, *TERNARY_TYPES)
    fitting = [kind for kind in candidates if _obstacle(weight, kind) is None]
    names = [option for option, kind in _BY_NAME.items() if kind in fitting]
    raise ConfigError(
        f"type: {config.type} cannot hold {name} exactly: {obstacle}",
        f"Types that hold it: {', '.join(names)}. With `--type auto` every tensor gets the "
        f"smallest that does.",
    )


def _rounded(name: str, weight: Tensor, choice: str) -> TensorType:
    """Return the type to which a float matrix is rounded."""
    kind = _BY_NAME[choice]
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
    """Return the exponent of each block of ``block`` columns, int8 ``[N, B]``; None if a block has
    several. ``block`` divides the columns.
    """
    columns = weight.trits.shape[1]
    exponent = weight.exponent
    if weight.group_size % block == 0 or weight.group_size >= columns:
        group = torch.arange(0, columns, block) // weight.group_size
        return np.asarray(exponent[:, group])
    if block % weight.group_size:
        return None
    grouped = exponent.reshape(len(exponent), columns // block, block // weight.group_size)
    if not bool((grouped == grouped[..., :1]).all()):
        return None
    return np.asarray(grouped[..., 0])


def _obstacle(weight: TernaryWeight | Tensor, kind: TensorType) -> str | None:
    """Return why ``kind`` cannot hold ``weight`` exactly; None if it can."""
    if isinstance(weight, TernaryWeight):
        return _ternary_obstacle(weight, kind)
    if all(holds(kind, part) for part in chunks(weight.numpy())):
        return None
    return f"its numbers need more than {kind.name}"


def _ternary_obstacle(weight: TernaryWeight, kind: TensorType) -> str | None:
    if weight.row_scale is not None and kind is not F32:
        powers = torch.ldexp(torch.ones(weight.exponent.shape), weight.exponent.to(torch.int32))
        products = powers * weight.row_scale.unsqueeze(1)
        dtype = torch.bfloat16 if kind is BF16 else torch.float16
        if not torch.equal(products.to(dtype).float(), products):
            return (
                f"its rows have factors, and {kind.name} rounds their products with powers of two"
            )
    if kind is F32 or kind is BF16:
        return None
    columns = weight.trits.shape[1]
    if columns % kind.block:
        return f"{kind.name} stores {kind.block} columns together, and it has {columns}"
    for exponent in (int(weight.exponent.min()), int(weight.exponent.max())):
        if exponent not in EXPONENTS:
            return (
                f"it has the exponent {exponent}, and float16 holds 2^{EXPONENTS[0]} to "
                f"2^{EXPONENTS[-1]}"
            )
    if kind in TERNARY_TYPES and block_exponents(weight, kind.block) is None:
        return (
            f"{kind.name} has one scale for {kind.block} columns, and it has an exponent for "
            f"{weight.group_size}"
        )
    return None
