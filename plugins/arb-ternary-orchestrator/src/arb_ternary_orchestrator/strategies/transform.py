"""Choices of optimizers, changed where they stand: at any depth, in parts and inside wrappers.
Nothing is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from arb_ternary.config.choice import Choice, OptimizerChoice
from arb_ternary.config.fields import config_fields, to_plain
from arb_ternary.config.structure import options_class
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import OptimizerSpec

#: From an optimizer that holds no other one to what is to stand in its place.
LeafChange = Callable[[OptimizerChoice], OptimizerChoice]

_VOTED: Final = frozenset({"ternary", "stored"})


def is_float(leaf: OptimizerChoice) -> bool:
    """Whether it trains float parameters and nothing else."""
    return leaf.spec.accepts == {"float"}


def is_ternary(leaf: OptimizerChoice) -> bool:
    """Whether it trains what learns by votes and nothing else."""
    return leaf.spec.accepts <= _VOTED


def chosen(name: str, **options: Any) -> OptimizerChoice:
    """The optimizer ``name`` with these options, as a config would have it.

    Raises:
        ArbError: there is none, or it is not installed.
        ValueError: an option is outside its range.
    """
    spec = manager().registry.get("optimizer", name).spec
    assert isinstance(spec, OptimizerSpec)
    cls = options_class(spec)
    return OptimizerChoice(name, None if cls is None else cls(**options), frozenset(options), spec)


def with_options(choice: OptimizerChoice, **options: Any) -> OptimizerChoice:
    """``choice`` with other values of some of its options; itself where it has them already."""
    changed = {
        name: value
        for name, value in options.items()
        if not _same(getattr(choice.options, name), value)
    }
    if not changed:
        return choice
    given = choice.given | {
        str(f.alias) for f in config_fields(type(choice.options)) if f.name in changed
    }
    return attrs.evolve(choice, options=attrs.evolve(choice.options, **changed), given=given)


def map_leaves(choice: OptimizerChoice, change: LeafChange) -> OptimizerChoice:
    """``choice`` with ``change`` made of every optimizer in it that holds no other one."""
    inside = _inside(choice)
    if not inside:
        return change(choice)
    return with_options(choice, **{name: _mapped(value, change) for name, value in inside.items()})


def leaves_of(choice: OptimizerChoice) -> Iterator[OptimizerChoice]:
    """Every optimizer in ``choice`` that holds no other one."""
    found: list[OptimizerChoice] = []

    def note(leaf: OptimizerChoice) -> OptimizerChoice:
        found.append(leaf)
        return leaf

    map_leaves(choice, note)
    return iter(found)


def wrap_floats(choice: OptimizerChoice, name: str, **options: Any) -> OptimizerChoice:
    """``choice`` with every optimizer of float parameters alone inside the wrapper ``name``; never
    in two of them.

    Args:
        choice: of an optimizer.
        name: a wrapper, whose option ``inner`` is what it holds.
        options: its others.
    """
    if choice.name == name:
        return choice
    inside = _inside(choice)
    if not inside:
        return chosen(name, inner=choice, **options) if is_float(choice) else choice
    wrap: LeafChange = lambda held: wrap_floats(held, name, **options)  # noqa: E731
    return with_options(choice, **{key: _each(value, wrap) for key, value in inside.items()})


def _inside(choice: OptimizerChoice) -> dict[str, Any]:
    """Options of ``choice`` that hold optimizers."""
    if choice.options is None:
        return {}
    options = {
        field.name: getattr(choice.options, field.name)
        for field in config_fields(type(choice.options))
    }
    return {name: value for name, value in options.items() if _holds(value)}


def _holds(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds, value))
    return isinstance(value, Choice) and isinstance(value.spec, OptimizerSpec)


def _mapped(value: Any, change: LeafChange) -> Any:
    return _each(value, lambda held: map_leaves(held, change))


def _each(value: Any, change: LeafChange) -> Any:
    """``value`` with ``change`` made of every optimizer that it holds directly."""
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each(item, change) for item in value)
    return change(value) if _holds(value) else value


def _same(one: Any, other: Any) -> bool:
    return bool(to_plain(one) == to_plain(other))
