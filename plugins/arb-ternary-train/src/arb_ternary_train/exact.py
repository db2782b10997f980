"""The option ``exact: true`` of a run: a model whose ternary products are integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Fault, Faulty, Origin, Path
from arb_ternary.config.structure import GIVEN
from arb_ternary.specs import ModelSpec
from arb_ternary_train.config import RunConfig

#: Model options that it decides, and their values.
_OPTIONS = {"activations": "int8", "gradients": "int8"}


def contradictions(data: Any, where: Origin | None) -> list[Fault]:
    """Return faults for options of the model that contradict ``exact: true``.

    Args:
        data: the config of the run as plain values, so that other faults do not hide these.
        where: origin of ``exact``.
    """
    if not isinstance(data, dict) or data.get("exact") is not True:
        return []
    return list(_contradictions(data, (), f" ({where})" if where else ""))


def _contradictions(holder: dict[str, Any], path: Path, place: str) -> Iterator[Fault]:
    """Yield the faults of the model in ``holder``, and of a model that this one is made of."""
    model = holder.get("model")
    path = (*path, "model")
    if not isinstance(model, dict):
        return
    written = model[GIVEN] if isinstance(model.get(GIVEN), list) else model
    for key, wanted in _OPTIONS.items():
        if key in model and key in written and model[key] != wanted:
            text = f"{model[key]!r} contradicts exact: true, which makes it {wanted!r}{place}"
            yield Fault((*path, key), text)
    yield from _contradictions(model, path, place)


def make_exact(config: RunConfig, where: Origin | None) -> RunConfig:
    """Return the config with what ``exact: true`` implies for the options of the model.

    Without ``exact`` it is unchanged. Options that the model's config class lacks are left out.

    Args:
        config: the config as it was read.
        where: origin of ``exact``.

    Raises:
        Faulty: other options of the model do not allow it.
    """
    if not config.exact:
        return config
    try:
        return attrs.evolve(config, model=_exact(config.model))
    except (ValueError, TypeError) as error:
        place = f" ({where})" if where else ""
        raise Faulty(Fault(("model",), f"cannot be exact: {error.args[0]}{place}")) from error


def _exact(model: Choice[ModelSpec]) -> Choice[ModelSpec]:
    """Return ``model``, and a model that it is made of, with the options of an exact run."""
    options = model.options
    if options is None:
        return model
    known = {field.name for field in attrs.fields(type(options))}
    exact: dict[str, Any] = {key: value for key, value in _OPTIONS.items() if key in known}
    if "model" in known and isinstance(options.model, Choice):
        exact["model"] = _exact(options.model)
    return attrs.evolve(model, options=attrs.evolve(options, **exact))
