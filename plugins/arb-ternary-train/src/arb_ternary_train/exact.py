"""What ``exact: true`` of a run implies: a model whose ternary products are integers."""

from __future__ import annotations

from typing import Any

import attrs

from arb_ternary.config.errors import Fault, Faulty, Origin
from arb_ternary.config.structure import GIVEN
from arb_ternary_train.config import RunConfig

__all__ = ["contradictions", "make_exact"]

#: Model options that it decides, and what it makes them.
_OPTIONS = {"activations": "int8", "gradients": "int8"}


def contradictions(data: Any, where: Origin | None) -> list[Fault]:
    """Options of the model that the user gave and that contradict ``exact: true``.

    Args:
        data: the run as plain values, so that other faults of the config do not hide these.
        where: the origin of ``exact``.
    """
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(model, dict) or data.get("exact") is not True:
        return []
    written = model[GIVEN] if isinstance(model.get(GIVEN), list) else model
    place = f" ({where})" if where else ""
    return [
        Fault(("model", key), f"{model[key]!r} contradicts exact: true, which makes it {wanted!r}{place}")
        for key, wanted in _OPTIONS.items()
        if key in model and key in written and model[key] != wanted
    ]


def make_exact(config: RunConfig, where: Origin | None) -> RunConfig:
    """The config with what ``exact: true`` implies for the model's options; unchanged without it.

    A model whose config class lacks ``activations`` or ``gradients`` keeps what it does.

    Args:
        config: as it was read.
        where: the origin of ``exact``.

    Raises:
        Faulty: the model's other options do not allow it.
    """
    options = config.model.options
    if not config.exact or options is None:
        return config
    known = {field.name for field in attrs.fields(type(options))}
    try:
        options = attrs.evolve(options, **{key: value for key, value in _OPTIONS.items() if key in known})
    except (ValueError, TypeError) as error:
        place = f" ({where})" if where else ""
        raise Faulty(Fault(("model",), f"cannot be exact: {error.args[0]}{place}")) from error
    return attrs.evolve(config, model=attrs.evolve(config.model, options=options))
