"""Changes of optimizer choices at any depth, in parts and inside wrappers. Nothing is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from arb_ternary.config.choice import Choice, OptimizerChoice
from arb_ternary.config.fields import config_fields, to_plain
from arb_ternary.config.structure import options_class
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import OptimizerSpec

#: A function from an optimizer that contains no other one to its replacement.
LeafChange = Callable[[OptimizerChoice], OptimizerChoice]


def is_float(leaf: OptimizerChoice) -> bool:
    """Return whether it trains float parameters and nothing else."""
    return leaf.spec.accepts == {"float"}


def is_ternary(leaf: OptimizerChoice) -> bool:
    """Return whether it trains parts that learn by votes and nothing else."""
    return leaf.spec.accepts == {"ternary"}


def chosen(name: str, **options: Any) -> OptimizerChoice:
    """Return the optimizer ``name`` with these options, as a config would have it.

    Raises:
        ArbError: there is no such optimizer, or it is not installed.
        ValueError: an option is outside its range.
    """
    spec = manager().registry.get("optimizer", name).spec
    assert isinstance(spec, OptimizerSpec)
    cls = options_class(spec)
    return OptimizerChoice(name, None if cls is None else cls(**options), frozenset(options), spec)


def with_options(choice: OptimizerChoice, **options: Any) -> OptimizerChoice:
    """Return ``choice`` with other values of some options; itself if it has them already."""
    changed = {
        name: value
        for name, value in options.items()
        if not _same(getattr(choice.options, name), value)
    }
    if not changed:
        return choice
    fields = config_fields(type(choice.options))
    given = choice.given | {str(field.alias) for field in fields if field.name in changed}
    return attrs.evolve(choice, options=attrs.evolve(choice.options, **changed), given=given)


def map_leaves(choice: OptimizerChoice, change: LeafChange) -> OptimizerChoice:
    """Return ``choice`` with ``change`` applied to every optimizer that contains no other one."""
    if not _inside(choice):
        return change(choice)
    return _map_inside(choice, lambda inner: map_leaves(inner, change))


def leaves_of(choice: OptimizerChoice) -> Iterator[OptimizerChoice]:
    """Yield every optimizer in ``choice`` that contains no other one."""
    found: list[OptimizerChoice] = []

    def note(leaf: OptimizerChoice) -> OptimizerChoice:
        found.append(leaf)
        return leaf

    map_leaves(choice, note)
    return iter(found)


def wrap_floats(choice: OptimizerChoice, name: str, **options: Any) -> OptimizerChoice:
    """Return ``choice`` with every optimizer of only float parameters inside the wrapper ``name``.

    An optimizer that is in such a wrapper already is left alone.

    Args:
        choice: an optimizer.
        name: a wrapper; its option ``inner`` is the wrapped optimizer.
        options: the wrapper's other options.
    """
    if choice.name == name:
        return choice
    if _inside(choice):
        return _map_inside(choice, lambda inner: wrap_floats(inner, name, **options))
    return chosen(name, inner=choice, **options) if is_float(choice) else choice


def _map_inside(choice: OptimizerChoice, change: LeafChange) -> OptimizerChoice:
    """Return ``choice`` with ``change`` applied to every optimizer that it directly contains."""
    changed = {name: _each(value, change) for name, value in _inside(choice).items()}
    return with_options(choice, **changed)


def _inside(choice: OptimizerChoice) -> dict[str, Any]:
    """Return the options of ``choice`` that contain optimizers."""
    if choice.options is None:
        return {}
    options = {
        field.name: getattr(choice.options, field.name)
        for field in config_fields(type(choice.options))
    }
    return {name: value for name, value in options.items() if _contains(value)}


def _contains(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_contains, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_contains, value))
    return isinstance(value, Choice) and isinstance(value.spec, OptimizerSpec)


def _each(value: Any, change: LeafChange) -> Any:
    """Return ``value`` with ``change`` applied to every optimizer that it directly contains."""
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each(item, change) for item in value)
    return change(value) if _contains(value) else value


def _same(one: Any, other: Any) -> bool:
    return bool(to_plain(one) == to_plain(other))
