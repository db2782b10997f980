"""Whether the run's model can take a teacher's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

#: Options of the attention, which the phase ``surgery`` changes.
ATTENTION: Final = (
    "attention",
    "sem_dim",
    "geo_dim",
    "rotary_dim",
    "attention_gate",
    "null_key_value",
    "tie_query_key",
)


def student_of(model: nn.Module) -> Decoder:
    """Return the run's model.

    Raises:
        ConfigError: it is not a decoder.
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


#: Options that decide shapes and function, and the attribute that has their value.
_SHAPE: Final[Mapping[str, str]] = {
    "width": "width",
    "layers": "layers",
    "heads": "heads",
    "kv_heads": "key_heads",
    "head_dim": "value_features",
    "feed_forward": "hidden",
    "activation": "feed_forward_activation",
    "sub_norms": "has_sub_norms",
    "query_key_norm": "has_query_key_norm",
    "query_key_value_bias": "query_key_value_bias",
    "causal": "causal",
    "sliding_window": "sliding_window",
    "experts": "experts",
    "rotary_base": "rotary_base",
    "rotary_factors": "rotary_factors",
    "rotary_scaling": "rotary_scaling",
    "norm_eps": "norm_eps",
}


def _shape(config: DecoderConfig) -> dict[str, Any]:
    return {option: getattr(config, attribute) for option, attribute in _SHAPE.items()}


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
