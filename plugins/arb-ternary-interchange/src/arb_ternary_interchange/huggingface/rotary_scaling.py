"""Rotary scaling, read from ``config.json`` and written into it.

A plane ``p`` turns by ``base**(-2 p / C) / f_p`` per position. With ``linear`` all planes have one
``f``, which is the decoder's ``rotary_scaling``; ``llama3`` derives ``f_p`` from four numbers;
``longrope`` lists them, so that it can express any ``rotary_factors``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from arb_ternary.errors import DataError
from arb_ternary_interchange.huggingface.json_file import Values

_TYPES: Final = ("default", "linear", "llama3", "longrope")
_LARGEST: Final = 1e9


def read_rotary(config: Values, head_dim: int, default_base: float) -> dict[str, Any]:
    """Return the decoder's ``rotary_base``, ``rotary_scaling`` and ``rotary_factors``, as far as
    they are not their defaults.

    Raises:
        DataError: the scaling is of a type that the decoder does not compute.
    """
    # As transformers does: 'rope_scaling' takes the place of 'rope_parameters', if it has any key.
    older = config.within("rope_scaling")
    newer = config.within("rope_parameters")
    scaling = Values(config.where, {})
    if older is not None and older.found:
        scaling = older
    elif newer is not None:
        scaling = newer
    base = config.number("rope_theta", 1.0, _LARGEST, default_base)
    base = scaling.number("rope_theta", 1.0, _LARGEST, base)
    part = config.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    part = scaling.number("partial_rotary_factor", 0.0, 1.0, part)
    if part != 1.0:
        raise DataError(
            f"{config.where}: 'partial_rotary_factor' is {part:g}: the decoder rotates whole "
            f"heads, 1.0"
        )
    # Only 'rope_type' counts if both are there.
    has_older_type = "type" in scaling
    kind = scaling.word(
        "type" if has_older_type and "rope_type" not in scaling else "rope_type",
        _TYPES,
        "default",
        "The decoder computes these; others change with the length of a sequence, or scale "
        "attention too.",
    )
    options: dict[str, Any] = {"rotary_base": base}
    if kind == "linear":
        options["rotary_scaling"] = scaling.number("factor", 1e-3, _LARGEST)
    elif kind == "llama3":
        options["rotary_factors"] = llama3_factors(
            head_dim,
            base,
            factor=scaling.number("factor", 1e-3, _LARGEST),
            low=scaling.number("low_freq_factor", 1e-6, _LARGEST),
            high=scaling.number("high_freq_factor", 1e-6, _LARGEST),
            length=scaling.number("original_max_position_embeddings", 1, _LARGEST),
        )
    elif kind == "longrope":
        options["rotary_factors"] = _listed_factors(scaling, head_dim)
    return options


def written_rotary(base: float, scaling: float, factors: Sequence[float] | None) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the decoder's three options, as every version of
    transformers reads them.
    """
    written: dict[str, Any] = {"rope_theta": base, "rope_scaling": None}
    if factors is not None:
        listed = [scaling * factor for factor in factors]
        written["rope_scaling"] = {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": listed,
            "long_factor": listed,
        }
    elif scaling != 1.0:
        written["rope_scaling"] = {"rope_type": "linear", "factor": scaling}
    return written


def llama3_factors(
    head_dim: int, base: float, *, factor: float, low: float, high: float, length: float
) -> tuple[float, ...]:
    """Return the factors of Llama 3.1, as transformers computes its frequencies.

    Planes whose wavelength is below ``length / high`` positions keep their speed. Those above
    ``length / low`` turn ``factor`` times slower. Between them the speed is interpolated linearly
    in ``length / wavelength``.
    """
    factors = []
    for plane in range(head_dim // 2):
        turns = length / (2 * math.pi * base ** (2 * plane / head_dim))  # within ``length``
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(factor)
        else:
            smooth = (turns - low) / (high - low) if high != low else 1.0
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(factors)


def _listed_factors(scaling: Values, head_dim: int) -> tuple[float, ...]:
    short = scaling.numbers("short_factor", head_dim // 2, 1e-6, _LARGEST)
    if scaling.numbers("long_factor", head_dim // 2, 1e-6, _LARGEST) != short:
        raise scaling.wrong(
            "long_factor", "as 'short_factor': the decoder's factors do not depend on the length"
        )
    if scaling.number("attention_factor", 0.0, _LARGEST, 0.0) != 1.0:
        raise scaling.wrong("attention_factor", "1.0: the decoder does not scale attention")
    return short
