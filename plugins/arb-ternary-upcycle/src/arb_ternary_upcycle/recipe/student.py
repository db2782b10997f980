"""The ``model:`` section of a teacher's student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.fields import config_fields, default_of, to_plain
from arb_ternary.errors import ConfigError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.folding import untied, without_preset
from arb_ternary_upcycle.student import check_options

# : How a student's weights are held where nothing else is asked for. One exponent a row is what
# rounding loses least by : and what other programs read; embedding, head and gains stay float, and
# are what the rate of AdamW is for.
_HELD: Final[Mapping[str, Any]] = {
    "group_size": "row",
    "scale_rule": "frozen",
    "float_parts": ["embedding", "head", "norms"],
}
#: What says how a decoder's weights are held, and not what it computes.
_OF_WEIGHTS: Final = frozenset(
    {
        "float_parts",
        "activations",
        "gradients",
        "group_size",
        "scale_rule",
        "embedding_scale_rule",
        "vote_bits",
    }
)


def student_section(teacher: DecoderConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a student with the shapes of ``teacher``, a float decoder, and with its
    ``own`` options.

    Raises:
        Faulty: ``own`` options contradict each other or the teacher's shapes; the paths are the
            options' names.
    """
    if own.get("name", "decoder") != "decoder":
        raise Faulty(Fault(("name",), f"a student is a decoder, not {own['name']!r}"))
    decoupled = own.get("attention") == "decoupled"
    shaped = untied(teacher)  # folding gives the head weights of its own
    if decoupled:
        shaped = without_preset(shaped)
    section = {
        "name": "decoder",
        **_written(shaped),
        **_HELD,
        **{k: v for k, v in own.items() if k != "name"},
    }
    if "norms" not in section["float_parts"] and "inner_gains" not in own:
        section.pop("inner_gains", None)
    if decoupled and own.get("rotary_dim") is None:
        section["rotary_dim"] = shaped.value_features  # kept planes turn as the teacher's do
    try:
        options = {key: value for key, value in section.items() if key != "name"}
        check_options(DecoderConfig(**options), shaped)
    except (ValueError, TypeError) as error:
        raise Faulty(Fault((), str(error.args[0]))) from error
    except ConfigError as error:
        raise Faulty(Fault((), error.what, error.hint)) from error
    return section


def decoupled_options(
    teacher: DecoderConfig, sem_dim: int | None, geo_dim: int | None
) -> dict[str, Any]:
    """The options of a student with decoupled attention; null sizes are half of a head's features.

    Raises:
        ConfigError: the teacher's attention cannot be split so.
    """
    head = teacher.value_features
    if teacher.has_query_key_norm:
        raise ConfigError(
            "--attention dba: the teacher normalises queries and keys, and decoupled attention has "
            "no such norms",
            "Use --attention keep.",
        )
    sem = max(1, head // 2) if sem_dim is None else sem_dim
    geo = max(2, head // 4 * 2) if geo_dim is None else geo_dim
    if geo % 2 or not 0 < geo <= head:
        raise ConfigError(
            f"--geo-dim {geo}: must be even and at most {head}, the features of a head of the "
            f"teacher",
            f"For example: --geo-dim {max(2, head // 4 * 2)}",
        )
    return {"attention": "decoupled", "sem_dim": sem, "geo_dim": geo}


def _written(config: DecoderConfig) -> dict[str, Any]:
    """Options that are not at their defaults, as a config file has them."""
    return {
        str(field.alias): value
        for field in config_fields(DecoderConfig)
        if str(field.alias) not in _OF_WEIGHTS
        and (value := to_plain(getattr(config, field.name))) != default_of(field)
    }
