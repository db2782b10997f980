"""The ``model:`` section of a teacher's student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from arb_ternary.config.errors import Fault, Faulty
from arb_ternary.config.fields import config_fields, default_of, to_plain
from arb_ternary.errors import ConfigError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.folding import untied, without_preset
from arb_ternary_upcycle.student import ATTENTION, check_options

#: How a student's weights are stored by default. One exponent per row loses least in rounding and
#: is what other programs read; embedding, head and gains stay float, trained by AdamW.
_STORAGE: Final[Mapping[str, Any]] = {
    "group_size": "row",
    "scale_rule": "frozen",
    "float_parts": ["embedding", "head", "norms"],
}
#: Options that say how a decoder's weights are stored and trained, not what it computes.
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
    """Return the options of a student with the shapes of ``teacher`` and ``own`` options.

    Raises:
        Faulty: ``own`` options contradict each other or the teacher's shapes; the paths are the
            options' names.
    """
    own = dict(own)
    name = own.pop("name", "decoder")
    if name != "decoder":
        raise Faulty(Fault(("name",), f"a student is a decoder, not {name!r}"))
    shaped = untied(teacher)  # folding gives the head weights of its own
    decoupled = own.get("attention") == "decoupled"
    if decoupled:
        shaped = without_preset(shaped)
    options = {**_computing_options(shaped), **_STORAGE, **own}
    if "norms" not in options["float_parts"] and "inner_gains" not in own:
        options.pop("inner_gains", None)
    if decoupled and own.get("rotary_dim") is None:
        options["rotary_dim"] = shaped.value_features  # kept planes rotate as the teacher's do
    try:
        check_options(DecoderConfig(**options), shaped)
    except (ValueError, TypeError) as error:
        raise Faulty(Fault((), str(error.args[0]))) from error
    except ConfigError as error:
        raise Faulty(Fault((), error.what, error.hint)) from error
    return {"name": "decoder", **options}


def assumed_section(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return :func:`student_section` of a teacher that is not there, with the sizes in ``own``.

    Sizes that ``own`` leaves out are the decoder's defaults.

    Raises:
        Faulty: see :func:`student_section`.
    """
    shape = {key: value for key, value in own.items() if key not in {"name", *ATTENTION}}
    try:
        teacher = DecoderConfig(**shape)
    except (ValueError, TypeError) as error:
        raise Faulty(Fault((), str(error.args[0]))) from error
    return student_section(teacher, own)


def decoupled_options(
    teacher: DecoderConfig, sem_dim: int | None, geo_dim: int | None
) -> dict[str, Any]:
    """Return options for decoupled attention; sizes that are None are half of a head's features.

    Raises:
        ConfigError: the teacher's attention cannot be split so.
    """
    head = teacher.value_features
    if teacher.has_query_key_norm:
        raise ConfigError(
            "--attention dba: the teacher normalises queries and keys; decoupled attention has no "
            "such norms",
            "Use --attention keep.",
        )
    half = max(2, head // 4 * 2)
    sem = max(1, head // 2) if sem_dim is None else sem_dim
    geo = half if geo_dim is None else geo_dim
    if geo % 2 or not 0 < geo <= head:
        raise ConfigError(
            f"--geo-dim {geo}: must be even and at most {head}, the features of a head of the "
            "teacher",
            f"For example: --geo-dim {half}",
        )
    return {"attention": "decoupled", "sem_dim": sem, "geo_dim": geo}


def _computing_options(config: DecoderConfig) -> dict[str, Any]:
    """Return the options that say what a decoder computes and are not at their defaults."""
    options = {}
    for field in config_fields(DecoderConfig):
        key = str(field.alias)
        value = to_plain(getattr(config, field.name))
        if key not in _OF_WEIGHTS and value != default_of(field):
            options[key] = value
    return options
