"""Whether the run's model can take a teacher's weights."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder


def student_of(model: nn.Module) -> Decoder:
    """Return the run's model.

    Raises:
        ConfigError: it is no decoder.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"model: a {type(model).__name__} cannot take the weights of a decoder",
            "Use `model: {name: decoder}`.",
        )
    return model


def check_student(model: nn.Module, teacher: DecoderConfig) -> None:
    """Check the options of the run's model; see :func:`check_options`."""
    check_options(student_of(model).config, teacher)


def check_options(student: DecoderConfig, teacher: DecoderConfig) -> None:
    """Check that a student has the shapes and the function of a teacher, except for attention.

    Raises:
        ConfigError: options differ; each is named with the value that it needs.
    """
    wanted = _shape(teacher)
    found = _shape(student)
    wrong = [name for name in wanted if not _same(wanted[name], found[name])]
    if student.tied and not teacher.tied:
        wrong.append("tie_embeddings")
    if student.max_length > teacher.max_length:
        wrong.append("max_length")
    if not wrong:
        return
    wanted |= {"tie_embeddings": False, "max_length": teacher.max_length}
    found |= {"tie_embeddings": student.tied, "max_length": student.max_length}
    lines = [
        f"{name}: {_shown(found[name])}, the teacher's is {_shown(wanted[name])}" for name in wrong
    ]
    settings = ", ".join(f"{name}: {_shown(wanted[name])}" for name in wrong)
    raise ConfigError(
        f"model: it cannot take the teacher's weights because {len(wrong)} of its options "
        "differ:\n  " + "\n  ".join(lines),
        f"Set under `model`: {settings}",
    )


def _shape(config: DecoderConfig) -> dict[str, Any]:
    return {
        "width": config.width,
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.key_heads,
        "head_dim": config.width // config.heads if config.head_dim is None else config.head_dim,
        "feed_forward": config.hidden,
        "activation": config.feed_forward_activation,
        "sub_norms": config.has_sub_norms,
        "query_key_norm": config.has_query_key_norm,
        "query_key_value_bias": config.query_key_value_bias,
        "causal": config.causal,
        "sliding_window": config.sliding_window,
        "experts": config.experts,
        "rotary_base": config.rotary_base,
        "rotary_factors": config.rotary_factors,
        "rotary_scaling": config.rotary_scaling,
        "norm_eps": config.norm_eps,
    }


def _same(one: Any, other: Any) -> bool:
    """Compare options; numbers may differ by the rounding to float32 in files."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, float):
        return f"{value:.9g}"
    return "null" if value is None else str(value).lower()
